//! Files of conversations to trajectories without spans.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
    str::FromStr,
};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use weact_core::{
    message::{Message, Role},
    trajectory::Trajectory,
};

use super::{dr_tulu, hermes, mcp_xml, openai, pairing, sharegpt, swe_agent, tags};
use crate::{Error, Result};

/// The form in which a file holds conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenAI's chat form: `messages` (or `traj`, as in tau-bench) with `tool_calls` and `tool_call_id`, and `tools`.
    OpenAi,
    /// `messages` whose text holds `<think>`, `<tool_call>` and, in user messages, `<tool_response>` (WebDancer, Qwen).
    Hermes,
    /// `conversations` of `from` and `value` with `function_call` and `observation` turns (LLaMA-Factory).
    ShareGpt,
    /// `messages` whose text holds `<use_mcp_tool>`, the tools in the system prompt, observations as user messages (MiroThinker).
    McpXml,
    /// `messages` whose text holds `<call_tool>` and `<tool_output>` (DR Tulu).
    DrTulu,
    /// One `.traj` file of SWE-agent: an object with a `history`.
    SweAgent,
}

/// What [`import`] made of a file: every row is in one of the two lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imported {
    /// The rows that were kept, in file order, without spans.
    pub trajectories: Vec<Trajectory>,
    /// The rows that were not.
    pub dropped: Vec<Dropped>,
}

/// A row that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The line of a JSONL file or the place in an array, from 1.
    pub row: usize,
    /// The row's own id, where it has one.
    pub id: Option<String>,
    /// Why.
    pub reason: String,
}

/// A row in common form, before results are paired with calls.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Message>,
    pub(super) tools: Vec<Value>,
    pub(super) question: Option<String>,
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "openai" => Ok(Self::OpenAi),
            "hermes" => Ok(Self::Hermes),
            "sharegpt" => Ok(Self::ShareGpt),
            "mcp-xml" => Ok(Self::McpXml),
            "dr-tulu" => Ok(Self::DrTulu),
            "swe-agent" => Ok(Self::SweAgent),
            _ => {
                Err(Error::Other(format!("unknown format {name:?}: use openai, hermes, sharegpt, mcp-xml, dr-tulu or swe-agent")))
            }
        }
    }
}

/// Reads the conversations of a JSON array, a JSONL file, or a file of one object.
///
/// An assistant's `<think>` block at the start of its text becomes `reasoning_content`, without the line breaks around it;
/// other text stays as it is. Every call gets an id (`call_<turn>_<i>` where there is none), every result the id of its call,
/// and results stand in the order of their calls. A row whose calls and results don't pair, or that holds something a message
/// can't (a call inside thinking, an image), is dropped with its reason.
///
/// A row's id is its `id` or `task_id`, else `<file stem>-<row>`; where another row has it already, `-2`, `-3`, .. is
/// appended. A row with the same messages as an earlier one is dropped. `question` is the row's own field, in the hermes
/// format else the first user message; `answer` is the row's own field, taken out of lists that hold nothing else
/// (WebDancer's `[["Yes"]]`).
///
/// # Errors
/// If the file can't be read, or isn't JSON: `path:line: why`, in an array `path: row N: why`.
pub fn import(path: &Path, format: Format) -> Result<Imported> {
    let text = fs::read_to_string(path).map_err(|e| weact_core::Error::io("can't read", path, e))?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut imported = Imported::default();
    let mut ids = HashSet::new();
    let mut row_with_messages = HashMap::new();
    each_row(path, &text, |row, value| {
        let own_id = ["id", "task_id"].iter().find_map(|key| id(value.get(key)?));
        let wanted_id = own_id.clone().unwrap_or_else(|| format!("{stem}-{row}"));
        let kept = read_row(value, format).and_then(|trajectory| {
            let first_row = *row_with_messages.entry(digest(trajectory.messages())).or_insert(row);
            if first_row == row { Ok(trajectory) } else { Err(format!("duplicate of row {first_row}")) }
        });
        match kept {
            Ok(mut trajectory) => {
                let suffixed = (2..).map(|n| format!("{wanted_id}-{n}"));
                let id = [wanted_id.clone()].into_iter().chain(suffixed).find(|id| ids.insert(id.clone()));
                trajectory.id = id.expect("endlessly many suffixes hold a free one");
                imported.trajectories.push(trajectory);
            }
            Err(reason) => imported.dropped.push(Dropped { row, id: own_id, reason }),
        }
    })?;
    Ok(imported)
}

/// Calls `visit` with every row's number, from 1, and value. JSONL lines end at `\n` alone: strings may hold any other break.
fn each_row(path: &Path, text: &str, mut visit: impl FnMut(usize, Value)) -> Result<()> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // One object over several lines.
    if text.trim_start().starts_with('{')
        && text.trim().contains('\n')
        && let Ok(value @ Value::Object(_)) = serde_json::from_str(text)
    {
        visit(1, value);
        return Ok(());
    }
    let Some(mut rest) = text.trim_start().strip_prefix('[') else {
        for (i, line) in text.split('\n').enumerate() {
            let line = line.trim();
            if !line.is_empty() {
                let at =
                    |why: serde_json::Error| weact_core::Error::Line { path: path.into(), line: i + 1, why: why.to_string() };
                visit(i + 1, serde_json::from_str(line).map_err(at)?);
            }
        }
        return Ok(());
    };
    let at = |row: usize, why: String| weact_core::Error::file(path, format!("row {row}: {why}"));
    if rest.trim_start().starts_with(']') {
        return Ok(());
    }
    for row in 1.. {
        let (value, after) = tags::json_value(rest).map_err(|why| at(row, format!("{why} of the row")))?;
        visit(row, value);
        let after = after.trim_start();
        if let Some(end) = after.strip_prefix(']') {
            if !end.trim().is_empty() {
                return Err(weact_core::Error::file(path, "text after the array").into());
            }
            break;
        }
        rest = after.strip_prefix(',').ok_or_else(|| at(row, "no comma or ] after it".to_owned()))?;
    }
    Ok(())
}

fn read_row(row: Value, format: Format) -> std::result::Result<Trajectory, String> {
    let Value::Object(mut row) = row else { return Err("the row is no object".to_owned()) };
    let question = row.shift_remove("question").and_then(|q| q.as_str().map(str::to_owned));
    let answer = row.shift_remove("answer").map(unwrapped).filter(|answer| !answer.is_null());
    let Conversation { mut messages, tools, question: first_message } = conversation(row, format)?;
    if messages.iter().all(|m| m.role != Role::Assistant) {
        return Err("no message of the assistant".to_owned());
    }
    pairing::pair(&mut messages)?;
    let mut trajectory = Trajectory::new(String::new(), tools, messages, Vec::new()).map_err(|e| e.to_string())?;
    trajectory.question = question.or(first_message);
    trajectory.answer = answer;
    Ok(trajectory)
}

fn conversation(row: Map<String, Value>, format: Format) -> std::result::Result<Conversation, String> {
    match format {
        Format::OpenAi => openai::read(row),
        Format::Hermes => hermes::read(row),
        Format::ShareGpt => sharegpt::read(row),
        Format::McpXml => mcp_xml::read(row),
        Format::DrTulu => dr_tulu::read(row),
        Format::SweAgent => swe_agent::read(row),
    }
}

fn id(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn unwrapped(answer: Value) -> Value {
    match answer {
        Value::Array(mut list) if list.len() == 1 => unwrapped(list.remove(0)),
        other => other,
    }
}

fn digest(messages: &[Message]) -> [u8; 32] {
    Sha256::digest(serde_json::to_vec(messages).expect("messages have string keys only")).into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn import_text(text: &str) -> Result<Imported> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("chats.jsonl");
        fs::write(&path, text).expect("a writable file");
        import(&path, Format::OpenAi)
    }

    fn row(id: impl Into<Value>, answer: &str) -> Value {
        json!({"id": id.into(), "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]})
    }

    #[test]
    fn every_row_is_kept_or_dropped_with_its_reason() {
        let rows = [
            row("a", "1\u{2028}\u{85}2"),
            row("a", "other"),
            row(Value::Null, "other"),
            row(7, "seven"),
            row(Value::Null, "five"),
            json!({"id": "b", "messages": [{"role": "user", "content": "?"}]}),
            json!([]),
            row("a-2", "taken"),
        ];
        let expected_ids = ["a", "a-2", "7", "chats-5", "a-2-2"];
        let expected_drops =
            [(3, None, "duplicate of row 2"), (6, Some("b"), "no message of the assistant"), (7, None, "the row is no object")];
        let lines = rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\r\n");
        for text in [json!(rows).to_string(), format!("\u{feff}{lines}\n\n")] {
            let imported = import_text(&text).expect("JSON");
            let ids: Vec<_> = imported.trajectories.iter().map(|t| t.id.as_str()).collect();
            assert_eq!(ids, expected_ids);
            assert_eq!(imported.trajectories[0].messages()[1].content, "1\u{2028}\u{85}2");
            let drops: Vec<_> = imported.dropped.iter().map(|d| (d.row, d.id.as_deref(), d.reason.as_str())).collect();
            assert_eq!(drops, expected_drops);
        }
        assert_eq!(import_text("").expect("no rows"), Imported::default());
        assert_eq!(import_text(" [ ]\n").expect("no rows"), Imported::default());
    }

    #[test]
    fn broken_json_is_an_error_with_its_place() {
        let good = row("a", "1");
        for (text, why) in [
            (format!("{good}\n\n{{\"messages\": \n"), "chats.jsonl:3: EOF while parsing"),
            (format!("[{good},\n{{\"messages\" 1}}]"), "chats.jsonl: row 2: expected `:`"),
            (format!("[{good}"), "chats.jsonl: row 1: no comma or ] after it"),
            (format!("[{good},]"), "chats.jsonl: row 2: expected value"),
            (format!("[{good}] {good}"), "chats.jsonl: text after the array"),
        ] {
            let got = import_text(&text).expect_err(why).to_string();
            assert!(got.contains(why), "{got}");
        }
    }

    #[test]
    fn question_and_answer_are_taken_where_they_are_known() {
        for (answer, expected) in
            [(json!([["Yes"]]), Some(json!("Yes"))), (json!(["a", "b"]), Some(json!(["a", "b"]))), (Value::Null, None)]
        {
            let mut row = row(1, "x");
            row["question"] = json!("who?");
            row["answer"] = answer;
            let imported = import_text(&row.to_string()).expect("JSON");
            assert_eq!(imported.trajectories[0].question.as_deref(), Some("who?"));
            assert_eq!(imported.trajectories[0].answer, expected);
        }
    }

    #[test]
    fn a_format_has_its_name_on_the_command_line() {
        assert_eq!("sharegpt".parse::<Format>().expect("a known name"), Format::ShareGpt);
        for (name, why) in [("mcp", "unknown format \"mcp\""), ("json", "use openai, hermes, sharegpt")] {
            assert!(name.parse::<Format>().expect_err(name).to_string().contains(why));
        }
    }
}
