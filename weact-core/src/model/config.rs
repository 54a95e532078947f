//! The architecture of a decoder, whatever spelling its file used.

/// Model families whose blocks differ in a detail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// RMSNorm on queries and keys of each head.
    Qwen3,
    /// Biases on queries, keys and values.
    Qwen2,
    /// Neither.
    Llama,
}

/// A dense decoder's shape: every field is applied by [`Backbone`](super::Backbone).
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Which family's blocks.
    pub family: Family,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Width of one head; not always `hidden_size / n_heads`.
    pub head_dim: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The positions that the checkpoint was made for.
    pub max_positions: usize,
    /// The output head is the embedding.
    pub tied: bool,
    /// Biases of the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias of the attention's output projection.
    pub o_bias: bool,
    /// Biases of the feed-forward projections.
    pub mlp_bias: bool,
}

/// Rotary position embedding: a base and how it is stretched.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// How the frequencies are changed for longer contexts.
    pub scaling: Scaling,
}

/// Ways of stretching rotary frequencies, as transformers computes them (`modeling_rope_utils.py`).
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// YaRN (<https://arxiv.org/abs/2309.00071>).
    Yarn {
        /// Stretch.
        factor: f64,
        /// The context before stretching.
        original_max: f64,
        /// Rotations above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated whole.
        beta_slow: f64,
        /// Scale of the cosines and sines.
        attention_factor: f64,
        /// Whether the bounds are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// Llama 3's piecewise rule.
    Llama3 {
        /// Stretch of low frequencies.
        factor: f64,
        /// Wave lengths above `original_max / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wave lengths below `original_max / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// The context before stretching.
        original_max: f64,
    },
}

impl Config {
    /// Trainable numbers of the whole model.
    pub fn n_parameters(&self) -> usize {
        let (h, f) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let attention = h * q + 2 * h * kv + q * h + if self.qkv_bias { q + 2 * kv } else { 0 } + if self.o_bias { h } else { 0 };
        let head_norms = if self.family == Family::Qwen3 { 2 * self.head_dim } else { 0 };
        let mlp = 3 * h * f + if self.mlp_bias { 2 * f + h } else { 0 };
        let embeddings = self.vocab_size * h * if self.tied { 1 } else { 2 };
        embeddings + self.n_layers * (attention + head_norms + mlp + 2 * h) + h
    }
}
