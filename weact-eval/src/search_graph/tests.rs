use std::{env, fs, path::PathBuf};

use serde_json::{Value, json};
use weact_core::{
    message::{Message, Role, ToolCall},
    trajectory::Trajectory,
};

use super::*;

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn golden(name: &str) -> Option<Value> {
    let Some(root) = env::var_os("WEACT_SHARED").map(PathBuf::from) else {
        println!("skipped: WEACT_SHARED is not set");
        return None;
    };
    let text = fs::read_to_string(root.join("golden/searchatlas").join(name)).expect("golden values");
    Some(serde_json::from_str(&text).expect("JSON"))
}

fn check_expected(record: &Value, id: &str) {
    let case = Case::read(record).unwrap_or_else(|e| panic!("{id}: {e}"));
    let values = metrics(&case.graph, case.annotation.as_ref()).to_map();
    for (name, expected) in record["expected"].as_object().expect("expected values") {
        match (expected.as_f64(), values[name].as_f64()) {
            (Some(expected), Some(value)) => assert!((value - expected).abs() < 1e-12, "{id}: {name} is {value}, not {expected}"),
            (expected, value) => assert_eq!(value, expected, "{id}: {name}"),
        }
    }
    assert_eq!(record["expected"].as_object().map(|e| e.len()), Some(METRICS.len()));
}

#[test]
fn every_golden_value_is_equal() {
    let (Some(mut fixture), Some(random)) = (golden("fixture.json"), golden("random_graphs.json")) else { return };
    fixture["case_id"] = json!("fixture");
    check_expected(&fixture, "fixture");
    for record in random.as_array().expect("cases") {
        check_expected(record, record["case_id"].as_str().expect("an id"));
    }
}

/// Nodes `q1` to `qN`, and edges in the form `from kind to`.
fn record(n_queries: usize, edges: &[(&str, &str, &str)]) -> Value {
    let names = ["Q0", "Prior_knowledge", "Answer"].map(str::to_owned);
    let nodes: Vec<Value> =
        names.into_iter().chain((1..=n_queries).map(|i| format!("q{i}"))).map(|id| json!({"id": id})).collect();
    let kind = |k: &str| match k {
        "e" => "evidence_derived",
        "p" => "prior_knowledge_derived",
        "f" => "failure_derived",
        "c" => "constraint_use",
        other => panic!("{other}"),
    };
    let edges: Vec<Value> = edges.iter().map(|(s, k, t)| json!({"source": s, "target": t, "edge_kind": kind(k)})).collect();
    json!({"case_id": "x", "graph": {"nodes": nodes, "edges": edges}})
}

fn of(record: &Value) -> Metrics {
    let case = Case::read(record).expect("a case");
    metrics(&case.graph, case.annotation.as_ref())
}

#[test]
fn edge_cases_have_their_values() {
    // Prior knowledge alone answers.
    let only_prior = of(&record(2, &[("Prior_knowledge", "p", "Answer")]));
    assert_eq!((only_prior.query_efficiency, only_prior.pk_answer_edge, only_prior.answer_graph_pk_density), (0.0, 1.0, None));
    // A failure edge to the answer, and evidence from the question, are no support.
    let no_support = of(&record(2, &[("q1", "f", "Answer"), ("Q0", "e", "q2")]));
    assert_eq!((no_support.query_efficiency, no_support.answer_support_directness), (0.0, 0.0));
    // Two longest paths: their union; a retry loop beside them; an edge that stands twice counts once.
    let edges = [("q1", "e", "q3"), ("q2", "e", "q3"), ("q1", "e", "q3"), ("q3", "e", "Answer"), ("q4", "f", "q5")];
    let two_paths = of(&record(5, &edges));
    assert_eq!((two_paths.query_efficiency, two_paths.answer_backbone_concentration), (0.6, 1.0));
    assert_eq!(two_paths.answer_support_directness, 1.0 / 3.0);
    // Without an annotation coverage is unknown; with no units it is 0.
    assert_eq!(two_paths.answer_graph_coverage, None);
    let mut without_units = record(1, &[("q1", "e", "Answer")]);
    without_units["annotation"] = json!({"constraint_units": [], "query_unit_ids": {"q1": []}});
    assert_eq!(of(&without_units).answer_graph_coverage, Some(0.0));
    // No queries at all, and no answer node.
    let empty = json!({"task_id": 7, "nodes": [{"id": "Q0"}], "edges": []});
    assert_eq!((Case::read(&empty).expect("a case").case_id.as_str(), of(&empty).query_efficiency), ("7", 0.0));
    // Ids of any form, in any order.
    let named = json!({"case_id": "n", "final_ground_truth_dag": {"nodes": [{"id": "zz", "type": "Query"}, {"id": "aa", "type": "Query"},
        {"id": "Answer"}], "edges": [{"source": "aa", "target": "zz", "edge_kind": "evidence_derived"},
        {"source": "zz", "target": "Answer", "edge_kind": "evidence_derived"}]}});
    assert_eq!(of(&named).query_efficiency, 1.0);
}

#[test]
fn what_is_no_graph_is_refused_with_its_reason() {
    let annotated = |annotation: Value| {
        let mut record = record(2, &[]);
        record["annotation"] = annotation;
        record
    };
    let unit = |ids: &Value| json!({"constraint_units": [{"unit_id": "u"}], "query_unit_ids": ids});
    for (record, why) in [
        (record(3, &[("q1", "e", "q2"), ("q2", "f", "q3"), ("q3", "f", "q1")]), "cycle among q1, q2, q3"),
        (record(1, &[("q1", "e", "q9")]), "there is no node \"q9\""),
        (json!({"case_id": "x", "graph": {"nodes": [{"id": "q1"}, {"id": "q1"}], "edges": []}}), "\"q1\" stands twice"),
        (json!({"case_id": "x", "graph": {"nodes": [{"id": "n"}], "edges": []}}), "type must be Query"),
        (
            json!({"case_id": "x", "graph": {"nodes": [{"id": "q1"}, {"id": "q2"}],
            "edges": [{"source": "q1", "target": "q2", "edge_kind": "guess"}]}}),
            "unknown variant `guess`",
        ),
        (json!({"case_id": "x", "graph": {"nodes": 3}}), "no list of nodes"),
        (json!({"graph": {"nodes": [], "edges": []}}), "no case_id"),
        (annotated(unit(&json!({"q1": ["u"]}))), "query \"q2\" is not listed"),
        (annotated(unit(&json!({"q1": ["v"], "q2": []}))), "unknown unit \"v\""),
        (annotated(unit(&json!({"q1": ["u", "u"], "q2": []}))), "unit \"u\" twice"),
        (annotated(unit(&json!({"q1": [], "q2": [], "q3": []}))), "there is no query \"q3\""),
        (annotated(json!({"constraint_units": [{"unit_id": "u"}, {"unit_id": "u"}], "query_unit_ids": {}})), "stands twice"),
    ] {
        let error = Case::read(&record).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn means_say_how_often_a_value_is_undefined() {
    let cases = [of(&record(2, &[("q1", "e", "Answer")])), of(&record(1, &[("Prior_knowledge", "p", "Answer")]))];
    let means = means(&cases);
    assert_eq!((means.n, means.means["query_efficiency"], means.means["pk_answer_edge"]), (2, Some(0.25), Some(0.5)));
    assert_eq!((means.means["answer_graph_coverage"], means.undefined["answer_graph_coverage"]), (None, 2));
    assert_eq!((means.means["answer_graph_pk_density"], means.undefined["answer_graph_pk_density"]), (Some(0.0), 1));
}

fn exchange(query: &Value, result: &str) -> [Message; 2] {
    let call = ToolCall::new("search", json!({"query": query}).as_object().expect("an object").clone());
    let answer = Message::tool_result(&call, result.to_owned());
    [Message::calling("", vec![call]), answer]
}

#[test]
fn a_trace_gives_its_lexical_graph() {
    let mut messages = vec![Message::text(Role::User, "In what year did the fictional Example Hall open?")];
    messages.extend(exchange(
        &json!(["Example Hall opening year", "Example Hall architect"]),
        "1. Example Hall opened in 1942 by Orla Venn",
    ));
    messages.extend(exchange(&json!("Orla Venn biography"), ""));
    messages.extend(exchange(&json!(["Orla Venn life"]), "Orla Venn was born in 1901"));
    messages.push(Message::text(Role::Assistant, "<answer>1942</answer>"));
    let trajectory = Trajectory::new("t".to_owned(), Vec::new(), messages, Vec::new()).expect("a trajectory");
    let units = [("u1", "opening year"), ("u2", "Example Hall"), ("u3", "tallest mountain")]
        .map(|(id, text)| Unit { unit_id: id.to_owned(), text: Some(text.to_owned()) });
    let case = lexical_case(&trajectory, Some(&units)).expect("a graph");
    let edge = |source: &str, target: &str, edge_kind| {
        case.graph.edges().contains(&Edge { source: source.to_owned(), target: target.to_owned(), edge_kind })
    };
    assert_eq!(case.graph.queries().collect::<Vec<_>>(), ["q1", "q2", "q3", "q4"]);
    assert!(edge(QUESTION, "q1", EdgeKind::ConstraintUse) && edge("q1", "q3", EdgeKind::EvidenceDerived));
    assert!(edge(PRIOR_KNOWLEDGE, "q3", EdgeKind::PriorKnowledgeDerived), "no result says biography");
    assert!(edge("q3", "q4", EdgeKind::FailureDerived) && !edge("q1", "q2", EdgeKind::EvidenceDerived));
    assert_eq!(case.graph.edges().iter().filter(|e| e.target == ANSWER).count(), 1);
    let annotation = case.annotation.expect("units were given");
    assert_eq!(annotation.query_unit_ids["q1"], ["u1", "u2"]);
    assert_eq!((annotation.check(&case.graph).is_ok(), case.builder.as_deref()), (true, Some("lexical")));
}

#[test]
fn matchers_need_what_they_say() {
    for (unit, query, token, distinctive) in [
        ("born in Torzhok", "Torzhok birthplace", true, false),
        ("captain of the vessel Orun Vale", "captain Orun", true, true),
        ("captain of the vessel Orun Vale", "captain of ships", false, false),
        ("international architecture prize", "architecture", false, true),
        ("novels", "a novel", false, true),
        ("the", "the", false, false),
        ("城市", "城市", false, false),
    ] {
        assert_eq!((token_coverage(unit, query), distinctive_terms(unit, query)), (token, distinctive), "{unit} / {query}");
    }
}
