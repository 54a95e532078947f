//! RACE of DeepResearch Bench: a report against a reference report, criterion by criterion.
//!
//! A judge scores both reports on every criterion, 0 to 10. With the weights `w_c` of a dimension's criteria and `W_d` of the
//! dimensions, T for the report and R for the reference:
//!
//! `T_d = sum_c w_c t_c / sum_c w_c`, `T = sum_d W_d T_d`, `overall = T / (T + R)`, and each dimension's score is `T_d / (T_d + R_d)`.
//!
//! A report as good as the reference has 0.5. The judge repeats each criterion's words, and its weight is found by them: to the
//! letter, then whatever the case, then where one holds the other, else it is the dimension's mean weight.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{
    Graded, Rule,
    judge::{Judge, Prompt},
    reply, text,
};
use crate::{Error, Result, task::Task};

pub(super) const EN: Prompt = Prompt { version: "race-en@1", template: include_str!("judges/race_en.txt") };
pub(super) const ZH: Prompt = Prompt { version: "race-zh@1", template: include_str!("judges/race_zh.txt") };

/// The four dimensions, by their names in files and replies.
pub const DIMENSIONS: [&str; 4] = ["comprehensiveness", "insight", "instruction_following", "readability"];

pub(super) struct Race {
    id: String,
    judge: Arc<Judge>,
}

impl Race {
    pub(super) fn new(judge: Arc<Judge>) -> Self {
        Self { id: format!("deepresearch-bench-race@1:{}", judge.name()), judge }
    }
}

impl Rule for Race {
    fn id(&self) -> &str {
        &self.id
    }

    fn scores(&self) -> &'static [&'static str] {
        &DIMENSIONS
    }

    /// The score is the overall score. The verdict is right from one half on: as good as the reference. `scores` has the four dimensions
    /// and `weights_by_words`, the share of scored criteria whose weight was found by their words.
    ///
    /// The task has `dimension_weight` and `criterions` as the benchmark's criteria have them, `reference`, the reference report, and
    /// `language`, `zh` or `en`.
    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let criteria = Criteria::of(&task.more).map_err(|why| Error::Other(format!("task {}: {why}", task.id)))?;
        let text = |key: &str| match task.more.get(key).and_then(Value::as_str).filter(|text| !text.trim().is_empty()) {
            Some(text) => Ok(text),
            None => Err(Error::Other(format!("task {}: RACE needs \"{key}\", a text", task.id))),
        };
        let prompt = match text("language")? {
            "en" => EN,
            "zh" => ZH,
            other => return Err(Error::Other(format!("task {}: language is {other:?}: use \"en\" or \"zh\"", task.id))),
        };
        let list = criteria.listed();
        let values = [
            ("task_prompt", task.question.as_str()),
            ("article_1", answer),
            ("article_2", text("reference")?),
            ("criteria_list", &list),
        ];
        let read = |reply: &str| criteria.score(&reply::object(reply)?);
        Ok(match self.judge.ask(prompt, &prompt.fill(&values), 0, false, read) {
            Ok((scores, reply)) => scores.graded(reply),
            Err(why) => Graded::judge_error(why),
        })
    }

    /// No report has a score that is certain.
    fn known(&self) -> Option<(Task, String, String)> {
        None
    }
}

/// A criterion with its weight in its dimension.
struct Criterion {
    words: String,
    explanation: String,
    weight: f64,
}

/// The criteria of a task: for each of [`DIMENSIONS`] its weight and its criteria.
struct Criteria([(f64, Vec<Criterion>); 4]);

/// A report's scores.
struct Scores {
    /// Of each dimension, normalised.
    dimensions: [f64; 4],
    overall: f64,
    weights_by_words: f64,
}

impl Criteria {
    fn of(row: &Map<String, Value>) -> std::result::Result<Self, String> {
        let number = |value: &Value| value.as_f64().filter(|weight| *weight >= 0.0);
        let criterion = |value: &Value| {
            let [words, explanation] = ["criterion", "explanation"].map(|key| value[key].as_str().map(str::to_owned));
            Some(Criterion { words: words?, explanation: explanation?, weight: number(&value["weight"])? })
        };
        let dimension = |name: &str| {
            let weight = row.get("dimension_weight").and_then(|weights| number(&weights[name]));
            let weight = weight.ok_or_else(|| format!("dimension_weight.{name} is no weight"))?;
            let listed = row.get("criterions").and_then(|all| all[name].as_array()).filter(|listed| !listed.is_empty());
            let criteria = listed.and_then(|listed| listed.iter().map(criterion).collect::<Option<Vec<_>>>());
            let criteria = criteria.filter(|all| all.iter().any(|criterion| criterion.weight > 0.0));
            Ok((weight, criteria.ok_or_else(|| format!("criterions.{name} lists no criteria with explanation and weight"))?))
        };
        let all = DIMENSIONS.map(dimension).into_iter().collect::<std::result::Result<Vec<_>, String>>()?;
        Ok(Self(all.try_into().unwrap_or_else(|_| unreachable!("four dimensions"))))
    }

    /// What the judge is shown of them: all but the weights.
    fn listed(&self) -> String {
        let criterion = |c: &Criterion| json!({"criterion": c.words, "explanation": c.explanation});
        let dimensions = DIMENSIONS.iter().zip(&self.0);
        let list: Map<String, Value> =
            dimensions.map(|(name, (_, all))| ((*name).to_owned(), all.iter().map(criterion).collect())).collect();
        serde_json::to_string_pretty(&list).expect("strings are JSON")
    }

    /// The scores of a judge's `reply`; `None` where it lacks a dimension, or a criterion lacks words or a score from 0 to 10.
    fn score(&self, reply: &Value) -> Option<Scores> {
        let (mut totals, mut dimensions) = ((0.0, 0.0), [0.0; 4]);
        let (mut n_scored, mut n_by_words) = (0, 0);
        for ((name, (dimension_weight, criteria)), normalised) in DIMENSIONS.iter().zip(&self.0).zip(&mut dimensions) {
            let (mut target, mut reference, mut sum) = (0.0, 0.0, 0.0);
            for item in reply[*name].as_array().filter(|items| !items.is_empty())? {
                let [t, r] = [score_of(&item["article_1_score"])?, score_of(&item["article_2_score"])?];
                let (weight, by_words) = weight_of(item["criterion"].as_str()?, criteria);
                (target, reference, sum) = (target + t * weight, reference + r * weight, sum + weight);
                n_scored += 1;
                n_by_words += usize::from(by_words);
            }
            // Weights of 0 alone score nothing.
            let [target, reference] = [target, reference].map(|score| if sum > 0.0 { score / sum } else { 0.0 });
            *normalised = normalise(target, reference);
            totals = (totals.0 + target * dimension_weight, totals.1 + reference * dimension_weight);
        }
        let weights_by_words = f64::from(n_by_words as u32) / f64::from(n_scored as u32);
        Some(Scores { dimensions, overall: normalise(totals.0, totals.1), weights_by_words })
    }
}

impl Scores {
    fn graded(&self, reply: String) -> Graded {
        let mut scores: std::collections::BTreeMap<String, f64> =
            DIMENSIONS.iter().map(|name| (*name).to_owned()).zip(self.dimensions).collect();
        scores.insert("weights_by_words".to_owned(), self.weights_by_words);
        Graded { score: Some(self.overall), scores, detail: Some(reply), ..Graded::of(self.overall >= 0.5) }
    }
}

/// A score from 0 to 10; judges write some as text.
fn score_of(value: &Value) -> Option<f64> {
    let score = value.as_f64().or_else(|| text::float(value.as_str()?));
    score.filter(|score| (0.0..=10.0).contains(score))
}

/// The weight of the criterion that the judge calls `words`, and whether it was found by them.
fn weight_of(words: &str, criteria: &[Criterion]) -> (f64, bool) {
    let words = words.trim_matches(text::is_space);
    let lower = words.to_lowercase();
    let overlaps = |c: &&Criterion| {
        let other = c.words.to_lowercase();
        !lower.is_empty() && (lower.contains(&other) || other.contains(&lower))
    };
    let exact = criteria.iter().find(|c| c.words == words);
    let found =
        exact.or_else(|| criteria.iter().find(|c| c.words.to_lowercase() == lower)).or_else(|| criteria.iter().find(overlaps));
    let mean = || criteria.iter().map(|c| c.weight).sum::<f64>() / criteria.len() as f64;
    found.map_or_else(|| (mean(), false), |c| (c.weight, true))
}

/// `t / (t + r)`, 0 where both are 0.
fn normalise(target: f64, reference: f64) -> f64 {
    if target + reference > 0.0 { target / (target + reference) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grade::{
        Verdict,
        judge::{Settings, tests::scripted},
        tests::{shared, text_of},
    };

    fn task() -> Task {
        let mut task = Task::known("Compare A and B", &[]);
        let criterion = |words: &str, weight: f64| json!({"criterion": words, "explanation": "why", "weight": weight});
        let row = json!({
            "dimension_weight": {"comprehensiveness": 0.5, "insight": 0.3, "instruction_following": 0.1, "readability": 0.1},
            "criterions": {
                "comprehensiveness": [criterion("Scope of data", 0.75), criterion("Depth", 0.25)],
                "insight": [criterion("Causes", 1.0)],
                "instruction_following": [criterion("All asked", 1.0)],
                "readability": [criterion("Clear", 1.0)],
            },
            "reference": "the reference", "language": "en",
        });
        task.more = row.as_object().expect("an object").clone();
        task
    }

    fn item(words: &str, target: impl Into<Value>, reference: f64) -> Value {
        json!({"criterion": words, "analysis": "…", "article_1_score": target.into(), "article_2_score": reference})
    }

    fn reply(comprehensiveness: &[Value]) -> Value {
        json!({"comprehensiveness": comprehensiveness, "insight": [item("Causes", 4.0, 8.0)],
            "instruction_following": [item("All asked", "6", 6.0)], "readability": [item("Clear", 9.0, 9.0)]})
    }

    /// By hand: T_c = 0.75·4 + 0.25·8 = 5 against R_c = 0.75·8 + 0.25·4 = 7, so 5/12; T = 0.5·5 + 0.3·4 + 0.1·6 + 0.1·9 = 5.2,
    /// R = 0.5·7 + 0.3·8 + 0.1·6 + 0.1·9 = 7.4, overall 5.2 / 12.6.
    #[test]
    fn scores_are_weighted_and_set_against_the_reference() {
        let scored = reply(&[item("Scope of data", 4.0, 8.0), item("Depth", 8.0, 4.0)]);
        let (judge, asked) = scripted(Settings::default(), move |_, _| Ok(format!("Here:\n```json\n{scored:#}\n```")));
        let graded = Race::new(judge).apply(&task(), "my report").expect("gradable");
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} for {b}");
        close(graded.score.expect("scored"), 5.2 / 12.6);
        for (name, expected) in DIMENSIONS.iter().zip([5.0 / 12.0, 4.0 / 12.0, 0.5, 0.5]) {
            close(graded.scores[*name], expected);
        }
        assert_eq!((graded.verdict, graded.scores["weights_by_words"]), (Verdict::Wrong, 1.0));
        let asked = asked.lock().expect("no panic");
        assert!(
            asked[0].contains("<article_1>\n\"my report\"") && asked[0].contains("<article_2>\n\"the reference\""),
            "{}",
            asked[0]
        );
        assert!(asked[0].contains("\"explanation\": \"why\"") && !asked[0].contains("0.75"), "weights are not shown");
    }

    #[test]
    fn weights_are_found_by_words_then_by_case_then_by_part_and_else_by_the_mean() {
        let Criteria([(_, criteria), ..]) = Criteria::of(&task().more).expect("criteria");
        for (words, expected) in [
            (" Scope of data ", (0.75, true)),
            ("scope OF data", (0.75, true)),
            ("Scope", (0.75, true)),
            ("2. Depth of the analysis", (0.25, true)),
            ("Style", (0.5, false)),
            ("", (0.5, false)),
        ] {
            assert_eq!(weight_of(words, &criteria), expected, "{words:?}");
        }
    }

    #[test]
    fn a_reply_that_leaves_something_out_is_unreadable() {
        let criteria = Criteria::of(&task().more).expect("criteria");
        let whole = reply(&[item("Depth", 8.0, 4.0)]);
        assert!(criteria.score(&whole).is_some());
        for broken in [
            json!({}),
            reply(&[]),
            reply(&[item("Depth", 11.0, 4.0)]),
            reply(&[item("Depth", Value::Null, 4.0)]),
            reply(&[json!({"article_1_score": 1, "article_2_score": 1})]),
        ] {
            assert!(criteria.score(&broken).is_none(), "{broken}");
        }
        let mut lacking = task();
        lacking.more.remove("reference");
        let (judge, _) = scripted(Settings::default(), |_, _| Ok("{}".to_owned()));
        let error = Race::new(Arc::clone(&judge)).apply(&lacking, "r").expect_err("no reference").to_string();
        assert!(error.contains("RACE needs \"reference\""), "{error}");
        assert_eq!(Race::new(judge).apply(&task(), "r").expect("gradable").verdict, Verdict::JudgeError);
    }

    /// The published scores hold no single T and R, from which they could be computed again. But an overall score is a mean of its
    /// dimensions' with weights near `W_d`, so it lies between them and close to that mean.
    #[test]
    fn published_scores_fit_the_published_weights() {
        let Some(shared) = shared() else { return };
        let read = |name: &str| -> Vec<Value> {
            let text = text_of(&shared.join("data/bench/deepresearch_bench").join(name));
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
        };
        let criteria = read("criteria.jsonl");
        let results = read("race_raw_results.jsonl");
        assert_eq!((criteria.len(), results.len()), (15, 15));
        for row in &results {
            let own = criteria.iter().find(|c| c["id"] == row["id"]).expect("each result has its criteria");
            let Criteria(parsed) = Criteria::of(own.as_object().expect("an object")).expect("criteria");
            let scores = DIMENSIONS.map(|name| row[name].as_f64().expect("a score"));
            let overall = row["overall_score"].as_f64().expect("a score");
            let mean: f64 = scores.iter().zip(&parsed).map(|(score, (weight, _))| score * weight).sum();
            let (low, high) = scores.iter().fold((1.0, 0.0), |(low, high), s| (s.min(low), s.max(high)));
            assert!(low <= overall && overall <= high && (overall - mean).abs() < 0.01, "{}: {overall} for {mean}", row["id"]);
            for (weight, all) in &parsed {
                let sum: f64 = all.iter().map(|c| c.weight).sum();
                assert!(*weight > 0.0 && (sum - 1.0).abs() < 0.02, "{}: weights sum to {sum}", row["id"]);
            }
        }
    }
}
