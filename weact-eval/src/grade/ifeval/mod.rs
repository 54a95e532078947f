//! IFEval: instructions that a program can check, all 25 of the public set.
//!
//! Strict: the response itself follows the instruction. Loose: the response does, or one of seven forms of it: without its first line,
//! without its last, without both, and each of the four without asterisks. A blank text follows nothing.
//!
//! Where the original uses a trained model or draws at random, this differs: sentences and words in capitals are counted by rules
//! (`sentences.rs`), languages told by script and frequent words (`language.rs`; a text whose language can't be told passes, as there),
//! and an argument that is missing is an error, where the original draws one. JSON is checked by the standard: `NaN` is none. Words
//! are Unicode's, as in NLTK from 3.10 on; before, it split those of Indic scripts at vowel signs.

mod language;
mod sentences;

use regex::{Regex, RegexBuilder};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::{Graded, Rule, text};
use crate::{Error, Result, task::Task};

/// What became of each instruction, in the task's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the response follows it.
    pub strict: Vec<bool>,
    /// Whether a form of the response follows it.
    pub loose: Vec<bool>,
}

pub(super) struct IfEval;

impl Rule for IfEval {
    fn id(&self) -> &str {
        "ifeval-rules@1"
    }

    fn scores(&self) -> &'static [&'static str] {
        &["prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"]
    }

    /// The verdict is that of all instructions, strictly. `instruction_strict` and `_loose` are shares of this task's instructions: the
    /// benchmark's own instruction level weights tasks by their number.
    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let Outcome { strict, loose } = follow(task, answer)?;
        let all = |followed: &[bool]| f64::from(u8::from(followed.iter().all(|f| *f)));
        let share = |followed: &[bool]| followed.iter().filter(|f| **f).count() as f64 / followed.len() as f64;
        let scores = [all(&strict), all(&loose), share(&strict), share(&loose)];
        let scores = self.scores().iter().map(|name| (*name).to_owned()).zip(scores).collect();
        let ids = task.more["instruction_id_list"].as_array().expect("it was read above").iter().filter_map(Value::as_str);
        let broken: Vec<&str> = ids.zip(&strict).filter(|(_, followed)| !**followed).map(|(id, _)| id).collect();
        let detail = (!broken.is_empty()).then(|| format!("not followed: {}", broken.join(", ")));
        Ok(Graded { scores, detail, ..Graded::of(broken.is_empty()) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let mut task = Task::known("Answer without commas, in at most four words.", &[]);
        task.more.insert(
            "instruction_id_list".to_owned(),
            serde_json::json!(["punctuation:no_comma", "length_constraints:number_words"]),
        );
        task.more.insert("kwargs".to_owned(), serde_json::json!([{}, {"relation": "less than", "num_words": 5}]));
        Some((task, "Here you are.".to_owned(), "Well, here you are.".to_owned()))
    }
}

/// Checks `response` against the instructions of `task`: `instruction_id_list` and `kwargs`, one object each, in which null is as
/// absent.
///
/// # Errors
/// If they are missing, don't fit together, name an unknown instruction, or lack an argument of a known one.
pub fn follow(task: &Task, response: &str) -> Result<Outcome> {
    let wrong = |why: String| Error::Other(format!("task {}: {why}", task.id));
    let list = |key: &str| match task.more.get(key).and_then(Value::as_array) {
        Some(list) => Ok(list),
        None => Err(wrong(format!("IFEval's grader needs \"{key}\", a list"))),
    };
    let (ids, kwargs) = (list("instruction_id_list")?, list("kwargs")?);
    if ids.is_empty() || ids.len() != kwargs.len() {
        return Err(wrong(format!("{} instructions have {} kwargs: each has one", ids.len(), kwargs.len())));
    }
    let forms = forms(response);
    let mut outcome = Outcome::default();
    for (id, kwargs) in ids.iter().zip(kwargs) {
        let (Some(id), Some(kwargs)) = (id.as_str(), kwargs.as_object()) else {
            return Err(wrong("an instruction is a string, and its kwargs an object".to_owned()));
        };
        let follows = |text: &String| Ok(!text.trim_matches(text::is_space).is_empty() && follows(id, &Arguments(kwargs), text)?);
        let followed = forms.iter().map(follows).collect::<std::result::Result<Vec<_>, String>>();
        let followed = followed.map_err(|why| wrong(format!("instruction {id}: {why}")))?;
        outcome.strict.push(followed[0]);
        outcome.loose.push(followed.contains(&true));
    }
    Ok(outcome)
}

/// The response and its seven looser forms.
fn forms(response: &str) -> [String; 8] {
    let lines: Vec<&str> = response.split('\n').collect();
    let part = |from: usize, to: usize| lines.get(from..to.max(from)).unwrap_or_default().join("\n");
    let (n, trim) = (lines.len(), |text: String| text.trim_matches(text::is_space).to_owned());
    let forms = [response.to_owned(), trim(part(1, n)), trim(part(0, n - 1)), trim(part(1, n - 1))];
    let [whole, first, last, both] = forms.clone().map(|form| form.replace('*', ""));
    let [a, b, c, d] = forms;
    [a, b, c, d, whole, first, last, both]
}

/// An instruction's arguments. Null counts as absent, as the hub's copy of the data fills them in.
struct Arguments<'a>(&'a Map<String, Value>);

type Checked<T> = std::result::Result<T, String>;

impl Arguments<'_> {
    fn get(&self, name: &str) -> Checked<&Value> {
        self.0.get(name).filter(|value| !value.is_null()).ok_or_else(|| format!("it needs the argument {name}"))
    }

    fn text(&self, name: &str) -> Checked<&str> {
        self.get(name)?.as_str().ok_or_else(|| format!("{name} is no string"))
    }

    fn texts(&self, name: &str) -> Checked<Vec<&str>> {
        let list = self.get(name)?.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        list.ok_or_else(|| format!("{name} is no list of strings"))
    }

    /// A whole number; tables write them as floats.
    fn count(&self, name: &str) -> Checked<usize> {
        let number = self.get(name)?.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e9).contains(n));
        number.map(|n| n as usize).ok_or_else(|| format!("{name} is no count"))
    }

    /// Whether `n` stands in the relation that `relation` names to the count `threshold`.
    fn compare(&self, n: usize, relation: &str, threshold: &str) -> Checked<bool> {
        let threshold = self.count(threshold)?;
        match self.text(relation)? {
            "less than" => Ok(n < threshold),
            "at least" => Ok(n >= threshold),
            other => Err(format!("{relation} is {other:?}: use \"less than\" or \"at least\"")),
        }
    }
}

/// Whether `response` follows one instruction.
fn follows(id: &str, arguments: &Arguments, response: &str) -> Checked<bool> {
    let trimmed = response.trim_matches(text::is_space);
    let matches = |pattern: &str| fixed(pattern).find_iter(response).count();
    Ok(match id {
        "keywords:existence" => {
            let found = |keyword: &&str| Ok::<_, String>(given(keyword)?.is_match(response));
            arguments.texts("keywords")?.iter().map(found).collect::<Checked<Vec<_>>>()?.iter().all(|found| *found)
        }
        "keywords:frequency" => {
            let n = given(arguments.text("keyword")?.trim())?.find_iter(response).count();
            arguments.compare(n, "relation", "frequency")?
        }
        "keywords:forbidden_words" => {
            let found = |word: &&str| Ok::<_, String>(given(&format!(r"\b{word}\b"))?.is_match(response));
            arguments.texts("forbidden_words")?.iter().map(found).collect::<Checked<Vec<_>>>()?.iter().all(|found| !found)
        }
        "keywords:letter_frequency" => {
            let letter = arguments.text("letter")?.trim().to_lowercase();
            if letter.chars().count() != 1 {
                return Err(format!("letter is {letter:?}: it takes one"));
            }
            arguments.compare(response.to_lowercase().matches(&letter).count(), "let_relation", "let_frequency")?
        }
        "language:response_language" => {
            let wanted = arguments.text("language")?;
            language::detect(response).is_none_or(|found| wanted.split('-').next() == Some(found))
        }
        "length_constraints:number_sentences" => arguments.compare(sentences::count(response), "relation", "num_sentences")?,
        "length_constraints:number_paragraphs" => has_paragraphs(response, arguments.count("num_paragraphs")?),
        "length_constraints:number_words" => arguments.compare(matches(r"\w+"), "relation", "num_words")?,
        "length_constraints:nth_paragraph_first_word" => nth_paragraph_begins(response, arguments)?,
        "detectable_content:number_placeholders" => matches(r"\[.*?\]") >= arguments.count("num_placeholders")?,
        "detectable_content:postscript" => {
            let pattern = match arguments.text("postscript_marker")?.trim() {
                "P.P.S" => r"p\.\s?p\.\s?s".to_owned(),
                "P.S." => r"p\.\s?s\.".to_owned(),
                other => other.to_lowercase(),
            };
            given(&pattern)?.is_match(&response.to_lowercase())
        }
        "detectable_format:number_bullet_lists" => {
            matches(r"(?m)^\s*\*[^\*].*$") + matches(r"(?m)^\s*-.*$") == arguments.count("num_bullets")?
        }
        "detectable_format:constrained_response" => {
            ["My answer is yes.", "My answer is no.", "My answer is maybe."].iter().any(|option| response.contains(option))
        }
        "detectable_format:number_highlighted_sections" => {
            let highlighted = |pattern: &str| {
                let inside = |found: &regex::Match| !found.as_str().trim_matches('*').trim_matches(text::is_space).is_empty();
                fixed(pattern).find_iter(response).filter(inside).count()
            };
            highlighted(r"\*[^\n\*]*\*") + highlighted(r"\*\*[^\n\*]*\*\*") >= arguments.count("num_highlights")?
        }
        "detectable_format:multiple_sections" => {
            let mark = given_cased(&format!(r"\s?{}\s?\d+\s?", arguments.text("section_spliter")?.trim()))?;
            mark.find_iter(response).count() >= arguments.count("num_sections")?
        }
        "detectable_format:json_format" => is_json(trimmed),
        "detectable_format:title" => {
            let named = |found: regex::Match| {
                found.as_str().trim_start_matches('<').trim_end_matches('>').chars().any(|c| !text::is_space(c))
            };
            fixed(r"<<[^\n]+>>").find_iter(response).any(named)
        }
        "combination:two_responses" => {
            let (blank, given): (Vec<_>, Vec<_>) = response
                .split("******")
                .map(|part| part.trim_matches(text::is_space))
                .enumerate()
                .partition(|(_, part)| part.is_empty());
            let last = blank.len() + given.len() - 1;
            blank.iter().all(|(i, _)| *i == 0 || *i == last) && given.len() == 2 && given[0].1 != given[1].1
        }
        "combination:repeat_prompt" => {
            trimmed.to_lowercase().starts_with(&arguments.text("prompt_to_repeat")?.trim_matches(text::is_space).to_lowercase())
        }
        "startend:end_checker" => {
            let ending = arguments.text("end_phrase")?.trim_matches(text::is_space).to_lowercase();
            trimmed.trim_matches('"').to_lowercase().ends_with(&ending)
        }
        "startend:quotation" => trimmed.chars().count() > 1 && trimmed.starts_with('"') && trimmed.ends_with('"'),
        "change_case:capital_word_frequency" => {
            arguments.compare(sentences::count_capital_words(response), "capital_relation", "capital_frequency")?
        }
        "change_case:english_capital" => text::is_upper(response) && is_english(response),
        "change_case:english_lowercase" => text::is_lower(response) && is_english(response),
        "punctuation:no_comma" => !response.contains(','),
        _ => return Err("it is not one of IFEval's 25".to_owned()),
    })
}

fn is_english(response: &str) -> bool {
    language::detect(response).is_none_or(|language| language == "en")
}

/// Paragraphs stand between `***`; only the first and the last may be blank, and then they don't count.
fn has_paragraphs(response: &str, wanted: usize) -> bool {
    let paragraphs: Vec<bool> =
        fixed(r"\s?\*\*\*\s?").split(response).map(|part| !part.trim_matches(text::is_space).is_empty()).collect();
    let inner = paragraphs.get(1..paragraphs.len() - 1).unwrap_or_default();
    inner.iter().all(|written| *written) && paragraphs.iter().filter(|written| **written).count() == wanted
}

/// Paragraphs stand between blank lines. The word is the paragraph's first, up to a mark, whatever its case.
fn nth_paragraph_begins(response: &str, arguments: &Arguments) -> Checked<bool> {
    let (wanted, nth) = (arguments.count("num_paragraphs")?, arguments.count("nth_paragraph")?);
    let first_word = arguments.text("first_word")?.to_lowercase();
    if nth == 0 || nth > wanted {
        return Err(format!("nth_paragraph is {nth} of {wanted}"));
    }
    let paragraphs: Vec<&str> = response.split("\n\n").map(|part| part.trim_matches(text::is_space)).collect();
    let n = paragraphs.iter().filter(|paragraph| !paragraph.is_empty()).count();
    // As in the original, blank paragraphs count for the position and not for the number.
    let word = paragraphs[nth.min(paragraphs.len()) - 1].split(text::is_space).next().unwrap_or_default();
    let word = word.trim_start_matches('\'').trim_start_matches('"');
    let word: String = word.chars().take_while(|c| !".,?!'\"".contains(*c)).collect();
    Ok(nth <= n && n == wanted && word.to_lowercase() == first_word)
}

fn is_json(response: &str) -> bool {
    let mut text = response;
    for fence in ["```json", "```Json", "```JSON", "```"] {
        text = text.strip_prefix(fence).unwrap_or(text);
    }
    let text = text.strip_suffix("```").unwrap_or(text);
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// A pattern of this file.
fn fixed(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a legal pattern")
}

/// A pattern of the task, which the original takes as a regular expression too; its case does not count.
fn given(pattern: &str) -> Checked<Regex> {
    compile(pattern, true)
}

fn given_cased(pattern: &str) -> Checked<Regex> {
    compile(pattern, false)
}

fn compile(pattern: &str, any_case: bool) -> Checked<Regex> {
    RegexBuilder::new(pattern).case_insensitive(any_case).build().map_err(|_| format!("{pattern:?} is no legal pattern"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::grade::tests::{shared, text_of};

    #[derive(Deserialize)]
    struct Golden {
        cases: Vec<Case>,
        languages: Vec<Detected>,
    }

    #[derive(Deserialize)]
    struct Case {
        instruction: String,
        kwargs: Value,
        response: String,
        strict: bool,
        loose: bool,
    }

    #[derive(Deserialize)]
    struct Detected {
        text: String,
        language: String,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../tests/golden/ifeval.json")).expect("JSON")
    }

    fn task(instructions: &[(&str, Value)]) -> Task {
        let (ids, kwargs): (Vec<&str>, Vec<Value>) = instructions.iter().cloned().unzip();
        let mut task = Task::known("", &[]);
        task.more.insert("instruction_id_list".to_owned(), json!(ids));
        task.more.insert("kwargs".to_owned(), json!(kwargs));
        task
    }

    /// What the original checkers say: `tests/golden/ifeval.py`.
    #[test]
    fn all_25_instructions_are_checked_as_in_the_original() {
        let cases = golden().cases;
        for Case { instruction, kwargs, response, strict, loose } in &cases {
            let outcome = follow(&task(&[(instruction, kwargs.clone())]), response).expect("checkable");
            let expected = Outcome { strict: vec![*strict], loose: vec![*loose] };
            assert_eq!(outcome, expected, "{instruction} {kwargs}: {response:?}");
        }
        // response_language is in the next test.
        assert_eq!(cases.iter().map(|case| &case.instruction).collect::<BTreeSet<_>>().len(), 24);
    }

    /// langdetect's verdicts, and what differs from it on purpose: capitals don't matter, and what can't be told passes.
    #[test]
    fn languages_are_told_apart() {
        let languages = golden().languages;
        let speaks = |language: &str, text: &str| {
            let task = task(&[("language:response_language", json!({"language": language}))]);
            follow(&task, text).expect("checkable").strict[0]
        };
        assert_eq!(languages.len(), 31);
        for Detected { text, language } in &languages {
            assert!(speaks(language, text) && speaks(language, &text.to_uppercase()), "{language}: {text}");
            assert!(languages.iter().all(|other| other.language == *language || !speaks(&other.language, text)), "{text}");
        }
        assert!(
            speaks("sw", "12:30") && speaks("fr", "Merci Google!") && speaks("zh-cn", "今天天气很好。") && !speaks("en", "今天")
        );
        let shout = [("change_case:english_capital", json!({}))];
        for (text, follows) in [("THIS IS ALL IN CAPITALS.", true), ("DAS IST ALLES GROSS UND NICHT ENGLISCH", false)] {
            assert_eq!(follow(&task(&shout), text).expect("checkable").strict, [follows], "{text}");
        }
    }

    #[test]
    fn prompt_and_instruction_level_are_scored_strictly_and_loosely() {
        let task = task(&[
            ("punctuation:no_comma", json!({"num_words": null})),
            ("startend:quotation", json!({})),
            ("length_constraints:number_words", json!({"relation": "at least", "num_words": 2.0})),
        ]);
        let graded = IfEval.apply(&task, "Sure!\n\"so be it\"").expect("checkable");
        let scores: Vec<f64> = IfEval.scores().iter().map(|name| graded.scores[*name]).collect();
        assert_eq!(scores, [0.0, 1.0, 2.0 / 3.0, 1.0]);
        assert_eq!((graded.score, graded.detail.as_deref()), (Some(0.0), Some("not followed: startend:quotation")));
    }

    #[test]
    fn a_row_that_cannot_be_checked_is_an_error() {
        for (instructions, words) in [
            (
                vec![("length_constraints:number_words", json!({"relation": "at least", "num_words": null}))],
                "needs the argument num_words",
            ),
            (
                vec![("length_constraints:number_words", json!({"relation": "about", "num_words": 3}))],
                "use \"less than\" or \"at least\"",
            ),
            (
                vec![("length_constraints:number_words", json!({"relation": "at least", "num_words": 2.5}))],
                "num_words is no count",
            ),
            (vec![("keywords:existence", json!({"keywords": ["C++("]}))], "no legal pattern"),
            (
                vec![(
                    "length_constraints:nth_paragraph_first_word",
                    json!({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}),
                )],
                "2 of 1",
            ),
            (vec![("startend:rhyme", json!({}))], "not one of IFEval's 25"),
            (vec![("punctuation:no_comma", json!([]))], "its kwargs an object"),
            (vec![], "each has one"),
        ] {
            let error = follow(&task(&instructions), "a response").expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(follow(&Task::known("", &[]), "x").expect_err("no list").to_string().contains("\"instruction_id_list\""));
    }

    #[test]
    fn every_real_row_can_be_checked() {
        let Some(shared) = shared() else { return };
        let text = text_of(&shared.join("data/bench/ifeval/input_data.jsonl"));
        let mut n = 0;
        for line in text.lines() {
            let row: Map<String, Value> = serde_json::from_str(line).expect("JSON");
            let task = Task { more: row, ..Task::known("", &[]) };
            n += follow(&task, "A response, of \"some\" words.").unwrap_or_else(|e| panic!("{e}: {line}")).strict.len();
        }
        assert_eq!(n, 78);
    }
}
