//! MMLU-Pro's letter: the first of three patterns that finds one.
//!
//! 1. `answer is (X)`, the first;
//! 2. `Answer: X`, the last on the first line that has one;
//! 3. a letter that stands alone, the last.
//!
//! X is A to J. Where none finds a letter, the answer is wrong and counted as unparsed; the original draws a letter instead, which
//! [`super::Options::mmlu_random_fallback`] repeats.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::{Graded, Rule, gold};
use crate::{Error, Result, task::Task};

/// The original seeds Python's generator with 12345 before every draw, so that it always draws the same: `randint(0, n - 1)` for n
/// options, n from 1.
const DRAWN: [usize; 16] = [0, 1, 1, 3, 3, 3, 3, 6, 6, 6, 6, 6, 6, 6, 6, 13];

pub(super) struct Choice {
    pub(super) random_fallback: bool,
}

impl Rule for Choice {
    fn id(&self) -> &str {
        if self.random_fallback { "mmlu-pro-random@1" } else { "mmlu-pro-choice@1" }
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let gold = gold(task)?;
        let is_letter = |gold: &String| matches!(gold.as_bytes(), [b'A'..=b'P']);
        if let Some(other) = gold.iter().find(|gold| !is_letter(gold)) {
            return Err(Error::Other(format!("task {}: the gold answer {other:?} is no letter of an option", task.id)));
        }
        let letter = letter(answer);
        let chosen = match letter {
            None if self.random_fallback => Some(drawn(task)?),
            letter => letter,
        };
        let right = chosen.is_some_and(|chosen| gold.iter().any(|gold| gold.starts_with(chosen)));
        let scores = [("unparsed".to_owned(), f64::from(u8::from(letter.is_none())))].into();
        let detail = letter.is_none().then(|| "no pattern finds a letter".to_owned());
        Ok(Graded { scores, graded_text: chosen.map(String::from), detail, ..Graded::of(right) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let mut task = Task::known("Which is a prime? (A) 4 (B) 5 (C) 6", &["B"]);
        task.more.insert("options".to_owned(), serde_json::json!(["4", "5", "6"]));
        Some((task, "5 has no divisor, so the answer is (B).".to_owned(), "Answer: C".to_owned()))
    }
}

/// The letter that `answer` chooses.
pub fn letter(answer: &str) -> Option<char> {
    static PATTERNS: LazyLock<[Regex; 3]> = LazyLock::new(|| {
        let patterns = [r"answer is \(?([A-J])\)?", r".*[aA]nswer:\s*([A-J])", r"\b([A-J])\b"];
        patterns.map(|pattern| Regex::new(pattern).expect("a legal pattern"))
    });
    let [is, colon, alone] = &*PATTERNS;
    let found = is.captures(answer).or_else(|| colon.captures(answer)).or_else(|| alone.captures_iter(answer).last());
    found.and_then(|found| found[1].chars().next())
}

/// The letter that the original draws.
fn drawn(task: &Task) -> Result<char> {
    let options = task.more.get("options").and_then(Value::as_array);
    let n_options = options.map(|options| options.iter().filter(|option| *option != "N/A").count());
    let index = n_options.and_then(|n| DRAWN.get(n.wrapping_sub(1)));
    let index = index.ok_or_else(|| Error::Other(format!("task {}: it needs \"options\", a list of 1 to 16", task.id)))?;
    Ok((b'A' + *index as u8).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grade::{
        Verdict,
        tests::{shared, text_of},
    };

    #[test]
    fn the_first_pattern_that_finds_a_letter_decides() {
        for (answer, expected) in [
            ("The answer is (C). No, the answer is (D).", Some('C')),
            ("so the answer is J", Some('J')),
            ("The answer is K. Answer: B", Some('B')),
            ("Answer: A or answer: B\nAnswer: C", Some('B')),
            ("answer:\n\n D", Some('D')),
            ("Not A, but I think E)", Some('E')),
            ("B", Some('B')),
            ("**F**", Some('F')),
            ("A-levels ABBA", Some('A')),
            ("the second one", None),
            ("K", None),
        ] {
            assert_eq!(letter(answer), expected, "{answer:?}");
        }
    }

    #[test]
    fn an_answer_without_a_letter_is_wrong_and_counted_unless_a_draw_is_asked_for() {
        let mut task = Task::known("", &["G"]);
        task.more.insert("options".to_owned(), serde_json::json!(["1", "2", "3", "4", "5", "6", "7", "8", "N/A"]));
        for (random_fallback, verdict) in [(false, Verdict::Wrong), (true, Verdict::Correct)] {
            let graded = Choice { random_fallback }.apply(&task, "the last").expect("gradable");
            assert_eq!((graded.verdict, graded.scores["unparsed"]), (verdict, 1.0));
        }
        task.gold = vec!["5".to_owned()];
        assert!(Choice { random_fallback: false }.apply(&task, "E").is_err());
    }

    /// Real generations; `pred` is what the public script found with the first two patterns.
    #[test]
    fn real_generations_choose_what_the_public_script_found() {
        let Some(shared) = shared() else { return };
        let text = text_of(&shared.join("data/bench/mmlu_pro/model_outputs_Mistral-7B-Instruct-v0.2_5shots.json"));
        let rows: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let alone = |row: &Value| row["pred"].is_null();
        for row in rows.iter().filter(|row| !alone(row)) {
            let expected = row["pred"].as_str().and_then(|letter| letter.chars().next());
            assert_eq!(letter(row["generated_text"].as_str().expect("text")), expected, "{}", row["question_id"]);
        }
        assert_eq!((rows.len(), rows.iter().filter(|row| alone(row)).count()), (40, 5));
    }
}
