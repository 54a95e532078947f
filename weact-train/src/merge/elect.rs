//! Sign election and the mean of those that agree (TIES, <https://arxiv.org/abs/2306.01708>), or the plain weighted sum or mean.

use rayon::prelude::*;

use super::{
    recipe::{Consensus, Divisor, Election, Vote},
    trim::{Cut, magnitude},
};

/// One source's tensor on its way into the merge.
#[derive(Clone, Copy, Debug)]
pub struct Ballot<'a> {
    /// Its entries, row-major.
    pub values: &'a [f32],
    /// Which of them stay.
    pub cut: Cut,
    /// Its weight.
    pub weight: f64,
}

/// The merged tensor, and how close the closest vote was: the smallest `|sum| / sum of magnitudes` over entries that any source
/// holds; none without an election.
#[derive(Clone, Debug, PartialEq)]
pub struct Elected {
    /// Its entries, row-major.
    pub values: Vec<f32>,
    /// The closest vote, in [0, 1].
    pub margin: Option<f64>,
}

/// Entries that are merged at a time: what they need stays in the nearest cache.
const CHUNK: usize = 512;

/// Merges the tensors of one module. `tie_is_plus` is the sign of a vote that sums to exactly 0.
///
/// # Panics
/// If there is no ballot, or their lengths differ.
pub fn merge(ballots: &[Ballot<'_>], consensus: Consensus, tie_is_plus: bool, lambda: f64) -> Elected {
    let n = ballots[0].values.len();
    assert!(ballots.iter().all(|b| b.values.len() == n), "the tensors of a module have one length");
    let mut values = vec![0.0; n];
    let of_chunk = |booth: &mut Booth, (chunk, out): (usize, &mut [f32])| {
        // Compiled for the processor at hand.
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let len = out.len();
                booth.fill(ballots, chunk * CHUNK, len);
                let margin = match consensus {
                    Consensus::Sum => booth.sum(ballots, 1.0),
                    Consensus::Mean => booth.sum(ballots, 1.0 / ballots.len() as f64),
                    Consensus::Elect(election) => {
                        let margin = booth.vote(election, ballots, len);
                        booth.average(election, ballots, tie_is_plus);
                        margin
                    }
                };
                out.iter_mut().zip(&booth.result).for_each(|(out, merged)| *out = (lambda * merged) as f32);
                margin
            },
        )
    };
    let of_chunks = values.par_chunks_mut(CHUNK).enumerate().with_min_len(64);
    let margin = of_chunks.map_init(|| Booth::new(ballots.len()), of_chunk).reduce(|| f64::INFINITY, f64::min);
    Elected { values, margin: margin.is_finite().then_some(margin) }
}

/// The sum of the elected signs of a module's entries, for a tie that the majority of all modules decides. A tie counts 0.
pub(super) fn sum_of_signs(ballots: &[Ballot<'_>], election: Election) -> i64 {
    let n = ballots[0].values.len();
    let of_chunk = |booth: &mut Booth, chunk: usize| {
        let len = CHUNK.min(n - chunk * CHUNK);
        booth.fill(ballots, chunk * CHUNK, len);
        booth.vote(election, ballots, len);
        booth.votes[..len].iter().map(|vote| i64::from(*vote > 0.0) - i64::from(*vote < 0.0)).sum::<i64>()
    };
    (0..n.div_ceil(CHUNK)).into_par_iter().map_init(|| Booth::new(ballots.len()), of_chunk).sum()
}

/// A chunk of all ballots on its way through an election.
struct Booth {
    entries: Vec<[f32; CHUNK]>, // one a ballot, trimmed
    votes: [f64; CHUNK],
    masses: [f64; CHUNK],
    counts: [f64; CHUNK],
    weights: [f64; CHUNK],
    result: [f64; CHUNK],
}

impl Booth {
    fn new(n_ballots: usize) -> Self {
        let [votes, masses, counts, weights, result] = [[0.0; CHUNK]; 5];
        Self { entries: vec![[0.0; CHUNK]; n_ballots], votes, masses, counts, weights, result }
    }

    #[inline(always)]
    fn fill(&mut self, ballots: &[Ballot<'_>], first: usize, len: usize) {
        for (entries, ballot) in self.entries.iter_mut().zip(ballots) {
            let values = &ballot.values[first..first + len];
            // Of entries at the threshold the first stay: of all but one chunk all or none.
            let before = ballot.cut.before.saturating_sub(first).min(len);
            let (early, late) = entries[..len].split_at_mut(before);
            let keep = |entries: &mut [f32], values: &[f32], least: u32| {
                for (entry, value) in entries.iter_mut().zip(values) {
                    *entry = if magnitude(*value) >= least { *value } else { 0.0 };
                }
            };
            keep(early, &values[..before], ballot.cut.bits);
            keep(late, &values[before..], ballot.cut.bits.saturating_add(1));
        }
    }

    /// The weighted sum times `factor`; there is no vote and so no margin.
    #[inline(always)]
    fn sum(&mut self, ballots: &[Ballot<'_>], factor: f64) -> f64 {
        self.result.fill(0.0);
        for (entries, ballot) in self.entries.iter().zip(ballots) {
            self.result.iter_mut().zip(entries).for_each(|(sum, entry)| *sum += ballot.weight * f64::from(*entry));
        }
        self.result.iter_mut().for_each(|sum| *sum *= factor);
        f64::INFINITY
    }

    /// Counts the votes on each entry. The closest of those in which any source holds something; infinite where there is none.
    #[inline(always)]
    fn vote(&mut self, election: Election, ballots: &[Ballot<'_>], len: usize) -> f64 {
        self.votes.fill(0.0);
        self.masses.fill(0.0);
        for (entries, ballot) in self.entries.iter().zip(ballots) {
            let weight = if election.weights_vote { ballot.weight } else { 1.0 };
            for (i, entry) in entries.iter().enumerate() {
                let entry = weight * f64::from(*entry);
                let counted = match election.vote {
                    Vote::Mass => entry,
                    Vote::Frequency => f64::from(i8::from(entry > 0.0) - i8::from(entry < 0.0)),
                };
                self.votes[i] += counted;
                self.masses[i] += counted.abs();
            }
        }
        // A quotient is taken for few entries only: those that are closer than all before.
        let mut closest = f64::INFINITY;
        for (vote, mass) in self.votes[..len].iter().zip(&self.masses).filter(|(_, mass)| **mass > 0.0) {
            if vote.abs() < closest * mass {
                closest = vote.abs() / mass;
            }
        }
        closest
    }

    /// The mean of the entries of the elected sign. An entry of 0 agrees with neither.
    #[inline(always)]
    fn average(&mut self, election: Election, ballots: &[Ballot<'_>], tie_is_plus: bool) {
        self.result.fill(0.0);
        self.counts.fill(0.0);
        self.weights.fill(0.0);
        let tie = if tie_is_plus { 1.0 } else { -1.0 };
        // From here on a vote is its sign.
        self.votes.iter_mut().for_each(|vote| *vote = if *vote == 0.0 { tie } else { vote.signum() });
        for (entries, ballot) in self.entries.iter().zip(ballots) {
            // A source voted with its weighted entry or with the entry alone.
            let side = if election.weights_vote { ballot.weight } else { 1.0 };
            for (i, entry) in entries.iter().enumerate() {
                let entry = f64::from(*entry);
                let one = if side * entry * self.votes[i] > 0.0 { 1.0 } else { 0.0 };
                self.result[i] += one * ballot.weight * entry;
                self.counts[i] += one;
                self.weights[i] += one * ballot.weight;
            }
        }
        let divided_by: &[f64; CHUNK] = match election.divisor {
            Divisor::Count => &self.counts,
            Divisor::WeightSum => &self.weights,
            Divisor::One => return,
        };
        // Where nothing agrees the sum is 0; where weights cancel it stays as it is, as in mergekit. A recipe whose weights could
        // cancel is refused before.
        let divide = |(sum, by): (&mut f64, &f64)| *sum = if *by == 0.0 { *sum } else { *sum / by };
        self.result.iter_mut().zip(divided_by).for_each(divide);
    }
}
