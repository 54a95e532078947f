//! Trimming by magnitude: which entries of a tensor are among the largest, exactly, the same on every machine.

use super::recipe::{Scope, Trim};

/// Magnitudes as integers: for finite numbers the order is that of the absolute values.
#[inline(always)]
pub(super) fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// What stays: every entry above the threshold, and of those at it the ones before an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub(super) bits: u32,     // magnitudes above it stay
    pub(super) before: usize, // those at it stay before this row-major index
}

impl Cut {
    /// Everything stays.
    pub const ALL: Self = Self { bits: 0, before: usize::MAX };
    /// Nothing stays.
    pub const NONE: Self = Self { bits: u32::MAX, before: 0 };

    /// Whether the entry with this value and row-major index stays.
    #[inline(always)]
    pub fn keeps(self, value: f32, index: usize) -> bool {
        let m = magnitude(value);
        m > self.bits || (m == self.bits && index < self.before)
    }

    /// Everything that is not smaller than a magnitude.
    fn at_least(bits: u32) -> Self {
        Self { bits, before: usize::MAX }
    }
}

/// The cut that leaves the largest entries of a tensor, by a rule of [`Scope`] within a module, and its margin: how far the smallest
/// that stays is above the largest that goes, relative to the first. `None` where nothing goes or nothing stays.
///
/// As in Python, `density n` is a product of f64: 0.29 of 100 are 28.
pub fn of_module(values: &[f32], density: f64, at_least: bool) -> (Cut, Option<f64>) {
    let k = (density * values.len() as f64).floor() as usize + usize::from(at_least);
    if density >= 1.0 || k >= values.len() {
        return (Cut::ALL, None);
    }
    if k == 0 {
        return (Cut::NONE, None);
    }
    let mut histogram = Histogram::default();
    histogram.add(values);
    let mut digits = histogram.descend(k as u64);
    digits.add(values);
    let (bits, rest) = digits.finish();
    // Compiled for the processor at hand.
    let (at_threshold, mut below) = pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            let (mut all_at_threshold, mut below) = (0, 0);
            for values in values.chunks(1 << 16) {
                let mut at_threshold = 0_u32;
                for m in values.iter().map(|x| magnitude(*x)) {
                    at_threshold += u32::from(m == bits);
                    below = below.max(if m < bits { m } else { 0 });
                }
                all_at_threshold += u64::from(at_threshold);
            }
            (all_at_threshold, below)
        },
    );
    let mut before = usize::MAX;
    if !at_threshold_stays(at_threshold, rest, at_least) {
        let equal = values.iter().enumerate().filter(|(_, x)| magnitude(**x) == bits);
        before = 1 + equal.map(|(i, _)| i).nth(rest as usize - 1).expect("as many as were counted");
        below = bits;
    }
    let [least, most] = [bits, below].map(|bits| f64::from(f32::from_bits(bits)));
    (Cut { bits, before }, (least > 0.0).then(|| (least - most) / least))
}

/// Whether all entries at the threshold stay.
fn at_threshold_stays(n: u64, rest: u64, at_least: bool) -> bool {
    at_least || n == rest
}

/// The upper halves of magnitudes, counted: the first of two passes to the k-th largest over tensors that are not in memory at once.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    n: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; 1 << 16], n: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, values: &[f32]) {
        for x in values {
            self.counts[(magnitude(*x) >> 16) as usize] += 1;
        }
        self.n += values.len() as u64;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.n += other.n;
    }

    /// How many were counted.
    pub(super) fn n(&self) -> u64 {
        self.n
    }

    /// The second pass, for the `k`-th largest (from 1).
    pub(super) fn descend(&self, k: u64) -> Digits {
        let (upper, rest) = from_the_top(&self.counts, k);
        Digits { upper: upper as u32, rest, counts: vec![0; 1 << 16] }
    }
}

/// The lower halves of the magnitudes that share the wanted one's upper half.
#[derive(Clone, Debug)]
pub(super) struct Digits {
    upper: u32,
    rest: u64,
    counts: Vec<u64>,
}

impl Digits {
    pub(super) fn add(&mut self, values: &[f32]) {
        for m in values.iter().map(|x| magnitude(*x)).filter(|m| m >> 16 == self.upper) {
            self.counts[(m & 0xffff) as usize] += 1;
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
    }

    /// The k-th largest magnitude, and how many of those equal to it are among the k largest.
    fn finish(&self) -> (u32, u64) {
        let (lower, rest) = from_the_top(&self.counts, self.rest);
        (self.upper << 16 | lower as u32, rest)
    }

    /// What stays of a whole adapter.
    pub(super) fn cut(&self) -> Cut {
        Cut::at_least(self.finish().0)
    }
}

/// The bin of the `k`-th entry counted from the last bin, and its place (from 1) within the bin.
fn from_the_top(counts: &[u64], k: u64) -> (usize, u64) {
    let mut left = k;
    for (bin, count) in counts.iter().enumerate().rev() {
        if left <= *count {
            return (bin, left);
        }
        left -= count;
    }
    panic!("k is at most the number of entries");
}

impl Trim {
    /// The rank from the top of the entry that is the threshold over a whole adapter; `None` where everything stays.
    pub(super) fn threshold_rank(self, n: u64) -> Option<u64> {
        let k = (self.density * n as f64).floor() as u64 + 1;
        (self.scope == Scope::Adapter && self.density < 1.0 && k <= n).then_some(k)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(values: &[f32], density: f64) -> Vec<usize> {
        let (cut, _) = of_module(values, density, false);
        (0..values.len()).filter(|i| cut.keeps(values[*i], *i)).collect()
    }

    #[test]
    fn of_equal_magnitudes_the_first_stay() {
        assert_eq!(kept(&[1.0, -2.0, 2.0, 2.0, 0.5], 0.4), [1, 2]);
        assert_eq!(kept(&[0.0, 0.0, 0.0], 0.34), [0]);
        assert_eq!(kept(&[1.0, 2.0, 3.0], 0.2), Vec::<usize>::new());
        assert_eq!(kept(&[1.0, 2.0, 3.0], 1.0), [0, 1, 2]);
        let (_, margin) = of_module(&[4.0, 3.0, -1.0, 0.0], 0.5, false);
        assert_eq!(margin, Some(2.0 / 3.0));
        let (cut, _) = of_module(&[1.0, -2.0, 2.0, 2.0, 0.5], 0.2, true);
        assert_eq!(
            (0..5).map(|i| cut.keeps([1.0, -2.0, 2.0, 2.0, 0.5][i], i)).collect::<Vec<_>>(),
            [false, true, true, true, false]
        );
    }

    proptest! {
        #[test]
        fn the_kept_are_those_of_a_stable_sort(values in prop::collection::vec(-4_i8..4, 1..200), density in 0.0..1.0_f64) {
            let values: Vec<f32> = values.into_iter().map(|x| f32::from(x) * 0.37).collect();
            let k = (density * values.len() as f64).floor() as usize;
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()));
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            prop_assert_eq!(kept(&values, density), expected);
        }
    }
}
