// SPDX-License-Identifier: Apache-2.0
//! Fixed-point log-probabilities whose every bit is specified, so that each backend and each
//! tensor-parallel rank builds the same tree.
//!
//! All arithmetic is IEEE 754 with round half to even: separate add, sub, mul and div, and `fma`
//! only where it is written. Nothing else may be fused or reordered, and no libm is involved.
//!
//! **Usable scores.** `x = f32(logit) * scale`, one f32 multiplication. NaN, +inf and -inf mean
//! "never": such a token is no candidate and adds nothing to the normaliser.
//!
//! **`exp_spec(t)`** for f32 `t <= 0`: 0 if `t < -87` (so no denormal appears), else
//!
//! ```text
//! s = fma(t, 0x3fb8aa3b, 12582912)           log2(e); 1.5 * 2^23 leaves the integer in the low bits
//! k = s - 12582912
//! r = fma(k, -0x3f317218, t)                 ln(2), high part
//! r = fma(k, -0xb102e308, r)                 ln(2) - high part
//! q = 0x3ab511e8
//! q = fma(q, r, 0x3c091d10)
//! q = fma(q, r, 0x3d2aac79)
//! q = fma(q, r, 0x3e2aaa49)
//! q = fma(q, r, 0x3efffffe)
//! p = fma(r * r, q, r) + 1
//! exp_spec = p * 2^k                         exact
//! ```
//!
//! (Hexadecimal numbers are the bits of f32 constants. `q` is a minimax fit of
//! `(exp(r) - 1 - r) / r^2` on `|r| <= ln(2) / 2`; the result is within 2 ulp of exp.)
//!
//! **`ln_spec(s)`** for f32 `s >= 1`, in f64: `s = m * 2^k` exactly with `m` in `[1, 2)`; if
//! `m > 1.5`, halve `m` and increment `k`. Then
//!
//! ```text
//! z = (m - 1) / (m + 1);  w = z * z
//! p = 1 / 23;  p = p * w + 1 / c  for c = 21, 19, ..., 3, 1        mul, then add
//! ln_spec = k * 0.6931471805599453 + 2 * z * p                     (2 * z) * p
//! ```
//!
//! **Normaliser of a vocabulary.** Ids are cut into chunks of 4096. In a chunk with usable scores,
//! `m_c` is the largest of them; 64 lanes start at 0, and id `v` adds `exp_spec(x - m_c)` to lane
//! `v % 64`, in ascending order; then lane `i` adds lane `i + h` for `h = 32, 16, 8, 4, 2, 1` and
//! `i < h`, which leaves the sum `s_c` in lane 0. With `M` the largest `m_c`, `S` starts at 0 and
//! the chunks follow in ascending order: `S = fma(s_c, exp_spec(m_c - M), S)`. Finally
//! `lnZ = f64(M) + ln_spec(S)`.
//!
//! **Normaliser of a candidate list.** The same with one lane: `S` adds `exp_spec(x - M)` in the
//! order of the list.
//!
//! **Scores with noise.** For a sampling target `x = fma(f32(logit), 1 / T, noise_spec(bits)) * scale`,
//! with the temperature's reciprocal rounded once, and the 32 bits that [`crate::gumbel`] has for the
//! request's seed, the position of the token before and the candidate's id. `noise_spec(bits)` is
//! `-ln(-ln(1 - u))` of `u = (bits + 0.5) / 2^32`:
//!
//! ```text
//! u = fma(f32(bits >> 16), 2^-16, (f32(bits & 0xffff) + 0.5) * 2^-32)
//! v = max(1 - u, 2^-24)
//! k, m = split(v)
//! y = -ln_near(u < 0.25 ? -u : m - 1, k)     k is 0 if u < 0.25
//! k, m = split(y)
//! noise_spec = -ln_near(m - 1, k)
//! ```
//!
//! where `split(v)` is the integer `k` and `m` in `[0.75, 1.5)` of `v = m * 2^k`, and `ln_near(f, k)` is
//!
//! ```text
//! q = 0xbd89a21e
//! q = fma(q, f, c)  for c = 0x3e10eede, 0xbe31883f, 0x3e4dc6bc, 0xbe7fc9a8, 0x3eaaa739, 0xbf00001c, 1
//! ln_near = fma(f32(k), 0x3f317218, f * q)   ln(2)
//! ```
//!
//! (`q` is a minimax fit of `ln(1 + f) / f`.) It is within 3e-6 of the noise that the target's sampler
//! adds, whose logarithms are those of a math library. That only has to be close: a tree that
//! anticipates another token than the target samples costs acceptance at a near tie, and no text.
//!
//! **Edge score.** Q10.21: `(f64(x) - lnZ) * 2^21`, rounded half to even, clamped to
//! `[-2^31 + 1, 0]`. A path score is the sum of its edges with the same lower limit.

use crate::gumbel::GumbelNoise;
use crate::tensor::TensorRef;

/// The worst score, of log-probability -1024 and below.
pub const MIN_SCORE: i32 = -i32::MAX;

const CHUNK: usize = 4096;
/// Lanes of the sum, and ids of a block.
pub(crate) const LANES: usize = 64;

const EXP_CUTOFF: f32 = -87.0;
const ROUNDER: f32 = 12_582_912.0;
const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
const LN_2_HIGH: f32 = f32::from_bits(0x3f31_7218);
const LN_2_LOW: f32 = f32::from_bits(0xb102_e308);
const EXP_TAIL: [f32; 5] = [
    f32::from_bits(0x3ab5_11e8),
    f32::from_bits(0x3c09_1d10),
    f32::from_bits(0x3d2a_ac79),
    f32::from_bits(0x3e2a_aa49),
    f32::from_bits(0x3eff_fffe),
];

const LOG_TAIL: [f32; 8] = [
    f32::from_bits(0xbd89_a21e),
    f32::from_bits(0x3e10_eede),
    f32::from_bits(0xbe31_883f),
    f32::from_bits(0x3e4d_c6bc),
    f32::from_bits(0xbe7f_c9a8),
    f32::from_bits(0x3eaa_a739),
    f32::from_bits(0xbf00_001c),
    1.0,
];

/// `exp_spec` of the module documentation.
#[inline(always)]
pub(crate) fn exp_spec(t: f32) -> f32 {
    let shifted = t.mul_add(LOG2_E, ROUNDER);
    let k = shifted - ROUNDER;
    let r = k.mul_add(-LN_2_LOW, k.mul_add(-LN_2_HIGH, t));
    let mut q = EXP_TAIL[0];
    for &coefficient in &EXP_TAIL[1..] {
        q = q.mul_add(r, coefficient);
    }
    let p = (r * r).mul_add(q, r) + 1.0;
    // the low bits of `shifted` are k in two's complement; the exponent field starts at bit 23
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if t >= EXP_CUTOFF { p * power } else { 0.0 }
}

/// `ln_spec` of the module documentation.
fn ln_spec(s: f32) -> f64 {
    let bits = f64::from(s).to_bits();
    let mut k = ((bits >> 52) as i64 - 1023) as f64;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | 1.0f64.to_bits());
    if m > 1.5 {
        m *= 0.5;
        k += 1.0;
    }
    let z = (m - 1.0) / (m + 1.0);
    let w = z * z;
    let mut p = 1.0 / 23.0;
    for c in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        p = p * w + 1.0 / c;
    }
    k * std::f64::consts::LN_2 + 2.0 * z * p
}

/// `noise_spec` of the module documentation.
#[inline(always)]
pub(crate) fn noise_spec(bits: u32) -> f32 {
    const TWO_TO_MINUS_16: f32 = 1.0 / 65_536.0;
    const LEAST_REST: f32 = f32::EPSILON / 2.0;
    // through i32, which a vector unit converts in one instruction
    let low = ((bits & 0xffff) as i32 as f32 + 0.5) * (TWO_TO_MINUS_16 * TWO_TO_MINUS_16);
    let u = ((bits >> 16) as i32 as f32).mul_add(TWO_TO_MINUS_16, low);
    let rest = if 1.0 - u > LEAST_REST { 1.0 - u } else { LEAST_REST };
    let (k, m) = split(rest);
    let y = -ln_near(if u < 0.25 { -u } else { m - 1.0 }, k);
    let (k, m) = split(y);
    -ln_near(m - 1.0, k)
}

/// `split` of the module documentation, for a normal positive number.
#[inline(always)]
fn split(v: f32) -> (f32, f32) {
    let k = v.to_bits().wrapping_sub(0.75f32.to_bits()) as i32 >> 23;
    (k as f32, f32::from_bits(v.to_bits().wrapping_sub((k as u32) << 23)))
}

/// `ln_near` of the module documentation.
#[inline(always)]
fn ln_near(f: f32, k: f32) -> f32 {
    let mut q = LOG_TAIL[0];
    for &coefficient in &LOG_TAIL[1..] {
        q = q.mul_add(f, coefficient);
    }
    k.mul_add(std::f32::consts::LN_2, f * q)
}

/// How the logits of one row become scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scoring {
    pub(crate) scale: f32,
    pub(crate) noise: Option<RowNoise>,
}

/// Temperature and noise of the row that the target samples from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowNoise {
    pub(crate) inverse_temperature: f32,
    pub(crate) gumbel: GumbelNoise,
}

impl RowNoise {
    #[inline(always)]
    fn add(&self, logit: f32, token: u32) -> f32 {
        logit.mul_add(self.inverse_temperature, noise_spec(self.gumbel.bits(token)))
    }
}

impl Scoring {
    /// The score of one token, usable or not.
    pub(crate) fn x(&self, logit: f32, token: u32) -> f32 {
        self.noise.map_or(logit, |noise| noise.add(logit, token)) * self.scale
    }
}

/// The edge score of a usable `x` under the normaliser `ln_z`.
#[inline]
pub(crate) fn edge_score(x: f32, ln_z: f64) -> i32 {
    // adding 1.5 * 2^52 rounds half to even at the unit, as round_ties_even does without SSE4.1
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    let scaled = ((f64::from(x) - ln_z) * 2_097_152.0).clamp(f64::from(MIN_SCORE), 0.0);
    (scaled + ROUNDER - ROUNDER) as i32
}

/// The score of a path that continues one of score `path` by an edge.
pub(crate) fn extend_path(path: i32, edge: i32) -> i32 {
    path.saturating_add(edge).max(MIN_SCORE)
}

/// Orders a depth's candidates: ascending keys are best first, equal scores by token id.
#[inline]
pub(crate) fn candidate_key(score: i32, token: u32) -> u64 {
    (u64::from(score.unsigned_abs()) << 32) | u64::from(token)
}

/// The edge score in a key of [`candidate_key`].
pub(crate) fn key_score(key: u64) -> i32 {
    -((key >> 32) as i32)
}

/// The token id in a key of [`candidate_key`].
pub(crate) fn key_token(key: u64) -> i32 {
    key as i32
}

/// What one row of logits says about its whole vocabulary.
pub(crate) struct RowSummary {
    /// The normaliser; only meaningful if something is usable.
    pub(crate) ln_z: f64,
    /// Number of usable tokens.
    pub(crate) num_usable: usize,
    /// Whether a NaN or +inf was ignored.
    pub(crate) has_nonfinite: bool,
    /// Largest usable x of each block of 64 ids, -inf for none.
    block_max: Vec<f32>,
}

/// Usable scores of up to [`CHUNK`] ids: `x`, with "never" as -inf.
struct Chunk {
    x: Box<[f32; CHUNK]>,
}

/// Counts of one chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ChunkStats {
    num_usable: usize,
    has_nonfinite: bool,
}

impl Chunk {
    fn new() -> Self {
        Self { x: Box::new([0.0; CHUNK]) }
    }

    /// Loads ids `start..start + len`, scales them, and pads to whole blocks with "never".
    fn load(
        &mut self,
        row: TensorRef<'_>,
        start: usize,
        len: usize,
        scoring: &Scoring,
        kernels: &Kernels,
    ) -> (&[f32], ChunkStats) {
        let padded = len.next_multiple_of(LANES);
        row.load_f32(start, &mut self.x[..len]);
        if let Some(noise) = &scoring.noise {
            (kernels.add_noise)(&mut self.x[..len], start as u32, noise);
        }
        self.x[len..padded].fill(f32::NEG_INFINITY);
        let stats = (kernels.scale_and_mask)(&mut self.x[..len], scoring.scale);
        (&self.x[..padded], stats)
    }
}

impl RowSummary {
    /// Reads the vocabulary once. `row`: floating-point vector.
    pub(crate) fn new(row: TensorRef<'_>, scoring: &Scoring) -> Self {
        Self::with_kernels(row, scoring, Kernels::best())
    }

    fn with_kernels(row: TensorRef<'_>, scoring: &Scoring, kernels: &Kernels) -> Self {
        let vocab = row.shape()[0];
        let mut summary = Self {
            ln_z: 0.0,
            num_usable: 0,
            has_nonfinite: false,
            block_max: Vec::with_capacity(vocab.div_ceil(LANES)),
        };
        let mut chunk = Chunk::new();
        let mut sums = Vec::with_capacity(vocab.div_ceil(CHUNK));
        for start in (0..vocab).step_by(CHUNK) {
            let (x, stats) = chunk.load(row, start, CHUNK.min(vocab - start), scoring, kernels);
            summary.num_usable += stats.num_usable;
            summary.has_nonfinite |= stats.has_nonfinite;
            let first_block = summary.block_max.len();
            (kernels.block_max)(x, &mut summary.block_max);
            let max = summary.block_max[first_block..].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if max > f32::NEG_INFINITY {
                sums.push((max, (kernels.sum_exp)(x, max)));
            }
        }
        let max = sums.iter().fold(f32::NEG_INFINITY, |max, &(m, _)| max.max(m));
        let sum = sums.iter().fold(0.0f32, |sum, &(m, s)| s.mul_add(exp_spec(m - max), sum));
        if summary.num_usable > 0 {
            summary.ln_z = f64::from(max) + ln_spec(sum);
        }
        summary
    }

    /// Keys of the best `count` usable tokens, best first (see [`candidate_key`]). Reads again only
    /// those blocks that can hold one of them.
    pub(crate) fn best(&self, row: TensorRef<'_>, scoring: &Scoring, count: usize) -> Vec<u64> {
        let vocab = row.shape()[0];
        if count == 0 || self.num_usable == 0 {
            return Vec::new();
        }
        // `count` blocks have a token of at least the count-th largest block maximum, so no
        // token whose edge score is below that one's is needed
        let mut maxima: Vec<f32> =
            self.block_max.iter().copied().filter(|&x| x > f32::NEG_INFINITY).collect();
        let worst = if maxima.len() < count {
            MIN_SCORE
        } else {
            let (_, &mut x, _) = maxima.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
            edge_score(x, self.ln_z)
        };

        // blocks with equal scores can all qualify, so the list is cut whenever it has grown
        let capacity = 4 * count + LANES;
        let mut keys = Vec::with_capacity(capacity);
        let mut x = [0.0f32; LANES];
        for (block, &max) in self.block_max.iter().enumerate() {
            if max == f32::NEG_INFINITY || edge_score(max, self.ln_z) < worst {
                continue;
            }
            let start = block * LANES;
            let x = &mut x[..LANES.min(vocab - start)];
            row.load_f32(start, x);
            if let Some(noise) = &scoring.noise {
                add_noise(x, start as u32, noise);
            }
            scale_and_mask(x, scoring.scale);
            for (i, &x) in x.iter().enumerate() {
                let score = edge_score(x, self.ln_z);
                if x > f32::NEG_INFINITY && score >= worst {
                    keys.push(candidate_key(score, (start + i) as u32));
                }
            }
            if keys.len() + LANES > capacity {
                keys.select_nth_unstable(count - 1);
                keys.truncate(count);
            }
        }
        keys.sort_unstable();
        keys.truncate(count);
        keys
    }
}

/// The normaliser of a candidate list, or `None` if it has no usable score (only finite `x` count).
pub(crate) fn list_normaliser(xs: &[f32]) -> Option<f64> {
    let usable = || xs.iter().copied().filter(|x| x.is_finite());
    let max = usable().reduce(f32::max)?;
    let sum = usable().fold(0.0f32, |sum, x| sum + exp_spec(x - max));
    Some(f64::from(max) + ln_spec(sum))
}

/// The loops over a vocabulary, compiled for the CPU at hand.
struct Kernels {
    add_noise: fn(&mut [f32], u32, &RowNoise),
    scale_and_mask: fn(&mut [f32], f32) -> ChunkStats,
    block_max: fn(&[f32], &mut Vec<f32>),
    sum_exp: fn(&[f32], f32) -> f32,
}

/// Rust code alone: `mul_add` is an instruction where the target has one and a libm call elsewhere.
static PORTABLE: Kernels = Kernels { add_noise, scale_and_mask, block_max, sum_exp };

impl Kernels {
    fn best() -> &'static Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(kernels) = x86::kernels() {
            return kernels;
        }
        &PORTABLE
    }
}

/// Divides the logits of tokens `first..` by the temperature and adds their noise.
#[inline(always)]
fn add_noise(x: &mut [f32], first: u32, noise: &RowNoise) {
    for (x, token) in x.iter_mut().zip(first..) {
        *x = noise.add(*x, token);
    }
}

/// Multiplies by `scale` and turns what is not finite into -inf.
#[inline(always)]
fn scale_and_mask(x: &mut [f32], scale: f32) -> ChunkStats {
    let mut num_usable = 0u32;
    let mut num_nonfinite = 0u32;
    for x in x {
        let scaled = *x * scale;
        let is_usable = scaled.abs() < f32::INFINITY;
        num_usable += u32::from(is_usable);
        num_nonfinite += u32::from(!is_usable & (scaled != f32::NEG_INFINITY));
        *x = if is_usable { scaled } else { f32::NEG_INFINITY };
    }
    ChunkStats { num_usable: num_usable as usize, has_nonfinite: num_nonfinite > 0 }
}

/// Appends the maximum of each block.
#[inline(always)]
fn block_max(x: &[f32], out: &mut Vec<f32>) {
    for block in x.chunks_exact(LANES) {
        let mut lanes = [f32::NEG_INFINITY; 8];
        for part in block.chunks_exact(lanes.len()) {
            for (lane, &x) in lanes.iter_mut().zip(part) {
                *lane = if x > *lane { x } else { *lane };
            }
        }
        out.push(lanes.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max }));
    }
}

/// The sum of one chunk, in the order of the module documentation.
#[inline(always)]
fn sum_exp(x: &[f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for block in x.chunks_exact(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            // "never" adds +0, which changes no bit of a sum that is not negative
            *lane += exp_spec(x - max);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The same source compiled with AVX2 and FMA. Vectorising keeps every operation of a lane,
    //! and lanes are independent, so the bits are those of the portable version.
    use super::{ChunkStats, Kernels, RowNoise};

    /// The kernels, if this CPU can run them.
    pub(super) fn kernels() -> Option<&'static Kernels> {
        // the table is only handed out after the check below
        static KERNELS: Kernels = Kernels {
            // SAFETY: the CPU has AVX2 and FMA.
            add_noise: |x, first, noise| unsafe { add_noise(x, first, noise) },
            // SAFETY: as above.
            scale_and_mask: |x, scale| unsafe { scale_and_mask(x, scale) },
            // SAFETY: as above.
            block_max: |x, out| unsafe { block_max(x, out) },
            // SAFETY: as above.
            sum_exp: |x, max| unsafe { sum_exp(x, max) },
        };
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(&KERNELS)
    }

    #[target_feature(enable = "avx2,fma")]
    fn add_noise(x: &mut [f32], first: u32, noise: &RowNoise) {
        super::add_noise(x, first, noise);
    }

    #[target_feature(enable = "avx2,fma")]
    fn scale_and_mask(x: &mut [f32], scale: f32) -> ChunkStats {
        super::scale_and_mask(x, scale)
    }

    #[target_feature(enable = "avx2,fma")]
    fn block_max(x: &[f32], out: &mut Vec<f32>) {
        super::block_max(x, out);
    }

    #[target_feature(enable = "avx2,fma")]
    fn sum_exp(x: &[f32], max: f32) -> f32 {
        super::sum_exp(x, max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reproducible stream of numbers.
    fn random_bits(count: usize, seed: u64) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(seed), |state| {
            Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
        })
        .skip(1)
        .map(|state| (state >> 32) as u32)
        .take(count)
    }

    #[test]
    fn exp_spec_is_close_to_exp() {
        assert_eq!(exp_spec(0.0), 1.0);
        assert_eq!(exp_spec(-0.0), 1.0);
        for t in [-87.01, -88.0, -1e30, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_spec(t).to_bits(), 0, "{t}");
        }
        let mut worst = 0.0f64;
        for step in 0..870_000 {
            let t = -(step as f32) * 1e-4;
            let want = f64::from(t).exp();
            let got = exp_spec(t);
            assert!(got.is_normal(), "exp_spec({t}) = {got}");
            // one ulp of f32 is between 2^-24 and 2^-23 of the value
            worst = worst.max((f64::from(got) - want).abs() / want * 2f64.powi(24));
        }
        assert!(worst < 2.0, "error {worst} ulp");
    }

    #[test]
    fn ln_spec_is_close_to_ln() {
        assert_eq!(ln_spec(1.0), 0.0);
        for bits in random_bits(100_000, 1) {
            // 1 to 2^31, evenly in the exponent
            let s = f32::from_bits(1.0f32.to_bits() + bits % (31 << 23));
            let want = f64::from(s).ln();
            assert!((ln_spec(s) - want).abs() <= 1e-15 * want.max(1.0), "ln_spec({s})");
        }
    }

    /// The checksums come from exact rational arithmetic that rounds after each documented step.
    #[test]
    fn every_bit_is_as_specified() {
        fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
            bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            })
        }
        let steps = || (0..=2000u32).map(|i| i as f32);
        let exp = steps().map(|i| exp_spec(-(i * 0.0435)));
        assert_eq!(fnv1a(exp.flat_map(|x| x.to_bits().to_le_bytes())), 0xf7ef_9111_b79f_4a1d);
        let ln = steps().map(|i| ln_spec(i * i * 0.37 + 1.0));
        assert_eq!(fnv1a(ln.flat_map(|x| x.to_bits().to_le_bytes())), 0xfb80_97a5_9d34_fb6a);
    }

    /// The noise of the target's sampler, which takes logarithms from a math library.
    #[test]
    fn noise_spec_is_close_to_the_samplers_noise() {
        let edges = [0, 1, u32::MAX - 1, u32::MAX, 0x3fff_ffff, 0x4000_0000, 0x4000_0001, 1 << 31];
        let mut worst = 0.0f32;
        for bits in edges.into_iter().chain(random_bits(4_000_000, 5)) {
            worst = worst.max((noise_spec(bits) - GumbelNoise::from_bits(bits)).abs());
        }
        assert!(worst <= 3e-6, "{worst}");
        println!("largest difference: {worst}");
    }

    #[test]
    fn edge_scores_round_half_to_even_and_saturate() {
        let unit = 2f64.powi(-21);
        for (quanta, want) in
            [(0.5, 0), (1.5, -2), (2.5, -2), (2.500001, -3), (3.5, -4), (-1.0, 0), (1e9, -1_000_000_000)]
        {
            assert_eq!(edge_score(0.0, quanta * unit), want, "{quanta}");
        }
        assert_eq!(edge_score(-1024.0, 0.0), MIN_SCORE);
        assert_eq!(edge_score(f32::MIN, 3e38), MIN_SCORE);
        assert_eq!(extend_path(MIN_SCORE, -1), MIN_SCORE);
        assert_eq!(extend_path(-5, -7), -12);
    }

    #[test]
    fn candidate_keys_order_scores_then_tokens() {
        let ordered = [(0, 7), (-1, 3), (-1, 9), (MIN_SCORE, 0), (MIN_SCORE, i32::MAX as u32)];
        let keys: Vec<u64> = ordered.iter().map(|&(score, token)| candidate_key(score, token)).collect();
        assert!(keys.is_sorted());
        for (&key, (score, token)) in keys.iter().zip(ordered) {
            assert_eq!((key_score(key), key_token(key)), (score, token as i32));
        }
    }

    /// Portable Rust and AVX2 + FMA give the same bits, for ordinary and for hostile numbers.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        let Some(fma) = x86::kernels() else {
            eprintln!("skipped: this CPU has no AVX2 and FMA");
            return;
        };
        for (case, vocab) in [1, 63, 64, 65, 4095, 4096, 4097, 20_011].into_iter().enumerate() {
            for hostile in [false, true] {
                let logits: Vec<f32> = random_bits(vocab, case as u64)
                    .map(|bits| match (hostile, bits % 16) {
                        (true, 0) => f32::NAN,
                        (true, 1) => f32::INFINITY,
                        (true, 2) => f32::NEG_INFINITY,
                        (true, 3) => f32::from_bits(bits >> 9),
                        (true, 4) => -1e38 * (bits as f32 / u32::MAX as f32),
                        _ => (bits as f32 / u32::MAX as f32 - 0.5) * 60.0,
                    })
                    .collect();
                let row = TensorRef::new(&logits, &[vocab]).expect("a vector");
                let noise = RowNoise {
                    inverse_temperature: 1.0 / 0.6,
                    gumbel: GumbelNoise::new(case as i64 - 3, 1 << case),
                };
                for (scale, noise) in
                    [(1.0, None), (0.37, None), (3.0e2, None), (1.0, Some(noise)), (0.37, Some(noise))]
                {
                    let scoring = Scoring { scale, noise };
                    let a = RowSummary::with_kernels(row, &scoring, &PORTABLE);
                    let b = RowSummary::with_kernels(row, &scoring, fma);
                    assert_eq!(a.ln_z.to_bits(), b.ln_z.to_bits(), "vocab {vocab}, {scoring:?}");
                    assert_eq!((a.num_usable, a.has_nonfinite), (b.num_usable, b.has_nonfinite));
                    let bits = |summary: &RowSummary| -> Vec<u32> {
                        summary.block_max.iter().map(|x| (x + 0.0).to_bits()).collect()
                    };
                    assert_eq!(bits(&a), bits(&b));
                }
            }
        }
    }
}
