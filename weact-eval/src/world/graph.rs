//! The evidential query graph of a run in the toy world, exact: every word has one meaning, so that what a query rests on is known.

use std::collections::BTreeMap;

use serde_json::Value;
use weact_core::{
    message::{Message, Role},
    trajectory::Trajectory,
};

use super::{
    World,
    facts::{Entity, Relation},
    question::Question,
};
use crate::{
    Result,
    search_graph::{ANSWER, Annotation, Case, Edge, EdgeKind, Graph, Node, NodeType, PRIOR_KNOWLEDGE, QUESTION, Unit},
};

/// The label of graphs made here.
pub const BUILDER: &str = "exact";

/// One issued query.
struct Query {
    id: String,
    turn: u64,
    text: String,
    /// Its result, and those of the visits that followed it.
    seen: String,
    failed: bool,
}

impl World {
    /// The graph of `run`, which answers `question`, with the question's constraints as units.
    ///
    /// A query's subject is in the question, or in what the latest earlier query that names it found, or it is prior knowledge. A query that
    /// repeats one that failed follows from the failure. The answer rests on the last query whose result, or page visited for it, names it; if none does, on prior
    /// knowledge. A query deploys the constraint whose relation it asks for, in the dialect of queries or in plain words, about the constraint's subject.
    ///
    /// # Errors
    /// None is expected: edges go forward only.
    pub fn search_graph(&self, question: &Question, run: &Trajectory, answer: Option<&str>) -> Result<Case> {
        let queries = queries(run.messages());
        let mut nodes = vec![node(QUESTION, NodeType::Question), node(PRIOR_KNOWLEDGE, NodeType::PriorKnowledge)];
        nodes.extend(answer.map(|answer| Node { text: Some(answer.to_owned()), ..node(ANSWER, NodeType::Answer) }));
        nodes.extend(queries.iter().map(|query| Node {
            text: Some(query.text.clone()),
            turn: Some(query.turn),
            ..node(&query.id, NodeType::Query)
        }));
        let mut edges = Vec::new();
        let mut link = |source: &str, target: &str, edge_kind| {
            edges.push(Edge { source: source.to_owned(), target: target.to_owned(), edge_kind });
        };
        let asked = words(&question.text);
        for (j, query) in queries.iter().enumerate() {
            let earlier = || queries[..j].iter().rev().filter(|other| other.turn < query.turn);
            if let Some(failed) = earlier().find(|other| other.text.trim() == query.text.trim()).filter(|other| other.failed) {
                link(&failed.id, &query.id, EdgeKind::FailureDerived);
            }
            for entity in words(&query.text).into_iter().filter(|word| Entity::named(word).is_some()) {
                match earlier().find(|other| words(&other.seen).contains(&entity)) {
                    _ if asked.contains(&entity) => link(QUESTION, &query.id, EdgeKind::ConstraintUse),
                    Some(source) => link(&source.id, &query.id, EdgeKind::EvidenceDerived),
                    None => link(PRIOR_KNOWLEDGE, &query.id, EdgeKind::PriorKnowledgeDerived),
                }
            }
        }
        if let Some(answer) = answer {
            for source in self.sources(question, &queries, answer) {
                link(source, ANSWER, EdgeKind::EvidenceDerived);
            }
            if !edges.iter().any(|edge: &Edge| edge.target == ANSWER) {
                let edge_kind = EdgeKind::PriorKnowledgeDerived;
                edges.push(Edge { source: PRIOR_KNOWLEDGE.to_owned(), target: ANSWER.to_owned(), edge_kind });
            }
        }
        edges.sort();
        edges.dedup();
        let graph = Graph::new(nodes, edges)?;
        let annotation = self.annotation(question, &queries);
        annotation.check(&graph)?;
        let builder = Some(BUILDER.to_owned());
        Ok(Case { case_id: run.id.clone(), graph, annotation: Some(annotation), builder })
    }

    /// The queries on which an answer rests. One that names a value rests on the last query that showed it, an intersection on all that did; a comparison, a
    /// difference and the answer that nobody knows rest on the queries for what was to be looked up.
    fn sources<'a>(&self, question: &Question, queries: &'a [Query], answer: &str) -> Vec<&'a str> {
        use super::question::Family;
        match question.family {
            Family::Comparison | Family::Compute | Family::Unanswerable => {
                let deployed = |query: &&Query| !query.failed && !self.units_of(question, query).is_empty();
                queries.iter().filter(deployed).map(|query| query.id.as_str()).collect()
            }
            Family::Intersection(_) => {
                let shows = |query: &&Query| words(&query.seen).contains(&answer) && !self.units_of(question, query).is_empty();
                queries.iter().filter(shows).map(|query| query.id.as_str()).collect()
            }
            Family::Chain(_) | Family::Rooted(_) => {
                let last = queries.iter().rev().find(|query| words(&query.seen).contains(&answer));
                last.map(|query| query.id.as_str()).into_iter().collect()
            }
        }
    }

    fn annotation(&self, question: &Question, queries: &[Query]) -> Annotation {
        let unit = |(i, text): (usize, String)| Unit { unit_id: format!("u{i}"), text: Some(text) };
        let deployed = |query: &Query| (query.id.clone(), self.units_of(question, query));
        Annotation {
            constraint_units: (1..).zip(question.constraints()).map(unit).collect(),
            query_unit_ids: queries.iter().map(deployed).collect::<BTreeMap<_, _>>(),
        }
    }

    fn units_of(&self, question: &Question, query: &Query) -> Vec<String> {
        let words = words(&query.text);
        let asks = |relation: &Relation| {
            [self.dialects.search.word(*relation), relation.word(), relation.page_word()].iter().any(|word| words.contains(word))
        };
        let lookups = (1..).zip(&question.lookups);
        let deployed = lookups.filter(|(_, (subject, relation))| words.contains(&subject.name()) && asks(relation));
        deployed.map(|(i, _): (usize, _)| format!("u{i}")).collect()
    }
}

/// The queries of a run. What a visit shows belongs to the query before it.
fn queries(messages: &[Message]) -> Vec<Query> {
    let mut queries: Vec<Query> = Vec::new();
    for (turn, message) in (0..).zip(messages).filter(|(_, message)| message.role == Role::Assistant) {
        let mut results = messages[turn as usize + 1..].iter().take_while(|m| m.role == Role::Tool);
        for call in &message.tool_calls {
            let result = results.next().map_or("", |m| m.content.as_str());
            let failed = result.starts_with("error") || result == "no results";
            let texts = call.arguments.get("query").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
            match call.name.as_str() {
                "search" => queries.extend(
                    texts.map(|text| (text.to_owned(), turn)).collect::<Vec<_>>().into_iter().map(|(text, turn)| Query {
                        id: String::new(),
                        turn,
                        text,
                        seen: result.to_owned(),
                        failed,
                    }),
                ),
                "visit" => {
                    if let Some(last) = queries.last_mut() {
                        last.seen = format!("{}\n{result}", last.seen);
                    }
                }
                _ => {}
            }
        }
    }
    for (i, query) in (1..).zip(&mut queries) {
        query.id = format!("q{i}");
    }
    queries
}

fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect()
}

fn node(id: &str, kind: NodeType) -> Node {
    Node { id: id.to_owned(), kind, text: None, turn: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        search_graph::metrics,
        world::{
            WorldConfig,
            gold::Form,
            question::{Family, MIXTURE, Split},
        },
    };

    /// A perfect run issues no query in vain but those that fail, covers every constraint that it searched for, and needs no prior knowledge.
    #[test]
    fn gold_runs_have_gold_graphs() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let library = world.library().expect("a library");
        for (family, _) in MIXTURE {
            for question in world.family(family, Split::Test, 20) {
                let tools = library.tools().expect("tools");
                let gold = world.gold(&question, Form::Plain, &tools).expect("a gold trajectory");
                let case = world.search_graph(&question, &gold, Some(&question.answer)).expect("a graph");
                let values = metrics(&case.graph, case.annotation.as_ref());
                let n_queries = case.graph.queries().count();
                let n_failed = case.graph.edges().iter().filter(|e| e.edge_kind == EdgeKind::FailureDerived).count();
                let by_link = usize::from(question.root.is_some());
                assert_eq!(n_queries - n_failed, question.hops() - by_link, "{}", question.id);
                if n_queries > 0 {
                    let expected = (n_queries - n_failed) as f64 / n_queries as f64;
                    assert_eq!((values.query_efficiency, values.pk_answer_edge), (expected, 0.0), "{}", question.id);
                    let covered = (question.hops() - by_link) as f64 / question.hops() as f64;
                    assert_eq!(values.answer_graph_coverage, Some(covered), "{}", question.id);
                }
            }
        }
    }

    #[test]
    fn an_answer_that_no_result_names_is_prior_knowledge() {
        let world = World::new(&WorldConfig::default().smooth()).expect("a world");
        let question = world.family(Family::Chain(2), Split::Test, 1).remove(0);
        let tools = world.library().and_then(|library| library.tools()).expect("tools");
        let gold = world.gold(&question, Form::Plain, &tools).expect("a gold trajectory");
        let case = world.search_graph(&question, &gold, Some("Nobody")).expect("a graph");
        let values = metrics(&case.graph, case.annotation.as_ref());
        assert_eq!((values.query_efficiency, values.pk_answer_edge), (0.0, 1.0));
        let silent = world.search_graph(&question, &gold, None).expect("a graph");
        assert_eq!(metrics(&silent.graph, None).pk_answer_edge, 0.0);
    }
}
