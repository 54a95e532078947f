//! Entities, relations and the facts between them.

use std::fmt;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::World;

/// How many entities there are names for.
pub const N_ENTITIES: usize = 48;
/// How many relations there are; the last one's values are years.
pub const N_RELATIONS: usize = 13;
/// The years in which things begin.
pub const YEARS: std::ops::Range<u16> = 1720..1760;

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
    ("year", "year"),
];

/// One of the invented names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entity(u8);

/// One of the relations; every entity has at most one value for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Relation(u8);

/// What a relation gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// Who.
    Entity(Entity),
    /// When.
    Year(u16),
}

/// `value` is the `relation` of `subject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// Of whom.
    pub subject: Entity,
    /// What.
    pub relation: Relation,
    /// Who or when.
    pub value: Value,
}

impl Value {
    /// The entity, where it is one.
    pub fn entity(self) -> Option<Entity> {
        match self {
            Self::Entity(entity) => Some(entity),
            Self::Year(_) => None,
        }
    }

    /// The year, where it is one.
    pub fn year(self) -> Option<u16> {
        match self {
            Self::Entity(_) => None,
            Self::Year(year) => Some(year),
        }
    }
}

impl Entity {
    /// All that there are names for.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..N_ENTITIES as u8).map(Self)
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|entity| entity.name() == name)
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

    /// The one that questions call so.
    pub fn named(word: &str) -> Option<Self> {
        Self::all().find(|relation| relation.word() == word)
    }

    /// Its word in questions.
    pub fn word(self) -> &'static str {
        RELATIONS[self.index()].0
    }

    /// Its word on pages: the same for about half of the relations.
    pub fn page_word(self) -> &'static str {
        RELATIONS[self.index()].1
    }

    /// The relation whose values are years.
    pub fn year() -> Self {
        Self(N_RELATIONS as u8 - 1)
    }

    /// The relations between entities.
    pub fn between_entities() -> impl Iterator<Item = Self> {
        Self::all().filter(|&relation| relation != Self::year())
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entity(entity) => entity.fmt(f),
            Self::Year(year) => year.fmt(f),
        }
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

    /// The fact about `subject` and `relation`; `None` where nobody knows.
    ///
    /// # Panics
    /// If `subject` does not live here.
    pub fn fact(&self, subject: Entity, relation: Relation) -> Option<Fact> {
        let value = self.values[subject.index()][relation.index()]?;
        Some(Fact { subject, relation, value })
    }

    /// All facts, by subject and relation.
    pub fn facts(&self) -> impl Iterator<Item = Fact> {
        self.entities().flat_map(move |subject| Relation::all().filter_map(move |relation| self.fact(subject, relation)))
    }
}

/// For each of `n_entities`, the value of each relation: another entity or a year.
pub(super) fn draw(n_entities: usize, rng: &mut ChaCha8Rng) -> Vec<[Option<Value>; N_RELATIONS]> {
    (0..n_entities).map(|subject| std::array::from_fn(|relation| Some(draw_value(subject, relation, n_entities, rng)))).collect()
}

/// Another value for a `share` of the facts, and none for `unknown_share` of them.
pub(super) fn edit(values: &mut [[Option<Value>; N_RELATIONS]], share: f64, unknown_share: f64, rngs: [&mut ChaCha8Rng; 2]) {
    let n_entities = values.len();
    let [edits, unknown] = rngs;
    for (subject, row) in values.iter_mut().enumerate() {
        for (relation, value) in row.iter_mut().enumerate() {
            if edits.random_bool(share) {
                let before = *value;
                while *value == before {
                    *value = Some(draw_value(subject, relation, n_entities, edits));
                }
            }
            if unknown.random_bool(unknown_share) {
                *value = None;
            }
        }
    }
}

fn draw_value(subject: usize, relation: usize, n_entities: usize, rng: &mut ChaCha8Rng) -> Value {
    if relation == Relation::year().index() {
        return Value::Year(rng.random_range(YEARS));
    }
    let drawn = rng.random_range(0..n_entities - 1);
    Value::Entity(Entity(if drawn < subject { drawn } else { drawn + 1 } as u8))
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
        let world = World::new(&WorldConfig { seed: 1, n_entities: 7, unknown_share: 0.0, ..WorldConfig::default() });
        assert_eq!(world.expect("a world").facts().count(), 7 * N_RELATIONS);
        for fact in facts(1) {
            match fact.value {
                Value::Entity(entity) => assert!(entity != fact.subject && entity.index() < 7),
                Value::Year(year) => assert!(fact.relation == Relation::year() && YEARS.contains(&year)),
            }
        }
    }

    #[test]
    fn a_shift_changes_its_share_of_the_facts_and_no_other() {
        let world = |shift| World::new(&WorldConfig { shift, ..WorldConfig::default() }).expect("a world");
        let (before, after) = (world(0.0), world(0.25));
        let n_changed = before.facts().filter(|fact| after.fact(fact.subject, fact.relation) != Some(*fact)).count();
        let share = n_changed as f64 / before.facts().count() as f64;
        assert!((0.2..0.3).contains(&share), "{share}");
        let known = |world: &World| world.facts().map(|fact| (fact.subject, fact.relation)).collect::<Vec<_>>();
        assert_eq!(known(&before), known(&after));
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
