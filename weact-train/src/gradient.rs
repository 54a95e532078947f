//! The gradient of one update: Eq. 5 summed over a batch's supervised tokens and divided by their number, whatever the
//! micro-batches.

use burn::tensor::Tensor;
use weact_core::{
    Backbone,
    model::{Tokens, backbone::block_factors},
    nll::{self, Targets},
    ops::{self, on_workers},
    sample::Sample,
};

use crate::{
    Result,
    memory::{self, MicroBatch},
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
    /// Share of the positions that went through the blocks and held no token of a sample.
    pub padding: f64,
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

impl Plan {
    /// Whether the blocks of a micro-batch of samples of these lengths are computed again in its backward pass.
    pub fn recomputes(&self, backbone: &Backbone, trainable: &Trainable, lengths: &[usize]) -> bool {
        self.recompute.unwrap_or_else(|| memory::kept_bytes(backbone, trainable, lengths) > KEEP_BYTES)
    }

    /// The micro-batches of a batch, in order; none where none of its tokens is supervised.
    pub fn micro_batches(&self, backbone: &Backbone, trainable: &Trainable, batch: &[&Sample]) -> Vec<MicroBatch> {
        let rows = supervised(batch);
        let parts = micro_batches(&rows, self.micro_rows);
        let n_parts = parts.len();
        let describe = |rows: &[&Sample]| {
            let lengths = lengths(rows);
            let recompute = self.recomputes(backbone, trainable, &lengths);
            let supervised_tokens = rows.iter().map(|s| s.n_supervised()).sum();
            MicroBatch { lengths, supervised_tokens, alone: n_parts == 1, recompute }
        };
        parts.into_iter().map(describe).collect()
    }
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
    let rows = supervised(batch);
    let n_supervised: usize = rows.iter().map(|s| s.n_supervised()).sum();
    if n_supervised == 0 {
        return Ok(None);
    }
    let (mut total, mut n_positions) = (0.0, 0);
    let mut sums: Vec<Option<Tensor<1>>> = vec![None; values.len()];
    for micro in micro_batches(&rows, plan.micro_rows) {
        let recompute = plan.recomputes(backbone, trainable, &lengths(micro));
        let gradient = if recompute { block_by_block } else { whole_graph };
        let part = on_workers(backbone.operators, || gradient(trainable, backbone, values, micro, n_supervised))?;
        total += part.loss;
        n_positions += part.n_positions;
        for (sum, gradient) in sums.iter_mut().zip(part.gradients) {
            accumulate(sum, gradient);
        }
    }
    let n_tokens: usize = lengths(&rows).iter().sum();
    let padding = (n_positions - n_tokens) as f64 / n_positions as f64;
    Ok(Some(BatchGradient { loss: total, n_supervised, padding, gradients: sums }))
}

/// The rows that are computed: one without a supervised token would change nothing.
fn supervised<'a>(batch: &[&'a Sample]) -> Vec<&'a Sample> {
    batch.iter().copied().filter(|s| s.n_supervised() > 0).collect()
}

fn lengths(rows: &[&Sample]) -> Vec<usize> {
    rows.iter().map(|s| s.ids.len()).collect()
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
    if first < rows.len() {
        batches.push(&rows[first..]);
    }
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

/// What one micro-batch adds to its batch.
struct Part {
    loss: f64,
    gradients: Vec<Option<Tensor<1>>>,
    n_positions: usize, // that went through the blocks
}

/// One graph over all blocks.
fn whole_graph(trainable: &Trainable, backbone: &Backbone, values: &[Tensor<1>], rows: &[&Sample], n: usize) -> Result<Part> {
    let (tokens, targets) = inputs(backbone, rows)?;
    let leaves = leaves(values);
    let policy = trainable.policy(backbone, &leaves);
    let mut embedded = trainable.policy(backbone, values).backbone.embed(tokens.ids.clone());
    if matches!(trainable, Trainable::Full) {
        embedded = embedded.autodiff().require_grad();
    }
    let positions = backbone.positions(0, &tokens.lengths);
    let hidden = policy.backbone.hidden_of(embedded.clone(), &positions, policy.factors.as_ref());
    let n_positions = hidden.dims()[0];
    let loss = nll::masked_sum(&policy.backbone, policy.factors.as_ref(), hidden, &targets) / n as f64;
    let gradients = loss.backward();
    let mut of_leaves: Vec<Option<Tensor<1>>> = leaves.iter().map(|leaf| leaf.grad(&gradients)).collect();
    if matches!(trainable, Trainable::Full) {
        let upstream = embedded.grad(&gradients).expect("the first block passes a gradient down");
        drop(gradients);
        add_embedding_gradient(backbone, &mut of_leaves, tokens, upstream);
    }
    Ok(Part { loss: scalar(loss.inner()), gradients: of_leaves, n_positions })
}

/// Adds the gradient of the embedded tokens to the embedding's, which is that of the output head where the two are tied.
fn add_embedding_gradient(backbone: &Backbone, gradients: &mut [Option<Tensor<1>>], tokens: Tokens, upstream: Tensor<2>) {
    let shape = backbone.embedding.dims();
    let embedding = &mut gradients[0]; // the first weight that `Backbone::map` visits
    let of_head = embedding.take().map_or_else(|| Tensor::zeros(shape, &backbone.device()), |g| g.reshape(shape));
    *embedding = Some(ops::add_rows(backbone.operators, of_head, tokens.ids, upstream).flatten(0, 1));
}

/// Activation checkpointing (<https://arxiv.org/abs/1604.06174>) at block boundaries: the forward pass keeps each block's input
/// only; the backward pass runs one block at a time again, with its own small graph.
fn block_by_block(trainable: &Trainable, backbone: &Backbone, values: &[Tensor<1>], rows: &[&Sample], n: usize) -> Result<Part> {
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
    let n_positions = boundaries[0].dims()[0];
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
        let upstream = upstream.expect("the first block passes a gradient down");
        add_embedding_gradient(backbone, &mut sums, tokens, upstream);
    }
    Ok(Part { loss, gradients: sums, n_positions })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burn::tensor::{DType, Device};
    use weact_core::io::{checkpoint::Checkpoint, peft};

    use super::*;
    use crate::trainable::values_of;

    #[test]
    fn a_batch_is_computed_in_the_pool_of_its_caller_to_the_same_bits() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weact-core/tests/golden/qwen3-tied");
        let backbone = Checkpoint::open(&folder, false).expect("whole").load(&Device::flex(), DType::F32).expect("loadable");
        let adapter = peft::read(&folder.join("adapter")).expect("an adapter");
        let sample = |len: u32| Sample {
            id: "row".to_owned(),
            capability: "plan".parse().expect("legal"),
            ids: (0..len).map(|i| 3 + i * 7 % 190).collect(),
            mask: (0..len).map(|i| i % 3 != 0).collect(),
            left_out: Default::default(),
            dropped_exchanges: 0,
        };
        let samples = [90, 9, 47].map(sample);
        let batch: Vec<&Sample> = samples.iter().collect();
        for (trainable, parameters) in [Trainable::from_adapter(&adapter, &Device::flex()), Trainable::full(&backbone)] {
            let values: Vec<Tensor<1>> = parameters.iter().map(|p| p.value.clone()).collect();
            let [alone, three] = [1, 3].map(|n| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads");
                pool.install(|| {
                    assert_eq!(on_workers(backbone.operators, rayon::current_num_threads), n);
                    let plan = Plan { micro_rows: None, recompute: None };
                    batch_gradient(&trainable, &backbone, &values, &batch, plan).expect("it runs").expect("supervised tokens")
                })
            });
            assert_eq!(alone.loss.to_bits(), three.loss.to_bits());
            for (p, (a, b)) in parameters.iter().zip(alone.gradients.into_iter().zip(three.gradients)) {
                assert_eq!(a.map(|g| values_of(&g)), b.map(|g| values_of(&g)), "{}", p.name);
            }
        }
    }
}
