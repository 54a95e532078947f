//! The whole decoder: embedding, blocks, final norm, output head.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{
    Config,
    attention::causal_mask,
    block::{Block, BlockFactors, rms_norm},
    cache::KvCache,
    rope::Rotation,
};
use crate::{
    Error, Result,
    lora::{FactorMap, Module, Projection, lora_linear},
};

/// A decoder's weights. They never change while an adapter is trained or run.
#[derive(Clone, Debug)]
pub struct Backbone {
    /// The architecture.
    pub config: Config,
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
    /// Without a cache the rows are independent sequences from position 0, padded on the right: padding comes after every real
    /// position and so changes none of them.
    ///
    /// # Shapes
    /// - `ids`: `[batch, n_new]` (batch 1 with a cache)
    /// - output: `[batch, n_new, hidden]`
    pub fn hidden(&self, ids: Tensor<2, Int>, factors: Option<&FactorMap>, mut cache: Option<&mut KvCache>) -> Tensor<3> {
        let n_new = ids.dims()[1];
        let device = self.device();
        let past = cache.as_ref().map_or(0, |c| c.len());
        let (rotation, mask) = self.positions(past, n_new);
        if let Some(cache) = cache.as_deref_mut() {
            cache.reserve(n_new, &device);
        }
        let mut x = self.embed(ids);
        for (layer, block) in self.blocks.iter().enumerate() {
            let layer_cache = cache.as_deref_mut().map(|c| (c, layer));
            x = block.forward(&self.config, x, block_factors(factors, layer), (&rotation, mask.as_ref()), layer_cache);
        }
        if let Some(cache) = cache {
            cache.advance(n_new);
        }
        self.final_norm(x)
    }

    /// Token embeddings, `[batch, seq] -> [batch, seq, hidden]`.
    pub fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        burn::tensor::module::embedding(self.embedding.clone(), ids)
    }

    /// Rotation and causal mask of `n_new` positions after `past`; a single position needs no mask.
    pub fn positions(&self, past: usize, n_new: usize) -> (Rotation, Option<Tensor<4>>) {
        let device = self.device();
        let rotation = Rotation::new(&self.config.rope, self.config.head_dim, past, n_new, &device);
        (rotation, (n_new > 1).then(|| causal_mask(past, n_new, &device)))
    }

    /// The norm after the last block.
    pub fn final_norm(&self, x: Tensor<3>) -> Tensor<3> {
        rms_norm(x, &self.norm, self.config.rms_norm_eps)
    }

    /// Logits of hidden states, in f32.
    ///
    /// # Shapes
    /// - `hidden`: `[n, hidden]`
    /// - output: `[n, vocab]`
    pub fn logits(&self, hidden: Tensor<2>, factors: Option<&FactorMap>) -> Tensor<2> {
        let update = factors.and_then(|f| f.get(&Module { layer: None, projection: Projection::LmHead }));
        lora_linear(hidden, self.head.clone(), update).cast(DType::F32)
    }

    /// Token ids as a tensor on this device, padded on the right with id 0.
    ///
    /// # Shapes
    /// - output: `[rows, longest row]`
    ///
    /// # Errors
    /// If an id is outside the vocabulary or there is no id at all.
    pub fn ids(&self, rows: &[&[u32]]) -> Result<Tensor<2, Int>> {
        let longest = rows.iter().map(|r| r.len()).max().unwrap_or(0);
        if longest == 0 {
            return Err(Error::Model("there are no token ids to run".to_owned()));
        }
        if let Some(id) = rows.iter().flat_map(|r| r.iter()).find(|id| **id as usize >= self.config.vocab_size) {
            return Err(Error::Model(format!("token id {id} is outside the model's vocabulary of {}", self.config.vocab_size)));
        }
        let padded =
            |row: &&[u32]| row.iter().map(|id| i64::from(*id)).chain(std::iter::repeat(0)).take(longest).collect::<Vec<_>>();
        let flat: Vec<i64> = rows.iter().flat_map(padded).collect();
        Ok(Tensor::from_data(TensorData::new(flat, [rows.len(), longest]), &self.device()))
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
