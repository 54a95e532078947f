//! Records: one line per finished attempt. Tables and figures are functions of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{grade::Verdict, method::Cost};

/// Version of the format that is written here.
pub const VERSION: u32 = 1;

/// What became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Graded right.
    Correct,
    /// Graded not right.
    Wrong,
    /// It ended without an answer.
    NoAnswer,
    /// It ended without an answer because a turn reached its token limit.
    Length,
    /// It failed: the record's `error` says how.
    Error,
    /// It has an answer that the judge could not grade. Neither right nor wrong.
    JudgeError,
}

impl State {
    /// All, from the best on.
    pub const ALL: [Self; 6] = [Self::Correct, Self::Wrong, Self::NoAnswer, Self::Length, Self::Error, Self::JudgeError];

    /// The name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Correct => "correct",
            Self::Wrong => "wrong",
            Self::NoAnswer => "no_answer",
            Self::Length => "length",
            Self::Error => "error",
            Self::JudgeError => "judge_error",
        }
    }
}

/// One attempt at one task by one method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this format.
    pub v: u32,
    /// The method's name.
    pub method: String,
    /// The benchmark's name in the run's configuration.
    pub benchmark: String,
    /// The task's id.
    pub task: String,
    /// 0 is the first attempt, 1 its first retry.
    pub attempt: usize,
    /// Why this retry was made: the state of the attempt before. `None` for a first attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<State>,
    /// Seed of the attempt's random draws.
    pub seed: u64,
    /// SHA-256 over all that decides the answer and its grade, in hex.
    pub identity: String,
    /// What became of it.
    pub state: State,
    /// The final answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<String>,
    /// The whole text that the answer was taken from, where it says more than the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<String>,
    /// The grader's score in [0, 1].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Further scores by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scores: BTreeMap<String, f64>,
    /// The grader's id.
    pub grader: String,
    /// What was graded, where it is not the prediction itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graded_text: Option<String>,
    /// The grader's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How the run ended, in the controller's words.
    pub termination: String,
    /// Turns of the policy.
    pub n_turns: usize,
    /// Calls of external tools.
    pub n_tool_calls: usize,
    /// Tokens and seconds by category.
    pub cost: Cost,
    /// Seconds from the question to the answer; grading is not in it.
    pub wall_s: f64,
    /// Set where the benchmark is published obfuscated: `prediction`, `report`, `graded_text`, `detail` and `error` are then obfuscated in
    /// the same way, with this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<String>,
}

impl Record {
    /// The id of its episode.
    pub fn episode_id(&self) -> String {
        format!("{}/{}#{}", self.benchmark, self.task, self.attempt)
    }

    /// True if this is the answer of the attempt before, graded again because its judge failed: no retry of the method's.
    pub fn is_graded_again(&self) -> bool {
        self.cause == Some(State::JudgeError)
    }

    /// The texts that may repeat a question or an answer.
    pub(crate) fn texts_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let Self { prediction, report, graded_text, detail, error, .. } = self;
        [prediction, report, graded_text, detail, error].into_iter().flatten()
    }
}

impl From<Verdict> for State {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Correct => Self::Correct,
            Verdict::Wrong => Self::Wrong,
            Verdict::NoAnswer => Self::NoAnswer,
            Verdict::JudgeError => Self::JudgeError,
        }
    }
}
