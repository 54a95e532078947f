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
    let case = Case::read(record, None).unwrap_or_else(|e| panic!("{id}: {e}"));
    let values = metrics(&case.graph, case.annotation.as_ref()).to_map();
    for (name, expected) in record["expected"].as_object().expect("expected values") {
        match (expected.as_f64(), values[name].as_f64()) {
            (Some(expected), Some(value)) => assert!((value - expected).abs() < 1e-12, "{id}: {name} is {value}, not {expected}"),
            (expected, value) => assert_eq!(value, expected, "{id}: {name}"),
        }
    }
    assert_eq!(record["expected"].as_object().map(|e| e.len()), Some(METRICS.len()));
    let written = serde_json::to_value(&case).expect("JSON");
    assert_eq!(serde_json::from_value::<Case>(written).expect("what was written"), case);
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
    let case = Case::read(record, None).expect("a case");
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
    assert_eq!((Case::read(&empty, None).expect("a case").case_id.as_str(), of(&empty).query_efficiency), ("7", 0.0));
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
        (
            record(4, &[("q1", "e", "q2"), ("q2", "f", "q3"), ("q3", "f", "q1"), ("q4", "e", "q1"), ("q3", "e", "Answer")]),
            "cycle among q1, q2, q3",
        ),
        (record(1, &[("q1", "f", "q1")]), "cycle among q1"),
        (json!({"case_id": "x", "nodes": [{"id": "Answer", "type": "Query"}], "edges": []}), "this id is no query's"),
        (json!({"case_id": "x", "nodes": [{"id": "", "type": "Query"}], "edges": []}), "can't be of type"),
        (json!({"case_id": "x", "nodes": [{"id": "q1", "text": 3}], "edges": []}), "text: it can't be 3"),
        (json!({"case_id": "x", "nodes": [{"id": "q1", "turn": -1}], "edges": []}), "turn: it can't be -1"),
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
        (annotated(unit(&Value::Null)), "no query_unit_ids"),
        (annotated(json!({"case_id": "y", "constraint_units": [], "query_unit_ids": {}})), "is of case \"y\""),
        (annotated(unit(&json!({"q1": ["v"], "q2": []}))), "unknown unit \"v\""),
        (annotated(unit(&json!({"q1": ["u", "u"], "q2": []}))), "unit \"u\" twice"),
        (annotated(unit(&json!({"q1": [], "q2": [], "q3": []}))), "there is no query \"q3\""),
        (annotated(json!({"constraint_units": [{"unit_id": "u"}, {"unit_id": "u"}], "query_unit_ids": {}})), "stands twice"),
    ] {
        let error = Case::read(&record, None).expect_err(why).to_string();
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

#[test]
fn a_special_id_belongs_to_its_kind() {
    let node = |id: &str, kind| Node { id: id.to_owned(), kind, text: None, turn: None };
    for (id, kind) in [("a", NodeType::Answer), (ANSWER, NodeType::Query), (QUESTION, NodeType::PriorKnowledge)] {
        assert!(Graph::new(vec![node(id, kind)], Vec::new()).is_err(), "{id} {kind:?}");
    }
}

fn call(name: &str, arguments: &Value, result: &str) -> [Message; 2] {
    let call = ToolCall::new(name, arguments.as_object().expect("an object").clone());
    let answer = Message::tool_result(&call, result.to_owned());
    [Message::calling("", vec![call]), answer]
}

fn search(query: &Value, result: &str) -> [Message; 2] {
    call("search", &json!({"query": query}), result)
}

/// The lexical graph of a question, some calls and the last message.
fn lexical(question: &str, calls: &[[Message; 2]], last: &str) -> Case {
    let mut messages = vec![Message::text(Role::User, question)];
    messages.extend(calls.iter().flatten().cloned());
    messages.push(Message::text(Role::Assistant, last));
    let trajectory = Trajectory::new("t".to_owned(), Vec::new(), messages, Vec::new()).expect("a trajectory");
    lexical_case(&trajectory).expect("a graph")
}

/// Its edges as `q1 e q2`.
fn edges(case: &Case) -> Vec<String> {
    let kind = |edge: &Edge| match edge.edge_kind {
        EdgeKind::ConstraintUse => 'c',
        EdgeKind::EvidenceDerived => 'e',
        EdgeKind::PriorKnowledgeDerived => 'p',
        EdgeKind::FailureDerived => 'f',
    };
    case.graph.edges().iter().map(|edge| format!("{} {} {}", edge.source, kind(edge), edge.target)).collect()
}

#[test]
fn a_trace_gives_its_lexical_graph() {
    let calls = [
        search(&json!(["Example Hall opening year", "Example Hall architect"]), "1. Example Hall opened in 1942 by Orla Venn"),
        search(&json!("Orla Venn biography"), "no results"),
        search(&json!(["Orla Venn life"]), "Search results for query: Orla Venn life\n1. Orla Venn was born in 1901"),
        search(&json!("Example Hall 1901 life"), "1. a ledger"),
    ];
    let case = lexical("In what year did the fictional Example Hall open?", &calls, "<answer>1942.</answer>");
    assert_eq!(case.graph.queries().collect::<Vec<_>>(), ["q1", "q2", "q3", "q4", "q5"]);
    let expected = [
        "Prior_knowledge p q1", // opening
        "Prior_knowledge p q2", // architect
        "Prior_knowledge p q3", // biography: the failed call showed nothing
        "Prior_knowledge p q4", // life
        "Prior_knowledge p q5", // life: the head of the result only repeats it
        "Q0 c q1",
        "Q0 c q2",
        "Q0 c q5",
        "q1 e Answer",
        "q1 e q3",
        "q1 e q4",
        "q3 f q4",
        "q4 e q5",
    ];
    assert_eq!(edges(&case), expected);
    assert_eq!(case.builder.as_deref(), Some(BUILDER));
}

#[test]
fn what_a_result_shows_belongs_to_its_query() {
    let several = "A search for 'hall opening' found 1 result:\n1. The hall (http://x/hall) dates from 1942\n=======\n\
                   A search for 'venn biography' found 1 result:\n1. Venn (http://x/venn) came from Torzhok\n";
    let calls = [
        search(&json!(["hall opening", "venn biography"]), several),
        call("visit", &json!({"url": ["http://x/hall"], "goal": "granite"}), "Evidence for user goal granite:\nbuilt of basalt"),
        search(&json!("Torzhok basalt granite biography"), "nothing of the kind"),
    ];
    let case = lexical("Which?", &calls, "<answer>Basalt</answer>");
    // Torzhok is from the second block, basalt from the page that the first lists. Granite and biography are the policy's own words.
    for edge in ["q2 e q3", "q1 e q3", "Prior_knowledge p q3", "q1 e Answer"] {
        assert!(edges(&case).iter().any(|e| e == edge), "{edge}: {:?}", edges(&case));
    }
    assert_eq!(edges(&case).len(), 6, "and prior knowledge of q1 and q2: {:?}", edges(&case));
}

#[test]
fn an_answer_rests_on_as_few_queries_as_show_it() {
    let calls = [
        search(&json!("a1 towns"), "1. Torzhok lies on the Tvertsa"),
        search(&json!("b2 people"), "1. Orla Venn, aged 17, of Torzhok; 北京市"),
    ];
    for (answer, expected) in [
        ("Torzhok", &["q1 e Answer"][..]),
        ("Tvertsa and Orla Venn", &["q1 e Answer", "q2 e Answer"]),
        ("Torzhok Venn", &["q2 e Answer"]),
        ("Torzhok Nobody", &["Prior_knowledge p Answer", "q1 e Answer"]),
        ("17", &["q2 e Answer"]),
        ("7", &["Prior_knowledge p Answer"]),
        ("北京", &["q2 e Answer"]),
        ("上海", &["Prior_knowledge p Answer"]),
        ("I cannot tell.", &[]),
    ] {
        let case = lexical("Which?", &calls, &format!("<answer>{answer}</answer>"));
        let own: Vec<String> = edges(&case).into_iter().filter(|edge| edge.ends_with("Answer")).collect();
        assert_eq!(own, expected, "{answer}");
    }
    let silent = lexical("Which?", &calls, "");
    assert!(silent.graph.nodes().iter().all(|node| node.id != ANSWER));
}

#[test]
fn units_are_matched_where_no_memberships_are_listed() {
    let mut record = record(2, &[("q1", "e", "Answer")]);
    record["graph"]["nodes"][3]["text"] = json!("Example Hall opening year");
    record["graph"]["nodes"][4]["text"] = json!("Orla Venn");
    record["annotation"] =
        json!({"constraint_units": [{"unit_id": "u1", "text": "opening of Example Hall"}, {"unit_id": "u2", "text": "Venn"}]});
    let case = Case::read(&record, Some(MatchRule::TokenCoverage)).expect("a case");
    let annotation = case.annotation.expect("matched");
    assert_eq!(
        (&annotation.query_unit_ids["q1"], &annotation.query_unit_ids["q2"]),
        (&vec!["u1".to_owned()], &vec!["u2".to_owned()])
    );
    record["annotation"]["constraint_units"][1]["text"] = json!(" ");
    let error = Case::read(&record, Some(MatchRule::TokenCoverage)).expect_err("no text").to_string();
    assert!(error.contains("unit \"u2\" has no text"), "{error}");
}

#[test]
fn match_rules_need_what_they_say() {
    for (unit, query, token, distinctive) in [
        ("born in Torzhok", "Torzhok birthplace", true, false),
        ("captain of the vessel Orun Vale", "captain Orun", true, true),
        ("captain of the vessel Orun Vale", "captain of ships", false, false),
        ("international architecture prize", "architecture", false, true),
        ("novels", "a novel", false, true),
        ("old churches", "an old church", true, true),
        ("built in 1942 by 12 men", "1942 12", true, false),
        ("1942 or 1943", "1943 1942", true, true),
        ("the", "the", false, false),
        ("城市", "城市", false, false),
    ] {
        let own = [MatchRule::TokenCoverage, MatchRule::DistinctiveTerms].map(|rule| rule.matches(unit, query));
        assert_eq!(own, [token, distinctive], "{unit} / {query}");
    }
}
