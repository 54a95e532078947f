//! What single benchmarks need beyond their columns.

use std::{
    collections::{HashMap, hash_map::Entry},
    path::{Path, PathBuf},
    sync::LazyLock,
};

use regex::Regex;
use serde_json::Value;

use super::{
    digest, gold,
    rows::{self, Row},
};
use crate::{Error, Result, benchmark::Benchmark, task::Task};

/// A power of ten with which a unit begins, and the dollar signs of LaTeX around it.
static POWER_OF_TEN: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^\s*\$?\s*10\s*\^\s*(?:\{[^}]*\}|[+-]?\d+)\s*\$?").expect("a legal pattern"));

/// Checks and completes the task that was made of `row`, a row of `file`.
pub(super) fn complete(benchmark: Benchmark, file: &Path, row: &Row, task: &mut Task) -> Result<()> {
    match benchmark {
        Benchmark::Gaia => attach(file, row, task),
        Benchmark::MuSiQue => {
            add_gold(task, row.texts("answer_aliases")?);
            Ok(())
        }
        Benchmark::Frames => {
            if let Some(Value::String(list)) = row.fields.get("wiki_links") {
                let links = gold::python_list(list).map_err(|why| row.error(format!("wiki_links {why}")))?;
                task.more.insert("wiki_links".to_owned(), links.into());
            }
            Ok(())
        }
        Benchmark::SciBench => name_and_ask_for_unit(row, task),
        Benchmark::Ds1000 => {
            let metadata = row.fields.get("metadata").and_then(Value::as_object);
            let id = metadata.and_then(|metadata| metadata.get("problem_id")).or_else(|| row.fields.get("problem_id"));
            task.id = match id {
                Some(Value::Number(n)) => n.to_string(),
                Some(Value::String(s)) => s.clone(),
                _ => return Err(row.error("no metadata.problem_id")),
            };
            Ok(())
        }
        Benchmark::MmluPro => add_options(row, task),
        Benchmark::IfEval => {
            let list = |key: &str| row.fields.get(key).and_then(Value::as_array).map(Vec::len);
            match (list("instruction_id_list"), list("kwargs")) {
                (Some(n), Some(m)) if n == m && n > 0 => Ok(()),
                _ => Err(row.error("instruction_id_list and kwargs must be lists of the same length, one or more")),
            }
        }
        Benchmark::ResearchQa => {
            let rubric = row.fields.get("rubric").and_then(Value::as_array).filter(|items| !items.is_empty());
            let rubric = rubric.ok_or_else(|| row.error("rubric must be a list of items"))?;
            match rubric.iter().all(|item| item["rubric_item"].is_string()) {
                true => Ok(()),
                false => Err(row.error("every item of rubric needs the text rubric_item")),
            }
        }
        _ => Ok(()),
    }
}

/// What stands in files beside the rows' one.
pub(super) fn complete_from_folder(benchmark: Benchmark, path: &Path, tasks: &mut [Task]) -> Result<()> {
    match benchmark {
        Benchmark::TwoWiki => add_aliases(path, tasks),
        Benchmark::DeepResearchBench => {
            add_criteria(path, tasks)?;
            add_references(path, tasks)
        }
        _ => Ok(()),
    }
}

/// GAIA's attachment lies beside the file.
fn attach(file: &Path, row: &Row, task: &mut Task) -> Result<()> {
    let Some(name) = row.text(&["file_name"])?.filter(|name| !name.trim().is_empty()) else { return Ok(()) };
    let attachment = file.parent().unwrap_or(Path::new("")).join(&name);
    if name.contains(['/', '\\']) || !attachment.is_file() {
        return Err(row.error(format!("attachment {name:?} is not beside the file: download it too")));
    }
    task.files.push(attachment);
    Ok(())
}

/// A problem's number is an exercise's: exercises of several parts are several problems, and two books number theirs alike. The unit
/// is asked for as in the official prompt: without its power of ten, which the grader knows.
fn name_and_ask_for_unit(row: &Row, task: &mut Task) -> Result<()> {
    let text = |key: &str| Ok::<_, Error>(row.text(&[key])?.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()));
    if let (Some(source), Some(number)) = (text("source")?, text("problemid")?) {
        task.id = format!("{source}:{number}:{}", &digest(&task.question)[..8]);
    }
    if let Some(unit) = text("unit")?.map(|unit| POWER_OF_TEN.replace(&unit, "").trim().to_owned()) {
        let bare = unit.strip_prefix('$').unwrap_or(&unit);
        let bare = bare.strip_suffix('$').unwrap_or(bare).trim();
        // A dollar sign alone is the unit.
        let unit = if bare.is_empty() { &unit } else { bare };
        if !unit.is_empty() {
            task.question += &format!(" The unit of the answer is {unit}.");
        }
    }
    Ok(())
}

/// MMLU-Pro's options stand below the question; the question alone stays in `more`.
fn add_options(row: &Row, task: &mut Task) -> Result<()> {
    let options = row.texts("options")?;
    if !(2..=10).contains(&options.len()) {
        return Err(row.error("options must be a list of 2 to 10 texts"));
    }
    let letters = ('A'..).map(String::from).take(options.len());
    if !letters.clone().any(|letter| task.gold == [letter]) {
        return Err(row.error(format!("the answer must be the letter of one of the {} options", options.len())));
    }
    let lines: String = letters.zip(options).map(|(letter, text)| format!("\n{letter}. {text}")).collect();
    task.more.insert("question".to_owned(), Value::from(task.question.clone()));
    task.question += &lines;
    Ok(())
}

fn add_gold<'a>(task: &mut Task, answers: impl IntoIterator<Item = &'a str>) {
    for answer in answers {
        if !task.gold.iter().any(|known| known == answer) {
            task.gold.push(answer.to_owned());
        }
    }
}

/// 2Wiki's `id_aliases.json`, one object a line: further names of the answers' entities.
fn add_aliases(path: &Path, tasks: &mut [Task]) -> Result<()> {
    let needed = tasks.iter().any(|task| task.more.contains_key("answer_id"));
    let Some(file) = beside(path, "id_aliases.json").filter(|_| needed) else { return Ok(()) };
    let mut aliases: HashMap<String, Vec<String>> = HashMap::new();
    for row in rows::read(&file)? {
        let names = [row.texts("aliases")?, row.texts("demonyms")?].concat();
        aliases.entry(row.need("entity", &["Q_id"])?).or_default().extend(names.into_iter().map(str::to_owned));
    }
    for task in tasks {
        let id = task.more.get("answer_id").and_then(Value::as_str);
        let names = id.and_then(|id| aliases.get(id));
        add_gold(task, names.into_iter().flatten().map(String::as_str));
    }
    Ok(())
}

/// DeepResearch Bench's criteria and weights, where the rows don't hold them themselves.
fn add_criteria(path: &Path, tasks: &mut [Task]) -> Result<()> {
    let needed = tasks.iter().any(|task| !task.more.contains_key("criterions"));
    let Some(file) = beside(path, "criteria.jsonl").filter(|_| needed) else { return Ok(()) };
    let criteria = by_id(&file)?;
    for task in tasks {
        let missing = || Error::Other(format!("{}: no criteria for task {:?}", file.display(), task.id));
        let row = criteria.get(&task.id).ok_or_else(missing)?;
        for key in ["dimension_weight", "criterions"] {
            let value = row.fields.get(key).ok_or_else(|| row.error(format!("no {key:?}")))?;
            task.more.insert(key.to_owned(), value.clone());
        }
    }
    Ok(())
}

/// The reference reports of DeepResearch Bench, where `reference.jsonl` holds them.
fn add_references(path: &Path, tasks: &mut [Task]) -> Result<()> {
    let Some(file) = beside(path, "reference.jsonl").filter(|file| file.is_file()) else { return Ok(()) };
    let references = by_id(&file)?;
    for task in tasks {
        if let Some(row) = references.get(&task.id) {
            task.more.insert("reference".to_owned(), Value::from(row.need("report", &["article"])?));
        }
    }
    Ok(())
}

fn by_id(file: &Path) -> Result<HashMap<String, Row>> {
    let mut by_id = HashMap::new();
    for row in rows::read(file)? {
        match by_id.entry(row.need("id", &["id"])?) {
            Entry::Vacant(entry) => entry.insert(row),
            Entry::Occupied(entry) => return Err(row.error(format!("id {:?} stands twice", entry.key()))),
        };
    }
    Ok(by_id)
}

/// A file that belongs to the benchmark: in its folder always, beside its file where it is there.
fn beside(path: &Path, name: &str) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.join(name));
    }
    Some(path.with_file_name(name)).filter(|file| file.is_file())
}
