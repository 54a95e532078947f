//! The crate's one error type.

/// What can go wrong here. Messages say what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From the shared parts.
    #[error(transparent)]
    Core(#[from] weact_core::Error),
    /// The run was interrupted from outside; what happened so far is recorded.
    #[error("interrupted")]
    Interrupted,
    /// Anything else, said in full.
    #[error("{0}")]
    Other(String),
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
