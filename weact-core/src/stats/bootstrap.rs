//! The task-clustered bootstrap of a difference of rates: exact where that is cheap, by resampling otherwise. And that of a mean.

use std::collections::BTreeMap;

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;

/// The most additions that the exact law may take: some tenths of a second.
const MAX_ADDITIONS: f64 = 1e9;
/// The most sums that it may tell apart.
const MAX_SUMS: f64 = 4e6;
/// Resamples where the law is not computed.
const RESAMPLES: usize = 100_000;
/// Probabilities this close below a quantile's level count as having reached it: thousands of additions round.
const ROUNDING: f64 = 1e-9;

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

/// How often, and with which draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resampling {
    /// Resamples, at least 1.
    pub n: usize,
    /// Of the generator, ChaCha8.
    pub seed: u64,
}

/// The distribution of the mean of as many values as there are, drawn with replacement. `None` below two values: what one varies by
/// is unknown.
///
/// # Panics
/// If there are no resamples.
pub fn mean_bootstrap(values: &[f64], resampling: Resampling) -> Option<Bootstrap> {
    assert!(resampling.n > 0, "there are resamples");
    let mut rng = ChaCha8Rng::seed_from_u64(resampling.seed);
    let mut mean = || (0..values.len()).map(|_| values[rng.random_range(0..values.len())]).sum::<f64>() / values.len() as f64;
    let law = Law::Sampled(resampling.n);
    let atoms = || sorted((0..resampling.n).map(|_| (mean(), 1.0 / resampling.n as f64)).collect());
    (values.len() > 1).then(atoms).map(|atoms| Bootstrap { atoms, law })
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

/// The values that one cluster's sum or size takes: `low + i step` with `i` up to `reach`.
struct Lattice {
    low: i64,
    step: i64,
    reach: usize,
}

impl Lattice {
    fn of(values: impl Iterator<Item = i64> + Clone) -> Self {
        let low = values.clone().min().expect("there is a cluster");
        let step = values.clone().fold(0, |step, value| gcd(step, value - low)).max(1);
        let reach = values.max().map_or(0, |high| ((high - low) / step) as usize);
        Self { low, step, reach }
    }

    fn index(&self, value: i64) -> usize {
        ((value - self.low) / self.step) as usize
    }

    /// The `i`-th sum of `n` values.
    fn sum(&self, n: usize, i: usize) -> f64 {
        self.low as f64 * n as f64 + self.step as f64 * i as f64
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The law by convolution over the lattice of sums and sizes, one drawn cluster after the other; `None` where that takes too long.
fn exact(kinds: &BTreeMap<(i64, u64), usize>, n_clusters: usize) -> Option<Vec<(f64, f64)>> {
    let sums = Lattice::of(kinds.keys().map(|(sum, _)| *sum));
    let sizes = Lattice::of(kinds.keys().map(|(_, n)| *n as i64));
    let n_sums = (n_clusters as f64 * sums.reach as f64 + 1.0) * (n_clusters as f64 * sizes.reach as f64 + 1.0);
    if n_sums > MAX_SUMS || n_sums * n_clusters as f64 * kinds.len() as f64 > MAX_ADDITIONS {
        return None;
    }
    let (rows, columns) = (n_clusters * sizes.reach + 1, n_clusters * sums.reach + 1);
    let mut law = vec![0.0; rows * columns];
    law[0] = 1.0;
    for n_drawn in 0..n_clusters {
        let (height, width) = (n_drawn * sizes.reach + 1, n_drawn * sums.reach + 1);
        let mut next = vec![0.0; rows * columns];
        for (&(sum, n), &count) in kinds {
            let (down, right) = (sizes.index(n as i64), sums.index(sum));
            let share = count as f64 / n_clusters as f64;
            for row in 0..height {
                let from = &law[row * columns..][..width];
                let to = &mut next[(row + down) * columns + right..][..width];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += share * from);
            }
        }
        law = next;
    }
    let ratio = |i: usize| sums.sum(n_clusters, i % columns) / sizes.sum(n_clusters, i / columns);
    let possible = law.iter().enumerate().filter(|(_, probability)| **probability > 0.0);
    Some(sorted(possible.map(|(i, probability)| (ratio(i), *probability)).collect()))
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

    /// Every way to draw, for clusters of one size and of several, on lattices with and without gaps.
    #[test]
    fn the_exact_law_is_that_of_all_ways_to_draw() {
        for clusters in [
            vec![(3, 3)],
            vec![(-2, 5), (4, 5), (1, 5)],
            vec![(0, 2), (6, 4), (-4, 6), (2, 2)],
            vec![(1, 3), (1, 3), (-1, 1), (0, 4), (2, 2)],
        ] {
            let n = clusters.len();
            let draw = |mut way: usize| {
                let (mut sum, mut size) = (0, 0);
                for _ in 0..n {
                    let (d, m) = clusters[way % n];
                    (sum, size, way) = (sum + d, size + m, way / n);
                }
                (sum as f64 / size as f64, 1.0 / n.pow(n as u32) as f64)
            };
            let expected = sorted((0..n.pow(n as u32)).map(draw).collect());
            let law = cluster_bootstrap(&clusters, 0);
            assert_eq!((law.law, law.atoms.len()), (Law::Exact, expected.len()), "{clusters:?}");
            for (own, expected) in law.atoms.iter().zip(&expected) {
                assert!(
                    own.0 == expected.0 && (own.1 - expected.1).abs() < 1e-12,
                    "{clusters:?}: {own:?}, expected {expected:?}"
                );
            }
        }
    }

    /// Values 0 and 1: the resampled mean is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4. Equal values have an interval of no width.
    #[test]
    fn the_mean_of_resamples_has_the_law_of_all_ways_to_draw() {
        let resampling = Resampling { n: 40_000, seed: 3 };
        let law = mean_bootstrap(&[0.0, 1.0], resampling).expect("two values");
        let expected = [(0.0, 0.25), (0.5, 0.5), (1.0, 0.25)];
        assert_eq!(law.atoms.len(), 3);
        for (own, expected) in law.atoms.iter().zip(expected) {
            assert!(own.0 == expected.0 && (own.1 - expected.1).abs() < 0.01, "{own:?}, expected {expected:?}");
        }
        assert_eq!(mean_bootstrap(&[0.0, 1.0], resampling), Some(law));
        assert_eq!(mean_bootstrap(&[2.5; 4], resampling).expect("four values").interval(0.95), (2.5, 2.5));
        assert_eq!([mean_bootstrap(&[], resampling), mean_bootstrap(&[1.0], resampling)], [None, None]);
    }

    /// As many single tasks as Table 1 has.
    #[test]
    fn thousands_of_equal_clusters_have_an_exact_law() {
        let clusters: Vec<(i64, u64)> = (0..5449).map(|i| (i % 10 / 8 - i % 7 / 6, 1)).collect();
        let law = cluster_bootstrap(&clusters, 0);
        let n = clusters.len() as f64;
        let mean = clusters.iter().map(|(d, _)| *d as f64).sum::<f64>() / n;
        let variance = clusters.iter().map(|(d, _)| (*d as f64 - mean).powi(2)).sum::<f64>() / n;
        let (low, high) = law.interval(0.95);
        assert_eq!(law.law, Law::Exact);
        assert!((law.mean() - mean).abs() < 1e-10);
        let half = 1.96 * (variance / n).sqrt();
        assert!((low - (mean - half)).abs() < 2.0 / n && (high - (mean + half)).abs() < 2.0 / n, "{low} {high}");
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
