//! Entities, relations and the facts between them.

use std::fmt;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::World;

/// How many entities there are names for.
pub const N_ENTITIES: usize = 48;
/// How many relations there are.
pub const N_RELATIONS: usize = 12;

const NAMES: [&str; N_ENTITIES] = [
    "Orun", "Mira", "Sorn", "Brel", "Tavi", "Kesh", "Dalo", "Venn", "Ilka", "Thun", "Garo", "Pelm", "Ruska", "Zeth", "Noma",
    "Fyrn", "Ulba", "Crin", "Joda", "Wesk", "Hadu", "Lirn", "Quor", "Emba", "Azuk", "Bynt", "Selo", "Trov", "Ghil", "Mokk",
    "Perra", "Dwin", "Osta", "Kluf", "Vezi", "Jarn", "Tello", "Nyth", "Farg", "Rilo", "Shum", "Calb", "Uvek", "Plon", "Yeda",
    "Wurn", "Ithi", "Drux",
];

/// The word in questions, and the word on pages. Where they differ, the plain word finds nothing.
const RELATIONS: [(&str, &str); N_RELATIONS] = [
    ("captain", "captain"),
    ("port", "harbour"),
    ("mentor", "mentor"),
    ("ally", "friend"),
    ("river", "river"),
    ("heir", "successor"),
    ("seat", "seat"),
    ("rival", "foe"),
    ("patron", "patron"),
    ("guild", "order"),
    ("mayor", "mayor"),
    ("craft", "trade"),
];

/// One of the invented names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entity(u8);

/// One of the relations; every entity has one value for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Relation(u8);

/// `value` is the `relation` of `subject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// Of whom.
    pub subject: Entity,
    /// What.
    pub relation: Relation,
    /// Who.
    pub value: Entity,
}

impl Entity {
    /// All that there are names for.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..N_ENTITIES as u8).map(Self)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        NAMES[self.index()]
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Relation {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..N_RELATIONS as u8).map(Self)
    }

    /// Its word in questions.
    pub fn word(self) -> &'static str {
        RELATIONS[self.index()].0
    }

    /// Its word on pages: the same for every other relation.
    pub fn page_word(self) -> &'static str {
        RELATIONS[self.index()].1
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl World {
    /// The entities that live here.
    pub fn entities(&self) -> impl Iterator<Item = Entity> {
        Entity::all().take(self.values.len())
    }

    /// The fact about `subject` and `relation`.
    ///
    /// # Panics
    /// If `subject` does not live here.
    pub fn fact(&self, subject: Entity, relation: Relation) -> Fact {
        Fact { subject, relation, value: self.values[subject.index()][relation.index()] }
    }

    /// All facts, by subject and relation.
    pub fn facts(&self) -> impl Iterator<Item = Fact> {
        self.entities().flat_map(move |subject| Relation::all().map(move |relation| self.fact(subject, relation)))
    }
}

/// For each of `n_entities`, another of them as the value of each relation.
pub(super) fn draw(n_entities: usize, rng: &mut ChaCha8Rng) -> Vec<[Entity; N_RELATIONS]> {
    let other = |subject: u8, drawn: u8| Entity(if drawn < subject { drawn } else { drawn + 1 });
    (0..n_entities as u8)
        .map(|subject| std::array::from_fn(|_| other(subject, rng.random_range(0..n_entities as u8 - 1))))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::world::WorldConfig;

    #[test]
    fn a_world_is_made_by_its_configuration_alone() {
        let facts = |seed| {
            let world = World::new(&WorldConfig { seed, n_entities: 7, ..WorldConfig::default() }).expect("a world");
            world.facts().collect::<Vec<_>>()
        };
        assert_eq!(facts(1), facts(1));
        assert_ne!(facts(1), facts(2));
        assert_eq!(facts(1).len(), 7 * N_RELATIONS);
        assert!(facts(1).iter().all(|fact| fact.subject != fact.value && fact.value.index() < 7));
    }

    #[test]
    fn no_word_has_two_meanings() {
        let names = Entity::all().map(|entity| entity.name().to_lowercase());
        let words = Relation::all().map(|relation| relation.word().to_owned());
        let other_words = Relation::all().filter(|r| r.word() != r.page_word()).map(|r| r.page_word().to_owned());
        let all: Vec<String> = names.chain(words).chain(other_words).collect();
        assert_eq!(all.len(), N_ENTITIES + N_RELATIONS + N_RELATIONS / 2);
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }
}
