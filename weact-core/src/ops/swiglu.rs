//! The gate of a feed-forward part (<https://arxiv.org/abs/2002.05202>): `y = silu(gate) up` with `silu(x) = x sigmoid(x)`.
//!
//! Backward, with `s = sigmoid(gate)`: `d gate = g up s (1 + gate (1 - s))` and `d up = g gate s`. Keeps `gate` and `up`.

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
    tensor::{Tensor, activation::silu},
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, rows_at_a_time, values},
    simd::sigmoid,
};

/// `silu(gate) * up`, all `[n, d]`.
pub fn swiglu(operators: Operators, gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    match operators {
        Operators::Composed => silu(gate) * up,
        Operators::Fused => Tensor::from_dispatch(<Dispatch as SwiGlu>::fused_swiglu(gate.into_dispatch(), up.into_dispatch())),
    }
}

#[backend_extension(Flex, Autodiff)]
trait SwiGlu: Backend {
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl SwiGlu for Flex {
    fn fused_swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        let (gate, up) = (contiguous(gate), contiguous(up));
        let (gates, ups) = (values(&gate), values(&up));
        let mut y = Buffer::take(gates.len());
        let chunk = rows_at_a_time(1);
        y.par_chunks_mut(chunk)
            .zip(gates.par_chunks(chunk))
            .zip(ups.par_chunks(chunk))
            .for_each(|((y, gate), up)| forward(gate, up, y));
        y.into_tensor(gate.layout().shape().clone())
    }
}

#[pulp::with_simd(forward = pulp::Arch::new())]
#[inline(always)]
fn forward_simd<S: Simd>(_: S, gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = gate * sigmoid(*gate) * up;
    }
}

#[pulp::with_simd(backward = pulp::Arch::new())]
#[inline(always)]
fn backward_simd<S: Simd>(_: S, gate: &[f32], up: &[f32], g: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
    let given = gate.iter().zip(up).zip(g);
    for (((gate, up), g), (d_gate, d_up)) in given.zip(d_gate.iter_mut().zip(d_up)) {
        let s = sigmoid(*gate);
        *d_gate = g * up * s * (1.0 + gate * (1.0 - s));
        *d_up = g * gate * s;
    }
}

#[derive(Debug)]
struct Gradient;

impl Backward<Flex, 2> for Gradient {
    type State = (FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = contiguous(gradients.consume::<Flex>(&ops.node));
        let (gate, up) = ops.state;
        let (g, gates, ups) = (values(&g), values(&gate), values(&up));
        let (mut d_gate, mut d_up) = (Buffer::take(g.len()), Buffer::take(g.len()));
        let chunk = rows_at_a_time(1);
        let given = gates.par_chunks(chunk).zip(ups.par_chunks(chunk)).zip(g.par_chunks(chunk));
        given
            .zip(d_gate.par_chunks_mut(chunk).zip(d_up.par_chunks_mut(chunk)))
            .for_each(|(((gate, up), g), (d_gate, d_up))| backward(gate, up, g, d_gate, d_up));
        for (parent, gradient) in ops.parents.into_iter().zip([d_gate, d_up]) {
            if let Some(node) = parent {
                gradients.register::<Flex>(node.id, gradient.into_tensor(gate.layout().shape().clone()));
            }
        }
    }
}

impl<C: CheckpointStrategy> SwiGlu for Autodiff<Flex, C> {
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let nodes = [gate.node(), up.node()];
        let (gate, up) = (contiguous(gate.into_primitive()), contiguous(up.into_primitive()));
        match Gradient.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(op) => op.finish(Flex::fused_swiglu(gate, up)),
            OpsKind::Tracked(op) => {
                let y = Flex::fused_swiglu(gate.clone(), up.clone());
                op.finish((gate, up), y)
            }
        }
    }
}
