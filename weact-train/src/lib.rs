//! Training: real conversations in, one PEFT adapter per capability out.
//!
//! The walk: [`data`] makes labelled trajectories, [`dataset`] cuts samples from them, [`batch`] says which come when,
//! [`gradient`] computes an update's gradient, [`optim`] applies it, and [`sft`] ties these to files that survive a crash.

pub mod config;
pub mod data;
pub mod partition;
pub mod dataset;
pub mod batch;
pub mod schedule;
pub mod trainable;
pub mod memory;
pub mod gradient;
pub mod optim;
pub mod checkpoint;
pub mod log;
pub mod run_directory;
pub mod sft;
pub mod flops;
pub mod merge;
mod error;

pub use error::{Error, Result};
