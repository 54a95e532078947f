//! Keys and values of the positions that one set of weights has seen. A cache is an argument of the forward pass; which weights
//! wrote it is the caller's to know (see `weact-infer`'s session), and it must never be read under others.

use burn::tensor::{Device, Tensor};

use super::Config;

/// Keys and values of each layer for the positions `0..len`.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor<2>, Tensor<2>)>>, // each [capacity, kv_heads * head_dim], f32
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
                let room = Tensor::zeros([capacity - self.capacity, side.dims()[1]], device);
                *side = Tensor::cat(vec![side.clone(), room], 0);
            }
        }
        self.capacity = capacity;
    }

    /// Stores a layer's new keys and values after the positions held, and returns all of them.
    ///
    /// # Shapes
    /// - `k`, `v`: `[n_new, kv_heads * head_dim]`
    /// - output: `[len + n_new, kv_heads * head_dim]`
    pub(super) fn extend(&mut self, layer: usize, k: Tensor<2>, v: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let [n_new, width] = k.dims();
        let device = k.device();
        let empty = || Tensor::zeros([self.capacity, width], &device);
        // Taken out, so that the assignment can write in place.
        let (all_k, all_v) = self.layers[layer].take().unwrap_or_else(|| (empty(), empty()));
        let place = [self.len..self.len + n_new, 0..width];
        let all_k = all_k.slice_assign(place.clone(), k);
        let all_v = all_v.slice_assign(place, v);
        let seen = self.len + n_new;
        let views = (all_k.clone().narrow(0, 0, seen), all_v.clone().narrow(0, 0, seen));
        self.layers[layer] = Some((all_k, all_v));
        views
    }

    /// Counts the new positions once all layers hold them.
    pub(super) fn advance(&mut self, n_new: usize) {
        self.len += n_new;
    }
}
