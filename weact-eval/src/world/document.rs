//! Pre-training documents: trajectories in the toy's format about facts that hold in no world, and exercises of general skill.

use rand::{
    Rng,
    seq::{IndexedRandom, SliceRandom},
};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use weact_core::{message::Message, trajectory::Trajectory};
use weact_infer::tools::corpus::{Hit, Page, format_hits, format_page};

use super::{
    dialect::{Dialect, Dialects},
    facts::{self, Entity, Fact, Relation, YEARS},
    general::{self, Exercise},
    gold::{Form, Want, tell},
    pages::{ARCHIVE, N_ADDRESSES, archive_page, long_page, root_page, short_page, stale, url},
    question::{Family, Question},
    stream,
    tools::timeout,
};

/// Share of exercises.
const EXERCISE_SHARE: f64 = 0.25;
/// How often the families stand among the trajectories, in hundredths: chains are learned first and need fewer.
const MIXTURE: [(Family, usize); 10] = [
    (Family::Chain(1), 12),
    (Family::Chain(2), 14),
    (Family::Chain(3), 12),
    (Family::Rooted(1), 7),
    (Family::Rooted(2), 7),
    (Family::Comparison, 12),
    (Family::Intersection(2), 10),
    (Family::Intersection(3), 8),
    (Family::Compute, 12),
    (Family::Unanswerable, 6),
];
/// Share of chains that end in a year.
const YEAR_SHARE: f64 = 0.2;
/// Share of trajectories in words; the others are in a random code map each.
const NEUTRAL_SHARE: f64 = 0.5;
/// Share of trajectories in stages.
const STAGED_SHARE: f64 = 0.6;
/// Share of searches that fail once.
const FAILURE_SHARE: f64 = 0.08;
/// Share of pages whose fact stands below the first line.
const LONG_SHARE: f64 = 0.15;
/// Share of distractors that repeat the fact with another value.
const ARCHIVE_SHARE: f64 = 0.15;
/// Share of distractors that name the queried entity as a value, and the queried relation.
const SAME_RELATION_SHARE: f64 = 0.35;
/// Share of the other distractors that are the entity's own page.
const ROOT_SHARE: f64 = 0.1;

/// A document: its messages, and the tools that its system message lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Unique in its series.
    pub id: String,
    /// The conversation.
    pub messages: Vec<Message>,
    /// The tools.
    pub tools: Vec<Value>,
    /// Whether its relations are words, so that all of the policy's tokens can be known.
    pub neutral: bool,
}

/// The tools of the two forms of trajectories, as [`schemas`](super::gold::schemas) gives them.
#[derive(Clone, Debug)]
pub struct Tools {
    /// With the control tools.
    pub staged: Vec<Value>,
    /// Without.
    pub plain: Vec<Value>,
}

/// Document `index` of the endless series of `seed`. Each trajectory has facts of its own, and a dialect of its own that all its
/// stages share: which codes a plan takes can't be known, but queries and citations repeat them.
pub fn document(seed: u64, index: u64, tools: &Tools) -> Document {
    let rng = &mut stream(seed, index);
    let id = format!("document-{seed}-{index}");
    if rng.random_bool(EXERCISE_SHARE) {
        let Exercise { messages, .. } = general::exercise(rng);
        return Document { id, messages, tools: Vec::new(), neutral: true };
    }
    let neutral = rng.random_bool(NEUTRAL_SHARE);
    let dialects = if neutral { Dialects::neutral() } else { Dialects::random(rng) };
    let trajectory = made_up(id, &dialects, tools, rng);
    Document { id: trajectory.id.clone(), messages: trajectory.messages().to_vec(), tools: trajectory.tools, neutral }
}

/// A trajectory of facts that hold nowhere.
fn made_up(id: String, dialects: &Dialects, tools: &Tools, rng: &mut ChaCha8Rng) -> Trajectory {
    let staged = rng.random_bool(STAGED_SHARE);
    let (form, schemas) = if staged { (Form::Staged, &tools.staged) } else { (Form::Plain, &tools.plain) };
    let family = MIXTURE.choose_weighted(rng, |(_, share)| *share as f64).expect("shares are positive").0;
    let question = made_up_question(family, rng);
    let mut library = MadeUp { search: &dialects.search, rng, long: false, failed: false, url: String::new() };
    tell(id, &question, form, dialects, schemas, |_, want| Ok(library.answer(want, &question)))
        .expect("the spans of a made-up trajectory fit")
}

fn made_up_question(family: Family, rng: &mut ChaCha8Rng) -> Question {
    loop {
        let relations = |n: usize, rng: &mut ChaCha8Rng| -> Vec<Relation> {
            let mut between: Vec<Relation> = Relation::between_entities().collect();
            between.shuffle(rng);
            between.truncate(n);
            between
        };
        let n = match family {
            Family::Chain(n) | Family::Rooted(n) | Family::Intersection(n) => n,
            Family::Comparison | Family::Compute => 2,
            Family::Unanswerable => 1,
        };
        let entities = distinct(&Entity::all().collect::<Vec<_>>(), n + 1, rng);
        let mut path = relations(n, rng);
        let year = |rng: &mut ChaCha8Rng| facts::Value::Year(rng.random_range(YEARS));
        let mut values: Vec<facts::Value> = entities[1..].iter().map(|&entity| facts::Value::Entity(entity)).collect();
        match family {
            Family::Chain(_) | Family::Rooted(_) if rng.random_bool(YEAR_SHARE) => {
                path[n - 1] = Relation::year();
                values[n - 1] = year(rng);
            }
            Family::Comparison | Family::Compute => {
                path = vec![Relation::year(); 2];
                values = vec![year(rng), year(rng)];
            }
            Family::Intersection(_) => values = vec![facts::Value::Entity(entities[n]); n],
            Family::Unanswerable => return Question::unanswerable(entities[0], path[0]),
            Family::Chain(_) | Family::Rooted(_) => {}
        }
        let root = matches!(family, Family::Rooted(_)).then(|| address(rng));
        let evidence = (0..n).map(|i| Fact { subject: entities[i], relation: path[i], value: values[i] }).collect();
        if let Some(question) = Question::new(family, evidence, root) {
            return question;
        }
    }
}

/// What answers the calls of a made-up trajectory, in the form in which real tools do.
struct MadeUp<'a> {
    search: &'a Dialect,
    rng: &'a mut ChaCha8Rng,
    /// The last hit was a page with its fact below the first line.
    long: bool,
    /// The last search failed.
    failed: bool,
    /// The address of the page that a visit shows.
    url: String,
}

impl MadeUp<'_> {
    fn answer(&mut self, want: Want<'_>, question: &Question) -> String {
        match want {
            Want::Hits(..) if !self.failed && self.rng.random_bool(FAILURE_SHARE) => {
                self.failed = true;
                if self.rng.random_bool(0.6) { timeout().text } else { format_hits(&[]) }
            }
            Want::Hits(subject, relation, fact) => {
                self.failed = false;
                self.hits(subject, relation, fact)
            }
            Want::Root(fact) => {
                let mut others: Vec<Relation> = Relation::all().filter(|r| *r != fact.relation).collect();
                others.shuffle(self.rng);
                let mut links: Vec<(Relation, String)> =
                    others.into_iter().take(3).map(|relation| (relation, address(self.rng))).collect();
                self.url = address(self.rng);
                let at = self.rng.random_range(0..=links.len());
                links.insert(at, (fact.relation, self.url.clone()));
                let root = question.root.clone().expect("a rooted question");
                page(root, root_page(fact.subject, &links, self.search))
            }
            Want::Page(fact) => {
                let long = self.long || self.rng.random_bool(LONG_SHARE);
                self.long = false;
                let text = if long { long_page(fact, self.search) } else { short_page(fact, self.search) };
                page(self.url.clone(), text)
            }
            Want::Value => {
                format!("= {}", question.answer)
            }
        }
    }

    /// The result of a search in the order of a real one: the fact's page, pages that share both words of the query, pages that share
    /// its entity.
    fn hits(&mut self, subject: Entity, relation: Relation, fact: Option<&Fact>) -> String {
        self.long = fact.is_some() && self.rng.random_bool(LONG_SHARE);
        let own = fact.map(|fact| if self.long { long_page(fact, self.search) } else { short_page(fact, self.search) });
        let mut distractors: Vec<(usize, String)> = (0..3).map(|_| self.distractor(subject, relation, fact)).collect();
        distractors.sort_by_key(|(rank, _)| *rank);
        let texts: Vec<String> = own.into_iter().chain(distractors.into_iter().map(|(_, text)| text)).take(3).collect();
        let hits: Vec<Hit> = texts
            .into_iter()
            .map(|text| {
                let snippet = text.lines().next().unwrap_or_default().to_owned();
                Hit { url: address(self.rng), title: String::new(), snippet }
            })
            .collect();
        self.url.clone_from(&hits[0].url);
        format_hits(&hits)
    }

    /// A page that resembles that of a fact, with its rank.
    fn distractor(&mut self, subject: Entity, relation: Relation, fact: Option<&Fact>) -> (usize, String) {
        let others: Vec<Entity> =
            Entity::all().filter(|&e| e != subject && fact.is_none_or(|fact| fact.value != facts::Value::Entity(e))).collect();
        let other = *others.choose(self.rng).expect("there are several entities");
        if let Some(fact) = fact.filter(|_| self.rng.random_bool(ARCHIVE_SHARE)) {
            return (0, archive_page(&stale(fact, other, self.rng), self.search));
        }
        if relation != Relation::year() && self.rng.random_bool(SAME_RELATION_SHARE) {
            let fact = Fact { subject: other, relation, value: facts::Value::Entity(subject) };
            return (1, short_page(&fact, self.search));
        }
        if self.rng.random_bool(ROOT_SHARE) {
            let links = distinct(&Relation::all().collect::<Vec<_>>(), 4, self.rng);
            let links: Vec<(Relation, String)> = links.into_iter().map(|relation| (relation, address(self.rng))).collect();
            return (2, root_page(subject, &links, self.search));
        }
        let relations: Vec<Relation> = Relation::between_entities().filter(|&r| r != relation).collect();
        let relation = *relations.choose(self.rng).expect("there are several relations");
        let text = short_page(&Fact { subject, relation, value: facts::Value::Entity(other) }, self.search);
        let stands_in_archive = self.rng.random_bool(0.1);
        (2, if stands_in_archive { format!(" {ARCHIVE}{text}") } else { text })
    }
}

fn page(url: String, text: String) -> String {
    format_page(&Page { url, title: String::new(), text })
}

fn address(rng: &mut ChaCha8Rng) -> String {
    url(rng.random_range(0..N_ADDRESSES))
}

fn distinct<T: Copy>(from: &[T], n: usize, rng: &mut ChaCha8Rng) -> Vec<T> {
    from.choose_multiple(rng, n).copied().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use weact_core::message::Role;

    use super::*;
    use crate::world::{dialect::CODES, facts::N_RELATIONS};

    /// The messages of the policy, joined.
    fn policys_text(document: &Document) -> String {
        let turns = document.messages.iter().filter(|message| message.role == Role::Assistant);
        turns.map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n")
    }

    fn no_tools() -> Tools {
        Tools { staged: Vec::new(), plain: Vec::new() }
    }

    #[test]
    fn a_document_depends_on_seed_and_index_alone() {
        let tools = no_tools();
        assert_eq!(document(3, 7, &tools), document(3, 7, &tools));
        let some = (0..50).flat_map(|i| [document(3, i, &tools), document(4, i, &tools)]);
        assert_eq!(some.map(|d| serde_json::to_string(&d.messages).expect("JSON")).collect::<BTreeSet<_>>().len(), 100);
    }

    /// In words or in codes, a document keeps to one dialect: what the plan calls a relation, query and citation do.
    #[test]
    fn the_stages_of_a_document_share_one_dialect() {
        let (mut n_coded, mut n_plans, mut seen) = (0, 0, BTreeSet::new());
        for index in 0..400 {
            let document = document(0, index, &no_tools());
            let text = policys_text(&document);
            let Some(plan) = text.lines().find(|line| line.starts_with("step1")) else { continue };
            let steps: BTreeSet<&str> = plan.split(' ').skip(1).step_by(2).collect();
            let calls: Vec<String> = document
                .messages
                .iter()
                .flat_map(|message| &message.tool_calls)
                .filter(|call| call.name == "search")
                .map(|call| call.arguments["query"][0].as_str().expect("a query").to_owned())
                .collect();
            assert!(calls.iter().all(|query| steps.contains(query.split(' ').next_back().expect("a word"))), "{calls:?} {plan}");
            let report = text.lines().find(|line| line.starts_with("cite")).expect("a report");
            let n_cited = steps.iter().filter(|step| report.split(' ').any(|word| word == **step)).count();
            assert!(n_cited == steps.len() || report.contains("unknown"), "{report}: {plan}");
            let coded = steps.iter().filter(|step| CODES.contains(step)).count();
            assert!(coded == steps.len() || coded == 0 && document.neutral, "{plan}");
            n_plans += 1;
            n_coded += usize::from(coded > 0);
            seen.extend(steps.into_iter().filter(|step| CODES.contains(step)).map(str::to_owned));
        }
        assert!((280..330).contains(&n_plans) && (120..190).contains(&n_coded), "{n_plans} plans, {n_coded} in codes");
        assert_eq!(seen.len(), N_RELATIONS);
    }
}
