//! The public benchmarks' files as [`Task`]s, and the toy world's tasks in the same formats.
//!
//! What a row holds beyond id, question and answer stays in [`Task::more`] under the row's own names: graders and reports know it by
//! them. Several public forms of a benchmark are read: the original one, and those in which its rows are passed on with other names
//! for the same columns. Nothing is skipped: a row that can't be read is an error with its place.

pub mod cipher;
mod gold;
mod parquet;
mod rows;
mod write;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use regex::Regex;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{Error, Result, benchmark::Benchmark, task::Task};
use cipher::Cipher;
use rows::Row;
pub use write::write;

/// A power of ten at the beginning of a unit.
static POWER_OF_TEN: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^\s*\$?\s*10\s*\^\s*(?:\{[^}]*\}|[+-]?\d+)").expect("a legal pattern"));

/// The names under which the public forms of a benchmark hold the same thing, the original's first.
struct Columns {
    /// Empty where no form has an id.
    id: &'static [&'static str],
    question: &'static [&'static str],
    /// Empty where answers are judged without a reference.
    answer: &'static [&'static str],
}

const fn columns(benchmark: Benchmark) -> Columns {
    let (id, question, answer): (&[&str], &[&str], &[&str]) = match benchmark {
        Benchmark::Gaia => (&["task_id", "id"], &["Question", "question"], &["Final answer", "answer"]),
        Benchmark::TwoWiki => (&["_id", "id", "idx"], &["question", "Question"], &["answer"]),
        Benchmark::Bamboogle => (&["id", "idx"], &["Question", "question"], &["Answer", "answer"]),
        Benchmark::MuSiQue => (&["id", "idx"], &["question", "Question"], &["answer"]),
        Benchmark::WebWalkerQa => (&["id"], &["question", "Question"], &["answer", "Answer"]),
        Benchmark::XbenchDeepSearch => (&["id"], &["prompt"], &["answer"]),
        Benchmark::BrowseComp => (&["id"], &["problem", "Question"], &["answer", "Answer"]),
        Benchmark::Frames => (&["id", ""], &["Prompt", "Question", "question"], &["Answer", "answer"]),
        Benchmark::MegaScience => (&["id"], &["question"], &["reference_answer", "answer"]),
        Benchmark::SciBench => (&["problemid"], &["problem_text"], &["answer_number"]),
        Benchmark::Ds1000 => (&["problem_id"], &["prompt"], &[]),
        Benchmark::ResearchQa => (&["id"], &["query"], &[]),
        Benchmark::DeepResearchBench => (&["id"], &["prompt"], &[]),
        Benchmark::MmluPro => (&["question_id"], &["question"], &["answer"]),
        Benchmark::IfEval => (&["key"], &["prompt"], &[]),
    };
    Columns { id, question, answer }
}

/// Reads a benchmark's file, or the folder where it is several: `dev.json` with `id_aliases.json` (2Wiki), `metadata.jsonl` with
/// attachments (GAIA), the subjects (SciBench), `query.jsonl` with `criteria.jsonl` and
/// `reference.jsonl` (DeepResearch Bench).
///
/// # Errors
/// If a file can't be read or holds no row, a row lacks what its benchmark needs, an id occurs twice, or an attachment is missing: each with
/// its place. The messages hold no plain text of an obfuscated benchmark.
pub fn read(benchmark: Benchmark, path: &Path) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    let mut seen = HashMap::new();
    for file in files(benchmark, path)? {
        for row in rows::read(&file)? {
            let task = task(benchmark, &file, &row)?;
            if let Some(before) = seen.insert(task.id.clone(), row.place.clone()) {
                return Err(row.error(format!("id {:?} stands at {before} already", task.id)));
            }
            tasks.push(task);
        }
    }
    match benchmark {
        Benchmark::TwoWiki => add_aliases(&mut tasks, path)?,
        Benchmark::DeepResearchBench => add_criteria(&mut tasks, path)?,
        _ => {}
    }
    Ok(tasks)
}

/// What the official prompt adds to a question.
pub fn question_suffix(benchmark: Benchmark) -> Option<&'static str> {
    match benchmark {
        Benchmark::BrowseComp => Some(
            "\n\nYour response should be in the following format:\nExplanation: {your explanation for your final answer}\n\
             Exact Answer: {your succinct, final answer}\nConfidence: {your confidence score between 0% and 100% for your answer}",
        ),
        _ => None,
    }
}

/// The files of rows.
fn files(benchmark: Benchmark, path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let name = match benchmark {
        Benchmark::Gaia => "metadata.jsonl",
        Benchmark::TwoWiki => "dev.json",
        Benchmark::DeepResearchBench => "query.jsonl",
        Benchmark::SciBench => return subjects(path),
        _ => return Err(weact_core::Error::file(path, format!("is a folder: {benchmark} is one file")).into()),
    };
    Ok(vec![path.join(name)])
}

/// SciBench's problem files; those with solutions repeat problems of the others.
fn subjects(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |e| weact_core::Error::io("can't read", dir, e);
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".json") && !name.ends_with("_sol.json") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(weact_core::Error::file(dir, "holds no .json file of problems").into());
    }
    Ok(files)
}

fn task(benchmark: Benchmark, file: &Path, row: &Row) -> Result<Task> {
    let columns = columns(benchmark);
    let question = row.need("question", columns.question)?;
    let question = plain(benchmark, row, "the question", &question)?;
    let gold = match columns.answer {
        [] => Vec::new(),
        keys => gold::answers(row, keys)?,
    };
    let gold = gold.iter().map(|answer| plain(benchmark, row, "the answer", answer)).collect::<Result<Vec<_>>>()?;
    let used = [columns.id, columns.question, columns.answer].concat();
    let more: Map<String, Value> =
        row.fields.iter().filter(|(key, _)| !used.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect();
    let digest = || weact_core::io::tensors::hex(&Sha256::digest(&question)[..8]);
    let id = row.text(columns.id).map(|id| id.trim().to_owned()).filter(|id| !id.is_empty());
    let mut task = Task { id: id.unwrap_or_else(digest), question, gold, files: Vec::new(), more };
    complete(benchmark, file, row, &mut task)?;
    if task.question.trim().is_empty() {
        return Err(row.error("the question is empty"));
    }
    Ok(task)
}

/// What single benchmarks need beyond the columns.
fn complete(benchmark: Benchmark, file: &Path, row: &Row, task: &mut Task) -> Result<()> {
    match benchmark {
        Benchmark::Gaia => {
            let name = row.text(&["file_name"]).filter(|name| !name.trim().is_empty());
            if let Some(name) = name {
                let attachment = file.parent().unwrap_or(Path::new("")).join(&name);
                if name.contains(['/', '\\']) || !attachment.is_file() {
                    return Err(row.error(format!("attachment {name:?} is not beside the file: download it too")));
                }
                task.files.push(attachment);
            }
        }
        Benchmark::MuSiQue => {
            for alias in task.more.get("answer_aliases").and_then(Value::as_array).into_iter().flatten() {
                let alias = alias.as_str().ok_or_else(|| row.error("answer_aliases must be texts"))?;
                if !task.gold.iter().any(|known| known == alias) {
                    task.gold.push(alias.to_owned());
                }
            }
        }
        Benchmark::XbenchDeepSearch => {
            if let Some(steps) = row.text(&["reference_steps"]) {
                let steps = plain(benchmark, row, "reference_steps", &steps)?;
                task.more.insert("reference_steps".to_owned(), Value::from(steps));
            }
        }
        Benchmark::Frames => {
            if let Some(Value::String(list)) = row.fields.get("wiki_links") {
                let links = gold::python_list(list).map_err(|why| row.error(format!("wiki_links {why}")))?;
                task.more.insert("wiki_links".to_owned(), links.into());
            }
        }
        Benchmark::SciBench => {
            // Two books number their problems alike.
            if let Some(source) = row.text(&["source"]) {
                task.id = format!("{}:{}", source.trim(), task.id);
            }
            // As the official prompt: without the unit's power of ten, which the grader knows.
            let unit = row.text(&["unit"]).map(|unit| POWER_OF_TEN.replace(&unit, "").replace('$', "").trim().to_owned());
            if let Some(unit) = unit.filter(|unit| !unit.is_empty()) {
                task.question += &format!(" The unit of the answer is {unit}.");
            }
        }
        Benchmark::Ds1000 => {
            let metadata = row.fields.get("metadata").and_then(Value::as_object);
            let id = metadata.and_then(|metadata| metadata.get("problem_id")).or_else(|| row.fields.get("problem_id"));
            task.id = match id {
                Some(Value::Number(n)) => n.to_string(),
                Some(Value::String(s)) => s.clone(),
                _ => return Err(row.error("no metadata.problem_id")),
            };
        }
        Benchmark::MmluPro => {
            let options = row.fields.get("options").and_then(Value::as_array).filter(|options| (2..=10).contains(&options.len()));
            let options = options.ok_or_else(|| row.error("options must be a list of 2 to 10 texts"))?;
            let texts: Option<Vec<&str>> = options.iter().map(Value::as_str).collect();
            let texts = texts.ok_or_else(|| row.error("options must be texts"))?;
            let lines: String = ('A'..).zip(texts).map(|(letter, text)| format!("\n{letter}. {text}")).collect();
            task.more.insert("question".to_owned(), Value::from(task.question.clone()));
            task.question += &lines;
        }
        Benchmark::IfEval => {
            let list = |key: &str| row.fields.get(key).and_then(Value::as_array).map(Vec::len);
            match (list("instruction_id_list"), list("kwargs")) {
                (Some(n), Some(m)) if n == m && n > 0 => {}
                _ => return Err(row.error("instruction_id_list and kwargs must be lists of the same length, one or more")),
            }
        }
        Benchmark::ResearchQa => {
            let rubric = row.fields.get("rubric").and_then(Value::as_array).filter(|items| !items.is_empty());
            let rubric = rubric.ok_or_else(|| row.error("rubric must be a list of items"))?;
            if rubric.iter().any(|item| !item["rubric_item"].is_string()) {
                return Err(row.error("every item of rubric needs the text rubric_item"));
            }
        }
        _ => {}
    }
    Ok(())
}

/// The text of a field that is obfuscated where the benchmark is.
fn plain(benchmark: Benchmark, row: &Row, what: &str, field: &str) -> Result<String> {
    let Some(cipher) = Cipher::of(benchmark) else { return Ok(field.to_owned()) };
    let canary = row.need("canary", &["canary"])?;
    cipher.reveal(field, &canary).map_err(|why| row.error(format!("{what} {why}")))
}

/// 2Wiki's `id_aliases.json`, one object a line: further names of the answers' entities.
fn add_aliases(tasks: &mut [Task], path: &Path) -> Result<()> {
    let file = if path.is_dir() { path.join("id_aliases.json") } else { path.with_file_name("id_aliases.json") };
    let has_ids = tasks.iter().any(|task| task.more.contains_key("answer_id"));
    if !has_ids || !file.is_file() {
        return Ok(());
    }
    let mut aliases: HashMap<String, Vec<String>> = HashMap::new();
    for row in rows::read(&file)? {
        let id = row.need("entity", &["Q_id"])?;
        let names = ["aliases", "demonyms"].iter().filter_map(|key| row.fields.get(*key)).flat_map(Value::as_array).flatten();
        aliases.entry(id).or_default().extend(names.filter_map(Value::as_str).map(str::to_owned));
    }
    for task in tasks {
        let id = task.more.get("answer_id").and_then(Value::as_str);
        for alias in id.and_then(|id| aliases.get(id)).into_iter().flatten() {
            if !task.gold.contains(alias) {
                task.gold.push(alias.clone());
            }
        }
    }
    Ok(())
}

/// DeepResearch Bench's criteria and weights, by task, and the reference reports where `reference.jsonl` holds them.
fn add_criteria(tasks: &mut [Task], path: &Path) -> Result<()> {
    let file = if path.is_dir() { path.join("criteria.jsonl") } else { path.with_file_name("criteria.jsonl") };
    if !file.is_file() || tasks.iter().all(|task| task.more.contains_key("criterions")) {
        return Ok(());
    }
    let by_id = |file: &Path| -> Result<HashMap<String, Row>> {
        rows::read(file)?.into_iter().map(|row| Ok((row.need("id", &["id"])?, row))).collect()
    };
    let criteria = by_id(&file)?;
    let references = file.with_file_name("reference.jsonl");
    let references = if references.is_file() { by_id(&references)? } else { HashMap::new() };
    for task in tasks {
        let row = criteria
            .get(&task.id)
            .ok_or_else(|| Error::Other(format!("{}: no criteria for task {:?}", file.display(), task.id)))?;
        for key in ["dimension_weight", "criterions"] {
            let value = row.fields.get(key).ok_or_else(|| row.error(format!("no {key:?}")))?;
            task.more.insert(key.to_owned(), value.clone());
        }
        if let Some(row) = references.get(&task.id) {
            task.more.insert("reference".to_owned(), Value::from(row.need("report", &["article"])?));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
