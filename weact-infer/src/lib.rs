//! Running: an engine that decodes under switchable adapters, tools, and the agent that uses both.

pub mod sampler;
pub mod session;
pub mod engine;
pub mod timeline;
pub mod tools;
pub mod record;
mod turn;
pub mod agent;
pub mod controller;
pub mod remote;
mod error;

pub use error::{Error, Result};
