use std::{env, fs};

use serde_json::json;

use super::*;
use crate::world::{World, WorldConfig, tasks::BENCHMARKS};

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn shared() -> Option<PathBuf> {
    let root = env::var_os("WEACT_SHARED").map(PathBuf::from);
    if root.is_none() {
        println!("skipped: WEACT_SHARED is not set");
    }
    root
}

fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, text).expect("a writable folder");
    path
}

/// Every real sample, whole.
#[test]
fn real_files_load_whole() {
    let Some(root) = shared() else { return };
    for (benchmark, path, n) in [
        (Benchmark::TwoWiki, "2wiki/2wiki.json", 50),
        (Benchmark::TwoWiki, "2wiki/2wiki_500.jsonl", 50),
        (Benchmark::TwoWiki, "2wiki_predictions/2wiki_qwen.jsonl", 25),
        (Benchmark::Bamboogle, "bamboogle/bamboogle.json", 50),
        (Benchmark::Bamboogle, "bamboogle/bamboogle.jsonl", 50),
        (Benchmark::BrowseComp, "browsecomp_format/browse_comp_test_set.csv", 3),
        (Benchmark::DeepResearchBench, "deepresearch_bench", 15),
        (Benchmark::DeepResearchBench, "deepresearch_bench/criteria.jsonl", 15),
        (Benchmark::Frames, "frames/frames.json", 40),
        (Benchmark::Frames, "frames/test.tsv", 40),
        (Benchmark::IfEval, "ifeval/input_data.jsonl", 50),
        (Benchmark::MmluPro, "mmlu_pro/model_outputs_Mistral-7B-Instruct-v0.2_5shots.json", 40),
        (Benchmark::MuSiQue, "musique/musique.json", 50),
        (Benchmark::MuSiQue, "musique/musique_500.jsonl", 50),
        (Benchmark::SciBench, "scibench", 48),
        (Benchmark::SciBench, "scibench/fund_sol.json", 5),
        (Benchmark::WebWalkerQa, "webdancer_qa/sample_qa.jsonl", 40),
        (Benchmark::WebWalkerQa, "webshaper/webshaper.500.jsonl", 20),
        (Benchmark::WebWalkerQa, "webwalkerqa/main.reconstructed.jsonl", 40),
        (Benchmark::WebWalkerQa, "webwalkerqa/test.json", 40),
        (Benchmark::XbenchDeepSearch, "xbench/DeepSearch-2505.csv", 20),
        (Benchmark::XbenchDeepSearch, "xbench/DeepSearch-2510.csv", 20),
    ] {
        let tasks = read(benchmark, &root.join("data/bench").join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(tasks.len(), n, "{path}");
        let judged = matches!(benchmark, Benchmark::DeepResearchBench | Benchmark::IfEval);
        assert!(tasks.iter().all(|task| judged == task.gold.is_empty()), "{path}");
    }
}

#[test]
fn xbench_decrypts_to_the_published_digests() {
    let Some(root) = shared() else { return };
    let golden = fs::read_to_string(root.join("golden/eval/xbench_decrypted_digests.json")).expect("golden values");
    let golden: Vec<Value> = serde_json::from_str(&golden).expect("JSON");
    let mut n = 0;
    for name in ["DeepSearch-2505.csv", "DeepSearch-2510.csv"] {
        for task in read(Benchmark::XbenchDeepSearch, &root.join("data/bench/xbench").join(name)).expect("tasks") {
            let Some(row) = golden.iter().find(|row| row["id"] == task.id.as_str()) else { continue };
            let steps = task.more["reference_steps"].as_str().expect("steps");
            for (key, text) in [("prompt", task.question.as_str()), ("answer", &task.gold[0]), ("reference_steps", steps)] {
                assert_eq!(row[format!("{key}_bytes")], text.len(), "{}: {key}", task.id);
                let digest = weact_core::io::tensors::hex(&Sha256::digest(text));
                assert_eq!(row[format!("{key}_sha256")], digest.as_str(), "{}: {key}", task.id);
            }
            n += 1;
        }
    }
    assert_eq!(n, golden.len());
}

#[test]
fn browsecomp_s_fictional_rows_decrypt_to_their_plain_text() {
    let Some(root) = shared() else { return };
    let dir = root.join("data/bench/browsecomp_format");
    let plain: Vec<Value> = serde_json::from_str(&fs::read_to_string(dir.join("plain.json")).expect("plain rows")).expect("JSON");
    let tasks = read(Benchmark::BrowseComp, &dir.join("browse_comp_test_set.csv")).expect("tasks");
    for (task, row) in tasks.iter().zip(&plain) {
        assert_eq!((&row["problem"], &row["answer"]), (&json!(task.question), &json!(task.gold[0])));
        assert_eq!(row["problem_topic"], task.more["problem_topic"]);
    }
    assert_eq!(tasks.len(), plain.len());
}

/// What the toy world writes in the eight formats reads back the same.
#[test]
fn what_is_written_reads_back_the_same() {
    let dir = tempfile::tempdir().expect("a folder");
    let world = World::new(&WorldConfig::default()).expect("the default world");
    for (benchmark, name) in BENCHMARKS.into_iter().zip([
        "metadata.jsonl",
        "dev.json",
        "bamboogle.csv",
        "musique.jsonl",
        "main.jsonl",
        "DeepSearch.csv",
        "browse_comp_test_set.csv",
        "test.tsv",
    ]) {
        let tasks = world.tasks(benchmark, 12).expect("tasks");
        let path = dir.path().join(name);
        write(benchmark, &path, &tasks).expect("written");
        assert_eq!(read(benchmark, &path).expect("readable"), tasks, "{benchmark}");
        let text = fs::read_to_string(&path).expect("text");
        assert_eq!(text.contains(&tasks[0].question), !benchmark.is_secret(), "{benchmark}");
    }
}

/// Small files of our own in the formats of those that can't be passed on.
#[test]
fn formats_without_a_sample_are_read_from_files_of_our_own() {
    let dir = tempfile::tempdir().expect("a folder");
    file(&dir, "map.png", "no picture");
    let gaia = file(
        &dir,
        "metadata.jsonl",
        concat!(
            r#"{"task_id": "a-1", "Question": "How many?", "Level": 1, "Final answer": "17", "file_name": "", "Annotator Metadata": {"Steps": "1"}}"#,
            "\n",
            r#"{"task_id": "a-2", "Question": "Where?", "Level": "2", "Final answer": "Torn", "file_name": "map.png", "Annotator Metadata": {}}"#,
        ),
    );
    let tasks = read(Benchmark::Gaia, dir.path()).expect("tasks");
    assert_eq!(tasks, read(Benchmark::Gaia, &gaia).expect("tasks"));
    assert_eq!((tasks[1].files.len(), &tasks[1].more["Level"]), (1, &json!("2")));
    fs::remove_file(dir.path().join("map.png")).expect("it was there");
    let error = read(Benchmark::Gaia, &gaia).expect_err("a missing attachment").to_string();
    assert!(error.contains("metadata.jsonl:2") && error.contains("map.png"), "{error}");

    let two_wiki = json!([{"_id": "x", "question": "Who?", "answer": "Ada", "answer_id": "Q7", "type": "inference",
        "supporting_facts": [["Ada", 0]], "context": [["Ada", ["She is."]]], "evidences": [["Ada", "is", "she"]], "entity_ids": "Q7"}]);
    let path = file(&dir, "dev.json", &two_wiki.to_string());
    assert_eq!(read(Benchmark::TwoWiki, &path).expect("tasks")[0].gold, ["Ada"]);
    file(&dir, "id_aliases.json", r#"{"Q_id": "Q7", "aliases": ["Ada L.", "Ada"], "demonyms": []}"#);
    assert_eq!(read(Benchmark::TwoWiki, &path).expect("tasks")[0].gold, ["Ada", "Ada L."]);

    for (benchmark, row, id, gold) in [
        (
            Benchmark::MuSiQue,
            json!({"id": "2hop__1_2", "question": "q", "answer": "a", "answer_aliases": ["b"], "answerable": true,
            "paragraphs": [], "question_decomposition": []}),
            "2hop__1_2",
            vec!["a", "b"],
        ),
        (
            Benchmark::MegaScience,
            json!({"question": "q", "answer": "long", "reference_answer": "4", "subject": "physics", "source": "s"}),
            "8e35c2cd3bf6641b",
            vec!["4"],
        ),
        (
            Benchmark::Ds1000,
            json!({"prompt": "p", "reference_code": "x", "metadata": {"problem_id": 3}, "code_context": "c"}),
            "3",
            vec![],
        ),
        (
            Benchmark::ResearchQa,
            json!({"id": "r", "query": "q", "rubric": [{"rubric_item": "says so", "type": "t"}]}),
            "r",
            vec![],
        ),
        (
            Benchmark::Bamboogle,
            json!({"id": "n", "Question": "q", "Answer": [["English horse race Derby"]]}),
            "n",
            vec!["English horse race Derby"],
        ),
        (
            Benchmark::MmluPro,
            json!({"question_id": 70, "question": "q", "options": ["x", "y"], "answer": "B", "answer_index": 1}),
            "70",
            vec!["B"],
        ),
    ] {
        let path = file(&dir, "one.jsonl", &row.to_string());
        let task = read(benchmark, &path).unwrap_or_else(|e| panic!("{benchmark}: {e}")).remove(0);
        assert_eq!((task.id.as_str(), task.gold.iter().map(String::as_str).collect::<Vec<_>>()), (id, gold), "{benchmark}");
        if benchmark == Benchmark::MmluPro {
            assert_eq!(task.question, "q\nA. x\nB. y");
        }
    }
}

#[test]
fn scibench_asks_for_the_unit_and_deepresearch_bench_has_its_references() {
    let dir = tempfile::tempdir().expect("a folder");
    for (unit, asked) in [
        ("$10^{-15} \\mathrm{~m}$", " The unit of the answer is \\mathrm{~m}."),
        (" MJ", " The unit of the answer is MJ."),
        (" ", ""),
    ] {
        let row =
            json!({"problem_text": "How far?", "answer_number": " 7.8", "unit": unit, "source": "fund", "problemid": " 1.1 "});
        let task = read(Benchmark::SciBench, &file(&dir, "one.json", &json!([row]).to_string())).expect("a task").remove(0);
        assert_eq!((task.id.as_str(), task.question), ("fund:1.1", format!("How far?{asked}")));
    }
    file(&dir, "query.jsonl", r#"{"id": 1, "topic": "t", "language": "en", "prompt": "Write."}"#);
    file(
        &dir,
        "criteria.jsonl",
        r#"{"id": 1, "prompt": "Write.", "dimension_weight": {"insight": 1.0}, "criterions": {"insight": []}}"#,
    );
    file(&dir, "reference.jsonl", r#"{"id": 1, "prompt": "Write.", "article": "The report."}"#);
    let task = read(Benchmark::DeepResearchBench, dir.path()).expect("a task").remove(0);
    assert_eq!((&task.more["reference"], &task.more["dimension_weight"]["insight"]), (&json!("The report."), &json!(1.0)));
    file(&dir, "criteria.jsonl", r#"{"id": 2, "dimension_weight": {}, "criterions": {}}"#);
    let error = read(Benchmark::DeepResearchBench, dir.path()).expect_err("none for it").to_string();
    assert!(error.contains("no criteria for task \"1\""), "{error}");
}

#[test]
fn each_malformation_is_named_with_its_place() {
    let dir = tempfile::tempdir().expect("a folder");
    let good = r#"{"id": "a", "question": "q", "answer": "x"}"#;
    let cases = [
        ("r.jsonl", format!("\u{feff}{good}\r\n{{\"id\": \"b\", \"question\": \"q\", \"ans"), "r.jsonl:2: "),
        ("r.jsonl", format!("{good}\n\n{good}"), "r.jsonl:3: id \"a\" stands at"),
        ("r.jsonl", r#"{"id": "a", "query": "q", "answer": "x"}"#.to_owned(), "r.jsonl:1: no question: expected text"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": null}"#.to_owned(), "r.jsonl:1: no answer"),
        ("r.jsonl", r#"{"id": "a", "question": {"x": 1}, "answer": "x"}"#.to_owned(), "no question"),
        ("r.jsonl", r#"{"id": "a", "question": "  ", "answer": "x"}"#.to_owned(), "the question is empty"),
        ("r.jsonl", "[1]".to_owned(), "expected an object, found [1]"),
        ("r.json", r#"[{"id": "a", "question": "q", "answer": "x"}, 7]"#.to_owned(), "row 2: expected an object, found 7"),
        ("r.json", r#"[{"id": "a","#.to_owned(), "r.json:1: EOF"),
        ("r.csv", "id,question,answer\na,\"q,x\n".to_owned(), "a quotation mark is not closed"),
        ("r.csv", "id,question,answer\na,q\n".to_owned(), "r.csv:2: "),
        ("r.csv", "id,question,answer\n".to_owned(), "has no rows"),
        ("r.jsonl", String::new(), "has no rows"),
        ("r.txt", good.to_owned(), "unknown format"),
    ];
    for (name, text, expected) in cases {
        let path = file(&dir, name, &text);
        let error = read(Benchmark::MuSiQue, &path).expect_err(&text).to_string();
        assert!(error.contains(expected), "{error}");
    }
    fs::write(dir.path().join("r.jsonl"), b"{\"id\": \"\xff\"}").expect("written");
    let error = read(Benchmark::MuSiQue, &dir.path().join("r.jsonl")).expect_err("no text").to_string();
    assert!(error.contains("r.jsonl:1: is not UTF-8"), "{error}");
    let huge = r#"{"id": 123456789012345678901234567890, "question": "q", "answer": 1e400}"#;
    assert!(read(Benchmark::MuSiQue, &file(&dir, "r.jsonl", huge)).is_err());
}

#[test]
fn a_wrong_canary_is_an_error_that_shows_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let secret = "Ossel Tower, the café of the harbour";
    let field = Cipher::Hashed.conceal(secret, "right");
    let path = file(&dir, "b.csv", &format!("problem,answer,problem_topic,canary\n{field},{field},Art,wrong\n"));
    let error = read(Benchmark::BrowseComp, &path).expect_err("another canary").to_string();
    assert!(error.contains("b.csv:2: the question can't be decoded") && !error.contains("Ossel"), "{error}");
    let path = file(&dir, "b.csv", &format!("problem,answer,problem_topic\n{field},{field},Art\n"));
    assert!(read(Benchmark::BrowseComp, &path).expect_err("no canary").to_string().contains("no canary"));
}

#[test]
fn python_lists_are_read_and_others_refused() {
    for (text, expected) in [
        ("['https://a', \"b's\"]", Some(vec!["https://a", "b's"])),
        (" [] ", Some(vec![])),
        (r"['a\'b']", Some(vec!["a'b"])),
        ("['a'", None),
        ("['a", None),
        ("[a]", None),
        ("a", None),
    ] {
        let expected = expected.map(|items| items.into_iter().map(str::to_owned).collect());
        assert_eq!(gold::python_list(text).ok(), expected, "{text}");
    }
}
