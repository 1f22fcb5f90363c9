// SPDX-License-Identifier: Apache-2.0
#![no_main]
#[path = "../ops.rs"]
mod ops;

libfuzzer_sys::fuzz_target!(|data: &[u8]| ops::run("tree_build", data));
