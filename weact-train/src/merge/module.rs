//! One module's merge: the sources' tensors in the recipe's space, made one and brought to the rank.

use std::borrow::Cow;

use nalgebra::DMatrix;
use serde::Serialize;
use weact_core::{
    adapter::PlainFactors,
    lora::Module,
    ops::{PlainMatrix, product},
};

use super::{
    Merge,
    decompose::{self, Compressed, How, matrix, row_major},
    elect::{self, Ballot, Elected},
    knots,
    mask::Stream,
    recipe::{Consensus, Election, Lambda, Rank, Scope, Space, Stages, Trim},
    trim::{self, Cut},
    tspa::{self, Blocks, Gram},
};
use crate::{Error, Result};

/// What is known of a merged module.
#[derive(Clone, Debug, Serialize)]
pub struct ModuleRecord {
    /// Its path.
    pub module: String,
    /// Frobenius norm of the merged update before it was brought to the rank.
    pub norm: f64,
    /// The share of that norm, squared, which the rank keeps.
    pub kept: f64,
    /// How it came to the rank.
    pub compression: How,
    /// The last singular value kept over the first that is not; near 1 the result is hardly unique.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spectral_gap: Option<f64>,
    /// How far the smallest entry that stayed lies above the largest that was trimmed, relative to it: the closest of the sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trim_margin: Option<f64>,
    /// The closest vote: `|sum| / sum of magnitudes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sign_margin: Option<f64>,
    /// What alignment came to, where factors were aligned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alignment: Option<Alignment>,
}

/// What alignment came to in a module.
#[derive(Clone, Debug, Serialize)]
pub struct Alignment {
    /// The final scale.
    pub lambda: f64,
    /// Relative Frobenius distance of the result to the mean of the updates.
    pub distance_to_mean: f64,
    /// The micro-parameter objective before and after; none where that stage did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro: Option<(f64, f64)>,
    /// One scale a source.
    pub scales: Vec<f64>,
}

/// A source's factors of a module in f64 and in the orientation of updates: `b` `[d_out, r]` with the scale, `a` `[r, d_in]`.
type Pair = (DMatrix<f64>, DMatrix<f64>);

/// A source that has the module: its place among the sources, its factors and scale.
struct Part<'a> {
    place: usize,
    factors: Cow<'a, PlainFactors>,
    scale: f64,
}

/// The merged update before it is brought to the rank.
pub(super) enum Merged {
    /// Row-major, `[d_out, d_in]`.
    Dense(Vec<f32>),
    /// `b` `[d_out, s]` times `a` `[s, d_in]`.
    LowRank(DMatrix<f64>, DMatrix<f64>),
    /// At the rank already.
    AtRank(PlainFactors),
}

/// The closest decisions of a module.
#[derive(Default)]
struct Margins {
    trim: Option<f64>,
    sign: Option<f64>,
}

impl Merge<'_> {
    /// The merged factors of one module, of scale 1 and the merge's rank.
    ///
    /// # Errors
    /// If a source's factors can't be read, or the merged update is not finite.
    pub fn module(&self, module: Module) -> Result<(PlainFactors, ModuleRecord)> {
        let (merged, margins, alignment) = self.merged(module)?;
        let (d_in, rank, d_out) = self.shapes[&module];
        let path = module.path();
        let norm = match &merged {
            Merged::Dense(update) => update.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt(),
            Merged::LowRank(b, a) => low_rank_norm(b, a),
            Merged::AtRank(f) => {
                low_rank_norm(&matrix(&f.b, f.rank, f.d_out).transpose(), &matrix(&f.a, f.d_in, f.rank).transpose())
            }
        };
        if !norm.is_finite() {
            return Err(Error::Merge(format!("the merged update of {path} is not finite: are the weights or lambda too large?")));
        }
        let Compressed { factors, kept, gap, how } = match merged {
            Merged::Dense(update) => decompose::truncate_dense(&update, (d_out, d_in), rank, Stream::new(0, "start", &path)),
            Merged::LowRank(b, a) if b.ncols() <= rank => {
                Compressed { factors: padded(&b, &a, rank), kept: 1.0, gap: None, how: How::Exact }
            }
            Merged::LowRank(b, a) => decompose::truncate_low_rank(&b, &a, rank),
            Merged::AtRank(factors) => Compressed { factors, kept: 1.0, gap: None, how: How::Exact },
        };
        let record = ModuleRecord {
            module: path,
            norm,
            kept,
            compression: how,
            spectral_gap: gap,
            trim_margin: margins.trim,
            sign_margin: margins.sign,
            alignment,
        };
        Ok((factors, record))
    }

    /// The merged update of one module before it is brought to the rank, row-major `[d_out, d_in]`.
    ///
    /// # Errors
    /// As [`Merge::module`].
    pub fn update(&self, module: Module) -> Result<Vec<f32>> {
        Ok(match self.merged(module)?.0 {
            Merged::Dense(update) => update,
            Merged::LowRank(b, a) => row_major(&(b * a)),
            Merged::AtRank(f) => dense(&f, 1.0),
        })
    }

    fn merged(&self, module: Module) -> Result<(Merged, Margins, Option<Alignment>)> {
        let parts = self.parts(module)?;
        let whole_sum = self.recipe.trim.is_none() && self.recipe.drop.is_none();
        match (self.recipe.space, self.recipe.consensus) {
            (Space::Update, Consensus::Sum | Consensus::Mean) if whole_sum => Ok((self.sum(&parts), Margins::default(), None)),
            (Space::Update, _) => {
                let tensors = self.updates(module, &parts);
                let (merged, margins) = self.elementwise(&parts, &tensors);
                Ok((Merged::Dense(merged.values), margins, None))
            }
            (Space::Knots, _) => Ok(self.in_shared_basis(module, &parts)),
            (Space::Factors, _) => Ok(self.factor_wise(module, &parts)),
            (Space::Aligned { .. }, _) => Ok(self.aligned(module, &parts)),
        }
    }

    fn parts(&self, module: Module) -> Result<Vec<Part<'_>>> {
        let mut parts = Vec::new();
        for (place, source) in self.sources.iter().enumerate() {
            if let Some((factors, scale)) = source.factors(module)? {
                parts.push(Part { place, factors, scale });
            }
        }
        Ok(parts)
    }

    /// The weighted sum in the form of its factors, one source's beside another's.
    fn sum(&self, parts: &[Part<'_>]) -> Merged {
        let count = if self.recipe.consensus == Consensus::Mean { parts.len() } else { 1 };
        let weight = |part: &Part<'_>| self.recipe.weights[part.place] * self.lambda() / count as f64;
        let pairs: Vec<Pair> = parts.iter().map(|part| pair(&part.factors, part.scale * weight(part))).collect();
        let (b, a) = stacked(&pairs);
        Merged::LowRank(b, a)
    }

    /// The scaled updates, after the random drop.
    fn updates(&self, module: Module, parts: &[Part<'_>]) -> Vec<Vec<f32>> {
        let update = |part: &Part<'_>| {
            let mut update = dense(&part.factors, part.scale);
            if let Some(drop) = self.recipe.drop {
                drop.apply(&mut update, Stream::new(drop.seed, self.sources[part.place].id, &module.path()));
            }
            update
        };
        parts.iter().map(update).collect()
    }

    /// The tensors that trimming and election see in this module: for the passes over a whole adapter.
    pub(super) fn tensors(&self, module: Module) -> Result<Vec<(usize, Vec<f32>)>> {
        let parts = self.parts(module)?;
        let tensors = match self.recipe.space {
            Space::Knots => self.coordinates(module, &parts).1,
            _ => self.updates(module, &parts),
        };
        Ok(parts.iter().map(|part| part.place).zip(tensors).collect())
    }

    /// The tensors' merge, entry by entry.
    fn elementwise(&self, parts: &[Part<'_>], tensors: &[Vec<f32>]) -> (Elected, Margins) {
        let mut margins = Margins::default();
        let mut ballots = Vec::with_capacity(parts.len());
        for (part, tensor) in parts.iter().zip(tensors) {
            let (ballot, margin) = self.ballot(part.place, tensor, &self.whole.cuts);
            margins.trim = closest(margins.trim, margin);
            ballots.push(ballot);
        }
        let merged = elect::merge(&ballots, self.recipe.consensus, self.whole.tie_is_plus, self.lambda());
        margins.sign = merged.margin;
        (merged, margins)
    }

    fn lambda(&self) -> f64 {
        match self.recipe.lambda {
            Lambda::Fixed(lambda) => lambda,
            Lambda::LeastSquares => 1.0,
        }
    }

    /// The shared basis, and the coordinates after the random drop.
    fn coordinates(&self, module: Module, parts: &[Part<'_>]) -> (DMatrix<f64>, Vec<Vec<f32>>) {
        let pairs: Vec<Pair> = parts.iter().map(|part| pair(&part.factors, part.scale)).collect();
        let shared = knots::shared(&pairs);
        let mut tensors: Vec<Vec<f32>> = shared.coordinates.iter().map(row_major).collect();
        if let Some(drop) = self.recipe.drop {
            for (part, tensor) in parts.iter().zip(&mut tensors) {
                drop.apply(tensor, Stream::new(drop.seed, self.sources[part.place].id, &format!("{}#knots", module.path())));
            }
        }
        (shared.basis, tensors)
    }

    fn in_shared_basis(&self, module: Module, parts: &[Part<'_>]) -> (Merged, Margins, Option<Alignment>) {
        let (basis, tensors) = self.coordinates(module, parts);
        let (merged, margins) = self.elementwise(parts, &tensors);
        let d_in = self.shapes[&module].0;
        let coordinates = matrix(&merged.values, basis.ncols(), d_in);
        (Merged::LowRank(basis, coordinates), margins, None)
    }

    /// `A` and `B` merged apart.
    fn factor_wise(&self, module: Module, parts: &[Part<'_>]) -> (Merged, Margins, Option<Alignment>) {
        let (d_in, rank, d_out) = self.shapes[&module];
        let mut margins = Margins::default();
        let mut half = |is_a: bool| {
            let tensors: Vec<Vec<f32>> = parts
                .iter()
                .map(|part| {
                    let f = &part.factors;
                    // As PEFT's files hold them, so that row-major means the same: A [r, d_in], B [d_out, r].
                    let mut tensor =
                        row_major(&if is_a { matrix(&f.a, d_in, rank) } else { matrix(&f.b, rank, d_out) }.transpose());
                    if let Some(drop) = self.recipe.drop {
                        let name = format!("{}#{}", module.path(), if is_a { "A" } else { "B" });
                        drop.apply(&mut tensor, Stream::new(drop.seed, self.sources[part.place].id, &name));
                    }
                    tensor
                })
                .collect();
            let ballots: Vec<Ballot<'_>> = parts
                .iter()
                .zip(&tensors)
                .map(|(part, tensor)| {
                    let (cut, margin) = self.recipe.trim.map_or((Cut::ALL, None), |t| trim::of_module(tensor, t.density, false));
                    margins.trim = closest(margins.trim, margin);
                    let scaled = self.recipe.weights[part.place] * part.scale;
                    let weight = if is_a { scaled.signum() * scaled.abs().sqrt() } else { scaled.abs().sqrt() };
                    Ballot { values: tensor, cut, weight }
                })
                .collect();
            let lambda = if is_a { 1.0 } else { self.lambda() };
            let merged = elect::merge(&ballots, self.recipe.consensus, true, lambda);
            margins.sign = closest(margins.sign, merged.margin);
            merged.values
        };
        let (a, b) = (half(true), half(false));
        let (a, b) = (row_major(&matrix(&a, rank, d_in).transpose()), row_major(&matrix(&b, d_out, rank).transpose()));
        (Merged::AtRank(PlainFactors { a, b, d_in, rank, d_out }), margins, None)
    }

    /// The average of aligned factors.
    fn aligned(&self, module: Module, parts: &[Part<'_>]) -> (Merged, Margins, Option<Alignment>) {
        let (d_in, rank, d_out) = self.shapes[&module];
        let blocks = Blocks::new(&parts.iter().map(|p| p.factors.rank).collect::<Vec<_>>());
        let (b, a) = balanced(parts);
        let gram = Gram { a: &a * a.transpose(), b: b.tr_mul(&b) };
        let start = self.whole.rotations.get(&module).cloned().unwrap_or_else(|| blocks.padding(rank));
        let (x, scales, micro) = match self.recipe.space {
            Space::Aligned { stages: Stages::Macro } => (start, vec![1.0; parts.len()], None),
            _ => {
                let found = tspa::parameters(&start, &gram, &blocks);
                let ends = (found.history[0], found.history[found.history.len() - 1]);
                (found.x, found.scales, Some(ends))
            }
        };
        let scaled = gram.scaled(&blocks, &scales);
        let lambda = match self.recipe.lambda {
            Lambda::Fixed(lambda) => lambda,
            Lambda::LeastSquares => scaled.least_squares_scale(&x, &blocks),
        };
        let w = 1.0 / parts.len() as f64;
        let (mut turned_b, mut turned_a) = (DMatrix::zeros(d_out, rank), DMatrix::zeros(rank, d_in));
        let mut first = 0;
        for (part, c) in parts.iter().zip(&scales) {
            let r = part.factors.rank;
            let own = x.columns(first, r);
            turned_b += b.columns(first, r) * own.transpose() * (w * c * lambda);
            turned_a += own * a.rows(first, r) * (w / c);
            first += r;
        }
        // |B_s (lambda C - M) A_s|^2 by the Gram matrices of the scaled factors.
        let mut error = x.tr_mul(&x) * (w * w * lambda);
        (0..error.nrows()).for_each(|i| error[(i, i)] -= w);
        let target = (&scaled.b * &scaled.a).trace() * w * w;
        let distance = (&scaled.b * &error * &scaled.a).dot(&error).max(0.0);
        let distance_to_mean = if target > 0.0 { (distance / target).sqrt() } else { 0.0 };
        let alignment = Alignment { lambda, distance_to_mean, micro, scales };
        (Merged::AtRank(padded(&turned_b, &turned_a, rank)), Margins::default(), Some(alignment))
    }

    /// The rotation that the modules of a group share, by attention alignment.
    ///
    /// # Errors
    /// As [`Merge::module`].
    pub(super) fn rotation(&self, group: &[Module]) -> Result<DMatrix<f64>> {
        let mut grams = Vec::new();
        let mut ranks = Vec::new();
        for module in group {
            let parts = self.parts(*module)?;
            let (b, a) = balanced(&parts);
            grams.push(Gram { a: &a * a.transpose(), b: b.tr_mul(&b) });
            ranks = parts.iter().map(|p| p.factors.rank).collect();
        }
        let rank = self.shapes[&group[0]].1;
        Ok(tspa::attention(&grams.iter().collect::<Vec<_>>(), &Blocks::new(&ranks), rank).0)
    }

    /// The sum of a module's elected signs; `cuts` are those of whole adapters, where there are any.
    pub(super) fn signs(&self, module: Module, election: Election, cuts: &[Cut]) -> Result<i64> {
        let tensors = self.tensors(module)?;
        let ballots: Vec<Ballot<'_>> = tensors.iter().map(|(place, tensor)| self.ballot(*place, tensor, cuts).0).collect();
        Ok(elect::sum_of_signs(&ballots, election))
    }

    /// A source's tensor as it goes into the vote, and its trim's margin.
    fn ballot<'t>(&self, place: usize, values: &'t [f32], cuts: &[Cut]) -> (Ballot<'t>, Option<f64>) {
        let (cut, margin) = match self.recipe.trim {
            None => (Cut::ALL, None),
            Some(Trim { scope: Scope::Adapter, .. }) => (cuts[place], None),
            Some(Trim { scope, density }) => trim::of_module(values, density, scope == Scope::ModuleAtLeast),
        };
        (Ballot { values, cut, weight: self.recipe.weights[place] }, margin)
    }

    /// Whether the merge holds exactly at the sum of the sources' ranks.
    pub(super) fn has_low_rank(&self) -> bool {
        let whole_sum = self.recipe.trim.is_none() && self.recipe.drop.is_none();
        match self.recipe.space {
            Space::Update => whole_sum && matches!(self.recipe.consensus, Consensus::Sum | Consensus::Mean),
            Space::Knots => true,
            Space::Factors | Space::Aligned { .. } => self.recipe.rank != Rank::Exact,
        }
    }
}

/// The smaller of two margins.
fn closest(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    [a, b].into_iter().flatten().min_by(f64::total_cmp)
}

/// `scale B A`, row-major `[d_out, d_in]`.
fn dense(f: &PlainFactors, scale: f64) -> Vec<f32> {
    let scaled: Vec<f32> = f.b.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
    let b = PlainMatrix::new(&scaled, f.rank, f.d_out).transposed();
    product(b, PlainMatrix::new(&f.a, f.d_in, f.rank).transposed())
}

fn pair(f: &PlainFactors, scale: f64) -> Pair {
    (matrix(&f.b, f.rank, f.d_out).transpose() * scale, matrix(&f.a, f.d_in, f.rank).transpose())
}

/// `[B_1 .. B_N]` and `[A_1; ..; A_N]`.
fn stacked(pairs: &[Pair]) -> Pair {
    let total = pairs.iter().map(|(b, _)| b.ncols()).sum();
    let mut b = DMatrix::zeros(pairs[0].0.nrows(), total);
    let mut a = DMatrix::zeros(total, pairs[0].1.ncols());
    let mut first = 0;
    for (own_b, own_a) in pairs {
        b.columns_mut(first, own_b.ncols()).copy_from(own_b);
        a.rows_mut(first, own_b.ncols()).copy_from(own_a);
        first += own_b.ncols();
    }
    (b, a)
}

/// Stacked factors with the root of each scale on both sides. A negative scale's sign is in `B`.
fn balanced(parts: &[Part<'_>]) -> Pair {
    let root = |part: &Part<'_>| {
        let (b, a) = pair(&part.factors, 1.0);
        let root = part.scale.abs().sqrt();
        (b * (root * part.scale.signum()), a * root)
    };
    stacked(&parts.iter().map(root).collect::<Vec<_>>())
}

/// Factors as an adapter holds them, zeros up to the rank.
fn padded(b: &DMatrix<f64>, a: &DMatrix<f64>, rank: usize) -> PlainFactors {
    let (d_out, d_in, own) = (b.nrows(), a.ncols(), b.ncols());
    let mut factors = PlainFactors { a: vec![0.0; d_in * rank], b: vec![0.0; rank * d_out], d_in, rank, d_out };
    for r in 0..own {
        (0..d_in).for_each(|i| factors.a[i * rank + r] = a[(r, i)] as f32);
        (0..d_out).for_each(|o| factors.b[r * d_out + o] = b[(o, r)] as f32);
    }
    factors
}

/// `|b a|` in Frobenius norm, by Gram matrices.
fn low_rank_norm(b: &DMatrix<f64>, a: &DMatrix<f64>) -> f64 {
    b.tr_mul(b).dot(&(a * a.transpose())).max(0.0).sqrt()
}
