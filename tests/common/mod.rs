// SPDX-License-Identifier: Apache-2.0
//! References that share no code with the library, and caller memory for C ABI tests.
#![allow(dead_code)]

pub mod buffers;
pub mod reference;
