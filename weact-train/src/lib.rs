//! Training: real conversations in, one PEFT adapter per capability out.

pub mod data;
mod error;

pub use error::{Error, Result};
