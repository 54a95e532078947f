//! The world's pages: one for every fact that is known, found by subject and search code; one for every entity, with links to
//! some of them; and noise.

use rand::{
    Rng,
    seq::{IndexedRandom, SliceRandom},
};
use rand_chacha::ChaCha8Rng;
use weact_infer::tools::corpus::Page;

use super::{
    Draw, World,
    dialect::Dialect,
    facts::{Entity, Fact, N_RELATIONS, Relation, Value},
};
use crate::{Error, Result};

/// How many addresses there are.
pub(super) const N_ADDRESSES: usize = 960;
/// The last word of a page's first line where the fact stands below.
pub(super) const MORE: &str = "more";
/// The first word of a page that repeats a fact with another value.
pub(super) const ARCHIVE: &str = "archive";
/// The first word of a page that only names entities.
pub(super) const SEE: &str = "see";
/// How many facts an entity's own page links to.
const N_LINKS: usize = 4;

impl World {
    /// The pages in the order of their places. Pages that fit a query equally well are found in this order.
    ///
    /// The noise, as a share of the facts, comes last, so that other pages have the same address whatever its share: seven of ten
    /// such pages repeat a fact with another value, the others name entities, hold nothing, or hold letters beyond ASCII.
    pub fn pages(&self) -> Vec<Page> {
        let mut pages: Vec<(usize, String)> = self.facts().map(|fact| (self.place(fact), self.page_of(&fact))).collect();
        pages.extend(self.entities().map(|entity| (self.root_place(entity), self.root_page(entity))));
        pages.sort();
        pages.extend(self.noise(self.n_noise()).into_iter().zip(self.places.len()..).map(|(text, place)| (place, text)));
        pages.into_iter().map(|(place, text)| Page { url: url(place), title: String::new(), text }).collect()
    }

    /// Pages that are noise.
    fn n_noise(&self) -> usize {
        (self.config.noise * self.facts().count() as f64).round() as usize
    }

    /// Checks that there are addresses for all pages.
    pub(super) fn check_addresses(&self) -> Result<()> {
        let n_pages = self.places.len() + self.n_noise();
        if n_pages > N_ADDRESSES {
            let noise = self.config.noise;
            return Err(Error::Other(format!("noise is {noise}: {n_pages} pages are more than the {N_ADDRESSES} addresses")));
        }
        Ok(())
    }

    /// The address of an entity's own page.
    pub fn root_url(&self, entity: Entity) -> String {
        url(self.root_place(entity))
    }

    /// The facts to which an entity's own page links.
    pub fn links(&self, entity: Entity) -> Vec<Fact> {
        let known: Vec<Fact> = Relation::all().filter_map(|relation| self.fact(entity, relation)).collect();
        let mut rng = self.rng_of(Draw::Links, entity.index());
        known.choose_multiple(&mut rng, N_LINKS).copied().collect()
    }

    fn place(&self, fact: Fact) -> usize {
        self.places[fact.subject.index() * N_RELATIONS + fact.relation.index()]
    }

    fn root_place(&self, entity: Entity) -> usize {
        self.places[self.values.len() * N_RELATIONS + entity.index()]
    }

    fn page_of(&self, fact: &Fact) -> String {
        let long = self.rng_of(Draw::Long, self.place(*fact)).random_bool(self.config.long_share);
        if long { long_page(fact, &self.dialects.search) } else { short_page(fact, &self.dialects.search) }
    }

    fn root_page(&self, entity: Entity) -> String {
        let links: Vec<(Relation, String)> =
            self.links(entity).iter().map(|fact| (fact.relation, url(self.place(*fact)))).collect();
        root_page(entity, &links, &self.dialects.search)
    }

    fn noise(&self, n: usize) -> Vec<String> {
        let rng = &mut self.rng(Draw::Noise);
        let facts: Vec<Fact> = self.facts().collect();
        let entities: Vec<Entity> = self.entities().collect();
        let page = |i: usize| {
            let fact = facts.choose(rng).expect("a world has facts");
            let other = entities.iter().filter(|&&e| e != fact.subject && fact.value != Value::Entity(e));
            let other = *other.collect::<Vec<_>>().choose(rng).expect("there are four entities");
            match i % 10 {
                0 => format!(" {SEE} {} {other}", fact.subject),
                1 => " ".to_owned(),
                2 => format!(" {SEE} {other} ö — é"),
                _ => archive_page(&stale(fact, *other, rng), &self.dialects.search),
            }
        };
        (0..n).map(page).collect()
    }
}

/// The places of the pages of facts, by subject and relation, then of the entities' own.
pub(super) fn draw_places(n_entities: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    let mut places: Vec<usize> = (0..n_entities * (N_RELATIONS + 1)).collect();
    places.shuffle(rng);
    places
}

/// The address of the page at `place`.
pub(super) fn url(place: usize) -> String {
    format!("p{place:03}")
}

/// The fact in plain words, then the key under which queries find it: `Orun captain Mira Orun k11`.
///
/// The subject stands twice, so that for the query `Orun k11` this page ranks above `Brel captain Orun Brel k11`.
pub(super) fn short_page(fact: &Fact, search: &Dialect) -> String {
    let Fact { subject, relation, .. } = fact;
    format!(" {} {subject} {}", said(fact), search.word(*relation))
}

/// The key in the first line, the fact in the second.
pub(super) fn long_page(fact: &Fact, search: &Dialect) -> String {
    let Fact { subject, relation, .. } = fact;
    format!(" {subject} {subject} {} {MORE}\n {}", search.word(*relation), said(fact))
}

/// A fact that is not so any more, in the words of [`short_page`] after one that says so.
pub(super) fn archive_page(fact: &Fact, search: &Dialect) -> String {
    format!(" {ARCHIVE}{}", short_page(fact, search))
}

/// An entity's own page: where the pages of some of its facts are. ` Orun k11 (p017) k03 (p608)`
pub(super) fn root_page(entity: Entity, links: &[(Relation, String)], search: &Dialect) -> String {
    let link = |(relation, url): &(Relation, String)| format!(" {} ({url})", search.word(*relation));
    format!(" {entity}{}", links.iter().map(link).collect::<String>())
}

/// Subject, relation and value as pages say them.
pub(super) fn said(fact: &Fact) -> String {
    format!("{} {} {}", fact.subject, fact.relation.page_word(), fact.value)
}

/// `fact` with another value: `other`, or another year.
pub(super) fn stale(fact: &Fact, other: Entity, rng: &mut ChaCha8Rng) -> Fact {
    let value = match fact.value {
        Value::Entity(_) => Value::Entity(other),
        Value::Year(year) => {
            let years: Vec<u16> = super::facts::YEARS.filter(|y| *y != year).collect();
            Value::Year(*years.choose(rng).expect("there are several years"))
        }
    };
    Fact { value, ..*fact }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use weact_infer::tools::corpus::Corpus;

    use super::*;
    use crate::world::{WorldConfig, dialect::Dialects};

    #[test]
    fn addresses_suffice_for_the_noisiest_world_and_do_not_move_with_the_noise() {
        let world = |noise| World::new(&WorldConfig { noise, ..WorldConfig::default() }).expect("a world");
        let [quiet, noisy] = [0.0, 0.4].map(|noise| world(noise).pages());
        assert_eq!(noisy.iter().map(|page| &page.url).collect::<BTreeSet<_>>().len(), noisy.len());
        assert_eq!(noisy[..quiet.len()], quiet);
        assert!(noisy.iter().any(|page| page.text.trim().is_empty()));
        assert!(noisy.iter().any(|page| !page.text.is_ascii()));
        assert_eq!((url(0), url(37)), ("p000".to_owned(), "p037".to_owned()));
    }

    /// For every fact, what each way of asking finds first, in the noisiest of the task files.
    #[test]
    fn only_the_search_dialect_finds_every_fact_and_another_finds_another_relation() {
        let world = World::new(&WorldConfig { noise: 0.4, unknown_share: 0.0, ..WorldConfig::default() }).expect("a world");
        let corpus = Corpus::from_pages(world.pages()).expect("a corpus");
        let first = |subject: Entity, word: &str| {
            let hits = corpus.search(&format!(" {subject} {word}"), 3).expect("hits");
            assert_eq!(hits.len(), 3);
            hits[0].url.clone()
        };
        let Dialects { plan, search, write } = world.dialects().clone();
        let mut n_found_by_word = 0;
        for fact in world.facts() {
            let own = url(world.place(fact));
            assert_eq!(first(fact.subject, search.word(fact.relation)), own, "{}", said(&fact));
            for wrong in [&plan, &write] {
                let code = wrong.word(fact.relation);
                let meant = Relation::all().find(|&r| search.word(r) == code).expect("every code means a relation");
                assert_ne!(meant, fact.relation);
                let other = world.fact(fact.subject, meant).expect("all is known");
                assert_eq!(first(fact.subject, code), url(world.place(other)));
            }
            let by_word = first(fact.subject, fact.relation.word()) == own;
            assert!(by_word || fact.relation.word() != fact.relation.page_word(), "{}", said(&fact));
            n_found_by_word += usize::from(by_word);
        }
        let n_facts = world.facts().count();
        assert!((n_facts / 2..n_facts * 65 / 100).contains(&n_found_by_word), "{n_found_by_word} of {n_facts}");
    }
}
