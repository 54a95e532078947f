//! Keys and values of the positions that one set of weights has seen. A cache is an argument of the forward pass; which weights
//! wrote it is the caller's to know (see `weact-infer`'s session), and it must never be read under others.

use burn::tensor::{Device, Tensor};

use super::Config;

/// Keys and values of each layer for the positions `0..len`.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor<4>, Tensor<4>)>>, // each [1, kv_heads, capacity, head_dim], f32
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache for `config`'s layers with room for `capacity` positions; it grows when more come.
    pub fn new(config: &Config, capacity: usize) -> Self {
        Self { layers: vec![None; config.n_layers], len: 0, capacity: capacity.max(1) }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Makes room for `n_new` more positions.
    pub(super) fn reserve(&mut self, n_new: usize, device: &Device) {
        let needed = self.len + n_new;
        if needed <= self.capacity {
            return;
        }
        let capacity = needed.max(self.capacity * 2);
        for (k, v) in self.layers.iter_mut().flatten() {
            for side in [k, v] {
                let [batch, heads, _, head_dim] = side.dims();
                let room = Tensor::zeros([batch, heads, capacity - self.capacity, head_dim], (device, side.dtype()));
                *side = Tensor::cat(vec![side.clone(), room], 2);
            }
        }
        self.capacity = capacity;
    }

    /// Stores a layer's new keys and values after the positions held, and returns all of them.
    ///
    /// # Shapes
    /// - `k`, `v`: `[1, kv_heads, n_new, head_dim]`
    /// - output: `[1, kv_heads, len + n_new, head_dim]`
    pub(super) fn extend(&mut self, layer: usize, k: Tensor<4>, v: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [batch, heads, n_new, head_dim] = k.dims();
        let device = k.device();
        let empty = || Tensor::zeros([batch, heads, self.capacity, head_dim], (&device, k.dtype()));
        // Taken out, so that the assignment can write in place.
        let (all_k, all_v) = self.layers[layer].take().unwrap_or_else(|| (empty(), empty()));
        let place = [0..batch, 0..heads, self.len..self.len + n_new, 0..head_dim];
        let all_k = all_k.slice_assign(place.clone(), k);
        let all_v = all_v.slice_assign(place, v);
        let seen = self.len + n_new;
        let views = (all_k.clone().narrow(2, 0, seen), all_v.clone().narrow(2, 0, seen));
        self.layers[layer] = Some((all_k, all_v));
        views
    }

    /// Counts the new positions once all layers hold them.
    pub(super) fn advance(&mut self, n_new: usize) {
        self.len += n_new;
    }
}
