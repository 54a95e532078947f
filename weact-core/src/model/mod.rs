//! The decoder: one definition for every family, for training, running and scoring.

pub mod config;
pub mod rope;
pub mod attention;
pub mod block;
pub mod cache;
pub mod backbone;

pub use backbone::{Backbone, Parameter};
pub use cache::KvCache;
pub use config::Config;
