//! GAIA's rule. A gold answer decides by its form how it is compared:
//!
//! - a number, as Python's `float` reads it: the answer without `$`, `%` and `,` is the same number;
//! - a list, where it holds `,` or `;`: as many elements in the same order, each the same number, or the same letters and marks
//!   whatever the blanks and the case;
//! - any other: the same letters and digits whatever the blanks, the case and ASCII punctuation.
//!
//! So `100,000` as a gold answer is a list of two, `1,7` is 17, and `10:30` is `1030`. The original reads an answer that is no
//! number as infinity; here it is no number, whatever the gold answer.

use super::{Graded, Rule, gold, text};
use crate::{Result, task::Task};

/// What the benchmark's own prompt has answers begin with.
const MARK: &str = "FINAL ANSWER:";

pub(super) struct Gaia;

impl Rule for Gaia {
    fn id(&self) -> &str {
        "gaia-rule@1"
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let gold = gold(task)?;
        let marked = answer.rsplit_once(MARK).map(|(_, rest)| rest.trim());
        let right = gold.iter().any(|gold| is_right(marked.unwrap_or(answer), gold));
        Ok(Graded { graded_text: marked.map(str::to_owned), ..Graded::of(right) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        Some((Task::known("What is 10 squared, and its root?", &["100; 10"]), "100, $10".to_owned(), "10, 100".to_owned()))
    }
}

/// Whether `answer` is right by the rule above.
pub fn is_right(answer: &str, gold: &str) -> bool {
    let is_separator = |c: char| [',', ';'].contains(&c);
    if text::float(gold).is_some() {
        same_number(answer, gold)
    } else if gold.contains(is_separator) {
        let (answers, golds): (Vec<&str>, Vec<&str>) = (answer.split(is_separator).collect(), gold.split(is_separator).collect());
        let same = |(answer, gold): (&&str, &&str)| match text::float(gold) {
            Some(_) => same_number(answer, gold),
            None => letters(answer) == letters(gold),
        };
        answers.len() == golds.len() && answers.iter().zip(&golds).all(same)
    } else {
        let bare = |text: &str| letters(text).replace(text::is_punctuation, "");
        bare(answer) == bare(gold)
    }
}

fn same_number(answer: &str, gold: &str) -> bool {
    text::float(&answer.replace(['$', '%', ','], "")).is_some_and(|number| text::float(gold) == Some(number))
}

/// Lower-case, without blanks.
fn letters(text: &str) -> String {
    text.chars().filter(|c| !text::is_space(*c)).collect::<String>().to_lowercase()
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        model_answer: String,
        ground_truth: String,
        correct: bool,
    }

    /// Verdicts of the public scorer: `tests/golden/LICENSE.note.txt`.
    #[test]
    fn every_verdict_is_the_public_scorers() {
        let cases: Vec<Case> = serde_json::from_str(include_str!("../../tests/golden/gaia_scorer.json")).expect("JSON");
        assert_eq!(cases.len(), 34);
        for Case { model_answer, ground_truth, correct } in cases {
            assert_eq!(is_right(&model_answer, &ground_truth), correct, "{model_answer:?} for {ground_truth:?}");
        }
    }

    /// The rules above on numbers, money, dates, URLs and lists: an answer is compared whole, never found in a longer one.
    #[test]
    fn numbers_money_dates_urls_and_lists_follow_the_written_rules() {
        for (answer, gold, right) in [
            ("170", "170", true),
            ("000000170", "170", true),
            ("1700", "170", false),
            ("170 apples", "170", false),
            ("1.7e2", "170", true),
            ("$0.00", "0", true),
            ("$1,234.50", "1234.5", true),
            ("12%", "12", true),
            ("€5", "5", false),
            ("1.234,50", "1234.5", false),
            ("2024-05-17", "2024-05-17", true),
            ("2024/05/17", "2024-05-17", true),
            ("17 May 2024", "2024-05-17", false),
            ("May 17 2024", "May 17, 2024", false),
            ("may 17,2024", "May 17, 2024", true),
            ("https://a.org/x", "https://a.org/x", true),
            ("https://a.org/x/y", "https://a.org/x", false),
            ("a.org/x", "https://a.org/x", false),
            ("3; Paris, b-c", "3,paris;b-c", true),
            ("paris, 3, b-c", "3,paris;b-c", false),
        ] {
            assert_eq!(is_right(answer, gold), right, "{answer:?} for {gold:?}");
            let graded = Gaia.apply(&Task::known("", &[gold]), &format!("I think.\nFINAL ANSWER: {answer}")).expect("gradable");
            assert_eq!(graded, Graded { graded_text: Some(answer.to_owned()), ..Graded::of(right) });
        }
        assert!(!is_right("whatever", "inf"));
    }
}
