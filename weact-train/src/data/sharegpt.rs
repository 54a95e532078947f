//! The ShareGPT form with LLaMA-Factory's roles for tools.

use serde::Deserialize;
use serde_json::{Map, Value};
use weact_core::message::{Message, Role};

use super::{import::Conversation, tags, tool_schema};

#[derive(Deserialize)]
struct Turn {
    from: String,
    value: String,
}

/// Reads a row with `conversations: [{"from", "value"}]`, `tools` (a JSON string) and `system`.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let tools = tool_schema::tools(row.shift_remove("tools").unwrap_or_default())?;
    let turns = row.shift_remove("conversations").ok_or("no conversations")?;
    let turns: Vec<Turn> = serde_json::from_value(turns).map_err(|e| format!("conversations: {e}"))?;
    let mut messages = Vec::new();
    match row.shift_remove("system") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => messages.push(Message::text(Role::System, text)),
        Some(other) => return Err(format!("system must be text, not {other}")),
    }
    for (i, turn) in turns.into_iter().enumerate() {
        messages.extend(read_turn(turn).map_err(|why| format!("turn {i}: {why}"))?);
    }
    Ok(Conversation { messages, tools, question: None })
}

fn read_turn(Turn { from, value }: Turn) -> Result<Vec<Message>, String> {
    Ok(match from.as_str() {
        "system" => vec![Message::text(Role::System, value)],
        "human" | "user" => vec![Message::text(Role::User, value)],
        "gpt" | "assistant" => vec![tags::read_assistant(Message::text(Role::Assistant, value))?],
        "function_call" => {
            let calls = match serde_json::from_str(&value).map_err(|e| format!("function_call is no JSON: {e}"))? {
                Value::Array(calls) => calls,
                call => vec![call],
            };
            vec![Message::calling("", calls.into_iter().map(tags::call).collect::<Result<_, _>>()?)]
        }
        "observation" | "tool" => {
            let results = tags::responses(&value)?.unwrap_or_else(|| vec![value]);
            results.into_iter().map(|result| Message::text(Role::Tool, result)).collect()
        }
        other => return Err(format!("unknown role {other:?}")),
    })
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
    fn roles_calls_and_tools_are_read() {
        let tip = r#"{"name": "calculate_tip", "arguments": {"bill": 50}}"#;
        let conversation = read_row(json!({
        "system": "s",
        "tools": r#"[{"name": "calculate_tip", "description": "d", "parameters": {}}]"#,
        "conversations": [
            {"from": "human", "value": "50?"},
            {"from": "function_call", "value": format!("[{tip}, {tip}]")},
            {"from": "observation", "value": "10"},
            {"from": "tool", "value": "<tool_response>\n11\n</tool_response>"},
            {"from": "gpt", "value": "It is 10."},
        ]}))
        .expect("a readable row");
        let roles: Vec<Role> = conversation.messages.iter().map(|m| m.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Tool, Role::Assistant]);
        assert_eq!(conversation.messages[2].tool_calls.len(), 2);
        assert_eq!(conversation.messages[2].tool_calls[1].arguments["bill"], 50);
        assert_eq!(conversation.messages[4].content, "11");
        assert_eq!(conversation.tools[0]["function"]["name"], "calculate_tip");
    }

    #[test]
    fn an_unreadable_turn_is_refused() {
        for (turn, why) in [
            (json!({"from": "narrator", "value": ""}), "turn 0: unknown role \"narrator\""),
            (json!({"from": "function_call", "value": "{"}), "no JSON"),
            (json!({"from": "gpt", "value": null}), "conversations: invalid type: null"),
        ] {
            let got = read_row(json!({"conversations": [turn]})).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
    }
}
