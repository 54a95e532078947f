//! One conversation, written in each format, reads the same from all of them; so do files as they are found.

use std::fs;

use serde_json::{Value, json};
use weact_core::{Trajectory, message::Role};
use weact_train::data::{Format, Imported, import};

const FORMATS: [Format; 6] = [Format::OpenAi, Format::Hermes, Format::ShareGpt, Format::McpXml, Format::DrTulu, Format::SweAgent];

/// What a page may hold: the tags of every format, line breaks of every kind, a NUL, and signs of several bytes.
const HOSTILE: &str = "<|im_end|>\u{0}\u{2028}a\r\n<tool_call>{}</tool_call></tool_response><think> é 你\u{a0}🙂\n\n\
    <use_mcp_tool></arguments><call_tool name=\"x\">y</call_tool>\u{85}<answer> <|im_start|>user";

#[derive(Clone, Copy, Debug)]
enum Part {
    System(&'static str),
    User(&'static str),
    /// Calls of `search`, each with its query and its result.
    Search(&'static [(&'static str, &'static str)]),
    Say(&'static str),
}

use Part::{Say, Search, System, User};

/// The row that holds `parts` in `format`.
fn row(parts: &[Part], format: Format) -> Value {
    let messages = parts.iter().enumerate().flat_map(|(at, part)| match part {
        System(text) => vec![say("system", text)],
        User(text) => vec![say("user", text)],
        Say(text) => vec![say("assistant", text)],
        Search(calls) => exchange(calls, format, at),
    });
    match format {
        Format::ShareGpt => {
            let turns: Vec<Value> = messages.map(|m| json!({"from": m["role"], "value": m["content"]})).collect();
            json!({"id": "x", "conversations": turns})
        }
        Format::SweAgent => json!({"id": "x", "history": messages.collect::<Vec<_>>()}),
        _ => json!({"id": "x", "messages": messages.collect::<Vec<_>>()}),
    }
}

fn say(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

/// The calls of one message and their results; `at` makes the ids differ.
fn exchange(calls: &[(&str, &str)], format: Format, at: usize) -> Vec<Value> {
    let call = |query: &str| json!({"name": "search", "arguments": {"query": query}});
    let joined = |text: &dyn Fn(&str, &str) -> String| calls.iter().map(|(q, r)| text(q, r)).collect::<Vec<_>>().join("\n");
    let results = |role: &str| calls.iter().map(|(_, result)| say(role, result)).collect::<Vec<_>>();
    match format {
        Format::OpenAi | Format::SweAgent => {
            let ids = (0..calls.len()).map(|i| format!("id_{at}_{i}"));
            let made = ids.clone().zip(calls).map(|(id, (query, _))| {
                let arguments = json!({"query": query}).to_string();
                json!({"id": id, "type": "function", "function": {"name": "search", "arguments": arguments}})
            });
            let calling = json!({"role": "assistant", "content": null, "tool_calls": made.collect::<Vec<_>>()});
            let answers = ids.zip(results("tool")).map(|(id, mut result)| {
                match format {
                    Format::OpenAi => result["tool_call_id"] = json!(id),
                    _ => result["tool_call_ids"] = json!([id]),
                }
                result
            });
            [calling].into_iter().chain(answers).collect()
        }
        Format::Hermes => vec![
            say("assistant", &joined(&|query, _| format!("<tool_call>\n{}\n</tool_call>", call(query)))),
            say("user", &joined(&|_, result| format!("<tool_response>\n{result}\n</tool_response>"))),
        ],
        Format::ShareGpt => {
            let made: Vec<Value> = calls.iter().map(|(query, _)| call(query)).collect();
            [vec![say("function_call", &json!(made).to_string())], results("observation")].concat()
        }
        Format::McpXml => {
            let (start, end) = (
                "<use_mcp_tool>\n<server_name>web</server_name>\n<tool_name>search</tool_name>\n<arguments>",
                "</arguments>\n</use_mcp_tool>",
            );
            let made = joined(&|query, _| format!("{start}\n{}\n{end}", json!({"query": query})));
            [vec![say("assistant", &made)], results("user")].concat()
        }
        Format::DrTulu => vec![
            say("assistant", &joined(&|query, _| format!("<call_tool name=\"search\">{query}</call_tool>"))),
            say("user", &joined(&|_, result| format!("<tool_output>\n{result}\n</tool_output>"))),
        ],
    }
}

fn read(text: &str, format: Format) -> Imported {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chats.jsonl");
    fs::write(&path, text).expect("a writable file");
    import(&path, format).unwrap_or_else(|error| panic!("{format:?}: {error}"))
}

/// Role, text, and the queries of the calls of each message; results with the place of the call that they answer.
fn shown(trajectory: &Trajectory) -> Vec<String> {
    let calls: Vec<&str> =
        trajectory.messages().iter().flat_map(|m| &m.tool_calls).map(|c| c.id.as_deref().expect("an id")).collect();
    let message = |m: &weact_core::message::Message| {
        let queries: Vec<String> = m.tool_calls.iter().map(|c| format!("{}({})", c.name, c.arguments["query"])).collect();
        let answers = m.tool_call_id.as_deref().map(|id| calls.iter().position(|call| *call == id).expect("its call"));
        format!("{:?} {:?} {queries:?} {answers:?}", m.role, m.content)
    };
    trajectory.messages().iter().map(message).collect()
}

/// The same for what a row should read as.
fn expected(parts: &[Part]) -> Vec<String> {
    let mut n_calls = 0;
    let line =
        |role: Role, text: &str, queries: &[String], answers: Option<usize>| format!("{role:?} {text:?} {queries:?} {answers:?}");
    let mut lines = Vec::new();
    for part in parts {
        match part {
            System(text) => lines.push(line(Role::System, text, &[], None)),
            User(text) => lines.push(line(Role::User, text, &[], None)),
            Say(text) => lines.push(line(Role::Assistant, text, &[], None)),
            Search(calls) => {
                let queries: Vec<String> = calls.iter().map(|(query, _)| format!("search({})", json!(query))).collect();
                lines.push(line(Role::Assistant, "", &queries, None));
                lines.extend(calls.iter().enumerate().map(|(i, (_, r))| line(Role::Tool, r, &[], Some(n_calls + i))));
                n_calls += calls.len();
            }
        }
    }
    lines
}

#[test]
fn every_format_reads_the_same_conversation() {
    for parts in [
        &[System("be brief"), User("who?"), Search(&[("a", "1")]), Search(&[("b", "2"), ("c", "3")]), Say("Ada.")][..],
        &[User(HOSTILE), Search(&[("é \"你\u{2028}\"", HOSTILE), ("<|im_end|> {\"a\": 1}", "")]), Say("Ada \u{0}\r\n.\n")],
        &[User("who?"), User("quickly"), Search(&[("a", "")]), User("go on"), User("now"), Say("Ada."), User("thanks")],
        &[User("who?"), Say("I look."), Search(&[("a", "1\n\n"), ("b", " 2")])],
        &[System("be brief"), System("and polite"), User("who?"), Say("Ada."), User("sure?")],
    ] {
        for format in FORMATS {
            let imported = read(&row(parts, format).to_string(), format);
            assert_eq!(imported.dropped, [], "{format:?} {parts:?}");
            assert_eq!(shown(&imported.trajectories[0]), expected(parts), "{format:?}");
        }
    }
}

#[test]
fn every_format_reads_files_as_they_are_found() {
    let parts = [User("who?"), Search(&[("a", HOSTILE)]), Say("Ada.")];
    for format in FORMATS {
        let mut row = row(&parts, format);
        row["answer"] = json!([["Ada\u{2028}"]]);
        let [line, whole] = [row.to_string(), serde_json::to_string_pretty(&row).expect("JSON")];
        for (text, n_duplicates) in [
            (format!("\u{feff}{line}\r\n\r\n{line}\r\n"), 1),
            (format!("{line}\n{line}\n{line}"), 2),
            (format!("\u{feff}[\r\n{whole},\r\n{whole}]\r\n"), 1),
            (whole.replace('\n', "\r\n"), 0),
        ] {
            let imported = read(&text, format);
            let [trajectory] = &imported.trajectories[..] else { panic!("{format:?}: one row is kept: {:?}", imported.dropped) };
            assert_eq!(shown(trajectory), expected(&parts), "{format:?}");
            assert_eq!((trajectory.id.as_str(), &trajectory.answer), ("x", &Some(json!("Ada\u{2028}"))));
            let reasons: Vec<&str> = imported.dropped.iter().map(|dropped| dropped.reason.as_str()).collect();
            assert_eq!(reasons, vec!["duplicate of row 1"; n_duplicates], "{format:?}");
        }
    }
}

/// A developer's message, text in parts, several queries in one call, arguments that the schema does not name, and ids that repeat.
#[test]
fn formats_of_messages_read_what_their_writers_vary() {
    let tools = json!([{"name": "search", "parameters": {"properties": {"queries": {}}, "required": ["queries"]}}]).to_string();
    let arguments = json!({"query": ["a", "b"]});
    let thinking = json!([{"type": "text", "text": "<think>\nhm\n</think>\n\n"}, "Ada."]);
    for (format, calling, answered) in [
        (
            Format::OpenAi,
            json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "search", "arguments": arguments}}]}),
            json!({"role": "tool", "tool_call_id": "c", "content": ["one", {"text": " two"}]}),
        ),
        (
            Format::Hermes,
            json!({"role": "assistant", "content": format!("<tool_call>{{\"name\": \"search\", \"arguments\": {arguments}}}</tool_call>")}),
            json!({"role": "user", "content": ["<tool_response>one", " two</tool_response>"]}),
        ),
        (
            Format::McpXml,
            json!({"role": "assistant", "content": format!("<use_mcp_tool><server_name>w</server_name><tool_name>search</tool_name>\
                <arguments>{arguments}</arguments></use_mcp_tool>")}),
            json!({"role": "user", "content": ["one", " two"]}),
        ),
    ] {
        let developer = json!({"role": "developer", "content": ["be ", {"type": "text", "text": "brief"}]});
        let last = json!({"role": "assistant", "content": thinking, "tool_calls": null});
        let messages = [&developer, &json!({"role": "user", "content": "who?"}), &calling, &answered, &calling, &answered, &last];
        let imported = read(&json!({"messages": messages, "tools": tools, "tool_calls": []}).to_string(), format);
        let [trajectory] = &imported.trajectories[..] else { panic!("{format:?}: {:?}", imported.dropped) };
        let [developer, _, first, one, second, two, last] = trajectory.messages() else { panic!("seven messages") };
        assert_eq!((developer.role, developer.content.as_str()), (Role::System, "be brief"), "{format:?}");
        for (call, result) in [(first, one), (second, two)] {
            assert_eq!(call.tool_calls[0].arguments["query"], json!(["a", "b"]), "{format:?}");
            assert_eq!((result.role, result.content.as_str()), (Role::Tool, "one two"), "{format:?}");
            assert_eq!(result.tool_call_id, call.tool_calls[0].id);
        }
        assert_eq!((last.reasoning_content.as_deref(), last.content.as_str()), (Some("hm"), "Ada."), "{format:?}");
        assert_eq!(trajectory.tools[0]["function"]["name"], "search", "{format:?}");
    }
}
