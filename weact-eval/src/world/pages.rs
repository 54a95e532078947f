//! The world's pages: one for every fact, found by subject and search code.

use std::sync::Arc;

use rand::seq::SliceRandom;
use weact_infer::tools::{
    ToolSet,
    corpus::{Corpus, Page},
};

use super::{Draw, World, dialect::Dialect, facts::Fact};
use crate::Result;

/// The letters of addresses; two of them are one.
pub(super) const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwx";

impl World {
    /// The pages, one for each fact, in an order that the seed decides. Pages that fit a query equally well are found in this
    /// order.
    pub fn pages(&self) -> Vec<Page> {
        let mut facts: Vec<Fact> = self.facts().collect();
        facts.shuffle(&mut self.rng(Draw::PageOrder));
        let page = |(i, fact)| Page { url: url(i), title: String::new(), text: page_text(fact, &self.dialects.search) };
        facts.iter().enumerate().map(page).collect()
    }

    /// The tools of a run in this world: `search` and `visit` over its pages.
    ///
    /// # Errors
    /// If the pages can't be indexed.
    pub fn tools(&self) -> Result<ToolSet> {
        let corpus = Arc::new(Corpus::from_pages(self.pages())?);
        Ok(ToolSet::new(corpus.tools())?)
    }
}

/// The address of page `i`.
pub(super) fn url(i: usize) -> String {
    let n_letters = LETTERS.len();
    [LETTERS[i / n_letters], LETTERS[i % n_letters]].map(char::from).iter().collect()
}

/// The fact in plain words, then the key under which queries find it: `Orun captain Mira Orun k11`.
///
/// The subject stands twice, so that for the query `Orun k11` this page ranks above `Brel captain Orun Brel k11`.
pub(super) fn page_text(fact: &Fact, search: &Dialect) -> String {
    let Fact { subject, relation, value } = fact;
    format!("{subject} {} {value} {subject} {}", relation.page_word(), search.word(*relation))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{
        WorldConfig,
        dialect::Dialects,
        facts::{Entity, N_ENTITIES, N_RELATIONS, Relation},
    };

    fn world() -> World {
        World::new(&WorldConfig::default()).expect("the default world")
    }

    #[test]
    fn addresses_suffice_for_the_largest_world() {
        assert_eq!(LETTERS.len() * LETTERS.len(), N_ENTITIES * N_RELATIONS);
        assert_eq!((url(0), url(25), url(575)), ("aa".to_owned(), "bb".to_owned(), "xx".to_owned()));
    }

    /// For every fact, what each way of asking finds first.
    #[test]
    fn only_the_search_dialect_finds_every_fact_and_another_finds_another_relation() {
        let world = world();
        let corpus = Corpus::from_pages(world.pages()).expect("a corpus");
        let first = |subject: Entity, word: &str| {
            let hits = corpus.search(&format!(" {subject} {word}"), 3).expect("hits");
            assert_eq!(hits.len(), 3);
            hits[0].snippet.clone()
        };
        let Dialects { plan, search, write } = world.dialects().clone();
        let mut n_found_by_word = 0;
        for fact in world.facts() {
            let text = page_text(&fact, &search);
            assert_eq!(first(fact.subject, search.word(fact.relation)), text);
            for wrong in [&plan, &write] {
                let code = wrong.word(fact.relation);
                let meant = Relation::all().find(|&r| search.word(r) == code).expect("every code means a relation");
                assert_ne!(meant, fact.relation);
                assert_eq!(first(fact.subject, code), page_text(&world.fact(fact.subject, meant), &search));
            }
            let by_word = first(fact.subject, fact.relation.word()) == text;
            assert!(by_word || fact.relation.word() != fact.relation.page_word(), "{text}");
            n_found_by_word += usize::from(by_word);
        }
        let n_facts = N_ENTITIES * N_RELATIONS;
        assert!((n_facts / 2..n_facts * 6 / 10).contains(&n_found_by_word), "{n_found_by_word} of {n_facts}");
    }
}
