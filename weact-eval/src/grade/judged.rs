//! Answers to questions, graded by a judge.

use std::sync::Arc;

use super::{
    Graded, Rule, Verdict, gold,
    judge::{Judge, Prompt},
    reply,
};
use crate::{Error, Result, benchmark::Benchmark, task::Task};

/// A prompt and how its replies are read.
struct Form {
    prompt: Prompt,
    parse: fn(&str) -> Option<bool>,
}

const EQUIVALENCE: Form = Form {
    prompt: Prompt { version: "equivalence@1", template: include_str!("judges/equivalence.txt") },
    parse: reply::equivalence,
};
const BROWSECOMP: Form = Form {
    prompt: Prompt { version: "browsecomp@1", template: include_str!("judges/browsecomp.txt") },
    parse: reply::browsecomp,
};
const FRAMES: Form =
    Form { prompt: Prompt { version: "frames@1", template: include_str!("judges/frames.txt") }, parse: reply::frames };
const XBENCH: Form =
    Form { prompt: Prompt { version: "xbench@1", template: include_str!("judges/xbench.txt") }, parse: reply::xbench };

pub(super) struct Judged {
    id: String,
    benchmark: Benchmark,
    form: Form,
    /// Its scores are reported beside the judge's verdict.
    rule: Box<dyn Rule>,
    judge: Arc<Judge>,
}

impl Judged {
    pub(super) fn new(benchmark: Benchmark, rule: Box<dyn Rule>, judge: Arc<Judge>) -> Self {
        let form = match benchmark {
            Benchmark::BrowseComp => BROWSECOMP,
            Benchmark::Frames => FRAMES,
            Benchmark::XbenchDeepSearch => XBENCH,
            _ => EQUIVALENCE,
        };
        Self { id: format!("{benchmark}-judge@1:{}", judge.name()), benchmark, form, rule, judge }
    }

    /// Whether no judge is needed: the answer is a gold answer to the letter, xbench's final line is, or MegaScience's rule is content.
    fn is_plain(&self, answer: &str, gold: &[String], by_rule: &Graded) -> bool {
        let marked = answer.lines().rev().find_map(|line| line.trim().strip_prefix("最终答案"));
        let line = marked
            .filter(|_| self.benchmark == Benchmark::XbenchDeepSearch)
            .map(|rest| rest.trim_start_matches([':', '：']).trim());
        gold.iter().any(|gold| [Some(answer.trim()), line].contains(&Some(gold.trim())))
            || (self.benchmark == Benchmark::MegaScience && by_rule.verdict == Verdict::Correct)
    }
}

impl Rule for Judged {
    fn id(&self) -> &str {
        &self.id
    }

    fn scores(&self) -> &'static [&'static str] {
        self.rule.scores()
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let gold = gold(task)?;
        if task.question.trim().is_empty() {
            return Err(Error::Other(format!("task {}: a judge needs the question", task.id)));
        }
        let by_rule = self.rule.apply(task, answer)?;
        let mut scores = by_rule.scores.clone();
        if scores.is_empty() {
            scores.extend(by_rule.score.map(|score| ("rule".to_owned(), score)));
        }
        if self.is_plain(answer, gold, &by_rule) {
            let detail = Some("it is the gold answer: no judge was asked".to_owned());
            return Ok(Graded { scores, detail, ..Graded::of(true) });
        }
        let (first, others) = gold.split_first().expect("checked above");
        let correct_answer =
            if others.is_empty() { first.clone() } else { format!("{first} (also accepted: {})", others.join("; ")) };
        let values = [("question", task.question.as_str()), ("correct_answer", &correct_answer), ("response", answer)];
        let text = self.form.prompt.fill(&values);
        let graded = match self.judge.decide(self.form.prompt, &text, self.benchmark.is_secret(), self.form.parse) {
            Ok((right, reply)) => Graded { detail: Some(reply), ..Graded::of(right) },
            Err(why) => Graded::judge_error(why),
        };
        Ok(Graded { scores, ..graded })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let task = Task::known("What is the capital of France?", &["Paris"]);
        Some((task, "It is the city of Paris.".to_owned(), "It is the city of Lyon.".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::grade::{
        Options, audit, grader,
        judge::{Settings, hex, tests::scripted},
    };

    fn task() -> Task {
        Task { question: "Who wrote {response}?".to_owned(), ..Task::known("", &["Goethe", "J. W. Goethe"]) }
    }

    #[test]
    fn each_benchmark_asks_in_its_own_words_and_reads_its_own_replies() {
        use Benchmark::{BrowseComp, Frames, Gaia, MuSiQue, WebWalkerQa, XbenchDeepSearch};
        for (benchmark, begins, reply, right) in [
            (Gaia, "You are an evaluation assistant", "Correct", true),
            (MuSiQue, "You are an evaluation assistant", "Incorrect.", false),
            (WebWalkerQa, "You are an evaluation assistant", "correct", true),
            (BrowseComp, "Judge whether the following [response]", "correct: yes", true),
            (Frames, "===Task===", "**Decision:** FALSE", false),
            (XbenchDeepSearch, "你是一个通用人工智能助手", "结论：正确", true),
        ] {
            let (judge, asked) = scripted(Settings::default(), move |_, _| Ok(reply.to_owned()));
            let grader = grader(benchmark, Some(judge), Options::default()).expect("a judge is given");
            assert_eq!(grader.id(), format!("{benchmark}-judge@1:scripted"));
            let graded = grader.grade(&task(), Some("Goethe, I think")).expect("gradable");
            assert_eq!((graded.score, graded.detail.as_deref()), (Some(f64::from(u8::from(right))), Some(reply)), "{benchmark}");
            let asked = asked.lock().expect("no panic");
            assert!(asked[0].starts_with(begins), "{}", asked[0]);
            for part in ["Who wrote {response}?", "Goethe (also accepted: J. W. Goethe)", "Goethe, I think"] {
                assert!(asked[0].contains(part), "{benchmark}: {part}");
            }
        }
    }

    #[test]
    fn no_judge_is_asked_about_a_gold_answer_or_about_none() {
        let (judge, asked) = scripted(Settings::default(), |_, _| Ok("Incorrect".to_owned()));
        let open = |benchmark| grader(benchmark, Some(Arc::clone(&judge)), Options::default()).expect("a judge is given");
        for (benchmark, prediction, verdict) in [
            (Benchmark::Gaia, Some("<think>hm</think> Goethe"), Verdict::Correct),
            (Benchmark::XbenchDeepSearch, Some("推理\n最终答案：Goethe"), Verdict::Correct),
            (Benchmark::MegaScience, Some("\\boxed{GOETHE}"), Verdict::Correct),
            (Benchmark::Gaia, Some("<think>Goethe"), Verdict::NoAnswer),
            (Benchmark::Gaia, None, Verdict::NoAnswer),
        ] {
            assert_eq!(open(benchmark).grade(&task(), prediction).expect("gradable").verdict, verdict, "{prediction:?}");
        }
        assert_eq!(asked.lock().expect("no panic").len(), 0);
        assert_eq!(open(Benchmark::Gaia).grade(&task(), Some("goethe!")).expect("gradable").verdict, Verdict::Wrong);
        assert!(open(Benchmark::Gaia).grade(&Task::known("", &["x"]), Some("y")).is_err(), "there is no question");
    }

    /// The scores of the rule stay, the judge's own is unknown.
    #[test]
    fn a_judge_that_fails_is_neither_right_nor_wrong() {
        for reply in ["I would rather not say", ""] {
            let (judge, _) = scripted(Settings::default(), |_, _| Ok(reply.to_owned()));
            let grader = grader(Benchmark::MuSiQue, Some(judge), Options::default()).expect("a judge is given");
            let graded = grader.grade(&task(), Some("the Goethe")).expect("gradable");
            assert_eq!((graded.verdict, graded.score, graded.scores["em"]), (Verdict::JudgeError, None, 1.0));
        }
    }

    #[test]
    fn an_audit_finds_a_judge_that_says_yes_to_all() {
        let honest = |text: &str, _| Ok(if text.contains("Lyon") { "Incorrect" } else { "Correct" }.to_owned());
        let open = |judge| grader(Benchmark::WebWalkerQa, Some(judge), Options::default()).expect("a judge is given");
        audit(&*open(scripted(Settings::default(), honest).0)).expect("an honest judge");
        let error = audit(&*open(scripted(Settings::default(), |_, _| Ok("Correct".to_owned())).0)).expect_err("a kind judge");
        assert!(error.to_string().contains("calls a known wrong answer correct"), "{error}");
    }

    /// Whoever changes a prompt gives it a new version here.
    #[test]
    fn a_prompt_belongs_to_its_version() {
        for (prompt, version, digest) in [
            (EQUIVALENCE.prompt, "equivalence@1", "46c25b0d4f28d8bf"),
            (BROWSECOMP.prompt, "browsecomp@1", "732dd73cab327aca"),
            (FRAMES.prompt, "frames@1", "c28f6541467cb79c"),
            (XBENCH.prompt, "xbench@1", "5da3c260985566a3"),
            (crate::grade::coverage::PROMPT, "coverage@1", "3a1eee1074a9b591"),
            (crate::grade::race::EN, "race-en@1", "43317a9d6e80e4d5"),
            (crate::grade::race::ZH, "race-zh@1", "7eed83f8b8d7f411"),
        ] {
            let found = hex(&Sha256::digest(prompt.template));
            assert_eq!((prompt.version, &found[..16]), (version, digest));
        }
    }
}
