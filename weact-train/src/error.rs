//! The crate's one error type.

use std::path::PathBuf;

/// What can go wrong while reading data and training. Messages say what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From the shared parts.
    #[error(transparent)]
    Core(#[from] weact_core::Error),
    /// A run configuration is wrong: exit status 2.
    #[error("{path}: {why}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, with its line where there is one.
        why: String,
    },
    /// The run directory is in a state that the command does not fit: exit status 2.
    #[error("{path}: {why}")]
    RunDirectory {
        /// The directory.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
    /// A merge's recipe is wrong: exit status 2.
    #[error("{0}")]
    Recipe(String),
    /// These adapters can't be merged as asked.
    #[error("{0}")]
    Merge(String),
    /// The run can't go on.
    #[error("{0}")]
    Other(String),
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
