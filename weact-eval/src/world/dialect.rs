//! Dialects: how a capability writes relations.

use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::facts::{N_RELATIONS, Relation};
use crate::{Error, Result};

/// The codes that dialects write instead of words.
pub const CODES: [&str; N_RELATIONS] =
    ["k00", "k01", "k02", "k03", "k04", "k05", "k06", "k07", "k08", "k09", "k10", "k11", "k12"];

/// The code of each relation in plans. An arbitrary permutation, so that order tells nothing.
const PLAN: [u8; N_RELATIONS] = [7, 2, 10, 0, 5, 11, 3, 12, 8, 1, 6, 9, 4];

/// How one capability writes relations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// In the words of the questions.
    Words,
    /// In codes: a permutation, the code's index by relation.
    Codes([u8; N_RELATIONS]),
}

/// The dialects of the three capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialects {
    /// Of the steps in plans.
    pub plan: Dialect,
    /// Of queries, and so of the keys on pages.
    pub search: Dialect,
    /// Of citations in reports.
    pub write: Dialect,
}

impl Dialect {
    /// What `relation` is called.
    pub fn word(&self, relation: Relation) -> &'static str {
        match self {
            Self::Words => relation.word(),
            Self::Codes(codes) => CODES[usize::from(codes[relation.index()])],
        }
    }
}

impl Dialects {
    /// Three code maps that pairwise differ on the first `gamma` of the relations, on each of them, and agree on the rest: rows
    /// of a Latin square where `gamma` is 1.
    ///
    /// # Errors
    /// If `gamma` is not between 0 and 1, or is one or two relations: three maps need three codes to differ.
    pub fn conflicting(gamma: f64) -> Result<Self> {
        let n_conflicts = (gamma * N_RELATIONS as f64).round() as usize;
        if !(0.0..=1.0).contains(&gamma) || matches!(n_conflicts, 1 | 2) {
            return Err(Error::Other(format!("gamma is {gamma}: it must be 0, or from 3/{N_RELATIONS} to 1")));
        }
        let rotated = |by: usize| {
            let mut codes = PLAN;
            codes[..n_conflicts].rotate_left(by);
            Dialect::Codes(codes)
        };
        Ok(Self { plan: rotated(0), search: rotated(n_conflicts / 3), write: rotated(2 * n_conflicts / 3) })
    }

    /// Words instead of codes, in all three.
    pub fn neutral() -> Self {
        Self::all(&Dialect::Words)
    }

    /// One random code map for all three.
    pub fn random(rng: &mut ChaCha8Rng) -> Self {
        let mut codes = PLAN;
        codes.shuffle(rng);
        Self::all(&Dialect::Codes(codes))
    }

    fn all(dialect: &Dialect) -> Self {
        Self { plan: dialect.clone(), search: dialect.clone(), write: dialect.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// At every gamma: each map names every relation differently, and the three agree on all relations or on none.
    #[test]
    fn dialects_differ_on_exactly_the_share_gamma() {
        for n_conflicts in [0, 3, 4, 5, 6, 12, 13] {
            let gamma = f64::from(n_conflicts) / 13.0;
            let Dialects { plan, search, write } = Dialects::conflicting(gamma).expect("a legal gamma");
            for dialect in [&plan, &search, &write] {
                assert_eq!(Relation::all().map(|r| dialect.word(r)).collect::<BTreeSet<_>>().len(), N_RELATIONS);
            }
            let n_different = |a: &Dialect, b: &Dialect| Relation::all().filter(|&r| a.word(r) != b.word(r)).count();
            for (a, b) in [(&plan, &search), (&plan, &write), (&search, &write)] {
                assert_eq!(n_different(a, b), n_conflicts as usize, "gamma {gamma}");
            }
        }
        for gamma in [-0.1, 0.1, 1.1, f64::NAN] {
            assert!(Dialects::conflicting(gamma).is_err(), "{gamma} was accepted");
        }
    }
}
