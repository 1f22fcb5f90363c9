// SPDX-License-Identifier: Apache-2.0
//! The CUDA backend: launches the kernels of `cuda/` through the driver API, which is loaded at
//! run time.
//!
//! Each operation has one file, with two functions over the parameter struct of the C ABI:
//! `workspace_bytes`, and `launch`, which checks what the host can see, fills the kernels'
//! parameters and enqueues. Once a [`Device`] is open nothing allocates, waits or reads device
//! memory, so every launch can be captured in a CUDA graph.

pub(crate) mod commit;
mod device;
mod driver;
pub(crate) mod gdn_verify;
mod launch;
#[rustfmt::skip] // generated
mod params;
pub(crate) mod tree_accept;
pub(crate) mod tree_attention;
pub(crate) mod tree_build;
pub(crate) mod tree_gather;
pub(crate) mod tree_mask;
mod view;

pub(crate) use device::{Device, Loader};
pub(crate) use launch::{Kernel, Launch};
pub(crate) use view::{View, tree_params};

use crate::error::Result;
use device::Modules;

/// The compiled kernels.
mod fatbins {
    include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));
}
pub(crate) use fatbins::ARCHS;

/// The kernels of every operation, loaded into one device.
pub(crate) struct Kernels {
    pub(crate) tree_build: tree_build::Kernels,
    pub(crate) tree_mask: tree_mask::Kernels,
    pub(crate) tree_gather: tree_gather::Kernels,
    pub(crate) tree_attention: tree_attention::Kernels,
    pub(crate) gdn_verify: gdn_verify::Kernels,
    pub(crate) tree_accept: tree_accept::Kernels,
    pub(crate) commit: commit::Kernels,
}

impl Kernels {
    fn load(modules: &Modules<'_>) -> Result<Self> {
        Ok(Self {
            tree_build: tree_build::Kernels::load(&modules.load("tree_build")?)?,
            tree_mask: tree_mask::Kernels::load(&modules.load("tree_mask")?)?,
            tree_gather: tree_gather::Kernels::load(&modules.load("tree_gather")?)?,
            tree_attention: tree_attention::Kernels::load(
                &modules.load("tree_attention")?,
                modules.load_for("tree_attention_sm90", (9, 0))?.as_ref(),
            )?,
            gdn_verify: gdn_verify::Kernels::load(&modules.load("gdn_verify")?)?,
            tree_accept: tree_accept::Kernels::load(&modules.load("tree_accept")?)?,
            commit: commit::Kernels::load(&modules.load("commit")?)?,
        })
    }
}
