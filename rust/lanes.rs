// SPDX-License-Identifier: Apache-2.0
//! The f32 inner loops: products of rows with blocks of 16 lanes, which fit in registers.
//!
//! The order of every sum is fixed, so a row's result depends neither on the rows computed
//! beside it nor on the instruction set.

/// Columns that are computed side by side.
pub(crate) const LANES: usize = 16;

/// One row of a block.
pub(crate) type Lanes = [f32; LANES];

/// For each row `r` of `0..rows`: `store(r, sum over i of row(r)[i] * block[i])`, in ascending
/// order of `i`. Each row is as long as the block.
#[inline]
pub(crate) fn multiply<'a>(
    rows: usize,
    row: impl Fn(usize) -> &'a [f32],
    block: &[Lanes],
    store: impl FnMut(usize, &Lanes),
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { multiply_avx2(rows, row, block, store) };
    }
    multiply_any(rows, row, block, store);
}

/// The same operations, compiled for wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn multiply_avx2<'a>(
    rows: usize,
    row: impl Fn(usize) -> &'a [f32],
    block: &[Lanes],
    store: impl FnMut(usize, &Lanes),
) {
    multiply_any(rows, row, block, store);
}

#[inline(always)]
fn multiply_any<'a>(
    rows: usize,
    row: impl Fn(usize) -> &'a [f32],
    block: &[Lanes],
    mut store: impl FnMut(usize, &Lanes),
) {
    // four rows share each load of the block
    const GROUP: usize = 4;
    let mut r = 0;
    while r + GROUP <= rows {
        let sums = multiply_group::<GROUP>(std::array::from_fn(|i| row(r + i)), block);
        for (i, sums) in sums.iter().enumerate() {
            store(r + i, sums);
        }
        r += GROUP;
    }
    while r < rows {
        let [sums] = multiply_group([row(r)], block);
        store(r, &sums);
        r += 1;
    }
}

#[inline(always)]
fn multiply_group<const N: usize>(rows: [&[f32]; N], block: &[Lanes]) -> [Lanes; N] {
    let rows = rows.map(|row| &row[..block.len()]);
    let mut sums = [[0.0; LANES]; N];
    for (i, lanes) in block.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(&rows) {
            let x = row[i];
            for (sum, y) in sums.iter_mut().zip(lanes) {
                *sum += x * y;
            }
        }
    }
    sums
}

/// Sum of products of two rows whose length is a multiple of 16. Element `i` is added to lane
/// `i % 16` in ascending order, then the lanes in halves: `0..8 += 8..16`, `0..4 += 4..8`, ...
#[inline]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for ((sum, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// `sums[i] += factor * row[i]`.
#[inline]
pub(crate) fn add_scaled(sums: &mut [f32], factor: f32, row: &[f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += factor * x;
    }
}
