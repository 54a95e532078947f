//! The task-clustered bootstrap of a difference of rates: exact where that is cheap, by resampling otherwise.

use std::collections::BTreeMap;

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;

/// The most additions that the exact law may take.
const MAX_EXACT: usize = 20_000_000;
/// Resamples where the law is not computed.
const RESAMPLES: usize = 100_000;
/// Probabilities this close to a quantile's level count as having reached it.
const ROUNDING: f64 = 1e-12;

/// How a distribution was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Law {
    /// By convolution: no randomness.
    Exact,
    /// By so many resamples.
    Sampled(usize),
}

/// The bootstrap distribution of a difference of rates: resampled whole clusters, summed differences over summed pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct Bootstrap {
    /// Values in ascending order, with their probabilities.
    atoms: Vec<(f64, f64)>,
    /// How it was found.
    pub law: Law,
}

/// The distribution for `clusters` of (sum of differences, number of pairs): as many clusters are drawn with replacement as there
/// are. `seed` matters where the law is sampled.
///
/// # Panics
/// If there is no cluster, or one without pairs.
pub fn cluster_bootstrap(clusters: &[(i64, u64)], seed: u64) -> Bootstrap {
    assert!(!clusters.is_empty() && clusters.iter().all(|(_, n)| *n > 0), "every cluster has pairs");
    let mut kinds: BTreeMap<(i64, u64), usize> = BTreeMap::new();
    for cluster in clusters {
        *kinds.entry(*cluster).or_default() += 1;
    }
    match exact(&kinds, clusters.len()) {
        Some(atoms) => Bootstrap { atoms, law: Law::Exact },
        None => Bootstrap { atoms: sampled(clusters, seed), law: Law::Sampled(RESAMPLES) },
    }
}

impl Bootstrap {
    /// The smallest value whose cumulative probability reaches `level` (the inverted distribution function).
    pub fn quantile(&self, level: f64) -> f64 {
        let mut cumulative = 0.0;
        for (value, probability) in &self.atoms {
            cumulative += probability;
            if cumulative >= level - ROUNDING {
                return *value;
            }
        }
        self.atoms.last().expect("a distribution has values").0
    }

    /// The central interval that holds the share `level`: its two quantiles.
    pub fn interval(&self, level: f64) -> (f64, f64) {
        let tail = (1.0 - level) / 2.0;
        (self.quantile(tail), self.quantile(1.0 - tail))
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.atoms.iter().map(|(value, probability)| value * probability).sum()
    }
}

/// The law by convolution over the lattice of sums; `None` where that takes too long.
fn exact(kinds: &BTreeMap<(i64, u64), usize>, n_clusters: usize) -> Option<Vec<(f64, f64)>> {
    let mut law: BTreeMap<(i64, u64), f64> = BTreeMap::from([((0, 0), 1.0)]);
    let mut n_additions = 0;
    for _ in 0..n_clusters {
        n_additions += law.len() * kinds.len();
        if n_additions > MAX_EXACT {
            return None;
        }
        let mut next: BTreeMap<(i64, u64), f64> = BTreeMap::new();
        for (&(sum, n), probability) in &law {
            for (&(d, m), &count) in kinds {
                *next.entry((sum + d, n + m)).or_default() += probability * count as f64 / n_clusters as f64;
            }
        }
        law = next;
    }
    let ratio = |((sum, n), probability): ((i64, u64), f64)| (sum as f64 / n as f64, probability);
    Some(sorted(law.into_iter().map(ratio).collect()))
}

fn sampled(clusters: &[(i64, u64)], seed: u64) -> Vec<(f64, f64)> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut resample = || {
        let (mut sum, mut n) = (0, 0);
        for _ in clusters {
            let (d, m) = clusters[rng.random_range(0..clusters.len())];
            sum += d;
            n += m;
        }
        (sum as f64 / n as f64, 1.0 / RESAMPLES as f64)
    };
    sorted((0..RESAMPLES).map(|_| resample()).collect())
}

/// In ascending order, equal values joined.
fn sorted(mut atoms: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    atoms.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut joined: Vec<(f64, f64)> = Vec::new();
    for (value, probability) in atoms {
        match joined.last_mut() {
            Some(last) if last.0 == value => last.1 += probability,
            _ => joined.push((value, probability)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two clusters, +1 of 1 and 0 of 1: the resampled mean is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4.
    #[test]
    fn the_exact_law_is_the_one_worked_by_hand() {
        let law = cluster_bootstrap(&[(1, 1), (0, 1)], 0);
        assert_eq!(law.law, Law::Exact);
        assert_eq!(law.atoms, [(0.0, 0.25), (0.5, 0.5), (1.0, 0.25)]);
        assert_eq!((law.quantile(0.25), law.quantile(0.26), law.interval(0.9)), (0.0, 0.5, (0.0, 1.0)));
        assert_eq!(law.mean(), 0.5);
    }

    #[test]
    fn sampling_agrees_with_the_exact_law_and_repeats_with_its_seed() {
        let clusters: Vec<(i64, u64)> = (0..11).map(|i| (i % 4 - 1, 5)).collect();
        let exact = cluster_bootstrap(&clusters, 0);
        let monte_carlo = Bootstrap { atoms: sampled(&clusters, 7), law: Law::Sampled(RESAMPLES) };
        for level in [0.025, 0.05, 0.5, 0.95, 0.975] {
            assert!((exact.quantile(level) - monte_carlo.quantile(level)).abs() < 0.02, "{level}");
        }
        assert_eq!(sampled(&clusters, 7), monte_carlo.atoms);
        // Sizes that share no lattice: too many sums.
        let uneven: Vec<(i64, u64)> = (0..600).map(|i| (i * 7919 % 1013, 1000 + (i * 104_729 % 997) as u64)).collect();
        assert_eq!(cluster_bootstrap(&uneven, 0).law, Law::Sampled(RESAMPLES));
    }
}
