//! Search effectiveness by evidential query graphs (§4.3, App. G), as
//! [SearchAtlas](https://github.com/DukeNLP/SearchAtlas/blob/cc8cc1d5/docs/evaluation.md) defines them.
//!
//! A node is the question, prior knowledge, the answer, or one issued query; page visits are no nodes, what they show is evidence of the
//! queries. The paper calls [`Metrics::query_efficiency`] query utilization, [`Metrics::answer_graph_coverage`] constraint coverage,
//! and the mean of [`Metrics::pk_answer_edge`] PK->answer.

mod graph;
mod metrics;
mod matching;
mod lexical;

pub use graph::{ANSWER, Annotation, Case, Edge, EdgeKind, Graph, Node, NodeType, PRIOR_KNOWLEDGE, QUESTION, Unit};
pub use lexical::{BUILDER, lexical_case};
pub use matching::MatchRule;
pub use metrics::{METRICS, Means, Metrics, means, metrics};

#[cfg(test)]
mod tests;
