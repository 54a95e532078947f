//! What a merge does, as data: in which space, what is dropped and trimmed, how signs are elected, at which rank the result stands.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A merge of adapters, whatever they are. Per module: every source's tensor in [`Space`] is dropped ([`Drop`]), then trimmed
/// ([`Trim`]), all are combined ([`Consensus`]), multiplied by `lambda`, and brought to the rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recipe {
    /// The name under which this recipe is known.
    pub method: Method,
    /// What is merged elementwise.
    pub space: Space,
    /// Random drop before trimming (DARE, <https://arxiv.org/abs/2311.03099>).
    pub drop: Option<Drop>,
    /// Trimming by magnitude (TIES, <https://arxiv.org/abs/2306.01708>).
    pub trim: Option<Trim>,
    /// How the tensors become one.
    pub consensus: Consensus,
    /// What the result is multiplied by.
    pub lambda: Lambda,
    /// One weight a source, in the sources' order; 1 each where there is none. They are not normalised: 2, 1 is not 1, 0.5.
    pub weights: Vec<f64>,
    /// The rank of the result.
    pub rank: Rank,
    /// A source may lack modules that another has; it adds nothing there.
    pub union: bool,
}

/// What is merged elementwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The scaled updates `s_i B_i A_i`: exact, ranks may differ.
    Update,
    /// `A` and `B` apart, each with the root of weight and scale: what PEFT's `linear`, `ties`, ... without `_svd` do. The result
    /// holds products `B_i A_j` of different sources, so it is no merge of the updates; kept for comparison. Ranks must be equal.
    Factors,
    /// Coordinates of the updates in the basis that they share (KnOTS, <https://arxiv.org/abs/2410.19735>).
    Knots,
    /// Factors after rotations and scales that leave each update as it is (TSPA; a reconstruction, as `merge/tspa.rs` says).
    Aligned {
        /// Which alignments run.
        stages: Stages,
    },
}

/// Stages of TSPA's alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stages {
    /// Attention alignment alone.
    Macro,
    /// LoRA parameter alignment alone.
    Micro,
    /// The one after the other.
    Both,
}

/// Random drop of entries, each kept or dropped by a counter-based generator ([`super::mask`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Drop {
    /// Probability with which an entry is dropped.
    pub rate: f64,
    /// Seed of the masks.
    pub seed: u64,
    /// What the entries that are left are multiplied by.
    pub rescale: Rescale,
}

/// What makes up for dropped entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// `1 / (1 - rate)`: the expectation is that of the whole (DARE, PEFT).
    Inverse,
    /// Such that the L1 norm is that of the whole (mergekit).
    L1,
}

/// Trimming: only the largest entries stay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trim {
    /// The share of entries that stays, in (0, 1].
    pub density: f64,
    /// What the share is of.
    pub scope: Scope,
}

/// Over which entries of a source the threshold runs, and with which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Each module's `floor(density n)` largest; of equal ones the first in row-major order (PEFT, mergekit).
    Module,
    /// Each module's entries that are not smaller than its `floor(density n) + 1`-th largest (the rule of the original code).
    ModuleAtLeast,
    /// The same over all modules of a source (the original code).
    Adapter,
}

/// How the sources' tensors become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Consensus {
    /// The weighted sum.
    Sum,
    /// The weighted sum over the number of sources that have the module.
    Mean,
    /// Signs are elected entry by entry, and entries of the elected sign averaged.
    Elect(Election),
}

/// An election of signs and what is averaged after it (TIES).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Election {
    /// What counts in the vote.
    pub vote: Vote,
    /// Weights are applied before the vote (mergekit) and not only to the average (PEFT).
    pub weights_vote: bool,
    /// The sign of a vote that sums to exactly 0.
    pub zero: ZeroVote,
    /// What the sum of agreeing entries is divided by.
    pub divisor: Divisor,
}

/// What counts in a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Vote {
    /// The entries' sum.
    Mass,
    /// The sum of their signs.
    Frequency,
}

/// The sign of a tie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVote {
    /// Plus.
    Plus,
    /// That of the sum of all elected signs of all modules; minus where that is 0 too.
    Majority,
}

/// What the sum of agreeing entries is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Divisor {
    /// How many agree, whatever their weights.
    Count,
    /// The weights of those that agree.
    WeightSum,
    /// Nothing: the agreeing entries are summed (mergekit's `normalize: false`).
    One,
}

/// What the merged tensor is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lambda {
    /// This number.
    Fixed(f64),
    /// Per module, what brings the aligned average nearest to the mean of the updates (for [`Space::Aligned`]).
    LeastSquares,
}

/// The rank of a merged adapter: the same in every module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rank {
    /// What holds the merge exactly: the sum of the sources' ranks. Not for a merge that has no low rank.
    Exact,
    /// The best approximation of this rank in Frobenius norm.
    At(usize),
    /// The largest rank among the sources.
    LargestSource,
}

/// The merges that have a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Full Additive (§3.2): the exact sum of the updates, rank the sum of the ranks.
    Additive,
    /// The sum divided by the number of sources, then truncated.
    Average,
    /// The weighted sum, then truncated (task arithmetic, <https://arxiv.org/abs/2212.04089>).
    Linear,
    /// The weighted sum, then truncated, under PEFT's name.
    Svd,
    /// The weighted sum of trimmed updates, then truncated.
    MagnitudePrune,
    /// TIES-Merging (<https://arxiv.org/abs/2306.01708>), then truncated.
    Ties,
    /// DARE's drop, then TIES with its own trim (App. E.1), then truncated.
    DareTies,
    /// DARE's drop, then election and disjoint mean without a trim: `dare_ties` of PEFT and mergekit.
    DareTiesSingle,
    /// DARE's drop, then the weighted sum.
    DareLinear,
    /// KnOTS: the plain mean of the coordinates in the shared basis.
    Knots,
    /// KnOTS-TIES: TIES on the coordinates.
    KnotsTies,
    /// TSPA: two alignments of the factors, then their average.
    Tspa,
    /// The weighted sum with weights found on samples (LoRAHub, <https://arxiv.org/abs/2307.13269>).
    Lorahub,
}

/// Whose rules hold where implementations differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// PEFT 0.21: thresholds per module, weights don't vote, divided by the count, a tie is plus, rescale `1 / (1 - p)`.
    #[default]
    Peft,
    /// mergekit: weights vote, divided by the weights' sum (not divided after a random drop), rescale by L1.
    Mergekit,
    /// The authors' code: one threshold over the whole adapter, a tie is the majority's.
    Original,
}

impl Method {
    /// All, in the order of the documentation.
    pub const ALL: [Self; 13] = [
        Self::Additive,
        Self::Average,
        Self::Linear,
        Self::Svd,
        Self::MagnitudePrune,
        Self::Ties,
        Self::DareTies,
        Self::DareTiesSingle,
        Self::DareLinear,
        Self::Knots,
        Self::KnotsTies,
        Self::Tspa,
        Self::Lorahub,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Additive => "additive",
            Self::Average => "average",
            Self::Linear => "linear",
            Self::Svd => "svd",
            Self::MagnitudePrune => "magnitude-prune",
            Self::Ties => "ties",
            Self::DareTies => "dare-ties",
            Self::DareTiesSingle => "dare-ties-single",
            Self::DareLinear => "dare-linear",
            Self::Knots => "knots",
            Self::KnotsTies => "knots-ties",
            Self::Tspa => "tspa",
            Self::Lorahub => "lorahub",
        }
    }

    /// Whether entries are trimmed, so that a density means something.
    pub fn trims(self) -> bool {
        matches!(self, Self::MagnitudePrune | Self::Ties | Self::DareTies | Self::KnotsTies)
    }

    /// Whether entries are dropped at random.
    pub fn drops(self) -> bool {
        matches!(self, Self::DareTies | Self::DareTiesSingle | Self::DareLinear)
    }

    fn elects(self) -> bool {
        matches!(self, Self::Ties | Self::DareTies | Self::DareTiesSingle | Self::KnotsTies)
    }

    /// The method's recipe with the paper's values (App. E.1): density 0.2, drop rate 0.5, seed 0, lambda 1. Every field can be
    /// changed afterwards.
    pub fn recipe(self, preset: Preset) -> Recipe {
        let scope = match (preset, self) {
            (Preset::Original, _) => Scope::Adapter,
            // Of KnOTS there is one implementation.
            (_, Self::KnotsTies) => Scope::ModuleAtLeast,
            _ => Scope::Module,
        };
        // The LLaMA configurations of KnOTS trim nothing (`topK: 100`) and scale the mean by 0.5; the density is the user's here.
        let trim = self.trims().then_some(Trim { density: 0.2, scope });
        let rescale = if preset == Preset::Mergekit { Rescale::L1 } else { Rescale::Inverse };
        let election = Election {
            vote: Vote::Mass,
            weights_vote: preset == Preset::Mergekit,
            zero: if preset == Preset::Original { ZeroVote::Majority } else { ZeroVote::Plus },
            divisor: match (preset, self.drops()) {
                (Preset::Mergekit, true) => Divisor::One,
                (Preset::Mergekit, false) => Divisor::WeightSum,
                _ => Divisor::Count,
            },
        };
        Recipe {
            method: self,
            space: match self {
                Self::Knots | Self::KnotsTies => Space::Knots,
                Self::Tspa => Space::Aligned { stages: Stages::Both },
                _ => Space::Update,
            },
            drop: self.drops().then_some(Drop { rate: 0.5, seed: 0, rescale }),
            trim,
            consensus: match self {
                _ if self.elects() => Consensus::Elect(election),
                Self::Average | Self::Knots => Consensus::Mean,
                _ => Consensus::Sum,
            },
            lambda: if self == Self::Tspa { Lambda::LeastSquares } else { Lambda::Fixed(1.0) },
            weights: Vec::new(),
            rank: if self == Self::Additive { Rank::Exact } else { Rank::LargestSource },
            union: false,
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Merge(format!("no merge is called {name:?} (known: {names})"))
        })
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "peft" => Ok(Self::Peft),
            "mergekit" => Ok(Self::Mergekit),
            "original" => Ok(Self::Original),
            _ => Err(Error::Merge(format!("no preset is called {name:?} (known: peft, mergekit, original)"))),
        }
    }
}

impl Recipe {
    /// Resolves what depends on the number of sources, and checks every number.
    ///
    /// # Errors
    /// If there is no source, there are not as many weights as sources, all are zero, one is not finite, a sum that divides is not
    /// positive, or density, drop rate, lambda or rank is outside its range.
    pub fn resolve(&mut self, ids: &[&str]) -> Result<()> {
        let wrong = |why: String| Err(Error::Recipe(why));
        let n = ids.len();
        if n == 0 {
            return wrong("a merge needs at least one adapter".to_owned());
        }
        if self.weights.is_empty() {
            self.weights = vec![1.0; n];
        }
        if self.weights.len() != n {
            return wrong(format!("{} weights for {n} adapters ({}): give one for each", self.weights.len(), ids.join(", ")));
        }
        if let Some((id, weight)) = ids.iter().zip(&self.weights).find(|(_, w)| !w.is_finite()) {
            return wrong(format!("the weight of adapter {id} is {weight}"));
        }
        if self.weights.iter().all(|w| *w == 0.0) {
            return wrong("all weights are zero: nothing would be merged".to_owned());
        }
        if let Some(Trim { density, .. }) = self.trim.filter(|t| !(t.density > 0.0 && t.density <= 1.0)) {
            return wrong(format!("the density is {density}; it is the share of entries that stays, above 0 and at most 1"));
        }
        if let Some(Drop { rate, .. }) = self.drop.filter(|d| !(0.0..=1.0).contains(&d.rate)) {
            return wrong(format!("the drop rate is {rate}; it is a probability, between 0 and 1"));
        }
        if let Some(Drop { seed, .. }) = self.drop.filter(|d| i64::try_from(d.seed).is_err()) {
            return wrong(format!("the seed is {seed}; cards hold seeds below 2^63"));
        }
        if let Lambda::Fixed(lambda) = self.lambda
            && !lambda.is_finite()
        {
            return wrong(format!("lambda is {lambda}"));
        }
        if self.rank == Rank::At(0) {
            return wrong("the rank must be at least 1".to_owned());
        }
        let divides_by_weights = matches!(self.consensus, Consensus::Elect(Election { divisor: Divisor::WeightSum, .. }));
        if divides_by_weights && self.weights.iter().any(|w| *w <= 0.0) {
            let why = "a weight that is not positive would turn the sign of the average of those that agree";
            return wrong(format!("{why}: divide by the count (preset peft) or give positive weights"));
        }
        if matches!(self.space, Space::Aligned { .. }) && (self.drop.is_some() || self.trim.is_some()) {
            return wrong("aligned factors are averaged, not dropped or trimmed".to_owned());
        }
        if matches!(self.space, Space::Aligned { .. }) && self.weights.iter().any(|w| *w != self.weights[0]) {
            return wrong("aligned factors are averaged with equal weights".to_owned());
        }
        let over_adapters = matches!(self.trim, Some(Trim { scope: Scope::Adapter, .. }));
        if self.space == Space::Factors
            && (over_adapters || matches!(self.consensus, Consensus::Elect(e) if e.zero == ZeroVote::Majority))
        {
            return wrong("A and B are merged apart module by module: the original's rules are over whole adapters".to_owned());
        }
        if self.lambda == Lambda::LeastSquares && !matches!(self.space, Space::Aligned { .. }) {
            return wrong("only aligned factors have a target for a least-squares scale".to_owned());
        }
        Ok(())
    }
}
