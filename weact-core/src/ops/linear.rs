//! A linear map with a low-rank update beside it (Eq. 1), added to a residual stream where there is one:
//!
//! `y = r + x W + s (x A) B`
//!
//! Backward, with `h = s x A` kept from the forward pass and `t = s g B^T`: `dx = g W^T + t A^T`, `dA = x^T t`, `dB = h^T g`,
//! `dW = x^T g`, `dr = g`. Each is computed only where it is asked for: a frozen `W` has no gradient, and `x` is kept only for
//! `dA` and `dW`. The update never exists as a matrix of `W`'s size, and both products go into the same sums.

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

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, dims, values},
    gemv,
    matrix::{Matrix, Weight, weight_of},
    product::{Onto, multiply},
};
use crate::lora::Factors;

/// `residual + x W + scale (x a) b`.
///
/// # Shapes
/// - `x`: `[n, d_in]`, `weight`: `[d_in, d_out]`
/// - `residual` and output: `[n, d_out]`
pub fn linear(
    operators: Operators,
    x: Tensor<2>,
    weight: &Tensor<2>,
    factors: Option<&Factors>,
    residual: Option<Tensor<2>>,
) -> Tensor<2> {
    match operators {
        Operators::Composed => composed(x, weight, factors, residual),
        Operators::Fused => {
            let none = || Tensor::<2>::empty([0, 0], &x.device().inner());
            let (a, b) = factors.map_or_else(|| (none(), none()), |f| (f.a.clone(), f.b.clone()));
            let residual = residual.unwrap_or_else(none);
            let scale = factors.map_or(0.0, |f| f.scale);
            Tensor::from_dispatch(<Dispatch as Linear>::fused_linear(
                x.into_dispatch(),
                weight.clone().into_dispatch(),
                a.into_dispatch(),
                b.into_dispatch(),
                residual.into_dispatch(),
                scale,
            ))
        }
    }
}

fn composed(x: Tensor<2>, weight: &Tensor<2>, factors: Option<&Factors>, residual: Option<Tensor<2>>) -> Tensor<2> {
    let update = factors.map(|f| f.apply(x.clone()));
    let y = x.matmul(weight.clone());
    let y = match update {
        None => y,
        Some(update) => y + update,
    };
    match residual {
        None => y,
        Some(residual) => residual + y,
    }
}

#[backend_extension(Flex, Autodiff)]
trait Linear: Backend {
    /// Without an update `a` and `b` have no elements; without a residual stream `residual` has none.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self>;
}

/// A contiguous f32 tensor `[rows, cols]` as a matrix.
fn matrix(tensor: &FlexTensor) -> Matrix<'_> {
    let [n_rows, n_cols] = dims(tensor);
    Matrix::new(values(tensor), n_rows, n_cols, n_cols)
}

fn is_there(tensor: &FlexTensor) -> bool {
    tensor.layout().num_elements() > 0
}

/// `scale * left right`, contiguous.
fn scaled_product(left: Matrix<'_>, right: Matrix<'_>, scale: f32) -> Buffer {
    let mut out = Buffer::take(left.n_rows * right.n_cols);
    multiply(&[(left, Weight::F32(right))], Onto::Zero, &mut out);
    if scale != 1.0 {
        out.iter_mut().for_each(|x| *x *= scale);
    }
    out
}

/// The output and `h = scale x a`, `[n, r]`. All but `weight` are contiguous.
fn forward(
    x: &FlexTensor,
    weight: &FlexTensor,
    (a, b, scale): (&FlexTensor, &FlexTensor, f64),
    residual: &FlexTensor,
) -> (Buffer, Option<Buffer>) {
    let ([n, _], [_, d_out]) = (dims(x), dims(weight));
    let mut y = Buffer::take(n * d_out);
    let low = is_there(a).then(|| scaled_product(matrix(x), matrix(a), scale as f32));
    let onto = if is_there(residual) { Onto::Rows(values(residual)) } else { Onto::Zero };
    if n == 1 {
        gemv::multiply_row(values(x), weight_of(weight), &mut y);
        if let Some(low) = &low {
            gemv::add_rows(low, values(b), &mut y);
        }
        if let Onto::Rows(residual) = onto {
            y.iter_mut().zip(residual).for_each(|(y, r)| *y += r);
        }
        return (y, low);
    }
    let mut summands = vec![(matrix(x), weight_of(weight))];
    if let Some(low) = &low {
        let rank = low.len() / n;
        summands.push((Matrix::new(low, n, rank, rank), Weight::F32(matrix(b))));
    }
    multiply(&summands, onto, &mut y);
    (y, low)
}

impl Linear for Flex {
    fn fused_linear(
        x: FlexTensor,
        weight: FlexTensor,
        a: FlexTensor,
        b: FlexTensor,
        residual: FlexTensor,
        scale: f64,
    ) -> FlexTensor {
        let [x, a, b, residual] = [x, a, b, residual].map(contiguous);
        let shape = [dims::<2>(&x)[0], dims::<2>(&weight)[1]];
        forward(&x, &weight, (&a, &b, scale), &residual).0.into_tensor(shape)
    }
}

#[derive(Debug)]
struct Gradient;

#[derive(Clone, Debug)]
struct State {
    x: Option<FlexTensor>,
    weight: FlexTensor,
    a: FlexTensor,
    b: FlexTensor,
    low: Option<FlexTensor>, // scale x a, [n, r]
    scale: f64,
}

impl Backward<Flex, 5> for Gradient {
    type State = State;

    fn backward(self, ops: Ops<State, 5>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = contiguous(gradients.consume::<Flex>(&ops.node));
        let State { x, weight, a, b, low, scale } = ops.state;
        let [of_x, of_weight, of_a, of_b, of_residual] = ops.parents;
        let [n, d_out] = dims(&g);
        let [d_in, _] = dims(&weight);
        let x = x.as_ref().map(matrix);
        let upstream = matrix(&g);
        let adapted = low.is_some() && (of_x.is_some() || of_a.is_some());
        let rank = dims::<2>(&a)[1];
        // The products are independent but for `t`, so that threads that are done with one go on with another.
        let through_b = || adapted.then(|| scaled_product(upstream, matrix(&b).transposed(), scale as f32)); // [n, r]
        let to_x = |t: Option<Matrix<'_>>| {
            of_x.as_ref().map(|_| {
                let mut dx = Buffer::take(n * d_in);
                let mut summands = vec![(upstream, weight_of(&weight).transposed())];
                summands.extend(t.map(|t| (t, Weight::F32(matrix(&a).transposed()))));
                multiply(&summands, Onto::Zero, &mut dx);
                dx
            })
        };
        let to_a = |t: Option<Matrix<'_>>| {
            let t = t.filter(|_| of_a.is_some())?;
            Some(scaled_product(x.expect("x is kept for its factor").transposed(), t, 1.0))
        };
        // Its transpose, [d_out, r], which packs the small matrix and not the large one.
        let to_b = || low.as_ref().filter(|_| of_b.is_some()).map(|low| scaled_product(upstream.transposed(), matrix(low), 1.0));
        let to_weight =
            || of_weight.as_ref().map(|_| scaled_product(x.expect("x is kept for a trained weight").transposed(), upstream, 1.0));
        let through_x = || {
            let t = through_b();
            let t = t.as_ref().map(|t| Matrix::new(t, n, rank, rank));
            rayon::join(|| to_x(t), || to_a(t))
        };
        let ((dx, da), (db, dw)) = rayon::join(through_x, || rayon::join(to_b, to_weight));
        if let (Some(node), Some(dx)) = (of_x, dx) {
            gradients.register::<Flex>(node.id, dx.into_tensor([n, d_in]));
        }
        if let (Some(node), Some(da)) = (of_a, da) {
            gradients.register::<Flex>(node.id, da.into_tensor([d_in, rank]));
        }
        if let (Some(node), Some(db)) = (of_b, db) {
            gradients.register::<Flex>(node.id, db.into_tensor([d_out, rank]).transpose(0, 1));
        }
        if let (Some(node), Some(dw)) = (of_weight, dw) {
            gradients.register::<Flex>(node.id, dw.into_tensor([d_in, d_out]));
        }
        if let Some(node) = of_residual {
            gradients.register::<Flex>(node.id, g);
        }
    }
}

impl<C: CheckpointStrategy> Linear for Autodiff<Flex, C> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), a.node(), b.node(), residual.node()];
        let keeps_x = weight.is_tracked() || a.is_tracked();
        let weight = weight.into_primitive();
        let [x, a, b, residual] = [x, a, b, residual].map(|t| contiguous(t.into_primitive()));
        let [n, _] = dims(&x);
        let [_, d_out] = dims(&weight);
        let (y, low) = forward(&x, &weight, (&a, &b, scale), &residual);
        let y = y.into_tensor([n, d_out]);
        match Gradient.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(op) => op.finish(y),
            OpsKind::Tracked(op) => {
                let low = low.map(|low| low.into_tensor([n, dims::<2>(&a)[1]]));
                op.finish(State { x: keeps_x.then_some(x), weight, a, b, low, scale }, y)
            }
        }
    }
}
