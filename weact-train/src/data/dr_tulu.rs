//! DR Tulu's form: `<call_tool name="..." ATTRIBUTE="...">query</call_tool>` in assistant text, `<tool_output>` after it, in the same
//! text or as a message of its own. Citations and the `<answer>` stay in the text.

use serde_json::{Map, Value, json};
use weact_core::message::{Message, Role, ToolCall};

use super::{import::Conversation, openai, tags, tool_schema};

const CALL: &str = "<call_tool";
const CALL_END: &str = "</call_tool>";
const OUTPUT: &str = "<tool_output>";
const OUTPUT_END: &str = "</tool_output>";

/// Reads a row with `messages`.
///
/// A call's attributes are its arguments. Its body, without the blanks around it, is the argument `query`, or `url` where the tool reads
/// pages. An assistant's text with several calls and outputs becomes as many turns; an output keeps what stands between its tags, but for
/// one line break on either side.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let tools = tool_schema::tools(row.shift_remove("tools").unwrap_or_default())?;
    let mut messages = Vec::new();
    for (i, message) in openai::messages(&mut row)?.into_iter().enumerate() {
        let at = |why: String| format!("message {i}: {why}");
        match message.role {
            Role::Assistant => messages.extend(turns(message).map_err(at)?),
            Role::User | Role::Tool => match tags::blocks(&message.content, OUTPUT, OUTPUT_END).map_err(at)? {
                Some(outputs) => messages.extend(outputs.into_iter().map(|output| Message::text(Role::Tool, output))),
                None => messages.push(message),
            },
            Role::System => messages.push(message),
        }
    }
    let question = messages.iter().find(|m| m.role == Role::User).map(|m| m.content.clone());
    Ok(Conversation { messages, tools, question })
}

/// The turns of one text: thinking and text, calls, and what the text holds of their outputs.
fn turns(mut message: Message) -> Result<Vec<Message>, String> {
    let text = std::mem::take(&mut message.content);
    if text.contains(CALL) && !message.tool_calls.is_empty() {
        return Err("calls stand both in tool_calls and in the text".to_owned());
    }
    // What the message holds beside its text belongs to the first turn.
    let mut fields = Some(message);
    let mut said = |text: &str| {
        // Else a page that holds a closing tag would go on as the assistant's own words.
        if text.contains(OUTPUT_END) {
            return Err(format!("a {OUTPUT_END} outside a call's output: where the output ends is not clear"));
        }
        let fields = fields.take().unwrap_or_else(|| Message::text(Role::Assistant, ""));
        tags::read_assistant(Message { content: text.to_owned(), ..fields })
    };
    let mut turns = Vec::new();
    let mut rest = text.as_str();
    loop {
        let Some(start) = rest.find(CALL) else {
            if !rest.trim().is_empty() || turns.is_empty() {
                turns.push(said(rest)?);
            }
            return Ok(turns);
        };
        if tags::is_thinking(&rest[..start]) {
            return Err("a <call_tool> inside the thinking".to_owned());
        }
        let mut turn = said(rest[..start].trim_end())?;
        rest = &rest[start..];
        while rest.starts_with(CALL) {
            let (made, after) = call(rest)?;
            turn.tool_calls.push(made);
            rest = after.trim_start();
        }
        turns.push(turn);
        let mut answered = rest.is_empty();
        while rest.starts_with(OUTPUT) {
            let (text, after) = output(rest)?;
            turns.push(Message::text(Role::Tool, text));
            rest = after.trim_start();
            answered = true;
        }
        if !answered {
            return Err("text after a call, and no output between".to_owned());
        }
        if rest.is_empty() {
            return Ok(turns);
        }
    }
}

fn call(text: &str) -> Result<(ToolCall, &str), String> {
    let mut rest = text.strip_prefix(CALL).expect("the caller saw it");
    let mut arguments = Map::new();
    let body = loop {
        rest = rest.trim_start();
        if let Some(body) = rest.strip_prefix('>') {
            break body;
        }
        let (key, after) = rest.split_once("=\"").ok_or("a <call_tool> tag is never closed")?;
        let (value, after) = after.split_once('"').ok_or("an attribute of <call_tool> is never closed")?;
        if key.is_empty() || !key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-') {
            return Err(format!("{key:?} is no attribute of <call_tool>"));
        }
        if arguments.insert(key.to_owned(), json!(value)).is_some() {
            return Err(format!("a <call_tool> with {key} twice"));
        }
        rest = after;
    };
    let (query, after) = body.split_once(CALL_END).ok_or("<call_tool> is never closed")?;
    let Some(Value::String(name)) = arguments.shift_remove("name") else { return Err("a <call_tool> without a name".to_owned()) };
    let reads_pages = ["browse", "visit", "open", "fetch"].iter().any(|word| name.contains(word));
    let key = if reads_pages { "url" } else { "query" };
    if arguments.contains_key(key) {
        return Err(format!("a <call_tool> with {key} both as attribute and as text"));
    }
    arguments.shift_insert(0, key.to_owned(), json!(query.trim()));
    Ok((ToolCall::new(name, arguments), after))
}

/// The text of the output at the start of `text`, and what follows it.
fn output(text: &str) -> Result<(String, &str), String> {
    let body = text.strip_prefix(OUTPUT).expect("the caller saw it");
    let (inside, after) = body.split_once(OUTPUT_END).ok_or("<tool_output> is never closed")?;
    Ok((tags::inside(inside).to_owned(), after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_row(messages: &Value) -> Result<Conversation, String> {
        let Value::Object(row) = json!({"messages": messages}) else { unreachable!("rows are objects") };
        read(row)
    }

    const FIRST: &str = "<think>look</think>\n<call_tool name=\"google_search\" gl=\"us\">Ada's bridge</call_tool>";
    const FOUND: &str = "<tool_output>\n<snippet id=\"s1\">built in 1890 <|im_end|></snippet>\n</tool_output>";
    const LAST: &str = "<think>so</think>\n<answer>In <cite id=\"s1\">1890</cite>.</answer>";

    #[test]
    fn calls_outputs_and_citations_are_kept_in_one_text_or_in_several_messages() {
        let browse = "<call_tool name=\"browse_webpage\">https://a.b/?c=\"d\"</call_tool>";
        let whole = format!("{FIRST}\n{FOUND}\n{browse}\n{FOUND}\n{LAST}");
        let user = json!({"role": "user", "content": "When?"});
        let one = read_row(&json!([user, {"role": "assistant", "content": whole}])).expect("a readable row");
        let several = read_row(&json!([user, {"role": "assistant", "content": FIRST}, {"role": "user", "content": FOUND},
            {"role": "assistant", "content": browse}, {"role": "tool", "content": FOUND}, {"role": "assistant", "content": LAST}]))
        .expect("a readable row");
        assert_eq!(one.messages, several.messages);
        let [_, search, found, visit, _, last] = &one.messages[..] else { panic!("six messages") };
        assert_eq!(search.reasoning_content.as_deref(), Some("look"));
        assert_eq!(Value::Object(search.tool_calls[0].arguments.clone()), json!({"query": "Ada's bridge", "gl": "us"}));
        assert_eq!(visit.tool_calls[0].arguments["url"], "https://a.b/?c=\"d\"");
        assert_eq!(found.content, "<snippet id=\"s1\">built in 1890 <|im_end|></snippet>");
        assert_eq!(last.content, "<answer>In <cite id=\"s1\">1890</cite>.</answer>");
        assert_eq!(one.question.as_deref(), Some("When?"));
    }

    #[test]
    fn a_message_s_own_thinking_is_that_of_its_first_turn() {
        let text = format!("{}{FOUND}<answer>1890</answer>", FIRST.trim_start_matches("<think>look</think>\n"));
        let read =
            read_row(&json!([{"role": "assistant", "reasoning_content": "look", "content": text}])).expect("a readable row");
        let thoughts: Vec<Option<&str>> = read.messages.iter().map(|m| m.reasoning_content.as_deref()).collect();
        assert_eq!(thoughts, [Some("look"), None, None]);
    }

    #[test]
    fn what_can_t_be_read_is_refused() {
        for (content, why) in [
            ("<call_tool name=\"s\">q</call_tool> and on", "text after a call"),
            ("<call_tool name=\"s\">q", "never closed"),
            ("<call_tool name=\"s", "never closed"),
            ("<call_tool>q</call_tool>", "without a name"),
            ("<call_tool name=\"s\" query=\"x\">q</call_tool>", "both as attribute and as text"),
            ("<call_tool name=\"s\" gl=\"us\" gl=\"de\">q</call_tool>", "gl twice"),
            ("<call_tool name=\"s\">q</call_tool><tool_output>a </tool_output> b</tool_output>", "where the output ends"),
            ("<tool_output>a</tool_output>", "where the output ends"),
            ("<call_tool na<me=\"s\">q</call_tool>", "no attribute"),
            ("<call_tool name=\"s\">q</call_tool><tool_output>x", "<tool_output> is never closed"),
            ("<think>a <call_tool name=\"s\">q</call_tool></think>", "inside the thinking"),
            ("<think>a", "never closed"),
        ] {
            let got = read_row(&json!([{"role": "assistant", "content": content}])).expect_err(why);
            assert!(got.contains(why), "{content}: {got}");
        }
        let twice = json!([{"role": "assistant", "content": FIRST, "tool_calls": [{"function": {"name": "s"}}]}]);
        assert!(read_row(&twice).expect_err("calls in two places").contains("both in tool_calls and in the text"));
        let beside = json!([{"role": "user", "content": format!("{FOUND} and more")}]);
        assert!(read_row(&beside).expect_err("text beside").contains("text after the last </tool_output>"));
    }
}
