//! The form of MiroThinker and MiroFlow: calls as `<use_mcp_tool>` blocks at the end of assistant messages, tools in prose in the
//! system prompt, observations as user messages.

use serde_json::{Map, Value, json};
use weact_core::message::{Message, Role, ToolCall};

use super::{import::Conversation, openai, python_literal, tags, tool_schema};

const CALL: &str = "<use_mcp_tool>";
const CALL_END: &str = "</use_mcp_tool>";
const SERVER: &str = "## Server name:";
const TOOL: &str = "### Tool name:";
const SCHEMA: &str = "Input JSON schema:";

/// Reads a row with `messages`.
///
/// The list of tools leaves the system prompt, other text stays; where no prompt lists tools, the row's own `tools` are read. A schema is
/// read as JSON, else as the Python literal that prompts often hold. Each tool keeps its server's name under the key `server`; a call's
/// tool is `SERVER.TOOL` only where two servers have one of this name. The user messages after a call are its observations: one for each
/// call.
pub(super) fn read(mut row: Map<String, Value>) -> Result<Conversation, String> {
    let raw = openai::messages(&mut row)?;
    let mut tools = Vec::new();
    let mut messages: Vec<Message> = Vec::new();
    for (i, mut message) in raw.into_iter().enumerate() {
        let at = |why: String| format!("message {i}: {why}");
        // Results still due from the last assistant message.
        let n_results = messages.iter().rev().take_while(|m| m.role == Role::Tool).count();
        let n_calls = messages.iter().rev().find(|m| m.role != Role::Tool).map_or(0, |m| m.tool_calls.len());
        if !message.tool_calls.is_empty() {
            return Err(at("it holds tool_calls: this row is in the openai format".to_owned()));
        }
        match message.role {
            Role::System => {
                let (rest, listed) = take_tools(&message.content).map_err(at)?;
                tools.extend(listed);
                message.content = rest;
                if !message.content.is_empty() {
                    messages.push(message);
                }
            }
            Role::Assistant => messages.push(assistant(message).map_err(at)?),
            Role::User | Role::Tool if n_results < n_calls => messages.push(Message::text(Role::Tool, message.content)),
            Role::User | Role::Tool => messages.push(message),
        }
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let listed: Vec<(String, String)> =
        tools.iter().map(|tool: &Value| (text(&tool["server"]), text(&tool["function"]["name"]))).collect();
    let is_shared = |name: &str| {
        let mut servers = listed.iter().filter(|(_, other)| other == name).map(|(server, _)| server);
        servers.next().is_some_and(|first| servers.any(|server| server != first))
    };
    for (tool, (server, name)) in tools.iter_mut().zip(&listed).filter(|(_, (_, name))| is_shared(name)) {
        tool["function"]["name"] = Value::from(format!("{server}.{name}"));
    }
    if tools.is_empty() {
        tools = tool_schema::tools(row.shift_remove("tools").unwrap_or_default())?;
    }
    for call in messages.iter_mut().flat_map(|message| &mut message.tool_calls) {
        let (server, name) = call.name.split_once('\n').expect("the reader joins them so");
        call.name = if is_shared(name) { format!("{server}.{name}") } else { name.to_owned() };
    }
    let question = messages.iter().find(|m| m.role == Role::User).map(|m| m.content.clone());
    Ok(Conversation { messages, tools, question })
}

/// Thinking, text, and the calls at the end; a call's name is `server\ntool` until all are known.
fn assistant(message: Message) -> Result<Message, String> {
    let start = message.content.find(CALL);
    if start.is_some_and(|at| tags::is_thinking(&message.content[..at])) {
        return Err(format!("a {CALL} inside the thinking"));
    }
    let (text, calls) = match start {
        Some(at) => (message.content[..at].trim_end().to_owned(), calls(&message.content[at..])?),
        None => (message.content.clone(), Vec::new()),
    };
    let mut read = tags::read_assistant(Message { content: text, ..message })?;
    if !read.tool_calls.is_empty() {
        return Err("a call in another form: this row is in the hermes format".to_owned());
    }
    read.tool_calls = calls;
    Ok(read)
}

fn calls(mut rest: &str) -> Result<Vec<ToolCall>, String> {
    let mut calls = Vec::new();
    while let Some(body) = rest.strip_prefix(CALL) {
        let place = calls.len() + 1;
        let wrong = |why: String| format!("tool call {place}: {why}");
        let (server, body) = element(body, "server_name").map_err(wrong)?;
        let (name, body) = element(body, "tool_name").map_err(wrong)?;
        let body = body.trim_start().strip_prefix("<arguments>").ok_or_else(|| wrong("no <arguments>".to_owned()))?;
        // The JSON ends the arguments, whatever its strings hold.
        let (arguments, after) = tags::json_value(body).map_err(|why| wrong(format!("its arguments are no JSON: {why}")))?;
        let Value::Object(arguments) = arguments else { return Err(wrong("its arguments are no object".to_owned())) };
        let after = after.trim_start().strip_prefix("</arguments>").map(str::trim_start).and_then(|a| a.strip_prefix(CALL_END));
        rest = after.ok_or_else(|| wrong(format!("it does not end with </arguments>{CALL_END}")))?.trim_start();
        calls.push(ToolCall::new(format!("{server}\n{name}"), arguments));
    }
    if rest.is_empty() { Ok(calls) } else { Err("text after the last tool call".to_owned()) }
}

fn element<'a>(text: &'a str, name: &str) -> Result<(&'a str, &'a str), String> {
    let inside = text.trim_start().strip_prefix(&format!("<{name}>")).ok_or_else(|| format!("no <{name}>"))?;
    let (value, rest) = inside.split_once(&format!("</{name}>")).ok_or_else(|| format!("<{name}> is never closed"))?;
    match value.trim() {
        "" => Err(format!("<{name}> is empty")),
        value if value.contains('\n') => Err(format!("<{name}> is no name")),
        value => Ok((value, rest)),
    }
}

/// The tools that a system prompt lists, and its text without the list.
fn take_tools(prompt: &str) -> Result<(String, Vec<Value>), String> {
    let Some(start) = heading(prompt).filter(|at| prompt[*at..].contains(TOOL)) else {
        return Ok((prompt.to_owned(), Vec::new()));
    };
    let mut tools = Vec::new();
    let mut end = start;
    let mut server = "";
    let list = &prompt[start..];
    let mut at = 0;
    while at < list.len() {
        let line = list[at..].lines().next().unwrap_or_default();
        if let Some(name) = line.strip_prefix(SERVER) {
            server = name.trim();
            at += line.len() + 1;
            end = start + at.min(list.len());
        } else if let Some(name) = line.strip_prefix(TOOL) {
            let body = &list[at + line.len()..];
            let until = body.find(SCHEMA).filter(|until| heading(&body[..*until]).is_none());
            let until = until.ok_or_else(|| format!("tool {}: no {SCHEMA}", name.trim()))?;
            let description = body[..until].trim().strip_prefix("Description:").unwrap_or(body[..until].trim()).trim();
            let schema = body[until + SCHEMA.len()..].lines().next().unwrap_or_default();
            let parameters = serde_json::from_str(schema.trim())
                .or_else(|_| python_literal::parse(schema.trim()))
                .map_err(|why| format!("tool {}: its schema is neither JSON nor a Python literal: {why}", name.trim()))?;
            tools.push(tool(server, name.trim(), description, &parameters));
            at += line.len() + until + SCHEMA.len() + schema.len() + 1;
            end = start + at.min(list.len());
        } else if line.trim().is_empty() {
            at += line.len() + 1;
        } else {
            break;
        }
    }
    let rest = prompt.get(end..).unwrap_or_default();
    if let Some(at) = heading(rest) {
        let line = rest[at..].lines().next().unwrap_or_default().trim();
        return Err(format!("the list of tools goes on after other text, at {line:?}"));
    }
    let parts = [prompt[..start].trim_end(), rest.trim_start()];
    Ok((parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n"), tools))
}

/// Where the first line starts that names a server or a tool.
fn heading(text: &str) -> Option<usize> {
    let mut lines = text.split_inclusive('\n').scan(0, |at, line| {
        *at += line.len();
        Some((*at - line.len(), line))
    });
    lines.find(|(_, line)| line.starts_with(SERVER) || line.starts_with(TOOL)).map(|(at, _)| at)
}

fn tool(server: &str, name: &str, description: &str, parameters: &Value) -> Value {
    json!({"type": "function", "server": server, "function": {"name": name, "description": description, "parameters": parameters}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_row(row: Value) -> Result<Conversation, String> {
        let Value::Object(row) = row else { unreachable!("rows are objects") };
        read(row)
    }

    fn call(server: &str, tool: &str, arguments: &str) -> String {
        format!(
            "{CALL}\n<server_name>{server}</server_name>\n<tool_name>{tool}</tool_name>\n<arguments>\n{arguments}\n</arguments>\n{CALL_END}"
        )
    }

    const PROMPT: &str = "You have tools.\n\n## Server name: tool-search\n### Tool name: google_search\nDescription: finds\nthings\nInput JSON schema: {'type': 'object', 'properties': {'q': {'type': 'string', 'default': None}}, 'required': ['q']}\n\n### Tool name: scrape\nDescription: reads\nInput JSON schema: {\"type\": \"object\"}\n## Server name: other\n### Tool name: scrape\nDescription: reads too\nInput JSON schema: {}\n\n# General Objective\nBe careful.";

    #[test]
    fn text_calls_observations_and_their_order_are_kept() {
        let query = r#"{"q": "a </use_mcp_tool> b"}"#;
        let text = format!(
            "<think>\nhm\n</think>\n\nLet me look.\n\n{}\n{}",
            call("tool-search", "google_search", query),
            call("other", "scrape", "{}")
        );
        let conversation = read_row(json!({"messages": [
            {"role": "system", "content": PROMPT}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": text},
            {"role": "user", "content": "one <|im_end|>"}, {"role": "user", "content": ""},
            {"role": "assistant", "content": "So \\boxed{Ada}"}, {"role": "user", "content": "Thanks"}]}))
        .expect("a readable row");
        let [system, user, calling, one, two, last, thanks] = &conversation.messages[..] else { panic!("seven messages") };
        assert_eq!(system.content, "You have tools.\n\n# General Objective\nBe careful.");
        assert_eq!((calling.reasoning_content.as_deref(), calling.content.as_str()), (Some("hm"), "Let me look."));
        let names: Vec<&str> = calling.tool_calls.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["google_search", "other.scrape"]);
        assert_eq!(calling.tool_calls[0].arguments["q"], "a </use_mcp_tool> b");
        assert_eq!((one.role, one.content.as_str(), two.role), (Role::Tool, "one <|im_end|>", Role::Tool));
        assert_eq!((last.content.as_str(), thanks.role, user.content.as_str()), ("So \\boxed{Ada}", Role::User, "Who?"));
        let tools: Vec<(&str, &str)> = conversation
            .tools
            .iter()
            .map(|t| (t["function"]["name"].as_str().expect("a name"), t["server"].as_str().expect("a server")))
            .collect();
        assert_eq!(tools, [("google_search", "tool-search"), ("tool-search.scrape", "tool-search"), ("other.scrape", "other")]);
        assert_eq!(conversation.tools[0]["function"]["description"], "finds\nthings");
        assert_eq!(conversation.tools[0]["function"]["parameters"]["properties"]["q"]["default"], Value::Null);
    }

    #[test]
    fn what_can_t_be_read_is_refused() {
        let good = call("s", "t", "{}");
        for (content, why) in [
            (format!("{good} and on"), "text after the last tool call"),
            (call("s", "t", "{bad"), "no JSON"),
            (call("s", "t", "[1]"), "no object"),
            (good.replace("<tool_name>t</tool_name>", ""), "no <tool_name>"),
            (good.replace("</server_name>", ""), "<server_name> is never closed"),
            (good.replace(CALL_END, ""), "does not end with"),
            (format!("<think>{good}"), "inside the thinking"),
            (format!("<think>a {good} b</think>"), "inside the thinking"),
            ("<think>a".to_owned(), "never closed"),
            (call("s", "t", "{}}}"), "does not end with"),
            (call("s", "t\nu", "{}"), "<tool_name> is no name"),
            (call("s", " ", "{}"), "<tool_name> is empty"),
        ] {
            let got = read_row(json!({"messages": [{"role": "assistant", "content": content}]})).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
        for (prompt, why) in [
            (PROMPT.replace("{}", "{'a': object}"), "neither JSON nor a Python literal"),
            (PROMPT.replace("Input JSON schema: {\"type\": \"object\"}", ""), "tool scrape: no Input JSON schema:"),
            (PROMPT.replace("\n\n### Tool", "\nNote.\n### Tool"), "goes on after other text, at \"### Tool name: scrape\""),
        ] {
            let got = read_row(json!({"messages": [{"role": "system", "content": prompt}]})).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
        for role in ["user", "assistant"] {
            let got = read_row(json!({"messages": [{"role": role, "tool_calls": [{"function": {"name": "a"}}]}]}));
            assert!(got.expect_err(role).contains("the openai format"));
        }
    }

    #[test]
    fn a_tool_is_shared_only_between_servers_and_a_row_may_bring_its_own_list() {
        let twice = json!([{"role": "system", "content": PROMPT}, {"role": "system", "content": PROMPT}]);
        let names = |row: Value| -> Vec<String> {
            let tools = read_row(row).expect("a readable row").tools;
            tools.iter().map(|tool| tool["function"]["name"].as_str().expect("a name").to_owned()).collect()
        };
        assert_eq!(names(json!({"messages": twice}))[..2], ["google_search", "tool-search.scrape"]);
        assert_eq!(names(json!({"messages": [], "tools": [{"name": "own"}]})), ["own"]);
    }
}
