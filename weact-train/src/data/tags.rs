//! The tags of the Hermes form: `<think>`, `<tool_call>` and `<tool_response>` in plain text.

use serde_json::{Map, Value, json};
use weact_core::message::{Message, ToolCall};

/// Opens a tool call.
pub(super) const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const RESPONSE: &str = "<tool_response>";
const RESPONSE_END: &str = "</tool_response>";

/// Reads the tags in an assistant message's content: thinking first, then text, then calls to the end.
///
/// Thinking and calls that the message holds in its own fields stay, but may not stand in both places.
pub(super) fn read_assistant(mut message: Message) -> Result<Message, String> {
    let text = std::mem::take(&mut message.content);
    let (thought, rest) = split_thought(&text)?;
    let (content, calls) = split_calls(rest)?;
    if thought.is_some() && message.reasoning_content.is_some() {
        return Err("thinking stands both in reasoning_content and in the text".to_owned());
    }
    if !calls.is_empty() && !message.tool_calls.is_empty() {
        return Err("calls stand both in tool_calls and in the text".to_owned());
    }
    message.content = content.to_owned();
    message.reasoning_content = message.reasoning_content.or(thought);
    message.tool_calls.extend(calls);
    Ok(message)
}

/// The thinking (without the line breaks around it, which templates write themselves) and the text after it. A `</think>`
/// that nothing opens ends a block whose opening tag stood in the prompt.
fn split_thought(text: &str) -> Result<(Option<String>, &str), String> {
    let opened = text.trim_start().strip_prefix(THINK);
    let ended = match opened {
        Some(body) => Some(body.split_once(THINK_END).ok_or("<think> is never closed")?),
        None => text.split_once(THINK_END).filter(|(before, _)| !before.contains(CALL)),
    };
    let (thought, rest) = match ended {
        Some((thought, rest)) => (Some(thought), rest.trim_start_matches(['\r', '\n'])),
        None => (None, text),
    };
    if thought.is_some_and(|t| t.contains(CALL)) {
        return Err("a <tool_call> inside the thinking".to_owned());
    }
    let spoken = rest.split(CALL).next().unwrap_or_default();
    if thought.is_some_and(|t| t.contains(THINK)) || spoken.contains(THINK) || spoken.contains(THINK_END) {
        return Err("more than one <think> block, or one that does not begin the message".to_owned());
    }
    Ok((thought.map(|t| t.trim_matches(['\r', '\n']).to_owned()), rest))
}

/// The text before the first call and the calls. A call ends where its JSON ends, whatever tags its strings hold; the closing
/// tag may be missing at the very end, where it was the stop string.
fn split_calls(text: &str) -> Result<(&str, Vec<ToolCall>), String> {
    let Some(first) = text.find(CALL) else { return Ok((text, Vec::new())) };
    let (content, mut rest) = text.split_at(first);
    let mut calls = Vec::new();
    while let Some(body) = rest.strip_prefix(CALL) {
        let place = calls.len() + 1;
        let (value, after) = json_value(body).map_err(|e| format!("tool call {place} is no JSON: {e}"))?;
        calls.push(call(value).map_err(|e| format!("tool call {place}: {e}"))?);
        let after = after.trim_start();
        rest = match after.strip_prefix(CALL_END) {
            Some(after) => after.trim_start(),
            None if after.is_empty() => after,
            None => return Err(format!("tool call {place} goes on after its JSON: {:?}", shortened(after))),
        };
    }
    if !rest.is_empty() {
        return Err(format!("text after the last tool call: {:?}", shortened(rest)));
    }
    Ok((content.trim_end_matches(['\r', '\n']), calls))
}

/// Reads `{"name", "arguments"}`; arguments are an object or one as a string, `parameters` is read as `arguments`.
pub(super) fn call(value: Value) -> Result<ToolCall, String> {
    let Value::Object(mut fields) = value else { return Err(format!("a call is an object, not {value}")) };
    let name = fields.shift_remove("name").ok_or("no name")?;
    let arguments = fields.shift_remove("arguments").or_else(|| fields.shift_remove("parameters"));
    if let Some(field) = fields.keys().next() {
        return Err(format!("unknown field {field:?}"));
    }
    let function = Map::from_iter([("name".to_owned(), name), ("arguments".to_owned(), arguments.unwrap_or_default())]);
    serde_json::from_value(json!({"function": function})).map_err(|e| e.to_string())
}

/// The results in a message that consists of `<tool_response>` blocks, or `None` if it does not begin with one.
pub(super) fn responses(text: &str) -> Result<Option<Vec<String>>, String> {
    blocks(text, RESPONSE, RESPONSE_END)
}

/// What the blocks hold of which a message consists, or `None` if it does not begin with one. A closing tag that no opening tag
/// follows is a block's own text.
pub(super) fn blocks(text: &str, open: &str, close: &str) -> Result<Option<Vec<String>>, String> {
    let Some(body) = text.trim_start().strip_prefix(open) else { return Ok(None) };
    let body = body.trim_end().strip_suffix(close).ok_or_else(|| format!("text after the last {close}"))?;
    let mut results: Vec<String> = Vec::new();
    for piece in body.split(close) {
        match (piece.trim_start().strip_prefix(open), results.last_mut()) {
            (Some(next), Some(_)) => results.push(next.to_owned()),
            (None, Some(result)) => *result += &format!("{close}{piece}"),
            (_, None) => results.push(piece.to_owned()),
        }
    }
    Ok(Some(results.iter().map(|result| inside(result).to_owned()).collect()))
}

/// The text between two tags: one line break on either side belongs to them.
pub(super) fn inside(text: &str) -> &str {
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}

/// Whether a call after `before` stands inside thinking.
pub(super) fn is_thinking(before: &str) -> bool {
    before.rfind(THINK).is_some_and(|opened| !before[opened..].contains(THINK_END))
}

/// Reads one JSON value at the start of `text`; also returns what follows it.
pub(super) fn json_value(text: &str) -> Result<(Value, &str), String> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    match values.next() {
        Some(Ok(value)) => Ok((value, &text[values.byte_offset()..])),
        Some(Err(e)) => Err(e.to_string()),
        None => Err("it is empty".to_owned()),
    }
}

/// Reads JSON values, separated by blanks or commas, up to `end`; also returns what follows `end`.
pub(super) fn json_values_until<'a>(mut text: &'a str, end: &str) -> Result<(Vec<Value>, &'a str), String> {
    let mut values = Vec::new();
    loop {
        text = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        if let Some(after) = text.strip_prefix(end) {
            return Ok((values, after));
        }
        let (value, after) = json_value(text)?;
        values.push(value);
        text = after;
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use weact_core::message::Role;

    use super::*;

    fn read(text: &str) -> Result<Message, String> {
        read_assistant(Message::text(Role::Assistant, text))
    }

    /// Input; thinking, content, and (name, arguments) of the calls.
    fn check(input: &str, thought: Option<&str>, content: &str, calls: &[(&str, Value)]) {
        let message = read(input).unwrap_or_else(|why| panic!("{input:?}: {why}"));
        assert_eq!(message.reasoning_content.as_deref(), thought, "{input:?}");
        assert_eq!(message.content, content, "{input:?}");
        let got: Vec<_> = message.tool_calls.iter().map(|c| (c.name.as_str(), Value::Object(c.arguments.clone()))).collect();
        assert_eq!(got, calls, "{input:?}");
    }

    #[test]
    fn tags_are_read_and_strings_are_opaque() {
        let query = |q: &str| ("search", json!({"query": q}));
        check("Hello.\n", None, "Hello.\n", &[]);
        check("<think>\n a\n\nb \n</think>\n\n<answer>\nx\n</answer>", Some(" a\n\nb "), "<answer>\nx\n</answer>", &[]);
        check("<think></think>x", Some(""), "x", &[]);
        check("the prompt opened it\n</think>\nx", Some("the prompt opened it"), "x", &[]);
        check(
            "<think>t</think>\nfirst\n<tool_call>\n{\"name\": \"search\", \"arguments\": {\"query\": \"é </tool_call><tool_call> </think>\"}}\n</tool_call>",
            Some("t"),
            "first",
            &[query("é </tool_call><tool_call> </think>")],
        );
        check(r#"<tool_call>{"name":"search","arguments":{"query":"</think>"}}</tool_call>"#, None, "", &[query("</think>")]);
        check(
            "<tool_call>{\"name\":\"search\",\"arguments\":\"{\\\"query\\\":\\\"a\\\"}\"}</tool_call>\n<tool_call>\n{\"name\":\"end\"}",
            None,
            "",
            &[query("a"), ("end", json!({}))],
        );
        check(r#"<tool_call>{"name":"search","parameters":{"query":"p"}}</tool_call>"#, None, "", &[query("p")]);
    }

    #[test]
    fn what_has_no_place_in_a_message_is_refused() {
        for (text, why) in [
            ("<think>a", "never closed"),
            ("<think>a <tool_call>{\"name\":\"search\"}</tool_call>", "never closed"),
            ("<think>a <tool_call>{\"name\":\"search\"}</tool_call></think>", "inside the thinking"),
            (
                "<think>a <tool_call>{\"name\":\"search\",\"arguments\":{\"query\":\"</think>\"}}</tool_call>",
                "inside the thinking",
            ),
            ("x <think>a</think>", "more than one"),
            ("<think>a</think><think>b</think>", "more than one"),
            ("<tool_call>{\"name\":\"search\"}}}</tool_call>", "goes on after its JSON"),
            ("<tool_call>{\"name\":\"search\"", "no JSON"),
            ("<tool_call>{\"name\":\"search\",\"arguments\":[1]}</tool_call>", "must be an object"),
            ("<tool_call>{\"name\":\"search\",\"args\":{}}</tool_call>", "unknown field \"args\""),
            ("<tool_call>{\"arguments\":{}}</tool_call>", "no name"),
            ("<tool_call>{\"name\":\"search\"}</tool_call> and", "text after the last tool call"),
        ] {
            let got = read(text).expect_err(text);
            assert!(got.contains(why), "{text:?}: {got}");
        }
    }

    #[test]
    fn responses_keep_their_own_text() {
        let read = |text| responses(text).expect("well-formed");
        assert_eq!(read("a question about <tool_response>"), None);
        assert_eq!(read("<tool_response>\na\n\n</tool_response>\n"), Some(vec!["a\n".to_owned()]));
        let two = "<tool_response>\na\n</tool_response>\n<tool_response>b </tool_response> c</tool_response>";
        assert_eq!(read(two), Some(vec!["a".to_owned(), "b </tool_response> c".to_owned()]));
        assert!(responses("<tool_response>a</tool_response> go on").is_err());
    }
}
