//! From logits to a token: greedy, or drawn from a tempered and cut-off softmax with a seeded generator.

use std::cmp::Ordering;

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token and draws nothing.
    pub temperature: f64,
    /// Only this many most likely tokens can be drawn.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens whose probability, after `top_k`, reaches this can be drawn.
    pub top_p: Option<f64>,
    /// Of the generator.
    pub seed: u64,
}

impl Sampling {
    /// Checks the ranges.
    ///
    /// # Errors
    /// If the temperature is negative or not finite, `top_k` is 0, or `top_p` is outside (0, 1].
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::Other(format!("sampling: {why}")));
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return wrong(format!("temperature is {}, it must be at least 0 (0 is greedy)", self.temperature));
        }
        if self.top_k == Some(0) {
            return wrong("top_k is 0, it must be at least 1; leave it out to keep all tokens".to_owned());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => wrong(format!("top_p is {p}, it must be above 0 and at most 1")),
            _ => Ok(()),
        }
    }
}

/// Chooses tokens. A [`Sampler`] draws them; a replay takes those of a record.
pub trait Choose {
    /// The next token, given its logits `[vocab]`.
    ///
    /// # Errors
    /// If none can be chosen.
    fn next(&mut self, logits: &[f32]) -> Result<u32>;
}

impl Choose for Sampler {
    fn next(&mut self, logits: &[f32]) -> Result<u32> {
        Sampler::next(self, logits)
    }
}

/// Draws tokens. Its whole state is the seed and the number of draws so far.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    draws: u64,
}

impl Sampler {
    /// A sampler that has drawn nothing yet.
    ///
    /// # Errors
    /// As [`Sampling::check`].
    pub fn new(sampling: Sampling) -> Result<Self> {
        Self::after(sampling, 0)
    }

    /// The sampler that `draws` draws make of a new one: where an interrupted run goes on.
    ///
    /// # Errors
    /// As [`Sampling::check`].
    pub fn after(sampling: Sampling, draws: u64) -> Result<Self> {
        sampling.check()?;
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        rng.set_word_pos(2 * u128::from(draws)); // a draw takes 64 bits, two words
        Ok(Self { sampling, rng, draws })
    }

    /// Draws so far; greedy choices draw nothing.
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// The next token. Greedy takes the lowest id among the maxima. Otherwise the order of work is transformers': temperature,
    /// `top_k`, `top_p`, with tokens of equal probability in the order of their ids. Probabilities are computed in f64.
    ///
    /// # Shapes
    /// - `logits`: `[vocab]`; negative infinity bars a token
    ///
    /// # Errors
    /// If a logit is NaN or positive infinity, or all are negative infinity: then no token is chosen and nothing is drawn.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        let (best, max) = maximum(logits)?;
        if self.sampling.temperature == 0.0 {
            return Ok(best);
        }
        let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) / self.sampling.temperature).exp();
        let weighted = (0..).zip(logits).map(|(id, logit)| (id, weight(*logit)));
        let candidates = cut(weighted.filter(|(_, w)| *w > 0.0).collect(), self.sampling.top_k, self.sampling.top_p);

        self.draws += 1;
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64; // in [0, 1)
        let mut left = uniform * candidates.iter().map(|(_, w)| w).sum::<f64>();
        for (id, w) in &candidates {
            left -= w;
            if left < 0.0 {
                return Ok(*id);
            }
        }
        // Rounding can leave a rest at the very end.
        Ok(candidates.last().expect("the maximum has the weight 1").0)
    }
}

/// The lowest id of the largest logit, and that logit.
fn maximum(logits: &[f32]) -> Result<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if logit.is_nan() || *logit == f32::INFINITY {
            return Err(not_finite(format!(", token {id}")));
        }
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    if best.1 == f32::NEG_INFINITY { Err(not_finite(", every token".to_owned())) } else { Ok(best) }
}

fn not_finite(place: String) -> Error {
    weact_core::Error::NonFinite { what: "logits", place, dtype: "f32".to_owned() }.into()
}

/// The tokens that can be drawn with their weights: all in the order of ids, or the most likely ones, the likeliest first.
fn cut(mut candidates: Vec<(u32, f64)>, top_k: Option<usize>, top_p: Option<f64>) -> Vec<(u32, f64)> {
    if top_k.is_none() && top_p.is_none() {
        return candidates;
    }
    let likelier = |a: &(u32, f64), b: &(u32, f64)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    if let Some(k) = top_k.filter(|k| *k < candidates.len()) {
        candidates.select_nth_unstable_by(k, likelier);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(likelier);
    if let Some(p) = top_p {
        let enough = p * candidates.iter().map(|(_, w)| w).sum::<f64>();
        let mut reached = 0.0;
        let before = candidates.iter().take_while(|(_, w)| {
            let short = reached < enough;
            reached += w;
            short
        });
        let n = before.count();
        candidates.truncate(n);
    }
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampler {
        Sampler::new(Sampling { temperature, top_k, top_p, seed: 7 }).expect("legal settings")
    }

    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_the_maxima_and_draws_nothing() {
        let mut greedy = Sampler::new(Sampling::default()).expect("legal settings");
        for (logits, expected) in [(vec![0.0, 3.0, 3.0], 1), (vec![-5.0], 0), (vec![f32::NEG_INFINITY, -1e30, -2e30], 1)] {
            assert_eq!(greedy.next(&logits).expect("finite"), expected, "{logits:?}");
        }
        assert_eq!(greedy.draws(), 0);
    }

    #[test]
    fn logits_that_are_not_finite_give_an_error_and_no_token() {
        let none = f32::NEG_INFINITY;
        for bad in [vec![0.0, f32::NAN], vec![f32::INFINITY, 0.0], vec![none, none], vec![]] {
            for temperature in [0.0, 1.0] {
                let mut sampler = sampler(temperature, None, None);
                let error = sampler.next(&bad).expect_err("not finite");
                assert!(matches!(error, Error::Core(weact_core::Error::NonFinite { .. })), "{bad:?}: {error}");
                assert_eq!(sampler.draws(), 0);
            }
        }
    }

    /// Of twenty parts, ids in the order of probability: 2 (eight), then 1 and 3 (four each, by id), 4 (three), 0 (one).
    #[test]
    fn the_cuts_keep_the_smallest_set_that_reaches_p() {
        let weights: Vec<(u32, f64)> = (0..).zip([1.0, 4.0, 8.0, 4.0, 3.0]).collect();
        let table: [(Option<usize>, Option<f64>, &[u32]); 8] = [
            (None, None, &[0, 1, 2, 3, 4]),
            (Some(1), None, &[2]),
            (Some(2), None, &[2, 1]),
            (Some(9), None, &[2, 1, 3, 4, 0]),
            (None, Some(0.4), &[2]),
            (None, Some(0.41), &[2, 1]),
            (None, Some(1.0), &[2, 1, 3, 4, 0]),
            (Some(2), Some(0.6), &[2]), // of 2 and 1 alone, 2 has two thirds
        ];
        for (top_k, top_p, expected) in table {
            let kept: Vec<u32> = cut(weights.clone(), top_k, top_p).iter().map(|(id, _)| *id).collect();
            assert_eq!(kept, expected, "top_k {top_k:?}, top_p {top_p:?}");
        }
    }

    #[test]
    fn a_seed_and_a_number_of_draws_fix_the_tokens() {
        let logits = logits(&[0.1, 0.2, 0.3, 0.4]);
        let mut whole = sampler(1.0, None, None);
        let tokens: Vec<u32> = (0..16).map(|_| whole.next(&logits).expect("finite")).collect();
        assert_eq!(tokens, [1, 1, 3, 3, 3, 2, 0, 3, 2, 3, 1, 2, 2, 1, 2, 2]);
        let mut resumed = Sampler::after(whole.sampling, 10).expect("legal settings");
        let rest: Vec<u32> = (0..6).map(|_| resumed.next(&logits).expect("finite")).collect();
        assert_eq!(rest, tokens[10..]);
        assert_eq!((resumed.draws(), whole.draws()), (16, 16));
    }

    /// 20,000 draws: the standard error of a frequency is at most 0.0035, the margin is 0.02.
    #[test]
    fn frequencies_follow_the_probabilities() {
        let table = [
            (1.0, None, None, [0.1, 0.2, 0.3, 0.4]),
            (0.5, None, None, [1.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0, 16.0 / 30.0]), // squared, then to sum 1
            (1.0, Some(2), None, [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]),
            (1.0, None, Some(0.8), [0.0, 2.0 / 9.0, 3.0 / 9.0, 4.0 / 9.0]),
        ];
        for (temperature, top_k, top_p, expected) in table {
            let (mut sampler, logits) = (sampler(temperature, top_k, top_p), logits(&[0.1, 0.2, 0.3, 0.4]));
            let mut counts = [0.0_f64; 4];
            for _ in 0..20_000 {
                counts[sampler.next(&logits).expect("finite") as usize] += 1.0 / 20_000.0;
            }
            for (got, wanted) in counts.iter().zip(expected) {
                let margin = if wanted == 0.0 { 0.0 } else { 0.02 };
                assert!((got - wanted).abs() <= margin, "{counts:?} instead of {expected:?}");
            }
        }
    }

    #[test]
    fn settings_outside_their_range_or_misspelt_are_refused() {
        let default = Sampling::default();
        for bad in [
            Sampling { temperature: -0.1, ..default },
            Sampling { temperature: f64::NAN, ..default },
            Sampling { temperature: f64::INFINITY, ..default },
            Sampling { top_k: Some(0), ..default },
            Sampling { top_p: Some(0.0), ..default },
            Sampling { top_p: Some(1.01), ..default },
            Sampling { top_p: Some(f64::NAN), ..default },
        ] {
            assert!(Sampler::new(bad).is_err(), "{bad:?} was accepted");
        }
        assert!(serde_json::from_str::<Sampling>(r#"{"temprature": 1.0}"#).is_err());
        assert_eq!(serde_json::from_str::<Sampling>("{}").expect("defaults"), default);
    }
}
