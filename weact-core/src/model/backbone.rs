//! The whole decoder: embedding, blocks, final norm, output head.

use burn::tensor::{DType, Device, Int, Tensor};

use super::{
    Config, Positions, Tokens,
    block::{Block, BlockFactors, Observer, in_dtype},
    cache::KvCache,
};
use crate::{
    lora::{FactorMap, Factors, Module, Projection},
    ops::{self, Operators},
};

/// A decoder's weights. They never change while an adapter is trained or run.
#[derive(Clone, Debug)]
pub struct Backbone {
    /// The architecture.
    pub config: Config,
    /// Which body of the operators runs.
    pub operators: Operators,
    /// `[vocab, hidden]`
    pub embedding: Tensor<2>,
    /// In order.
    pub blocks: Vec<Block>,
    /// `[hidden]`
    pub norm: Tensor<1>,
    /// `[hidden, vocab]`; where the model is tied, a transposed view of the embedding.
    pub head: Tensor<2>,
}

/// One weight of a backbone on its way through [`Backbone::map`].
#[derive(Clone, Debug)]
pub enum Parameter {
    /// A norm's or a bias's vector.
    Vector(Tensor<1>),
    /// A matrix `[d_in, d_out]`, or the embedding `[vocab, hidden]`.
    Matrix(Tensor<2>),
}

/// What [`Backbone::map`] does to each weight, given its Hugging Face name.
pub type Mapping<'a> = dyn FnMut(&str, Parameter) -> Parameter + 'a;

impl Backbone {
    /// Where the weights are.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// The weights' element type.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    /// The final hidden states (after the last norm) of new positions; `cache` holds the positions before them and is extended.
    ///
    /// # Shapes
    /// - output: `[n, hidden]`, the sequences' positions one after another
    ///
    /// # Panics
    /// If there is a cache and more than one sequence.
    pub fn hidden(&self, tokens: &Tokens, factors: Option<&FactorMap>, cache: Option<&mut KvCache>) -> Tensor<2> {
        ops::on_workers(self.operators, || self.hidden_here(tokens, factors, cache))
    }

    fn hidden_here(&self, tokens: &Tokens, factors: Option<&FactorMap>, mut cache: Option<&mut KvCache>) -> Tensor<2> {
        assert!(cache.is_none() || tokens.lengths.len() == 1, "a cache belongs to one sequence");
        let positions = self.positions(cache.as_ref().map_or(0, |c| c.len()), &tokens.lengths);
        if let Some(cache) = cache.as_deref_mut() {
            cache.reserve(tokens.n(), &self.device());
        }
        let x = self.through_blocks(self.embed(tokens.ids.clone()), &positions, factors, cache.as_deref_mut(), None);
        if let Some(cache) = cache {
            cache.advance(tokens.n());
        }
        x
    }

    /// The final hidden states of token embeddings without positions before them: [`Backbone::hidden`] for who needs the gradient
    /// of the embeddings.
    ///
    /// # Shapes
    /// - `x`: `[n, hidden]`, as [`Backbone::embed`] gives
    /// - output: `[n, hidden]`
    pub fn hidden_of(&self, x: Tensor<2>, positions: &Positions, factors: Option<&FactorMap>) -> Tensor<2> {
        self.through_blocks(x, positions, factors, None, None)
    }

    /// [`Backbone::hidden`] without a cache, where `observe` sees the input of every projection of the blocks.
    pub fn hidden_observed(&self, tokens: &Tokens, factors: Option<&FactorMap>, observe: &mut Observer<'_>) -> Tensor<2> {
        ops::on_workers(self.operators, || {
            let positions = self.positions(0, &tokens.lengths);
            self.through_blocks(self.embed(tokens.ids.clone()), &positions, factors, None, Some(observe))
        })
    }

    fn through_blocks(
        &self,
        mut x: Tensor<2>,
        positions: &Positions,
        factors: Option<&FactorMap>,
        mut cache: Option<&mut KvCache>,
        mut observer: Option<&mut Observer<'_>>,
    ) -> Tensor<2> {
        let how = (&self.config, self.operators);
        for (layer, block) in self.blocks.iter().enumerate() {
            let layer_cache = cache.as_deref_mut().map(|c| (c, layer));
            let layer_observer = observer.as_deref_mut().map(|o| (o, layer));
            x = block.forward_observed(how, x, block_factors(factors, layer), positions, layer_cache, layer_observer);
        }
        self.final_norm(x)
    }

    /// Token embeddings, `[n] -> [n, hidden]`, in the activations' dtype: f32 where the fused operators run.
    pub fn embed(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        let rows = self.embedding.clone().select(0, ids);
        match self.operators {
            Operators::Fused => in_dtype(rows, DType::F32),
            Operators::Composed => rows,
        }
    }

    /// The norm after the last block.
    pub fn final_norm(&self, x: Tensor<2>) -> Tensor<2> {
        ops::rms_norm(self.operators, x, &self.norm, self.config.rms_norm_eps)
    }

    /// Logits of hidden states, in f32.
    ///
    /// # Shapes
    /// - `hidden`: `[n, hidden]`
    /// - output: `[n, vocab]`
    pub fn logits(&self, hidden: Tensor<2>, factors: Option<&FactorMap>) -> Tensor<2> {
        in_dtype(ops::linear(self.operators, hidden, &self.head, head_factors(factors), None), DType::F32)
    }

    /// The same backbone with each weight replaced by `f(its Hugging Face name, it)`, in file order. Tied heads follow the
    /// embedding and are not visited.
    pub fn map(&self, f: &mut Mapping<'_>) -> Self {
        let mut mapped = self.clone();
        mapped.embedding = map_matrix(f, "model.embed_tokens.weight", &self.embedding);
        for (layer, block) in mapped.blocks.iter_mut().enumerate() {
            let prefix = format!("model.layers.{layer}");
            block.input_norm = map_vector(f, &format!("{prefix}.input_layernorm.weight"), &block.input_norm);
            block.post_attention_norm =
                map_vector(f, &format!("{prefix}.post_attention_layernorm.weight"), &block.post_attention_norm);
            if let Some((q, k)) = &mut block.head_norms {
                *q = map_vector(f, &format!("{prefix}.self_attn.q_norm.weight"), q);
                *k = map_vector(f, &format!("{prefix}.self_attn.k_norm.weight"), k);
            }
            for (projection, linear) in Projection::BLOCK.into_iter().zip(&mut block.linears) {
                let path = Module { layer: Some(layer), projection }.path();
                linear.weight = map_matrix(f, &format!("{path}.weight"), &linear.weight);
                if let Some(bias) = &mut linear.bias {
                    *bias = map_vector(f, &format!("{path}.bias"), bias);
                }
            }
        }
        mapped.norm = map_vector(f, "model.norm.weight", &self.norm);
        mapped.head =
            if self.config.tied { mapped.embedding.clone().transpose() } else { map_matrix(f, "lm_head.weight", &self.head) };
        mapped
    }
}

/// The factors of one block's projections.
pub fn block_factors(factors: Option<&FactorMap>, layer: usize) -> BlockFactors<'_> {
    Projection::BLOCK.map(|projection| factors.and_then(|f| f.get(&Module { layer: Some(layer), projection })))
}

/// The factors of the output head.
pub fn head_factors(factors: Option<&FactorMap>) -> Option<&Factors> {
    factors.and_then(|f| f.get(&Module { layer: None, projection: Projection::LmHead }))
}

fn map_vector(f: &mut Mapping<'_>, name: &str, weight: &Tensor<1>) -> Tensor<1> {
    match f(name, Parameter::Vector(weight.clone())) {
        Parameter::Vector(weight) => weight,
        Parameter::Matrix(_) => unreachable!("a vector maps to a vector"),
    }
}

fn map_matrix(f: &mut Mapping<'_>, name: &str, weight: &Tensor<2>) -> Tensor<2> {
    match f(name, Parameter::Matrix(weight.clone())) {
        Parameter::Matrix(weight) => weight,
        Parameter::Vector(_) => unreachable!("a matrix maps to a matrix"),
    }
}
