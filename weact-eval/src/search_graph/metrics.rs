//! The metrics of one graph, and their means.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Map, Value};

use super::graph::{ANSWER, Annotation, Edge, EdgeKind, Graph, PRIOR_KNOWLEDGE};

/// The metrics of one case. `None` is an undefined value: no annotation, or nothing to divide by where the definition leaves it open.
///
/// `F` are the queries with evidence for the answer, `R` these and their ancestors by evidence, `E_R` the evidence edges within `R`, `B` the
/// edges of all longest paths of `E_R` that end in `F`, `P` their ends (or `F` where there are none), `m(q)` the constraints of a query.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// `|R| / |Q|`; 0 without queries.
    pub query_efficiency: f64,
    /// Share of the constraints in the queries of `R`; 0 without constraints.
    pub answer_graph_coverage: Option<f64>,
    /// Share in `P`.
    pub primary_path_coverage: Option<f64>,
    /// Share in `F`.
    pub direct_frontier_coverage: Option<f64>,
    /// Share in all queries.
    pub trajectory_coverage: Option<f64>,
    /// 1 if prior knowledge leads to the answer, else 0.
    pub pk_answer_edge: f64,
    /// `|B|` over all evidence edges between queries; 0 without any.
    pub answer_backbone_concentration: f64,
    /// `|B| / |E_R|`; 0 without any.
    pub answer_backbone_concentration_within_answer_graph: f64,
    /// `|F| / (|F| + |E_R|)`; 0 without any.
    pub answer_support_directness: f64,
    /// Constraints deployed in `P` over those deployed in `R`, each deployment counted; 0 without any.
    pub backbone_constraint_share: Option<f64>,
    /// Prior knowledge's edges to `R` and to the answer, per query of `R`; may be above 1.
    pub answer_graph_pk_density: Option<f64>,
    /// The same for `F`.
    pub direct_frontier_pk_density: Option<f64>,
}

/// Their public names.
pub const METRICS: [&str; 12] = [
    "query_efficiency",
    "answer_graph_coverage",
    "primary_path_coverage",
    "direct_frontier_coverage",
    "trajectory_coverage",
    "pk_answer_edge",
    "answer_backbone_concentration",
    "answer_backbone_concentration_within_answer_graph",
    "answer_support_directness",
    "backbone_constraint_share",
    "answer_graph_pk_density",
    "direct_frontier_pk_density",
];

/// Means over cases, each weighing the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Means {
    /// Cases.
    pub n: usize,
    /// By metric: the mean over the cases in which it is defined; null where it is in none.
    pub means: BTreeMap<&'static str, Option<f64>>,
    /// By metric: in how many cases it is undefined. Metrics defined everywhere are left out.
    pub undefined: BTreeMap<&'static str, usize>,
}

impl Metrics {
    /// By name, undefined ones as null.
    pub fn to_map(self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => unreachable!("numbers and nulls under names"),
        }
    }
}

/// The means of `cases`.
pub fn means(cases: &[Metrics]) -> Means {
    let maps: Vec<Map<String, Value>> = cases.iter().map(|case| case.to_map()).collect();
    let mut means = Means { n: cases.len(), means: BTreeMap::new(), undefined: BTreeMap::new() };
    for name in METRICS {
        let defined: Vec<f64> = maps.iter().filter_map(|map| map[name].as_f64()).collect();
        let mean = (!defined.is_empty()).then(|| defined.iter().sum::<f64>() / defined.len() as f64);
        means.means.insert(name, mean);
        if defined.len() < cases.len() {
            means.undefined.insert(name, cases.len() - defined.len());
        }
    }
    means
}

/// The metrics of `graph`; `annotation` has been [checked](Annotation::check) against it.
pub fn metrics(graph: &Graph, annotation: Option<&Annotation>) -> Metrics {
    let parts = Parts::of(graph);
    let Parts { queries, frontier, support, all_edges, edges, backbone, primary } = &parts;
    let prior: BTreeSet<&str> = of_kind(graph, EdgeKind::PriorKnowledgeDerived)
        .filter(|edge| edge.source == PRIOR_KNOWLEDGE)
        .map(|edge| edge.target.as_str())
        .collect();
    let pk_answer = prior.contains(ANSWER);
    let density = |set: &BTreeSet<&str>| {
        let n = set.iter().filter(|query| prior.contains(*query)).count() + usize::from(pk_answer);
        (!set.is_empty()).then(|| n as f64 / set.len() as f64)
    };
    let coverage = |set: &BTreeSet<&str>| annotation.map(|annotation| covered(annotation, set));
    let n_deployed = |annotation: &Annotation, set: &BTreeSet<&str>| {
        set.iter().map(|query| annotation.query_unit_ids.get(*query).map_or(0, Vec::len)).sum::<usize>()
    };
    Metrics {
        query_efficiency: ratio(support.len(), queries.len()),
        answer_graph_coverage: coverage(support),
        primary_path_coverage: coverage(primary),
        direct_frontier_coverage: coverage(frontier),
        trajectory_coverage: coverage(queries),
        pk_answer_edge: f64::from(u8::from(pk_answer)),
        answer_backbone_concentration: ratio(backbone.len(), all_edges.len()),
        answer_backbone_concentration_within_answer_graph: ratio(backbone.len(), edges.len()),
        answer_support_directness: ratio(frontier.len(), frontier.len() + edges.len()),
        backbone_constraint_share: annotation.map(|a| ratio(n_deployed(a, primary), n_deployed(a, support))),
        answer_graph_pk_density: density(support),
        direct_frontier_pk_density: density(frontier),
    }
}

/// 0 where there is nothing to divide by.
fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn covered(annotation: &Annotation, set: &BTreeSet<&str>) -> f64 {
    let deployed: BTreeSet<&String> = set.iter().filter_map(|query| annotation.query_unit_ids.get(*query)).flatten().collect();
    ratio(deployed.len(), annotation.constraint_units.len())
}

fn of_kind(graph: &Graph, kind: EdgeKind) -> impl Iterator<Item = &Edge> {
    graph.edges().iter().filter(move |edge| edge.edge_kind == kind)
}

/// The sets that the metrics are made of.
struct Parts<'a> {
    queries: BTreeSet<&'a str>,
    frontier: BTreeSet<&'a str>,
    support: BTreeSet<&'a str>,
    /// Evidence edges between queries.
    all_edges: BTreeSet<(&'a str, &'a str)>,
    /// Those within `support`.
    edges: BTreeSet<(&'a str, &'a str)>,
    backbone: BTreeSet<(&'a str, &'a str)>,
    primary: BTreeSet<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(graph: &'a Graph) -> Self {
        let queries: BTreeSet<&str> = graph.queries().collect();
        let evidence: Vec<&Edge> =
            of_kind(graph, EdgeKind::EvidenceDerived).filter(|e| queries.contains(e.source.as_str())).collect();
        let frontier: BTreeSet<&str> = evidence.iter().filter(|e| e.target == ANSWER).map(|e| e.source.as_str()).collect();
        let all_edges: BTreeSet<(&str, &str)> = evidence
            .iter()
            .filter(|e| queries.contains(e.target.as_str()))
            .map(|e| (e.source.as_str(), e.target.as_str()))
            .collect();
        let mut support = frontier.clone();
        let mut unseen: Vec<&str> = frontier.iter().copied().collect();
        while let Some(query) = unseen.pop() {
            for (source, _) in all_edges.iter().filter(|(_, target)| *target == query) {
                if support.insert(source) {
                    unseen.push(source);
                }
            }
        }
        let edges: BTreeSet<(&str, &str)> = all_edges.iter().copied().filter(|(_, target)| support.contains(target)).collect();
        let backbone = backbone(&support, &frontier, &edges);
        let ends: BTreeSet<&str> = backbone.iter().flat_map(|&(source, target)| [source, target]).collect();
        let primary = if ends.is_empty() { frontier.clone() } else { ends };
        Self { queries, frontier, support, all_edges, edges, backbone, primary }
    }
}

/// The edges of all longest paths that end in the frontier.
fn backbone<'a>(
    support: &BTreeSet<&'a str>,
    frontier: &BTreeSet<&'a str>,
    edges: &BTreeSet<(&'a str, &'a str)>,
) -> BTreeSet<(&'a str, &'a str)> {
    // Longest path up to each query, and from each to the frontier: relaxed until nothing changes; there is no cycle.
    let mut up: BTreeMap<&str, usize> = support.iter().map(|query| (*query, 0)).collect();
    let mut down: BTreeMap<&str, Option<usize>> =
        support.iter().map(|query| (*query, frontier.contains(query).then_some(0))).collect();
    let mut changed = true;
    while changed {
        changed = false;
        for &(source, target) in edges {
            if up[source] + 1 > up[target] {
                up.insert(target, up[source] + 1);
                changed = true;
            }
            if let Some(below) = down[target]
                && down[source].is_none_or(|own| below + 1 > own)
            {
                down.insert(source, Some(below + 1));
                changed = true;
            }
        }
    }
    let depth = frontier.iter().map(|query| up[query]).max().unwrap_or(0);
    edges.iter().copied().filter(|(source, target)| down[target].is_some_and(|below| up[source] + 1 + below == depth)).collect()
}
