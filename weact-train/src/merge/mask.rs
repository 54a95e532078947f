//! DARE's masks (<https://arxiv.org/abs/2311.03099>): a counter-based generator keyed by seed, adapter and module, so that a mask
//! depends on nothing else: not on the order of adapters, modules or shards, not on threads, device or element type.
//!
//! torch's draws depend on all of these. The generator is SplitMix64's mixer over an index, the key FNV-1a over the names.

use super::recipe::{Drop, Rescale};

/// Version of the rule below; written into records.
pub const VERSION: u32 = 1;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// FNV-1a over bytes, 64 bits.
pub fn fnv1a64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// The finaliser of SplitMix64.
pub fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random bits by index, for one adapter's tensor.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// Of the tensor `tensor` of adapter `id`. `tensor` is the module's path, with a suffix where the tensor is not the update.
    pub fn new(seed: u64, id: &str, tensor: &str) -> Self {
        let names = id.bytes().chain([0]).chain(tensor.bytes());
        Self { key: mix64(seed.wrapping_add(GOLDEN)) ^ fnv1a64(names) }
    }

    /// 64 random bits of the entry with this row-major index.
    #[inline]
    pub fn bits(self, index: u64) -> u64 {
        mix64(self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// The key.
    pub fn key(self) -> u64 {
        self.key
    }
}

/// An entry is dropped if the upper 53 of its bits are below this: an integer, so that no rounding decides.
pub fn threshold(rate: f64) -> u64 {
    (rate * (1_u64 << 53) as f64).floor() as u64
}

impl Drop {
    /// Drops entries of `values` in place and rescales the others. A rate of 1 leaves zeros, a rate of 0 every bit.
    pub fn apply(self, values: &mut [f32], stream: Stream) {
        let threshold = threshold(self.rate);
        let l1 = |values: &[f32]| values.iter().map(|x| f64::from(x.abs())).sum::<f64>();
        let whole = if self.rescale == Rescale::L1 { l1(values) } else { 0.0 };
        for (i, value) in values.iter_mut().enumerate() {
            if (stream.bits(i as u64) >> 11) < threshold {
                *value = 0.0;
            }
        }
        let factor = match self.rescale {
            _ if self.rate >= 1.0 => return,
            Rescale::Inverse => 1.0 / (1.0 - self.rate),
            Rescale::L1 => match l1(values) {
                // mergekit leaves tensors alone whose norm is next to nothing.
                kept if kept < 1e-7 || whole < 1e-7 => return,
                kept => whole / kept,
            },
        };
        if factor != 1.0 {
            values.iter_mut().for_each(|x| *x = (f64::from(*x) * factor) as f32);
        }
    }
}
