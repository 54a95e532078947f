//! Buffers that are used again: training makes the same tensors step after step, and asking the system for fresh pages each time
//! costs a tenth of a step.

use std::{
    collections::BTreeMap,
    mem,
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn::tensor::{AllocationProperty, Bytes, DType, Shape};
use burn_flex::{FlexTensor, Layout};

/// Numbers that go back to the pool when they are dropped. What they hold at first is left over from an earlier use.
#[derive(Debug)]
pub(super) struct Buffer {
    values: Vec<f32>, // as long as its size class
    len: usize,
}

impl Buffer {
    /// A buffer of `len` numbers with unspecified values.
    pub(super) fn take(len: usize) -> Self {
        Self { values: pool().take(size_class(len)), len }
    }

    /// A buffer of `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let mut buffer = Self::take(len);
        buffer.fill(0.0);
        buffer
    }

    /// A tensor over these numbers, which go back to the pool when its last clone is dropped.
    pub(super) fn into_tensor(self, shape: impl Into<Shape>) -> FlexTensor {
        let shape = shape.into();
        assert_eq!(self.len, shape.num_elements(), "a shape of the buffer's length");
        let bytes = Bytes::from_shared(bytes::Bytes::from_owner(self), AllocationProperty::Native);
        FlexTensor::new(bytes, Layout::contiguous(shape), DType::F32)
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        pool().give_back(mem::take(&mut self.values));
    }
}

/// Lengths are rounded up to eighths of a power of two, so that samples of slightly different lengths share their buffers.
fn size_class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(64);
    len.next_multiple_of(step)
}

/// Idle buffers by length. The pool never makes the process hold more than it once held in use: where a new buffer would, idle
/// ones are given to the system first.
#[derive(Debug)]
struct Pool {
    idle: BTreeMap<usize, Vec<Vec<f32>>>,
    n_idle: usize, // numbers in idle buffers
    n_used: usize, // numbers in buffers that are out
    most_used: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { idle: BTreeMap::new(), n_idle: 0, n_used: 0, most_used: 0 });

fn pool() -> MutexGuard<'static, Pool> {
    // Counters and lists are whole at every moment, so a thread that died with the lock broke nothing.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    fn take(&mut self, class: usize) -> Vec<f32> {
        self.n_used += class;
        self.most_used = self.most_used.max(self.n_used);
        if let Some(values) = self.idle.get_mut(&class).and_then(Vec::pop) {
            self.n_idle -= class;
            return values;
        }
        while self.n_idle > 0 && self.n_used + self.n_idle > self.most_used {
            self.drop_largest();
        }
        vec![0.0; class]
    }

    fn give_back(&mut self, values: Vec<f32>) {
        self.n_used -= values.len();
        self.n_idle += values.len();
        self.idle.entry(values.len()).or_default().push(values);
    }

    fn drop_largest(&mut self) {
        let Some(mut largest) = self.idle.last_entry() else { return };
        match largest.get_mut().pop() {
            Some(values) => self.n_idle -= values.len(),
            None => drop(largest.remove()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for len in [1, 64, 65, 1000, 1024, 1025, 4097, 1_000_003] {
            let class = size_class(len);
            assert!(class >= len && class < len + (len / 8).max(64), "{len} -> {class}");
        }
    }

    /// On a pool of its own: other tests use the shared one.
    #[test]
    fn idle_and_used_buffers_never_exceed_the_most_that_was_in_use() {
        let mut pool = Pool { idle: BTreeMap::new(), n_idle: 0, n_used: 0, most_used: 0 };
        for class in [100, 300, 50, 299, 301, 64, 300] {
            let (a, b) = (pool.take(class), pool.take(class));
            assert_eq!((a.len(), b.len()), (class, class));
            assert!(pool.n_used + pool.n_idle <= pool.most_used, "{pool:?}");
            pool.give_back(a);
            pool.give_back(b);
        }
        assert_eq!((pool.n_used, pool.most_used), (0, 602));
        assert_eq!(pool.n_idle, pool.idle.values().flatten().map(Vec::len).sum::<usize>());
    }
}
