//! The gradient of one update: Eq. 5 summed over a batch's supervised tokens and divided by their number, whatever the
//! micro-batches.

use burn::tensor::{Int, Tensor};
use rayon::prelude::*;
use weact_core::{
    Backbone,
    model::backbone::block_factors,
    nll::{self, Targets},
    sample::Sample,
};

use crate::{
    Result,
    trainable::{Policy, Trainable},
};

/// Above this many bytes of kept activations, blocks are recomputed instead.
const KEEP_BYTES: usize = 2 << 30;

/// Loss and gradient of one batch.
#[derive(Debug)]
pub struct BatchGradient {
    /// Mean negative log-likelihood per supervised token, nats.
    pub loss: f64,
    /// Supervised tokens.
    pub n_supervised: usize,
    /// One per parameter; `None` where no path leads from the loss to the parameter.
    pub gradients: Vec<Option<Tensor<1>>>,
}

/// How a batch is computed; no choice changes the result beyond rounding.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Samples computed at a time.
    pub micro_rows: usize,
    /// Recompute each block in the backward pass; `None` decides by size.
    pub recompute: Option<bool>,
}

/// The gradient over `batch`, or `None` if none of its tokens is supervised.
///
/// # Errors
/// If an id is outside the vocabulary.
pub fn batch_gradient(
    trainable: &Trainable,
    backbone: &Backbone,
    values: &[Tensor<1>],
    batch: &[&Sample],
    plan: Plan,
) -> Result<Option<BatchGradient>> {
    let rows: Vec<&Sample> = batch.iter().copied().filter(|s| s.n_supervised() > 0).collect();
    let n_supervised: usize = rows.iter().map(|s| s.n_supervised()).sum();
    if n_supervised == 0 {
        return Ok(None);
    }
    let micro_batches: Vec<&[&Sample]> = rows.chunks(plan.micro_rows).collect();
    let one = |micro: &&[&Sample]| {
        let recompute = plan.recompute.unwrap_or_else(|| kept_bytes(backbone, micro) > KEEP_BYTES);
        let gradient = if recompute { block_by_block } else { whole_graph };
        gradient(trainable, backbone, values, micro, n_supervised)
    };
    // Micro-batches are independent, and Burn's element-wise CPU operators use one thread each: as many run at a time as there are
    // threads. The sum is in order, so that threads don't change the result.
    let mut total = 0.0;
    let mut sums: Vec<Option<Tensor<1>>> = vec![None; values.len()];
    for wave in micro_batches.chunks(rayon::current_num_threads()) {
        let parts: Vec<(f64, Vec<Option<Tensor<1>>>)> = wave.par_iter().map(one).collect::<Result<_>>()?;
        for (loss, gradients) in parts {
            total += loss;
            for (sum, gradient) in sums.iter_mut().zip(gradients) {
                accumulate(sum, gradient);
            }
        }
    }
    Ok(Some(BatchGradient { loss: total, n_supervised, gradients: sums }))
}

/// What a whole graph keeps for its backward pass, roughly: per block and position some 12 vectors of the stream's width and 5 of
/// the feed-forward's, and four attention matrices per head.
fn kept_bytes(backbone: &Backbone, rows: &[&Sample]) -> usize {
    let config = &backbone.config;
    let width = rows.iter().map(|s| s.ids.len()).max().unwrap_or(0);
    let per_position = 12 * config.hidden_size + 5 * config.intermediate_size + 4 * config.n_heads * width;
    rows.len() * width * per_position * config.n_layers * 4
}

fn accumulate(sum: &mut Option<Tensor<1>>, gradient: Option<Tensor<1>>) {
    *sum = match (sum.take(), gradient) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    };
}

/// The rows' ids, padded, and their supervised positions.
///
/// # Panics
/// If no token of the rows is supervised.
pub(crate) fn inputs(backbone: &Backbone, rows: &[&Sample]) -> Result<(Tensor<2, Int>, Targets)> {
    let ids: Vec<&[u32]> = rows.iter().map(|s| s.ids.as_slice()).collect();
    let ids = backbone.ids(&ids)?;
    let masked: Vec<(&[u32], &[bool])> = rows.iter().map(|s| (s.ids.as_slice(), s.mask.as_slice())).collect();
    let targets = Targets::new(&masked, ids.dims()[1], &backbone.device()).expect("every row has a supervised token");
    Ok((ids, targets))
}

fn leaves(values: &[Tensor<1>]) -> Vec<Tensor<1>> {
    values.iter().map(|v| v.clone().autodiff().require_grad()).collect()
}

fn scalar(tensor: Tensor<1>) -> f64 {
    f64::from(tensor.into_scalar::<f32>())
}

/// One graph over all blocks.
fn whole_graph(
    trainable: &Trainable,
    backbone: &Backbone,
    values: &[Tensor<1>],
    rows: &[&Sample],
    n: usize,
) -> Result<(f64, Vec<Option<Tensor<1>>>)> {
    let (ids, targets) = inputs(backbone, rows)?;
    let leaves = leaves(values);
    let policy = trainable.policy(backbone, &leaves);
    let hidden = policy.backbone.hidden(ids, policy.factors.as_ref(), None);
    let loss = nll::masked_sum(&policy.backbone, policy.factors.as_ref(), hidden, &targets) / n as f64;
    let gradients = loss.backward();
    Ok((scalar(loss.inner()), leaves.iter().map(|leaf| leaf.grad(&gradients)).collect()))
}

/// Activation checkpointing (<https://arxiv.org/abs/1604.06174>) at block boundaries: the forward pass keeps each block's input
/// only; the backward pass runs one block at a time again, with its own small graph.
fn block_by_block(
    trainable: &Trainable,
    backbone: &Backbone,
    values: &[Tensor<1>],
    rows: &[&Sample],
    n: usize,
) -> Result<(f64, Vec<Option<Tensor<1>>>)> {
    let (ids, targets) = inputs(backbone, rows)?;
    let plain = trainable.policy(backbone, values);
    let (rotation, mask) = backbone.positions(0, ids.dims()[1]);
    let block = |policy: &Policy<'_>, layer: usize, x: Tensor<3>| {
        let factors = block_factors(policy.factors.as_ref(), layer);
        policy.backbone.blocks[layer].forward(&policy.backbone.config, x, factors, (&rotation, mask.as_ref()), None)
    };
    let mut boundaries = vec![plain.backbone.embed(ids.clone())];
    for layer in 0..plain.backbone.blocks.len() {
        let x = block(&plain, layer, boundaries[layer].clone());
        boundaries.push(x);
    }
    let mut sums: Vec<Option<Tensor<1>>> = vec![None; values.len()];
    let mut loss = 0.0;
    let mut upstream: Option<Tensor<3>> = None;
    // The last segment is final norm, head and loss; before it the blocks, last to first; the embedding only where it is trained.
    for segment in (0..=plain.backbone.blocks.len()).rev() {
        let leaves = leaves(values);
        let policy = trainable.policy(backbone, &leaves);
        let x = boundaries.pop().expect("one input per segment").autodiff().require_grad();
        let objective = match upstream.take() {
            None => {
                let hidden = policy.backbone.final_norm(x.clone());
                let objective = nll::masked_sum(&policy.backbone, policy.factors.as_ref(), hidden, &targets) / n as f64;
                loss = scalar(objective.clone().inner());
                objective
            }
            Some(upstream) => (block(&policy, segment, x.clone()) * upstream).sum(),
        };
        let gradients = objective.backward();
        for (sum, leaf) in sums.iter_mut().zip(&leaves) {
            accumulate(sum, leaf.grad(&gradients));
        }
        upstream = Some(x.grad(&gradients).expect("a block passes a gradient down"));
    }
    if matches!(trainable, Trainable::Full) {
        let leaves = leaves(values);
        let policy = trainable.policy(backbone, &leaves);
        let upstream = upstream.expect("the first block passes a gradient down");
        let gradients = (policy.backbone.embed(ids) * upstream).sum().backward();
        for (sum, leaf) in sums.iter_mut().zip(&leaves) {
            accumulate(sum, leaf.grad(&gradients));
        }
    }
    Ok((loss, sums))
}
