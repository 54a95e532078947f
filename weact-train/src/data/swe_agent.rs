//! SWE-agent's `.traj` files: one object with a `history` of thoughts, actions and observations.

use serde_json::{Map, Value, json};

use super::{import::Conversation, openai, tool_schema};

/// The tool of an action that a history without calls holds as text.
const SHELL: &str = "execute";

/// Reads an object with `history`.
///
/// A tool message's `tool_call_ids` is its call's id; one that answers several calls can't be taken apart and is refused. In older files an action is
/// text and its observation a user message: it becomes a call of `execute` with the argument `command`, and its text stays. Demonstrations stay as
/// the user messages they were. `thinking_blocks` are the reasoning. `thought` repeats the content and goes; where it differs it is the
/// reasoning, or the end of it.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let Some(Value::Array(history)) = row.shift_remove("history") else { return Err("no list history".to_owned()) };
    let tools = tool_schema::tools(row.shift_remove("tools").unwrap_or_default())?;
    let mut messages: Vec<Value> = Vec::new();
    let mut open_action = false;
    for (i, entry) in history.into_iter().enumerate() {
        let at = |why: &str| format!("history entry {i}: {why}");
        let Value::Object(entry) = entry else { return Err(at("no object")) };
        let text = |key: &str| entry.get(key).and_then(Value::as_str);
        let mut message = json!({"role": entry.get("role"), "content": entry.get("content")});
        match text("role") {
            Some("assistant") => {
                let thought = text("thought").filter(|thought| Some(*thought) != text("content") && !thought.trim().is_empty());
                let calls = list(&entry, "tool_calls").map_err(|why| at(&why))?;
                let calls = (!calls.is_empty()).then_some(calls);
                let thinking = list(&entry, "thinking_blocks").and_then(thinking).map_err(|why| at(&why))?;
                let action = text("action").map(str::trim).filter(|action| !action.is_empty() && calls.is_none());
                if let Some(calls) = calls {
                    message["tool_calls"] = json!(calls);
                }
                if let Some(action) = action {
                    message["tool_calls"] = json!([{"function": {"name": SHELL, "arguments": {"command": action}}}]);
                }
                let thought = thought.filter(|thought| !text("content").unwrap_or_default().contains(thought));
                let reasoning: Vec<&str> = thinking.into_iter().chain(thought).collect();
                if !reasoning.is_empty() {
                    message["reasoning_content"] = json!(reasoning.join("\n\n"));
                }
                open_action = action.is_some();
            }
            Some("tool") => match list(&entry, "tool_call_ids").map_err(|why| at(&why))? {
                [] => {}
                [id] => message["tool_call_id"] = id.clone(),
                _ => return Err(at("one observation for several calls: which part answers which is not said")),
            },
            Some("user") if open_action => {
                message["role"] = json!("tool");
                open_action = false;
            }
            Some(_) => {}
            None => return Err(at("no role")),
        }
        messages.push(message);
    }
    let mut row = Map::from_iter([("messages".to_owned(), Value::Array(messages))]);
    let messages = openai::messages(&mut row)?;
    Ok(Conversation { messages, tools, question: None })
}

/// A field's items; none where it is absent or null.
fn list<'a>(entry: &'a Map<String, Value>, key: &str) -> Result<&'a [Value], String> {
    match entry.get(key) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(format!("{key} are no list")),
    }
}

/// The texts of thinking blocks; those that a provider redacted hold none.
fn thinking(blocks: &[Value]) -> Result<Vec<&str>, String> {
    let readable = blocks.iter().filter(|block| block["type"] != "redacted_thinking");
    readable.map(|block| block["thinking"].as_str().ok_or_else(|| "a thinking block without text".to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use weact_core::message::Role;

    use super::*;

    fn read_row(history: &Value) -> Result<Conversation, String> {
        let Value::Object(row) = json!({"environment": "e", "history": history, "info": {}}) else { unreachable!("an object") };
        read(row)
    }

    #[test]
    fn calls_with_plural_ids_and_older_actions_are_read() {
        let conversation = read_row(&json!([
            {"role": "system", "content": "S", "agent": "main", "message_type": "system_prompt"},
            {"role": "user", "content": "a demonstration", "is_demo": true},
            {"role": "user", "content": "fix it", "message_type": "observation"},
            {"role": "assistant", "content": "I look.", "thought": "I look.", "action": "open a.py",
             "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "open", "arguments": "{\"path\": \"a.py\"}"}}]},
            {"role": "tool", "content": "1: x\r\n", "tool_call_ids": ["c1"]},
            {"role": "assistant", "content": "Then\n```\nls -F\n```", "thought": "Then", "action": "ls -F\n"},
            {"role": "user", "content": "a.py\u{0}"}]))
        .expect("a readable row");
        let roles: Vec<Role> = conversation.messages.iter().map(|m| m.role).collect();
        use Role::{Assistant, System, Tool, User};
        assert_eq!(roles, [System, User, User, Assistant, Tool, Assistant, Tool]);
        let [.., open, result, list, files] = &conversation.messages[..] else { panic!("messages") };
        assert_eq!((open.tool_calls[0].arguments["path"].as_str(), result.tool_call_id.as_deref()), (Some("a.py"), Some("c1")));
        assert_eq!((list.tool_calls[0].name.as_str(), &list.tool_calls[0].arguments["command"]), (SHELL, &json!("ls -F")));
        assert_eq!((list.content.as_str(), list.reasoning_content.as_deref()), ("Then\n```\nls -F\n```", None));
        assert_eq!((result.content.as_str(), files.content.as_str()), ("1: x\r\n", "a.py\u{0}"));
    }

    #[test]
    fn thinking_is_kept_whichever_field_holds_it() {
        let blocks = json!([{"type": "thinking", "thinking": "deep"}, {"type": "redacted_thinking", "data": "x"}]);
        for (blocks, thought, expected) in [
            (blocks.clone(), "I look.", Some("deep")),
            (blocks, "hm", Some("deep\n\nhm")),
            (Value::Null, "hm", Some("hm")),
            (json!([]), "look", None),
        ] {
            let entry = json!({"role": "assistant", "content": "I look.", "thought": thought, "thinking_blocks": blocks});
            let read = read_row(&json!([entry])).expect("a readable row");
            assert_eq!(read.messages[0].reasoning_content.as_deref(), expected, "{entry}");
        }
    }

    #[test]
    fn what_can_t_be_read_is_refused() {
        for (history, why) in [
            (json!({}), "no list history"),
            (json!([1]), "entry 0: no object"),
            (json!([{"content": "x"}]), "entry 0: no role"),
            (json!([{"role": "tool", "content": "x", "tool_call_ids": ["a", "b"]}]), "several calls"),
            (json!([{"role": "tool", "content": "x", "tool_call_ids": "a"}]), "tool_call_ids are no list"),
            (json!([{"role": "assistant", "content": "x", "tool_calls": "[]"}]), "tool_calls are no list"),
            (json!([{"role": "assistant", "content": "x", "thinking_blocks": [{"text": "t"}]}]), "block without text"),
        ] {
            let got = read_row(&history).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
    }
}
