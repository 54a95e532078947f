//! Causal attention with grouped queries, in f32.

use burn::tensor::{Device, Tensor, TensorData, activation::softmax};

/// What a query must not see: 0 where key `j` is at or before query `i`'s position, a large negative number after it.
///
/// # Shapes
/// - output: `[1, 1, n_new, past + n_new]`
pub fn causal_mask(past: usize, n_new: usize, device: &Device) -> Tensor<4> {
    let n_keys = past + n_new;
    let values: Vec<f32> = (0..n_new).flat_map(|i| (0..n_keys).map(move |j| if j > past + i { -1e30 } else { 0.0 })).collect();
    Tensor::from_data(TensorData::new(values, [1, 1, n_new, n_keys]), device)
}

/// `softmax(q k^T / sqrt(head_dim) + mask) v` for each query head with the key head of its group.
///
/// # Shapes
/// - `q`: `[batch, heads, n_new, head_dim]`
/// - `k`, `v`: `[batch, kv_heads, n_keys, head_dim]`
/// - `mask`: `[1, 1, n_new, n_keys]`; none for a single new position, which sees all
/// - output: `[batch, heads, n_new, head_dim]`
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Option<&Tensor<4>>) -> Tensor<4> {
    let [batch, heads, n_new, head_dim] = q.dims();
    let [_, kv_heads, n_keys, _] = k.dims();
    // Queries of one group are rows of one product with their shared keys, so keys are never copied per head.
    let rows = heads / kv_heads * n_new;
    let q = (q * (1.0 / (head_dim as f64).sqrt())).reshape([batch, kv_heads, rows, head_dim]);
    let mut scores = q.matmul(k.swap_dims(2, 3)); // [batch, kv_heads, rows, n_keys]
    if let Some(mask) = mask {
        let by_head = scores.reshape([batch, heads, n_new, n_keys]) + mask.clone();
        scores = by_head.reshape([batch, kv_heads, rows, n_keys]);
    }
    softmax(scores, 3).matmul(v).reshape([batch, heads, n_new, head_dim])
}
