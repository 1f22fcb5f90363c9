// SPDX-License-Identifier: Apache-2.0
//! References that share no code with the library, and caller memory for C ABI tests.
#![allow(dead_code)]

pub mod buffers;
pub mod gdn;
pub mod numbers;
pub mod reference;
pub mod tensor;
pub mod trees;
