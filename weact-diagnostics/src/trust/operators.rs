//! The operators under test, behind a trait so that a wrong one can be put in their place.

use std::ops::Range;

use burn::tensor::{Bool, FloatDType, Int, Tensor, activation, module};

/// The tensor operators that models, losses and adapters rest on. The default bodies are the backend's own.
///
/// An implementation overrides one of them to have a different kernel checked, or to see that the checks notice a wrong one.
pub trait Operators {
    /// `a b`: `[m, k]`, `[k, n]` -> `[m, n]`.
    fn matmul(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
        a.matmul(b)
    }

    /// `a^T b`: `[k, m]`, `[k, n]` -> `[m, n]`, the form of every weight's gradient.
    fn matmul_transposed(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
        a.transpose().matmul(b)
    }

    /// Element-wise sum of equal shapes.
    fn add(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
        a + b
    }

    /// Softmax over the last dimension.
    fn softmax(&self, x: Tensor<2>) -> Tensor<2> {
        activation::softmax(x, 1)
    }

    /// Logarithm of the softmax over the last dimension.
    fn log_softmax(&self, x: Tensor<3>) -> Tensor<3> {
        activation::log_softmax(x, 2)
    }

    /// The chosen entry of each last dimension: `[batch, seq, vocab]`, `[batch, seq, 1]` -> `[batch, seq, 1]`.
    fn gather(&self, x: Tensor<3>, indices: Tensor<3, Int>) -> Tensor<3> {
        x.gather(2, indices)
    }

    /// The chosen rows: `[rows, d]`, `[n]` -> `[n, d]`.
    fn select(&self, x: Tensor<2>, rows: Tensor<1, Int>) -> Tensor<2> {
        x.select(0, rows)
    }

    /// Embedding lookup: `[vocab, d]`, `[batch, seq]` -> `[batch, seq, d]`.
    fn embed(&self, table: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
        module::embedding(table, ids)
    }

    /// Square attention scores with minus infinity right of the diagonal.
    fn causal(&self, scores: Tensor<2>) -> Tensor<2> {
        let future = Tensor::<2, Bool>::tril_mask(scores.dims(), 0, &scores.device());
        scores.mask_fill(future, f32::NEG_INFINITY)
    }

    /// Concatenation along `dim`.
    fn cat(&self, parts: Vec<Tensor<2>>, dim: usize) -> Tensor<2> {
        Tensor::cat(parts, dim)
    }

    /// `x` with its `rows` replaced by `values`.
    fn slice_assign(&self, x: Tensor<2>, rows: Range<usize>, values: Tensor<2>) -> Tensor<2> {
        let [_, width] = x.dims();
        x.slice_assign([rows, 0..width], values)
    }

    /// `x` in another float type.
    fn cast(&self, x: Tensor<2>, dtype: FloatDType) -> Tensor<2> {
        x.cast(dtype)
    }

    /// `result`, which one of the operators of `weact_core::ops` computed.
    fn model_operator(&self, _name: &'static str, result: Tensor<2>) -> Tensor<2> {
        result
    }
}

/// The operators of the backend in use, as they are.
#[derive(Clone, Copy, Debug)]
pub struct Backend;

impl Operators for Backend {}
