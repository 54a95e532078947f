//! The sum of squares of a tensor, of which a gradient's norm is made: one pass, summed in f64 over parts of a fixed size.

use burn::{
    backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor},
    tensor::{Tensor, TensorData},
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    flex::{contiguous, values},
    simd::dot,
};

/// `sum_i x_i^2` of `[n]` numbers.
pub fn sum_of_squares(x: Tensor<1>) -> f64 {
    match Operators::best_for(&x.device(), x.dtype()) {
        Operators::Composed => f64::from(x.square().sum().into_scalar::<f32>()),
        Operators::Fused => {
            let sum = Tensor::<1>::from_dispatch(<Dispatch as SumOfSquares>::fused_sum_of_squares(x.into_dispatch()));
            sum.into_scalar::<f64>()
        }
    }
}

#[backend_extension(Flex)]
trait SumOfSquares: Backend {
    /// `[1]`, in f64.
    fn fused_sum_of_squares(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl SumOfSquares for Flex {
    fn fused_sum_of_squares(x: FlexTensor) -> FlexTensor {
        const PART: usize = 1 << 14;
        let x = contiguous(x);
        let parts: Vec<f64> = values(&x).par_chunks(PART).map(|part| f64::from(squares(part))).collect();
        FlexTensor::from_data(TensorData::new(vec![parts.iter().sum::<f64>()], [1]))
    }
}

#[pulp::with_simd(squares = pulp::Arch::new())]
#[inline(always)]
fn squares_simd<S: Simd>(simd: S, x: &[f32]) -> f32 {
    dot(simd, x, x)
}
