//! What a merge has to know of whole adapters before a module can be merged: thresholds and majorities over all modules, and the
//! rotations that modules share.

use std::collections::BTreeMap;

use nalgebra::DMatrix;
use rayon::prelude::*;
use weact_core::lora::{Module, Projection};

use super::{
    Merge,
    recipe::{Consensus, Scope, Space, Stages, Trim, ZeroVote},
    trim::{Cut, Digits, Histogram},
};
use crate::Result;

/// Found once, for all modules.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    /// What stays of each source, where the threshold is one over the whole adapter.
    pub(super) cuts: Vec<Cut>,
    /// The sign of a vote that sums to 0.
    pub(super) tie_is_plus: bool,
    /// Attention's rotations.
    pub(super) rotations: BTreeMap<Module, DMatrix<f64>>,
}

impl Default for Whole {
    fn default() -> Self {
        Self { cuts: Vec::new(), tie_is_plus: true, rotations: BTreeMap::new() }
    }
}

impl Whole {
    pub(super) fn of(merge: &Merge<'_>) -> Result<Self> {
        let mut whole = Self::default();
        if let Some(trim @ Trim { scope: Scope::Adapter, .. }) = merge.recipe.trim {
            whole.cuts = cuts(merge, trim)?;
        }
        if let Consensus::Elect(election) = merge.recipe.consensus
            && election.zero == ZeroVote::Majority
        {
            let mut sum = 0;
            for wave in merge.waves() {
                let signs = wave.par_iter().map(|module| merge.signs(*module, election, &whole.cuts));
                sum += signs.collect::<Result<Vec<i64>>>()?.into_iter().sum::<i64>();
            }
            whole.tie_is_plus = sum > 0;
        }
        if let Space::Aligned { stages: Stages::Macro | Stages::Both } = merge.recipe.space {
            whole.rotations = rotations(merge)?;
        }
        Ok(whole)
    }
}

/// The threshold of each source over all its modules, exactly: two passes count the halves of the magnitudes' bits.
fn cuts(merge: &Merge<'_>, trim: Trim) -> Result<Vec<Cut>> {
    let n = merge.sources.len();
    let mut histograms = vec![Histogram::default(); n];
    for wave in merge.waves() {
        for (place, own) in counted(merge, &wave, |_, values| {
            let mut histogram = Histogram::default();
            histogram.add(values);
            Some(histogram)
        })? {
            histograms[place].merge(&own);
        }
    }
    let first = |histogram: &Histogram| trim.threshold_rank(histogram.n()).map(|k| histogram.descend(k));
    let empty: Vec<Option<Digits>> = histograms.iter().map(first).collect();
    let mut digits = empty.clone();
    for wave in merge.waves() {
        for (place, own) in counted(merge, &wave, |place, values| {
            let mut own = empty[place].clone()?;
            own.add(values);
            Some(own)
        })? {
            digits[place].as_mut().expect("only those are counted").merge(&own);
        }
    }
    Ok(digits.iter().map(|d| d.as_ref().map_or(Cut::ALL, Digits::cut)).collect())
}

/// What `count` finds in each source's tensors of a wave's modules.
fn counted<T: Send>(
    merge: &Merge<'_>,
    wave: &[Module],
    count: impl Fn(usize, &[f32]) -> Option<T> + Sync,
) -> Result<Vec<(usize, T)>> {
    let of_module = |module: &Module| {
        let tensors = merge.tensors(*module)?;
        Ok(tensors.iter().filter_map(|(place, values)| Some((*place, count(*place, values)?))).collect())
    };
    let found: Vec<Vec<(usize, T)>> = wave.par_iter().map(of_module).collect::<Result<_>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// One rotation for `q` and `k` of a layer, one for `v` and `o`.
fn rotations(merge: &Merge<'_>) -> Result<BTreeMap<Module, DMatrix<f64>>> {
    let mut groups: BTreeMap<(Option<usize>, bool), Vec<Module>> = BTreeMap::new();
    for module in merge.shapes.keys() {
        let is_qk = match module.projection {
            Projection::QProj | Projection::KProj => true,
            Projection::VProj | Projection::OProj => false,
            _ => continue,
        };
        groups.entry((module.layer, is_qk)).or_default().push(*module);
    }
    let found: Vec<(Vec<Module>, DMatrix<f64>)> = groups
        .into_values()
        .collect::<Vec<_>>()
        .into_par_iter()
        .map(|group| merge.rotation(&group).map(|x| (group, x)))
        .collect::<Result<_>>()?;
    Ok(found.into_iter().flat_map(|(group, x)| group.into_iter().map(move |m| (m, x.clone()))).collect())
}
