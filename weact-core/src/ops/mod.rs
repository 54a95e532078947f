//! The operators that take a model's time, each with two bodies: composed of Burn's operations, for every backend, and fused for
//! the CPU, with its own backward pass. The two compute the same; tests compare them, and [`self_check`] does on any device.

mod buffer;
mod flex;
mod simd;
mod matrix;
mod product;
mod gemv;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;
pub mod attention;
pub mod cross_entropy;
pub mod add_rows;
pub mod sum_of_squares;
pub mod self_check;

use burn::tensor::{DType, Device};

pub use add_rows::add_rows;
pub use attention::{Heads, Sequence, attention};
pub use cross_entropy::{token_nll, token_scores};
pub use linear::linear;
pub use product::{PlainMatrix, gram, product};
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use self_check::SelfCheck;
pub use sum_of_squares::sum_of_squares;
pub use swiglu::swiglu;

/// Which body of the operators a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operators {
    /// The CPU's own kernels: f32 activations, weights in f32 or bf16.
    Fused,
    /// Burn's operations.
    Composed,
}

impl Operators {
    /// The fused ones where they exist: on the CPU, for weights in f32 and bf16.
    pub fn best_for(device: &Device, dtype: DType) -> Self {
        let on_cpu = device.clone().inner() == Device::flex();
        if on_cpu && matches!(dtype, DType::F32 | DType::BF16) { Self::Fused } else { Self::Composed }
    }
}

/// Runs `f` on a thread of the pool that the fused operators share, so that none of them has to hand its work over to it first.
/// Composed operators stay on the caller's thread: they have no buffers of their own, and on another worker each time, the heap of
/// each would grow to the graph's size.
pub fn on_workers<R: Send>(operators: Operators, f: impl FnOnce() -> R + Send) -> R {
    match operators {
        Operators::Fused => rayon::scope(|_| f()),
        Operators::Composed => f(),
    }
}
