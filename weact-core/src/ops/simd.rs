//! Small functions over slices that the kernels share. All are inlined into code that is compiled for the processor at hand.

use pulp::Simd;

/// `e^x` within 2 units in the last place, without branches, so that loops over it become vector code. Below -87 it gives e^-87.
///
/// `e^x = 2^n e^r` with `n` the nearest integer to `x / ln 2` and `r = x - n ln 2` in two parts; `e^r` by the polynomial of
/// Cephes' `expf` (<https://www.netlib.org/cephes/>).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23 + 127: adding it leaves the nearest integer, with the bias of an exponent, in the low bits.
    const SHIFT: f32 = 12_583_039.0;
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512, exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    // Multiplied and not added to the exponent's bits, which could make a number of a NaN.
    y * f32::from_bits(shifted.to_bits() << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `sum_i a_i b_i`.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    const CHAINS: usize = 4;
    let ((a, a_rest), (b, b_rest)) = (S::as_simd_f32s(a), S::as_simd_f32s(b));
    let mut sums = [simd.splat_f32s(0.0); CHAINS];
    let (a_chunks, b_chunks) = (a.chunks_exact(CHAINS), b.chunks_exact(CHAINS));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..CHAINS {
            sums[i] = simd.mul_add_f32s(a[i], b[i], sums[i]);
        }
    }
    for (a, b) in rest {
        sums[0] = simd.mul_add_f32s(*a, *b, sums[0]);
    }
    let pairs = (simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    simd.reduce_sum_f32s(simd.add_f32s(pairs.0, pairs.1)) + rest
}

/// The largest number; negative infinity of none. A NaN is passed over.
#[inline(always)]
pub(super) fn max(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut largest = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            largest[i] = if chunk[i] > largest[i] { chunk[i] } else { largest[i] };
        }
    }
    largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -8600..8700 {
            let x = i as f32 * 0.01;
            let (ours, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(((ours - exact) / exact).abs() < 2.4e-7, "{x}: {ours} {exact}");
        }
        // The last is the NaN that CUDA devices make.
        for nan in [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0x7fff_ffff].map(f32::from_bits) {
            assert!(exp(nan).is_nan(), "{:x}", nan.to_bits());
        }
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn dot_and_max_of_every_remainder() {
        struct Dot<'a>(&'a [f32], &'a [f32]);
        impl pulp::WithSimd for Dot<'_> {
            type Output = f32;
            fn with_simd<S: Simd>(self, simd: S) -> f32 {
                dot(simd, self.0, self.1)
            }
        }
        for n in [0, 1, 15, 16, 17, 63, 64, 65, 200] {
            let a: Vec<f32> = (0..n).map(|i| (i % 7) as f32 - 3.0).collect();
            let b: Vec<f32> = (0..n).map(|i| (i % 5) as f32).collect();
            let exact: f32 = a.iter().zip(&b).map(|(x, y)| x * y).sum(); // integers: exact in any order
            assert_eq!(pulp::Arch::new().dispatch(Dot(&a, &b)), exact, "{n}");
            assert_eq!(max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max), "{n}");
        }
    }
}
