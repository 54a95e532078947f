//! The gradient of one update: Eq. 5 summed over a batch's supervised tokens and divided by their number, whatever the
//! micro-batches.

use burn::tensor::Tensor;
use weact_core::{
    Backbone,
    model::{Tokens, backbone::block_factors},
    nll::{self, Targets},
    ops::on_workers,
    sample::Sample,
};

use crate::{
    Result, memory,
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
    /// Samples computed at a time, packed into one row without padding; `None` packs up to [`MICRO_TOKENS`].
    pub micro_rows: Option<usize>,
    /// Recompute each block in the backward pass; `None` decides by size.
    pub recompute: Option<bool>,
}

/// Tokens computed at a time by default: more make the products no faster.
pub const MICRO_TOKENS: usize = 2048;

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
    let mut total = 0.0;
    let mut sums: Vec<Option<Tensor<1>>> = vec![None; values.len()];
    for micro in micro_batches(&rows, plan.micro_rows) {
        let lengths: Vec<usize> = micro.iter().map(|s| s.ids.len()).collect();
        let kept = || memory::kept_bytes(&backbone.config, trainable, &lengths);
        let recompute = plan.recompute.unwrap_or_else(|| kept() > KEEP_BYTES);
        let gradient = if recompute { block_by_block } else { whole_graph };
        let (loss, gradients) = on_workers(|| gradient(trainable, backbone, values, micro, n_supervised))?;
        total += loss;
        for (sum, gradient) in sums.iter_mut().zip(gradients) {
            accumulate(sum, gradient);
        }
    }
    Ok(Some(BatchGradient { loss: total, n_supervised, gradients: sums }))
}

/// Runs of rows that are computed together, in order.
pub(crate) fn micro_batches<'a, 'b>(rows: &'a [&'b Sample], micro_rows: Option<usize>) -> Vec<&'a [&'b Sample]> {
    if let Some(n) = micro_rows {
        return rows.chunks(n).collect();
    }
    let (mut batches, mut first, mut tokens) = (Vec::new(), 0, 0);
    for (i, row) in rows.iter().enumerate() {
        if i > first && tokens + row.ids.len() > MICRO_TOKENS {
            batches.push(&rows[first..i]);
            (first, tokens) = (i, 0);
        }
        tokens += row.ids.len();
    }
    batches.push(&rows[first..]);
    batches
}

fn accumulate(sum: &mut Option<Tensor<1>>, gradient: Option<Tensor<1>>) {
    *sum = match (sum.take(), gradient) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    };
}

/// The rows' ids and their supervised positions.
///
/// # Panics
/// If no token of the rows is supervised.
pub(crate) fn inputs(backbone: &Backbone, rows: &[&Sample]) -> Result<(Tokens, Targets)> {
    let ids: Vec<&[u32]> = rows.iter().map(|s| s.ids.as_slice()).collect();
    let tokens = backbone.tokens(&ids)?;
    let masked: Vec<(&[u32], &[bool])> = rows.iter().map(|s| (s.ids.as_slice(), s.mask.as_slice())).collect();
    let targets = Targets::new(&masked, &backbone.device()).expect("every row has a supervised token");
    Ok((tokens, targets))
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
    let (tokens, targets) = inputs(backbone, rows)?;
    let leaves = leaves(values);
    let policy = trainable.policy(backbone, &leaves);
    let hidden = policy.backbone.hidden(&tokens, policy.factors.as_ref(), None);
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
    let (tokens, targets) = inputs(backbone, rows)?;
    let plain = trainable.policy(backbone, values);
    let positions = backbone.positions(0, &tokens.lengths);
    let block = |policy: &Policy<'_>, layer: usize, x: Tensor<2>| {
        let factors = block_factors(policy.factors.as_ref(), layer);
        let how = (&backbone.config, backbone.operators);
        policy.backbone.blocks[layer].forward(how, x, factors, &positions, None)
    };
    let mut boundaries = vec![plain.backbone.embed(tokens.ids.clone())];
    for layer in 0..plain.backbone.blocks.len() {
        let x = block(&plain, layer, boundaries[layer].clone());
        boundaries.push(x);
    }
    let mut sums: Vec<Option<Tensor<1>>> = vec![None; values.len()];
    let mut loss = 0.0;
    let mut upstream: Option<Tensor<2>> = None;
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
        let gradients = (policy.backbone.embed(tokens.ids) * upstream).sum().backward();
        for (sum, leaf) in sums.iter_mut().zip(&leaves) {
            accumulate(sum, leaf.grad(&gradients));
        }
    }
    Ok((loss, sums))
}
