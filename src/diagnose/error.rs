//! The one error type of the diagnostics.

use std::path::PathBuf;

/// What can go wrong. Messages say what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From the shared parts.
    #[error(transparent)]
    Core(#[from] weact_core::Error),
    /// From a measure.
    #[error(transparent)]
    Diagnostics(#[from] weact_diagnostics::Error),
    /// From tables and figures.
    #[error(transparent)]
    Report(#[from] weact_eval::Error),
    /// A configuration is wrong: exit status 2.
    #[error("{path}: {why}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, with its line where there is one.
        why: String,
    },
    /// There is nothing to measure.
    #[error("{0}")]
    Other(String),
}

/// A result with this error.
pub type Result<T> = std::result::Result<T, Error>;
