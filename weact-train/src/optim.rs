//! AdamW (<https://arxiv.org/abs/1711.05101>) over flat parameters, and clipping by the norm of the whole gradient.

use burn::tensor::Tensor;

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
    let squares = gradients.iter().map(|g| f64::from(g.clone().square().sum().into_scalar::<f32>()));
    squares.sum::<f64>().sqrt()
}

/// Scales gradients so that their norm is at most `max_norm` (0 leaves them), as `torch.nn.utils.clip_grad_norm_`. Returns the
/// norm before clipping.
pub fn clip(gradients: &mut [Tensor<1>], max_norm: f64) -> f64 {
    let norm = global_norm(gradients);
    let scale = max_norm / (norm + 1e-6);
    if max_norm > 0.0 && scale < 1.0 {
        for gradient in gradients {
            *gradient = gradient.clone() * scale;
        }
    }
    norm
}

impl AdamW {
    /// Update number `update` (from 1) of every parameter at learning rate `lr`.
    ///
    /// `p <- p - lr wd p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`
    pub fn update(&self, parameters: &mut [Parameter], gradients: &[Tensor<1>], lr: f64, update: usize) {
        let t = i32::try_from(update).expect("fewer than 2^31 updates");
        let (correct1, correct2) = (1.0 - self.beta1.powi(t), 1.0 - self.beta2.powi(t));
        for (p, g) in parameters.iter_mut().zip(gradients) {
            p.first = p.first.clone() * self.beta1 + g.clone() * (1.0 - self.beta1);
            p.second = p.second.clone() * self.beta2 + g.clone().square() * (1.0 - self.beta2);
            let root = (p.second.clone() / correct2).sqrt() + self.eps;
            let decay = if p.decays { 1.0 - lr * self.weight_decay } else { 1.0 };
            p.value = p.value.clone() * decay - p.first.clone() / root * (lr / correct1);
        }
    }
}
