//! The grader of the toy's reports.

use std::collections::BTreeMap;

use super::{
    World,
    facts::Fact,
    gold::cited_report,
    question::{Question, Split},
};
use crate::{
    Error, Result,
    grade::{Graded, Grader, Verdict},
    task::Task,
};

/// The share of the evidence that a right report cites at least.
const CITED_SHARE: f64 = 0.8;

/// What a report is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grade {
    /// The text between the last `<answer>` and `</answer>` is the answer.
    pub answer_right: bool,
    /// Share of the evidence, in [0, 1], that is cited: subject, relation in the dialect of reports and value, in a row. 1 where
    /// there is none to cite.
    pub citations_right: f64,
    /// The answer is right, and at least 0.8 of the evidence is cited.
    pub right: bool,
}

/// The world's grader among those of the harness: an answer is right if its value is and at least 0.8 of the evidence is cited in the
/// dialect of reports. The scores `answer` and `citations` are its two halves.
///
/// Tasks are known by their question's text. The whole report is graded, not the answer in it.
#[derive(Clone, Debug)]
pub struct WorldGrader {
    world: World,
    id: String,
}

impl WorldGrader {
    /// The grader of `world`.
    pub fn new(world: World) -> Self {
        let config = world.config();
        Self { id: format!("world@1:seed={},gamma={},shift={}", config.seed, config.gamma, config.shift), world }
    }
}

impl Grader for WorldGrader {
    fn id(&self) -> &str {
        &self.id
    }

    fn reads_report(&self) -> bool {
        true
    }

    fn grade(&self, task: &Task, prediction: Option<&str>) -> Result<Graded> {
        let question = self.world.question(&task.question).ok_or_else(|| {
            Error::Other(format!("task {}: {:?} is no question of this world: is it another seed's?", task.id, task.question))
        })?;
        let text = prediction.map(str::trim).filter(|text| !text.is_empty());
        let grade = self.world.grade(&question, text.unwrap_or_default());
        let verdict = match text {
            None => Verdict::NoAnswer,
            Some(_) if grade.right => Verdict::Correct,
            Some(_) => Verdict::Wrong,
        };
        let scores = [("answer", f64::from(u8::from(grade.answer_right))), ("citations", grade.citations_right)];
        Ok(Graded {
            verdict,
            score: Some(f64::from(u8::from(grade.right))),
            scores: scores.map(|(name, score)| (name.to_owned(), score)).into_iter().collect::<BTreeMap<_, _>>(),
            graded_text: None,
            detail: None,
        })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let question = self.world.questions(Split::Test, 1).pop()?;
        let right = cited_report(&question, self.world.dialects());
        let wrong = right.replace("<answer>", "<answer> not");
        let task = Task {
            id: question.id,
            question: question.text,
            gold: vec![question.answer],
            files: Vec::new(),
            more: Default::default(),
        };
        Some((task, right, wrong))
    }
}

impl World {
    /// Grades `report` as an answer to `question`.
    pub fn grade(&self, question: &Question, report: &str) -> Grade {
        let (body, answer) = split_answer(report);
        let words: Vec<&str> = body.split_whitespace().map(|word| word.trim_matches(['.', ',', ';', ':'])).collect();
        let is_cited = |fact: &&Fact| {
            let value = fact.value.to_string();
            let citation = [fact.subject.name(), self.dialects.write.word(fact.relation), &value];
            words.windows(3).any(|words| words == citation)
        };
        let answer_right = answer == Some(question.answer.as_str());
        let n_cited = question.evidence.iter().filter(is_cited).count();
        let citations_right = if question.evidence.is_empty() { 1.0 } else { n_cited as f64 / question.evidence.len() as f64 };
        Grade { answer_right, citations_right, right: answer_right && citations_right >= CITED_SHARE }
    }
}

/// What stands before the last answer, and the answer.
fn split_answer(report: &str) -> (&str, Option<&str>) {
    let Some((body, rest)) = report.rsplit_once("<answer>") else { return (report, None) };
    (body, rest.split_once("</answer>").map(|(answer, _)| answer.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{
        WorldConfig,
        facts::{Entity, Relation},
        question::{Family, UNKNOWN},
    };

    #[test]
    fn a_report_needs_the_answer_and_citations_in_its_own_dialect() {
        let world = World::new(&WorldConfig { unknown_share: 0.0, ..WorldConfig::default() }).expect("a world");
        let start = Entity::all().next().expect("an entity");
        let [r, s] = Relation::all().take(2).collect::<Vec<_>>()[..] else { unreachable!("two relations") };
        let first = world.fact(start, r).expect("known");
        let second = world.fact(first.value.entity().expect("an entity"), s).expect("known");
        let question = Question::new(Family::Chain(2), vec![first, second], None).expect("a chain");
        let (a, b, c) = (first.subject, first.value, second.value);
        let [(kr, ks), (pr, ps)] = [&world.dialects().write, &world.dialects().plan].map(|d| (d.word(r), d.word(s)));
        for (report, answer_right, citations_right) in [
            (format!("cite {a} {kr} {b} {b} {ks} {c} <answer> {c}</answer>"), true, 1.0),
            (format!("{b} {ks} {c}. {a} {kr} {b}; <answer>{c}</answer> done"), true, 1.0),
            (format!("cite {a} {kr} {b} {b} {ps} {c} <answer> {c}</answer>"), true, 0.5),
            (format!("cite {a} {pr} {b} {b} {ps} {c} <answer> {c}</answer>"), true, 0.0),
            (format!("cite {a} {kr} {b} {b} {ks} {c} <answer> {b}</answer>"), false, 1.0),
            (format!("cite {a} {kr} {b} {b} {ks} {c} <answer> {c}"), false, 1.0),
            (format!("cite {a} {kr} {b} {b} {ks} {c}"), false, 1.0),
            (format!("<answer> {c}</answer> cite {a} {kr} {b} <answer> {b}</answer>"), false, 0.5),
            (String::new(), false, 0.0),
        ] {
            let right = answer_right && citations_right == 1.0;
            assert_eq!(world.grade(&question, &report), Grade { answer_right, citations_right, right }, "{report}");
        }
    }
    #[test]
    fn where_there_is_nothing_to_cite_the_answer_decides() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let start = Entity::all().next().expect("an entity");
        let question = Question::unanswerable(start, Relation::year());
        assert!(world.grade(&question, &format!("cite <answer> {UNKNOWN}</answer>")).right);
        assert!(!world.grade(&question, "cite <answer> 1742</answer>").right);
    }
    #[test]
    fn the_harness_s_grader_knows_a_task_by_its_question() {
        let grader = WorldGrader::new(World::new(&WorldConfig::default()).expect("the default world"));
        let (task, right, wrong) = grader.known().expect("a known case");
        let verdict = |text: Option<&str>| grader.grade(&task, text).expect("a grade").verdict;
        assert_eq!(verdict(Some(&right)), Verdict::Correct);
        assert_eq!(verdict(Some(&wrong)), Verdict::Wrong);
        assert_eq!(verdict(Some(" ")), Verdict::NoAnswer);
        assert_eq!(verdict(None), Verdict::NoAnswer);
        let foreign = Task { question: "what is the capital of France ?".to_owned(), ..task.clone() };
        assert!(grader.grade(&foreign, Some("Paris")).is_err());
    }
}
