//! Labels by a language model: whole turns, as the paper's exploratory annotation had them (App. A.2). The model is a closure, so that
//! nothing here knows a network.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::Value;
use sha2::{Digest, Sha256};
use weact_core::{
    Capability, control,
    io::tensors::hex,
    message::{Message, Role},
    trajectory::{Exit, Span, Trajectory},
};

use super::Rules;

/// What a labeller is told, up to the conversation.
const INSTRUCTIONS: &str =
    "You label the assistant messages of an agent's conversation by the capability that wrote them. Label whole messages:\n";
/// What it is told after it.
const REPLY: &str = "Reply with one JSON object and nothing else: {\"labels\": {\"<number>\": \"<label>\", ...}}, with the number of \
    every assistant message exactly once.";
/// The label of a message that belongs to no capability.
const NONE: &str = "none";
/// The longest part of a message that is shown, in characters.
const SHOWN_CHARS: usize = 1500;
/// How often a reply that can't be read is asked for.
const TRIES: usize = 2;

/// The labels and what they mean: those of `rules`.
fn definitions(rules: &Rules) -> [(&Capability, &'static str); 3] {
    [
        (&rules.plan, "decides what to do, before evidence is gathered"),
        (&rules.search, "gathers or checks evidence with tools, and comments on what they returned"),
        (&rules.write, "writes the final answer or report from the evidence"),
    ]
}

/// The prompt for one trajectory.
pub fn prompt(trajectory: &Trajectory, rules: &Rules) -> String {
    let mut text = INSTRUCTIONS.to_owned();
    for (label, meaning) in definitions(rules) {
        let _infallible = writeln!(text, "- {label}: {meaning}");
    }
    let _infallible = writeln!(text, "- {NONE}: none of these\n\nThe conversation:");
    for (i, message) in trajectory.messages().iter().enumerate() {
        let role = match message.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let calls: Vec<String> =
            message.tool_calls.iter().map(|c| format!("{}({})", c.name, Value::Object(c.arguments.clone()))).collect();
        let thought = message.reasoning_content.as_deref().unwrap_or_default();
        let _infallible = writeln!(
            text,
            "[{i}] {role}: {} {} {}",
            shortened(thought),
            shortened(&message.content),
            shortened(&calls.join(" "))
        );
    }
    text + "\n" + REPLY
}

/// SHA-256 of the prompt without its conversation: it tells one labelling policy from another.
pub fn policy_digest(rules: &Rules) -> String {
    let mut text = INSTRUCTIONS.to_owned();
    for (label, meaning) in definitions(rules) {
        text += &format!("{label}: {meaning}\n");
    }
    hex(&Sha256::digest(text + REPLY))
}

/// Puts the spans on `trajectory` that the model behind `complete` says. A trajectory that has spans keeps them.
///
/// # Errors
/// The reason to drop the trajectory: no reply, or, twice, one that labels a message twice, not at all, with an unknown label, or is no JSON; or no message is
/// labelled, or it has control calls but no spans.
pub fn annotate(
    trajectory: Trajectory,
    rules: &Rules,
    complete: &mut dyn FnMut(&str) -> Result<String, String>,
) -> Result<Trajectory, String> {
    if !trajectory.spans().is_empty() {
        return Ok(trajectory);
    }
    if trajectory.messages().iter().flat_map(|m| &m.tool_calls).any(|call| control::is_control(&call.name)) {
        return Err("it has control calls but no spans".to_owned());
    }
    let prompt = prompt(&trajectory, rules);
    let mut why = String::new();
    for _ in 0..TRIES {
        match read(&complete(&prompt)?, trajectory.messages(), rules) {
            Ok(labels) => return with_spans(trajectory, &labels),
            Err(error) => why = error,
        }
    }
    Err(format!("the annotator's reply can't be used, {TRIES} times: {why}"))
}

/// The label of each assistant message.
fn read(reply: &str, messages: &[Message], rules: &Rules) -> Result<BTreeMap<usize, Option<Capability>>, String> {
    let start = reply.find('{').ok_or("it holds no JSON object")?;
    let value = serde_json::Deserializer::from_str(&reply[start..]).into_iter::<Value>().next();
    let value = value.and_then(Result::ok).ok_or("its JSON can't be read")?;
    let labels = value["labels"].as_object().ok_or("no object labels")?;
    let mut read = BTreeMap::new();
    for (number, label) in labels {
        let i: usize = number.trim().parse().map_err(|_| format!("{number:?} is no message's number"))?;
        if messages.get(i).is_none_or(|message| message.role != Role::Assistant) {
            return Err(format!("message {i} is none of the assistant's"));
        }
        let label = label.as_str().ok_or_else(|| format!("message {i} has no label that is text"))?;
        let known = definitions(rules).into_iter().map(|(capability, _)| capability).find(|c| c.as_str() == label);
        if known.is_none() && label != NONE {
            return Err(format!("message {i} has the unknown label {label:?}"));
        }
        if read.insert(i, known.cloned()).is_some() {
            return Err(format!("message {i} is labelled twice"));
        }
    }
    let missing = (0..messages.len()).find(|i| messages[*i].role == Role::Assistant && !read.contains_key(i));
    missing.map_or(Ok(read), |i| Err(format!("message {i} has no label")))
}

/// A span for each run of assistant messages with one label and the results between and after them.
fn with_spans(trajectory: Trajectory, labels: &BTreeMap<usize, Option<Capability>>) -> Result<Trajectory, String> {
    let messages = trajectory.messages();
    let mut spans: Vec<Span> = Vec::new();
    for (i, message) in messages.iter().enumerate() {
        match (message.role, labels.get(&i)) {
            (Role::Assistant, Some(Some(label))) => {
                match spans.last_mut().filter(|span| span.end == i && span.capability == *label) {
                    Some(span) => span.end = i + 1,
                    None => spans.push(Span { capability: label.clone(), start: i, end: i + 1, exit: Exit::None }),
                }
            }
            (Role::Tool, _) => {
                if let Some(span) = spans.last_mut().filter(|span| span.end == i) {
                    span.end = i + 1;
                }
            }
            _ => {}
        }
    }
    if spans.is_empty() {
        return Err("the annotator gave no message a label".to_owned());
    }
    let (id, tools) = (trajectory.id.clone(), trajectory.tools.clone());
    let mut labelled = Trajectory::new(id, tools, messages.to_vec(), spans).map_err(|e| e.to_string())?;
    labelled.question = trajectory.question;
    labelled.answer = trajectory.answer;
    Ok(labelled)
}

fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;
    use weact_core::message::ToolCall;

    use super::*;

    fn trajectory() -> Trajectory {
        let search = || {
            let call = ToolCall::new("search", Map::new());
            let result = Message::tool_result(&call, "found".to_owned());
            [Message::calling("", vec![call]), result]
        };
        let mut messages = vec![Message::text(Role::User, "Who?"), Message::text(Role::Assistant, "First I search.")];
        messages.extend(search());
        messages.extend(search());
        messages.push(Message::text(Role::User, "Go on."));
        messages.push(Message::text(Role::Assistant, "Ada."));
        Trajectory::new("t".to_owned(), Vec::new(), messages, Vec::new()).expect("a trajectory")
    }

    fn label(replies: &[&str]) -> Result<Trajectory, String> {
        let mut replies = replies.iter();
        annotate(trajectory(), &Rules::default(), &mut |prompt| {
            assert!(prompt.contains("[1] assistant:") && prompt.contains("- search:"));
            replies.next().map(|reply| (*reply).to_owned()).ok_or_else(|| "the model is away".to_owned())
        })
    }

    const GOOD: &str = r#"Sure: {"labels": {"1": "plan", "2": "search", "4": "search", "7": "write"}} Done."#;

    #[test]
    fn labels_become_contiguous_spans_with_their_results() {
        let labelled = label(&[GOOD]).expect("labels");
        let spans: Vec<(&str, usize, usize)> = labelled.spans().iter().map(|s| (s.capability.as_str(), s.start, s.end)).collect();
        assert_eq!(spans, [("plan", 1, 2), ("search", 2, 6), ("write", 7, 8)]);
        let gap = GOOD.replace("\"4\": \"search\"", "\"4\": \"none\"");
        assert_eq!(label(&["no", &gap]).expect("the second try").spans()[1].end, 4);
        assert_eq!(policy_digest(&Rules::default()).len(), 64);
    }

    #[test]
    fn a_reply_that_can_t_be_used_is_named() {
        for (reply, why) in [
            ("plan, search, write", "no JSON object"),
            ("{\"labels\": {\"1\": \"plan\"", "can't be read"),
            ("{\"label\": {}}", "no object labels"),
            (r#"{"labels": {"1": "plan", "2": "search", "4": "search"}}"#, "message 7 has no label"),
            (
                r#"{"labels": {"1": "plan", "2": "search", "3": "search", "4": "search", "7": "write"}}"#,
                "message 3 is none of the assistant's",
            ),
            (r#"{"labels": {"1": "plans", "2": "search", "4": "search", "7": "write"}}"#, "unknown label \"plans\""),
            (r#"{"labels": {"1": 4, "2": "search", "4": "search", "7": "write"}}"#, "no label that is text"),
            (r#"{"labels": {"1": "plan", " 1": "plan", "2": "search", "4": "search", "7": "write"}}"#, "labelled twice"),
            (r#"{"labels": {"99999999999999999999": "plan"}}"#, "is no message's number"),
            (r#"{"labels": {"1": "none", "2": "none", "4": "none", "7": "none"}}"#, "gave no message a label"),
        ] {
            let got = label(&[reply, reply]).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
        assert_eq!(label(&[]).expect_err("nobody there"), "the model is away");
        let labelled = label(&[GOOD]).expect("labels");
        assert_eq!(annotate(labelled.clone(), &Rules::default(), &mut |_| panic!("not asked")), Ok(labelled));
    }
}
