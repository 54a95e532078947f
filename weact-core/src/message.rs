//! Messages of a conversation, in the OpenAI form with reasoning kept apart.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the harness. OpenAI's `developer` is read as this.
    #[serde(alias = "developer")]
    System,
    /// The person who asks.
    User,
    /// The policy.
    Assistant,
    /// A tool's answer: untrusted text.
    Tool,
}

/// One message. Missing or null `content` reads as empty text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The visible text, without reasoning and without tool calls.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub content: String,
    /// The text between `<think>` and `</think>`. `Some("")` is an empty block that the policy wrote, `None` no block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls that an assistant message ends with, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_no_calls")]
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool that a tool message comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A call of a tool by name. On the wire it has OpenAI's form `{"id", "type": "function", "function": {"name", "arguments"}}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "wire::ToolCall", into = "wire::ToolCall")]
pub struct ToolCall {
    /// The identifier that a tool message answers to, where there is one.
    pub id: Option<String>,
    /// The tool's name.
    pub name: String,
    /// The arguments, in the order in which they were written.
    pub arguments: Map<String, Value>,
}

impl Message {
    /// A message of `role` that holds text only.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning_content: None, tool_calls: Vec::new(), tool_call_id: None, name: None }
    }

    /// An assistant message that makes `calls` after `content`.
    pub fn calling(content: impl Into<String>, calls: Vec<ToolCall>) -> Self {
        Self { tool_calls: calls, ..Self::text(Role::Assistant, content) }
    }

    /// The answer to `call`.
    pub fn tool_result(call: &ToolCall, content: impl Into<String>) -> Self {
        Self { tool_call_id: call.id.clone(), name: Some(call.name.clone()), ..Self::text(Role::Tool, content) }
    }
}

impl ToolCall {
    /// A call without identifier.
    pub fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        Self { id: None, name: name.into(), arguments }
    }
}

fn null_as_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn null_as_no_calls<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

mod wire {
    use serde::{Deserialize, Serialize};
    use serde_json::{Map, Value};

    #[derive(Serialize, Deserialize)]
    pub(super) struct ToolCall {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        #[serde(rename = "type", default = "function")]
        kind: String,
        function: Function,
    }

    #[derive(Serialize, Deserialize)]
    struct Function {
        name: String,
        #[serde(default)]
        arguments: Value,
    }

    fn function() -> String {
        "function".to_owned()
    }

    /// Servers write arguments as a JSON string, templates want an object: both are read, an object is kept.
    pub(super) fn arguments(value: Value) -> Result<Map<String, Value>, String> {
        match value {
            Value::Object(map) => Ok(map),
            Value::Null => Ok(Map::new()),
            Value::String(text) if text.trim().is_empty() => Ok(Map::new()),
            Value::String(text) => match serde_json::from_str(&text) {
                Ok(Value::Object(map)) => Ok(map),
                Ok(other) => Err(format!("tool call arguments must be an object, not {other}")),
                Err(error) => Err(format!("tool call arguments are no JSON: {error}: {text}")),
            },
            other => Err(format!("tool call arguments must be an object, not {other}")),
        }
    }

    impl TryFrom<ToolCall> for super::ToolCall {
        type Error = String;

        fn try_from(wire: ToolCall) -> Result<Self, String> {
            if wire.kind != "function" {
                return Err(format!("unknown tool call type {:?}", wire.kind));
            }
            Ok(Self { id: wire.id, name: wire.function.name, arguments: arguments(wire.function.arguments)? })
        }
    }

    impl From<super::ToolCall> for ToolCall {
        fn from(call: super::ToolCall) -> Self {
            let function = Function { name: call.name, arguments: Value::Object(call.arguments) };
            Self { id: call.id, kind: self::function(), function }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: &str) -> serde_json::Result<Message> {
        serde_json::from_str(&format!(
            r#"{{"role":"assistant","content":null,"tool_calls":[{{"function":{{"name":"search","arguments":{arguments}}}}}]}}"#
        ))
    }

    #[test]
    fn arguments_read_alike_as_string_and_as_object() {
        let object = call(r#"{"query":"caffè","top_k":2}"#).expect("an object");
        let string = call(r#""{\"query\":\"caffè\",\"top_k\":2}""#).expect("a string");
        assert_eq!(object, string);
        assert_eq!(object.tool_calls[0].arguments.keys().collect::<Vec<_>>(), ["query", "top_k"]);
        assert!(call(r#""{bad""#).expect_err("no JSON").to_string().contains("no JSON"));
        assert!(call("[1]").is_err());
    }

    #[test]
    fn null_and_absent_fields_read_as_empty() {
        let message: Message = serde_json::from_str(r#"{"role":"developer","content":null,"tool_calls":null}"#).expect("nulls");
        assert_eq!(message, Message::text(Role::System, ""));
    }
}
