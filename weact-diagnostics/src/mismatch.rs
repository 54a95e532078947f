//! Local effects on matched activations (Appendix E.2): how far a fusion's update is from the specialist's own, on what the specialist
//! computes.
//!
//! The paper leaves open which four positions a record contributes, and what a position's label is. Here:
//!
//! - Position `i - 1` predicts token `i`. The pair is *eligible* where token `i` is supervised, and so is token `i - 1`: a stage's
//!   supervised tokens are the ones that carry its label, so this is the label check at the source position. It leaves out the first
//!   token of each turn, whose source is the template's text after a tool result. [`Positions::check_source`] turns the check off.
//! - Of the eligible pairs, those in the middle of equally long parts are taken ([`Choice::Even`]).
//! - A record is one stage's sample. Where a trajectory has several of one capability, they are averaged first.

use std::collections::BTreeMap;

use burn::tensor::{DType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use weact_core::{
    Backbone,
    lora::{FactorMap, Factors, Module, Projection},
    sample::Sample,
    stats::{Resampling, mean_bootstrap},
};

use crate::Result;

/// The least norm of an own update that `rho` is relative to.
pub const FLOOR: f64 = 1e-12;

/// Which of the eligible positions a record contributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// The middle ones of equally long parts.
    #[default]
    Even,
    /// The first ones.
    First,
}

/// Which positions are looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Positions {
    /// Tokens of a record that are kept, from its beginning.
    pub prefix_tokens: usize,
    /// Positions that a record contributes, or as many as are eligible.
    pub per_record: usize,
    /// Which.
    pub choice: Choice,
    /// Whether the source position must be of the stage as well.
    pub check_source: bool,
}

impl Default for Positions {
    /// App. E.2; the last two are reconstructions.
    fn default() -> Self {
        Self { prefix_tokens: 8192, per_record: 4, choice: Choice::Even, check_source: true }
    }
}

impl Positions {
    /// The source positions of `sample`, ascending; none where nothing is eligible.
    pub fn of(&self, sample: &Sample) -> Vec<usize> {
        let n = sample.ids.len().min(self.prefix_tokens);
        let is_eligible = |source: &usize| sample.mask[source + 1] && (sample.mask[*source] || !self.check_source);
        let eligible: Vec<usize> = (0..n.saturating_sub(1)).filter(is_eligible).collect();
        let n_taken = self.per_record.min(eligible.len());
        match self.choice {
            Choice::First => eligible[..n_taken].to_vec(),
            Choice::Even => (0..n_taken).map(|i| eligible[(2 * i + 1) * eligible.len() / (2 * n_taken)]).collect(),
        }
    }
}

/// Relative local mismatch of a fusion's update on one specialist's activations (Appendix E.2), one value per position:
///
/// `rho = |(dW_m - dW_k) h| / max(|dW_k h|, 1e-12)`
///
/// A fusion without the module has `dW_m = 0` there. Products are in f32 and never form `dW`; norms are in f64.
///
/// # Shapes
/// - `hidden`: `[positions, d_in]`
pub fn relative_mismatch(merged: Option<&Factors>, own: &Factors, hidden: Tensor<2>) -> Vec<f64> {
    let h = hidden.cast(DType::F32);
    let own = own.apply(h.clone()); // [positions, d_out]
    relative(&own, merged.map(|f| f.apply(h)))
}

fn relative(own: &Tensor<2>, merged: Option<Tensor<2>>) -> Vec<f64> {
    let difference = merged.map_or_else(|| own.clone(), |merged| merged - own.clone());
    norms(difference).iter().zip(norms(own.clone())).map(|(d, own)| d / own.max(FLOOR)).collect()
}

/// The length of each row.
fn norms(rows: Tensor<2>) -> Vec<f64> {
    let [_, width] = rows.dims();
    let values: Vec<f64> = rows.into_data().iter::<f32>().map(f64::from).collect();
    values.chunks(width).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect()
}

/// What one record contributes to one fusion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordMismatch {
    /// The sample's id.
    pub id: String,
    /// Positions that it contributes.
    pub n_positions: usize,
    /// Values of `rho`, one for each position and module, whose own update is so small that [`FLOOR`] took its place.
    pub n_floored: usize,
    /// `rho` of each projection that the specialist adapts, averaged over positions, by layer.
    pub layers: Vec<BTreeMap<Projection, f64>>,
}

/// A specialist against several fusions.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// By fusion, in the given order, the records in theirs.
    pub fusions: Vec<Vec<RecordMismatch>>,
    /// Ids of records without an eligible position in their prefix: they are in no average.
    pub left_out: Vec<String>,
}

/// Measures `fusions` against the specialist `own` on its `samples`: one forward pass a record, under `own`.
///
/// Looked at are the projections of the blocks that `own` adapts; the output head is none of them.
///
/// # Errors
/// If a token is outside the vocabulary, or a value is not finite; the message names the record.
pub fn measure(
    backbone: &Backbone,
    own: &FactorMap,
    fusions: &[&FactorMap],
    samples: &[&Sample],
    positions: &Positions,
) -> Result<Measured> {
    let mut measured = Measured { fusions: vec![Vec::new(); fusions.len()], left_out: Vec::new() };
    for sample in samples {
        let sources = positions.of(sample);
        let Some(last) = sources.last() else {
            measured.left_out.push(sample.id.clone());
            continue;
        };
        let hidden = observe(backbone, own, &sample.ids[..=*last], &sources)?;
        let empty = RecordMismatch {
            id: sample.id.clone(),
            n_positions: sources.len(),
            n_floored: 0,
            layers: vec![BTreeMap::new(); backbone.config.n_layers],
        };
        let mut of_fusions = vec![empty; fusions.len()];
        for (module, h) in hidden {
            let h = h.cast(DType::F32);
            let update = own[&module].apply(h.clone()); // [positions, d_out]
            let n_floored = norms(update.clone()).iter().filter(|norm| **norm < FLOOR).count();
            for (record, fusion) in of_fusions.iter_mut().zip(fusions) {
                let rho = relative(&update, fusion.get(&module).map(|f| f.apply(h.clone())));
                let mean = rho.iter().sum::<f64>() / rho.len() as f64;
                if !mean.is_finite() {
                    return Err(not_finite(backbone, module, &sample.id).into());
                }
                record.n_floored += n_floored;
                record.layers[module.layer.expect("a block's module")].insert(module.projection, mean);
            }
        }
        measured.fusions.iter_mut().zip(of_fusions).for_each(|(all, record)| all.push(record));
    }
    Ok(measured)
}

/// What goes into each projection that `own` adapts, at `sources`, `[positions, d_in]`.
fn observe(backbone: &Backbone, own: &FactorMap, ids: &[u32], sources: &[usize]) -> Result<Vec<(Module, Tensor<2>)>> {
    let places: Vec<i64> = sources.iter().map(|i| *i as i64).collect();
    let places = Tensor::<1, Int>::from_data(TensorData::new(places, [sources.len()]), &backbone.device());
    let mut seen = Vec::new();
    let mut look = |module: Module, x: &Tensor<2>| {
        if own.contains_key(&module) {
            seen.push((module, x.clone().select(0, places.clone())));
        }
    };
    // The final hidden states are not needed.
    let _hidden = backbone.hidden_observed(&backbone.tokens(&[ids])?, Some(own), &mut look);
    Ok(seen)
}

fn not_finite(backbone: &Backbone, module: Module, id: &str) -> weact_core::Error {
    let dtype = format!("{:?}", backbone.dtype()).to_lowercase();
    weact_core::Error::NonFinite { what: "update", place: format!(" of {}, record {id}", module.path()), dtype }
}

/// A mean over trajectories.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Average {
    /// None where the specialist adapts nothing there.
    pub mean: Option<f64>,
    /// The bootstrap's central 95 % over trajectories; unknown below two.
    pub interval95: Option<(f64, f64)>,
}

/// One fusion against one specialist (a row of Fig. 13).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Trajectories in the averages.
    pub n_trajectories: usize,
    /// Records in them.
    pub n_records: usize,
    /// Records that contribute fewer positions than asked.
    pub n_short: usize,
    /// Values of `rho` that are relative to [`FLOOR`].
    pub n_floored: usize,
    /// Over layers.
    pub overall: Average,
    /// By layer, over its projections.
    pub layers: Vec<Average>,
    /// By projection, over layers.
    pub projections: BTreeMap<Projection, Average>,
    /// By layer and projection, the mean over trajectories.
    pub modules: Vec<BTreeMap<Projection, f64>>,
}

/// Averages positions and projections within each layer and trajectory, then weighs trajectories equally. `per_record` is how many
/// positions were asked for.
pub fn summarise(records: &[RecordMismatch], per_record: usize, resampling: Resampling) -> Mismatch {
    let mut trajectories: BTreeMap<&str, Vec<&RecordMismatch>> = BTreeMap::new();
    for record in records {
        trajectories.entry(trajectory(&record.id)).or_default().push(record);
    }
    let n_layers = records.first().map_or(0, |r| r.layers.len());
    // The mean of what `of` takes from a record, for each trajectory.
    let values = |of: &dyn Fn(&RecordMismatch) -> Option<f64>| -> Vec<f64> {
        trajectories.values().filter_map(|records| mean(&records.iter().filter_map(|r| of(r)).collect::<Vec<_>>())).collect()
    };
    let average = |of: &dyn Fn(&RecordMismatch) -> Option<f64>| {
        let values = values(of);
        Average { mean: mean(&values), interval95: mean_bootstrap(&values, resampling).map(|law| law.interval(0.95)) }
    };
    let of_layer = |layer: usize| move |r: &RecordMismatch| mean(&r.layers[layer].values().copied().collect::<Vec<_>>());
    let of_projection =
        |p: Projection| move |r: &RecordMismatch| mean(&r.layers.iter().filter_map(|l| l.get(&p).copied()).collect::<Vec<_>>());
    let module = |layer: usize, p: Projection| Some((p, mean(&values(&|r| r.layers[layer].get(&p).copied()))?));
    Mismatch {
        n_trajectories: trajectories.len(),
        n_records: records.len(),
        n_short: records.iter().filter(|r| r.n_positions < per_record).count(),
        n_floored: records.iter().map(|r| r.n_floored).sum(),
        overall: average(&|r| mean(&(0..n_layers).filter_map(|layer| of_layer(layer)(r)).collect::<Vec<_>>())),
        layers: (0..n_layers).map(|layer| average(&of_layer(layer))).collect(),
        projections: Projection::BLOCK
            .into_iter()
            .map(|p| (p, average(&of_projection(p))))
            .filter(|(_, a)| a.mean.is_some())
            .collect(),
        modules: (0..n_layers).map(|layer| Projection::BLOCK.into_iter().filter_map(|p| module(layer, p)).collect()).collect(),
    }
}

/// The trajectory of a sample's id.
fn trajectory(id: &str) -> &str {
    id.rsplit_once('#').map_or(id, |(trajectory, _)| trajectory)
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::fixture::{adapter, backbone, sample};

    fn factors(a: [f32; 2], b: [f32; 2], scale: f64) -> Factors {
        let device = Device::flex();
        Factors { a: Tensor::from_data([[a[0]], [a[1]]], &device), b: Tensor::from_data([b], &device), scale }
    }

    /// `h a` is 1 and 2; the own update is `2 (h a) [3 4]`: `[6 8]` and `[12 16]`, of length 10 and 20. The fusion's is
    /// `(h a') [1 0]` with `h a'` 0 and 12: `[0 0]` and `[12 0]`, which leaves `[6 8]` and `[0 16]`.
    #[test]
    fn rho_is_the_number_worked_by_hand() {
        let own = factors([1.0, 2.0], [3.0, 4.0], 2.0);
        let merged = factors([0.0, 12.0], [1.0, 0.0], 1.0);
        let h = Tensor::<2>::from_data([[1.0, 0.0], [0.0, 1.0]], &Device::flex());
        assert_eq!(relative_mismatch(Some(&merged), &own, h.clone()), [1.0, 16.0 / 20.0]);
        assert_eq!(relative_mismatch(None, &own, h.clone()), [1.0, 1.0]);
        assert_eq!(relative_mismatch(Some(&own), &own, h.clone()), [0.0, 0.0]);
        let nothing = factors([0.0, 0.0], [3.0, 4.0], 2.0);
        assert_eq!(relative_mismatch(Some(&merged), &nothing, h), [0.0, 12.0 / FLOOR]);
    }

    #[test]
    fn a_position_is_eligible_where_it_and_its_target_are_of_the_stage() {
        let record = sample("r#0", vec![1; 14], &[3, 4, 5, 6, 7, 9, 10, 11, 12, 13]);
        let of = |positions: Positions| positions.of(&record);
        let all = Positions { per_record: 99, ..Default::default() };
        // 3 and 9 begin a turn: their sources, 2 and 8, are no part of the stage.
        assert_eq!(of(all.clone()), [3, 4, 5, 6, 9, 10, 11, 12]);
        assert_eq!(of(Positions { check_source: false, ..all.clone() }), [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]);
        assert_eq!(of(Positions::default()), [4, 6, 10, 12]);
        assert_eq!(of(Positions { choice: Choice::First, ..Default::default() }), [3, 4, 5, 6]);
        // Of six tokens the last target is 5.
        assert_eq!(of(Positions { prefix_tokens: 6, ..all.clone() }), [3, 4]);
        assert_eq!([0, 1, 4].map(|prefix_tokens| of(Positions { prefix_tokens, ..all.clone() }).len()), [0, 0, 0]);
    }

    /// `y = h W + update`, against what the next part of the block is given: the queries' input and the down-projection's are checked
    /// through the two residual sums that they end in.
    #[test]
    fn the_observed_inputs_reproduce_the_blocks_output() {
        let backbone = backbone();
        let own = adapter().to_device(&backbone.config, &backbone.device()).expect("it fits");
        let ids: Vec<u32> = (0..30).map(|i| (i * 7 + 3) % backbone.config.vocab_size as u32).collect();
        let tokens = backbone.tokens(&[&ids]).expect("legal ids");
        let mut seen: BTreeMap<Module, Tensor<2>> = BTreeMap::new();
        let mut look = |module: Module, x: &Tensor<2>| drop(seen.insert(module, x.clone()));
        let observed = backbone.hidden_observed(&tokens, Some(&own), &mut look);
        let plain = backbone.hidden(&tokens, Some(&own), None);
        assert_eq!(observed.clone().into_data(), plain.into_data(), "looking on changes nothing");
        assert_eq!(seen.len(), 7 * backbone.config.n_layers);
        let mut x = backbone.embed(tokens.ids);
        for (layer, block) in backbone.blocks.iter().enumerate() {
            for projection in [Projection::OProj, Projection::DownProj] {
                let module = Module { layer: Some(layer), projection };
                let h = seen[&module].clone();
                let update = own.get(&module).map(|f| f.apply(h.clone()));
                let y = h.matmul(block.linears[projection as usize].weight.clone());
                x = x + update.map_or_else(|| y.clone(), |update| y.clone() + update);
            }
        }
        let far = (backbone.final_norm(x) - observed).abs().max().into_scalar::<f32>();
        assert!(far < 1e-4, "{far}");
    }

    #[test]
    fn the_own_adapter_has_no_mismatch_and_an_absent_one_has_all_of_it() {
        let backbone = backbone();
        let own = adapter().to_device(&backbone.config, &backbone.device()).expect("it fits");
        let record = |id: &str, supervised: &[usize]| sample(id, (0..20).map(|i| (i * 11 + 2) % 64).collect(), supervised);
        let samples = [record("a#1", &[3, 4, 5, 6, 7, 8]), record("b#0", &[3, 5]), record("c#0", &[4, 5, 6])];
        let samples: Vec<&Sample> = samples.iter().collect();
        let none = FactorMap::new();
        let measured = measure(&backbone, &own, &[&own, &none], &samples, &Positions::default()).expect("finite");
        assert_eq!(measured.left_out, ["b#0"]);
        for (records, expected) in measured.fusions.iter().zip([0.0, 1.0]) {
            let modules = records.iter().flat_map(|r| r.layers.iter().flat_map(|layer| layer.values()));
            assert!(modules.clone().count() > 0 && modules.clone().all(|rho| *rho == expected), "{records:?}");
            let mismatch = summarise(records, 4, Resampling { n: 100, seed: 0 });
            assert_eq!((mismatch.n_trajectories, mismatch.n_records, mismatch.n_short), (2, 2, 1));
            let same = Average { mean: Some(expected), interval95: Some((expected, expected)) };
            assert!(mismatch.layers.iter().chain(mismatch.projections.values()).all(|a| *a == same), "{mismatch:?}");
        }
    }

    /// Trajectory t has two records, u one: layer 0 is (1 + 3) / 2 = 2 in t (its projections first: 1 = (0 + 2) / 2) and 4 in u.
    #[test]
    fn trajectories_weigh_the_same_however_many_records_they_have() {
        let record = |id: &str, rho: &[(Projection, f64)]| RecordMismatch {
            id: id.to_owned(),
            n_positions: 4,
            n_floored: 0,
            layers: vec![rho.iter().copied().collect(), BTreeMap::new()],
        };
        let (q, up) = (Projection::QProj, Projection::UpProj);
        let records =
            [record("t#0", &[(q, 0.0), (up, 2.0)]), record("t#4", &[(q, 3.0), (up, 3.0)]), record("u#0", &[(q, 4.0), (up, 4.0)])];
        let mismatch = summarise(&records, 4, Resampling { n: 1000, seed: 0 });
        assert_eq!((mismatch.n_trajectories, mismatch.n_records), (2, 3));
        assert_eq!((mismatch.layers[0].mean, mismatch.layers[0].interval95), (Some(3.0), Some((2.0, 4.0))));
        assert_eq!(mismatch.layers[1], Average { mean: None, interval95: None });
        assert_eq!(mismatch.overall, mismatch.layers[0], "a layer without a value is in no average");
        assert_eq!(mismatch.projections[&q].mean, Some((1.5 + 4.0) / 2.0));
        assert_eq!(mismatch.modules[0], BTreeMap::from([(q, 2.75), (up, (2.5 + 4.0) / 2.0)]));
        assert_eq!(summarise(&[], 4, Resampling { n: 10, seed: 0 }).layers, []);
    }
}
