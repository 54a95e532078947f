//! Diagnostics: they take policies, adapters and samples, and never train.

mod error;
#[cfg(test)]
mod fixture;
pub mod teacher_forced;
pub mod nll_gap;
pub mod mismatch;
pub mod lint;
pub mod content;
pub mod retention;
pub mod interference;
pub mod logit_gap;
pub mod trust;

pub use error::{Error, Result};
