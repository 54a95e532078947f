//! `card.toml`: what an adapter was made for, beside its PEFT files.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{Capability, Error, Result, chat::ToolProtocol, context::Retention, io::atomic, stage::Stage};

/// The file's name.
pub const FILE: &str = "card.toml";

/// An adapter's card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// The alias under which the model calls it.
    pub alias: Capability,
    /// One line in the description of `load_lora`.
    pub description: String,
    /// The result of `load_lora(alias)` in the training data.
    pub activation: String,
    /// Digest of the adapter's config and tensors.
    pub digest: String,
    /// Digest of the backbone that it was trained over.
    pub base: String,
    /// Digest of the tokenizer file.
    pub tokenizer: String,
    /// Digest of the chat template.
    pub template: String,
    /// How tools reached the model.
    pub tool_protocol: ToolProtocol,
    /// How thinking of earlier turns was treated.
    pub think: Think,
    /// What the history kept of tool results.
    pub retention: Retention,
    /// What it was trained on and with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingRecord>,
    /// What it was merged from, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeRecord>,
}

/// How thinking of earlier turns is treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Think {
    /// Every turn keeps its thinking and no empty block is added, so that a prompt extends the one before it.
    #[default]
    Preserve,
}

/// A training run in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRecord {
    /// Optimiser steps.
    pub steps: usize,
    /// Samples in the training set.
    pub samples: usize,
    /// Supervised tokens in the training set.
    pub supervised_tokens: usize,
    /// Seed of order and initial values.
    pub seed: u64,
    /// Digest of the training samples.
    pub data: String,
}

/// A merge in short; `merge.json` beside the card has each module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeRecord {
    /// Its name.
    pub method: String,
    /// The share of the merged updates' squared Frobenius norm that the rank keeps, over all modules.
    pub kept: f64,
    /// The same in the module that keeps least.
    pub kept_least: f64,
    /// The closest decision of a trim: how far the smallest entry that stayed lies above the largest that went, relative to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trim_margin: Option<f64>,
    /// The closest vote on a sign: `|sum| / sum of magnitudes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sign_margin: Option<f64>,
    /// Every option, resolved.
    pub recipe: toml::Table,
    /// The adapters that were merged.
    pub sources: Vec<MergeSource>,
}

/// An adapter that was merged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeSource {
    /// Its alias, or its folder's name.
    pub id: String,
    /// Its digest.
    pub digest: String,
    /// Its weight.
    pub weight: f64,
}

impl Card {
    /// The texts that the model sees.
    pub fn stage(&self) -> Stage {
        Stage { alias: self.alias.clone(), description: self.description.clone(), activation: self.activation.clone() }
    }

    /// Reads `DIR/card.toml`; `None` if there is none.
    ///
    /// # Errors
    /// If it can't be read or is no card.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&path).map_err(|e| Error::io("can't read", &path, e))?;
        toml::from_str(&text).map(Some).map_err(|e| Error::file(&path, e.to_string()))
    }

    /// Writes `DIR/card.toml`.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let text = toml::to_string(self).expect("a card serialises");
        atomic::write_text(&dir.join(FILE), &text)
    }
}
