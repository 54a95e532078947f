//! The crate's one error type.

use std::{
    io,
    path::{Path, PathBuf},
};

/// What can go wrong below the binaries. Messages say what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that breaks [`Capability`](crate::Capability)'s rule.
    #[error("{name:?} is no capability name: use [a-z][a-z0-9_-]*, at most 64 characters, and neither base nor none")]
    Capability {
        /// The name given.
        name: String,
    },
    /// A file operation failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A line of a JSONL file is wrong.
    #[error("{path}:{line}: {why}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// A whole file is wrong.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Spans, messages or events don't fit together.
    #[error("{0}")]
    Trajectory(String),
    /// A chat template can't be compiled or rendered, or breaks a promise that training and runs need.
    #[error("chat template: {0}")]
    Template(String),
    /// A tokenizer can't be loaded or can't encode.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A model or an adapter can't be used as asked.
    #[error("{0}")]
    Model(String),
    /// Outcomes can't be compared.
    #[error("{0}")]
    Stats(String),
    /// Logits are not finite.
    #[error("non-finite {what}{place}, dtype {dtype}: use a wider dtype (--dtype f32) or check the weights")]
    NonFinite {
        /// What was computed.
        what: &'static str,
        /// Where, as ", layer n", or empty.
        place: String,
        /// The dtype of the computation.
        dtype: String,
    },
}

impl Error {
    /// An [`Error::Io`] about `path`.
    pub fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { what, path: path.to_owned(), source }
    }

    /// An [`Error::File`] about `path`.
    pub fn file(path: &Path, why: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), why: why.into() }
    }
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
