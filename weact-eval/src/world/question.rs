//! Questions, and their split into training, validation and test.

use rand::{Rng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::{
    Draw, World,
    facts::{Entity, Fact, Relation},
};

/// The answer to a question that no page answers.
pub const UNKNOWN: &str = "unknown";

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

/// What a question asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// The end of a chain of so many facts, 1 to 3: `what is the seat of the captain of Orun ?`
    Chain(usize),
    /// The same where the first fact is reached by a link from the entity's own page: `from p017 what is the captain of Orun ?`
    Rooted(usize),
    /// Which of two began earlier: `which has the earlier year , Orun or Mira ?`
    Comparison,
    /// What so many facts, 2 or 3, have in common: `who is the captain of Orun and the mentor of Mira ?`
    Intersection(usize),
    /// The years between two: `how many years between Orun and Mira ?`
    Compute,
    /// A fact that stands on no page.
    Unanswerable,
}

/// The families, and how often each stands in a mixture, in hundredths.
pub const MIXTURE: [(Family, usize); 10] = [
    (Family::Chain(1), 18),
    (Family::Chain(2), 24),
    (Family::Chain(3), 14),
    (Family::Rooted(1), 6),
    (Family::Rooted(2), 6),
    (Family::Comparison, 9),
    (Family::Intersection(2), 7),
    (Family::Intersection(3), 5),
    (Family::Compute, 7),
    (Family::Unanswerable, 4),
];

/// A question, what it takes to answer it, and the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Unique in a world: `orun-captain-seat`.
    pub id: String,
    /// As the user asks it.
    pub text: String,
    /// What it asks.
    pub family: Family,
    /// Address of the page that the question names.
    pub root: Option<String>,
    /// What is to be looked up, in order: whose relation.
    pub lookups: Vec<(Entity, Relation)>,
    /// What the lookups give; nothing where the page is missing.
    pub evidence: Vec<Fact>,
    /// What is to be computed in the end.
    pub expression: Option<String>,
    /// The answer.
    pub answer: String,
}

impl Question {
    /// The question of `family` whose evidence is `evidence`; `None` where these facts pose no such question: a chain that breaks or
    /// returns to an entity, facts with nothing in common, years that are equal.
    pub fn new(family: Family, evidence: Vec<Fact>, root: Option<String>) -> Option<Self> {
        let lookups: Vec<_> = evidence.iter().map(|fact| (fact.subject, fact.relation)).collect();
        let (first, last) = (evidence.first()?, evidence.last()?);
        let mut expression = None;
        let (text, answer) = match family {
            Family::Chain(_) | Family::Rooted(_) => {
                let is_chain = evidence.windows(2).all(|pair| pair[0].value.entity() == Some(pair[1].subject));
                let returns = evidence.iter().any(|fact| fact.value.entity() == Some(first.subject));
                if !is_chain || returns {
                    return None;
                }
                let from = root.as_ref().map_or_else(String::new, |root| format!("from {root} "));
                let words: Vec<&str> = lookups.iter().rev().map(|(_, relation)| relation.word()).collect();
                (format!("{from}what is the {} of {} ?", words.join(" of the "), first.subject), last.value.to_string())
            }
            Family::Comparison => {
                let earlier = if first.value.year()? < last.value.year()? { first } else { last };
                let text = format!("which has the earlier year , {} or {} ?", first.subject, last.subject);
                (text, earlier.subject.to_string())
            }
            Family::Intersection(_) => {
                let asked = |fact: &Fact| format!("the {} of {}", fact.relation, fact.subject);
                let asked: Vec<String> = evidence.iter().map(asked).collect();
                first.value.entity().filter(|_| evidence.iter().all(|fact| fact.value == first.value))?;
                (format!("who is {} ?", asked.join(" and ")), first.value.to_string())
            }
            Family::Compute => {
                let (a, b) = (first.value.year()?, last.value.year()?);
                expression = Some(format!(" {} - {}", a.max(b), a.min(b)));
                let text = format!("how many years between {} and {} ?", first.subject, last.subject);
                (text, a.abs_diff(b).to_string())
            }
            Family::Unanswerable => return None,
        };
        if matches!(family, Family::Comparison | Family::Compute) && first.value == last.value {
            return None;
        }
        let id = id(family, &lookups);
        Some(Self { id, text, family, root, lookups, evidence, expression, answer })
    }

    /// The question for a relation of `subject` that stands on no page.
    pub fn unanswerable(subject: Entity, relation: Relation) -> Self {
        let lookups = vec![(subject, relation)];
        Self {
            id: id(Family::Unanswerable, &lookups),
            text: format!("what is the {relation} of {subject} ?"),
            family: Family::Unanswerable,
            root: None,
            lookups,
            evidence: Vec::new(),
            expression: None,
            answer: UNKNOWN.to_owned(),
        }
    }

    /// Number of lookups.
    pub fn hops(&self) -> usize {
        self.lookups.len()
    }

    /// The constraints of the question, one for each lookup.
    pub fn constraints(&self) -> Vec<String> {
        let is_chain = matches!(self.family, Family::Chain(_) | Family::Rooted(_));
        let constraint = |(i, (subject, relation)): (usize, &(Entity, Relation))| match i {
            1.. if is_chain => format!("its {relation}"),
            _ => format!("{relation} of {subject}"),
        };
        self.lookups.iter().enumerate().map(constraint).collect()
    }
}

fn id(family: Family, lookups: &[(Entity, Relation)]) -> String {
    let lower = |entity: &Entity| entity.name().to_lowercase();
    let words = |between: &str| lookups.iter().map(|(_, r)| r.word()).collect::<Vec<_>>().join(between);
    let subjects = || lookups.iter().map(|(s, _)| lower(s)).collect::<Vec<_>>().join("-");
    match family {
        Family::Chain(_) | Family::Unanswerable => format!("{}-{}", lower(&lookups[0].0), words("-")),
        Family::Rooted(_) => format!("from-{}-{}", lower(&lookups[0].0), words("-")),
        Family::Comparison => format!("earlier-{}", subjects()),
        Family::Compute => format!("between-{}", subjects()),
        Family::Intersection(_) => {
            let pairs: Vec<String> = lookups.iter().map(|(s, r)| format!("{}-{}", lower(s), r.word())).collect();
            format!("both-{}", pairs.join("-"))
        }
    }
}

impl World {
    /// The first `n` questions of a split, mixed as [`MIXTURE`] says; fewer where a family has not enough.
    pub fn questions(&self, split: Split, n: usize) -> Vec<Question> {
        let mut mixed: Vec<(f64, Question)> = Vec::new();
        for (family, share) in MIXTURE {
            let wanted = (n * share).div_ceil(100);
            // The place of each in [0, 1): any prefix has about the same mixture.
            let place = |(i, question)| ((i as f64 + 0.5) / wanted as f64, question);
            mixed.extend(self.family(family, split, wanted).into_iter().enumerate().map(place));
        }
        mixed.sort_by(|a, b| a.0.total_cmp(&b.0));
        mixed.truncate(n);
        mixed.into_iter().map(|(_, question)| question).collect()
    }

    /// The first `n` questions of one family and split, in an order that the seed decides.
    ///
    /// Splits are by what is looked up: about the held-out entities there are test questions only, and a fifth of the pairs of
    /// relations occur in test questions only.
    pub fn family(&self, family: Family, split: Split, n: usize) -> Vec<Question> {
        let mut questions: Vec<Question> = match family {
            Family::Chain(hops) => self.chains(hops, split, false),
            Family::Rooted(hops) => self.chains(hops, split, true),
            Family::Comparison | Family::Compute => self.pairs_of_years(family, split),
            Family::Intersection(n_facts) => self.intersections(n_facts, split),
            Family::Unanswerable => self.unknown(split),
        };
        let stream = family_index(family);
        questions.shuffle(&mut self.rng_of(Draw::QuestionOrder, stream));
        questions.truncate(n);
        questions
    }

    /// The question that reads `text`, as this world answers it; `None` if it is none of the toy's.
    pub fn question(&self, text: &str) -> Option<Question> {
        let entity = |name: &str| Entity::named(name).filter(|entity| entity.index() < self.values.len());
        let pair = |text: &str, between: &str| {
            let (a, b) = text.split_once(between)?;
            Some([entity(a)?, entity(b)?])
        };
        let of_years = |family, entities: [Entity; 2]| {
            let facts: Option<Vec<Fact>> = entities.iter().map(|&e| self.fact(e, Relation::year())).collect();
            Question::new(family, facts?, None)
        };
        let (root, text) = match text.strip_prefix("from ") {
            Some(rest) => rest.split_once(' ').map(|(root, rest)| (Some(root.to_owned()), rest))?,
            None => (None, text),
        };
        let text = text.strip_suffix(" ?")?;
        if let Some(entities) = text.strip_prefix("which has the earlier year , ") {
            return of_years(Family::Comparison, pair(entities, " or ")?);
        }
        if let Some(entities) = text.strip_prefix("how many years between ") {
            return of_years(Family::Compute, pair(entities, " and ")?);
        }
        if let Some(constraints) = text.strip_prefix("who is the ") {
            let fact = |constraint: &str| {
                let (relation, subject) = constraint.split_once(" of ")?;
                self.fact(entity(subject)?, Relation::named(relation)?)
            };
            let facts: Vec<Fact> = constraints.split(" and the ").map(fact).collect::<Option<_>>()?;
            return Question::new(Family::Intersection(facts.len()), facts, None);
        }
        let (words, start) = text.strip_prefix("what is the ")?.rsplit_once(" of ")?;
        let path: Vec<Relation> = words.rsplit(" of the ").map(Relation::named).collect::<Option<_>>()?;
        let start = entity(start)?;
        match (self.follow(start, &path), &path[..], &root) {
            (Some(evidence), ..) if root.is_some() => Question::new(Family::Rooted(path.len()), evidence, root),
            (Some(evidence), ..) => Question::new(Family::Chain(path.len()), evidence, None),
            (None, [relation], None) => Some(Question::unanswerable(start, *relation)),
            _ => None,
        }
    }

    /// The test questions of two hops whose pair of relations occurs in no training question.
    pub fn unusual_chains(&self, n: usize) -> Vec<Question> {
        let mut questions = self.family(Family::Chain(2), Split::Test, usize::MAX);
        questions.retain(|question| self.is_unusual(&relations(&question.lookups)));
        questions.truncate(n);
        questions
    }

    fn chains(&self, hops: usize, split: Split, rooted: bool) -> Vec<Question> {
        let mut rng = self.rng_of(Draw::Splits, hops);
        let family = if rooted { Family::Rooted(hops) } else { Family::Chain(hops) };
        let mut questions = Vec::new();
        for path in paths(hops) {
            let unusual = self.is_unusual(&path);
            for start in self.entities() {
                let drawn = if unusual { Split::Test } else { self.split_of(&[start], rng.random()) };
                let Some(evidence) = self.follow(start, &path) else { continue };
                let linked = !rooted || self.links(start).contains(&evidence[0]);
                if drawn == split && linked {
                    questions.extend(Question::new(family, evidence, rooted.then(|| self.root_url(start))));
                }
            }
        }
        questions
    }

    fn pairs_of_years(&self, family: Family, split: Split) -> Vec<Question> {
        let mut rng = self.rng_of(Draw::Splits, family_index(family));
        let mut questions = Vec::new();
        for (a, b) in self.entities().flat_map(|a| self.entities().map(move |b| (a, b))).filter(|(a, b)| a != b) {
            let drawn = self.split_of(&[a, b], rng.random());
            let facts = [a, b].map(|entity| self.fact(entity, Relation::year()));
            if let [Some(first), Some(second)] = facts
                && drawn == split
            {
                questions.extend(Question::new(family, vec![first, second], None));
            }
        }
        questions
    }

    /// For every value and every ordered pair of facts with it, one question; a third fact is drawn for it.
    fn intersections(&self, n_facts: usize, split: Split) -> Vec<Question> {
        let mut rng = self.rng_of(Draw::Splits, family_index(Family::Intersection(n_facts)));
        let facts: Vec<Fact> = self.facts().filter(|fact| fact.value.entity().is_some()).collect();
        let mut questions = Vec::new();
        for first in &facts {
            let mut others: Vec<&Fact> = facts
                .iter()
                .filter(|fact| fact.value == first.value && fact.subject != first.subject && fact.relation != first.relation)
                .collect();
            others.shuffle(&mut rng);
            let u = rng.random();
            others.truncate(n_facts - 1);
            let evidence: Vec<Fact> = std::iter::once(first).chain(others).copied().collect();
            let subjects: Vec<Entity> = evidence.iter().map(|fact| fact.subject).collect();
            if evidence.len() == n_facts && self.split_of(&subjects, u) == split {
                questions.extend(Question::new(Family::Intersection(n_facts), evidence, None));
            }
        }
        questions
    }

    fn unknown(&self, split: Split) -> Vec<Question> {
        let mut rng = self.rng_of(Draw::Splits, family_index(Family::Unanswerable));
        let all = self.entities().flat_map(|subject| Relation::all().map(move |relation| (subject, relation)));
        let missing = all.filter(|&(subject, relation)| self.fact(subject, relation).is_none());
        let drawn = missing.filter(|&(subject, _)| self.split_of(&[subject], rng.random()) == split);
        drawn.map(|(subject, relation)| Question::unanswerable(subject, relation)).collect()
    }

    /// The facts met when following `path` from `start`; `None` where one is unknown.
    fn follow(&self, start: Entity, path: &[Relation]) -> Option<Vec<Fact>> {
        let mut at = Some(start);
        let step = |&relation: &Relation| {
            let fact = self.fact(at?, relation)?;
            at = fact.value.entity();
            Some(fact)
        };
        path.iter().map(step).collect()
    }

    /// Where a question about `entities` goes if `u`, uniform in [0, 1), was drawn for it.
    fn split_of(&self, entities: &[Entity], u: f64) -> Split {
        let (val, test) = (self.config.val_share, self.config.test_share);
        match u {
            _ if entities.iter().any(|entity| self.held_out[entity.index()]) => Split::Test,
            u if u < val => Split::Val,
            u if u < val + test => Split::Test,
            _ => Split::Train,
        }
    }

    /// Whether this pair of relations is kept for test questions.
    fn is_unusual(&self, path: &[Relation]) -> bool {
        let [first, second] = path else { return false };
        let index = first.index() * super::facts::N_RELATIONS + second.index();
        self.rng_of(Draw::Splits, 1000 + index).random_bool(0.2)
    }
}

fn relations(lookups: &[(Entity, Relation)]) -> Vec<Relation> {
    lookups.iter().map(|&(_, relation)| relation).collect()
}

/// Tells the families' random streams apart.
fn family_index(family: Family) -> usize {
    match family {
        Family::Chain(hops) => hops,
        Family::Rooted(hops) => 10 + hops,
        Family::Comparison => 20,
        Family::Intersection(n_facts) => 20 + n_facts,
        Family::Compute => 30,
        Family::Unanswerable => 31,
    }
}

/// Every path of so many different relations; all but the last give entities.
fn paths(hops: usize) -> Vec<Vec<Relation>> {
    let mut paths = vec![Vec::new()];
    for hop in 1..=hops {
        let next = |path: &Vec<Relation>| {
            let candidates = Relation::all().filter(|r| !path.contains(r) && (hop == hops || *r != Relation::year()));
            candidates.map(|relation| [path.as_slice(), &[relation]].concat()).collect::<Vec<_>>()
        };
        paths = paths.iter().flat_map(next).collect();
    }
    paths
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
    use std::collections::BTreeSet;

    use super::*;
    use crate::world::WorldConfig;

    fn world() -> World {
        World::new(&WorldConfig::default()).expect("the default world")
    }

    #[test]
    fn splits_share_no_question_and_held_out_entities_are_only_tested() {
        let world = world();
        for (family, _) in MIXTURE {
            let splits = [Split::Train, Split::Val, Split::Test].map(|split| world.family(family, split, usize::MAX));
            let ids: BTreeSet<&str> = splits.iter().flatten().map(|question| question.id.as_str()).collect();
            assert_eq!(ids.len(), splits.iter().map(Vec::len).sum::<usize>(), "{family:?}");
            let held_out = |question: &Question| world.held_out[question.lookups[0].0.index()];
            assert!(splits[..2].iter().flatten().all(|question| !held_out(question)), "{family:?}");
            assert!(splits[2].iter().any(held_out), "{family:?}");
            assert_eq!(world.family(family, Split::Train, usize::MAX), splits[0]);
        }
        let pairs = |questions: &[Question]| questions.iter().map(|q| relations(&q.lookups)).collect::<BTreeSet<_>>();
        let trained = pairs(&world.family(Family::Chain(2), Split::Train, usize::MAX));
        assert!(pairs(&world.unusual_chains(usize::MAX)).is_disjoint(&trained));
    }

    #[test]
    fn every_prefix_of_a_sample_is_mixed_alike() {
        let questions = world().questions(Split::Test, 400);
        assert!((385..=400).contains(&questions.len()), "{}", questions.len());
        for prefix in [&questions[..100], &questions] {
            for (family, share) in MIXTURE.into_iter().filter(|(family, _)| *family != Family::Unanswerable) {
                let n = prefix.iter().filter(|question| question.family == family).count();
                let expected = prefix.len() * share / 100;
                assert!(n.abs_diff(expected) <= 1 + expected / 4, "{family:?}: {n} of {}", prefix.len());
            }
        }
    }

    #[test]
    fn questions_read_as_they_are_meant() {
        let world = world();
        for (family, _) in MIXTURE {
            for question in world.family(family, Split::Test, 20) {
                let relation = |i: usize| question.lookups[i].1;
                let subject = |i: usize| question.lookups[i].0;
                let expected = match family {
                    Family::Chain(1) | Family::Unanswerable => format!("what is the {} of {} ?", relation(0), subject(0)),
                    Family::Chain(2) => format!("what is the {} of the {} of {} ?", relation(1), relation(0), subject(0)),
                    Family::Chain(_) => {
                        format!("what is the {} of the {} of the {} of {} ?", relation(2), relation(1), relation(0), subject(0))
                    }
                    Family::Rooted(hops) => {
                        let tail = if hops == 1 { String::new() } else { format!("{} of the ", relation(1)) };
                        let root = question.root.as_deref().expect("a root");
                        format!("from {root} what is the {tail}{} of {} ?", relation(0), subject(0))
                    }
                    Family::Comparison => format!("which has the earlier year , {} or {} ?", subject(0), subject(1)),
                    Family::Compute => format!("how many years between {} and {} ?", subject(0), subject(1)),
                    Family::Intersection(n) => {
                        let asked = (0..n).map(|i| format!("the {} of {}", relation(i), subject(i))).collect::<Vec<_>>();
                        format!("who is {} ?", asked.join(" and "))
                    }
                };
                assert_eq!(question.text, expected);
                assert_eq!(world.question(&question.text), Some(question.clone()));
                assert_eq!(question.constraints().len(), question.hops());
                for (fact, lookup) in question.evidence.iter().zip(&question.lookups) {
                    assert_eq!((world.fact(lookup.0, lookup.1), lookup.0), (Some(*fact), fact.subject));
                }
                assert_eq!(question.evidence.is_empty(), question.answer == UNKNOWN);
            }
        }
    }
    #[test]
    fn a_text_that_is_no_question_of_the_world_is_none() {
        let world = world();
        for text in [
            "",
            "?",
            "what is the captain of Nobody ?",
            "what is the hat of Orun ?",
            "what is the captain of Orun",
            "from ab",
            "which has the earlier year , Orun ?",
            "which has the earlier year , Orun or Orun ?",
            "who is the captain ?",
        ] {
            assert_eq!(world.question(text), None, "{text:?}");
        }
    }
}
