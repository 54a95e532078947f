//! Graders: an answer and its task to a verdict.
//!
//! A benchmark with a rule of its own is graded by it: [`gaia`], [`exact`], [`number`], [`choice`], [`ifeval`]. Where its metric is a
//! judge, [`grader`] takes one, and without one it falls back on exact match under a name of its own. Reports are scored by a judge
//! alone: [`coverage`], [`race`]. Thinking is removed before anything is graded.

pub mod text;
pub mod thinking;
pub mod exact;
pub mod gaia;
pub mod number;
pub mod choice;
pub mod ifeval;
pub mod reply;
pub mod judge;
mod judged;
pub mod coverage;
pub mod race;

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{Error, Result, benchmark::Benchmark, task::Task};
use exact::F1;
use judge::Judge;

/// What a grader found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Right.
    Correct,
    /// Not right.
    Wrong,
    /// There was nothing to grade: no text, or thinking without an end.
    NoAnswer,
    /// The judge failed or its reply can't be read. Neither right nor wrong.
    JudgeError,
}

/// A verdict and what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graded {
    /// The verdict.
    pub verdict: Verdict,
    /// In [0, 1]; `None` where the verdict is a judge error.
    pub score: Option<f64>,
    /// Further scores in [0, 1] by name: `em`, `f1`, `cover_em`, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scores: BTreeMap<String, f64>,
    /// The text that was graded, where it is not the prediction itself: without its thinking, the extracted number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graded_text: Option<String>,
    /// Why: a judge's reply, the rule that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// A rule or a judge for one benchmark.
pub trait Grader: Send + Sync {
    /// Name and version of the rules, as `gaia-rule@1`: it stands in every result, and changes with the rules.
    fn id(&self) -> &str;

    /// Whether it grades the whole text of the last turn rather than the answer in it.
    fn reads_report(&self) -> bool {
        false
    }

    /// Grades `prediction`, the policy's final answer; `None` is no answer.
    ///
    /// # Errors
    /// If the task lacks what the grader needs, or it can't grade at all. A judge that fails is a verdict.
    fn grade(&self, task: &Task, prediction: Option<&str>) -> Result<Graded>;

    /// A task with an answer that is right and one that is wrong, for the check at the start of a run. `None` where only a judge can
    /// tell.
    fn known(&self) -> Option<(Task, String, String)>;
}

/// What a grader can be told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// MMLU-Pro: where no letter is found, take the one that the original draws, for parity with published numbers.
    pub mmlu_random_fallback: bool,
}

/// The grader of `benchmark`.
///
/// | benchmark | without a judge | with a judge |
/// |---|---|---|
/// | GAIA | its rule | the judge; the rule in `scores` |
/// | 2Wiki, Bamboogle, MuSiQue | exact match; `em`, `f1`, `cover_em` in `scores` | the judge; the same scores |
/// | WebWalkerQA, xbench, BrowseComp, FRAMES | normalised exact match, `NAME-exact` | the judge |
/// | MegaScience | the boxed answer, exact match or equal number | the judge where that fails |
/// | SciBench, MMLU-Pro, IFEval | their rules | their rules |
/// | ResearchQA, DeepResearch Bench | none | the judge's scores |
///
/// A judge is not asked where the answer equals a gold answer. Its model stands in the grader's id.
///
/// # Errors
/// For DS-1000, which runs the answer, and for reports without a judge.
pub fn grader(benchmark: Benchmark, judge: Option<Arc<Judge>>, options: Options) -> Result<Box<dyn Grader>> {
    use Benchmark::{
        Bamboogle, BrowseComp, DeepResearchBench, Ds1000, Frames, Gaia, IfEval, MegaScience, MmluPro, MuSiQue, ResearchQa,
        SciBench, TwoWiki, WebWalkerQa, XbenchDeepSearch,
    };
    let judged = |rule: Box<dyn Rule>, judge: Option<Arc<Judge>>| -> Box<dyn Rule> {
        match judge {
            Some(judge) => Box::new(judged::Judged::new(benchmark, rule, judge)),
            None => rule,
        }
    };
    let needed = |judge: Option<Arc<Judge>>| {
        judge.ok_or_else(|| Error::Other(format!("{benchmark} is graded by a judge alone: name one")))
    };
    let rule: Box<dyn Rule> = match benchmark {
        Gaia => judged(Box::new(gaia::Gaia), judge),
        TwoWiki => judged(Box::new(exact::Exact::new(benchmark, Some(F1::Hotpot))), judge),
        Bamboogle | MuSiQue => judged(Box::new(exact::Exact::new(benchmark, Some(F1::Squad))), judge),
        WebWalkerQa | XbenchDeepSearch | BrowseComp | Frames => judged(Box::new(exact::Exact::new(benchmark, None)), judge),
        MegaScience => judged(Box::new(number::MegaScience), judge),
        SciBench => Box::new(number::SciBench),
        MmluPro => Box::new(choice::Choice { random_fallback: options.mmlu_random_fallback }),
        IfEval => Box::new(ifeval::IfEval),
        ResearchQa => Box::new(coverage::Coverage::new(needed(judge)?)),
        DeepResearchBench => Box::new(race::Race::new(needed(judge)?)),
        Ds1000 => {
            let why = "DS-1000 is graded by running the answer, and there is no sandbox here to run it in: use the benchmark's own script";
            return Err(Error::Other(why.to_owned()));
        }
    };
    Ok(Box::new(Answers(rule)))
}

/// Grades the grader's known right and wrong answer.
///
/// # Errors
/// If either verdict is not the one that is due. A grader without known answers passes.
pub fn audit(grader: &dyn Grader) -> Result<()> {
    let Some((task, right, wrong)) = grader.known() else { return Ok(()) };
    for (name, answer, due) in [("right", right, Verdict::Correct), ("wrong", wrong, Verdict::Wrong)] {
        let graded = grader.grade(&task, Some(&answer))?;
        if graded.verdict != due {
            let detail = graded.detail.map_or_else(String::new, |detail| format!(" ({detail})"));
            let why = format!(
                "{} calls a known {name} answer {}{detail}: don't use it before that is understood",
                grader.id(),
                graded.verdict
            );
            return Err(Error::Other(why));
        }
    }
    Ok(())
}

/// The one verdict of ten answers or more, where they all have the same: a grader that gives one verdict for all is to be doubted.
pub fn uniform(verdicts: impl IntoIterator<Item = Verdict>) -> Option<Verdict> {
    let mut verdicts = verdicts.into_iter();
    let first = verdicts.next()?;
    let mut n = 1;
    for verdict in verdicts {
        if verdict != first {
            return None;
        }
        n += 1;
    }
    (n >= 10).then_some(first)
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Correct => "correct",
            Self::Wrong => "wrong",
            Self::NoAnswer => "no_answer",
            Self::JudgeError => "judge_error",
        })
    }
}

impl Graded {
    /// Right or wrong, with the score that goes with it.
    fn of(right: bool) -> Self {
        let verdict = if right { Verdict::Correct } else { Verdict::Wrong };
        Self { verdict, score: Some(f64::from(u8::from(right))), scores: BTreeMap::new(), graded_text: None, detail: None }
    }

    fn judge_error(why: String) -> Self {
        Self { verdict: Verdict::JudgeError, score: None, detail: Some(why), ..Self::of(false) }
    }
}

/// What grades a text that is there, without thinking in it.
trait Rule: Send + Sync {
    fn id(&self) -> &str;

    /// The scores that are 0 where there is no answer.
    fn scores(&self) -> &'static [&'static str] {
        &[]
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded>;

    fn known(&self) -> Option<(Task, String, String)>;
}

/// Puts before a rule what holds for all: without an answer there is nothing to grade, and thinking is none.
struct Answers(Box<dyn Rule>);

impl Grader for Answers {
    fn id(&self) -> &str {
        self.0.id()
    }

    fn grade(&self, task: &Task, prediction: Option<&str>) -> Result<Graded> {
        let Some(answer) = prediction.and_then(thinking::strip) else {
            let scores = self.0.scores().iter().map(|name| ((*name).to_owned(), 0.0)).collect();
            let unclosed = prediction.is_some_and(|text| !text.trim().is_empty());
            let detail = unclosed.then(|| "thinking, and no answer after it".to_owned());
            return Ok(Graded { verdict: Verdict::NoAnswer, scores, detail, ..Graded::of(false) });
        };
        let mut graded = self.0.apply(task, &answer)?;
        if graded.graded_text.is_none() && prediction != Some(&answer) {
            graded.graded_text = Some(answer);
        }
        Ok(graded)
    }

    fn known(&self) -> Option<(Task, String, String)> {
        self.0.known()
    }
}

/// The accepted answers; a rule can't do without.
fn gold(task: &Task) -> Result<&[String]> {
    if task.gold.is_empty() { Err(Error::Other(format!("task {}: it has no gold answer", task.id))) } else { Ok(&task.gold) }
}

impl Task {
    /// A task of an audit.
    fn known(question: &str, gold: &[&str]) -> Self {
        let gold = gold.iter().map(|gold| (*gold).to_owned()).collect();
        Self { id: "known".to_owned(), question: question.to_owned(), gold, files: Vec::new(), more: serde_json::Map::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// The folder with the benchmarks' files, where the environment names it.
    #[expect(clippy::print_stdout, reason = "a skipped test says so")]
    pub(super) fn shared() -> Option<PathBuf> {
        let shared = std::env::var_os("WEACT_SHARED").map(PathBuf::from);
        if shared.is_none() {
            println!("skipped: WEACT_SHARED is not set");
        }
        shared
    }

    pub(super) fn text_of(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    fn all_without_judge() -> impl Iterator<Item = Box<dyn Grader>> {
        Benchmark::all().filter_map(|benchmark| grader(benchmark, None, Options::default()).ok())
    }

    #[test]
    fn every_rule_knows_right_from_wrong_and_has_a_versioned_name_of_its_own() {
        let graders: Vec<_> = all_without_judge().collect();
        let ids: std::collections::BTreeSet<&str> = graders.iter().map(|grader| grader.id()).collect();
        assert_eq!((graders.len(), ids.len()), (12, 12));
        for grader in &graders {
            assert!(grader.id().contains('@') && grader.known().is_some(), "{}", grader.id());
            audit(&**grader).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    #[test]
    fn without_an_answer_there_is_nothing_to_grade() {
        for grader in all_without_judge() {
            let (task, right, _) = grader.known().expect("a rule's own");
            for prediction in [None, Some(""), Some(" \n"), Some("<think>"), Some("<think>x</think>")] {
                let graded = grader.grade(&task, prediction).expect("gradable");
                assert_eq!((graded.verdict, graded.score), (Verdict::NoAnswer, Some(0.0)), "{}: {prediction:?}", grader.id());
            }
            let thought = format!("<think>hm</think>\n{right}");
            let graded = grader.grade(&task, Some(&thought)).expect("gradable");
            assert!(graded.verdict == Verdict::Correct && graded.graded_text.is_some(), "{}", grader.id());
        }
        let exact = grader(Benchmark::TwoWiki, None, Options::default()).expect("a rule");
        let (task, ..) = exact.known().expect("known");
        assert_eq!(exact.grade(&task, None).expect("gradable").scores.len(), 3);
    }

    #[test]
    fn an_audit_finds_a_grader_that_always_says_no() {
        struct No;
        impl Grader for No {
            fn id(&self) -> &str {
                "no@1"
            }
            fn grade(&self, _: &Task, _: Option<&str>) -> Result<Graded> {
                Ok(Graded::of(false))
            }
            fn known(&self) -> Option<(Task, String, String)> {
                Some((Task::known("?", &["a"]), "a".to_owned(), "b".to_owned()))
            }
        }
        let error = audit(&No).expect_err("it is broken").to_string();
        assert!(error.contains("no@1 calls a known right answer wrong"), "{error}");
        let mut verdicts = vec![Verdict::Wrong; 9];
        assert_eq!(uniform(verdicts.clone()), None);
        verdicts.push(Verdict::Wrong);
        assert_eq!(uniform(verdicts.clone()), Some(Verdict::Wrong));
        verdicts.push(Verdict::Correct);
        assert_eq!((uniform(verdicts), uniform([])), (None, None));
    }

    #[test]
    fn what_cannot_be_graded_says_why() {
        for (benchmark, words) in [
            (Benchmark::Ds1000, "no sandbox"),
            (Benchmark::ResearchQa, "by a judge alone"),
            (Benchmark::DeepResearchBench, "by a judge alone"),
        ] {
            let error = grader(benchmark, None, Options::default()).err().expect("no grader").to_string();
            assert!(error.contains(words), "{error}");
        }
        let gaia = grader(Benchmark::Gaia, None, Options::default()).expect("a rule");
        assert!(gaia.grade(&Task::known("?", &[]), Some("x")).expect_err("no gold").to_string().contains("no gold answer"));
    }
}
