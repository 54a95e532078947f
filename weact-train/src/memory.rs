//! What a training step takes of the device's memory, by part, before it runs.

use weact_core::model::Config;

use crate::trainable::Trainable;

/// What a whole graph keeps of a micro-batch for its backward pass, in bytes. Per position and block: the stream before each of
/// its two norms and after it, queries, keys, values and attended values, the feed-forward part's gate, up and their product, and
/// each update's low-rank part.
pub fn kept_bytes(config: &Config, trainable: &Trainable, lengths: &[usize]) -> usize {
    let attention = 2 * config.n_heads * config.head_dim + 2 * config.n_kv_heads * config.head_dim;
    let per_position = 4 * config.hidden_size + attention + 3 * config.intermediate_size;
    let of_updates = match trainable {
        Trainable::Full => 0,
        Trainable::Lora { config, modules } => modules.iter().map(|m| config.rank_of(*m)).sum(),
    };
    let n: usize = lengths.iter().sum();
    n * (config.n_layers * per_position + of_updates) * size_of::<f32>()
}
