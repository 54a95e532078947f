//! Retention of capabilities under sequential training (§3.1, Table 7, Figure 3): what the next stages leave of what a stage taught.
//!
//! Appendix C has no source text. Our reading: accuracy is teacher-forced top-1 over the tokens of all trajectories together, and
//!
//! - the initial gain is the accuracy right after a capability's own stage less that of the base,
//! - the absolute loss is the accuracy right after its own stage less that at the end of the order,
//! - the loss of initial gain is the second over the first, unknown where nothing was gained.
//!
//! Each is averaged over the orders, those in which the capability comes last included: there it loses nothing. Intervals resample
//! trajectories, each with all its tokens, capabilities and orders.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::AddAssign,
};

use serde::{Deserialize, Serialize};
use weact_core::{
    Capability,
    stats::{Estimate, estimate},
};

use crate::{Error, Result, content::TokenKind, teacher_forced::Scored};

/// Which trajectories were scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Set {
    /// The validation set, without the monitoring subset.
    Valid,
    /// The subset held apart.
    Monitor,
}

/// Which tokens count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tokens {
    /// All that training supervises.
    Supervised,
    /// Content, thinking included.
    Content,
    /// Content outside thinking.
    ContentWithoutThinking,
}

impl Tokens {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Supervised, Self::Content, Self::ContentWithoutThinking];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Supervised => "supervised tokens",
            Self::Content => "content tokens",
            Self::ContentWithoutThinking => "content tokens outside thinking",
        }
    }

    fn counts(self, kind: TokenKind) -> bool {
        match self {
            Self::Supervised => true,
            Self::Content => kind != TokenKind::Scaffolding,
            Self::ContentWithoutThinking => kind == TokenKind::Content,
        }
    }
}

/// Tokens of one trajectory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// How many.
    pub n_tokens: u64,
    /// How many of them are the most likely ones.
    pub n_correct: u64,
    /// Their negative log-likelihood, summed, in nats.
    pub nll_nats: f64,
}

impl Counts {
    /// Of the tokens of one scored record that count.
    ///
    /// # Panics
    /// If there is not one kind for each scored token.
    pub fn of(scored: &Scored, kinds: &[TokenKind], tokens: Tokens) -> Self {
        assert_eq!(scored.top1.len(), kinds.len(), "one kind for each scored token of {}", scored.id);
        let mut counts = Self::default();
        for ((top1, nll_nats), _) in scored.top1.iter().zip(&scored.nll_nats).zip(kinds).filter(|(_, kind)| tokens.counts(**kind))
        {
            counts += Self { n_tokens: 1, n_correct: u64::from(*top1), nll_nats: *nll_nats };
        }
        counts
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.n_tokens += other.n_tokens;
        self.n_correct += other.n_correct;
        self.nll_nats += other.nll_nats;
    }
}

/// One trajectory's stages of one capability under the weights at one point of training: one line of `records.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// How the adapters are shared.
    pub arm: String,
    /// The capabilities trained so far, in their order: empty at the base. Orders that begin alike share these points, so that the point of
    /// order `o` after stage `k` is its first `k` capabilities.
    pub after: Vec<Capability>,
    /// Whose tokens.
    pub capability: Capability,
    /// Which set the trajectory is in.
    pub set: Set,
    /// Its id.
    pub trajectory: String,
    /// Digest of the adapter under which it was scored; absent where the base alone was.
    pub weights: Option<String>,
    /// All supervised tokens.
    pub supervised: Counts,
    /// Content tokens.
    pub content: Counts,
    /// Content tokens outside thinking.
    pub content_without_thinking: Counts,
}

impl Measurement {
    /// The counts of these tokens.
    pub fn counts(&self, tokens: Tokens) -> Counts {
        match tokens {
            Tokens::Supervised => self.supervised,
            Tokens::Content => self.content,
            Tokens::ContentWithoutThinking => self.content_without_thinking,
        }
    }
}

/// A row of Table 7: one arm, on one set, over one kind of tokens. Accuracies are shares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Retention {
    /// How the adapters are shared.
    pub arm: String,
    /// On which trajectories.
    pub set: Set,
    /// Over which tokens.
    pub tokens: Tokens,
    /// How many trajectories.
    pub n_trajectories: usize,
    /// Mean over capabilities of the absolute loss.
    pub mean_loss: Estimate,
    /// Mean over capabilities of [`Retained::forgotten_nats`]; unknown where no order has two stages.
    pub mean_forgotten_nats: Option<Estimate>,
    /// Each capability, in alphabetical order.
    pub capabilities: Vec<Retained>,
    /// Each order, in alphabetical order.
    pub sequences: Vec<Sequence>,
}

/// What is left of one capability, averaged over the orders.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Retained {
    /// Whose tokens.
    pub capability: Capability,
    /// How many tokens, over all trajectories.
    pub n_tokens: u64,
    /// Accuracy of the base.
    pub base: Estimate,
    /// Accuracy right after its own stage.
    pub initial: Estimate,
    /// Accuracy at the end.
    pub end: Estimate,
    /// Initial gain.
    pub gain: Estimate,
    /// Absolute loss.
    pub loss: Estimate,
    /// Share of the initial gain that is lost; unknown where nothing was gained.
    pub loss_of_gain: Option<Estimate>,
    /// Negative log-likelihood per token at the end less that right after its own stage, in nats, averaged over the orders in which another
    /// stage follows; unknown where there is none.
    pub forgotten_nats: Option<Estimate>,
}

/// One order of training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sequence {
    /// The capabilities as they were trained.
    pub order: Vec<Capability>,
    /// At the base and after each stage, by capability.
    pub points: Vec<BTreeMap<Capability, Point>>,
}

/// All trajectories at one point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Share of tokens that are the most likely ones.
    pub accuracy: f64,
    /// Mean negative log-likelihood per token, in nats.
    pub nll_nats: f64,
}

/// What `records` say of `arm` on `set` over `tokens`. `seed` draws the resamples.
///
/// # Errors
/// If there is no order that trains every capability measured, a point of an order lacks records of some trajectory, two records are of the
/// same, or a capability has no such token.
pub fn retention(records: &[Measurement], arm: &str, set: Set, tokens: Tokens, seed: u64) -> Result<Retention> {
    let measured = Measured::new(records, arm, set, tokens)?;
    let cells = measured.capabilities.iter().map(|capability| measured.cells(capability)).collect::<Result<Vec<_>>>()?;
    let n = measured.trajectories.len();
    let over = |statistic: &dyn Fn(&[u32]) -> Option<f64>| estimate(&[n], seed, &|counts| statistic(&counts[0]));
    let known = |statistic: &dyn Fn(&[u32]) -> Option<f64>| over(statistic).expect("a capability has tokens");
    let mean = |values: &dyn Fn(&Sums) -> Option<f64>, counts: &[u32]| {
        let sum: Option<f64> = cells.iter().map(|cells| values(&sums(cells, counts))).sum();
        Some(sum? / cells.len() as f64)
    };
    let retained = |(capability, cells): (&Capability, &Vec<Cell>)| {
        let at = |value: fn(&Sums) -> Option<f64>| known(&|counts| value(&sums(cells, counts)));
        Retained {
            capability: capability.clone(),
            n_tokens: cells.iter().map(|cell| cell.n_tokens).sum(),
            base: at(|s| s.share(s.base)),
            initial: at(|s| s.share(s.initial)),
            end: at(|s| s.share(s.end)),
            gain: at(|s| s.share(s.initial - s.base)),
            loss: at(Sums::loss),
            loss_of_gain: over(&|counts| sums(cells, counts).loss_of_gain()),
            forgotten_nats: over(&|counts| sums(cells, counts).forgotten()),
        }
    };
    Ok(Retention {
        arm: arm.to_owned(),
        set,
        tokens,
        n_trajectories: n,
        mean_loss: known(&|counts| mean(&Sums::loss, counts)),
        mean_forgotten_nats: over(&|counts| mean(&Sums::forgotten, counts)),
        capabilities: measured.capabilities.iter().zip(&cells).map(retained).collect(),
        sequences: measured.orders.iter().map(|order| measured.sequence(order)).collect::<Result<_>>()?,
    })
}

/// The records of one arm and set, by point, capability and trajectory.
struct Measured<'a> {
    counts: BTreeMap<(&'a [Capability], &'a Capability, &'a str), Counts>,
    capabilities: Vec<Capability>,
    orders: Vec<&'a [Capability]>,
    trajectories: Vec<&'a str>,
    /// Those that have a stage of a capability.
    of_capability: BTreeMap<&'a Capability, BTreeSet<&'a str>>,
    arm: &'a str,
}

impl<'a> Measured<'a> {
    fn new(records: &'a [Measurement], arm: &'a str, set: Set, tokens: Tokens) -> Result<Self> {
        let mut counts = BTreeMap::new();
        let mut of_capability: BTreeMap<&Capability, BTreeSet<&str>> = BTreeMap::new();
        for record in records.iter().filter(|record| record.arm == arm && record.set == set) {
            let Measurement { after, capability, trajectory, .. } = record;
            of_capability.entry(capability).or_default().insert(trajectory);
            if counts.insert((after.as_slice(), capability, trajectory.as_str()), record.counts(tokens)).is_some() {
                let point = point_name(after);
                return Err(Error::Incomplete(format!("{arm}: two records are of {capability} in {trajectory} {point}")));
            }
        }
        let capabilities: Vec<Capability> = of_capability.keys().map(|capability| (*capability).clone()).collect();
        let is_order = |after: &&[Capability]| {
            after.len() == capabilities.len() && capabilities.iter().all(|capability| after.contains(capability))
        };
        let orders: BTreeSet<&[Capability]> = counts.keys().map(|(after, ..)| *after).filter(is_order).collect();
        if orders.is_empty() {
            return Err(Error::Incomplete(format!("{arm}: no order trains every capability that is measured")));
        }
        let trajectories: BTreeSet<&str> = of_capability.values().flatten().copied().collect();
        let (orders, trajectories) = (orders.into_iter().collect(), trajectories.into_iter().collect());
        Ok(Self { counts, capabilities, orders, trajectories, of_capability, arm })
    }

    /// The counts of a trajectory at a point; nothing where it has no stage of the capability.
    fn at(&self, after: &[Capability], capability: &Capability, trajectory: &str) -> Result<Counts> {
        match self.counts.get(&(after, capability, trajectory)) {
            Some(counts) => Ok(*counts),
            None if !self.of_capability[capability].contains(trajectory) => Ok(Counts::default()),
            None => {
                let (arm, point) = (self.arm, point_name(after));
                Err(Error::Incomplete(format!("{arm}: {capability} in {trajectory} was not measured {point}")))
            }
        }
    }

    /// One for each trajectory.
    fn cells(&self, capability: &Capability) -> Result<Vec<Cell>> {
        let cell = |trajectory: &&str| {
            let base = self.at(&[], capability, trajectory)?;
            let mut cell = Cell { n_tokens: base.n_tokens, ..Cell::default() };
            for order in &self.orders {
                let own = order.iter().position(|c| c == capability).expect("an order trains every capability") + 1;
                let (initial, end) = (self.at(&order[..own], capability, trajectory)?, self.at(order, capability, trajectory)?);
                cell.tokens += base.n_tokens as f64;
                cell.base += base.n_correct as f64;
                cell.initial += initial.n_correct as f64;
                cell.end += end.n_correct as f64;
                if own < order.len() {
                    cell.followed_tokens += base.n_tokens as f64;
                    cell.forgotten_nats += end.nll_nats - initial.nll_nats;
                }
            }
            Ok(cell)
        };
        let cells = self.trajectories.iter().map(cell).collect::<Result<Vec<Cell>>>()?;
        if cells.iter().all(|cell| cell.n_tokens == 0) {
            return Err(Error::Incomplete(format!("{}: {capability} has no token that counts", self.arm)));
        }
        Ok(cells)
    }

    fn sequence(&self, order: &[Capability]) -> Result<Sequence> {
        let point = |n_stages: usize| {
            let of = |capability: &Capability| {
                let mut all = Counts::default();
                for trajectory in &self.trajectories {
                    all += self.at(&order[..n_stages], capability, trajectory)?;
                }
                let share = |x: f64| x / all.n_tokens as f64;
                Ok((capability.clone(), Point { accuracy: share(all.n_correct as f64), nll_nats: share(all.nll_nats) }))
            };
            self.capabilities.iter().map(of).collect::<Result<BTreeMap<_, _>>>()
        };
        Ok(Sequence { order: order.to_vec(), points: (0..=order.len()).map(point).collect::<Result<_>>()? })
    }
}

fn point_name(after: &[Capability]) -> String {
    match after {
        [] => "at the base".to_owned(),
        _ => format!("after {}", after.iter().map(Capability::as_str).collect::<Vec<_>>().join(", ")),
    }
}

/// One trajectory's tokens of one capability, summed over the orders.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    n_tokens: u64, // once
    tokens: f64,
    base: f64,
    initial: f64,
    end: f64,
    followed_tokens: f64, // in the orders in which another stage follows
    forgotten_nats: f64,
}

/// The same over trajectories.
type Sums = Cell;

fn sums(cells: &[Cell], counts: &[u32]) -> Sums {
    let mut sums = Sums::default();
    for (cell, count) in cells.iter().zip(counts).filter(|(_, count)| **count > 0) {
        let times = f64::from(*count);
        sums.tokens += times * cell.tokens;
        sums.base += times * cell.base;
        sums.initial += times * cell.initial;
        sums.end += times * cell.end;
        sums.followed_tokens += times * cell.followed_tokens;
        sums.forgotten_nats += times * cell.forgotten_nats;
    }
    sums
}

impl Sums {
    fn share(&self, x: f64) -> Option<f64> {
        (self.tokens > 0.0).then(|| x / self.tokens)
    }

    fn loss(&self) -> Option<f64> {
        self.share(self.initial - self.end)
    }

    fn loss_of_gain(&self) -> Option<f64> {
        let gain = self.initial - self.base;
        (gain > 0.0).then(|| (self.initial - self.end) / gain)
    }

    fn forgotten(&self) -> Option<f64> {
        (self.followed_tokens > 0.0).then(|| self.forgotten_nats / self.followed_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Capability {
        Capability::new(name).expect("legal")
    }

    /// The records of one trajectory: hits of ten tokens of each capability at each point, and one nat for each miss.
    fn records(trajectory: &str, points: &[(&str, [u64; 2])]) -> Vec<Measurement> {
        let record = |after: &str, capability: &str, n_correct: u64| {
            let counts = Counts { n_tokens: 10, n_correct, nll_nats: (10 - n_correct) as f64 };
            Measurement {
                arm: "shared".to_owned(),
                after: after.split_whitespace().map(name).collect(),
                capability: name(capability),
                set: Set::Valid,
                trajectory: trajectory.to_owned(),
                weights: None,
                supervised: counts,
                content: Counts { n_tokens: 0, ..counts },
                content_without_thinking: counts,
            }
        };
        points.iter().flat_map(|(after, [plan, write])| [record(after, "plan", *plan), record(after, "write", *write)]).collect()
    }

    fn both() -> Vec<Measurement> {
        let first = [("", [1, 4]), ("plan", [9, 4]), ("write", [1, 6]), ("plan write", [5, 6]), ("write plan", [9, 5])];
        let second = [("", [3, 4]), ("plan", [9, 4]), ("write", [2, 8]), ("plan write", [7, 8]), ("write plan", [9, 7])];
        [records("a", &first), records("b", &second)].concat()
    }

    /// Plan: base 4/20, 18/20 after its stage, and (12 + 18)/40 at the end. Write: 8/20, 14/20, (14 + 12)/40.
    #[test]
    fn table_7_is_as_worked_by_hand() {
        let retention = retention(&both(), "shared", Set::Valid, Tokens::Supervised, 0).expect("complete");
        let [plan, write] = &retention.capabilities[..] else { panic!("two capabilities") };
        let close = |x: f64, y: f64| assert!((x - y).abs() < 1e-12, "{x}, expected {y}");
        for (estimate, expected) in [
            (plan.base, 0.2),
            (plan.initial, 0.9),
            (plan.end, 0.75),
            (plan.gain, 0.7),
            (plan.loss, 0.15),
            (plan.loss_of_gain.expect("it gained"), 0.15 / 0.7),
            (plan.forgotten_nats.expect("write follows"), 0.3),
            (write.gain, 0.3),
            (write.loss, 0.05),
            (write.loss_of_gain.expect("it gained"), 0.05 / 0.3),
            (retention.mean_loss, 0.1),
            (retention.mean_forgotten_nats.expect("each is followed"), 0.2),
        ] {
            close(estimate.value, expected);
        }
        let (low, high) = plan.loss.interval.expect("two trajectories");
        close(low, 0.1);
        close(high, 0.2);
        assert_eq!((retention.n_trajectories, plan.n_tokens), (2, 20));
        let sequence = &retention.sequences[1];
        assert_eq!(sequence.order, [name("write"), name("plan")]);
        close(sequence.points[1][&name("write")].accuracy, 0.7);
        close(sequence.points[2][&name("write")].nll_nats, 0.4);
    }

    #[test]
    fn where_nothing_was_gained_the_lost_share_of_it_is_unknown() {
        let flat = records("a", &[("", [5, 5]), ("plan", [5, 5]), ("plan write", [4, 6])]);
        let retention = retention(&flat, "shared", Set::Valid, Tokens::Supervised, 0).expect("complete");
        let [plan, write] = &retention.capabilities[..] else { panic!("two capabilities") };
        assert_eq!((plan.loss_of_gain, plan.loss.interval), (None, None));
        assert_eq!((write.forgotten_nats, retention.mean_forgotten_nats), (None, None));
    }

    #[test]
    fn incomplete_records_are_refused_by_name() {
        let check = |records: &[Measurement], tokens, why: &str| {
            let error = retention(records, "shared", Set::Valid, tokens, 0).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        };
        let without = |index: usize| {
            let mut records = both();
            records.remove(index);
            records
        };
        check(&without(12), Tokens::Supervised, "plan in b was not measured after plan");
        check(&without(1), Tokens::Supervised, "write in a was not measured at the base");
        check(&both()[..6], Tokens::Supervised, "no order trains every capability");
        check(&[both(), both()].concat(), Tokens::Supervised, "two records are of plan in a at the base");
        check(&both(), Tokens::Content, "plan has no token that counts");
        check(&[], Tokens::Supervised, "no order");
    }

    #[test]
    fn thinking_counts_where_it_is_asked_for() {
        let scored = Scored { id: "a#0".to_owned(), nll_nats: vec![1.0, 2.0, 4.0], top1: vec![true, false, true] };
        let kinds = [TokenKind::Scaffolding, TokenKind::Thinking, TokenKind::Content];
        let [all, content, outside] = Tokens::ALL.map(|tokens| Counts::of(&scored, &kinds, tokens));
        assert_eq!(all, Counts { n_tokens: 3, n_correct: 2, nll_nats: 7.0 });
        assert_eq!(content, Counts { n_tokens: 2, n_correct: 1, nll_nats: 6.0 });
        assert_eq!(outside, Counts { n_tokens: 1, n_correct: 1, nll_nats: 4.0 });
    }
}
