// SPDX-License-Identifier: Apache-2.0
//! The noise of vLLM's sampler, so that a seed gives the tokens that it gives there.
//!
//! The largest of `logit + noise` over a vocabulary is a sample of the softmax of the logits if the
//! noise is Gumbel (the Gumbel-max trick). vLLM 0.32 and 0.33
//! (`vllm/v1/worker/gpu/sample/gumbel.py`, f32, target side) hash the request's seed, the position
//! of the row's own token and the candidate's id into 32 bits, and make the noise from those. Here
//! the bits are the same, and so is every rounding but those inside of the two logarithms, where
//! math libraries differ: another token than vLLM's is possible only at a near tie.
//! `cuda/gumbel.cuh` is the same on a GPU.

/// At least every noise.
pub const MAX_NOISE: f32 = 22.9;

/// The noise of one row.
#[derive(Clone, Copy, Debug)]
pub struct GumbelNoise {
    prefix: u32,
}

impl GumbelNoise {
    /// Noise of the row whose own token is at `position`. Only the low 32 bits of it count, as in
    /// vLLM.
    pub fn new(seed: i64, position: i64) -> Self {
        let words = [seed as u32, (seed >> 32) as u32, position as u32];
        Self { prefix: words.into_iter().fold(0, mix) }
    }

    /// The 32 random bits of a token.
    pub fn bits(self, token: u32) -> u32 {
        // the finalizer of MurmurHash3, for 16 bytes
        let mut hash = mix(self.prefix, token) ^ 16;
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
        hash ^ (hash >> 16)
    }

    /// The noise of a token: `-ln(-ln(1 - u))` of `u = (bits + 0.5) / 2^32`.
    pub fn of(self, token: u32) -> f32 {
        Self::from_bits(self.bits(token))
    }

    pub(crate) fn from_bits(bits: u32) -> f32 {
        const TWO_TO_MINUS_16: f32 = 1.0 / 65_536.0;
        let low = ((bits & 0xffff) as f32 + 0.5) * (TWO_TO_MINUS_16 * TWO_TO_MINUS_16);
        let u = ((bits >> 16) as f32).mul_add(TWO_TO_MINUS_16, low);
        let log1p = if u < 0.25 {
            let series = [7.0f32, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
            -u * series.into_iter().fold(1.0 / 8.0, |sum, n| u.mul_add(sum, 1.0 / n))
        } else {
            (1.0 - u).max(f32::EPSILON / 2.0).ln()
        };
        -(-log1p).ln()
    }
}

/// One word of MurmurHash3 (<https://github.com/aappleby/smhasher>, x86, 32 bits).
fn mix(hash: u32, word: u32) -> u32 {
    let word = word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    (hash ^ word).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_are_murmur3_of_seed_position_and_token() {
        // MurmurHash3_x86_32 of the bytes 0, 1, .. 15 with seed 0
        let noise = GumbelNoise::new(0x0706_0504_0302_0100, 0x0b0a_0908);
        assert_eq!(noise.bits(0x0f0e_0d0c), 0x1915_73dd);
        assert_eq!(GumbelNoise::new(3, 5).bits(7), GumbelNoise::new(3, 5 + (1 << 32)).bits(7));
    }

    /// Seed, position, and bits and noise of the tokens of `TOKENS`, by vLLM 0.33's functions in
    /// Triton's interpreter.
    type Golden = (i64, i64, [(u32, f32); 4]);
    const TOKENS: [u32; 4] = [0, 3, 151_935, 248_319];
    #[allow(clippy::excessive_precision, reason = "as they were printed")]
    const GOLDEN: [Golden; 5] = [
        (
            0,
            0,
            [
                (0x8134_cdf8, 0.352_944_970),
                (0x518a_6e8e, 0.958_451_629),
                (0x3f84_409f, 1.254_680_037),
                (0x84c8_b143, 0.313_016_117),
            ],
        ),
        (
            42,
            17,
            [
                (0xc9a4_7185, -0.437_991_858),
                (0xf980_0e19, -1.301_119_804),
                (0x106b_5810, 2.713_758_707),
                (0x7073_2f9a, 0.547_327_638),
            ],
        ),
        (
            -1,
            5,
            [
                (0xea97_9ebb, -0.908_833_086),
                (0x9fb6_0c97, 0.022_424_819),
                (0xffec_9c8c, -2.095_040_083),
                (0xece5_62b4, -0.953_695_118),
            ],
        ),
        (
            -6_148_914_691_236_517_206,
            262_143,
            [
                (0x9bb7_b0d0, 0.064_872_809),
                (0xa825_a3c9, -0.067_203_261),
                (0x942a_bf43, 0.145_495_817),
                (0x0504_352c, 3.922_578_812),
            ],
        ),
        (
            i64::MAX,
            (1 << 31) + 7,
            [
                (0x4da9_8f8b, 1.017_496_586),
                (0x5f42_e872, 0.764_862_955),
                (0x10b7_7aa7, 2.695_193_768),
                (0x0753_97ef, 3.539_191_246),
            ],
        ),
    ];

    #[test]
    fn bits_and_noise_are_those_of_vllm() {
        for (seed, position, wants) in GOLDEN {
            let noise = GumbelNoise::new(seed, position);
            for (token, (bits, value)) in TOKENS.into_iter().zip(wants) {
                assert_eq!(noise.bits(token), bits, "{seed} {position} {token}");
                let got = noise.of(token);
                assert!(
                    (got - value).abs() <= 1e-6 * value.abs().max(1.0),
                    "{seed} {position} {token}: {got}, {value}"
                );
            }
        }
    }

    #[test]
    fn the_extremes_are_finite() {
        let noise = |bits| GumbelNoise::from_bits(bits);
        assert!((noise(0) - 22.873_857).abs() < 1e-5 && noise(0) < MAX_NOISE);
        assert!(noise(u32::MAX) > -3.0);
        // the formula in f64, but for the end where 1 - u has few digits and the noise cannot win
        for bits in (0..u32::MAX / 100 * 99).step_by(65_521) {
            let want = -(-(-(f64::from(bits) + 0.5) / 4_294_967_296.0).ln_1p()).ln();
            assert!((f64::from(noise(bits)) - want).abs() < 4e-6, "{bits}: {}, {want}", noise(bits));
        }
    }
}
