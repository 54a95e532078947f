//! ResearchQA: how much of a rubric a report covers.
//!
//! A judge says for each item of the rubric how far the report answers it, in five steps from 0 to 1, eight items at a time; the
//! report's score is their mean. In the original an item that can't be judged after three tries takes its report out of the mean in
//! silence; here it is a judge error.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    Graded, Rule,
    judge::{Judge, Prompt},
    reply,
};
use crate::{Error, Result, task::Task};

pub(super) const PROMPT: Prompt = Prompt { version: "coverage@1", template: include_str!("judges/coverage.txt") };

/// Items in one prompt.
const BATCH: usize = 8;

pub(super) struct Coverage {
    id: String,
    judge: Arc<Judge>,
}

impl Coverage {
    pub(super) fn new(judge: Arc<Judge>) -> Self {
        Self { id: format!("researchqa-coverage@1:{}", judge.name()), judge }
    }
}

impl Rule for Coverage {
    fn id(&self) -> &str {
        &self.id
    }

    fn scores(&self) -> &'static [&'static str] {
        &["coverage"]
    }

    /// The score is the coverage. The verdict is right from one half on; the benchmark has none.
    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let rubric = rubric(task)?;
        let mut shares = Vec::with_capacity(rubric.len());
        for items in rubric.chunks(BATCH) {
            let questions: Vec<String> = items.iter().enumerate().map(|(i, item)| format!("{}. {item}", i + 1)).collect();
            let text = PROMPT.fill(&[("response", answer), ("questions", &questions.join("\n"))]);
            match self.judge.ask(PROMPT, &text, 0, false, |reply| reply::coverage(reply, items.len())) {
                Ok((scores, _)) => shares.extend(scores),
                Err(why) => return Ok(Graded::judge_error(why)),
            }
        }
        let coverage = shares.iter().sum::<f64>() / shares.len() as f64;
        let detail =
            json!(rubric.iter().zip(&shares).map(|(item, share)| json!({"item": item, "share": share})).collect::<Vec<_>>());
        let scores = [("coverage".to_owned(), coverage)].into();
        Ok(Graded { score: Some(coverage), scores, detail: Some(detail.to_string()), ..Graded::of(coverage >= 0.5) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let mut task = Task::known("What is the capital of France, and on which river does it lie?", &[]);
        let items = ["Does the response name the capital of France?", "Does it name the river on which that city lies?"];
        task.more.insert("rubric".to_owned(), items.map(|item| json!({"rubric_item": item})).to_vec().into());
        let right = "The capital of France is Paris. The city lies on the river Seine.".to_owned();
        Some((task, right, "Bananas are rich in potassium.".to_owned()))
    }
}

/// The items of `task`'s rubric: objects with `rubric_item`, as the benchmark has them.
fn rubric(task: &Task) -> Result<Vec<&str>> {
    let items = task.more.get("rubric").and_then(Value::as_array).filter(|items| !items.is_empty());
    let items = items.and_then(|items| items.iter().map(|item| item["rubric_item"].as_str()).collect::<Option<Vec<_>>>());
    items.ok_or_else(|| Error::Other(format!("task {}: it needs \"rubric\", a list of objects with \"rubric_item\"", task.id)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grade::{
        Verdict,
        judge::{Settings, tests::scripted},
    };

    fn task(n: usize) -> Task {
        let mut task = Task::known("q", &[]);
        task.more
            .insert("rubric".to_owned(), (0..n).map(|i| json!({"rubric_item": format!("item {i}?"), "type": "x"})).collect());
        task
    }

    /// Ten items in two prompts: eight at 1, one at 1/4, one at 0, so 8.25 / 10.
    #[test]
    fn items_are_judged_eight_at_a_time_and_averaged() {
        let (judge, asked) = scripted(Settings::default(), |_, n| {
            Ok(if n == 0 { "Completely\n".repeat(8) } else { "1. Barely\n2. Not at all".to_owned() })
        });
        let graded = Coverage::new(judge).apply(&task(10), "a report").expect("gradable");
        assert_eq!((graded.verdict, graded.score), (Verdict::Correct, Some(0.825)));
        let asked = asked.lock().expect("no panic");
        assert!(asked.len() == 2 && asked[0].contains("8. item 7?") && asked[1].contains("1. item 8?\n2. item 9?"), "{asked:?}");
    }

    #[test]
    fn a_missing_phrase_is_a_judge_error_and_a_missing_rubric_an_error() {
        let (judge, _) = scripted(Settings::default(), |_, _| Ok("Mostly".to_owned()));
        let coverage = Coverage::new(judge);
        let graded = coverage.apply(&task(2), "a report").expect("gradable");
        assert_eq!((graded.verdict, graded.score), (Verdict::JudgeError, None));
        assert!(coverage.apply(&task(0), "a report").is_err());
    }
}
