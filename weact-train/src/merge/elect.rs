//! Sign election and the mean of those that agree (TIES, <https://arxiv.org/abs/2306.01708>), or the plain weighted sum or mean.

use rayon::prelude::*;

use super::{
    recipe::{Consensus, Divisor, Election, Vote},
    trim::Cut,
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

impl Ballot<'_> {
    #[inline(always)]
    fn entry(&self, i: usize) -> f32 {
        let value = self.values[i];
        if self.cut.keeps(value, i) { value } else { 0.0 }
    }
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

/// Entries that a thread merges at a time.
const CHUNK: usize = 1 << 14;

/// Merges the tensors of one module. `tie_is_plus` is the sign of a vote that sums to exactly 0.
///
/// # Panics
/// If there is no ballot, or their lengths differ.
pub fn merge(ballots: &[Ballot<'_>], consensus: Consensus, tie_is_plus: bool, lambda: f64) -> Elected {
    let n = ballots[0].values.len();
    assert!(ballots.iter().all(|b| b.values.len() == n), "the tensors of a module have one length");
    let mut values = vec![0.0; n];
    let of_chunk = |(chunk, out): (usize, &mut [f32])| {
        let mut margin = f64::INFINITY;
        for (i, out) in out.iter_mut().enumerate().map(|(i, out)| (chunk * CHUNK + i, out)) {
            let merged = match consensus {
                Consensus::Sum => sum(ballots, i),
                Consensus::Mean => sum(ballots, i) / ballots.len() as f64,
                Consensus::Elect(election) => {
                    let (vote, closeness) = election.vote(ballots, i);
                    margin = margin.min(closeness);
                    election.average(ballots, i, vote > 0.0 || (vote == 0.0 && tie_is_plus))
                }
            };
            *out = (lambda * merged) as f32;
        }
        margin
    };
    let margin = values.par_chunks_mut(CHUNK).enumerate().map(of_chunk).reduce(|| f64::INFINITY, f64::min);
    Elected { values, margin: margin.is_finite().then_some(margin) }
}

#[inline(always)]
fn sum(ballots: &[Ballot<'_>], i: usize) -> f64 {
    ballots.iter().map(|b| b.weight * f64::from(b.entry(i))).sum()
}

/// The sum of the elected signs of a module's entries, for a tie that the majority of all modules decides. A tie counts 0.
pub(super) fn sum_of_signs(ballots: &[Ballot<'_>], election: Election) -> i64 {
    let sign = |i: usize| match election.vote(ballots, i).0 {
        vote if vote > 0.0 => 1,
        vote if vote < 0.0 => -1,
        _ => 0,
    };
    (0..ballots[0].values.len()).into_par_iter().map(sign).sum()
}

impl Election {
    /// The vote on an entry, and how close it was; infinite where no source holds anything.
    #[inline(always)]
    fn vote(self, ballots: &[Ballot<'_>], i: usize) -> (f64, f64) {
        let (mut sum, mut mass) = (0.0, 0.0);
        for ballot in ballots {
            let weight = if self.weights_vote { ballot.weight } else { 1.0 };
            let entry = weight * f64::from(ballot.entry(i));
            let counted = match self.vote {
                Vote::Mass => entry,
                Vote::Frequency if entry == 0.0 => 0.0,
                Vote::Frequency => entry.signum(),
            };
            sum += counted;
            mass += counted.abs();
        }
        (sum, if mass > 0.0 { sum.abs() / mass } else { f64::INFINITY })
    }

    /// The mean of the entries of the elected sign. An entry of 0 agrees with neither.
    #[inline(always)]
    fn average(self, ballots: &[Ballot<'_>], i: usize, plus: bool) -> f64 {
        let (mut sum, mut count, mut weights) = (0.0, 0.0, 0.0);
        for ballot in ballots {
            let entry = f64::from(ballot.entry(i));
            let voted = if self.weights_vote { entry * ballot.weight } else { entry };
            if if plus { voted > 0.0 } else { voted < 0.0 } {
                sum += ballot.weight * entry;
                count += 1.0;
                weights += ballot.weight;
            }
        }
        match self.divisor {
            _ if count == 0.0 => 0.0,
            Divisor::Count => sum / count,
            // As in mergekit. A recipe whose weights could cancel is refused before.
            Divisor::WeightSum if weights == 0.0 => sum,
            Divisor::WeightSum => sum / weights,
            Divisor::One => sum,
        }
    }
}
