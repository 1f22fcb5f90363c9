// SPDX-License-Identifier: Apache-2.0
//! PLACEHOLDER

use std::ffi::c_void;

use super::{Device, Loader};
use crate::error::{Result, bail};
use crate::ffi::ddt_tree_accept_params;

/// The kernels of this operation.
pub(crate) struct Kernels;

impl Kernels {
    pub(super) fn load(_loader: &Loader<'_>) -> Result<Self> {
        Ok(Self)
    }
}

pub(crate) unsafe fn workspace_bytes(_device: &Device, _params: &ddt_tree_accept_params) -> Result<usize> {
    Ok(0)
}

pub(crate) unsafe fn launch(_device: &Device, _params: &ddt_tree_accept_params, _stream: *mut c_void) -> Result<()> {
    bail!(Unsupported, "placeholder")
}
