//! What the model is told about a capability: its description in the tool list, and the activation text that answers
//! `load_lora`. Training data, adapter cards and runs use the same texts, so that a run's context is one the adapter was
//! trained in.

use serde::{Deserialize, Serialize};

use crate::Capability;

/// A capability as the model sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// The adapter's alias.
    pub alias: Capability,
    /// One line in the description of `load_lora`.
    pub description: String,
    /// The result of `load_lora(alias)`.
    pub activation: String,
}

/// The text that stands in for an old tool result (`keep_tool_result`, App. A.1).
pub const OMITTED: &str = "Tool result is omitted to save tokens.";

impl Stage {
    /// The texts for `alias`: written for the paper's capabilities, generic for any other name.
    pub fn builtin(alias: &Capability) -> Self {
        let (description, task) = match alias.as_str() {
            "plan" => ("outlines the steps before any search", "Outline the steps that lead to the answer. Do not search yet."),
            "search" => {
                ("gathers evidence with the external tools", "Gather the evidence with the external tools, one step at a time.")
            }
            "write" => ("writes the final answer from the evidence", "Write the final answer from the evidence above."),
            "code" => ("computes with code", "Solve the computation with code."),
            _ => ("a specialised skill", "Do your part of the task."),
        };
        let activation = format!("adapter '{alias}' is active. {task} When done, call offload_lora.");
        Self { alias: alias.clone(), description: description.to_owned(), activation }
    }
}

/// The result of `offload_lora(alias)`.
pub fn released(alias: &Capability) -> String {
    format!("adapter '{alias}' released")
}
