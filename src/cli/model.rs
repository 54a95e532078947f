//! `--model` and `--adapter`.

use std::path::{Path, PathBuf};

use burn::tensor::DType;
use weact::core::{
    Adapter, Result,
    card::Card,
    chat::{Chat, ToolProtocol},
    io::{checkpoint::Checkpoint, peft},
    registry::{self, Against},
};

use super::Say;

/// The checkpoint and how it is read.
#[derive(Debug, clap::Args)]
pub(super) struct ModelArgs {
    /// A checkpoint's folder in Hugging Face's form
    #[arg(long, value_name = "DIR")]
    pub(super) model: PathBuf,
    /// Element type of the weights in memory: f32, bf16 or f16
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub(super) dtype: DType,
    /// Use the embedding as the output head where the checkpoint has none
    #[arg(long)]
    pub(super) tie_embeddings: bool,
}

impl ModelArgs {
    /// The checkpoint, its headers checked.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub(super) fn open(&self) -> Result<Checkpoint> {
        Checkpoint::open(&self.model, self.tie_embeddings)
    }
}

pub(super) fn dtype(name: &str) -> std::result::Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("use f32, bf16 or f16".to_owned()),
    }
}

/// What the cards of this checkpoint's adapters name.
///
/// # Errors
/// If the checkpoint has no tokenizer or template.
pub(super) fn against(checkpoint: &Checkpoint) -> Result<Against> {
    let chat = Chat::open(&checkpoint.dir, ToolProtocol::default())?;
    Ok(Against { base: checkpoint.digest(), tokenizer: chat.tokenizer.digest().to_owned(), template: chat.template_digest() })
}

/// The adapter in `dir`, checked against the checkpoint: by its card, and by its shapes. One without a card is used with a warning.
///
/// # Errors
/// If it is broken, was made for another checkpoint, or does not fit.
pub(super) fn adapter(dir: &Path, checkpoint: &Checkpoint, say: Say) -> Result<Adapter> {
    let adapter = if Card::read(dir)?.is_some() {
        let (entry, _) = registry::read_entry(dir, &against(checkpoint)?)?;
        (*entry.adapter).clone()
    } else {
        say.warn(&format!("{}: no card.toml; which base it was trained over is not known", dir.display()));
        peft::read(dir)?
    };
    adapter.check_fits(&checkpoint.config)?;
    Ok(adapter)
}
