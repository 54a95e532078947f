//! The parts that every other `weact` crate shares: one model definition, adapters, the message and trajectory types,
//! samples with their masks, and the control rule (Eq. 1, 2, 4, 5 and 6).
//!
//! This crate knows no optimizer, process, network or benchmark.

pub mod capability;
pub mod control;
pub mod stage;
pub mod message;
pub mod trajectory;
pub mod episode;
pub mod lora;
pub mod ops;
pub mod adapter;
pub mod card;
pub mod registry;
pub mod template;
pub mod tokenizer;
pub mod chat;
pub mod parse;
pub mod context;
pub mod sample;
pub mod split;
pub mod model;
pub mod nll;
pub mod stats;
pub mod io;
mod error;

pub use adapter::Adapter;
pub use capability::Capability;
pub use error::{Error, Result};
pub use model::Backbone;
pub use trajectory::Trajectory;
