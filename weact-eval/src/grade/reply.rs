//! What a judge's reply says. A reply that says nothing, or two things, is unreadable: `None`.
//!
//! Judges seldom keep to a format. Accepted are the label in bold, in quotes, numbered or bulleted, a full-width colon, the value on
//! the next line, words behind it, a JSON object, and all on one line.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::{text, thinking};

/// `Correct` or `Incorrect`, alone on a line or behind a label, or the letter A or B alone.
pub fn equivalence(reply: &str) -> Option<bool> {
    const FORM: Form = Form {
        labels: &["grade", "verdict", "judgement", "judgment", "decision", "answer", "result"],
        yes: &["correct", "a"],
        no: &["incorrect", "b", "not correct"],
        bare: true,
    };
    FORM.read(reply)
}

/// `correct: yes` or `correct: no` of BrowseComp's prompt, or the letter A or B alone.
pub fn browsecomp(reply: &str) -> Option<bool> {
    const LETTER: Form = Form { labels: &[], yes: &["a"], no: &["b"], bare: true };
    const FORM: Form = Form { labels: &["correct"], yes: &["yes", "true"], no: &["no", "false"], bare: false };
    FORM.read(reply).or_else(|| LETTER.read(reply).filter(|_| reply.lines().count() == 1))
}

/// `Decision: TRUE` or `Decision: FALSE` of FRAMES' prompt.
pub fn frames(reply: &str) -> Option<bool> {
    Form { labels: &["decision"], yes: &["true"], no: &["false"], bare: true }.read(reply)
}

/// `结论: 正确` or `结论: 错误` of xbench's prompt.
pub fn xbench(reply: &str) -> Option<bool> {
    Form { labels: &["结论"], yes: &["正确"], no: &["错误", "不正确"], bare: true }.read(reply)
}

/// One of ResearchQA's five phrases for each of `n` questions, from 0 for `Not at all` to 1 for `Completely`.
pub fn coverage(reply: &str, n: usize) -> Option<Vec<f64>> {
    const PHRASES: [&str; 5] = ["not at all", "barely", "moderately", "mostly", "completely"];
    static NUMBER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"^(?:q(?:uestion)?\s*)?\d+\s*[.):：]\s*").expect("a legal pattern"));
    let phrase = |line: String| {
        let bare = NUMBER.replace(&line, "").into_owned();
        PHRASES.iter().position(|phrase| *phrase == bare).map(|i| i as f64 / 4.0)
    };
    let lines = thinking::strip(reply)?.lines().map(bare).filter(|line| !line.is_empty()).collect::<Vec<_>>();
    let scores: Vec<f64> = lines.into_iter().map(phrase).collect::<Option<_>>()?;
    (scores.len() == n).then_some(scores)
}

/// The JSON object that a reply is, or that stands in it, fenced or not.
pub fn object(reply: &str) -> Option<Value> {
    let reply = thinking::strip(reply)?;
    let parse = |text: &str| serde_json::from_str::<Value>(text.trim()).ok().filter(Value::is_object);
    let fenced =
        || reply.split_once("```json").or_else(|| reply.split_once("```")).and_then(|(_, rest)| parse(rest.split("```").next()?));
    let braced = || parse(reply.get(reply.find('{')?..=reply.rfind('}')?)?);
    parse(&reply).or_else(fenced).or_else(braced)
}

/// A decision: a label and one of two groups of words behind it, all in lower case.
struct Form {
    labels: &'static [&'static str],
    yes: &'static [&'static str],
    no: &'static [&'static str],
    /// Whether a line that is one of the words is a decision without a label.
    bare: bool,
}

impl Form {
    /// What all decisions in `reply` say.
    fn read(&self, reply: &str) -> Option<bool> {
        let reply = thinking::strip(reply)?;
        if let Some(object) = object(&reply) {
            return agreed(self.labels.iter().filter_map(|label| self.value_of(object.get(*label)?)));
        }
        let lines: Vec<String> = reply.lines().map(bare).filter(|line| !line.is_empty()).collect();
        let at_line_start = lines.iter().enumerate().filter_map(|(i, line)| {
            let next = lines.get(i + 1).map_or("", String::as_str);
            self.labelled(line, next).or_else(|| if self.bare { self.word(line) } else { None })
        });
        let decisions: Vec<bool> = at_line_start.collect();
        if decisions.is_empty() { agreed(self.anywhere(&reply)) } else { agreed(decisions) }
    }

    fn value_of(&self, value: &Value) -> Option<bool> {
        value.as_bool().or_else(|| self.leading(&bare(value.as_str()?)))
    }

    /// The decision of a line that begins with a label; it may stand on the line after.
    fn labelled(&self, line: &str, next: &str) -> Option<bool> {
        let rest = self.labels.iter().find_map(|label| line.strip_prefix(label))?.trim_start();
        // xbench's own parser takes any character for the colon.
        let rest = rest.strip_prefix([':', '：', '为', '是'])?.trim();
        if rest.is_empty() { self.leading(next) } else { self.leading(rest) }
    }

    /// The decision that a text begins with; a letter or digit may not follow it, nor an alternative: `true or false` is none.
    fn leading(&self, text: &str) -> Option<bool> {
        let begins = |words: &[&str]| {
            let rest = words.iter().find_map(|word| text.strip_prefix(word))?;
            let is_choice = ["or ", "/", "|", "或"].iter().any(|mark| rest.trim_start().starts_with(mark));
            (!is_choice && rest.chars().next().is_none_or(|c| !text::is_word(c))).then_some(())
        };
        begins(self.no).map(|()| false).or_else(|| begins(self.yes).map(|()| true))
    }

    /// The decision that a text is.
    fn word(&self, text: &str) -> Option<bool> {
        if self.yes.contains(&text) { Some(true) } else { self.no.contains(&text).then_some(false) }
    }

    /// Decisions behind a label anywhere: for replies on one line.
    fn anywhere(&self, reply: &str) -> Vec<bool> {
        let line = bare(reply);
        let behind = |label: &&str| {
            let whole = |at: usize| label.starts_with(|c: char| !c.is_ascii()) || !line[..at].ends_with(text::is_word);
            let places = line.match_indices(label).filter(|(at, _)| whole(*at)).map(|(at, _)| &line[at..]);
            places.filter_map(|rest| self.labelled(rest, "")).collect::<Vec<_>>()
        };
        self.labels.iter().flat_map(behind).collect()
    }
}

/// What all say, where there are any and they agree.
fn agreed(decisions: impl IntoIterator<Item = bool>) -> Option<bool> {
    let mut decisions = decisions.into_iter();
    let first = decisions.next()?;
    decisions.all(|decision| decision == first).then_some(first)
}

/// A line in lower case, without quotes, emphasis, bullets and numbers before it, and punctuation behind it.
fn bare(line: &str) -> String {
    static BULLET: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^(?:[-#>•]+\s*|\(?\d+[.)]\s+)+").expect("a legal pattern"));
    let unquoted =
        line.replace(['*', '_', '`', '"', '\'', '“', '”', '‘', '’', '「', '」', '[', ']', '【', '】'], "").to_lowercase();
    let text = unquoted.trim();
    BULLET.replace(text, "").trim_end_matches(['.', '。', '!', '！', ',', '，', ';', ' ']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_read_in_all_their_dress() {
        type Parser = fn(&str) -> Option<bool>;
        let (eq, bc, fr, xb): (Parser, Parser, Parser, Parser) = (equivalence, browsecomp, frames, xbench);
        for (parse, reply, expected) in [
            (eq, "Correct", Some(true)),
            (eq, " incorrect.\n", Some(false)),
            (eq, "**Correct**", Some(true)),
            (eq, "\"Incorrect\"", Some(false)),
            (eq, "Correct\n\nBoth name the same town.", Some(true)),
            (eq, "The towns differ.\n\nGRADE: INCORRECT", Some(false)),
            (eq, "A", Some(true)),
            (eq, "b.", Some(false)),
            (eq, "<think>Incorrect? No.</think>Correct", Some(true)),
            (eq, "<think>Correct", None),
            (eq, "Correct\nIncorrect", None),
            (eq, "I am not sure", None),
            (eq, "The answer is correct in part", None),
            (eq, "C", None),
            (eq, "", None),
            (bc, "extracted_final_answer: Paris\n\nreasoning: the same\n\ncorrect: yes\n\nconfidence: 100", Some(true)),
            (bc, "**extracted_final_answer:** None\n**correct:** no\n", Some(false)),
            (bc, "correct: yes", Some(true)),
            (bc, "4. Correct：No, it names another town", Some(false)),
            (bc, "correct:\n\nyes", Some(true)),
            (bc, "{\"extracted_final_answer\": \"x\", \"correct\": \"yes\", \"confidence\": 90}", Some(true)),
            (bc, "```json\n{\"correct\": false}\n```", Some(false)),
            (bc, "reasoning: they match. correct: yes confidence: 95", Some(true)),
            (bc, "A", Some(true)),
            (bc, "reasoning: so it is incorrect: yes, it is", None),
            (bc, "extracted_final_answer: x\ncorrect: yes\ncorrect: no", None),
            (bc, "correct: yesterday", None),
            (bc, "reasoning: the answer is correct", None),
            (bc, "yes", None),
            (fr, "Explanation: the answer is there.\nDecision: TRUE", Some(true)),
            (fr, "**Explanation:** it is not.\n\n**Decision:** FALSE", Some(false)),
            (fr, "\"Explanation:\" fine\n\"Decision:\" \"TRUE\"", Some(true)),
            (fr, "- Decision: True.", Some(true)),
            (fr, "### Decision\nFALSE", Some(false)),
            (fr, "Explanation: the same. Decision: FALSE", Some(false)),
            (fr, "TRUE", Some(true)),
            (fr, "Explanation: TRUE would be wrong", None),
            (fr, "Decision: TRUE or FALSE", None),
            (fr, "Decision: TRUE/FALSE", None),
            (fr, "Decision: TRUE, or so it seems", Some(true)),
            (bc, "correct: yes or no", None),
            (xb, "结论: 正确或错误", None),
            (fr, "Decision: MAYBE", None),
            (xb, "最终答案: 巴黎\n解释: 一致\n结论: 正确", Some(true)),
            (xb, "最终答案：巴黎\n\n解释：不一致\n\n结论：错误。", Some(false)),
            (xb, "**结论**: '正确'", Some(true)),
            (xb, "结论:正确", Some(true)),
            (xb, "结论:\n错误", Some(false)),
            (xb, "解释: 两者一致。结论：正确", Some(true)),
            (xb, "结论为错误", Some(false)),
            (xb, "结论: 不正确", Some(false)),
            (xb, "结论: 无法判断", None),
            (xb, "最终答案正确", None),
        ] {
            assert_eq!(parse(reply), expected, "{reply:?}");
        }
    }

    #[test]
    fn a_coverage_needs_a_phrase_for_every_question() {
        for (reply, n, expected) in [
            ("Mostly\nNot at all\nCompletely", 3, Some(vec![0.75, 0.0, 1.0])),
            ("1. Barely\n\n2) **Moderately**.\n- not at all", 3, Some(vec![0.25, 0.5, 0.0])),
            ("Question 1: Completely", 1, Some(vec![1.0])),
            ("Mostly\nBarely", 3, None),
            ("Mostly\nFully", 2, None),
            ("Here you are:\nMostly", 1, None),
        ] {
            assert_eq!(coverage(reply, n), expected, "{reply:?}");
        }
    }

    #[test]
    fn an_object_is_found_in_what_stands_around_it() {
        for reply in ["{\"a\": 1}", "Sure:\n```json\n{\"a\": 1}\n```\nDone", "<think>{</think>Here: {\"a\": 1}."] {
            assert_eq!(object(reply), Some(serde_json::json!({"a": 1})), "{reply}");
        }
        assert_eq!(object("[1] and {"), None);
    }
}
