//! The adapter that the measurements train and switch to.

use std::collections::BTreeMap;

use anyhow::Result;
use weact::{
    core::{Backbone, adapter::LoraConfig, lora::Projection},
    train::{optim::Parameter, trainable::Trainable},
};

/// A fresh adapter of rank 16 on the seven projections of every block.
pub(super) fn fresh_lora(backbone: &Backbone, seed: u64) -> Result<(Trainable, Vec<Parameter>)> {
    let config = LoraConfig {
        rank: 16,
        alpha: 32.0,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
        rslora: false,
        targets: Projection::BLOCK.to_vec(),
    };
    Ok(Trainable::fresh_lora(config, &backbone.config, seed, &backbone.device())?)
}
