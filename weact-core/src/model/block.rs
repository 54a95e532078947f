//! One transformer block: attention and feed-forward part, each after its RMSNorm and added to the residual stream.

use burn::tensor::{DType, Tensor};

use super::{Config, Positions, cache::KvCache};
use crate::{
    lora::{Factors, Module, Projection},
    ops::{self, Heads, Operators},
};

/// A frozen linear map.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[d_in, d_out]`
    pub weight: Tensor<2>,
    /// `[d_out]`
    pub bias: Option<Tensor<1>>,
}

impl Linear {
    /// `residual + x W + bias`, with the update of `factors` beside it.
    ///
    /// # Shapes
    /// - `x`: `[n, d_in]`; `residual` and output: `[n, d_out]`
    pub fn forward(
        &self,
        operators: Operators,
        x: Tensor<2>,
        factors: Option<&Factors>,
        residual: Option<Tensor<2>>,
    ) -> Tensor<2> {
        let y = ops::linear(operators, x, &self.weight, factors, residual);
        match &self.bias {
            None => y,
            Some(bias) => {
                let bias = in_dtype(bias.clone().unsqueeze::<2>(), y.dtype());
                y + bias
            }
        }
    }
}

/// The tensor in this element type; itself where it has it.
pub(super) fn in_dtype<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
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

/// Sees what goes into each projection of the blocks, `[n, d_in]`, before it is applied: in the order of [`Projection::BLOCK`] in
/// each block, and block after block.
pub type Observer<'a> = dyn FnMut(Module, &Tensor<2>) + Send + 'a;

impl Block {
    /// The block's output, reading and extending `cache` where there is one.
    ///
    /// # Shapes
    /// - `x` and output: `[n, hidden]`
    pub fn forward(
        &self,
        how: (&Config, Operators),
        x: Tensor<2>,
        factors: BlockFactors<'_>,
        positions: &Positions,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Tensor<2> {
        self.forward_observed(how, x, factors, positions, cache, None)
    }

    /// [`Block::forward`], with who looks on and the number of this block, by which the observer knows its modules.
    pub fn forward_observed(
        &self,
        (config, operators): (&Config, Operators),
        x: Tensor<2>,
        factors: BlockFactors<'_>,
        positions: &Positions,
        cache: Option<(&mut KvCache, usize)>,
        mut observer: Option<(&mut Observer<'_>, usize)>,
    ) -> Tensor<2> {
        let dtype = x.dtype();
        let mut linear = |projection: Projection, x: Tensor<2>, residual: Option<Tensor<2>>| {
            if let Some((observe, layer)) = &mut observer {
                observe(Module { layer: Some(*layer), projection }, &x);
            }
            self.linears[projection as usize].forward(operators, x, factors[projection as usize], residual)
        };
        let norm = |x: Tensor<2>, weight: &Tensor<1>| ops::rms_norm(operators, x, weight, config.rms_norm_eps);
        let rotate =
            |x: Tensor<2>| ops::rope(operators, in_dtype(x, DType::F32), &positions.rotation.cos, &positions.rotation.sin);

        let normed = norm(x.clone(), &self.input_norm);
        let mut q = linear(Projection::QProj, normed.clone(), None); // [n, heads * head_dim]
        let mut k = linear(Projection::KProj, normed.clone(), None); // [n, kv_heads * head_dim]
        let v = linear(Projection::VProj, normed, None);
        if let Some((q_norm, k_norm)) = &self.head_norms {
            q = norm(q, q_norm);
            k = norm(k, k_norm);
        }
        let (q, k, v) = (rotate(q), rotate(k), in_dtype(v, DType::F32));
        let (k, v) = match cache {
            None => (k, v),
            Some((cache, layer)) => cache.extend(layer, k, v),
        };
        let heads = Heads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let attended = in_dtype(ops::attention(operators, [q, k, v], heads, &positions.sequences), dtype);
        let x = linear(Projection::OProj, attended, Some(x));

        let normed = norm(x.clone(), &self.post_attention_norm);
        let gate = linear(Projection::GateProj, normed.clone(), None);
        let gated = ops::swiglu(operators, gate, linear(Projection::UpProj, normed, None));
        linear(Projection::DownProj, gated, Some(x))
    }
}
