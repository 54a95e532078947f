//! Root-mean-square norm (<https://arxiv.org/abs/1910.07467>) of each consecutive `d` numbers:
//!
//! `y = x w / sqrt(mean(x^2) + eps)`
//!
//! Backward, with `i = 1 / sqrt(mean(x^2) + eps)`: `dx = i g w - i^3 x mean(g w x)` and `dw = sum over rows of g x i`.
//! Keeps `x`, which the residual stream keeps anyway.

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, Flex,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{DType, Tensor},
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, rows_at_a_time, values},
    simd::dot,
};

/// The norm in f32, returned in `x`'s dtype.
///
/// # Shapes
/// - `x` and output: `[n, groups * d]`; each group is normed on its own
/// - `weight`: `[d]`
pub fn rms_norm(operators: Operators, x: Tensor<2>, weight: &Tensor<1>, eps: f64) -> Tensor<2> {
    match operators {
        Operators::Composed => composed(x, weight, eps),
        Operators::Fused => {
            let weight = weight.clone().cast(DType::F32);
            let y = <Dispatch as RmsNorm>::fused_rms_norm(x.into_dispatch(), weight.into_dispatch(), eps);
            Tensor::from_dispatch(y)
        }
    }
}

fn composed(x: Tensor<2>, weight: &Tensor<1>, eps: f64) -> Tensor<2> {
    let dtype = x.dtype();
    let ([n, width], [d]) = (x.dims(), weight.dims());
    let x = x.cast(DType::F32).reshape([n * width / d, d]);
    let inverse = (x.clone().square().mean_dim(1) + eps).sqrt().recip();
    let normed = (x * inverse).cast(dtype) * weight.clone().unsqueeze();
    normed.reshape([n, width])
}

#[backend_extension(Flex, Autodiff)]
trait RmsNorm: Backend {
    fn fused_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
}

impl RmsNorm for Flex {
    fn fused_rms_norm(x: FlexTensor, weight: FlexTensor, eps: f64) -> FlexTensor {
        let (x, weight) = (contiguous(x), contiguous(weight));
        let (xs, w) = (values(&x), values(&weight));
        let mut y = Buffer::take(xs.len());
        let chunk = rows_at_a_time(w.len()) * w.len();
        y.par_chunks_mut(chunk).zip(xs.par_chunks(chunk)).for_each(|(y, x)| forward(x, w, eps as f32, y));
        y.into_tensor(x.layout().shape().clone())
    }
}

#[pulp::with_simd(forward = pulp::Arch::new())]
#[inline(always)]
fn forward_simd<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let d = weight.len();
    for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
        let inverse = 1.0 / (dot(simd, x, x) / d as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * inverse * w;
        }
    }
}

#[pulp::with_simd(backward_x = pulp::Arch::new())]
#[inline(always)]
fn backward_x_simd<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, g: &[f32], dx: &mut [f32]) {
    let d = weight.len();
    for ((x, g), dx) in x.chunks_exact(d).zip(g.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let inverse = 1.0 / (dot(simd, x, x) / d as f32 + eps).sqrt();
        for ((dx, g), w) in dx.iter_mut().zip(g).zip(weight) {
            *dx = g * w;
        }
        let along = dot(simd, dx, x) * inverse * inverse * inverse / d as f32;
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = *dx * inverse - x * along;
        }
    }
}

#[pulp::with_simd(backward_weight = pulp::Arch::new())]
#[inline(always)]
fn backward_weight_simd<S: Simd>(simd: S, x: &[f32], eps: f32, g: &[f32], dw: &mut [f32]) {
    let d = dw.len();
    dw.fill(0.0);
    for (x, g) in x.chunks_exact(d).zip(g.chunks_exact(d)) {
        let inverse = 1.0 / (dot(simd, x, x) / d as f32 + eps).sqrt();
        for ((dw, x), g) in dw.iter_mut().zip(x).zip(g) {
            *dw += g * x * inverse;
        }
    }
}

#[derive(Debug)]
struct Gradient;

/// `x`, `weight`, `eps`.
type State = (FlexTensor, FlexTensor, f64);

impl Backward<Flex, 2> for Gradient {
    type State = State;

    fn backward(self, ops: Ops<State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = contiguous(gradients.consume::<Flex>(&ops.node));
        let (x, weight, eps) = ops.state;
        let (g, xs, w) = (values(&g), values(&x), values(&weight));
        let d = w.len();
        let chunk = rows_at_a_time(d) * d;
        let [of_x, of_weight] = ops.parents;
        if let Some(node) = of_x {
            let mut dx = Buffer::take(xs.len());
            let parts = dx.par_chunks_mut(chunk).zip(xs.par_chunks(chunk)).zip(g.par_chunks(chunk));
            parts.for_each(|((dx, x), g)| backward_x(x, w, eps as f32, g, dx));
            gradients.register::<Flex>(node.id, dx.into_tensor(x.layout().shape().clone()));
        }
        if let Some(node) = of_weight {
            // Parts of a fixed size, added in order: threads don't change the sum.
            let mut parts = Buffer::take(xs.len().div_ceil(chunk) * d);
            let chunks = parts.par_chunks_mut(d).zip(xs.par_chunks(chunk)).zip(g.par_chunks(chunk));
            chunks.for_each(|((dw, x), g)| backward_weight(x, eps as f32, g, dw));
            let mut dw = Buffer::zeros(d);
            for part in parts.chunks_exact(d) {
                dw.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            gradients.register::<Flex>(node.id, dw.into_tensor([d]));
        }
    }
}

impl<C: CheckpointStrategy> RmsNorm for Autodiff<Flex, C> {
    fn fused_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node()];
        let (x, weight) = (contiguous(x.into_primitive()), contiguous(weight.into_primitive()));
        match Gradient.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(op) => op.finish(Flex::fused_rms_norm(x, weight, eps)),
            OpsKind::Tracked(op) => {
                let y = Flex::fused_rms_norm(x.clone(), weight.clone(), eps);
                op.finish((x, weight, eps), y)
            }
        }
    }
}
