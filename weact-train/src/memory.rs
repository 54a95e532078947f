//! What a training run takes of memory: by part before it runs, and what the process has taken.
//!
//! The prediction is an upper bound that counts tensors. It assumes what the operators in `weact_core::ops` keep for their backward
//! passes, and that idle buffers stay with the process, as they do there.

use std::fs;

use serde::Serialize;
use weact_core::{
    Backbone,
    io::checkpoint::dims,
    lora::{Module, Projection},
    model::Config,
    ops::Operators,
};

use crate::trainable::Trainable;

/// Samples that are computed together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MicroBatch {
    /// Tokens of each sample.
    pub lengths: Vec<usize>,
    /// Supervised tokens.
    pub supervised_tokens: usize,
    /// Whether it is a whole batch; else gradients are added up.
    pub alone: bool,
    /// Whether its blocks are computed again in the backward pass.
    pub recompute: bool,
}

/// What a run's peak is made of, in bytes. On a CUDA device all but the last three parts are the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Parts {
    /// The backbone.
    pub weights: usize,
    /// What is trained, in f32.
    pub trained_parameters: usize,
    /// Its gradients.
    pub gradients: usize,
    /// AdamW's two moments.
    pub moments: usize,
    /// What is kept of a micro-batch for its backward pass: of all blocks, or of one where blocks are computed again.
    pub activations: usize,
    /// Inputs of blocks that are computed again.
    pub block_inputs: usize,
    /// What the loss, or a block's backward pass, holds meanwhile.
    pub working: usize,
    /// What the allocator leaves empty: gradients and activations take turns, in buffers of different sizes.
    pub gaps: usize,
    /// Copies of parameters and moments while a checkpoint is written.
    pub saving: usize,
    /// Files that are mapped while they are read: the backbone's, or a checkpoint's.
    pub files: usize,
    /// Program, tokenizer and samples.
    pub program: usize,
    /// All of these; or what loading the backbone takes, where that is more.
    pub total: usize,
}

/// What a run will take of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Prediction {
    /// Its peak.
    pub bytes: Parts,
    /// The micro-batch that makes the peak.
    pub largest: MicroBatch,
    /// Micro-batches of the whole run.
    pub micro_batches: usize,
    /// How many of them have their blocks computed again in the backward pass.
    pub recomputed: usize,
}

const F32: usize = size_of::<f32>();

impl Parts {
    /// Of a run whose largest micro-batch is `micro`. `files` is the size of the backbone's files; `n_forward` is the most positions
    /// that are computed at a time without a backward pass, for validation.
    pub fn new(backbone: &Backbone, trainable: &Trainable, micro: &MicroBatch, files: usize, n_forward: usize) -> Self {
        let config = &backbone.config;
        let trained = n_trained(config, trainable) * F32;
        let embedding = config.vocab_size * config.hidden_size * F32;
        let weights = config.n_parameters() * backbone.dtype().size();
        let n: usize = micro.lengths.iter().sum();
        let block = kept_by_a_block(backbone, trainable, &micro.lengths);
        let (activations, block_inputs) = match micro.recompute {
            false => (block * config.n_layers, 0),
            true => (block, (config.n_layers + 1) * n * config.hidden_size * F32),
        };
        let forward = n_forward * (4 * config.hidden_size + 3 * config.intermediate_size) * F32;
        let passing = of_loss(backbone, micro.supervised_tokens).max(of_a_backward_pass(backbone, &micro.lengths)).max(forward);
        // The embedding's gradient is added to that of the head in a copy.
        let of_embedding = if matches!(trainable, Trainable::Full) { embedding } else { 0 };
        let mut parts = Self {
            weights,
            trained_parameters: trained,
            gradients: rounded(if micro.alone { trained } else { 2 * trained }),
            moments: 2 * trained,
            activations: rounded(activations),
            block_inputs: rounded(block_inputs),
            working: rounded(passing) + of_embedding,
            gaps: 0,
            saving: 3 * trained,
            files: files.max(3 * trained),
            program: PROGRAM + config.vocab_size * PER_ENTRY,
            total: 0,
        };
        parts.gaps = parts.gradients.min(parts.activations + parts.block_inputs + parts.working);
        let run = parts.trained_parameters
            + parts.gradients
            + parts.moments
            + parts.activations
            + parts.block_inputs
            + parts.working
            + parts.gaps
            + parts.saving
            + parts.files;
        // The largest tensor as it is read and as it is held.
        let loading = files + 2 * embedding;
        parts.total = parts.program + parts.weights + run.max(loading);
        parts
    }
}

/// The program with its threads' stacks and the allocator's own.
const PROGRAM: usize = 32 << 20;

/// An entry of the tokenizer's vocabulary with its merge, in the tables that look them up.
const PER_ENTRY: usize = 2 << 10;

/// Buffers are used again by longer samples: their sizes are rounded up, by at most an eighth.
fn rounded(bytes: usize) -> usize {
    bytes + bytes / 8
}

/// Trained numbers.
fn n_trained(config: &Config, trainable: &Trainable) -> usize {
    match trainable {
        Trainable::Full => config.n_parameters(),
        Trainable::Lora { config: lora, modules } => {
            let of_module = |module: &Module| {
                let (d_in, d_out) = dims(config, module.projection);
                lora.rank_of(*module) * (d_in + d_out)
            };
            modules.iter().map(of_module).sum()
        }
    }
}

/// What a whole graph keeps of a micro-batch for its backward pass, in bytes.
pub fn kept_bytes(backbone: &Backbone, trainable: &Trainable, lengths: &[usize]) -> usize {
    backbone.config.n_layers * kept_by_a_block(backbone, trainable, lengths)
}

/// Per position: the stream before each of the two norms and after it, queries, keys, values and attended values, the feed-forward
/// part's gate, up and their product, the logarithm of each head's sum, and each update's low-rank part. The composed operators keep
/// two matrices of scores per head and sample and two more numbers per gate.
fn kept_by_a_block(backbone: &Backbone, trainable: &Trainable, lengths: &[usize]) -> usize {
    let config = &backbone.config;
    let Widths { queries, keys } = widths(config);
    let head_norms = if backbone.blocks.iter().any(|block| block.head_norms.is_some()) { queries + keys } else { 0 };
    let of_updates = match trainable {
        Trainable::Full => 0,
        Trainable::Lora { config: lora, modules } => {
            let rank = |p: Projection| modules.iter().filter(|m| m.projection == p).map(|m| lora.rank_of(*m)).max().unwrap_or(0);
            Projection::BLOCK.into_iter().map(rank).sum()
        }
    };
    let n: usize = lengths.iter().sum();
    let always = 4 * config.hidden_size + 2 * queries + 2 * keys + head_norms + of_updates;
    match backbone.operators {
        Operators::Fused => n * (always + config.n_heads + 3 * config.intermediate_size) * F32,
        Operators::Composed => (n * (always + 5 * config.intermediate_size) + 2 * n_scores(config, lengths)) * F32,
    }
}

struct Widths {
    queries: usize,
    keys: usize,
}

fn widths(config: &Config) -> Widths {
    Widths { queries: config.n_heads * config.head_dim, keys: config.n_kv_heads * config.head_dim }
}

fn n_scores(config: &Config, lengths: &[usize]) -> usize {
    config.n_heads * lengths.iter().map(|n| n * n).sum::<usize>()
}

/// Logits of a chunk of supervised tokens (all of them with the composed operators), with hidden states and their gradients.
fn of_loss(backbone: &Backbone, n: usize) -> usize {
    let config = &backbone.config;
    let logits = match backbone.operators {
        Operators::Fused => (n.next_multiple_of(32) * config.vocab_size.next_multiple_of(512)).min(1 << 24),
        Operators::Composed => 5 * n * config.vocab_size,
    };
    (logits + 4 * n * config.hidden_size) * F32
}

/// The larger of the feed-forward part's (gradients of product, gate and up, and a copy of one of them) and attention's (each query
/// head's gradients of queries, keys and values before they are added up).
fn of_a_backward_pass(backbone: &Backbone, lengths: &[usize]) -> usize {
    let config = &backbone.config;
    let Widths { queries, keys } = widths(config);
    let n: usize = lengths.iter().sum();
    let feed_forward = 4 * config.intermediate_size;
    let attention = 5 * queries + 2 * keys;
    let scores = match backbone.operators {
        Operators::Fused => 0,
        Operators::Composed => 4 * n_scores(config, lengths),
    };
    (n * (4 * config.hidden_size + feed_forward.max(attention)) + scores) * F32
}

/// A number of bytes of this process as Linux tells them in `/proc/self/status`: `VmHWM` is the most that was resident so far, mapped
/// files included, `RssAnon` what is resident now without them. `None` on other systems.
pub fn of_process(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
