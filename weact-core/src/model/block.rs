//! One transformer block: attention and feed-forward part, each after its RMSNorm and added to the residual stream.

use burn::tensor::{DType, Tensor, activation::silu};

use super::{Config, attention::attention, cache::KvCache, rope::Rotation};
use crate::lora::{Factors, Projection, lora_linear};

/// A frozen linear map.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[d_in, d_out]`
    pub weight: Tensor<2>,
    /// `[d_out]`
    pub bias: Option<Tensor<1>>,
}

impl Linear {
    /// `x W + bias`, with the update of `factors` beside it.
    ///
    /// # Shapes
    /// - `x`: `[n, d_in]`, output: `[n, d_out]`
    pub fn forward(&self, x: Tensor<2>, factors: Option<&Factors>) -> Tensor<2> {
        let y = lora_linear(x, self.weight.clone(), factors);
        match &self.bias {
            None => y,
            Some(bias) => y + bias.clone().unsqueeze(),
        }
    }
}

/// Root-mean-square norm over the last dimension, computed in f32 and returned in `x`'s dtype.
///
/// # Shapes
/// - `weight`: `[d]`; `x` and output: `[.., d]`
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: &Tensor<1>, eps: f64) -> Tensor<D> {
    let dtype = x.dtype();
    let x = if dtype == DType::F32 { x } else { x.cast(DType::F32) };
    let inverse = (x.clone().square().mean_dim(D - 1) + eps).sqrt().recip();
    let normed = x * inverse;
    let normed = if dtype == DType::F32 { normed } else { normed.cast(dtype) };
    normed * weight.clone().unsqueeze()
}

/// The weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Before attention, `[hidden]`.
    pub input_norm: Tensor<1>,
    /// Before the feed-forward part, `[hidden]`.
    pub post_attention_norm: Tensor<1>,
    /// On each head's queries and keys (Qwen3), `[head_dim]` each.
    pub head_norms: Option<(Tensor<1>, Tensor<1>)>,
    /// In the order of [`Projection::BLOCK`].
    pub linears: [Linear; 7],
}

/// The factors of one block's projections in the order of [`Projection::BLOCK`].
pub type BlockFactors<'a> = [Option<&'a Factors>; 7];

impl Block {
    /// The block's output, reading and extending `cache` where there is one.
    ///
    /// # Shapes
    /// - `x` and output: `[batch, n_new, hidden]`
    pub fn forward(
        &self,
        config: &Config,
        x: Tensor<3>,
        factors: BlockFactors<'_>,
        (rotation, mask): (&Rotation, Option<&Tensor<4>>),
        cache: Option<(&mut KvCache, usize)>,
    ) -> Tensor<3> {
        let [batch, n_new, hidden] = x.dims();
        let dtype = x.dtype();
        let linear = |p: Projection, x: Tensor<2>| self.linears[p as usize].forward(x, factors[p as usize]);
        let heads = |x: Tensor<2>, n: usize| x.reshape([batch, n_new, n, config.head_dim]);
        let in_f32 = |x: Tensor<4>| if dtype == DType::F32 { x } else { x.cast(DType::F32) };

        let normed = rms_norm(x.clone(), &self.input_norm, config.rms_norm_eps).reshape([batch * n_new, hidden]);
        let mut q = heads(linear(Projection::QProj, normed.clone()), config.n_heads); // [batch, n_new, heads, head_dim]
        let mut k = heads(linear(Projection::KProj, normed.clone()), config.n_kv_heads);
        let v = heads(linear(Projection::VProj, normed), config.n_kv_heads);
        if let Some((q_norm, k_norm)) = &self.head_norms {
            q = rms_norm(q, q_norm, config.rms_norm_eps);
            k = rms_norm(k, k_norm, config.rms_norm_eps);
        }
        let q = rotation.apply(in_f32(q).swap_dims(1, 2)); // [batch, heads, n_new, head_dim]
        let k = rotation.apply(in_f32(k).swap_dims(1, 2));
        let v = in_f32(v).swap_dims(1, 2);
        let (k, v) = match cache {
            None => (k, v),
            Some((cache, layer)) => cache.extend(layer, k, v),
        };
        let attended = attention(q, k, v, mask).swap_dims(1, 2).reshape([batch * n_new, config.n_heads * config.head_dim]);
        let attended = if dtype == DType::F32 { attended } else { attended.cast(dtype) };
        let x = x + linear(Projection::OProj, attended).reshape([batch, n_new, hidden]);

        let normed = rms_norm(x.clone(), &self.post_attention_norm, config.rms_norm_eps).reshape([batch * n_new, hidden]);
        let gated = silu(linear(Projection::GateProj, normed.clone())) * linear(Projection::UpProj, normed);
        x + linear(Projection::DownProj, gated).reshape([batch, n_new, hidden])
    }
}
