//! The protocol in a labelled conversation: the load and offload exchanges around every span (§2.2, App. A.1).

use serde_json::Value;
use weact_core::{
    control,
    message::{Message, Role},
    stage::{self, Stage},
    trajectory::{Exit, Span, Trajectory},
};

use crate::{Error, Result};

/// Inserts `load_lora` and its activation text before every span, and `offload_lora` and its result at the end of it.
///
/// The offload call joins the span's last message if that is an assistant message without calls, else it is a message of its
/// own. Spans then begin after the activation text, end after the offload's result, and have [`Exit::Call`]. The control
/// tools' schemas, over all of `stages` in their order, come first in `tools`.
///
/// # Errors
/// If the conversation is woven already, a span has no stage or ends in a call without result, or `tools` has a control tool
/// with another schema. The message names the trajectory.
pub fn weave(trajectory: Trajectory, stages: &[Stage]) -> Result<Trajectory> {
    let wrong = |why: String| Error::Other(format!("trajectory {}: {why}", trajectory.id));
    let messages = trajectory.messages();
    if let Some(at) = messages.iter().position(|m| m.tool_calls.iter().any(|call| control::is_control(&call.name))) {
        return Err(wrong(format!("message {at} calls a control tool: it is woven already")));
    }
    let mut woven = Vec::new();
    let mut spans = Vec::new();
    let mut next = 0;
    for span in trajectory.spans() {
        let Span { capability, start, end, .. } = span;
        let stage = stages.iter().find(|stage| stage.alias == *capability);
        let stage = stage.ok_or_else(|| wrong(format!("span {capability} {start}..{end} has no stage text")))?;
        woven.extend_from_slice(&messages[next..*start]);
        let load = control::load_call(capability);
        woven.extend([Message::calling("", vec![load.clone()]), Message::tool_result(&load, &stage.activation)]);
        let woven_start = woven.len();
        woven.extend_from_slice(&messages[*start..*end]);
        let offload = control::offload_call(capability);
        match woven.last_mut() {
            Some(last) if last.role == Role::Assistant && last.tool_calls.is_empty() => last.tool_calls.push(offload.clone()),
            Some(last) if last.role == Role::Assistant => {
                return Err(wrong(format!("span {capability} {start}..{end} ends in a call without result")));
            }
            _ => woven.push(Message::calling("", vec![offload.clone()])),
        }
        woven.push(Message::tool_result(&offload, stage::released(capability)));
        spans.push(Span { capability: capability.clone(), start: woven_start, end: woven.len(), exit: Exit::Call });
        next = *end;
    }
    woven.extend_from_slice(&messages[next..]);
    let tools = with_control_tools(&trajectory.tools, stages).map_err(wrong)?;
    let mut woven = Trajectory::new(trajectory.id, tools, woven, spans)?;
    woven.question = trajectory.question;
    woven.answer = trajectory.answer;
    Ok(woven)
}

fn with_control_tools(tools: &[Value], stages: &[Stage]) -> std::result::Result<Vec<Value>, String> {
    let adapters: Vec<_> = stages.iter().map(|stage| (stage.alias.clone(), stage.description.clone())).collect();
    let control_tools = control::tool_schemas(&adapters);
    let is_control = |tool: &Value| tool["function"]["name"].as_str().is_some_and(control::is_control);
    if let Some(other) = tools.iter().find(|tool| is_control(tool) && !control_tools.contains(tool)) {
        return Err(format!("its tools have another schema of {}", other["function"]["name"]));
    }
    let external = tools.iter().filter(|tool| !is_control(tool)).cloned();
    Ok(control_tools.into_iter().chain(external).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::{Map, json};
    use weact_core::{Capability, message::ToolCall};

    use super::*;
    use crate::data::{Format, Rules, import, label};

    fn stages() -> Vec<Stage> {
        ["plan", "search", "write"].map(|name| Stage::builtin(&Capability::new(name).expect("a legal name"))).into()
    }

    fn trajectory(messages: Vec<Message>, spans: Vec<Span>) -> Trajectory {
        let search = json!({"type": "function", "function": {"name": "search"}});
        Trajectory::new("x".to_owned(), vec![search], messages, spans).expect("fitting spans")
    }

    fn labelled(messages: Vec<Message>) -> Trajectory {
        label(trajectory(messages, Vec::new()), &Rules::default()).expect("stages")
    }

    fn search_turn(text: &str, query: &str) -> [Message; 2] {
        let call = ToolCall::new("search", Map::from_iter([("query".to_owned(), json!(query))]));
        [Message::calling(text, vec![call.clone()]), Message::tool_result(&call, format!("about {query}"))]
    }

    /// The sample of App. A.1, message by message: 8 messages of prefix, of which 3 tool results, and 12 of the search span.
    #[test]
    fn twelve_messages_weave_to_the_twenty_of_appendix_a1() {
        let mut messages = vec![Message::text(Role::System, "be brief"), Message::text(Role::User, "who?")];
        messages.extend(search_turn("the plan", "q1"));
        messages.extend(["q2", "q3", "q4", "q5"].iter().flat_map(|query| search_turn("", query)));
        assert_eq!(messages.len(), 12);
        let woven = weave(labelled(messages.clone()), &stages()).expect("a labelled conversation");

        let spans: Vec<_> = woven.spans().iter().map(|s| (s.capability.as_str(), s.start, s.end, s.exit)).collect();
        assert_eq!(spans, [("plan", 4, 6, Exit::Call), ("search", 8, 20, Exit::Call)]);
        let [plan, search, _] = &stages()[..] else { unreachable!("three stages") };
        let exchange = |text: &str, call: ToolCall, result: String| {
            [Message::calling(text, vec![call.clone()]), Message::tool_result(&call, result)]
        };
        let mut expected = messages[..2].to_vec();
        expected.extend(exchange("", control::load_call(&plan.alias), plan.activation.clone()));
        expected.extend(exchange("the plan", control::offload_call(&plan.alias), stage::released(&plan.alias)));
        expected.extend(exchange("", control::load_call(&search.alias), search.activation.clone()));
        expected.extend(search_turn("", "q1"));
        expected.extend_from_slice(&messages[4..]);
        expected.extend(exchange("", control::offload_call(&search.alias), stage::released(&search.alias)));
        assert_eq!(woven.messages(), expected);
        assert_eq!(expected.len(), 20);
        assert_eq!(expected[..8].iter().filter(|m| m.role == Role::Tool).count(), 3);
    }

    #[test]
    fn the_schemas_list_the_whole_library_once_and_first() {
        let names = |t: &Trajectory| t.tools.iter().map(|tool| tool["function"]["name"].clone()).collect::<Vec<_>>();
        let answer = labelled(vec![Message::text(Role::User, "who?"), Message::text(Role::Assistant, "she")]);
        let woven = weave(answer.clone(), &stages()).expect("a labelled conversation");
        assert_eq!(names(&woven), ["load_lora", "offload_lora", "search"]);
        assert_eq!(woven.tools[0]["function"]["parameters"]["properties"]["adapter"]["enum"], json!(["plan", "search", "write"]));
        let mut listed = answer;
        listed.tools.clone_from(&woven.tools);
        assert_eq!(weave(listed, &stages()).expect("schemas, but no calls"), woven);
    }

    #[test]
    fn what_can_not_be_woven_is_refused() {
        let answer = labelled(vec![Message::text(Role::User, "who?"), Message::text(Role::Assistant, "she")]);
        let woven = weave(answer.clone(), &stages()).expect("a labelled conversation");
        let mut other_tools = answer.clone();
        other_tools.tools = control::tool_schemas(&[]);
        let [call, _] = search_turn("", "q");
        let span = Span { capability: stages()[1].alias.clone(), start: 0, end: 1, exit: Exit::None };
        let unanswered = trajectory(vec![call], vec![span]);
        for (trajectory, stages, why) in [
            (woven, stages(), "trajectory x: message 1 calls a control tool"),
            (answer, stages()[..2].to_vec(), "trajectory x: span write 1..2 has no stage text"),
            (other_tools, stages(), "another schema of \"load_lora\""),
            (unanswered, stages(), "ends in a call without result"),
        ] {
            let got = weave(trajectory, &stages).expect_err(why).to_string();
            assert!(got.contains(why), "{got}");
        }
    }

    /// Assistant text, external calls and everything others said, in order.
    fn substance(messages: &[Message]) -> (String, Vec<ToolCall>, Vec<Message>) {
        let mut text = String::new();
        let mut calls = Vec::new();
        let mut others = Vec::new();
        let mut control_results = 0;
        for message in messages {
            match message.role {
                Role::Assistant => {
                    text += &format!("{}{}", message.reasoning_content.as_deref().unwrap_or_default(), message.content);
                    calls.extend(message.tool_calls.iter().filter(|call| !control::is_control(&call.name)).cloned());
                    control_results += message.tool_calls.iter().filter(|call| control::is_control(&call.name)).count();
                }
                Role::Tool if control_results > 0 => control_results -= 1,
                Role::Tool | Role::User | Role::System => others.push(message.clone()),
            }
        }
        (text, calls, others)
    }

    /// What holds for every conversation that finds a stage.
    fn check(raw: Trajectory) {
        let before = substance(raw.messages());
        let Ok(labelled) = label(raw, &Rules::default()) else { return };
        let woven = weave(labelled, &stages()).expect("a labelled conversation");
        assert_eq!(substance(woven.messages()), before);
        for (at, message) in woven.messages().iter().enumerate() {
            if message.tool_calls.iter().any(|call| call.name == "search") {
                let span = woven.spans().iter().find(|span| (span.start..span.end).contains(&at));
                assert_eq!(span.map(|span| span.capability.as_str()), Some("search"), "message {at}");
            }
        }
    }

    fn turn() -> impl Strategy<Value = Vec<Message>> {
        let text = || prop::sample::select(vec!["", " ", "a", "é\n"]);
        let reasoning = prop::option::of(text());
        let tools = prop::collection::vec(prop::sample::select(vec!["search", "python"]), 0..3);
        let assistant = (reasoning, text(), tools).prop_map(|(reasoning, content, tools)| {
            let calls: Vec<_> = tools.into_iter().map(|tool| ToolCall::new(tool, Map::new())).collect();
            let results: Vec<_> = calls.iter().map(|call| Message::tool_result(call, "r")).collect();
            let message = Message { reasoning_content: reasoning.map(str::to_owned), ..Message::calling(content, calls) };
            [vec![message], results].concat()
        });
        prop_oneof![4 => assistant, 1 => Just(vec![Message::text(Role::User, "u")])]
    }

    proptest! {
        #[test]
        fn label_and_weave_lose_no_text_and_no_call(turns in prop::collection::vec(turn(), 0..8)) {
            check(trajectory(turns.concat(), Vec::new()));
        }
    }

    #[test]
    fn real_webdancer_rows_pass_whole() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/data/testdata/webdancer.jsonl");
        let imported = import(&path, Format::Hermes).expect("a readable file");
        assert_eq!((imported.trajectories.len(), imported.dropped.len()), (2, 0));
        for (raw, expected) in imported.trajectories.into_iter().zip(["plan search write", "plan search write"]) {
            check(raw.clone());
            let woven = weave(label(raw, &Rules::default()).expect("stages"), &stages()).expect("a labelled conversation");
            let spans: Vec<&str> = woven.spans().iter().map(|span| span.capability.as_str()).collect();
            assert_eq!(spans.join(" "), expected);
            assert_eq!(woven.spans()[2].end, woven.messages().len());
        }
    }
}
