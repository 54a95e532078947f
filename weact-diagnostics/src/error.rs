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
    /// Records of a study do not say all that its table needs.
    #[error("records of retention can't be read together: {0}")]
    Incomplete(String),
    /// Gradients are not of the same parameters, or are no numbers.
    #[error("gradients can't be compared: {0}")]
    Gradients(String),
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
