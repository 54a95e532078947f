//! The objects: graphs, annotations, cases.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::matching::MatchRule;
use crate::{Error, Result};

/// The question's node.
pub const QUESTION: &str = "Q0";
/// The node of what the model knew before.
pub const PRIOR_KNOWLEDGE: &str = "Prior_knowledge";
/// The answer's node; absent where there is no answer.
pub const ANSWER: &str = "Answer";

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeType {
    /// [`QUESTION`]
    Question,
    /// [`PRIOR_KNOWLEDGE`]
    #[serde(rename = "Prior_knowledge")]
    PriorKnowledge,
    /// [`ANSWER`]
    Answer,
    /// One issued search string.
    Query,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Unique in its graph.
    pub id: String,
    /// What it is.
    #[serde(rename = "type")]
    pub kind: NodeType,
    /// A query's or the answer's text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// A query's assistant message; several strings of one share a turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u64>,
}

/// Why a node leads to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EdgeKind {
    /// The question's constraint is used in a query.
    ConstraintUse,
    /// What a query found is used in another, or in the answer.
    EvidenceDerived,
    /// Prior knowledge is.
    PriorKnowledgeDerived,
    /// A query is made because another failed.
    FailureDerived,
}

/// A directed edge.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Edge {
    /// From.
    pub source: String,
    /// To.
    pub target: String,
    /// Why.
    pub edge_kind: EdgeKind,
}

/// An evidential query graph.
///
/// Invariant: ids are unique, the three special ids and no others belong to nodes that are no queries, edges join known nodes, and all kinds
/// together have no cycle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Graph {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
}

/// One constraint of a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Unique in its annotation.
    pub unit_id: String,
    /// What the question asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Which constraints each query deploys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Annotation {
    /// The question's constraints.
    pub constraint_units: Vec<Unit>,
    /// The units of every query of the graph, empty lists included.
    pub query_unit_ids: BTreeMap<String, Vec<String>>,
}

/// One task's graph with its annotation, if there is one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Case {
    /// The task.
    pub case_id: String,
    /// Its graph.
    pub graph: Graph,
    /// Its constraints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub annotation: Option<Annotation>,
    /// What made the graph, where it was not people or a judge: `exact`, `lexical`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub builder: Option<String>,
}

impl Graph {
    /// A graph of these parts.
    ///
    /// # Errors
    /// If an id is empty, stands twice or is another kind's, an edge has an unknown end, or there is a cycle.
    pub fn new(nodes: Vec<Node>, edges: Vec<Edge>) -> Result<Self> {
        let mut ids = BTreeSet::new();
        for node in &nodes {
            let special = special(&node.id);
            if node.id.is_empty() || special.unwrap_or(NodeType::Query) != node.kind {
                let kind = node.kind;
                return Err(Error::Other(format!("node {:?} can't be of type {kind:?}: its id tells its type", node.id)));
            }
            if !ids.insert(node.id.as_str()) {
                return Err(Error::Other(format!("node {:?} stands twice", node.id)));
            }
        }
        for edge in &edges {
            if let Some(end) = [&edge.source, &edge.target].into_iter().find(|end| !ids.contains(end.as_str())) {
                return Err(Error::Other(format!("edge {} -> {}: there is no node {end:?}", edge.source, edge.target)));
            }
        }
        let graph = Self { nodes, edges };
        graph.check_acyclic()?;
        Ok(graph)
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The edges.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// The queries' ids, in the order of the nodes.
    pub fn queries(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().filter(|node| node.kind == NodeType::Query).map(|node| node.id.as_str())
    }

    /// Takes away what has no edge left coming in or none going out, until nothing is left.
    fn check_acyclic(&self) -> Result<()> {
        let mut left: BTreeSet<&str> = self.nodes.iter().map(|node| node.id.as_str()).collect();
        loop {
            let is_open = |edge: &&Edge| left.contains(edge.source.as_str()) && left.contains(edge.target.as_str());
            let (from, to): (BTreeSet<&str>, BTreeSet<&str>) =
                self.edges.iter().filter(is_open).map(|edge| (edge.source.as_str(), edge.target.as_str())).unzip();
            let n_before = left.len();
            left.retain(|id| from.contains(id) && to.contains(id));
            if left.is_empty() {
                return Ok(());
            }
            if left.len() == n_before {
                let names = left.into_iter().collect::<Vec<_>>().join(", ");
                return Err(Error::Other(format!("the edges have a cycle among {names}")));
            }
        }
    }
}

impl Annotation {
    /// Checks it against the graph whose queries it describes.
    ///
    /// # Errors
    /// If a unit's id stands twice, a query is missing or unknown, or one lists an unknown unit or the same twice.
    pub fn check(&self, graph: &Graph) -> Result<()> {
        let wrong = |why: String| Err(Error::Other(format!("annotation: {why}")));
        let mut units = BTreeSet::new();
        for unit in &self.constraint_units {
            if !units.insert(unit.unit_id.as_str()) {
                return wrong(format!("unit {:?} stands twice", unit.unit_id));
            }
        }
        let queries: BTreeSet<&str> = graph.queries().collect();
        if let Some(missing) = queries.iter().find(|query| !self.query_unit_ids.contains_key(**query)) {
            return wrong(format!("query {missing:?} is not listed; one without units has an empty list"));
        }
        for (query, deployed) in &self.query_unit_ids {
            if !queries.contains(query.as_str()) {
                return wrong(format!("there is no query {query:?}"));
            }
            let mut seen = BTreeSet::new();
            for unit in deployed {
                if !units.contains(unit.as_str()) {
                    return wrong(format!("query {query:?} deploys unknown unit {unit:?}"));
                }
                if !seen.insert(unit) {
                    return wrong(format!("query {query:?} deploys unit {unit:?} twice"));
                }
            }
        }
        Ok(())
    }
}

impl Case {
    /// Reads a record: `{"case_id", "graph", "annotation"}`; the graph may also stand under `final_ground_truth_dag` or be the record itself,
    /// and the id under `task_id`. An annotation without `query_unit_ids` is matched by `rule`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(record: &Value, rule: Option<MatchRule>) -> Result<Self> {
        let case_id = case_id(record).ok_or_else(|| Error::Other("no case_id (or task_id)".to_owned()))?;
        let raw =
            ["graph", "final_ground_truth_dag"].iter().map(|key| &record[*key]).find(|graph| graph.is_object()).unwrap_or(record);
        let graph = read_graph(raw)?;
        let annotation = match &record["annotation"] {
            Value::Null => None,
            raw => match self::case_id(raw) {
                Some(other) if other != case_id => return Err(Error::Other(format!("the annotation is of case {other:?}"))),
                _ => Some(read_annotation(raw, &graph, rule)?),
            },
        };
        let builder = optional(&record["builder"], Value::as_str).map_err(|e| Error::Other(format!("builder: {e}")))?;
        Ok(Self { case_id, graph, annotation, builder: builder.map(str::to_owned) })
    }
}

impl TryFrom<Value> for Case {
    type Error = Error;

    fn try_from(record: Value) -> Result<Self> {
        Self::read(&record, None)
    }
}

impl TryFrom<Value> for Graph {
    type Error = Error;

    fn try_from(raw: Value) -> Result<Self> {
        read_graph(&raw)
    }
}

fn case_id(record: &Value) -> Option<String> {
    ["case_id", "task_id"].iter().find_map(|key| match &record[*key] {
        Value::String(id) => Some(id.clone()),
        Value::Number(id) => Some(id.to_string()),
        _ => None,
    })
}

fn read_annotation(raw: &Value, graph: &Graph, rule: Option<MatchRule>) -> Result<Annotation> {
    let wrong = |why: &dyn std::fmt::Display| Error::Other(format!("annotation: {why}"));
    if raw["query_unit_ids"].is_null() && raw.is_object() {
        let units: Vec<Unit> =
            serde_json::from_value(raw["constraint_units"].clone()).map_err(|e| wrong(&format!("constraint_units: {e}")))?;
        let rule =
            rule.ok_or_else(|| wrong(&"no query_unit_ids: list every query's units, or choose a rule that matches their words"))?;
        return Annotation::by_words(units, graph, rule);
    }
    let annotation: Annotation = serde_json::from_value(raw.clone()).map_err(|e| wrong(&e))?;
    annotation.check(graph)?;
    Ok(annotation)
}

fn read_graph(raw: &Value) -> Result<Graph> {
    let list = |key: &str| {
        raw[key]
            .as_array()
            .ok_or_else(|| Error::Other(format!("no list of {key}: expected graph, final_ground_truth_dag, or nodes and edges")))
    };
    let nodes = list("nodes")?.iter().map(read_node).collect::<Result<Vec<_>>>()?;
    let edge = |raw: &Value| serde_json::from_value(raw.clone()).map_err(|e| Error::Other(format!("edge {raw}: {e}")));
    let edges = list("edges")?.iter().map(edge).collect::<Result<Vec<Edge>>>()?;
    Graph::new(nodes, edges)
}

/// A node's type may be left out where its id tells it. Builders name the types of special nodes as they like.
fn read_node(raw: &Value) -> Result<Node> {
    let wrong = |why: String| Error::Other(format!("node {raw}: {why}"));
    let id = raw["id"].as_str().ok_or_else(|| wrong("no id".to_owned()))?;
    let is_numbered = id.strip_prefix('q').is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let is_query = raw["type"].as_str().is_some_and(|kind| kind.eq_ignore_ascii_case("query"));
    let kind = match special(id) {
        Some(kind) if !is_query => kind,
        None if is_query || is_numbered && raw["type"].is_null() => NodeType::Query,
        Some(_) => return Err(wrong("this id is no query's".to_owned())),
        None => return Err(wrong("type must be Query, or the id q and a number".to_owned())),
    };
    let text = optional(&raw["text"], Value::as_str).map_err(|e| wrong(format!("text: {e}")))?;
    let turn = optional(&raw["turn"], Value::as_u64).map_err(|e| wrong(format!("turn: {e}")))?;
    Ok(Node { id: id.to_owned(), kind, text: text.map(str::to_owned), turn })
}

/// The nodes that are no queries are known by their ids.
fn special(id: &str) -> Option<NodeType> {
    match id {
        QUESTION => Some(NodeType::Question),
        PRIOR_KNOWLEDGE => Some(NodeType::PriorKnowledge),
        ANSWER => Some(NodeType::Answer),
        _ => None,
    }
}

/// A value that may be absent or null, but not of another form.
fn optional<'a, T>(raw: &'a Value, read: impl Fn(&'a Value) -> Option<T>) -> std::result::Result<Option<T>, String> {
    match raw {
        Value::Null => Ok(None),
        raw => read(raw).map(Some).ok_or_else(|| format!("it can't be {raw}")),
    }
}
