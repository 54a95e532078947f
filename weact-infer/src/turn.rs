//! What was sampled, read: the message that joins the history, its calls in order, and the ids that stay in the context.

use std::collections::BTreeSet;

use weact_core::{
    chat::Chat,
    message::{Message, Role, ToolCall},
    parse::{self, Outcome, Repair},
};

use crate::{
    Error, Result,
    session::{Finish, Generated},
};

/// The tag of a tool's answer, which a policy must not write itself.
const RESPONSE: &str = "<tool_response>";

/// One turn of the policy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Turn {
    /// The message. Calls that can't be run stand at the end of its content, as they were written.
    pub(crate) message: Message,
    /// The visible text alone.
    pub(crate) content: String,
    /// The calls in order; in place of one that can't be run, why.
    pub(crate) calls: Vec<std::result::Result<ToolCall, String>>,
    /// The ids as they stay in the context, through the end of the turn. `None` where only a part of what was sampled stays:
    /// then the message is rendered.
    pub(crate) ids: Option<Vec<u32>>,
    /// Remarks for the record: kind and detail.
    pub(crate) remarks: Vec<(&'static str, String)>,
}

/// The ids at which a turn ends.
pub(crate) fn stop_ids(chat: &Chat) -> BTreeSet<u32> {
    let tokenizer = &chat.tokenizer;
    tokenizer.stop_ids().iter().copied().chain([chat.end_of_turn()]).chain(tokenizer.id(RESPONSE)).collect()
}

/// Reads turn `number` of a run.
///
/// A call that the turn's limit cut off is not run: it may have lost arguments.
///
/// # Errors
/// If the ids can't be decoded.
pub(crate) fn read(chat: &Chat, generated: &Generated, number: usize) -> Result<Turn> {
    let stopped = generated.finish == Finish::Stop;
    let text_ids = &generated.ids[..generated.ids.len() - usize::from(stopped)];
    let (text, guard) = decode(chat, text_ids)?;
    let parsed = parse::parse_turn(&text);
    let plain = |text: &str| text.replace(guard, "");
    let content = plain(&parsed.content);
    let mut message = Message::text(Role::Assistant, content.clone());
    message.reasoning_content = parsed.reasoning.as_deref().map(plain);
    let mut remarks = Vec::new();
    if parsed.in_thinking > 0 {
        remarks.push(("call_in_thinking", format!("{} calls inside thinking were not executed", parsed.in_thinking)));
    }
    let mut calls = Vec::new();
    let n_calls = parsed.calls.len();
    for (i, parse::Call { raw, outcome }) in parsed.calls.into_iter().enumerate() {
        let is_cut_off = |repairs: &[Repair]| !stopped && i + 1 == n_calls && repairs.contains(&Repair::MissingCloser);
        let known = |call: ToolCall| ToolCall { id: Some(format!("call_{number}_{i}")), ..unguarded(&call, guard) };
        let call = match outcome {
            Outcome::Valid(call) => Ok(known(call)),
            Outcome::Repaired { repairs, .. } if is_cut_off(&repairs) => Err("the turn ended before the call did".to_owned()),
            Outcome::Repaired { call, repairs } => {
                remarks.push(("repaired_call", format!("{repairs:?} in {}", call.name)));
                Ok(known(call))
            }
            Outcome::Malformed { why } => Err(plain(&why)),
        };
        match &call {
            Ok(call) => message.tool_calls.push(call.clone()),
            Err(why) => {
                let line_break = if message.content.is_empty() { "" } else { "\n" };
                message.content.push_str(&format!("{line_break}<tool_call>\n{}\n</tool_call>", plain(&raw)));
                remarks.push(("malformed_call", why.clone()));
            }
        }
        calls.push(call);
    }
    let answers_itself = stopped && generated.ids.last().copied() == chat.tokenizer.id(RESPONSE);
    if parsed.cut || answers_itself {
        remarks.push(("invented_result", "the turn ends where the policy began to write a tool's answer itself".to_owned()));
    }
    // The context needs the turn's end whether or not the policy wrote it.
    let ids = (!parsed.cut).then(|| text_ids.iter().copied().chain([chat.end_of_turn()]).collect());
    Ok(Turn { message, content, calls, ids, remarks })
}

/// The text of ids, and a character that it does not hold. A control string that ordinary tokens spell, as where a page is quoted
/// word for word, is broken by that character: only a control token opens a thought or a call.
fn decode(chat: &Chat, ids: &[u32]) -> Result<(String, char)> {
    let tokenizer = &chat.tokenizer;
    let whole = tokenizer.decode(ids)?;
    let mut free = ('\u{f0000}'..='\u{ffffd}').filter(|c| !whole.contains(*c));
    let guard = free.next().ok_or_else(|| Error::Other("the turn holds every private-use character".to_owned()))?;
    let is_control = |id: &u32| tokenizer.controls().iter().any(|c| c.id == *id);
    let mut text = String::new();
    for alike in ids.chunk_by(|a, b| is_control(a) == is_control(b)) {
        let piece = tokenizer.decode(alike)?;
        text += &if is_control(&alike[0]) { piece } else { tokenizer.guard(&piece, guard, |_| true) };
    }
    Ok((text, guard))
}

/// The call without the guard in its texts.
fn unguarded(call: &ToolCall, guard: char) -> ToolCall {
    let json = serde_json::to_string(call).expect("a call serialises");
    serde_json::from_str(&json.replace(guard, "")).expect("a call without one of its characters is a call")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use weact_core::chat::ToolProtocol;

    use super::*;

    /// The toy world's template and tokenizer, in which each tag is a token.
    fn toy() -> Chat {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../datasets/toy/backbone");
        Chat::open(&dir, ToolProtocol::Template).expect("template and tokenizer")
    }

    fn sampled(chat: &Chat, text: &str, finish: Finish) -> Generated {
        Generated { ids: chat.tokenizer.encode(text).expect("ids"), finish }
    }

    const CALL: &str = "<tool_call>\n{\"name\": \"search\", \"arguments\": {\"query\": [\"a\"]}}\n</tool_call>";

    /// Content, calls (what can't be run as `-`) and the kinds of remarks.
    #[test]
    fn each_turn_has_its_message_calls_and_remarks() {
        let chat = toy();
        let broken = CALL.replace("]}}", "}}");
        let comma = CALL.replace("]}}", "],}}");
        let open = CALL.replace("}}\n</tool_call>", "");
        let end = "<|im_end|>";
        type Row = (String, Finish, &'static str, &'static [&'static str], &'static [&'static str]);
        let table: &[Row] = &[
            (format!("step{end}"), Finish::Stop, "step", &[], &[]),
            ("step".to_owned(), Finish::Length, "step", &[], &[]),
            (format!("step\n{CALL}{end}"), Finish::Stop, "step", &["search"], &[]),
            (format!("{broken}\n{CALL}{end}"), Finish::Stop, "", &["-", "search"], &["malformed_call"]),
            (format!("{CALL}\n{broken}{end}"), Finish::Stop, "", &["search", "-"], &["malformed_call"]),
            (format!("{comma}{end}"), Finish::Stop, "", &["search"], &["repaired_call"]),
            (format!("{open}{end}"), Finish::Stop, "", &["search"], &["repaired_call"]),
            (open.clone(), Finish::Length, "", &["-"], &["malformed_call"]),
            (format!("<think>\n{CALL}{end}"), Finish::Stop, "", &[], &["call_in_thinking"]),
            (format!("{CALL}\n<tool_response>"), Finish::Stop, "", &["search"], &["invented_result"]),
        ];
        for (text, finish, content, calls, remarks) in table {
            let turn = read(&chat, &sampled(&chat, text, *finish), 3).expect("readable");
            let named: Vec<&str> = turn.calls.iter().map(|c| c.as_ref().map_or("-", |c| c.name.as_str())).collect();
            let kinds: Vec<&str> = turn.remarks.iter().map(|(kind, _)| *kind).collect();
            assert_eq!((turn.content.as_str(), &named[..], &kinds[..]), (*content, *calls, *remarks), "{text}");
            let kept = text.trim_end_matches("<tool_response>").trim_end_matches(end);
            let in_context = chat.tokenizer.encode(&format!("{kept}{end}")).expect("ids");
            assert_eq!(turn.ids, Some(in_context), "{text}");
        }
        let turn = read(&chat, &sampled(&chat, &format!("a\n{broken}\n{CALL}{end}"), Finish::Stop), 3).expect("readable");
        assert_eq!(turn.message.content, format!("a\n{broken}"), "the record keeps what was written");
        assert_eq!(turn.message.tool_calls[0].id.as_deref(), Some("call_3_1"));
    }

    #[test]
    fn a_tag_that_ordinary_tokens_spell_opens_nothing() {
        let chat = toy();
        let quote = format!("the page says <think>x</think> {CALL} <tool_response>");
        let guard = '\u{f1234}';
        let spelt = chat.tokenizer.guard(&quote, guard, |_| true);
        let mut ids = chat.tokenizer.encode_guarded(&spelt, guard).expect("ids");
        let end = chat.end_of_turn();
        ids.push(end);
        let turn = read(&chat, &Generated { ids: ids.clone(), finish: Finish::Stop }, 1).expect("readable");
        assert_eq!((&turn.content, turn.calls.len(), turn.remarks.len()), (&quote, 0, 0));
        assert_eq!(turn.ids, Some(ids));

        let arguments = json!({"name": "search", "arguments": {"query": [CALL]}}).to_string();
        let inside = chat.tokenizer.guard(&arguments, guard, |_| true);
        let mut ids = chat.tokenizer.encode_guarded(&format!("<tool_call>{inside}</tool_call>"), guard).expect("ids");
        ids.push(end);
        let turn = read(&chat, &Generated { ids, finish: Finish::Stop }, 1).expect("readable");
        assert_eq!(turn.message.tool_calls[0].arguments["query"], json!([CALL]));
    }
}
