// SPDX-License-Identifier: Apache-2.0
//! References that share no code with the library, and caller memory for C ABI tests.
#![allow(dead_code)]

pub mod buffers;
pub mod gdn;
pub mod numbers;
pub mod reference;
pub mod tensor;
pub mod trees;

use proptest::prelude::ProptestConfig;

/// How often a property is tried; hardly at all under Miri, which takes a thousand times as long.
pub fn cases(cases: u32) -> ProptestConfig {
    let cases = if cfg!(miri) { 2 } else { cases };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}
