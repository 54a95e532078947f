//! AdamW (<https://arxiv.org/abs/1711.05101>) over flat parameters, and clipping by the norm of the whole gradient.

use std::mem;

use burn::tensor::{DType, Tensor, TensorData};
use pulp::Simd;
use rayon::prelude::*;
use weact_core::ops::{self, Operators};

/// One trained tensor, flattened, with its moments. On a device without autodiff.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name in files.
    pub name: String,
    /// Whether weight decay applies: matrices yes, norms and biases no.
    pub decays: bool,
    /// The value, `[n]`.
    pub value: Tensor<1>,
    /// Decaying mean of the gradient, `[n]`.
    pub first: Tensor<1>,
    /// Decaying mean of its square, `[n]`.
    pub second: Tensor<1>,
}

impl Parameter {
    /// A parameter whose moments are zero.
    pub fn new(name: String, decays: bool, value: Tensor<1>) -> Self {
        let zeros = value.zeros_like();
        Self { name, decays, value, first: zeros.clone(), second: zeros }
    }
}

/// AdamW's settings.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment, as in PyTorch (1e-8).
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The Euclidean norm of all gradients together.
pub fn global_norm(gradients: &[Tensor<1>]) -> f64 {
    gradients.iter().map(|g| ops::sum_of_squares(g.clone())).sum::<f64>().sqrt()
}

/// What gradients of this norm are to be multiplied by so that their norm is at most `max_norm` (0 leaves them), as
/// `torch.nn.utils.clip_grad_norm_`.
pub fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// The numbers of one update, in the precision of the update.
#[derive(Clone, Copy)]
struct Coefficients {
    gradient_scale: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    correct2: f32,
    eps: f32,
    rate: f32,
}

impl AdamW {
    /// Update number `update` (from 1) of every parameter at learning rate `lr`, with gradients times `gradient_scale`.
    ///
    /// `p <- p - lr wd p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`
    pub fn update(
        &self,
        parameters: &mut [Parameter],
        gradients: Vec<Tensor<1>>,
        (gradient_scale, lr): (f64, f64),
        update: usize,
    ) {
        let t = i32::try_from(update).expect("fewer than 2^31 updates");
        let (correct1, correct2) = (1.0 - self.beta1.powi(t), 1.0 - self.beta2.powi(t));
        let decay = |p: &Parameter| if p.decays { 1.0 - lr * self.weight_decay } else { 1.0 };
        let Some(first) = parameters.first() else { return };
        if Operators::best_for(&first.value.device(), first.value.dtype()) == Operators::Composed {
            for (p, g) in parameters.iter_mut().zip(gradients) {
                let g = g * gradient_scale;
                p.first = p.first.clone() * self.beta1 + g.clone() * (1.0 - self.beta1);
                p.second = p.second.clone() * self.beta2 + g.square() * (1.0 - self.beta2);
                let root = (p.second.clone() / correct2).sqrt() + self.eps;
                p.value = p.value.clone() * decay(p) - p.first.clone() / root * (lr / correct1);
            }
            return;
        }
        let with = Coefficients {
            gradient_scale: gradient_scale as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            correct2: correct2 as f32,
            eps: self.eps as f32,
            rate: (lr / correct1) as f32,
        };
        let device = first.value.device();
        for (p, g) in parameters.iter_mut().zip(gradients) {
            let decay = decay(p) as f32;
            // Taken out, so that this is their only owner and they change in place.
            let [mut value, mut first, mut second] = [&mut p.value, &mut p.first, &mut p.second].map(take);
            let g = g.into_data();
            update_all(
                slice_mut(&mut value),
                slice_mut(&mut first),
                slice_mut(&mut second),
                g.as_slice().expect(F32),
                decay,
                with,
            );
            [p.value, p.first, p.second] = [value, first, second].map(|data| Tensor::from_data(data, &device));
        }
    }
}

const F32: &str = "parameters and gradients are f32";

fn take(tensor: &mut Tensor<1>) -> TensorData {
    let empty = Tensor::empty([0], (&tensor.device(), DType::F32));
    mem::replace(tensor, empty).into_data()
}

fn slice_mut(data: &mut TensorData) -> &mut [f32] {
    data.as_mut_slice().expect(F32)
}

fn update_all(value: &mut [f32], first: &mut [f32], second: &mut [f32], gradient: &[f32], decay: f32, with: Coefficients) {
    const CHUNK: usize = 1 << 15;
    let moments = first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK));
    let parts = value.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).zip(moments);
    parts.for_each(|((value, g), (first, second))| update_part(value, first, second, g, decay, with));
}

#[pulp::with_simd(update_part = pulp::Arch::new())]
#[inline(always)]
fn update_part_simd<S: Simd>(
    _: S,
    value: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    gradient: &[f32],
    decay: f32,
    with: Coefficients,
) {
    for (((value, first), second), g) in value.iter_mut().zip(first).zip(second).zip(gradient) {
        let g = g * with.gradient_scale;
        *first = *first * with.beta1 + g * with.rest1;
        *second = *second * with.beta2 + g * g * with.rest2;
        let root = (*second / with.correct2).sqrt() + with.eps;
        *value = *value * decay - *first / root * with.rate;
    }
}
