// SPDX-License-Identifier: Apache-2.0
//! Replays the fuzzer's corpus, and random inputs, without a fuzzer.

#[path = "fuzz/ops.rs"]
mod ops;

use std::path::Path;

#[test]
fn corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/ops");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).expect("tests/fuzz/corpus/ops") {
        let path = entry.expect("a file").path();
        println!("{}", path.display());
        ops::run(&std::fs::read(&path).expect("readable"));
        count += 1;
    }
    assert!(count > 100, "{count} inputs");
}

#[test]
fn random_bytes() {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    for length in (0..600).cycle().take(6_000) {
        let data: Vec<u8> = (0..length)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // small numbers come far more often than hostile ones, or nothing would ever succeed
                if state % 8 == 0 { (state >> 32) as u8 } else { (state >> 32) as u8 % 200 }
            })
            .collect();
        ops::run(&data);
    }
}
