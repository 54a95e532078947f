//! What is odd about a finished adapter: modules without effect, shapes that serving engines refuse or ignore, and whether it changes
//! what the backbone says at all.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{DType, Int, Tensor, TensorData};
use serde::Serialize;
use weact_core::{
    Adapter, Backbone,
    lora::{FactorMap, Factors, Module, Projection},
    sample::Sample,
};

use crate::{
    Result,
    teacher_forced::{self, BLOCK_LOGITS, Scored},
};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The adapter does not do what an adapter is for.
    Error,
    /// It does here, and may not elsewhere, or not wholly.
    Warning,
    /// Worth knowing.
    Note,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad.
    pub level: Level,
    /// A name that scripts may rely on.
    pub code: &'static str,
    /// What was found, and what to do.
    pub message: String,
}

/// The least and the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range<T> {
    /// Least.
    pub min: T,
    /// Greatest.
    pub max: T,
}

/// The updates of one layer's adapted modules, together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerUpdate {
    /// The block; none for the output head.
    pub layer: Option<usize>,
    /// `|dW|_F` over all of them.
    pub update_norm: f64,
    /// `|dW|_F / |W_0|_F`; unknown where the weights are zero.
    pub relative: Option<f64>,
}

/// What the adapter does to the logits at the places that predict supervised tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// Places.
    pub n_tokens: usize,
    /// Largest change of a logit.
    pub max_change: f64,
    /// Mean absolute change of a logit.
    pub mean_change: f64,
    /// Share of the places at which the most likely token stays the same.
    pub top1_agreement: f64,
}

/// How often the adapter leaves as it was taught to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitCalls {
    /// Records.
    pub n: usize,
    /// Records in which every token of the last supervised turn, which holds the exit call, is the most likely one.
    pub n_right: usize,
}

/// An adapter, looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lint {
    /// The adapter's digest.
    pub digest: String,
    /// The adapted projections.
    pub targets: BTreeSet<Projection>,
    /// Over modules.
    pub rank: Range<usize>,
    /// Over modules: the factor before `B A`.
    pub scale: Range<f64>,
    /// By layer; the output head last.
    pub layers: Vec<LayerUpdate>,
    /// Unknown without samples, or where logits are not finite.
    pub effect: Option<Effect>,
    /// Unknown without samples, or where scores are not finite.
    pub exit_calls: Option<ExitCalls>,
    /// Errors first.
    pub findings: Vec<Finding>,
}

impl Lint {
    /// Whether a finding is an error.
    pub fn has_error(&self) -> bool {
        self.findings.iter().any(|f| f.level == Level::Error)
    }
}

/// The values that vLLM takes for `max_lora_rank`: an adapter between two of them is loaded at the cost of the greater.
pub const VLLM_RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 320, 512];

/// Projections that engines compute as one matrix: vLLM and SGLang want all of a stack adapted, or none.
const STACKS: [&[Projection]; 2] =
    [&[Projection::QProj, Projection::KProj, Projection::VProj], &[Projection::GateProj, Projection::UpProj]];

/// Looks at `adapter`. `samples` are held-out ones of its capability; without any, what needs them is unknown and noted.
///
/// # Errors
/// If the adapter does not fit the backbone, or a sample has a token outside the vocabulary.
pub fn lint(backbone: &Backbone, adapter: &Adapter, samples: &[&Sample]) -> Result<Lint> {
    let factors = adapter.to_device(&backbone.config, &backbone.device())?;
    let mut found = Findings(Vec::new());
    let updates: BTreeMap<Module, f64> = factors.iter().map(|(m, f)| (*m, update_norm(f))).collect();
    let targets: BTreeSet<Projection> = factors.keys().map(|m| m.projection).collect();
    let rank = range(adapter.plain().values().map(|f| f.rank));
    let scale = range(factors.values().map(|f| f.scale));
    found.dead(&updates);
    found.engines(adapter, &targets, rank, scale);
    let (effect, exit_calls) = if samples.is_empty() {
        found.add(Level::Note, "no_samples", "no samples: the effect on logits and the exit calls are unknown".to_owned());
        (None, None)
    } else {
        (effect(backbone, &factors, samples)?, exit_calls(backbone, &factors, samples)?)
    };
    if !samples.is_empty() {
        found.behaviour(effect.as_ref(), exit_calls.as_ref());
    }
    let Findings(mut findings) = found;
    findings.sort_by_key(|f| f.level);
    let layers = layers(backbone, &updates);
    Ok(Lint { digest: adapter.digest().to_owned(), targets, rank, scale, layers, effect, exit_calls, findings })
}

fn range<T: PartialOrd + Copy>(values: impl Iterator<Item = T>) -> Range<T> {
    let widen = |r: Range<T>, x: Range<T>| Range {
        min: if x.min < r.min { x.min } else { r.min },
        max: if x.max > r.max { x.max } else { r.max },
    };
    values.map(|x| Range { min: x, max: x }).reduce(widen).expect("an adapter has a module")
}

/// `|scale a b|_F`, from `|a b|_F^2 = sum((a^T a) * (b b^T))`, which never forms the product. The factors are brought to numbers of at
/// most 1 first: squares of large ones overflow in f32.
fn update_norm(factors: &Factors) -> f64 {
    let (a, b) = (factors.a.clone(), factors.b.clone());
    let [largest_a, largest_b] = [&a, &b].map(|f| f.clone().abs().max().into_scalar::<f32>());
    if largest_a == 0.0 || largest_b == 0.0 {
        return 0.0;
    }
    let (a, b) = (a / largest_a, b / largest_b);
    let of_a = a.clone().transpose().matmul(a).into_data(); // [r, r]
    let of_b = b.clone().matmul(b.transpose()).into_data(); // [r, r]
    let square: f64 = of_a.iter::<f32>().zip(of_b.iter::<f32>()).map(|(a, b)| f64::from(a) * f64::from(b)).sum();
    factors.scale.abs() * f64::from(largest_a) * f64::from(largest_b) * square.max(0.0).sqrt()
}

fn weight_square(backbone: &Backbone, module: Module) -> f64 {
    let weight = match module.layer {
        Some(layer) => &backbone.blocks[layer].linears[module.projection as usize].weight,
        None => &backbone.head,
    };
    f64::from(weight.clone().cast(DType::F32).square().sum().into_scalar::<f32>())
}

fn layers(backbone: &Backbone, updates: &BTreeMap<Module, f64>) -> Vec<LayerUpdate> {
    let mut squares: BTreeMap<(bool, Option<usize>), (f64, f64)> = BTreeMap::new();
    for (module, norm) in updates {
        let (update, weight) = squares.entry((module.layer.is_none(), module.layer)).or_default();
        *update += norm * norm;
        *weight += weight_square(backbone, *module);
    }
    let of = |((_, layer), (update, weight)): ((bool, Option<usize>), (f64, f64))| LayerUpdate {
        layer,
        update_norm: update.sqrt(),
        relative: (weight > 0.0).then(|| (update / weight).sqrt()),
    };
    squares.into_iter().map(of).collect()
}

/// `None` where a logit is not finite.
fn effect(backbone: &Backbone, factors: &FactorMap, samples: &[&Sample]) -> Result<Option<Effect>> {
    let vocab = backbone.config.vocab_size;
    let (mut n_tokens, mut n_same, mut max, mut sum) = (0, 0, 0.0_f64, 0.0);
    for batch in teacher_forced::batches(samples) {
        let ids: Vec<&[u32]> = batch.iter().map(|i| samples[*i].ids.as_slice()).collect();
        let tokens = backbone.tokens(&ids)?;
        let [base, adapted] = [None, Some(factors)].map(|f| backbone.hidden(&tokens, f, None)); // [tokens of the batch, d]
        for places in sources(samples, &batch).chunks((BLOCK_LOGITS / vocab).max(1)) {
            let places = Tensor::<1, Int>::from_data(TensorData::new(places.to_vec(), [places.len()]), &backbone.device());
            let before = backbone.logits(base.clone().select(0, places.clone()), None); // [places, vocab]
            let after = backbone.logits(adapted.clone().select(0, places), Some(factors));
            let same = before.clone().argmax(1).equal(after.clone().argmax(1)).int().sum().into_scalar::<i64>();
            let change = (after - before).abs();
            let (of_block, largest) =
                (change.clone().mean_dim(1).sum().into_scalar::<f32>(), change.clone().max().into_scalar::<f32>());
            if !of_block.is_finite() || !largest.is_finite() {
                return Ok(None);
            }
            n_tokens += change.dims()[0];
            n_same += same;
            max = max.max(f64::from(largest));
            sum += f64::from(of_block);
        }
    }
    let n = n_tokens as f64;
    let of_tokens = Effect { n_tokens, max_change: max, mean_change: sum / n, top1_agreement: n_same as f64 / n };
    Ok((n_tokens > 0).then_some(of_tokens))
}

/// The places in a batch that predict a supervised token.
fn sources(samples: &[&Sample], batch: &[usize]) -> Vec<i64> {
    let mut first = 0;
    let mut places = Vec::new();
    for i in batch {
        let mask = &samples[*i].mask;
        places.extend((1..mask.len()).filter(|i| mask[*i]).map(|i| (first + i - 1) as i64));
        first += mask.len();
    }
    places
}

/// `None` where a score is not finite, which [`effect`] tells as well.
fn exit_calls(backbone: &Backbone, factors: &FactorMap, samples: &[&Sample]) -> Result<Option<ExitCalls>> {
    let scored = match teacher_forced::score(backbone, Some(factors), samples) {
        Err(crate::Error::Core(weact_core::Error::NonFinite { .. })) => return Ok(None),
        scored => scored?,
    };
    let with_exit: Vec<(&Sample, &Scored)> = samples.iter().copied().zip(&scored).filter(|(s, _)| last_turn(s) > 0).collect();
    let is_right =
        |(sample, scored): &&(&Sample, &Scored)| scored.top1[scored.top1.len() - last_turn(sample)..].iter().all(|top1| *top1);
    let n_right = with_exit.iter().filter(is_right).count();
    Ok(Some(ExitCalls { n: with_exit.len(), n_right }))
}

/// Scored tokens of the last run of supervised ones: a sample's turns have the tool results between them.
fn last_turn(sample: &Sample) -> usize {
    let scored = &sample.mask[1.min(sample.mask.len())..];
    let end = scored.iter().rposition(|m| *m).map_or(0, |last| last + 1);
    scored[..end].iter().rev().take_while(|m| **m).count()
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, code: &'static str, message: String) {
        self.0.push(Finding { level, code, message });
    }

    fn dead(&mut self, updates: &BTreeMap<Module, f64>) {
        let dead: Vec<String> = updates.iter().filter(|(_, norm)| **norm == 0.0).map(|(m, _)| m.path()).collect();
        let (n, of) = (dead.len(), updates.len());
        let shown = dead.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
        match n {
            0 => {}
            n if n == of => {
                self.add(Level::Error, "no_update", format!("all {of} updates are zero: was it trained, and saved after?"))
            }
            n => self.add(
                Level::Warning,
                "zero_update",
                format!("{n} of {of} updates are zero, as {shown}: nothing is adapted there"),
            ),
        }
    }

    fn engines(&mut self, adapter: &Adapter, targets: &BTreeSet<Projection>, rank: Range<usize>, scale: Range<f64>) {
        let config = adapter.config();
        if rank.min != rank.max {
            let what = format!("ranks from {} to {}: vLLM reads one rank for all modules", rank.min, rank.max);
            self.add(Level::Warning, "rank_not_uniform", what);
        }
        if scale.min != scale.max {
            let what = format!(
                "scales from {} to {}: vLLM reads one scale for all modules, llama.cpp no alpha_pattern",
                scale.min, scale.max
            );
            self.add(Level::Warning, "scale_not_uniform", what);
        } else if !config.rank_pattern.is_empty() || !config.alpha_pattern.is_empty() {
            self.add(
                Level::Warning,
                "patterns",
                "rank_pattern or alpha_pattern: vLLM does not read them, SGLang refuses them".to_owned(),
            );
        }
        if config.rslora {
            self.add(Level::Warning, "rslora", "use_rslora: SGLang and llama.cpp scale by alpha / r all the same".to_owned());
        }
        if !VLLM_RANKS.contains(&rank.max) {
            let next = VLLM_RANKS.iter().find(|r| **r > rank.max);
            let what = next.map_or_else(|| "beyond its last".to_owned(), |r| format!("start it with --max-lora-rank {r}"));
            self.add(Level::Warning, "rank_not_in_vllm", format!("rank {} is none of vLLM's {VLLM_RANKS:?}: {what}", rank.max));
        }
        for stack in STACKS {
            let (has, lacks): (Vec<&Projection>, Vec<&Projection>) = stack.iter().partition(|p| targets.contains(p));
            if !has.is_empty() && !lacks.is_empty() {
                let names = |p: &[&Projection]| p.iter().map(|p| p.name()).collect::<Vec<_>>().join(", ");
                let what = format!("{} without {}: engines compute them as one matrix", names(&has), names(&lacks));
                self.add(Level::Warning, "partial_stack", what);
            }
        }
        if targets.contains(&Projection::LmHead) {
            let what = "lm_head is adapted: engines differ in whether they load that, on tied models above all".to_owned();
            self.add(Level::Note, "lm_head", what);
        }
    }

    fn behaviour(&mut self, effect: Option<&Effect>, exit_calls: Option<&ExitCalls>) {
        match effect {
            None => self.add(
                Level::Error,
                "non_finite",
                "logits under the adapter are not finite, or no token is supervised".to_owned(),
            ),
            Some(effect) if effect.max_change == 0.0 => {
                let what = format!("no logit changes at {} tokens: the adapter has no effect on these samples", effect.n_tokens);
                self.add(Level::Error, "no_effect", what);
            }
            Some(effect) if effect.top1_agreement == 1.0 => {
                let what = format!("the most likely token is the base's at all {} tokens", effect.n_tokens);
                self.add(Level::Warning, "same_choices", what);
            }
            Some(_) => {}
        }
        if let Some(ExitCalls { n, n_right: 0 }) = exit_calls
            && *n > 0
        {
            self.add(Level::Warning, "no_exit", format!("in none of {n} samples is the exit call the most likely turn"));
        }
    }
}

#[cfg(test)]
mod tests {
    use weact_core::adapter::{LoraConfig, PlainFactors};

    use super::*;
    use crate::fixture::{adapter, backbone, sample};

    fn codes(lint: &Lint) -> Vec<(Level, &'static str)> {
        lint.findings.iter().map(|f| (f.level, f.code)).collect()
    }

    fn changed(config: impl FnOnce(&mut LoraConfig), factors: impl Fn(&Module, &mut PlainFactors)) -> Adapter {
        let (mut new, mut plain) = (adapter().config().clone(), adapter().plain().clone());
        config(&mut new);
        plain.iter_mut().for_each(|(module, f)| factors(module, f));
        Adapter::new(new, plain).expect("finite")
    }

    /// `2 [1 2]^T [3 4] = [6 8; 12 16]`, whose squares sum to 500.
    #[test]
    fn the_norm_of_an_update_is_that_of_its_product() {
        let device = burn::tensor::Device::flex();
        let factors =
            Factors { a: Tensor::from_data([[1.0], [2.0]], &device), b: Tensor::from_data([[3.0, 4.0]], &device), scale: 2.0 };
        assert!((update_norm(&factors) - 500.0_f64.sqrt()).abs() < 1e-9);
        let (backbone, adapter) = (backbone(), adapter());
        let lint = lint(&backbone, &adapter, &[]).expect("it fits");
        let mut expected = BTreeMap::new();
        for (module, f) in &adapter.plain().clone() {
            let scale = adapter.config().scale_of(*module);
            let entry =
                |i: usize, j: usize| (0..f.rank).map(|r| f64::from(f.a[i * f.rank + r] * f.b[r * f.d_out + j])).sum::<f64>();
            let square: f64 =
                (0..f.d_in).flat_map(|i| (0..f.d_out).map(move |j| (i, j))).map(|(i, j)| (scale * entry(i, j)).powi(2)).sum();
            *expected.entry(module.layer).or_insert(0.0) += square;
        }
        assert!(!lint.layers.is_empty());
        for layer in &lint.layers {
            let norm = f64::sqrt(expected[&layer.layer]);
            assert!((layer.update_norm / norm - 1.0).abs() < 1e-4, "{layer:?}, expected {norm}");
            assert!(layer.relative.is_some_and(|r| r > 0.0 && r.is_finite()), "{layer:?}");
        }
    }

    #[test]
    fn an_adapter_without_effect_is_an_error_and_a_part_without_a_warning() {
        let backbone = backbone();
        let samples = [sample("a", (0..20).map(|i| (i * 11 + 2) % 64).collect(), &[3, 4, 5, 9, 10])];
        let samples: Vec<&Sample> = samples.iter().collect();
        let whole = lint(&backbone, &adapter(), &samples).expect("it fits");
        assert!(!whole.has_error(), "{:?}", whole.findings);
        assert!(whole.effect.as_ref().is_some_and(|e| e.n_tokens == 5 && e.max_change >= e.mean_change && e.mean_change > 0.0));
        let zero = |f: &mut PlainFactors| f.b.iter_mut().for_each(|x| *x = 0.0);
        let nothing = lint(&backbone, &changed(|_| {}, |_, f| zero(f)), &samples).expect("it fits");
        assert!(codes(&nothing).starts_with(&[(Level::Error, "no_update"), (Level::Error, "no_effect")]), "{nothing:?}");
        assert_eq!(nothing.effect.as_ref().map(|e| (e.max_change, e.top1_agreement)), Some((0.0, 1.0)));
        let first = *adapter().plain().first_key_value().expect("a module").0;
        let part = lint(
            &backbone,
            &changed(
                |_| {},
                |m, f| {
                    if *m == first {
                        zero(f)
                    }
                },
            ),
            &samples,
        )
        .expect("it fits");
        let dead = part.findings.iter().find(|f| f.code == "zero_update").expect("it is found");
        assert!(dead.level == Level::Warning && dead.message.contains(&first.path()), "{dead:?}");
        let huge = lint(&backbone, &changed(|_| {}, |_, f| f.b.iter_mut().for_each(|x| *x *= 1e38)), &samples).expect("it fits");
        assert_eq!((codes(&huge)[0], huge.effect, huge.exit_calls), ((Level::Error, "non_finite"), None, None));
    }

    #[test]
    fn what_engines_would_ignore_is_a_warning() {
        let only = |targets: &[Projection]| {
            let plain =
                adapter().plain().iter().filter(|(m, _)| targets.contains(&m.projection)).map(|(m, f)| (*m, f.clone())).collect();
            let config = LoraConfig { targets: targets.to_vec(), ..adapter().config().clone() };
            lint(&backbone(), &Adapter::new(config, plain).expect("finite"), &[]).expect("it fits")
        };
        let adapted: Vec<Projection> = adapter().config().targets.clone();
        let q = only(&[adapted[0]]);
        assert!(codes(&q).iter().any(|(_, code)| *code == "partial_stack"), "{adapted:?} {q:?}");
        let rslora = lint(&backbone(), &changed(|c| c.rslora = true, |_, _| {}), &[]).expect("it fits");
        assert!(codes(&rslora).contains(&(Level::Warning, "rslora")), "{rslora:?}");
        let path = adapter().plain().first_key_value().expect("a module").0.path();
        let insert = |c: &mut LoraConfig| c.alpha_pattern.extend([(path, 77.0)]);
        let pattern = lint(&backbone(), &changed(insert, |_, _| {}), &[]).expect("it fits");
        assert!(codes(&pattern).contains(&(Level::Warning, "scale_not_uniform")), "{pattern:?}");
        assert!(codes(&pattern).contains(&(Level::Note, "no_samples")), "{pattern:?}");
    }

    #[test]
    fn the_exit_call_is_the_last_supervised_turn() {
        let turns = |supervised: &[usize]| last_turn(&sample("s", vec![1; 8], supervised));
        assert_eq!([turns(&[2, 3, 5, 6, 7]), turns(&[2, 3, 4]), turns(&[0, 1]), turns(&[0]), turns(&[])], [3, 3, 1, 0, 0]);
    }
}
