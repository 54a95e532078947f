//! Token ids on a device: sequences of any lengths, one after another without padding.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData};

use super::{Backbone, rope::Rotation};
use crate::{Error, Result, ops::Sequence};

/// The ids of independent sequences in one row (packing): each begins at position 0 and sees itself alone.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[n]`, all sequences' ids.
    pub ids: Tensor<1, Int>,
    /// How many ids each sequence has.
    pub lengths: Vec<usize>,
}

/// Angles and neighbours of the positions of a forward pass.
#[derive(Clone, Debug)]
pub struct Positions {
    /// Of each position.
    pub rotation: Rotation,
    /// Who sees whom.
    pub sequences: Arc<[Sequence]>,
}

impl Tokens {
    /// How many ids there are.
    pub fn n(&self) -> usize {
        self.lengths.iter().sum()
    }
}

impl Backbone {
    /// Token ids on this device.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, or a row has none.
    pub fn tokens(&self, rows: &[&[u32]]) -> Result<Tokens> {
        if rows.is_empty() || rows.iter().any(|row| row.is_empty()) {
            return Err(Error::Model("there are no token ids to run".to_owned()));
        }
        let flat: Vec<i64> = rows.iter().flat_map(|row| row.iter().map(|id| i64::from(*id))).collect();
        if let Some(id) = flat.iter().find(|id| **id >= self.config.vocab_size as i64) {
            return Err(Error::Model(format!("token id {id} is outside the model's vocabulary of {}", self.config.vocab_size)));
        }
        let n = flat.len();
        let ids = Tensor::from_data(TensorData::new(flat, [n]), &self.device());
        Ok(Tokens { ids, lengths: rows.iter().map(|row| row.len()).collect() })
    }

    /// The positions of new tokens of sequences that have `past` positions before them.
    pub fn positions(&self, past: usize, lengths: &[usize]) -> Positions {
        let of_new: Vec<usize> = lengths.iter().flat_map(|n| past..past + n).collect();
        Positions {
            rotation: Rotation::new(&self.config.rope, self.config.head_dim, &of_new, &self.device()),
            sequences: lengths.iter().map(|n| Sequence { n_new: *n, n_keys: past + n }).collect(),
        }
    }
}
