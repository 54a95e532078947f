//! The percentile bootstrap of any statistic: units are drawn again with replacement, the statistic is computed on each draw.

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;

/// Draws.
const RESAMPLES: usize = 10_000;
/// The share of the draws that an interval holds.
const LEVEL: f64 = 0.95;
/// The largest share of draws in which the statistic may be unknown.
const MAX_UNKNOWN: f64 = 0.01;

/// A number and what resampling says about it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// On the units as they are.
    pub value: f64,
    /// The central 95 % of its values on resampled units. Unknown where a group has fewer than two units, or where more than one draw
    /// in a hundred leaves the statistic unknown.
    pub interval: Option<(f64, f64)>,
}

/// A statistic of groups of units, where `groups` says how many units each has. `statistic` gets, for each group, how often each of its
/// units counts: once on the units as they are; in a draw as often as it was drawn, as many draws as the group has units. `None` where
/// the statistic is unknown on the units as they are.
///
/// ```
/// use weact_core::stats::estimate;
/// let heights = [1.0, 2.0, 3.0, 6.0];
/// let mean = |counts: &[Vec<u32>]| {
///     let sum: f64 = counts[0].iter().zip(&heights).map(|(n, x)| f64::from(*n) * x).sum();
///     Some(sum / heights.len() as f64)
/// };
/// let estimate = estimate(&[4], 0, &mean).expect("known");
/// assert_eq!(estimate.value, 3.0);
/// let (low, high) = estimate.interval.expect("four units");
/// assert!(1.0 < low && low < 3.0 && 3.0 < high && high < 6.0);
/// ```
pub fn estimate(groups: &[usize], seed: u64, statistic: &dyn Fn(&[Vec<u32>]) -> Option<f64>) -> Option<Estimate> {
    let mut counts: Vec<Vec<u32>> = groups.iter().map(|n| vec![1; *n]).collect();
    let value = statistic(&counts)?;
    if groups.iter().any(|n| *n < 2) {
        return Some(Estimate { value, interval: None });
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut values = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        for group in &mut counts {
            group.fill(0);
            let n = group.len();
            for _ in 0..n {
                group[rng.random_range(0..n)] += 1;
            }
        }
        values.extend(statistic(&counts));
    }
    let is_known = (RESAMPLES - values.len()) as f64 <= MAX_UNKNOWN * RESAMPLES as f64;
    values.sort_by(f64::total_cmp);
    // The inverted distribution function.
    let quantile = |level: f64| values[((level * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1];
    let tail = (1.0 - LEVEL) / 2.0;
    Some(Estimate { value, interval: is_known.then(|| (quantile(tail), quantile(1.0 - tail))) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::cluster_bootstrap;

    /// The two implementations share no code.
    #[test]
    fn the_interval_of_a_rate_is_that_of_the_exact_law() {
        let clusters: Vec<(i64, u64)> = (0..40).map(|i| (i * i % 7 - 2, 3 + i as u64 % 2)).collect();
        let rate = |counts: &[Vec<u32>]| {
            let drawn = counts[0].iter().zip(&clusters).map(|(n, c)| (f64::from(*n) * c.0 as f64, f64::from(*n) * c.1 as f64));
            let (sum, n) = drawn.fold((0.0, 0.0), |all, one| (all.0 + one.0, all.1 + one.1));
            Some(sum / n)
        };
        let (low, high) = estimate(&[40], 7, &rate).and_then(|e| e.interval).expect("known");
        let (exact_low, exact_high) = cluster_bootstrap(&clusters, 0).interval(0.95);
        // Ten thousand draws: the standard error of a 2.5 % point is about a fiftieth of the interval.
        let tolerance = (exact_high - exact_low) / 20.0;
        assert!(
            (low - exact_low).abs() < tolerance && (high - exact_high).abs() < tolerance,
            "{low} {high}, {exact_low} {exact_high}"
        );
    }

    #[test]
    fn what_is_unknown_is_none() {
        assert_eq!(estimate(&[3], 0, &|_| None), None);
        assert_eq!(estimate(&[1], 0, &|_| Some(2.0)), Some(Estimate { value: 2.0, interval: None }));
        assert_eq!(estimate(&[3, 0], 0, &|_| Some(2.0)), Some(Estimate { value: 2.0, interval: None }));
        // Unknown where the first unit was not drawn: three draws in ten.
        let often_unknown = |counts: &[Vec<u32>]| (counts[0][0] > 0).then_some(1.0);
        assert_eq!(estimate(&[3], 0, &often_unknown), Some(Estimate { value: 1.0, interval: None }));
    }
}
