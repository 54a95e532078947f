//! Two methods on the same tasks and seeds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Z95,
    bootstrap::{Law, cluster_bootstrap},
    wilson,
};
use crate::{Error, Result};

/// One task's outcome under one method.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The task instance: pairs are made by it and the seed.
    pub id: String,
    /// The cluster: instances of one task are not independent.
    pub task: String,
    /// Its seed.
    pub seed: u64,
    /// Whether it succeeded.
    pub success: bool,
}

/// What the interval says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// B is better: the 95 % interval of the difference lies above zero.
    Better,
    /// B is worse: it lies below zero.
    Worse,
    /// It holds zero, or touches it; or all pairs are of one cluster, which tells nothing about the spread of others.
    NoCredibleDifference,
}

/// The comparison of B with A.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Paired {
    /// Pairs.
    pub n: usize,
    /// A's share of successes, in [0, 1].
    pub rate_a: f64,
    /// B's.
    pub rate_b: f64,
    /// Wilson's 95 % interval of A's share.
    pub wilson_a: (f64, f64),
    /// Of B's.
    pub wilson_b: (f64, f64),
    /// `rate_b - rate_a`, in [-1, 1].
    pub delta: f64,
    /// Pairs in which only A succeeds.
    pub b: u64,
    /// Pairs in which only B does.
    pub c: u64,
    /// McNemar's exact two-sided p, at most 1.
    pub mcnemar_p: f64,
    /// Clusters. With one alone the bootstrap has nothing to draw from: its intervals are `delta` itself and say nothing.
    pub n_clusters: usize,
    /// How the bootstrap's distribution was found.
    pub law: Law,
    /// The task-clustered bootstrap's 95 % interval of `delta`.
    pub bootstrap95: (f64, f64),
    /// The 90 % interval.
    pub bootstrap90: (f64, f64),
    /// What the 95 % interval says.
    pub verdict: Verdict,
    /// Two one-sided tests at 5 %: the 90 % interval lies within the margin on both sides. Not shown by one cluster.
    pub equivalent: bool,
}

/// McNemar's exact two-sided p-value for `b` and `c` discordant pairs: twice the smaller binomial tail, and never more than 1.
pub fn mcnemar(b: u64, c: u64) -> f64 {
    let n = b + c;
    if n == 0 {
        return 1.0;
    }
    // ln (C(n, i) / 2^n) grows term by term, so that large counts don't overflow.
    let mut ln_term = -(n as f64) * std::f64::consts::LN_2;
    let mut tail = ln_term.exp();
    for i in 1..=b.min(c) {
        ln_term += ((n - i + 1) as f64 / i as f64).ln();
        tail += ln_term.exp();
    }
    (2.0 * tail).min(1.0)
}

/// Compares B with A over the same ids and seeds. `margin` is the largest difference that counts as none, in [0, 1]; `seed` decides
/// resampling where the bootstrap is not exact.
///
/// # Errors
/// If there is no outcome, an id and seed stand twice in one list or in one list only, or a pair's tasks differ.
pub fn paired(a: &[Outcome], b: &[Outcome], margin: f64, seed: u64) -> Result<Paired> {
    let refuse = |why: String| Err(Error::Stats(why));
    let (first, second) = (by_id(a, "A")?, by_id(b, "B")?);
    if let Some((id, seed)) = first.keys().find(|key| !second.contains_key(*key)) {
        return refuse(format!("{id:?} with seed {seed} is in A and not in B: compare the same tasks"));
    }
    if let Some((id, seed)) = second.keys().find(|key| !first.contains_key(*key)) {
        return refuse(format!("{id:?} with seed {seed} is in B and not in A: compare the same tasks"));
    }
    if first.is_empty() {
        return refuse("there is nothing to compare".to_owned());
    }
    let mut clusters: BTreeMap<&str, (i64, u64)> = BTreeMap::new();
    let (mut n_a, mut n_b, mut only_a, mut only_b) = (0, 0, 0, 0);
    for (key, x) in &first {
        let y = second[key];
        if x.task != y.task {
            return refuse(format!("{:?} belongs to task {:?} in A and to {:?} in B", key.0, x.task, y.task));
        }
        let (s, t) = (u64::from(x.success), u64::from(y.success));
        n_a += s as usize;
        n_b += t as usize;
        only_a += u64::from(s > t);
        only_b += u64::from(t > s);
        let cluster = clusters.entry(&x.task).or_default();
        cluster.0 += t as i64 - s as i64;
        cluster.1 += 1;
    }
    let n = first.len();
    let n_clusters = clusters.len();
    let law = cluster_bootstrap(&clusters.into_values().collect::<Vec<_>>(), seed);
    let (bootstrap95, bootstrap90) = (law.interval(0.95), law.interval(0.9));
    let verdict = match bootstrap95 {
        _ if n_clusters < 2 => Verdict::NoCredibleDifference,
        (low, _) if low > 0.0 => Verdict::Better,
        (_, high) if high < 0.0 => Verdict::Worse,
        _ => Verdict::NoCredibleDifference,
    };
    let rounding = 1e-12;
    Ok(Paired {
        n,
        rate_a: n_a as f64 / n as f64,
        rate_b: n_b as f64 / n as f64,
        wilson_a: wilson(n_a, n, Z95).expect("there are pairs"),
        wilson_b: wilson(n_b, n, Z95).expect("there are pairs"),
        delta: (n_b as f64 - n_a as f64) / n as f64,
        b: only_a,
        c: only_b,
        mcnemar_p: mcnemar(only_a, only_b),
        n_clusters,
        law: law.law,
        bootstrap95,
        bootstrap90,
        verdict,
        equivalent: n_clusters > 1 && bootstrap90.0 >= -margin - rounding && bootstrap90.1 <= margin + rounding,
    })
}

fn by_id<'a>(outcomes: &'a [Outcome], list: &str) -> Result<BTreeMap<(&'a str, u64), &'a Outcome>> {
    let mut by_id = BTreeMap::new();
    for outcome in outcomes {
        if by_id.insert((outcome.id.as_str(), outcome.seed), outcome).is_some() {
            return Err(Error::Stats(format!("{:?} with seed {} stands twice in {list}", outcome.id, outcome.seed)));
        }
    }
    Ok(by_id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn outcomes(successes: &[u8]) -> Vec<Outcome> {
        let one = |(i, s): (usize, &u8)| Outcome { id: format!("i{i}"), task: format!("t{i}"), seed: 0, success: *s == 1 };
        successes.iter().enumerate().map(one).collect()
    }

    #[test]
    fn mcnemar_is_exact_and_never_above_one() {
        for (b, c, expected) in [
            (0, 0, 1.0),
            (3, 3, 1.0),
            (5, 0, 0.0625),
            (10, 2, 0.038_574_218_75),
            (2, 13, 0.007_385_253_906_25),
            (200, 260, 0.005_883_922_473_103_979),
        ] {
            assert!((mcnemar(b, c) - expected).abs() < 1e-12, "{b} {c}: {}", mcnemar(b, c));
            assert_eq!(mcnemar(b, c), mcnemar(c, b));
        }
        // The normal approximation with its correction for continuity, where it is good.
        for (b, c) in [(50_000, 50_300), (100_000, 101_000)] {
            let z = ((c - b) as f64 - 1.0) / ((b + c) as f64).sqrt();
            let normal = erfc_by_sum(z);
            assert!((mcnemar(b, c) - normal).abs() < 1e-4, "{b} {c}: {} {normal}", mcnemar(b, c));
        }
        assert_eq!(mcnemar(1_000_000, 1_000_000), 1.0);
    }

    /// The two-sided tail of the standard normal distribution above `z`, by the trapezoidal rule.
    fn erfc_by_sum(z: f64) -> f64 {
        let density = |x: f64| (-x * x / 2.0).exp() * (2.0 / std::f64::consts::PI).sqrt();
        let step = 1e-4;
        (0..100_000).map(|i| step * (density(z + step * f64::from(i)) + density(z + step * f64::from(i + 1))) / 2.0).sum()
    }

    proptest! {
        #[test]
        fn mcnemar_equals_the_integer_sum(b in 0_u64..60, c in 0_u64..60) {
            let n = b + c;
            let mut row = vec![1_u128];
            for _ in 0..n {
                let inner: Vec<u128> = row.windows(2).map(|pair| pair[0] + pair[1]).collect();
                row = [vec![1], inner, vec![1]].concat();
            }
            let tail: u128 = row[..=b.min(c) as usize].iter().sum();
            let expected = (2.0 * tail as f64 / 2_f64.powi(n as i32)).min(1.0);
            prop_assert!((mcnemar(b, c) - expected).abs() < 1e-12);
        }

        /// Swapping the lists mirrors the comparison, whatever the order of their lines.
        #[test]
        fn a_comparison_mirrors(successes in proptest::collection::vec((0_u8..2, 0_u8..2, 0_usize..4), 1..30)) {
            let of = |side: fn(&(u8, u8, usize)) -> u8| -> Vec<Outcome> {
                let mut outcomes = outcomes(&successes.iter().map(side).collect::<Vec<_>>());
                outcomes.iter_mut().zip(&successes).for_each(|(outcome, (_, _, task))| outcome.task = format!("t{task}"));
                outcomes
            };
            let (a, mut b) = (of(|s| s.0), of(|s| s.1));
            b.reverse();
            let (ab, ba) = (paired(&a, &b, 0.1, 0).expect("aligned"), paired(&b, &a, 0.1, 0).expect("aligned"));
            prop_assert_eq!((ab.b, ab.c, ab.mcnemar_p, ab.delta), (ba.c, ba.b, ba.mcnemar_p, -ba.delta));
            prop_assert_eq!((ab.rate_a, ab.wilson_a), (ba.rate_b, ba.wilson_b));
            prop_assert!(ab.bootstrap95.0 <= ab.bootstrap90.0 && ab.bootstrap90.1 <= ab.bootstrap95.1);
            prop_assert!(ab.verdict == Verdict::NoCredibleDifference || ab.verdict != ba.verdict);
        }
    }

    #[test]
    fn one_cluster_shows_nothing() {
        let mut a = outcomes(&[0, 0, 0, 0]);
        a.iter_mut().for_each(|outcome| outcome.task = "t".to_owned());
        let b: Vec<Outcome> = a.iter().map(|outcome| Outcome { success: true, ..outcome.clone() }).collect();
        let better = paired(&a, &b, 1.0, 0).expect("aligned");
        assert_eq!((better.n_clusters, better.verdict, better.equivalent), (1, Verdict::NoCredibleDifference, false));
        assert!(!paired(&a, &a, 1.0, 0).expect("aligned").equivalent);
    }

    /// 55 items, 40 against 32 right, ten only A, two only B.
    #[test]
    fn a_paired_test_sees_what_an_unpaired_one_misses() {
        let a: Vec<u8> = (0..55).map(|i| u8::from(i < 40)).collect();
        let b: Vec<u8> = (0..55).map(|i| u8::from((10..42).contains(&i))).collect();
        let result = paired(&outcomes(&a), &outcomes(&b), 0.05, 0).expect("aligned");
        assert_eq!((result.n, result.b, result.c), (55, 10, 2));
        assert!((result.mcnemar_p - 0.038_574_218_75).abs() < 1e-12);
        assert!((result.delta + 8.0 / 55.0).abs() < 1e-12);
        assert_eq!((result.verdict, result.equivalent), (Verdict::Worse, false));
    }

    #[test]
    fn lists_that_are_not_aligned_are_refused_by_name() {
        let a = outcomes(&[1, 0]);
        let mut other = outcomes(&[1, 0]);
        other[1].seed = 9;
        assert!(
            paired(&a, &other, 0.0, 0).expect_err("another seed").to_string().contains("\"i1\" with seed 0 is in A and not in B")
        );
        assert!(paired(&a, &outcomes(&[1, 0, 1]), 0.0, 0).expect_err("longer").to_string().contains("\"i2\""));
        assert!(
            paired(&[a.clone(), a.clone()].concat(), &a, 0.0, 0).expect_err("twice").to_string().contains("stands twice in A")
        );
        assert!(paired(&[], &[], 0.0, 0).expect_err("empty").to_string().contains("nothing to compare"));
        let mut moved = a.clone();
        moved[0].task = "other".to_owned();
        assert!(paired(&a, &moved, 0.0, 0).expect_err("another task").to_string().contains("belongs to task"));
    }
}
