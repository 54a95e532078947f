//! What of a history a stage sees: old tool results are omitted (`keep_tool_result`, App. A.1) and long ones clipped. Training
//! and running use the same rules at the same place, the moment a stage begins, so that a run's prompt is one that was trained.

use serde::{Deserialize, Serialize};

use crate::{
    Result,
    message::{Message, Role},
    stage::OMITTED,
    tokenizer::Tokenizer,
};

/// How many of a history's tool results stay, and how long each may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Of the results before a stage's first message, control results included, the last this many stay; the others read
    /// [`OMITTED`]. The paper keeps 5.
    pub keep_tool_result: usize,
    /// Longest tool result in tokens; a longer one loses its middle. `None` leaves them whole.
    pub clip_tool_result: Option<usize>,
}

impl Default for Retention {
    fn default() -> Self {
        Self { keep_tool_result: 5, clip_tool_result: None }
    }
}

/// Counts of what a view leaves out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Results replaced by [`OMITTED`].
    pub omitted: usize,
    /// Results that lost their middle.
    pub clipped: usize,
}

/// The view of `messages` for a stage whose first message is at `stage_start`.
///
/// # Errors
/// If the tokenizer fails.
pub fn view(
    messages: &[Message],
    stage_start: usize,
    retention: Retention,
    tokenizer: &Tokenizer,
) -> Result<(Vec<Message>, LeftOut)> {
    let mut view = messages.to_vec();
    let mut left_out = LeftOut::default();
    let results: Vec<usize> = (0..stage_start.min(view.len())).filter(|i| view[*i].role == Role::Tool).collect();
    let n_omitted = results.len().saturating_sub(retention.keep_tool_result);
    for i in &results[..n_omitted] {
        view[*i].content = OMITTED.to_owned();
    }
    left_out.omitted = n_omitted;
    if let Some(limit) = retention.clip_tool_result {
        for message in view.iter_mut().filter(|m| m.role == Role::Tool) {
            if let Some(clipped) = tokenizer.clipped(&message.content, limit)? {
                message.content = clipped;
                left_out.clipped += 1;
            }
        }
    }
    Ok((view, left_out))
}
