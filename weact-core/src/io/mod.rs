//! Foreign files: Hugging Face checkpoints and PEFT adapters. The only place that renames or transposes tensors.

pub mod atomic;
pub mod checkpoint;
pub mod hf_config;
pub mod peft;
pub mod fold;
pub mod tensors;
pub mod toml_text;
