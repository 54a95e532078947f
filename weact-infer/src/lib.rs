//! Running: an engine that decodes under switchable adapters, tools, and the agent that uses both.

mod error;
pub mod tools;

pub use error::{Error, Result};
