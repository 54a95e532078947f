//! Tasks: one question of a benchmark, in the form that every reader gives and every grader takes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One question with what is needed to grade its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The row's own id, or a digest of its content where the format has none: never a position.
    pub id: String,
    /// As the policy is asked it.
    pub question: String,
    /// The accepted answers; empty where the benchmark has none.
    #[serde(default)]
    pub gold: Vec<String>,
    /// Attachments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// What else the row holds and its grader or reports need, under the row's own names.
    #[serde(default)]
    pub more: Map<String, Value>,
}
