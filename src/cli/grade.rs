//! `weact grade`: grades stored answers.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::bail;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use weact::{
    core::Result,
    eval::{
        benchmark::Benchmark,
        grade::{
            self, Graded, Grader, Verdict,
            judge::{Judge, Settings},
        },
        task::Task,
    },
    infer::remote,
};

use super::{Common, exit::Usage, lines};

/// Grades stored answers
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Whose rules: gaia, 2wiki, bamboogle, musique, webwalkerqa, xbench, browsecomp, frames, megascience, scibench, mmlu-pro, ifeval,
    /// researchqa or deepresearch-bench
    #[arg(long, value_name = "B")]
    benchmark: Benchmark,
    /// One `{"id", "prediction", "gold"}` a line: prediction a text or null, gold one or a list; "question" and what else the grader
    /// needs stand beside them
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// The same lines with "verdict", "score", "grader" and "scores"; without it they go to stdout, but with --json only the summary does
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// An OpenAI-compatible endpoint whose model judges; none uses only the rule grader
    #[arg(long, value_name = "none|URL", default_value = "none")]
    judge: String,
    /// The judge's model
    #[arg(long, value_name = "M")]
    judge_model: Option<String>,
    /// The environment variable that holds the judge's API key
    #[arg(long, value_name = "VAR")]
    judge_key_env: Option<String>,
    /// Keep the judge's replies here, and use those that are there
    #[arg(long, value_name = "FILE")]
    judge_cache: Option<PathBuf>,
    /// Replies per answer; the majority decides
    #[arg(long, value_name = "N", default_value_t = 1)]
    judge_votes: usize,
    /// Answers judged at the same time
    #[arg(long, value_name = "N", default_value_t = 4)]
    judge_parallel: usize,
    /// Exit with status 1 if a greater share of the answers can't be judged
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    max_judge_errors: f64,
    /// MMLU-Pro: where no letter is found, take the one that the original draws
    #[arg(long)]
    mmlu_random_fallback: bool,
}

#[derive(Deserialize)]
struct Line {
    id: Value,
    /// Required: null says that there is no answer.
    #[serde(deserialize_with = "Option::deserialize")]
    prediction: Option<String>,
    #[serde(default)]
    question: Option<String>,
    #[serde(default)]
    gold: Value,
}

/// An answer to grade.
struct Row {
    number: usize,
    task: Task,
    prediction: Option<String>,
    /// As it was read: the output begins with it.
    line: Map<String, Value>,
}

pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    if !(0.0..=1.0).contains(&args.max_judge_errors) {
        return Err(Usage("--max-judge-errors is a share: from 0 to 1".to_owned()).into());
    }
    let judge = judge(args, common)?;
    let judged = judge.is_some();
    let options = grade::Options { mmlu_random_fallback: args.mmlu_random_fallback };
    let grader = grade::grader(args.benchmark, judge, options).map_err(|error| Usage(error.to_string()))?;
    let rows = read(args)?;
    if !judged {
        grade::audit(&*grader)?;
    }
    let graded = grade_all(&*grader, &rows, if judged { args.judge_parallel } else { 1 }, args)?;

    let out: Vec<Value> =
        rows.into_iter().zip(&graded).map(|(row, graded)| written(row, graded, &*grader, args.benchmark)).collect();
    match &args.out {
        Some(path) => lines::write(path, &out)?,
        None if common.say.json => {}
        None => print(&out)?,
    }
    summarize(args, &*grader, &graded, common)
}

/// The judge that the command line names.
fn judge(args: &Args, common: &Common) -> anyhow::Result<Option<Arc<Judge>>> {
    if args.judge == "none" {
        if let Some((flag, _)) =
            [("--judge-model", args.judge_model.is_some()), ("--judge-key-env", args.judge_key_env.is_some())]
                .iter()
                .find(|(_, given)| *given)
        {
            return Err(Usage(format!("{flag} goes with --judge URL")).into());
        }
        return Ok(None);
    }
    let Some(model) = &args.judge_model else {
        return Err(Usage("--judge URL needs --judge-model".to_owned()).into());
    };
    if args.judge_parallel == 0 || args.judge_votes == 0 {
        return Err(Usage("--judge-parallel and --judge-votes are at least 1".to_owned()).into());
    }
    let settings = remote::Settings { key_env: args.judge_key_env.clone(), ..remote::Settings::new(&args.judge, model) };
    let client = remote::Client::new(settings).map_err(|error| Usage(format!("--judge: {error}")))?;
    let settings = Settings {
        votes: args.judge_votes,
        seed: common.seed.unwrap_or(0),
        cache: args.judge_cache.clone(),
        ..Settings::default()
    };
    Ok(Some(Arc::new(Judge::new(Box::new(client), settings)?)))
}

/// Reads the rows; what is wrong is said with its line.
fn read(args: &Args) -> Result<Vec<Row>> {
    let row = |(number, line): (usize, Map<String, Value>)| {
        let wrong = |why: String| lines::wrong(&args.input, number, why);
        let parsed = Line::deserialize(Value::Object(line.clone())).map_err(|error| wrong(error.to_string()))?;
        let id = match &parsed.id {
            Value::String(id) if !id.is_empty() => id.clone(),
            Value::Number(id) => id.to_string(),
            _ => return Err(wrong("id is a text or a number".to_owned())),
        };
        let gold = match &parsed.gold {
            Value::Null => Vec::new(),
            Value::Array(all) => all.iter().map(answer).collect::<Option<_>>().unwrap_or_default(),
            one => answer(one).into_iter().collect(),
        };
        if gold.is_empty() && !parsed.gold.is_null() {
            return Err(wrong("gold is a text, a number, or a list of them that is not empty".to_owned()));
        }
        let known = ["id", "prediction", "question", "gold"];
        let more = line.iter().filter(|(key, _)| !known.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect();
        let task = Task { id, question: parsed.question.unwrap_or_default(), gold, files: Vec::new(), more };
        Ok(Row { number, task, prediction: parsed.prediction, line })
    };
    let read = lines::read::<Map<String, Value>>(&args.input)?;
    if read.is_empty() {
        return Err(weact::core::Error::file(&args.input, "has no answers"));
    }
    read.into_iter().map(row).collect()
}

fn answer(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Grades with `n` threads, in the rows' order; a row that can't be graded ends it.
fn grade_all(grader: &dyn Grader, rows: &[Row], n: usize, args: &Args) -> Result<Vec<Graded>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Result<Graded>>>> = Mutex::new(rows.iter().map(|_| None).collect());
    let work = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let Some(row) = rows.get(i) else { break };
        let graded = grader.grade(&row.task, row.prediction.as_deref());
        let graded = graded.map_err(|error| lines::wrong(&args.input, row.number, error.to_string()));
        if graded.is_err() {
            next.store(rows.len(), Ordering::Relaxed);
        }
        done.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(graded);
    };
    thread::scope(|scope| {
        for _ in 0..n.min(rows.len()) {
            scope.spawn(work);
        }
    });
    // Where none failed, all are there; else the first that failed is.
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect()
}

/// The line that was read with its grade. Of a benchmark that is published obfuscated, the grader's words stay out: they may repeat it.
fn written(row: Row, graded: &Graded, grader: &dyn Grader, benchmark: Benchmark) -> Value {
    let mut line = row.line;
    let mut insert = |key: &str, value: Value| line.insert(key.to_owned(), value);
    insert("verdict", json!(graded.verdict));
    insert("score", json!(graded.score));
    insert("grader", json!(grader.id()));
    insert("scores", json!(graded.scores));
    if !benchmark.is_secret() {
        if let Some(text) = &graded.graded_text {
            insert("graded_text", json!(text));
        }
        if let Some(detail) = &graded.detail {
            insert("detail", json!(detail));
        }
    }
    Value::Object(line)
}

fn print(rows: &[Value]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    rows.iter().try_for_each(|row| writeln!(out, "{row}"))?;
    out.flush()
}

fn summarize(args: &Args, grader: &dyn Grader, graded: &[Graded], common: &Common) -> anyhow::Result<ExitCode> {
    let count = |verdict: Verdict| graded.iter().filter(|graded| graded.verdict == verdict).count();
    let all = [Verdict::Correct, Verdict::Wrong, Verdict::NoAnswer, Verdict::JudgeError];
    let [correct, wrong, no_answer, judge_error] = all.map(count);
    let n_graded = graded.len() - judge_error;
    let share = |n: usize, of: usize| (of > 0).then(|| n as f64 / of as f64);
    let mut scores: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, score) in graded.iter().flat_map(|graded| &graded.scores) {
        scores.entry(name).or_default().push(*score);
    }
    let mean = |scores: &[f64]| (!scores.is_empty()).then(|| scores.iter().sum::<f64>() / scores.len() as f64);
    let score_mean = mean(&graded.iter().filter_map(|graded| graded.score).collect::<Vec<_>>());
    let scores: BTreeMap<&str, Option<f64>> = scores.into_iter().map(|(name, scores)| (name, mean(&scores))).collect();

    let shown = share(correct, n_graded).map_or_else(|| "no accuracy".to_owned(), |share| format!("accuracy {share:.4}"));
    let to = args.out.as_ref().map_or_else(String::new, |path| format!(" -> {}", path.display()));
    let text = format!(
        "{} answers by {}: {correct} correct, {wrong} wrong, {no_answer} without an answer, {judge_error} not judged; {shown}{to}",
        graded.len(),
        grader.id()
    );
    if args.out.is_some() || common.say.json {
        let summary = json!({"benchmark": args.benchmark, "grader": grader.id(), "rows": graded.len(), "correct": correct, "wrong": wrong,
            "no_answer": no_answer, "judge_error": judge_error, "accuracy": share(correct, n_graded), "score_mean": score_mean,
            "scores": scores, "out": args.out});
        common.say.summary(&text, &summary)?;
    } else {
        common.say.note(&text);
    }
    if let Some(verdict) = grade::uniform(graded.iter().map(|graded| graded.verdict)) {
        common.say.warn(&format!("all {} answers are graded {verdict}: look at some before you believe it", graded.len()));
    }
    if share(judge_error, graded.len()).is_some_and(|share| share > args.max_judge_errors) {
        let first =
            graded.iter().find(|graded| graded.verdict == Verdict::JudgeError).and_then(|graded| graded.detail.as_deref());
        let why = first.filter(|_| !args.benchmark.is_secret()).map_or_else(String::new, |why| format!(": {why}"));
        bail!(
            "{judge_error} of {} answers could not be judged, more than --max-judge-errors {}{why}",
            graded.len(),
            args.max_judge_errors
        );
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{BufRead, BufReader, Read},
        net::TcpListener,
        path::Path,
    };

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Runs `weact grade ARGS`, and gives what it wrote to `out`, or its error.
    fn grade(folder: &Path, input: &str, more: &[&str]) -> std::result::Result<Vec<Value>, String> {
        let (from, to) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
        fs::write(&from, input).expect("writable");
        let _absent = fs::remove_file(&to);
        let (from, to) = (from.to_str().expect("UTF-8"), to.to_str().expect("UTF-8"));
        let all = [&["weact", "--quiet", "grade", "--input", from, "--out", to], more].concat();
        let Cli { common, command } = Cli::try_parse_from(all).map_err(|error| error.to_string())?;
        let Command::Grade(args) = command else { return Err("another command".to_owned()) };
        run(&args, &common).map_err(|error| error.to_string())?;
        Ok(written_to(to))
    }

    fn written_to(path: &str) -> Vec<Value> {
        fs::read_to_string(path).expect("written").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// A judge that answers every request with `reply`.
    fn serve(reply: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.expect("a request"));
                let mut length = 0;
                loop {
                    let mut line = String::new();
                    if stream.read_line(&mut line).expect("readable") <= 2 {
                        break;
                    }
                    if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
                        length = n.trim().parse().expect("a number");
                    }
                }
                stream.read_exact(&mut vec![0; length]).expect("a body");
                let body = json!({"choices": [{"message": {"content": reply}}]}).to_string();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                let _gone = stream.get_mut().write_all((head + &body).as_bytes());
            }
        });
        url
    }

    #[test]
    fn a_line_comes_back_with_its_grade() {
        let folder = tempfile::tempdir().expect("a folder");
        let input = "\u{feff}{\"id\": 7, \"prediction\": \"<think>a</think>The Seine\", \"gold\": [\"Seine\", \"river Seine\"], \"level\": 2}\r\n\
            \r\n{\"id\": \"b\", \"prediction\": null, \"gold\": \"x\"}\n{\"id\": \"c\", \"prediction\": \"new york\", \"gold\": \"New York City\"}";
        let rows = grade(folder.path(), input, &["--benchmark", "musique"]).expect("gradable");
        let expected = json!({"id": 7, "prediction": "<think>a</think>The Seine", "gold": ["Seine", "river Seine"], "level": 2,
            "verdict": "correct", "score": 1.0, "grader": "musique-em@1", "scores": {"cover_em": 1.0, "em": 1.0, "f1": 1.0},
            "graded_text": "The Seine"});
        assert_eq!(rows[0], expected);
        assert_eq!(
            (&rows[1]["verdict"], &rows[1]["score"], &rows[1]["scores"]["f1"]),
            (&json!("no_answer"), &json!(0.0), &json!(0.0))
        );
        assert_eq!((&rows[2]["verdict"], &rows[2]["scores"]["f1"]), (&json!("wrong"), &json!(0.8)));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let good = "{\"id\": 1, \"prediction\": \"a\", \"gold\": \"a\"}\n";
        for (line, benchmark, words) in [
            ("{\"id\": 2, \"gold\": \"a\"}", "gaia", "in.jsonl:2: missing field `prediction`"),
            ("{\"id\": null, \"prediction\": \"a\", \"gold\": \"a\"}", "gaia", "in.jsonl:2: id is a text or a number"),
            ("{\"id\": 2, \"prediction\": 3, \"gold\": \"a\"}", "gaia", "in.jsonl:2: invalid type"),
            ("{\"id\": 2, \"prediction\": \"a\", \"gold\": []}", "gaia", "in.jsonl:2: gold is"),
            ("{\"id\": 2, \"prediction\": \"a\", \"gold\": [true]}", "gaia", "in.jsonl:2: gold is"),
            ("{\"id\": 2, \"prediction\": \"a\"}", "gaia", "in.jsonl:2: task 2: it has no gold answer"),
            ("[1]", "gaia", "in.jsonl:2: "),
            ("{\"id\": 2", "gaia", "in.jsonl:2: "),
            ("", "ds1000", "no sandbox"),
            ("", "researchqa", "by a judge alone"),
            ("", "chess", "unknown benchmark"),
        ] {
            let error = grade(folder.path(), &format!("{good}{line}\n"), &["--benchmark", benchmark]).expect_err(line);
            assert!(error.contains(words), "{error}");
            assert!(!folder.path().join("out.jsonl").exists(), "{line}");
        }
    }

    #[test]
    fn a_judge_decides_and_its_failures_are_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let input: String = (0..10)
            .map(|i| format!("{{\"id\": {i}, \"question\": \"Which {i}?\", \"prediction\": \"it is {i}\", \"gold\": \"{i}\"}}\n"))
            .collect();
        let asked = |reply: &'static str, more: &[&str]| {
            let url = serve(reply);
            grade(folder.path(), &input, &[&["--benchmark", "webwalkerqa", "--judge", &url, "--judge-model", "m"], more].concat())
        };
        let rows = asked("Correct", &[]).expect("gradable");
        assert!(rows.iter().all(|row| row["verdict"] == "correct" && row["grader"] == "webwalkerqa-judge@1:m"), "{rows:?}");
        assert_eq!(rows.iter().map(|row| row["id"].as_u64()).collect::<Vec<_>>(), (0..10).map(Some).collect::<Vec<_>>());

        let error = asked("Perhaps", &[]).expect_err("nothing is judged");
        assert!(error.contains("10 of 10 answers could not be judged, more than --max-judge-errors 0.1"), "{error}");
        let out = folder.path().join("out.jsonl");
        assert!(
            written_to(out.to_str().expect("UTF-8")).iter().all(|row| row["verdict"] == "judge_error" && row["score"].is_null())
        );
        assert_eq!(asked("Perhaps", &["--max-judge-errors", "1"]).expect("allowed").len(), 10);

        let error =
            grade(folder.path(), &input, &["--benchmark", "frames", "--judge", "http://localhost"]).expect_err("no model");
        assert!(error.contains("--judge-model"), "{error}");
    }
}
