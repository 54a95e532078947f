//! The decoder: one definition for every family, for training, running and scoring.

pub mod config;
pub mod rope;
pub mod block;
pub mod cache;
pub mod tokens;
pub mod backbone;

pub use backbone::{Backbone, Parameter};
pub use block::Observer;
pub use cache::KvCache;
pub use config::Config;
pub use tokens::{Positions, Tokens};
