//! Structural stage labels (App. A.2): which messages planned, searched and wrote.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use weact_core::{
    Capability, control,
    message::{Message, Role},
    trajectory::{Exit, Span, Trajectory},
};

/// How [`label`] tells stages apart.
///
/// The paper reports that structural search candidates and text-anchored boundaries were needed (App. A.2) and doesn't give
/// its rules. These look at structure alone: who speaks, and which tools are called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rules {
    /// Names of tools that acquire or check external evidence.
    pub retrieval_tools: Vec<String>,
    /// Tools whose names begin with one of these are retrieval tools too.
    pub retrieval_prefixes: Vec<String>,
    /// The capability of the opening plan.
    pub plan: Capability,
    /// The capability of turns that call a retrieval tool.
    pub search: Capability,
    /// The capability of the final answer.
    pub write: Capability,
}

impl Default for Rules {
    fn default() -> Self {
        let names = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect();
        let capability = |name| Capability::new(name).expect("a legal name");
        Self {
            retrieval_tools: names(&["search", "google_search", "web_search", "snippet_search", "visit", "fetch"]),
            retrieval_prefixes: names(&["scrape", "browse"]),
            plan: capability("plan"),
            search: capability("search"),
            write: capability("write"),
        }
    }
}

impl Rules {
    fn retrieves(&self, message: &Message) -> bool {
        message.tool_calls.iter().any(|call| {
            self.retrieval_tools.contains(&call.name)
                || self.retrieval_prefixes.iter().any(|prefix| call.name.starts_with(prefix))
        })
    }
}

/// Puts capability spans, with no exit yet, on a trajectory without spans; one with spans passes unchanged.
///
/// - plan: the assistant messages directly before the first call of any tool, and what that call's own message thinks and
///   says. The message is split at the call: thinking and text, each in its field, become a message of their own, and the call
///   keeps neither. Opening thoughts are thus what Plan learns, also where the plan stands in `reasoning_content` alone.
/// - search: from a turn with a retrieval call to the results of the last one, with turns between that call nothing. A user
///   message, or a turn that calls other tools only, ends the span; such turns stay unlabelled.
/// - write: the assistant messages without calls that end the conversation, with their thinking. A conversation that ends on
///   another's message has no answer.
///
/// # Errors
/// The reason to drop the trajectory: none of the three stages is there, or it has control calls but no spans.
pub fn label(trajectory: Trajectory, rules: &Rules) -> std::result::Result<Trajectory, String> {
    if !trajectory.spans().is_empty() {
        return Ok(trajectory);
    }
    let mut messages = trajectory.messages().to_vec();
    if messages.iter().flat_map(|m| &m.tool_calls).any(|call| control::is_control(&call.name)) {
        return Err("it has control calls but no spans".to_owned());
    }
    let plan = split_plan(&mut messages);
    let write = final_answer(&messages);
    let searches = searches(&messages[..write.start], rules);
    let labelled = [(plan, &rules.plan)].into_iter();
    let labelled = labelled.chain(searches.into_iter().map(|range| (range, &rules.search))).chain([(write, &rules.write)]);
    let spans: Vec<Span> = labelled
        .filter(|(range, _)| !range.is_empty())
        .map(|(Range { start, end }, capability)| Span { capability: capability.clone(), start, end, exit: Exit::None })
        .collect();
    if spans.is_empty() {
        return Err("no stage found: no text before the first call, no retrieval call, no answer at the end".to_owned());
    }
    let mut labelled = Trajectory::new(trajectory.id, trajectory.tools, messages, spans).map_err(|e| e.to_string())?;
    labelled.question = trajectory.question;
    labelled.answer = trajectory.answer;
    Ok(labelled)
}

/// Splits the first calling message before its call, and returns the plan's messages, which end there.
pub(super) fn split_plan(messages: &mut Vec<Message>) -> Range<usize> {
    let Some(mut end) = messages.iter().position(|m| !m.tool_calls.is_empty()) else { return 0..0 };
    let start = start_of_run(&messages[..end]);
    if speaks(&messages[end]) {
        let caller = &mut messages[end];
        let calls = std::mem::take(&mut caller.tool_calls);
        messages.insert(end + 1, Message::calling("", calls));
        end += 1;
    }
    if messages[start..end].iter().any(speaks) { start..end } else { end..end }
}

/// The messages of the final answer; empty, and at the end, if there is none.
fn final_answer(messages: &[Message]) -> Range<usize> {
    let end = messages.len();
    let start = start_of_run(messages);
    let answers = |m: &Message| !m.content.trim().is_empty();
    if messages[start..].iter().any(answers) { start..end } else { end..end }
}

/// Where the assistant messages without calls that end `messages` begin.
fn start_of_run(messages: &[Message]) -> usize {
    messages.iter().rposition(|m| m.role != Role::Assistant || !m.tool_calls.is_empty()).map_or(0, |before| before + 1)
}

fn searches(messages: &[Message], rules: &Rules) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let mut open = false;
    for (at, message) in messages.iter().enumerate() {
        match message.role {
            Role::Assistant if rules.retrieves(message) => {
                let n_results = messages[at + 1..].iter().take_while(|m| m.role == Role::Tool).count();
                let end = at + 1 + n_results;
                match found.last_mut() {
                    Some(search) if open => search.end = end,
                    _ => found.push(at..end),
                }
                open = true;
            }
            Role::Assistant => open &= message.tool_calls.is_empty(),
            Role::User | Role::System => open = false,
            Role::Tool => {}
        }
    }
    found
}

fn speaks(message: &Message) -> bool {
    let thinks = message.reasoning_content.as_deref().unwrap_or_default();
    !message.content.trim().is_empty() || !thinks.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use serde_json::Map;
    use weact_core::message::ToolCall;

    use super::*;

    /// One message per letter: `s`ystem, `u`ser, `a`nswering or `t`hinking assistant, an `e`mpty one; calls of `r`etrieval or
    /// an`o`ther tool, capital with text before; `.` a result.
    fn conversation(letters: &str) -> Trajectory {
        let calling = |text: &str, tool: &str| Message::calling(text, vec![ToolCall::new(tool, Map::new())]);
        let messages = letters.chars().map(|letter| match letter {
            's' => Message::text(Role::System, "be brief"),
            'u' => Message::text(Role::User, "who?"),
            'a' => Message::text(Role::Assistant, "text"),
            't' => Message { reasoning_content: Some("thought".to_owned()), ..Message::text(Role::Assistant, "") },
            'e' => Message::text(Role::Assistant, " "),
            'r' => calling("", "search"),
            'R' => Message { reasoning_content: Some("thought".to_owned()), ..calling("text", "browse_page") },
            'o' => calling("", "python"),
            'O' => calling("text", "python"),
            '.' => Message::text(Role::Tool, "result"),
            other => unreachable!("{other}"),
        });
        Trajectory::new("x".to_owned(), Vec::new(), messages.collect(), Vec::new()).expect("no spans")
    }

    #[test]
    fn stages_are_where_the_structure_says() {
        for (letters, expected) in [
            ("suR.R.a", "plan 2..3 search 3..7 write 7..8"),
            ("suar.r.a", "plan 2..3 search 3..7 write 7..8"),
            ("suaR.a", "plan 2..4 search 4..6 write 6..7"),
            ("uer.t", "search 2..4"),
            ("ur..ar.aa", "search 1..7 write 7..9"),
            ("ur.ao.r.a", "search 1..3 search 6..8 write 8..9"),
            ("ur.ur.u", "search 1..3 search 4..6"),
            ("uaur.ua", "search 3..5 write 6..7"),
            ("uO.R.o.", "plan 1..2 search 4..6"),
            ("ua", "write 1..2"),
            ("uta", "write 1..3"),
        ] {
            let labelled = label(conversation(letters), &Rules::default()).unwrap_or_else(|why| panic!("{letters}: {why}"));
            let spans = labelled.spans().iter().map(|s| format!("{} {}..{}", s.capability, s.start, s.end));
            assert_eq!(spans.collect::<Vec<_>>().join(" "), expected, "{letters}");
            assert_eq!(label(labelled.clone(), &Rules::default()), Ok(labelled), "{letters} again");
        }
        for letters in ["su", "uo.", "uau", "uo.t", "ue"] {
            let why = label(conversation(letters), &Rules::default()).expect_err(letters);
            assert!(why.contains("no stage found"), "{letters}: {why}");
        }
    }

    #[test]
    fn the_plan_keeps_thinking_and_text_and_the_call_stands_alone() {
        let labelled = label(conversation("uR."), &Rules::default()).expect("stages");
        let [_, plan, search, _] = labelled.messages() else { panic!("four messages") };
        assert_eq!((plan.reasoning_content.as_deref(), plan.content.as_str()), (Some("thought"), "text"));
        assert!(plan.tool_calls.is_empty());
        assert_eq!(*search, Message::calling("", vec![ToolCall::new("browse_page", Map::new())]));
    }

    #[test]
    fn rules_are_read_with_defaults_and_without_unknown_keys() {
        let rules: Rules = toml::from_str("retrieval_tools = [\"python\"]\nsearch = \"code\"").expect("rules");
        let labelled = label(conversation("uo."), &rules).expect("stages");
        assert_eq!(labelled.spans()[0].capability.as_str(), "code");
        assert!(toml::from_str::<Rules>("retrieval = []").is_err());
        assert!(toml::from_str::<Rules>("plan = \"base\"").is_err());
    }

    #[test]
    fn control_calls_without_spans_are_refused() {
        let load = control::load_call(&Rules::default().plan);
        let messages = vec![Message::calling("", vec![load.clone()]), Message::tool_result(&load, "ready")];
        let trajectory = Trajectory::new("x".to_owned(), Vec::new(), messages, Vec::new()).expect("no spans");
        assert!(label(trajectory, &Rules::default()).is_err());
    }
}
