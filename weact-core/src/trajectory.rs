//! Trajectories: one conversation with the spans in which each capability acted (§2.2, App. A).

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    Capability, Error, Result,
    control::{Action, action},
    episode,
    message::{Message, Role},
};

/// How a span ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exit {
    /// The policy called `offload_lora` in the span's last assistant message: a target.
    Call,
    /// The harness released the adapter after the span: nothing to learn from.
    Harness,
    /// No release was recorded.
    None,
}

/// The messages in which one capability acted: from its first assistant message (the activation result stands before it) to
/// its exit call and that call's result, half-open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Whose tokens these are.
    pub capability: Capability,
    /// Index of the first message.
    pub start: usize,
    /// Index after the last message.
    pub end: usize,
    /// How it ended.
    pub exit: Exit,
}

/// A conversation with labelled spans. Made by [`Trajectory::new`], which checks that the spans fit the messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Trajectory {
    /// Unique within a file.
    pub id: String,
    /// The question asked, where it is known apart from the messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question: Option<String>,
    /// The reference answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<Value>,
    /// Tool schemas in OpenAI's form, in the order in which the model sees them.
    pub tools: Vec<Value>,
    /// The conversation.
    messages: Vec<Message>,
    /// In message order, disjoint.
    spans: Vec<Span>,
}

#[derive(Deserialize)]
struct Unchecked {
    id: String,
    #[serde(default)]
    question: Option<String>,
    #[serde(default)]
    answer: Option<Value>,
    #[serde(default)]
    tools: Vec<Value>,
    messages: Vec<Message>,
    #[serde(default)]
    spans: Vec<Span>,
}

impl TryFrom<Unchecked> for Trajectory {
    type Error = Error;

    fn try_from(raw: Unchecked) -> Result<Self> {
        let trajectory = Self::new(raw.id, raw.tools, raw.messages, raw.spans)?;
        Ok(Self { question: raw.question, answer: raw.answer, ..trajectory })
    }
}

impl Trajectory {
    /// A trajectory whose spans are ordered, disjoint, within the messages, start at an assistant message and, where the exit is
    /// a call, hold that call in their last assistant message.
    ///
    /// # Errors
    /// If one of these does not hold; the message says which span and which messages.
    pub fn new(id: String, tools: Vec<Value>, messages: Vec<Message>, spans: Vec<Span>) -> Result<Self> {
        let mut last_end = 0;
        for span in &spans {
            check_span(span, &messages, last_end)?;
            last_end = span.end;
        }
        Ok(Self { id, question: None, answer: None, tools, messages, spans })
    }

    /// The conversation.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The spans, in message order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }
}

fn check_span(span: &Span, messages: &[Message], last_end: usize) -> Result<()> {
    let Span { capability, start, end, exit } = span;
    let place = format!("span {capability} covers messages {start}..{end}");
    let broken = |why: String| Err(Error::Trajectory(format!("{place} {why}")));
    if *end > messages.len() {
        return broken(format!("but the trajectory has {}", messages.len()));
    }
    if start >= end {
        return broken("and is empty".to_owned());
    }
    if *start < last_end {
        return broken(format!("but the span before it ends at {last_end}"));
    }
    if messages[*start].role != Role::Assistant {
        return broken(format!("but message {start} is not the assistant's"));
    }
    let last = messages[*start..*end]
        .iter()
        .rposition(|m| m.role == Role::Assistant)
        .expect("the span starts with an assistant message");
    let offloads =
        messages[start + last].tool_calls.last().is_some_and(|call| action(call) == Ok(Action::Offload(capability.clone())));
    match exit {
        Exit::Call if !offloads => {
            broken(format!("with exit \"call\" but message {} does not end with offload_lora({capability})", start + last))
        }
        Exit::Call | Exit::Harness | Exit::None => Ok(()),
    }
}

/// Reads trajectories from a JSONL file, and the trajectories of episodes from a file of events.
///
/// # Errors
/// If the file can't be read, or a line is no trajectory: `path:line: why`.
pub fn read(path: &Path) -> Result<Vec<Trajectory>> {
    let file = File::open(path).map_err(|e| Error::io("can't open", path, e))?;
    let mut rows = Vec::new();
    let mut events = episode::Assembler::default();
    let mut line = String::new();
    let mut reader = BufReader::new(file);
    for number in 1.. {
        line.clear();
        let n_bytes = reader.read_line(&mut line).map_err(|e| Error::io("can't read", path, e))?;
        if n_bytes == 0 {
            break;
        }
        let text = line.trim_start_matches('\u{feff}').trim();
        if text.is_empty() {
            continue;
        }
        let at = |why: String| Error::Line { path: path.to_owned(), line: number, why };
        let value: Value = serde_json::from_str(text).map_err(|e| at(e.to_string()))?;
        if value.get("event").is_some() {
            events.push(value).map_err(|e| at(e.to_string()))?;
        } else {
            rows.push(serde_json::from_value(value).map_err(|e| at(e.to_string()))?);
        }
    }
    rows.extend(events.trajectories()?);
    let mut seen = std::collections::HashSet::new();
    for row in &rows {
        let row: &Trajectory = row;
        if !seen.insert(row.id.as_str()) {
            return Err(Error::Trajectory(format!("{}: the id {:?} occurs twice", path.display(), row.id)));
        }
    }
    Ok(rows)
}
