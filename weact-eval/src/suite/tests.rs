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

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench").join(name)
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

/// The same rows in two forms, and in the same form again after being written.
#[test]
fn real_rows_are_the_same_in_every_form() {
    let Some(root) = shared() else { return };
    let bench = root.join("data/bench");
    let texts = |path: &str| -> Vec<(String, String, Vec<String>)> {
        let tasks = read(Benchmark::Frames, &bench.join(path)).expect("tasks");
        tasks.into_iter().map(|task| (task.id, task.question, task.gold)).collect()
    };
    assert_eq!(texts("frames/test.tsv"), texts("frames/frames.json"));
    let dir = tempfile::tempdir().expect("a folder");
    for (benchmark, path) in [
        (Benchmark::TwoWiki, "2wiki/2wiki.json"),
        (Benchmark::MuSiQue, "musique/musique_500.jsonl"),
        (Benchmark::WebWalkerQa, "webwalkerqa/main.reconstructed.jsonl"),
        (Benchmark::XbenchDeepSearch, "xbench/DeepSearch-2510.csv"),
        (Benchmark::BrowseComp, "browsecomp_format/browse_comp_test_set.csv"),
        (Benchmark::Frames, "frames/test.tsv"),
    ] {
        let tasks = read(benchmark, &bench.join(path)).expect("tasks");
        let copy = dir.path().join(Path::new(path).file_name().expect("a file"));
        write(benchmark, &copy, &tasks).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert!(read(benchmark, &copy).expect("readable") == tasks, "{path}");
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
    for (benchmark, name) in BENCHMARKS {
        let tasks = world.tasks(benchmark, 12).expect("tasks");
        let path = dir.path().join(Path::new(name).file_name().expect("a file"));
        write(benchmark, &path, &tasks).expect("written");
        assert_eq!(read(benchmark, &path).expect("readable"), tasks, "{benchmark}");
        let text = fs::read_to_string(&path).expect("text");
        assert_eq!(text.contains(&tasks[0].question), !benchmark.is_secret(), "{benchmark}");
    }
}

#[test]
fn the_toy_s_files_are_what_their_tasks_are_written_as() {
    let dir = tempfile::tempdir().expect("a folder");
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).join("../datasets/toy/bench");
    for (benchmark, path) in BENCHMARKS {
        let original = bench.join(path);
        let copy = dir.path().join(original.file_name().expect("a file"));
        write(benchmark, &copy, &read(benchmark, &original).expect("tasks")).expect("written");
        assert_eq!(fs::read(&copy).expect("a file"), fs::read(&original).expect("a file"), "{path}");
    }
}

#[test]
fn what_a_format_cannot_hold_is_not_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let task = |gold: &[&str], more: Value| Task {
        id: "a".to_owned(),
        question: "Where is \"Torn\"?\nOn Ossel's shore?".to_owned(),
        gold: gold.iter().map(|&answer| answer.to_owned()).collect(),
        files: Vec::new(),
        more: more.as_object().cloned().expect("an object"),
    };
    let canary = json!({"canary": "c"});
    let links = json!({"wiki_links": ["https://x/Ossel's", "https://x/\"a\",'b'\\c"]});
    for (benchmark, name, tasks, expected) in [
        (Benchmark::MuSiQue, "m.jsonl", vec![task(&["x", "y"], json!({"answer_aliases": ["y"]}))], None),
        (
            Benchmark::MuSiQue,
            "m.jsonl",
            vec![task(&["x", "y"], json!({}))],
            Some("the answers of task \"a\" would come back changed"),
        ),
        (Benchmark::MuSiQue, "m.jsonl", vec![task(&[], json!({}))], Some("task \"a\" has no answer")),
        (Benchmark::MuSiQue, "m.jsonl", vec![], Some("has no rows")),
        (
            Benchmark::MuSiQue,
            "m.jsonl",
            vec![task(&["x"], json!({})), task(&["x"], json!({}))],
            Some("m.jsonl:2: id \"a\" stands at"),
        ),
        (Benchmark::MuSiQue, "m.jsonl", vec![task(&["x"], json!({"question": "?"}))], Some("the question of task")),
        (Benchmark::MuSiQue, "m.txt", vec![task(&["x"], json!({}))], Some("unknown format")),
        (
            Benchmark::Gaia,
            "g.jsonl",
            vec![task(&["x"], json!({"file_name": "no.png"}))],
            Some("attachment \"no.png\" is not beside"),
        ),
        (Benchmark::Frames, "f.tsv", vec![task(&["x"], links)], None),
        (Benchmark::Frames, "f.tsv", vec![task(&["x"], json!({"wiki_links": [1]}))], Some("needs a list of texts")),
        (Benchmark::Bamboogle, "b.csv", vec![task(&["x"], json!({"n": 1}))], Some("row 1 does not have exactly the texts")),
        (Benchmark::BrowseComp, "b.csv", vec![task(&["x"], canary.clone())], None),
        (Benchmark::BrowseComp, "b.csv", vec![task(&["x"], json!({}))], Some("has no canary")),
        (Benchmark::BrowseComp, "b.csv", vec![task(&["x\u{1}"], canary)], Some("can't be decoded")),
        (Benchmark::SciBench, "s.json", vec![task(&["1"], json!({}))], Some("Table 1's benchmarks only")),
    ] {
        let path = dir.path().join(name);
        let written = write(benchmark, &path, &tasks);
        assert_eq!(written.is_ok(), path.exists(), "{benchmark}");
        match expected {
            None => assert_eq!(read(benchmark, &path).expect("readable"), tasks),
            Some(words) => {
                let error = written.expect_err(words).to_string();
                assert!(error.contains(words) && !error.contains("Torn"), "{error}");
            }
        }
        if path.exists() {
            fs::remove_file(path).expect("it was written");
        }
    }
}

/// Rows of the public benchmarks where their licences allow it, and rows of our own in the formats of the others.
#[test]
fn every_benchmark_s_format_is_read() {
    for (benchmark, name, n, id, gold, keys) in [
        (Benchmark::Gaia, "gaia", 2, "a-1", vec!["17"], vec!["Level", "file_name", "Annotator Metadata"]),
        (
            Benchmark::TwoWiki,
            "2wiki",
            2,
            "x1",
            vec!["Ada", "Ada of Selo"],
            vec!["type", "supporting_facts", "evidences", "answer_id"],
        ),
        (Benchmark::TwoWiki, "2wiki.rekeyed.json", 2, "2wiki_225", vec!["Along The Sundown Trail"], vec!["source"]),
        (Benchmark::Bamboogle, "bamboogle.csv", 2, "30e06c570f180703", vec!["Ada"], vec![]),
        (Benchmark::Bamboogle, "bamboogle.rekeyed.json", 2, "bamboogle_26", vec!["Mercia"], vec!["source"]),
        (Benchmark::MuSiQue, "musique.jsonl", 1, "2hop__1_2", vec!["1701", "the year 1701"], vec!["paragraphs", "answerable"]),
        (Benchmark::MuSiQue, "musique.rekeyed.jsonl", 2, "225", vec!["Kaliningrad Oblast"], vec![]),
        (Benchmark::WebWalkerQa, "webwalkerqa.jsonl", 1, "d87803860bd6d837", vec!["5 pm"], vec!["root_url", "info"]),
        (
            Benchmark::Frames,
            "frames.tsv",
            2,
            "6",
            vec!["Mendelevium is named after Dmitri Mendeleev."],
            vec!["reasoning_types", "wiki_links"],
        ),
        (
            Benchmark::Frames,
            "frames.rekeyed.json",
            2,
            "6",
            vec!["Mendelevium is named after Dmitri Mendeleev."],
            vec!["wiki_links"],
        ),
        (Benchmark::MegaScience, "megascience.jsonl", 1, "399aa5cc9ca7f5ed", vec!["4"], vec!["subject", "source"]),
        (Benchmark::SciBench, "scibench", 2, "toybook:1.1:86ad02a0", vec!["1.5"], vec!["unit", "source", "problemid"]),
        (Benchmark::SciBench, "scibench/toybook_sol.json", 1, "toybook:1.0:7913e5b8", vec!["4"], vec!["solution"]),
        (Benchmark::Ds1000, "ds1000.jsonl", 1, "3", vec![], vec!["reference_code", "metadata", "code_context"]),
        (Benchmark::ResearchQa, "researchqa.json", 1, "r1", vec![], vec!["rubric", "field"]),
        (
            Benchmark::DeepResearchBench,
            "deepresearch_bench",
            1,
            "79",
            vec![],
            vec!["criterions", "dimension_weight", "reference", "topic"],
        ),
        (Benchmark::MmluPro, "mmlu_pro.json", 2, "210", vec!["J"], vec!["options", "category", "question"]),
        (Benchmark::IfEval, "ifeval.jsonl", 2, "1051", vec![], vec!["instruction_id_list", "kwargs"]),
    ] {
        let tasks = read(benchmark, &fixture(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let gold_read: Vec<&str> = tasks[0].gold.iter().map(String::as_str).collect();
        assert_eq!((tasks.len(), tasks[0].id.as_str(), gold_read), (n, id, gold), "{name}");
        for key in keys {
            assert!(tasks.iter().all(|task| task.more.contains_key(key)), "{name}: {key}");
        }
    }
    let frames = |name: &str| -> Vec<(String, Value)> {
        let tasks = read(Benchmark::Frames, &fixture(name)).expect("tasks");
        tasks.into_iter().map(|task| (task.question, task.more["wiki_links"].clone())).collect()
    };
    assert_eq!(frames("frames.tsv"), frames("frames.rekeyed.json"));
    assert!(frames("frames.tsv").iter().any(|(question, _)| question.contains('"')));
    let options = &read(Benchmark::MmluPro, &fixture("mmlu_pro.json")).expect("tasks")[0];
    let asked = format!(
        "{}\nA. {}\nB. ",
        options.more["question"].as_str().expect("text"),
        options.more["options"][0].as_str().expect("text")
    );
    assert!(options.question.starts_with(&asked));
}

/// By digest and by length, since the plain text is to stand nowhere.
#[test]
fn obfuscated_rows_are_read_and_written_obfuscated() {
    let dir = tempfile::tempdir().expect("a folder");
    for (benchmark, name, digest, length) in [
        (Benchmark::XbenchDeepSearch, "xbench.csv", "0500df1642067f54f7efa8fc14745bcbe3b5231f1da6093a4df0a9eefd8817f3", 131),
        (Benchmark::BrowseComp, "browsecomp.csv", "06507e33df97d401391d3c389e33b18dba2c1ad8a588f9dcf1bbdaf4dbcd456c", 121),
    ] {
        let tasks = read(benchmark, &fixture(name)).expect("tasks");
        let question = &tasks[0].question;
        let digest_read = weact_core::io::tensors::hex(&Sha256::digest(question));
        assert_eq!((digest_read.as_str(), question.len()), (digest, length));
        assert!(tasks.iter().all(|task| task.more["canary"].is_string()));
        let copy = dir.path().join(name);
        write(benchmark, &copy, &tasks).expect("written");
        let text = fs::read_to_string(copy).expect("text");
        assert!(!text.contains(question) && text.contains(tasks[0].more["canary"].as_str().expect("text")));
    }
}

#[test]
fn files_that_belong_to_a_benchmark_are_needed() {
    let dir = tempfile::tempdir().expect("a folder");
    let row = r#"{"task_id": "a", "Question": "Where?", "Final answer": "Torn", "file_name": "map.png"}"#;
    let gaia = file(&dir, "metadata.jsonl", row);
    let error = read(Benchmark::Gaia, &gaia).expect_err("a missing attachment").to_string();
    assert!(error.contains("metadata.jsonl:1: attachment \"map.png\""), "{error}");
    file(&dir, "map.png", "no picture");
    assert_eq!(read(Benchmark::Gaia, dir.path()).expect("tasks")[0].files, [dir.path().join("map.png")]);
    for (name, why) in [("\"./map.png\"", "attachment"), ("[\"map.png\"]", "\"file_name\" is a list")] {
        let error =
            read(Benchmark::Gaia, &file(&dir, "metadata.jsonl", &row.replace("\"map.png\"", name))).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    }

    let dev = file(&dir, "dev.json", &fs::read_to_string(fixture("2wiki/dev.json")).expect("a fixture"));
    assert_eq!(read(Benchmark::TwoWiki, &dev).expect("tasks")[0].gold, ["Ada"]);
    let error = read(Benchmark::TwoWiki, dir.path()).expect_err("no aliases").to_string();
    assert!(error.contains("id_aliases.json"), "{error}");
    file(&dir, "id_aliases.json", r#"{"Q_id": "Q7", "aliases": "Ada of Selo", "demonyms": []}"#);
    let error = read(Benchmark::TwoWiki, &dev).expect_err("no list").to_string();
    assert!(error.contains("id_aliases.json:1: \"aliases\" must be a list of texts"), "{error}");

    file(&dir, "query.jsonl", r#"{"id": 1, "topic": "t", "language": "en", "prompt": "Write."}"#);
    let error = read(Benchmark::DeepResearchBench, dir.path()).expect_err("no criteria").to_string();
    assert!(error.contains("criteria.jsonl"), "{error}");
    let criteria = |id| format!(r#"{{"id": {id}, "dimension_weight": {{}}, "criterions": {{}}}}"#);
    for (text, why) in [
        (criteria(2), "no criteria for task \"1\""),
        (format!("{}\n{}", criteria(1), criteria(1)), "criteria.jsonl:2: id \"1\" stands twice"),
    ] {
        file(&dir, "criteria.jsonl", &text);
        let error = read(Benchmark::DeepResearchBench, dir.path()).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    }
    let error = read(Benchmark::Bamboogle, dir.path()).expect_err("one file").to_string();
    assert!(error.contains("is a folder: bamboogle is one file"), "{error}");
}

#[test]
fn scibench_asks_for_the_unit_without_its_power_of_ten() {
    let dir = tempfile::tempdir().expect("a folder");
    for (unit, asked) in [
        ("$10^{-15} \\mathrm{~m}$", " The unit of the answer is \\mathrm{~m}."),
        ("$10^3 \\mathrm{~N} / \\mathrm{C}$ ", " The unit of the answer is \\mathrm{~N} / \\mathrm{C}."),
        ("$10^{11}$", ""),
        ("$10^{3}$ m", " The unit of the answer is m."),
        (" MJ", " The unit of the answer is MJ."),
        (" $", " The unit of the answer is $."),
        (" $\\$$", " The unit of the answer is \\$."),
        (" ", ""),
    ] {
        let row =
            json!({"problem_text": "How far?", "answer_number": " 7.8", "unit": unit, "source": "fund", "problemid": " 1.1 "});
        let task = read(Benchmark::SciBench, &file(&dir, "one.json", &json!([row]).to_string())).expect("a task").remove(0);
        assert_eq!((task.id.as_str(), task.question), ("fund:1.1:08ba718d", format!("How far?{asked}")));
    }
}

#[test]
fn each_malformation_is_named_with_its_place() {
    let dir = tempfile::tempdir().expect("a folder");
    let good = r#"{"id": "a", "question": "q", "answer": "x"}"#;
    let cases = [
        (
            "r.jsonl",
            format!("\u{feff}{good}\r\n{{\"id\": \"b\", \"question\": \"q\", \"ans"),
            "r.jsonl:2: EOF while parsing a string at column 33: is the file cut off?",
        ),
        ("r.jsonl", format!("{good}\n\n{good}"), "r.jsonl:3: id \"a\" stands at"),
        ("r.jsonl", r#"{"id": "a", "query": "q", "answer": "x"}"#.to_owned(), "r.jsonl:1: no question: expected text"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": null}"#.to_owned(), "r.jsonl:1: no answer"),
        ("r.jsonl", r#"{"id": "a", "question": {"x": 1}, "answer": "x"}"#.to_owned(), "\"question\" is an object"),
        ("r.jsonl", r#"{"id": "a", "question": "  ", "answer": "x"}"#.to_owned(), "the question is empty"),
        ("r.jsonl", r#"{"id": ["a"], "question": "q", "answer": "x"}"#.to_owned(), "\"id\" is a list"),
        (
            "r.jsonl",
            r#"{"id": 12345678901234567890123, "question": "q", "answer": "x"}"#.to_owned(),
            "\"id\" is a number too large",
        ),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": [1, 9007199254740993.0]}"#.to_owned(), "is a number too large"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": 1e400}"#.to_owned(), "r.jsonl:1: number out of range at column"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": ["x", {"y": 1}]}"#.to_owned(), "under \"answer\" is an object"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": true}"#.to_owned(), "under \"answer\" is true or false"),
        ("r.jsonl", r#"{"id": "a", "question": "q", "answer": [[null], " "]}"#.to_owned(), "r.jsonl:1: no answer"),
        (
            "r.jsonl",
            r#"{"id": "a", "question": "q", "answer": "x", "answer_aliases": "y"}"#.to_owned(),
            "must be a list of texts",
        ),
        ("r.jsonl", format!("{good}\n\0"), "r.jsonl:2: holds a NUL character"),
        ("r.jsonl", "[1]".to_owned(), "expected an object, found a list"),
        ("r.json", r#"[{"id": "a", "question": "q", "answer": "x"}, 7]"#.to_owned(), "row 2: expected an object, found a number"),
        ("r.json", r#"[{"id": "a","#.to_owned(), "r.json:1: EOF while parsing"),
        ("r.json", "[]".to_owned(), "has no rows"),
        ("r.csv", "id,question,answer\r\na,q,x\r\nb,\"q,x\r\n".to_owned(), "r.csv:3: a quotation mark is not closed"),
        ("r.csv", "id,question,answer\na,\"q,x\nb,\"r\",y\n".to_owned(), "r.csv:3: text after a closing quotation mark"),
        ("r.tsv", "id\tquestion\tanswer\na\t\"q\" of\tx\n".to_owned(), "r.tsv:2: text after a closing quotation mark"),
        ("r.csv", "id,question,answer\na,\"q\nr\",x\nb,,x\n".to_owned(), "r.csv:4: the question is empty"),
        ("r.csv", "id,question,question\na,q,x\n".to_owned(), "r.csv:1: two columns are named \"question\""),
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
}

#[test]
fn a_byte_order_mark_carriage_returns_and_lone_quotation_marks_change_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let expected = [("a", "5\" high?", "1".to_owned()), ("18446744073709551615", "q,\r\nr", "0.5".to_owned())];
    for (name, text) in [
        ("r.csv", "\u{feff}id,question,answer\r\na,5\" high?,1\r\n18446744073709551615,\"q,\r\nr\",0.5"),
        ("r.tsv", "id\tquestion\tanswer\na\t\"5\"\" high?\"\t1\n18446744073709551615\t\"q,\r\nr\"\t0.5\n"),
        (
            "r.jsonl",
            "\u{feff}{\"id\": \"a\", \"question\": \"5\\\" high?\", \"answer\": 1}\r\n\r\n{\"id\": 18446744073709551615, \"question\": \"q,\\r\\nr\", \"answer\": [[0.5, null], \"\", \"0.5\"]}",
        ),
    ] {
        let tasks = read(Benchmark::MuSiQue, &file(&dir, name, text)).unwrap_or_else(|e| panic!("{e}"));
        let read: Vec<_> = tasks.iter().map(|task| (task.id.as_str(), task.question.as_str(), task.gold.join("|"))).collect();
        assert_eq!(read, expected, "{name}");
    }
}

#[test]
fn a_wrong_canary_is_an_error_that_shows_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let secret = "Ossel Tower, the café of the harbour";
    let field = Cipher::Hashed.conceal(secret, "right");
    let path = file(&dir, "b.csv", &format!("problem,answer,problem_topic,canary\n{field},{field},Art,wrong\n"));
    let error = read(Benchmark::BrowseComp, &path).expect_err("another canary").to_string();
    assert!(error.contains("b.csv:2: the question can't be decoded") && !error.contains("Ossel"), "{error}");
    // The repeated key of the other form gives text of text.
    let field = Cipher::Raw.conceal("Ossel Tower by the sea", "right");
    let path = file(&dir, "x.csv", &format!("id,prompt,answer,reference_steps,canary\n1,{field},{field},{field},WRONG\n"));
    let error = read(Benchmark::XbenchDeepSearch, &path).expect_err("another canary").to_string();
    assert!(error.contains("x.csv:2: the question can't be decoded") && !error.contains("Ossel"), "{error}");
    let path = file(&dir, "b.csv", &format!("problem,answer,problem_topic\n{field},{field},Art\n"));
    assert!(read(Benchmark::BrowseComp, &path).expect_err("no canary").to_string().contains("no canary"));
}
