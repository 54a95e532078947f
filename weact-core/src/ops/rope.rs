//! Rotary position embedding over the two halves of each head (Hugging Face's `rotate_half`, not interleaved pairs):
//!
//! `y_1 = x_1 cos - x_2 sin`, `y_2 = x_2 cos + x_1 sin`.
//!
//! Backward is the rotation by the opposite angle. Keeps the tables only.

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
    tensor::Tensor,
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, dims, rows_at_a_time, values},
};

/// Rotates every head of every row by its row's angles.
///
/// # Shapes
/// - `x` and output: `[n, heads * head_dim]`, f32
/// - `cos`, `sin`: `[n, head_dim / 2]`, f32
pub fn rope(operators: Operators, x: Tensor<2>, cos: &Tensor<2>, sin: &Tensor<2>) -> Tensor<2> {
    match operators {
        Operators::Composed => composed(x, cos, sin),
        Operators::Fused => Tensor::from_dispatch(<Dispatch as Rope>::fused_rope(
            x.into_dispatch(),
            cos.clone().into_dispatch(),
            sin.clone().into_dispatch(),
        )),
    }
}

fn composed(x: Tensor<2>, cos: &Tensor<2>, sin: &Tensor<2>) -> Tensor<2> {
    let ([n, width], [_, half]) = (x.dims(), cos.dims());
    let x = x.reshape([n, width / (2 * half), 2 * half]);
    let (first, second) = (x.clone().narrow(2, 0, half), x.narrow(2, half, half)); // [n, heads, half]
    let (cos, sin) = (cos.clone().unsqueeze_dim::<3>(1), sin.clone().unsqueeze_dim::<3>(1)); // [n, 1, half]
    let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let rotated_second = second * cos + first * sin;
    Tensor::cat(vec![rotated_first, rotated_second], 2).reshape([n, width])
}

#[backend_extension(Flex, Autodiff)]
trait Rope: Backend {
    fn fused_rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Rope for Flex {
    fn fused_rope(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        rotate_all(x, &cos, &sin, 1.0)
    }
}

/// Rotates by `direction` times the angles.
fn rotate_all(x: FlexTensor, cos: &FlexTensor, sin: &FlexTensor, direction: f32) -> FlexTensor {
    let x = contiguous(x);
    let ([_, width], [_, half]) = (dims(&x), dims(cos));
    let (xs, cos, sin) = (values(&x), values(cos), values(sin));
    let mut y = Buffer::take(xs.len());
    let rows = rows_at_a_time(width);
    let tables = cos.par_chunks(rows * half).zip(sin.par_chunks(rows * half));
    y.par_chunks_mut(rows * width)
        .zip(xs.par_chunks(rows * width))
        .zip(tables)
        .for_each(|((y, x), (cos, sin))| rotate(x, cos, sin, (width, half, direction), y));
    y.into_tensor(x.layout().shape().clone())
}

#[pulp::with_simd(rotate = pulp::Arch::new())]
#[inline(always)]
fn rotate_simd<S: Simd>(_: S, x: &[f32], cos: &[f32], sin: &[f32], (width, half, direction): (usize, usize, f32), y: &mut [f32]) {
    let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
    for ((x, y), (cos, sin)) in rows.zip(cos.chunks_exact(half).zip(sin.chunks_exact(half))) {
        for (x, y) in x.chunks_exact(2 * half).zip(y.chunks_exact_mut(2 * half)) {
            let ((x1, x2), (y1, y2)) = (x.split_at(half), y.split_at_mut(half));
            for i in 0..half {
                let sin = sin[i] * direction;
                y1[i] = x1[i] * cos[i] - x2[i] * sin;
                y2[i] = x2[i] * cos[i] + x1[i] * sin;
            }
        }
    }
}

#[derive(Debug)]
struct Gradient;

impl Backward<Flex, 1> for Gradient {
    type State = (FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = gradients.consume::<Flex>(&ops.node);
        let (cos, sin) = ops.state;
        if let [Some(node)] = ops.parents {
            gradients.register::<Flex>(node.id, rotate_all(g, &cos, &sin, -1.0));
        }
    }
}

impl<C: CheckpointStrategy> Rope for Autodiff<Flex, C> {
    fn fused_rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        let node = x.node();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        let y = rotate_all(x.into_primitive(), &cos, &sin, 1.0);
        match Gradient.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::UnTracked(op) => op.finish(y),
            OpsKind::Tracked(op) => op.finish((cos, sin), y),
        }
    }
}
