//! The grader of the toy's reports.

use super::{World, facts::Fact, question::Question};

/// The share of the evidence that a right report cites at least.
const CITED_SHARE: f64 = 0.8;

/// What a report is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grade {
    /// The text between the last `<answer>` and `</answer>` is the answer.
    pub answer_right: bool,
    /// Share of the evidence, in [0, 1], that is cited: subject, relation in the dialect of reports and value, in a row.
    pub citations_right: f64,
    /// The answer is right, and at least 0.8 of the evidence is cited.
    pub right: bool,
}

impl World {
    /// Grades `report` as an answer to `question`.
    pub fn grade(&self, question: &Question, report: &str) -> Grade {
        let (body, answer) = split_answer(report);
        let words: Vec<&str> = body.split_whitespace().map(|word| word.trim_matches(['.', ',', ';', ':'])).collect();
        let is_cited = |fact: &&Fact| {
            let citation = [fact.subject.name(), self.dialects.write.word(fact.relation), fact.value.name()];
            words.windows(3).any(|words| words == citation)
        };
        let answer_right = answer == Some(question.answer.name());
        let citations_right = question.evidence.iter().filter(is_cited).count() as f64 / question.evidence.len() as f64;
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
    };

    #[test]
    fn a_report_needs_the_answer_and_citations_in_its_own_dialect() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let start = Entity::all().next().expect("an entity");
        let [r, s] = Relation::all().take(2).collect::<Vec<_>>()[..] else { unreachable!("two relations") };
        let first = world.fact(start, r);
        let second = world.fact(first.value, s);
        let question = Question::new(vec![first, second]);
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
}
