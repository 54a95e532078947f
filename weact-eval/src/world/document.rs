//! Pre-training documents: trajectories in the toy's format about facts that hold in no world.

use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use weact_core::trajectory::Trajectory;
use weact_infer::tools::corpus::{Hit, format_hits};

use super::{
    dialect::{Dialect, Dialects},
    facts::{Entity, Fact, N_ENTITIES, N_RELATIONS, Relation},
    gold::weave,
    pages::{page_text, url},
    question::Question,
    stream,
};

/// Share of documents in words; the others are in a random code map each.
const NEUTRAL_SHARE: f64 = 0.5;
/// Share of documents of two hops.
const TWO_HOP_SHARE: f64 = 2.0 / 3.0;
/// Share of distractors that name the queried entity as a value, and the queried relation.
const SAME_RELATION_SHARE: f64 = 0.4;

/// Document `index` of the endless series of `seed`. Each has facts of its own, and a dialect of its own that all three stages
/// share: which codes a plan takes can't be known, but queries and citations repeat them.
///
/// `tools` are the [schemas](super::gold::schemas) of a run.
pub fn document(seed: u64, index: u64, tools: &[Value]) -> Trajectory {
    let rng = &mut stream(seed, index);
    let dialects = if rng.random_bool(NEUTRAL_SHARE) { Dialects::neutral() } else { Dialects::random(rng) };
    let hops = if rng.random_bool(TWO_HOP_SHARE) { 2 } else { 1 };
    let entities = distinct(&Entity::all().collect::<Vec<_>>(), hops + 1, rng);
    let path = distinct(&Relation::all().collect::<Vec<_>>(), hops, rng);
    let ends = entities.windows(2).zip(path);
    let question = Question::new(ends.map(|(ends, relation)| Fact { subject: ends[0], relation, value: ends[1] }).collect());
    let id = format!("document-{seed}-{index}");
    weave(id, &question, &dialects, tools.to_vec(), |fact, _| Ok(made_up_result(fact, &dialects.search, rng)))
        .expect("the spans of a made-up trajectory fit")
}

/// The result of a search for `fact`, in the order of a real one: its page, pages that share both words of the query, pages that
/// share its entity.
fn made_up_result(fact: &Fact, search: &Dialect, rng: &mut ChaCha8Rng) -> String {
    let n_same_relation = (0..2).filter(|_| rng.random_bool(SAME_RELATION_SHARE)).count();
    let distractors: Vec<Fact> = (0..2).map(|i| distractor(fact, i < n_same_relation, rng)).collect();
    let hit = |fact| {
        let url = url(rng.random_range(0..N_ENTITIES * N_RELATIONS));
        Hit { url, title: String::new(), snippet: page_text(fact, search) }
    };
    format_hits(&std::iter::once(fact).chain(&distractors).map(hit).collect::<Vec<_>>())
}

/// A fact whose page resembles that of `fact`.
fn distractor(fact: &Fact, same_relation: bool, rng: &mut ChaCha8Rng) -> Fact {
    let others: Vec<Entity> = Entity::all().filter(|&e| e != fact.subject && e != fact.value).collect();
    let other = *others.choose(rng).expect("there are more than two entities");
    if same_relation {
        return Fact { subject: other, relation: fact.relation, value: fact.subject };
    }
    let relations: Vec<Relation> = Relation::all().filter(|&r| r != fact.relation).collect();
    Fact { relation: *relations.choose(rng).expect("there are two relations"), value: other, ..*fact }
}

fn distinct<T: Copy>(from: &[T], n: usize, rng: &mut ChaCha8Rng) -> Vec<T> {
    from.choose_multiple(rng, n).copied().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::world::dialect::CODES;

    fn text(trajectory: &Trajectory) -> String {
        serde_json::to_string(trajectory).expect("a trajectory is JSON")
    }

    #[test]
    fn a_document_depends_on_seed_and_index_alone() {
        assert_eq!(document(3, 7, &[]), document(3, 7, &[]));
        let some: Vec<Trajectory> = (0..50).flat_map(|i| [document(3, i, &[]), document(4, i, &[])]).collect();
        assert_eq!(some.iter().map(text).collect::<BTreeSet<_>>().len(), 100);
    }

    /// In words or in codes, a document keeps to one dialect: what the plan calls a relation, query, key and citation do.
    #[test]
    fn the_stages_of_a_document_share_one_dialect() {
        let (mut n_coded, mut seen) = (0, BTreeSet::new());
        for index in 0..200 {
            let document = document(0, index, &[]);
            let plan = &document.messages()[document.spans()[0].start].content;
            let steps: Vec<&str> = plan.split(' ').skip(1).step_by(2).collect();
            let report = &document.messages()[document.spans()[2].start].content;
            let search = document.spans()[1].start;
            for (hop, step) in steps.iter().enumerate() {
                assert!(report.split(' ').any(|word| word == *step), "{step} is not in {report}");
                let [call, result] = &document.messages()[search + 2 * hop..][..2] else { unreachable!("two messages") };
                let query = call.tool_calls[0].arguments["query"][0].as_str().expect("a query");
                assert!(query.ends_with(step), "{query} does not end with {step}");
                assert!(result.content.lines().next().is_some_and(|hit| hit.ends_with(query)), "{query}: {}", result.content);
            }
            n_coded += usize::from(CODES.contains(&steps[0]));
            seen.extend(steps.into_iter().filter(|step| CODES.contains(step)).map(str::to_owned));
        }
        assert!((70..130).contains(&n_coded), "{n_coded} of 200 are in codes");
        assert_eq!(seen.len(), N_RELATIONS);
    }
}
