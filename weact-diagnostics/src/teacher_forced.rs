//! Teacher-forced scores: what a policy gives to each recorded token, after the recorded tokens before it.

use serde::Serialize;
use weact_core::{
    Backbone,
    lora::FactorMap,
    nll::{Targets, per_token},
    sample::Sample,
};

use crate::Result;

/// What one policy makes of one record. Both lists have one entry for each supervised token, in their order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scored {
    /// The record's id.
    pub id: String,
    /// Negative log-likelihood, in nats.
    pub nll_nats: Vec<f64>,
    /// Whether it is the most likely token at its place.
    pub top1: Vec<bool>,
}

/// Tokens of one forward pass; a longer record has one of its own.
const BATCH_TOKENS: usize = 2048;
/// Logits held at a time: 128 MiB.
const BLOCK_LOGITS: usize = 1 << 25;

/// Scores the supervised tokens of `samples` under the backbone with `factors` active (the backbone alone without), in the order of
/// `samples`. The batches' composition does not change a score but by rounding.
///
/// # Errors
/// If a token is outside the vocabulary, or a log-likelihood is not finite; the message names the record.
pub fn score(backbone: &Backbone, factors: Option<&FactorMap>, samples: &[&Sample]) -> Result<Vec<Scored>> {
    let empty = |s: &&Sample| Scored { id: s.id.clone(), nll_nats: Vec::new(), top1: Vec::new() };
    let mut scored: Vec<Scored> = samples.iter().map(empty).collect();
    for batch in batches(samples) {
        score_batch(backbone, factors, samples, &batch, &mut scored)?;
    }
    Ok(scored)
}

/// Indices of samples, packed in order of length.
fn batches(samples: &[&Sample]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|i| samples[*i].ids.len());
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut n_tokens = 0;
    for i in order {
        let n = samples[i].ids.len();
        match batches.last_mut() {
            Some(batch) if n_tokens + n <= BATCH_TOKENS => batch.push(i),
            _ => {
                batches.push(vec![i]);
                n_tokens = 0;
            }
        }
        n_tokens += n;
    }
    batches
}

fn score_batch(
    backbone: &Backbone,
    factors: Option<&FactorMap>,
    samples: &[&Sample],
    batch: &[usize],
    scored: &mut [Scored],
) -> Result<()> {
    let ids: Vec<&[u32]> = batch.iter().map(|i| samples[*i].ids.as_slice()).collect();
    let hidden = backbone.hidden(&backbone.tokens(&ids)?, factors, None); // [tokens of the batch, d]
    let supervised: Vec<(usize, usize)> = (0..batch.len())
        .flat_map(|row| (1..ids[row].len()).map(move |i| (row, i)))
        .filter(|(row, i)| samples[batch[*row]].mask[*i])
        .collect();
    for block in supervised.chunks((BLOCK_LOGITS / backbone.config.vocab_size).max(1)) {
        let mut masks: Vec<Vec<bool>> = ids.iter().map(|ids| vec![false; ids.len()]).collect();
        block.iter().for_each(|(row, i)| masks[*row][*i] = true);
        let rows: Vec<(&[u32], &[bool])> = ids.iter().zip(&masks).map(|(ids, mask)| (*ids, mask.as_slice())).collect();
        let targets = Targets::new(&rows, &backbone.device()).expect("a block has positions");
        let of_block = per_token(backbone, factors, hidden.clone(), &targets);
        let (nll, best) = (of_block.nll.into_data(), of_block.best.into_data());
        for (((row, i), nll), best) in block.iter().zip(nll.iter::<f32>()).zip(best.iter::<i64>()) {
            let scored = &mut scored[batch[*row]];
            if !nll.is_finite() {
                return Err(not_finite(backbone, &scored.id).into());
            }
            scored.nll_nats.push(f64::from(nll));
            scored.top1.push(best == i64::from(ids[*row][*i]));
        }
    }
    Ok(())
}

fn not_finite(backbone: &Backbone, id: &str) -> weact_core::Error {
    let dtype = format!("{:?}", backbone.dtype()).to_lowercase();
    weact_core::Error::NonFinite { what: "log-likelihood", place: format!(", record {id}"), dtype }
}
