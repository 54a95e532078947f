//! LoRAHub's search (<https://arxiv.org/abs/2307.13269>): the weights of a weighted sum, found on samples without gradients.
//!
//! The objective is the authors': the loss plus 0.05 times the mean of the weights' magnitudes, over `[-1.5, 1.5]^N` from 0. They sum
//! `A`s and `B`s apart with the same weights, so that the update is quadratic in them; here the updates are summed. Their optimiser is
//! nevergrad's choice; here it is an evolution strategy, (1+1) with the rule of one success in five.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use weact_core::Adapter;

use super::{Method, Preset, Rank, Recipe, Source, merge};
use crate::Result;

/// How the search runs.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Evaluations of the objective, the one of zero weights included.
    pub evaluations: usize,
    /// Seed of the steps.
    pub seed: u64,
}

impl Default for Search {
    /// The authors' 40 evaluations and seed.
    fn default() -> Self {
        Self { evaluations: 40, seed: 42 }
    }
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// One weight a source, in the order given.
    pub weights: Vec<f64>,
    /// The objective there.
    pub objective: f64,
    /// The objective of zero weights: the base alone.
    pub base: f64,
    /// Evaluations made.
    pub evaluations: usize,
}

const BOUND: f64 = 1.5;
const PENALTY: f64 = 0.05;

/// Searches the weights of `sources`. `loss` gives the loss of an adapter on the samples, in nats per token; `None` is the base alone.
///
/// # Errors
/// As [`merge`], or what `loss` gives.
pub fn search(sources: &[Source<'_>], search: Search, loss: &mut dyn FnMut(Option<&Adapter>) -> Result<f64>) -> Result<Found> {
    let n = sources.len();
    let mut objective = |weights: &[f64]| -> Result<f64> {
        let penalty = PENALTY * weights.iter().map(|w| w.abs()).sum::<f64>() / n as f64;
        if weights.iter().all(|w| *w == 0.0) {
            return Ok(loss(None)? + penalty);
        }
        let recipe = Recipe { weights: weights.to_vec(), rank: Rank::Exact, ..Method::Lorahub.recipe(Preset::Peft) };
        Ok(loss(Some(&merge(sources, &recipe)?.0))? + penalty)
    };
    let mut rng = ChaCha8Rng::seed_from_u64(search.seed);
    let base = objective(&vec![0.0; n])?;
    let (mut weights, mut best, mut step) = (vec![0.0; n], base, 0.5);
    for _ in 1..search.evaluations {
        let candidate: Vec<f64> = weights.iter().map(|w| (w + step * normal(&mut rng)).clamp(-BOUND, BOUND)).collect();
        let found = objective(&candidate)?;
        // The step grows by a success as much as four failures let it shrink.
        if found < best {
            (weights, best) = (candidate, found);
            step *= 1.5;
        } else {
            step *= 1.5_f64.powf(-0.25);
        }
    }
    Ok(Found { weights, objective: best, base, evaluations: search.evaluations.max(1) })
}

/// A standard normal draw (Box and Muller).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}
