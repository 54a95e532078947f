//! What the checks compare with: seeded numbers, plain loops in f64, finite differences.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// What a check found: what it covered, or the first deviation.
pub(super) type Finding = Result<String, String>;

/// A linear congruential generator (Knuth's MMIX constants): the same numbers on every machine. All are exact in f32.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// `n` of `±1/4, ±1/2, ±3/4, ±1`: their products and sums are exact in f32 whatever the order, so that results compare
    /// without a tolerance in which one wrong element could hide.
    pub(super) fn quarters(&mut self, n: usize) -> Vec<f64> {
        let quarter = |bits: u32| f64::from((bits & 3) + 1) * if bits & 4 == 0 { 0.25 } else { -0.25 };
        (0..n).map(|_| quarter(self.next() >> 29)).collect()
    }

    /// `n` numbers in `[-2, 2)` with long significands.
    pub(super) fn reals(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| f64::from(self.next() >> 8) / f64::from(1 << 22) - 2.0).collect()
    }

    /// `n` indices below `bound`.
    pub(super) fn indices(&mut self, n: usize, bound: usize) -> Vec<usize> {
        (0..n).map(|_| (self.next() >> 8) as usize % bound).collect()
    }
}

/// `values` on `device`, in f32 whatever the device's default is.
pub(super) fn tensor<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// The host's copy.
pub(super) fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Gradients of `sum(weights * output)` with respect to `leaves`, by the backend's backward pass.
pub(super) fn gradients<const D: usize, const L: usize>(
    output: &Tensor<D>,
    weights: &[f64],
    leaves: &[&Tensor<L>],
) -> Result<Vec<Vec<f64>>, String> {
    let loss = (output.clone() * tensor(weights, output.dims(), &output.device())).sum();
    if !loss.is_tracked() {
        return Err("the result is cut from its inputs' graph".to_owned());
    }
    let grads = loss.backward();
    let gradient = |leaf: &&Tensor<L>| leaf.grad(&grads).map(read).ok_or_else(|| "an input got no gradient".to_owned());
    leaves.iter().map(gradient).collect()
}

/// `Ok` if each element of `got` lies within `tolerance * max(1, |expected|)` of the expected one.
pub(super) fn agree(what: &str, got: &[f64], expected: &[f64], tolerance: f64) -> Result<(), String> {
    if got.len() != expected.len() {
        return Err(format!("{what}: {} elements, expected {}", got.len(), expected.len()));
    }
    let close = |g: f64, e: f64| g == e || (g - e).abs() <= tolerance * e.abs().max(1.0);
    match got.iter().zip(expected).position(|(&g, &e)| !close(g, e)) {
        None => Ok(()),
        Some(i) => Err(format!("{what}: element {i} is {}, expected {}", got[i], expected[i])),
    }
}

/// `a b` for `a: [m, k]` and `b: [k, n]`.
pub(super) fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for row in 0..m {
        for inner in 0..k {
            for column in 0..n {
                out[row * n + column] += a[row * k + inner] * b[inner * n + column];
            }
        }
    }
    out
}

/// `a^T` for `a: [rows, columns]`.
pub(super) fn transposed(a: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| a[row * columns + column])).collect()
}

/// Softmax of each row of `width` elements.
pub(super) fn softmax(x: &[f64], width: usize) -> Vec<f64> {
    let row_softmax = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter().map(|v| (v - max).exp() / sum).collect::<Vec<_>>()
    };
    x.chunks(width).flat_map(row_softmax).collect()
}

/// `sum(a * b)`.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Gradient of `f` at `x` by central differences in f64, exact to about 1e-8 for the smooth functions here.
pub(super) fn differences(f: impl Fn(&[f64]) -> f64, x: &[f64]) -> Vec<f64> {
    const STEP: f64 = 1e-4;
    let at = |i: usize, step: f64| {
        let mut moved = x.to_vec();
        moved[i] += step;
        f(&moved)
    };
    (0..x.len()).map(|i| (at(i, STEP) - at(i, -STEP)) / (2.0 * STEP)).collect()
}
