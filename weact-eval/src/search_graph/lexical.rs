//! Graphs of real traces without a judge: by the words of queries, results and answer. A baseline, labelled [`BUILDER`], never to be mixed with
//! graphs made otherwise in one table.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use weact_core::{
    message::{Message, Role},
    trajectory::Trajectory,
};

use super::graph::{ANSWER, Annotation, Case, Edge, EdgeKind, Graph, Node, NodeType, PRIOR_KNOWLEDGE, QUESTION, Unit};
use crate::Result;

/// The label of graphs made here.
pub const BUILDER: &str = "lexical";

/// Words that tell nothing.
const STOP: &[&str] = &[
    "about", "after", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "before", "but", "by", "can",
    "did", "do", "does", "for", "from", "had", "has", "have", "he", "her", "his", "how", "if", "in", "into", "is", "it", "its",
    "many", "more", "most", "much", "no", "not", "of", "on", "one", "or", "other", "out", "over", "she", "so", "some", "than",
    "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "under", "up", "was", "we", "were",
    "what", "when", "where", "which", "while", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
];

/// Words too general to tell a constraint.
const GENERIC: &[&str] =
    &["answer", "date", "find", "first", "last", "list", "name", "number", "people", "person", "place", "thing", "time", "year"];

/// One issued search string with what came back.
struct Issued<'a> {
    id: String,
    turn: u64,
    text: &'a str,
    result: &'a str,
}

/// The graph of a trajectory, by these rules: a string of a call of a tool named `search` is a query; prior knowledge leads to it where it has a word that
/// stands neither in the question nor in an earlier result; an earlier query does where its result is the first with a word of it; one that found nothing leads
/// to the next as a failure. Queries whose results hold the answer lead to it, as few as hold all its words; prior knowledge does where no result holds one.
///
/// `units` are the question's constraints; they are matched with queries by [`token_coverage`].
///
/// # Errors
/// None is expected: edges go forward only.
pub fn lexical_case(trajectory: &Trajectory, units: Option<&[Unit]>) -> Result<Case> {
    let question = trajectory.question.as_deref().or_else(|| first_user(trajectory.messages())).unwrap_or_default();
    let answer = answer(trajectory);
    let issued = issued(trajectory.messages());
    let mut nodes = vec![node(QUESTION, NodeType::Question, None), node(PRIOR_KNOWLEDGE, NodeType::PriorKnowledge, None)];
    nodes.extend(answer.as_ref().map(|answer| node(ANSWER, NodeType::Answer, Some(answer.clone()))));
    nodes.extend(issued.iter().map(|q| Node { turn: Some(q.turn), ..node(&q.id, NodeType::Query, Some(q.text.to_owned())) }));
    let mut edges = BTreeSet::new();
    let mut link = |source: &str, target: &str, edge_kind| {
        edges.insert(Edge { source: source.to_owned(), target: target.to_owned(), edge_kind });
    };
    let asked = content_words(question);
    let results: Vec<BTreeSet<String>> = issued.iter().map(|q| content_words(q.result)).collect();
    for (j, query) in issued.iter().enumerate() {
        let earlier = || (0..j).filter(|&i| issued[i].turn < query.turn);
        let words = content_words(query.text);
        if words.iter().any(|word| asked.contains(word)) {
            link(QUESTION, &query.id, EdgeKind::ConstraintUse);
        }
        for word in words.iter().filter(|word| !asked.contains(*word)) {
            match earlier().find(|&i| results[i].contains(word)) {
                Some(i) => link(&issued[i].id, &query.id, EdgeKind::EvidenceDerived),
                None => link(PRIOR_KNOWLEDGE, &query.id, EdgeKind::PriorKnowledgeDerived),
            }
        }
        if let Some(i) = earlier().next_back().filter(|&i| results[i].is_empty() || issued[i].result.starts_with("error")) {
            link(&issued[i].id, &query.id, EdgeKind::FailureDerived);
        }
    }
    if let Some(answer) = &answer {
        let mut wanted: BTreeSet<String> = content_words(answer).into_iter().filter(|word| !asked.contains(word)).collect();
        if wanted.is_empty() {
            wanted = content_words(answer);
        }
        let is_abstention = ["unknown", "cannot", "unable"].iter().any(|word| answer.to_lowercase().contains(word));
        while !wanted.is_empty() {
            let n_found = |i: &usize| results[*i].intersection(&wanted).count();
            let Some(best) = (0..issued.len()).rev().max_by_key(n_found).filter(|i| n_found(i) > 0) else { break };
            link(&issued[best].id, ANSWER, EdgeKind::EvidenceDerived);
            wanted.retain(|word| !results[best].contains(word));
        }
        if !wanted.is_empty() && !is_abstention {
            link(PRIOR_KNOWLEDGE, ANSWER, EdgeKind::PriorKnowledgeDerived);
        }
    }
    let graph = Graph::new(nodes, edges.into_iter().collect())?;
    let annotation = units.map(|units| Annotation {
        constraint_units: units.to_vec(),
        query_unit_ids: issued.iter().map(|query| (query.id.clone(), deployed(units, query.text))).collect::<BTreeMap<_, _>>(),
    });
    Ok(Case { case_id: trajectory.id.clone(), graph, annotation, builder: Some(BUILDER.to_owned()) })
}

/// Whether a query deploys a constraint: one of its words where it has one or two, else half of them and at least two. Words are runs of ASCII letters and
/// digits, longer than one, that tell something.
pub fn token_coverage(unit: &str, query: &str) -> bool {
    let unit = content_words(unit);
    let n_shared = unit.intersection(&content_words(query)).count();
    let needed = if unit.len() <= 2 { 1 } else { unit.len().div_ceil(2).max(2) };
    !unit.is_empty() && n_shared >= needed
}

/// The stricter matcher: of the unit's words in the singular, without generic ones, the only one, or two of which one has four letters or more or a digit, or
/// one of eight letters or more.
pub fn distinctive_terms(unit: &str, query: &str) -> bool {
    let terms = |text: &str| -> BTreeSet<String> {
        content_words(text).iter().map(|word| singular(word)).filter(|word| !GENERIC.contains(&word.as_str())).collect()
    };
    let unit = terms(unit);
    let hits: Vec<String> = unit.intersection(&terms(query)).cloned().collect();
    let informative = |word: &String| word.len() >= 4 || word.bytes().any(|b| b.is_ascii_digit());
    match (unit.len(), hits.len()) {
        (0, _) | (_, 0) => false,
        (1, _) => true,
        (_, 1) => hits[0].len() >= 8,
        _ => hits.iter().any(informative),
    }
}

fn deployed(units: &[Unit], query: &str) -> Vec<String> {
    let deploys = |unit: &&Unit| unit.text.as_deref().is_some_and(|text| token_coverage(text, query));
    units.iter().filter(deploys).map(|unit| unit.unit_id.clone()).collect()
}

fn node(id: &str, kind: NodeType, text: Option<String>) -> Node {
    Node { id: id.to_owned(), kind, text, turn: None }
}

fn first_user(messages: &[Message]) -> Option<&str> {
    messages.iter().find(|m| m.role == Role::User).map(|m| m.content.as_str())
}

/// The final answer: what the trajectory's last assistant message marks as such, or says without a call.
fn answer(trajectory: &Trajectory) -> Option<String> {
    let last = trajectory.messages().iter().rev().find(|m| m.role == Role::Assistant)?;
    weact_infer::agent::marked_answer(&last.content)
        .or_else(|| Some(last.content.trim().to_owned()).filter(|text| !text.is_empty() && last.tool_calls.is_empty()))
}

fn issued(messages: &[Message]) -> Vec<Issued<'_>> {
    let mut issued: Vec<Issued<'_>> = Vec::new();
    for (turn, message) in (0..).zip(messages) {
        for (at, call) in message.tool_calls.iter().enumerate() {
            if call.name != "search" && call.name != "google_search" {
                continue;
            }
            // Calls are answered in order; a result that names its call is that call's.
            let answers = messages[turn as usize + 1..].iter().take_while(|m| m.role == Role::Tool);
            let own: Vec<&Message> = answers.collect();
            let by_id = own.iter().find(|m| call.id.is_some() && m.tool_call_id == call.id);
            let result = by_id.or(own.get(at)).map_or("", |m| m.content.as_str());
            for text in strings(&call.arguments) {
                issued.push(Issued { id: format!("q{}", issued.len() + 1), turn, text, result });
            }
        }
    }
    issued
}

/// The search strings of a call: under `query`, `queries` or `q`, one or a list.
fn strings(arguments: &serde_json::Map<String, Value>) -> Vec<&str> {
    let value = ["query", "queries", "q"].iter().find_map(|key| arguments.get(*key));
    match value {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn content_words(text: &str) -> BTreeSet<String> {
    let lower = text.to_ascii_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    words.filter(|word| word.len() > 1 && !STOP.contains(word)).map(str::to_owned).collect()
}

fn singular(word: &str) -> String {
    match word {
        w if w.len() > 4 && w.ends_with("ies") => format!("{}y", &w[..w.len() - 3]),
        w if w.len() > 3 && w.ends_with('s') && !w.ends_with("ss") => w[..w.len() - 1].to_owned(),
        w => w.to_owned(),
    }
}
