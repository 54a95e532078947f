//! Exact match and F1 over words, as SQuAD, HotpotQA and their successors measure them, and exact match alone for benchmarks whose
//! metric is a judge.
//!
//! Both sides are normalised: lower-case, ASCII punctuation removed (no blank in its place), the words `a`, `an` and `the` removed,
//! blanks squeezed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
};

use serde::{Deserialize, Serialize};

use super::{Graded, Rule, gold, text};
use crate::{Result, benchmark::Benchmark, task::Task};

/// Which F1: they differ where a side is empty or says yes or no.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum F1 {
    /// SQuAD and MuSiQue: without words on a side, 1 if the other has none either, else 0.
    Squad,
    /// HotpotQA and 2WikiMultiHopQA: `yes`, `no` and `noanswer` match nothing but themselves, and without words on a side it is 0.
    Hotpot,
}

/// How two answers, or two sets, overlap. All in [0, 1].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// 1 if they are equal, else 0.
    pub em: f64,
    /// Share of the prediction that is in the gold answer.
    pub precision: f64,
    /// Share of the gold answer that is in the prediction.
    pub recall: f64,
    /// Their harmonic mean.
    pub f1: f64,
}

pub(super) struct Exact {
    id: String,
    /// `None` leaves exact match alone.
    f1: Option<F1>,
}

impl Exact {
    /// Exact match, F1 and cover-EM for `benchmark`; without an F1, exact match alone.
    pub(super) fn new(benchmark: Benchmark, f1: Option<F1>) -> Self {
        Self { id: format!("{benchmark}-{}@1", if f1.is_some() { "em" } else { "exact" }), f1 }
    }
}

impl Rule for Exact {
    fn id(&self) -> &str {
        &self.id
    }

    fn scores(&self) -> &'static [&'static str] {
        if self.f1.is_some() { &["em", "f1", "cover_em"] } else { &["em"] }
    }

    fn apply(&self, task: &Task, answer: &str) -> Result<Graded> {
        let gold = gold(task)?;
        let best = |score: &dyn Fn(&str) -> f64| gold.iter().map(|gold| score(gold)).fold(0.0, f64::max);
        let em = best(&|gold| f64::from(u8::from(normalize(answer) == normalize(gold))));
        let mut scores = BTreeMap::from([("em".to_owned(), em)]);
        if let Some(flavour) = self.f1 {
            scores.insert("f1".to_owned(), best(&|gold| overlap(answer, gold, flavour).f1));
            scores.insert("cover_em".to_owned(), best(&|gold| f64::from(u8::from(covers(answer, gold)))));
        }
        Ok(Graded { scores, ..Graded::of(em == 1.0) })
    }

    fn known(&self) -> Option<(Task, String, String)> {
        let task = Task::known("Who wrote Faust?", &["Johann Wolfgang von Goethe", "Goethe"]);
        Some((task, "the Goethe.".to_owned(), "Johann Wolfgang".to_owned()))
    }
}

/// An answer in the form in which it is compared.
pub fn normalize(answer: &str) -> String {
    let bare = answer.to_lowercase().replace(text::is_punctuation, "");
    let mut kept = String::with_capacity(bare.len());
    let mut rest = bare.as_str();
    while !rest.is_empty() {
        // An article counts only as a whole word, between Unicode's word boundaries.
        let is_word = rest.chars().next().is_some_and(text::is_word);
        let (run, after) = rest.split_at(rest.find(|c| text::is_word(c) != is_word).unwrap_or(rest.len()));
        kept.push_str(if ["a", "an", "the"].contains(&run) { " " } else { run });
        rest = after;
    }
    text::squeeze(&kept)
}

/// Exact match and F1 of `prediction` against one gold answer: a bag of words each, `p` and `r` the shares in common, and
/// `F1 = 2pr / (p + r)`.
pub fn overlap(prediction: &str, gold: &str, flavour: F1) -> Overlap {
    let (prediction, gold) = (normalize(prediction), normalize(gold));
    let em = f64::from(u8::from(prediction == gold));
    let is_closed = |text: &str| ["yes", "no", "noanswer"].contains(&text);
    if flavour == F1::Hotpot && em == 0.0 && (is_closed(&prediction) || is_closed(&gold)) {
        return Overlap::default();
    }
    let (said, wanted): (Vec<&str>, Vec<&str>) = (prediction.split_whitespace().collect(), gold.split_whitespace().collect());
    if said.is_empty() || wanted.is_empty() {
        let share = if flavour == F1::Squad { em } else { 0.0 };
        return Overlap { em, precision: share, recall: share, f1: share };
    }
    let mut left: HashMap<&str, usize> = HashMap::new();
    wanted.iter().for_each(|word| *left.entry(word).or_insert(0) += 1);
    let common = said.iter().filter(|word| left.get_mut(**word).is_some_and(take)).count();
    Overlap::new(em, common as f64 / said.len() as f64, common as f64 / wanted.len() as f64)
}

fn take(n: &mut usize) -> bool {
    let any = *n > 0;
    *n = n.saturating_sub(1);
    any
}

/// Whether the normalised prediction holds the normalised gold answer anywhere (Search-R1's cover-EM), across words too. A gold
/// answer that normalises to nothing is held by nothing but itself; in the original everything holds it.
pub fn covers(prediction: &str, gold: &str) -> bool {
    let (prediction, gold) = (normalize(prediction), normalize(gold));
    if gold.is_empty() { prediction.is_empty() } else { prediction.contains(&gold) }
}

/// Precision, recall and F1 of a predicted set: supporting facts (title, sentence) or evidence (subject, relation, object). Where
/// both are empty, `em` is 1 and the rest 0, as in HotpotQA's evaluation.
pub fn set_overlap<T: Hash + Eq + Ord>(predicted: &BTreeSet<T>, gold: &BTreeSet<T>) -> Overlap {
    let common = predicted.intersection(gold).count() as f64;
    let share = |n: usize| if n == 0 { 0.0 } else { common / n as f64 };
    Overlap::new(f64::from(u8::from(predicted == gold)), share(predicted.len()), share(gold.len()))
}

/// The joint metric of HotpotQA (answer and supporting facts) and 2WikiMultiHopQA (and evidence): precisions, recalls and exact
/// matches are multiplied, F1 is that of the products.
pub fn joint(parts: &[Overlap]) -> Overlap {
    let product = |of: fn(&Overlap) -> f64| parts.iter().map(of).product();
    Overlap::new(product(|o| o.em), product(|o| o.precision), product(|o| o.recall))
}

impl Overlap {
    fn new(em: f64, precision: f64, recall: f64) -> Self {
        let f1 = if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 };
        Self { em, precision, recall, f1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grade::tests::{shared, text_of};

    #[derive(Deserialize)]
    struct Case {
        prediction: String,
        gold: String,
        normalized_prediction: String,
        em: f64,
        f1_musique_squad: f64,
        f1_hotpot_2wiki: f64,
        precision: f64,
        recall: f64,
    }

    /// Values of MuSiQue's and 2WikiMultiHopQA's scorers: `tests/golden/LICENSE.note.txt`.
    #[test]
    fn every_value_is_the_public_scorers() {
        let cases: Vec<Case> = serde_json::from_str(include_str!("../../tests/golden/em_f1.json")).expect("JSON");
        assert_eq!(cases.len(), 21);
        for case in cases {
            let name = format!("{:?} for {:?}", case.prediction, case.gold);
            assert_eq!(normalize(&case.prediction), case.normalized_prediction, "{name}");
            let hotpot = overlap(&case.prediction, &case.gold, F1::Hotpot);
            let expected = Overlap { em: case.em, precision: case.precision, recall: case.recall, f1: case.f1_hotpot_2wiki };
            assert_eq!(hotpot, expected, "{name}");
            let squad = overlap(&case.prediction, &case.gold, F1::Squad);
            assert_eq!((squad.em, squad.f1), (case.em, case.f1_musique_squad), "{name}");
        }
    }

    #[test]
    fn the_best_gold_answer_counts_for_each_score() {
        let grade = |answer: &str| {
            let graded =
                Exact::new(Benchmark::MuSiQue, Some(F1::Squad)).apply(&Task::known("", &["New York City", "NYC"]), answer);
            let graded = graded.expect("gradable");
            (graded.scores["em"], graded.scores["f1"], graded.scores["cover_em"])
        };
        assert_eq!(grade("the NYC!"), (1.0, 1.0, 1.0));
        assert_eq!(grade("New York"), (0.0, 0.8, 0.0));
        assert_eq!(grade("in nyc today"), (0.0, 0.5, 1.0));
        assert!(!covers("anything", "The") && covers("a", "The"));
    }

    /// By hand: 1 of 2 predicted facts is right and 1 of 3 is found, so p = 1/2, r = 1/3, F1 = 2/5; with an answer of p = 1, r = 1/2
    /// the products are 1/2 and 1/6, and F1 = 1/4.
    #[test]
    fn joint_metrics_multiply_before_the_harmonic_mean() {
        let facts = |sentences: &[usize]| sentences.iter().map(|i| ("Title", *i)).collect::<BTreeSet<_>>();
        let support = set_overlap(&facts(&[0, 5]), &facts(&[0, 1, 2]));
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} for {b}");
        close(support.f1, 0.4);
        let answer = overlap("Goethe", "von Goethe", F1::Hotpot);
        let joint = joint(&[answer, support]);
        close(joint.f1, 0.25);
        assert_eq!((joint.em, set_overlap(&facts(&[1]), &facts(&[1])).em), (0.0, 1.0));
    }

    /// Real outputs with a judge's verdicts (R1-Searcher): what matches exactly, the judge calls right as well.
    #[test]
    fn real_answers_that_match_are_those_that_a_judge_accepts() {
        let Some(shared) = shared() else { return };
        let text = text_of(&shared.join("data/bench/2wiki_predictions/2wiki_qwen.jsonl"));
        let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let (mut n_em, mut n_cover, mut n_judge) = (0, 0, 0);
        for row in &rows {
            let [prediction, gold, judge] =
                ["pred_ans", "answer", "gpt4o_output"].map(|key| row[key].as_str().expect("a string"));
            let (em, cover) = (normalize(prediction) == normalize(gold), covers(prediction, gold));
            assert!(!cover || judge == "True", "{prediction:?} for {gold:?}");
            n_em += usize::from(em);
            n_cover += usize::from(cover);
            n_judge += usize::from(judge == "True");
        }
        assert_eq!((rows.len(), n_em, n_cover, n_judge), (25, 14, 17, 18));
    }
}
