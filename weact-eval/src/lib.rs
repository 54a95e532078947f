//! Evaluation: the toy research world and its grader.

mod error;
pub mod world;

pub use error::{Error, Result};
