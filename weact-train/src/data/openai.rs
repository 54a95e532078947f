//! OpenAI's chat form.

use serde_json::{Map, Value};
use weact_core::message::{Message, Role};

use super::{import::Conversation, tags, tool_schema};

/// Reads a row with `messages` (tau-bench: `traj`) and `tools`.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let tools = tool_schema::tools(row.shift_remove("tools").unwrap_or_default())?;
    let mut messages = Vec::new();
    for message in self::messages(&mut row)? {
        messages.push(match message.role {
            Role::Assistant if message.content.contains(tags::CALL) => {
                return Err("a <tool_call> in an assistant's text: this row is in the hermes format".to_owned());
            }
            Role::Assistant => tags::read_assistant(message)?,
            Role::System | Role::User | Role::Tool => message,
        });
    }
    Ok(Conversation { messages, tools, question: None })
}

/// Takes the row's messages. Content may be null, text, or a list of text parts, which are joined; `tool_calls` may be a list
/// or one as a JSON string.
pub(super) fn messages(row: &mut Map<String, Value>) -> Result<Vec<Message>, String> {
    let list = match row.shift_remove("messages").or_else(|| row.shift_remove("traj")) {
        Some(Value::Array(list)) => list,
        Some(_) => return Err("messages are no list".to_owned()),
        None => return Err("no messages".to_owned()),
    };
    list.into_iter().enumerate().map(|(i, value)| message(value).map_err(|why| format!("message {i}: {why}"))).collect()
}

fn message(mut value: Value) -> Result<Message, String> {
    if value.get("function_call").is_some_and(|call| !call.is_null()) {
        return Err("function_call is OpenAI's old form: turn it into tool_calls".to_owned());
    }
    if let Some(Value::Array(parts)) = value.get("content") {
        value["content"] = Value::String(parts.iter().map(part).collect::<Result<_, _>>()?);
    }
    if let Some(Value::String(calls)) = value.get("tool_calls") {
        value["tool_calls"] = serde_json::from_str(calls).map_err(|e| format!("tool_calls are no JSON: {e}"))?;
    }
    serde_json::from_value(value).map_err(|e| e.to_string())
}

fn part(part: &Value) -> Result<&str, String> {
    match part {
        Value::String(text) => Ok(text),
        Value::Object(fields) if fields.get("type").is_none_or(|kind| kind == "text") => {
            fields.get("text").and_then(Value::as_str).ok_or_else(|| "a content part without text".to_owned())
        }
        other => Err(format!("a content part that is no text, of type {}", other["type"])),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_row(row: Value) -> Result<Conversation, String> {
        let Value::Object(row) = row else { unreachable!("rows are objects") };
        read(row)
    }

    #[test]
    fn nulls_parts_and_strings_are_read() {
        let call = json!([{"id": "x", "function": {"name": "get", "arguments": "{\"a\": 1}"}}]);
        let conversation = read_row(json!({"traj": [
            {"role": "developer", "content": [{"type": "text", "text": "be"}, " brief"]},
            {"role": "assistant", "content": null, "tool_calls": call.to_string()},
            {"role": "tool", "content": "", "tool_call_id": "x"},
            {"role": "assistant", "content": "first", "tool_calls": null},
            {"role": "assistant", "content": "<think>\nt\n</think>\n\ndone", "tool_calls": []},
        ]}))
        .expect("a readable row");
        let [system, calling, _, first, last] = &conversation.messages[..] else { panic!("five messages") };
        assert_eq!(*system, Message::text(Role::System, "be brief"));
        assert_eq!(calling.tool_calls[0].arguments["a"], 1);
        assert_eq!((first.content.as_str(), first.tool_calls.len()), ("first", 0));
        assert_eq!((last.reasoning_content.as_deref(), last.content.as_str()), (Some("t"), "done"));
    }

    #[test]
    fn what_is_no_text_chat_is_refused() {
        for (message, why) in [
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "of type \"image_url\""),
            (json!({"role": "user", "content": [{"type": "text"}]}), "without text"),
            (json!({"role": "assistant", "function_call": {"name": "get"}}), "old form"),
            (json!({"role": "function", "content": "1"}), "unknown variant `function`"),
            (json!({"role": "assistant", "content": "<tool_call>{}</tool_call>"}), "hermes"),
            (json!({"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": "{bad"}}]}), "no JSON"),
        ] {
            let got = read_row(json!({"messages": [message]})).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
        assert!(read_row(json!({"conversations": []})).is_err());
    }
}
