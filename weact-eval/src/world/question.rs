//! Questions about chains of facts, and their split into training, validation and test.

use rand::{Rng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::{
    Draw, World,
    facts::{Entity, Fact, Relation},
};

/// What a question may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// To train adapters.
    Train,
    /// To choose settings.
    Val,
    /// To report.
    Test,
}

/// A question for the end of a chain of facts: `what is the seat of the captain of Orun ?`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Unique in a world: `orun-captain-seat`.
    pub id: String,
    /// As the user asks it.
    pub text: String,
    /// Number of facts in the chain.
    pub hops: usize,
    /// Where the chain starts.
    pub start: Entity,
    /// The relations to follow from there.
    pub path: Vec<Relation>,
    /// The facts on the way; each starts where the one before it ends.
    pub evidence: Vec<Fact>,
    /// The last fact's value.
    pub answer: Entity,
}

impl Question {
    /// The question whose evidence is `evidence`.
    ///
    /// # Panics
    /// If `evidence` is empty or no chain.
    pub fn new(evidence: Vec<Fact>) -> Self {
        assert!(
            evidence.windows(2).all(|pair| pair[0].value == pair[1].subject),
            "each fact starts where the one before it ends"
        );
        let start = evidence.first().expect("a question has evidence").subject;
        let answer = evidence.last().expect("a question has evidence").value;
        let path: Vec<Relation> = evidence.iter().map(|fact| fact.relation).collect();
        let words: Vec<&str> = path.iter().map(|relation| relation.word()).collect();
        let outermost_first: Vec<&str> = words.iter().rev().copied().collect();
        Self {
            id: format!("{}-{}", start.name().to_lowercase(), words.join("-")),
            text: format!("what is the {} of {start} ?", outermost_first.join(" of the ")),
            hops: path.len(),
            start,
            path,
            evidence,
            answer,
        }
    }
}

impl World {
    /// The questions of one split, of one and two hops, in an order that the seed decides: any prefix is a sample.
    ///
    /// Splits are by relation path and start; about the held-out entities there are test questions only. A chain of two hops
    /// has two relations and does not return to its start.
    pub fn questions(&self, split: Split) -> Vec<Question> {
        let mut rng = self.rng(Draw::Splits);
        let mut questions = Vec::new();
        for path in paths() {
            for start in self.entities() {
                let drawn = self.split_of(start, rng.random());
                let evidence = self.follow(start, &path);
                if drawn == split && evidence.last().is_some_and(|fact| fact.value != start) {
                    questions.push(Question::new(evidence));
                }
            }
        }
        questions.shuffle(&mut self.rng(Draw::QuestionOrder));
        questions
    }

    /// The facts met when following `path` from `start`.
    fn follow(&self, start: Entity, path: &[Relation]) -> Vec<Fact> {
        let step = |at: &mut Entity, &relation: &Relation| {
            let fact = self.fact(*at, relation);
            *at = fact.value;
            Some(fact)
        };
        path.iter().scan(start, step).collect()
    }

    /// Where a question about `start` goes if `u`, uniform in [0, 1), was drawn for it.
    fn split_of(&self, start: Entity, u: f64) -> Split {
        let (val, test) = (self.config.val_share, self.config.test_share);
        match u {
            _ if self.held_out[start.index()] => Split::Test,
            u if u < val => Split::Val,
            u if u < val + test => Split::Test,
            _ => Split::Train,
        }
    }
}

/// Every relation, and every pair of two different ones.
fn paths() -> impl Iterator<Item = Vec<Relation>> {
    let pairs = Relation::all().flat_map(|first| Relation::all().map(move |second| vec![first, second]));
    Relation::all().map(|relation| vec![relation]).chain(pairs.filter(|pair| pair[0] != pair[1]))
}

/// A random `share` of `n_entities`, rounded, as flags by entity.
pub(super) fn draw_held_out(n_entities: usize, share: f64, rng: &mut ChaCha8Rng) -> Vec<bool> {
    let n_held_out = (share * n_entities as f64).round() as usize;
    let mut flags: Vec<bool> = (0..n_entities).map(|i| i < n_held_out).collect();
    flags.shuffle(rng);
    flags
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::world::WorldConfig;

    #[test]
    fn splits_share_no_question_and_held_out_entities_are_only_tested() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let splits = [Split::Train, Split::Val, Split::Test].map(|split| world.questions(split));
        let ids: BTreeSet<&str> = splits.iter().flatten().map(|question| question.id.as_str()).collect();
        assert_eq!(ids.len(), splits.iter().map(Vec::len).sum::<usize>());
        let starts = splits.each_ref().map(|split| split.iter().map(|q| q.start).collect::<BTreeSet<_>>());
        assert_eq!((starts[0].len(), starts[2].len()), (38, 48));
        assert!(starts[1].is_subset(&starts[0]));
        for (split, share) in splits.iter().zip([0.633, 0.079, 0.288]) {
            assert!((split.len() as f64 / ids.len() as f64 - share).abs() < 0.02, "{} of {}", split.len(), ids.len());
        }
        assert_eq!(world.questions(Split::Val), splits[1]);
    }

    #[test]
    fn a_question_reads_from_the_last_relation_back_to_the_start() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let by_id: BTreeMap<String, Question> = world.questions(Split::Test).into_iter().map(|q| (q.id.clone(), q)).collect();
        let question = by_id.values().find(|q| q.hops == 2).expect("a question of two hops");
        let [first, second] = question.evidence[..] else { panic!("two facts") };
        assert_eq!(question.text, format!("what is the {} of the {} of {} ?", second.relation, first.relation, question.start));
        assert_eq!((first.subject, first.value, second.value), (question.start, second.subject, question.answer));
        assert_eq!(world.fact(first.subject, first.relation), first);
    }
}
