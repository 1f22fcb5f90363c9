// SPDX-License-Identifier: Apache-2.0
//! Replays the fuzzer's corpus, and random inputs, without a fuzzer.

#[path = "fuzz/ops.rs"]
mod ops;

use std::path::Path;

#[test]
fn corpus() {
    for (operation, _) in ops::OPERATIONS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(operation);
        let entries = std::fs::read_dir(&folder).expect("a folder of inputs");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "no inputs for {operation}");
        for path in paths.iter().step_by(if cfg!(miri) { 20 } else { 1 }) {
            println!("{}", path.display());
            ops::run(operation, &std::fs::read(path).expect("readable"));
        }
    }
}

#[test]
fn random_bytes() {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    for (length, (operation, _)) in (0..600)
        .step_by(if cfg!(miri) { 20 } else { 1 })
        .cycle()
        .zip(ops::OPERATIONS.into_iter().cycle())
        .take(if cfg!(miri) { 16 } else { 6_000 })
    {
        let data: Vec<u8> = (0..length)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // small numbers come far more often than hostile ones, or nothing would ever succeed
                if state.is_multiple_of(8) { (state >> 32) as u8 } else { (state >> 32) as u8 % 200 }
            })
            .collect();
        ops::run(operation, &data);
    }
}
