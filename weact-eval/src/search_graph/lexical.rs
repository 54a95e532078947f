//! Graphs of real traces without a judge: by the words of queries, results and answer. A baseline, labelled [`BUILDER`], never to be mixed with
//! graphs made otherwise in one table.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use weact_core::{
    control,
    message::{Message, Role, ToolCall},
    trajectory::Trajectory,
};

use super::{
    graph::{ANSWER, Case, Edge, EdgeKind, Graph, Node, NodeType, PRIOR_KNOWLEDGE, QUESTION},
    matching::STOP,
};
use crate::Result;

/// The label of graphs made here.
pub const BUILDER: &str = "lexical";

/// How an answer begins that says that there is none.
const ABSTENTIONS: &[&str] = &[
    "unknown",
    "cannot",
    "can't",
    "unable",
    "insufficient",
    "not found",
    "no answer",
    "i cannot",
    "i can't",
    "i could not",
    "i couldn't",
    "i do not know",
    "i don't know",
];

/// One issued search string.
struct Query<'a> {
    id: String,
    turn: u64,
    text: &'a str,
    failed: bool,
}

/// What a tool showed.
struct Observation {
    /// The assistant message whose call it answers.
    turn: u64,
    /// The query that it is evidence of, by index; `None` before the first.
    query: Option<usize>,
    text: String,
    words: BTreeSet<String>,
}

/// The graph of a trajectory. Words are runs of letters and digits, longer than one, that tell something; scripts without spaces give none.
///
/// - Each text of a call of `search` (or `google_search`) is a query. What a call shows is evidence of its queries, each of its own block where
///   the result has one under its text; what another tool shows is evidence of the query whose result names its address, else of the last.
/// - The question leads to a query that has a word of it. Of a query's other words, the query that first found one in an earlier turn leads
///   to it, and prior knowledge where none did.
/// - Queries of the turn before that found nothing lead to a query as failures.
/// - The query that first showed the whole answer leads to it. Where none did, as few as hold its words do, and prior knowledge if a word is left.
///   Nothing leads to an answer that says that there is none. An answer of whole sentences nearly always leaves a word.
///
/// # Errors
/// None is expected: edges go forward only.
pub fn lexical_case(trajectory: &Trajectory) -> Result<Case> {
    let messages = trajectory.messages();
    let question = trajectory.question.as_deref().or_else(|| first_user(messages)).unwrap_or_default();
    let answer = answer(messages);
    let (queries, seen) = read(messages);
    let mut nodes = vec![node(QUESTION, NodeType::Question, None), node(PRIOR_KNOWLEDGE, NodeType::PriorKnowledge, None)];
    nodes.extend(answer.as_ref().map(|answer| node(ANSWER, NodeType::Answer, Some(answer.clone()))));
    nodes.extend(queries.iter().map(|q| Node { turn: Some(q.turn), ..node(&q.id, NodeType::Query, Some(q.text.to_owned())) }));
    let mut edges = BTreeSet::new();
    let mut link = |source: &str, target: &str, edge_kind| {
        edges.insert(Edge { source: source.to_owned(), target: target.to_owned(), edge_kind });
    };
    let asked = words(question);
    for query in &queries {
        for word in words(query.text) {
            let source = seen.iter().find(|observation| observation.turn < query.turn && observation.words.contains(&word));
            match source.map(|observation| observation.query) {
                _ if asked.contains(&word) => link(QUESTION, &query.id, EdgeKind::ConstraintUse),
                Some(Some(i)) => link(&queries[i].id, &query.id, EdgeKind::EvidenceDerived),
                Some(None) => {}
                None => link(PRIOR_KNOWLEDGE, &query.id, EdgeKind::PriorKnowledgeDerived),
            }
        }
        let before = queries.iter().map(|other| other.turn).filter(|turn| *turn < query.turn).max();
        for failed in queries.iter().filter(|other| Some(other.turn) == before && other.failed) {
            link(&failed.id, &query.id, EdgeKind::FailureDerived);
        }
    }
    if let Some(answer) = &answer {
        let (sources, is_whole) = sources(answer, &asked, queries.len(), &seen);
        for i in sources {
            link(&queries[i].id, ANSWER, EdgeKind::EvidenceDerived);
        }
        if !is_whole {
            link(PRIOR_KNOWLEDGE, ANSWER, EdgeKind::PriorKnowledgeDerived);
        }
    }
    let graph = Graph::new(nodes, edges.into_iter().collect())?;
    Ok(Case { case_id: trajectory.id.clone(), graph, annotation: None, builder: Some(BUILDER.to_owned()) })
}

/// The queries that an answer rests on, by index, and whether they hold all of it.
fn sources(answer: &str, asked: &BTreeSet<String>, n_queries: usize, seen: &[Observation]) -> (Vec<usize>, bool) {
    let bare = answer.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase();
    if ABSTENTIONS.iter().any(|start| bare.starts_with(start)) {
        return (Vec::new(), true);
    }
    let tells = !bare.is_empty() && !STOP.contains(&bare.as_str());
    if let Some(whole) = seen.iter().find_map(|o| o.query.filter(|_| tells && holds(&o.text, &bare))) {
        return (vec![whole], true);
    }
    let all = words(&bare);
    let mut wanted: BTreeSet<&String> = all.difference(asked).collect();
    if wanted.is_empty() {
        wanted = all.iter().collect();
    }
    if wanted.is_empty() {
        return (Vec::new(), false);
    }
    let mut sources = Vec::new();
    loop {
        let found = |i: usize| -> BTreeSet<&String> {
            let own = seen.iter().filter(|observation| observation.query == Some(i));
            own.flat_map(|observation| wanted.iter().copied().filter(|word| observation.words.contains(*word))).collect()
        };
        // Of equal ones the first: the maximum is the last of those that it meets.
        let best = (0..n_queries).rev().map(|i| (i, found(i))).max_by_key(|(_, found)| found.len());
        match best {
            Some((i, found)) if !found.is_empty() => {
                sources.push(i);
                wanted = wanted.difference(&found).copied().collect();
            }
            _ => return (sources, wanted.is_empty()),
        }
    }
}

/// Whether `text` has `part`, not within a longer ASCII word or number. Both are in lower case.
fn holds(text: &str, part: &str) -> bool {
    let joins = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_free = |start: usize| {
        let end = start + part.len();
        !(joins(text[..start].chars().next_back()) && joins(part.chars().next())
            || joins(text[end..].chars().next()) && joins(part.chars().next_back()))
    };
    text.match_indices(part).any(|(start, _)| is_free(start))
}

/// The queries, and what was shown, in order.
fn read(messages: &[Message]) -> (Vec<Query<'_>>, Vec<Observation>) {
    let mut queries: Vec<Query<'_>> = Vec::new();
    let mut seen: Vec<Observation> = Vec::new();
    for (at, message) in messages.iter().enumerate() {
        let turn = at as u64;
        let answers: Vec<&Message> = messages[at + 1..].iter().take_while(|m| m.role == Role::Tool).collect();
        for (i, call) in message.tool_calls.iter().enumerate().filter(|(_, call)| !control::is_control(&call.name)) {
            let result = result(call, i, &answers);
            let observation = |query, text: &str| {
                let text = text.to_lowercase();
                Observation { turn, query, words: words(&text), text }
            };
            if call.name == "search" || call.name == "google_search" {
                let texts = texts(&call.arguments, &["query", "queries", "q"]);
                for (text, block) in texts.iter().zip(blocks(result, &texts)) {
                    let failed = found_nothing(&block);
                    if !failed {
                        seen.push(observation(Some(queries.len()), &block));
                    }
                    queries.push(Query { id: format!("q{}", queries.len() + 1), turn, text, failed });
                }
            } else {
                let addresses: Vec<String> =
                    texts(&call.arguments, &["url", "urls"]).iter().map(|a| a.trim().to_lowercase()).collect();
                let lists = |o: &&Observation| addresses.iter().any(|address| !address.is_empty() && o.text.contains(address));
                let query =
                    seen.iter().filter(|o| o.query.is_some()).find(lists).map_or(queries.len().checked_sub(1), |o| o.query);
                // A common reader repeats the policy's own words.
                let goals: Vec<String> =
                    texts(&call.arguments, &["goal"]).iter().map(|goal| format!("for user goal {goal}")).collect();
                let shown = result.lines().filter(|line| !goals.iter().any(|goal| line.contains(goal)));
                seen.push(observation(query, &shown.collect::<Vec<_>>().join("\n")));
            }
        }
    }
    (queries, seen)
}

/// The result of a message's call `i`: the one that names it, else, where results name no calls, the one in its place.
fn result<'a>(call: &ToolCall, i: usize, answers: &[&'a Message]) -> &'a str {
    let named = answers.iter().find(|m| call.id.is_some() && m.tool_call_id == call.id);
    let in_place = || answers.get(i).filter(|m| call.id.is_none() || m.tool_call_id.is_none());
    named.or_else(in_place).map_or("", |m| m.content.as_str())
}

/// The texts of a call's first argument among `keys`, one or a list. A call without texts is one that its tool refused.
fn texts<'a>(arguments: &'a Map<String, Value>, keys: &[&str]) -> Vec<&'a str> {
    match keys.iter().find_map(|key| arguments.get(*key)) {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => items.iter().map(Value::as_str).collect::<Option<_>>().unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// What a result shows for each of `queries`: what follows the line that names it, up to the next such line. Where one is named nowhere, all of
/// them get the whole. The lines that name them hold the queries' words, not the result's: they are left out.
fn blocks(result: &str, queries: &[&str]) -> Vec<String> {
    let lines: Vec<&str> = result.lines().collect();
    let mut heads = Vec::new();
    for query in queries {
        let from = heads.last().map_or(0, |head| head + 1);
        heads.extend((from..lines.len()).find(|at| is_head(lines[*at], query)));
    }
    let without_heads = |from: usize, to: usize| -> String {
        (from..to).filter(|at| !heads.contains(at)).map(|at| lines[at]).collect::<Vec<_>>().join("\n")
    };
    if heads.len() < queries.len() {
        return vec![without_heads(0, lines.len()); queries.len()];
    }
    let starts = [0].into_iter().chain(heads.iter().skip(1).copied());
    let ends = heads.iter().skip(1).copied().chain([lines.len()]);
    starts.zip(ends).map(|(from, to)| without_heads(from, to)).collect()
}

/// Whether a line of a result names a query: it is the query, or has it in quotes or after a colon and is no numbered or marked hit.
fn is_head(line: &str, query: &str) -> bool {
    let (line, query) = (line.trim(), query.split_whitespace().collect::<Vec<_>>().join(" "));
    let is_hit = line.starts_with(|c: char| c.is_ascii_digit() || "[#*-<".contains(c));
    let named = [format!("'{query}'"), format!("\"{query}\"")].iter().any(|quoted| line.contains(quoted));
    !query.is_empty() && (line == query || !is_hit && (named || line.ends_with(&format!(": {query}"))))
}

fn found_nothing(result: &str) -> bool {
    let start = result.trim_start().to_lowercase();
    start.is_empty() || start.starts_with("error") || start.starts_with("no results")
}

/// The final answer: what the last assistant message marks as such, or says without a call.
fn answer(messages: &[Message]) -> Option<String> {
    let last = messages.iter().rev().find(|m| m.role == Role::Assistant)?;
    weact_infer::agent::marked_answer(&last.content)
        .or_else(|| Some(last.content.trim().to_owned()).filter(|text| !text.is_empty() && last.tool_calls.is_empty()))
}

fn first_user(messages: &[Message]) -> Option<&str> {
    messages.iter().find(|m| m.role == Role::User).map(|m| m.content.as_str())
}

/// The words that tell something, in lower case. Runs of scripts without spaces (from U+2E80 on) are no words.
fn words(text: &str) -> BTreeSet<String> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric());
    let tells = |word: &&str| word.chars().nth(1).is_some() && !STOP.contains(word) && word.chars().all(|c| c < '\u{2e80}');
    words.filter(tells).map(str::to_owned).collect()
}

fn node(id: &str, kind: NodeType, text: Option<String>) -> Node {
    Node { id: id.to_owned(), kind, text, turn: None }
}
