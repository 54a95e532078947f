//! Numbers and boxed answers: SciBench and MegaScience.
//!
//! The answer is what stands in the last `\boxed{}`, behind its last `=`; without a box, the whole text. A number may carry a sign,
//! commas between thousands, an exponent or a power of ten (`1.2e-3`, `1.2 \times 10^{-3}`, `10^{-3}`), and a unit behind it. SciBench's
//! tolerance is 5 % of the greater of the two. Its gold answer is `answer_number` times the power of ten of its `unit`: the benchmark
//! asks for answers in the unit without that power.
//!
//! The paper states 5 %; its public scripts compare with 0.1, absolute or relative, and with the number alone in the box.

use std::{collections::BTreeMap, sync::LazyLock};

use regex::Regex;
use serde_json::Value;

use super::{Graded, Rule, exact::normalize, gold, text};
use crate::{Error, Result, task::Task};

const TOLERANCE: f64 = 0.05;

pub(super) struct SciBench;

impl Rule for SciBench {
    fn id(&self) -> &str {
        "scibench-number@1"
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let unit = task.more.get("unit").and_then(Value::as_str).unwrap_or_default();
        let factor = power_of_ten(unit).map_or(1.0, |power| 10_f64.powi(power));
        let number_of = |gold: &String| match number(gold) {
            Some(gold) => Ok(gold * factor),
            None => Err(Error::Other(format!("task {}: the gold answer {gold:?} is no number", task.id))),
        };
        let gold: Vec<f64> = gold(task)?.iter().map(number_of).collect::<Result<_>>()?;
        let final_text = final_text(answer);
        let number = final_text.and_then(number);
        let right = number.is_some_and(|number| gold.iter().any(|gold| text::is_close(number, *gold, TOLERANCE)));
        Ok(Graded { scores: unparsed(number.is_none()), ..with_text(Graded::of(right), answer, final_text) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let mut task = Task::known("The radius of a proton?", &["0.84"]);
        task.more.insert("unit".to_owned(), "$10^{-15} \\mathrm{~m}$".into());
        Some((task, "It is \\boxed{8.4 \\times 10^{-16}}".to_owned(), "It is \\boxed{0.84}".to_owned()))
    }
}

pub(super) struct MegaScience;

impl Rule for MegaScience {
    fn id(&self) -> &str {
        "megascience-boxed@1"
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let gold = gold(task)?;
        let final_text = final_text(answer).unwrap_or(answer);
        let bare = |text: &str| normalize(&plain(text));
        let same_number =
            |gold: &str| number(gold).is_some_and(|gold| number(final_text).is_some_and(|n| text::is_close(n, gold, 1e-9)));
        let same_text = |gold: &str| !bare(gold).is_empty() && bare(gold) == bare(final_text);
        // A number with words behind it is compared as text.
        let is_bare_number = |gold: &str| text::float(&plain(gold).replace(',', "")).is_some();
        let right = gold.iter().any(|gold| same_text(gold) || (is_bare_number(gold) && same_number(gold)));
        Ok(with_text(Graded::of(right), answer, Some(final_text)))
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let task = Task::known("How many legs has a spider?", &["8"]);
        Some((task, "So it is $\\boxed{8.0}$.".to_owned(), "8 minus 2 is \\boxed{6}".to_owned()))
    }
}

fn unparsed(is: bool) -> BTreeMap<String, f64> {
    [("unparsed".to_owned(), f64::from(u8::from(is)))].into()
}

fn with_text(graded: Graded, answer: &str, final_text: Option<&str>) -> Graded {
    Graded { graded_text: final_text.filter(|text| *text != answer).map(str::to_owned), ..graded }
}

/// What stands in the last `\boxed{}` of `text`; `None` where there is none, or where the last does not end.
pub fn boxed(text: &str) -> Option<&str> {
    const BOX: &str = "\\boxed";
    let rest = text[text.rfind(BOX)? + BOX.len()..].trim_start().strip_prefix('{')?;
    let mut depth = 1;
    for (i, c) in rest.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&rest[..i]);
        }
    }
    None
}

/// The final answer's text; `None` where a box does not end.
fn final_text(answer: &str) -> Option<&str> {
    let text = if answer.contains("\\boxed") { boxed(answer)? } else { answer };
    Some(text.rsplit(['=', '≈']).next().unwrap_or(text).trim())
}

/// The number that `text` is, with or without a unit behind it. `None` where it begins with anything else, or where more than a unit
/// follows: a fraction, another number, an expression.
pub fn number(text: &str) -> Option<f64> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        let power = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))";
        let digits = r"\d[\d,]*(?:\.\d*)?|\.\d+";
        Regex::new(&format!(r"^([+-]?)\s*(?:{power}|({digits})(?:[eE]([+-]?\d+))?(?:\s*(?:\\times|\\cdot|×|·|\*)\s*{power})?)"))
            .expect("a legal pattern")
    });
    let text = plain(text);
    let found = NUMBER.captures(&text)?;
    let whole = found.get(0).expect("the whole match");
    if !is_unit(&text[whole.end()..]) {
        return None;
    }
    let group = |i: usize| found.get(i).map(|group| group.as_str());
    let exponent = |i: usize, j: usize| group(i).or(group(j)).map_or(Some(0), |text| text.parse::<i32>().ok());
    let sign = if group(1) == Some("-") { -1.0 } else { 1.0 };
    let Some(digits) = group(4) else { return Some(sign * 10_f64.powi(exponent(2, 3)?)).filter(|n| n.is_finite()) };
    // One conversion rounds once.
    let power = exponent(6, 7)?.checked_add(exponent(5, 5)?)?;
    format!("{}e{power}", digits.replace(',', "")).parse::<f64>().ok().filter(|n| n.is_finite()).map(|n| sign * n)
}

/// Without LaTeX's marks for mathematics, spaces and upright text, and with an ordinary minus.
fn plain(text: &str) -> String {
    let mut plain = text.replace("{,}", ",").replace(['−', '–'], "-").replace(['$', '~'], " ");
    for mark in ["\\(", "\\)", "\\[", "\\]", "\\,", "\\;", "\\!", "\\:", "\\ "] {
        plain = plain.replace(mark, " ");
    }
    for mark in ["\\mathrm", "\\text", "\\operatorname", "\\rm"] {
        plain = plain.replace(mark, "");
    }
    let plain = plain.trim();
    // `\text{8}` is left as `{8}`.
    let inner = plain.strip_prefix('{').and_then(|text| text.strip_suffix('}')).filter(|text| !text.contains(['{', '}']));
    inner.unwrap_or(plain).trim().to_owned()
}

/// Whether nothing or a unit stands behind a number. Digits in it are exponents: they follow a letter or a mark.
fn is_unit(rest: &str) -> bool {
    const MARKS: [&str; 12] =
        ["{", "%", "°", ".", "\\%", "\\mu", "\\Omega", "\\AA", "\\circ", "\\degree", "^\\circ", "^{\\circ}"];
    let unit = rest.trim_start();
    let begins =
        unit.is_empty() || unit.starts_with(|c: char| c.is_alphabetic() && c != 'π') || MARKS.iter().any(|m| unit.starts_with(m));
    let before = [' '].into_iter().chain(rest.chars());
    let is_number = |(before, c): (char, char)| c.is_ascii_digit() && (before.is_whitespace() || before == '.');
    begins && !before.zip(rest.chars()).any(is_number)
}

/// The power of ten in a unit.
fn power_of_ten(unit: &str) -> Option<i32> {
    static POWER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?").expect("a legal pattern"));
    POWER.captures(unit)?[1].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grade::tests::{shared, text_of};

    #[test]
    fn numbers_are_read_as_they_are_written() {
        for (text, expected) in [
            ("50.7", Some(50.7)),
            ("+65.49", Some(65.49)),
            ("−0.0301", Some(-0.0301)),
            ("1,234.5", Some(1234.5)),
            ("1{,}234", Some(1234.0)),
            (".5", Some(0.5)),
            ("1.2e-3", Some(0.0012)),
            ("6.02 \\times 10^{23}", Some(6.02e23)),
            ("6.02\\cdot10^{ -23 } \\mathrm{~mol}", Some(6.02e-23)),
            ("8.87×10^-15 N", Some(8.87e-15)),
            ("10^{-3}", Some(0.001)),
            ("-10^4", Some(-1e4)),
            ("$50.7 \\mathrm{~atm}$", Some(50.7)),
            ("50.7\\,\\text{atm}", Some(50.7)),
            ("9.8 m/s^2", Some(9.8)),
            ("37^{\\circ} \\mathrm{C}", Some(37.0)),
            ("38\\%", Some(38.0)),
            ("\\text{8}", Some(8.0)),
            ("5/3", None),
            ("\\frac{5}{3}", None),
            ("1.5\\pi", None),
            ("2 \\sqrt{3}", None),
            ("2^10", None),
            ("3 or 4", None),
            ("3.4.5", None),
            ("about 3", None),
            ("1e999", None),
            ("10^999", None),
            ("1e99999999999", None),
            ("10^{99999999999}", None),
            ("", None),
        ] {
            assert_eq!(number(text), expected, "{text:?}");
        }
    }

    #[test]
    fn the_last_box_is_the_answer() {
        for (text, expected) in [
            ("\\boxed{1} then $\\boxed{\\frac{1}{2}}$.", Some("\\frac{1}{2}")),
            ("\\boxed {7}", Some("7")),
            ("\\boxed{1} and \\boxed{2", None),
            ("\\boxed 7", None),
            ("7", None),
        ] {
            assert_eq!(boxed(text), expected, "{text:?}");
        }
    }

    #[test]
    fn five_per_cent_of_the_greater_is_near_enough() {
        for (answer, gold, unit, right, unparsed) in [
            ("\\boxed{50.7}", "50.7", "atm", true, 0.0),
            ("\\boxed{p = 52 \\mathrm{~atm}}", "50.7", "atm", true, 0.0),
            ("\\boxed{54}", "50.7", "atm", false, 0.0),
            ("\\boxed{95}", "100", "", true, 0.0),
            ("\\boxed{94.9}", "100", "", false, 0.0),
            ("\\boxed{-95}", "100", "", false, 0.0),
            ("\\boxed{0.0001}", "0", "", false, 0.0),
            ("\\boxed{1.19 \\times 10^{-4}}", "1.19", "$\\mathrm{10^{-4}} \\mathrm{~cm}^3/\\mathrm{s}$", true, 0.0),
            ("\\boxed{1.19}", "1.19", "$\\mathrm{10^{-4}} \\mathrm{~cm}^3/\\mathrm{s}$", false, 0.0),
            ("2300000 N/C", "2.3", "$10^6 \\mathrm{~N} / \\mathrm{C} $ ", true, 0.0),
            ("The pressure is 50.7 atm", "50.7", "atm", false, 1.0),
            ("\\boxed{50.7", "50.7", "atm", false, 1.0),
            ("x = 50.7", " +50.7", "", true, 0.0),
        ] {
            let mut task = Task::known("", &[gold]);
            task.more.insert("unit".to_owned(), unit.into());
            let graded = SciBench.apply(&task, answer).expect("gradable");
            assert_eq!((graded.score, graded.scores["unparsed"]), (Some(f64::from(u8::from(right))), unparsed), "{answer:?}");
        }
        assert!(SciBench.apply(&Task::known("", &["five"]), "5").is_err());
    }

    #[test]
    fn megascience_compares_boxes_and_texts() {
        for (answer, gold, right) in [
            ("Thus \\boxed{\\text{Methane}}", "methane", true),
            ("the methane.", "Methane", true),
            ("\\boxed{1.50}", "1.5", true),
            ("\\boxed{1.5}", "1.5 kg", false),
            ("\\boxed{1.5 kg}", "1.5 kg", true),
            ("\\boxed{2}", "1", false),
            ("It is methane", "methane", false),
        ] {
            let graded = MegaScience.apply(&Task::known("", &[gold]), answer).expect("gradable");
            assert_eq!(graded.score, Some(f64::from(u8::from(right))), "{answer:?} for {gold:?}");
        }
    }

    /// Every real gold answer can be read, and is right as its own answer in the unit that is asked for.
    #[test]
    fn real_gold_answers_are_numbers() {
        let Some(shared) = shared() else { return };
        let mut n_powers = 0;
        for book in ["atkins", "calculus", "fund", "stat"] {
            let text = text_of(&shared.join(format!("data/bench/scibench/{book}.json")));
            let rows: Vec<Value> = serde_json::from_str(&text).expect("JSON");
            for row in rows {
                let [number, unit] = ["answer_number", "unit"].map(|key| row[key].as_str().expect("text"));
                let mut task = Task::known("", &[number]);
                task.more.insert("unit".to_owned(), unit.into());
                let power = power_of_ten(unit);
                n_powers += usize::from(power.is_some());
                let answer = power.map_or(number.trim().to_owned(), |power| format!("{} \\times 10^{{{power}}}", number.trim()));
                let graded = SciBench.apply(&task, &format!("\\boxed{{{answer}}}")).expect("gradable");
                assert_eq!(graded.score, Some(1.0), "{row}");
            }
        }
        assert_eq!(n_powers, 5);
    }
}
