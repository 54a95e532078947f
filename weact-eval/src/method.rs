//! Methods: a way of answering. The harness knows no more of one than this.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use weact_core::episode::Line;

use crate::{Result, task::Task};

/// Weights, controller, tools and settings under one name.
pub trait Method: Sync {
    /// The name in tables.
    fn name(&self) -> &str;

    /// Everything that decides an answer but task and seed: digests of model, adapters, template, tokenizer and tools, the policy
    /// and its settings, on `benchmark` (its name in tables). Two methods with the same identity give the same answers. What may differ between benchmarks stands
    /// under the key `tools`.
    fn identity(&self, benchmark: &str) -> Map<String, Value>;

    /// Answers `task` of `benchmark`. The same task and seed give the same answer, whatever was asked before.
    ///
    /// # Errors
    /// [`weact_infer::Error::Interrupted`] if `interrupted` says so. Any other error is the attempt's own: it is recorded, and the run
    /// goes on.
    fn attempt(&self, benchmark: &str, task: &Task, seed: u64, interrupted: &dyn Fn() -> bool) -> Result<Answer>;
}

/// What an attempt gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The final answer; `None` where there was none.
    pub prediction: Option<String>,
    /// All that the policy wrote in its last turn with text: what a grader of reports reads.
    pub report: Option<String>,
    /// A turn ended at its token limit, and no answer came of the run.
    pub length: bool,
    /// How the run ended, in the controller's words.
    pub termination: String,
    /// Turns of the policy.
    pub n_turns: usize,
    /// Calls of external tools.
    pub n_tool_calls: usize,
    /// What it cost.
    pub cost: Cost,
    /// The episode's lines.
    pub episode: Vec<Line>,
}

/// What an attempt cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tokens computed before sampling, recomputed ones included.
    pub prefilled: usize,
    /// Of them, tokens recomputed after a switch.
    pub recomputed: usize,
    /// Tokens sampled.
    pub sampled: usize,
    /// Seconds by category: `model:ROUTE`, `rebuild:ROUTE`, `tool`, `control`, `orchestration`.
    pub seconds: BTreeMap<String, f64>,
}
