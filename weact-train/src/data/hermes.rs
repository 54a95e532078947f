//! The Hermes form: thinking, calls and results as tags in the text of system, user and assistant messages.

use serde_json::{Map, Value};
use weact_core::message::{Message, Role};

use super::{import::Conversation, openai, tags, tool_schema};

/// What Qwen's chat templates write around a tool list, from which training data is often recorded.
const BEFORE_TOOLS: &str = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
    You are provided with function signatures within <tools></tools> XML tags:";
const AFTER_TOOLS: &str = "For each function call, return a json object with function name and arguments within \
    <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";

/// Reads a row with `messages`.
///
/// Tools come from the first `<tools>` block before the first assistant message, else from the row's `tools` or `functions`:
/// the block is what the model saw (WebDancer's `functions` name another argument than its calls use). A chat template states
/// the tools and how to call them by itself, so the block goes, and with it what would say the same again: in a user message
/// that ends in a line `User: QUESTION` (WebDancer) everything but the question, in a system message the sentences that
/// Qwen's template writes. Any other text stays.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let mut block = None;
    let mut messages: Vec<Message> = Vec::new();
    for (i, message) in openai::messages(&mut row)?.into_iter().enumerate() {
        let at = |why: String| format!("message {i}: {why}");
        let opening = messages.iter().all(|m| m.role != Role::Assistant);
        match message.role {
            Role::Assistant => messages.push(tags::read_assistant(message).map_err(at)?),
            Role::User | Role::Tool => match tags::responses(&message.content).map_err(at)? {
                Some(results) => messages.extend(results.into_iter().map(|result| Message::text(Role::Tool, result))),
                None => messages.push(message),
            },
            Role::System => messages.push(message),
        }
        let Some(prompt) = messages.last_mut().filter(|_| opening && block.is_none()) else { continue };
        if let Some((tools, rest)) = take_tools(prompt).map_err(at)? {
            block = Some(tools);
            match (prompt.role, rest.is_empty()) {
                (_, false) => prompt.content = rest,
                (Role::System, true) => _ = messages.pop(),
                (_, true) => return Err(at("nothing but tools, no question".to_owned())),
            }
        }
    }
    let tools = match block {
        Some(tools) => tools,
        None => {
            let named = row.shift_remove("tools").filter(|tools| !tools.is_null());
            tool_schema::tools(named.or_else(|| row.shift_remove("functions")).unwrap_or_default())?
        }
    };
    let question = messages.iter().find(|m| m.role == Role::User).map(|m| m.content.clone());
    Ok(Conversation { messages, tools, question })
}

/// The tools of a system or user message's `<tools>` block, and the text that remains without it.
fn take_tools(prompt: &Message) -> Result<Option<(Vec<Value>, String)>, String> {
    if !matches!(prompt.role, Role::System | Role::User) {
        return Ok(None);
    }
    let found = prompt.content.match_indices("<tools>").find_map(|(start, tag)| {
        let inside = prompt.content[start + tag.len()..].trim_start();
        inside.starts_with(['{', '[']).then(|| (&prompt.content[..start], inside))
    });
    let Some((before, inside)) = found else { return Ok(None) };
    let (values, after) = tags::json_values_until(inside, "</tools>").map_err(|e| format!("<tools> is no JSON: {e}"))?;
    let values = match <[Value; 1]>::try_from(values) {
        Ok([Value::Array(list)]) => list,
        Ok([tool]) => vec![tool],
        Err(values) => values,
    };
    let rest = match (prompt.role, after.split_once("\nUser:")) {
        (Role::User, Some((_, question))) => question.trim().to_owned(),
        _ => {
            let (before, after) = (before.trim_end(), after.trim_start());
            let before = before.strip_suffix(BEFORE_TOOLS).unwrap_or(before).trim_end();
            let after = after.strip_prefix(AFTER_TOOLS).unwrap_or(after).trim_start();
            [before, after].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
        }
    };
    Ok(Some((tool_schema::tools(Value::Array(values))?, rest)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TOOL: &str = r#"{"name": "search", "description": "finds </tools> in the web", "parameters": {}}"#;

    /// The first message's role and text; the text that remains of it and how many tools were found.
    fn check(role: &str, text: &str, expected: &str, n_tools: usize) {
        let conversation = read_row(json!({"messages": [{"role": role, "content": text}]})).expect("a readable prompt");
        let rest = conversation.messages.first().map_or("", |m| m.content.as_str());
        assert_eq!((rest, conversation.tools.len()), (expected, n_tools), "{text}");
    }

    fn read_row(row: Value) -> Result<Conversation, String> {
        let Value::Object(row) = row else { unreachable!("rows are objects") };
        read(row)
    }

    #[test]
    fn a_tool_block_leaves_the_prompt() {
        check(
            "user",
            &format!("Use:\n<tools>\n{TOOL},\n{TOOL}\n</tools>\nExample.\n\nUser: Who?\nUser: me"),
            "Who?\nUser: me",
            2,
        );
        check("user", &format!("Who?\n<tools>[{TOOL}, {TOOL}]</tools>"), "Who?", 2);
        check("user", "What does <tools> mean?", "What does <tools> mean?", 0);
        let qwen = format!("Be brief.\n\n{BEFORE_TOOLS}\n<tools>\n{TOOL}\n{TOOL}\n</tools>\n\n{AFTER_TOOLS}");
        check("system", &qwen, "Be brief.", 2);
        check("system", &format!("{qwen}\n\nDate: today"), "Be brief.\n\nDate: today", 2);
        check("system", qwen.trim_start_matches("Be brief.\n\n"), "", 2);
        check("system", &format!("Tools: <tools>{TOOL}</tools> Use them."), "Tools:\n\nUse them.", 1);
    }

    #[test]
    fn a_broken_prompt_is_refused() {
        for (text, why) in [("<tools>{\"name\"", "no JSON"), ("<tools>{\"name\": \"a\"}</tools>", "no question")] {
            let got = read_row(json!({"messages": [{"role": "user", "content": text}]})).expect_err(text);
            assert!(got.contains(why), "{got}");
        }
    }

    #[test]
    fn several_responses_become_several_results() {
        let conversation = read_row(json!({"functions": [{"name_for_model": "search"}], "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "<tool_call>{\"name\":\"search\"}</tool_call><tool_call>{\"name\":\"search\"}</tool_call>"},
            {"role": "user", "content": "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"},
        ]}))
        .expect("a readable row");
        let results = [Message::text(Role::Tool, "a"), Message::text(Role::Tool, "b")];
        assert_eq!(conversation.messages[2..], results);
        assert_eq!(conversation.question.as_deref(), Some("Who?"));
        assert_eq!(conversation.tools.len(), 1);
    }
}
