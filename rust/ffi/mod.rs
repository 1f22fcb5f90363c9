// SPDX-License-Identifier: Apache-2.0
//! The C ABI. `include/ddtree.h` is generated from this module; its conventions are written in
//! `include/README.md`.
//!
//! Each operation has one file: it reads the parameter struct, checks every pointer, shape and
//! value, calls the safe function of the same name, and only then writes outputs.

// the contract of every pointer is written once, at the top of the header and in include/README.md
#![allow(clippy::missing_safety_doc)]
// the CPU has no streams
#![cfg_attr(not(feature = "cuda"), allow(unused_variables))]

mod commit;
mod context;
mod gdn_verify;
mod guard;
pub(crate) mod ptr;
mod status;
pub(crate) mod tree;
mod tree_accept;
mod tree_attention;
pub(crate) mod tree_build;
pub(crate) mod tree_gather;
pub(crate) mod tree_mask;
mod types;
mod version;

pub use commit::*;
pub use context::*;
pub use gdn_verify::*;
pub use status::*;
pub use tree_accept::*;
pub use tree_attention::*;
pub use tree_build::*;
pub use tree_gather::*;
pub use tree_mask::*;
pub use types::*;
pub use version::*;
