//! The toy research world: a closed set of invented facts, their pages, questions about them, and what a policy of three
//! capabilities has to learn to answer them.
//!
//! Facts say who stands in which [relation](facts::Relation) to whom. Each capability writes relations in a
//! [dialect](dialect::Dialects) of its own, and no two dialects agree: that is the conflict which separate adapters keep apart
//! and merged ones lose. The backbone learns the format and the copying from [documents](document::document) about other facts
//! in other dialects, so that it knows neither this world nor the three dialects.
//!
//! Every word of the world is one token *with the space before it*, wherever it stands, so that copying is copying of tokens:
//! queries and answers start with a space for that reason.

pub mod facts;
pub mod dialect;
mod pages;
mod compute;
pub mod tools;
pub mod question;
pub mod gold;
pub mod document;
pub mod general;
pub mod skill;
pub mod grade;
pub mod tasks;
pub mod graph;
pub mod tokenizer;
pub mod checkpoint;

use serde::{Deserialize, Serialize};
use weact_core::{Capability, stage::Stage};

use crate::{Error, Result};
use dialect::Dialects;
use facts::{N_ENTITIES, Value};

/// The system message of every trajectory and run.
pub const SYSTEM: &str = "research";

/// What makes a world: the same configuration always makes the same one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorldConfig {
    /// Decides facts, addresses, splits and which calls fail.
    pub seed: u64,
    /// How many entities live in it, 4 to 48.
    pub n_entities: usize,
    /// Share of entities about which only test questions ask.
    pub held_out_share: f64,
    /// Share of validation questions about the other entities.
    pub val_share: f64,
    /// Share of test questions about the other entities.
    pub test_share: f64,
    /// Share of relations on which the dialects differ. 0 is the negative control: merging is then nearly harmless.
    pub gamma: f64,
    /// Share of facts that stand on no page: questions about them have no answer.
    pub unknown_share: f64,
    /// Share of facts whose page says them only when it is visited; a search shows its first line.
    pub long_share: f64,
    /// Further pages, as a share of the facts: most repeat a fact with another value.
    pub noise: f64,
    /// Share of queries that time out the first time they are asked in a run.
    pub timeout_share: f64,
    /// Share of queries that find nothing the first time they are asked in a run.
    pub empty_share: f64,
    /// Share of facts with another value than the world of the same seed has at 0: a policy that knows those by heart is wrong here.
    pub shift: f64,
}

impl Default for WorldConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            n_entities: N_ENTITIES,
            held_out_share: 0.2,
            val_share: 0.1,
            test_share: 0.1,
            gamma: 1.0,
            unknown_share: 0.05,
            long_share: 0.15,
            noise: 0.2,
            timeout_share: 0.05,
            empty_share: 0.03,
            shift: 0.0,
        }
    }
}

impl WorldConfig {
    /// A world in which every call works and a search shows what it finds.
    #[must_use]
    pub fn smooth(self) -> Self {
        Self { long_share: 0.0, timeout_share: 0.0, empty_share: 0.0, ..self }
    }
}

/// The facts of one world, and the dialects in which its three capabilities write.
#[derive(Clone, Debug)]
pub struct World {
    config: WorldConfig,
    /// By subject and relation.
    values: Vec<[Option<Value>; facts::N_RELATIONS]>,
    /// Of which entities only test questions are asked, by entity.
    held_out: Vec<bool>,
    /// The place of each page among all, by slot.
    places: Vec<usize>,
    dialects: Dialects,
}

/// What its independent random draws are for: each has a stream of the generator to itself.
#[derive(Clone, Copy)]
enum Draw {
    Facts,
    HeldOut,
    Splits,
    QuestionOrder,
    PageOrder,
    Shift,
    Unknown,
    Long,
    Links,
    Noise,
}

impl World {
    /// The world that `config` makes.
    ///
    /// # Errors
    /// If a number of `config` is out of its range.
    pub fn new(config: &WorldConfig) -> Result<Self> {
        let WorldConfig { n_entities, held_out_share, val_share, test_share, gamma, .. } = *config;
        if !(4..=N_ENTITIES).contains(&n_entities) {
            return Err(Error::Other(format!("n_entities is {n_entities}: it must be 4 to {N_ENTITIES}")));
        }
        for (name, share) in [
            ("held_out_share", held_out_share),
            ("val_share", val_share),
            ("test_share", test_share),
            ("val_share + test_share", val_share + test_share),
            ("unknown_share", config.unknown_share),
            ("long_share", config.long_share),
            ("noise", config.noise),
            ("timeout_share + empty_share", config.timeout_share + config.empty_share),
            ("timeout_share", config.timeout_share),
            ("empty_share", config.empty_share),
            ("shift", config.shift),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(Error::Other(format!("{name} is {share}: a share is between 0 and 1")));
            }
        }
        let mut world = Self {
            config: config.clone(),
            values: Vec::new(),
            held_out: Vec::new(),
            places: Vec::new(),
            dialects: Dialects::conflicting(gamma)?,
        };
        world.values = facts::draw(n_entities, &mut world.rng(Draw::Facts));
        let rngs = [&mut world.rng(Draw::Shift), &mut world.rng(Draw::Unknown)];
        facts::edit(&mut world.values, config.shift, config.unknown_share, rngs);
        world.places = pages::draw_places(n_entities, &mut world.rng(Draw::PageOrder));
        world.held_out = question::draw_held_out(n_entities, held_out_share, &mut world.rng(Draw::HeldOut));
        world.check_addresses()?;
        Ok(world)
    }

    /// What made it.
    pub fn config(&self) -> &WorldConfig {
        &self.config
    }

    /// The dialects in which plans, queries and citations are written.
    pub fn dialects(&self) -> &Dialects {
        &self.dialects
    }

    fn rng(&self, draw: Draw) -> rand_chacha::ChaCha8Rng {
        stream(self.config.seed, draw as u64)
    }

    /// A generator for one of many like things: which of them are drawn, and in which order, does not matter.
    fn rng_of(&self, draw: Draw, index: usize) -> rand_chacha::ChaCha8Rng {
        stream(self.config.seed, ((draw as u64) << 32) | (1 + index as u64))
    }
}

/// The capabilities as the toy policy sees them, in the order of a run: texts of one token each.
pub fn stages() -> Vec<Stage> {
    [("plan", "outlines"), ("search", "gathers"), ("write", "answers")]
        .map(|(alias, description)| Stage {
            alias: Capability::new(alias).expect("the alias is a legal name"),
            description: description.to_owned(),
            activation: format!("{alias} on"),
        })
        .into()
}

/// Stream `index` of the generator of `seed`: streams of one seed don't overlap.
fn stream(seed: u64, index: u64) -> rand_chacha::ChaCha8Rng {
    let mut rng = <rand_chacha::ChaCha8Rng as rand::SeedableRng>::seed_from_u64(seed);
    rng.set_stream(index);
    rng
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_out_of_range_is_refused() {
        let default = WorldConfig::default();
        for (config, why) in [
            (WorldConfig { n_entities: 3, ..default.clone() }, "n_entities is 3"),
            (WorldConfig { n_entities: 49, ..default.clone() }, "n_entities is 49"),
            (WorldConfig { held_out_share: f64::NAN, ..default.clone() }, "held_out_share is NaN"),
            (WorldConfig { val_share: -0.1, ..default.clone() }, "val_share is -0.1"),
            (WorldConfig { val_share: 0.6, test_share: 0.6, ..default.clone() }, "val_share + test_share is 1.2"),
            (WorldConfig { gamma: 1.5, ..default.clone() }, "gamma is 1.5"),
            (WorldConfig { shift: -1.0, ..default.clone() }, "shift is -1"),
            (WorldConfig { timeout_share: 0.6, empty_share: 0.6, ..default.clone() }, "timeout_share + empty_share is 1.2"),
            (WorldConfig { noise: 0.9, ..default.clone() }, "noise is 0.9"),
        ] {
            let error = World::new(&config).expect_err("out of range").to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
