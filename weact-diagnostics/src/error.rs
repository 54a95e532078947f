//! The crate's one error type.

/// What can go wrong here. Messages say what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From the shared parts.
    #[error(transparent)]
    Core(#[from] weact_core::Error),
    /// Two policies' scores are not of the same tokens of the same records.
    #[error("scores can't be paired: {0}")]
    Unpaired(String),
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
