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
pub(crate) const BLOCK_LOGITS: usize = 1 << 25;

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
pub(crate) fn batches(samples: &[&Sample]) -> Vec<Vec<usize>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{adapter, backbone, sample};

    /// Against the softmax of whole logits; long and short records share batches, and come back in their own order.
    #[test]
    fn a_score_is_that_of_the_record_alone_under_the_active_weights() {
        let backbone = backbone();
        let ids = |n: u32, step: u32| (0..n).map(|i| (i * step + 5) % backbone.config.vocab_size as u32).collect::<Vec<u32>>();
        let samples =
            [sample("long", ids(60, 7), &[1, 30, 31, 59]), sample("short", ids(4, 3), &[0, 2]), sample("none", ids(9, 1), &[])];
        let of_all: Vec<&Sample> = samples.iter().collect();
        let factors = adapter().to_device(&backbone.config, &backbone.device()).expect("it fits");
        let mut scores = Vec::new();
        for factors in [None, Some(&factors)] {
            let scored = score(&backbone, factors, &of_all).expect("legal ids");
            for (sample, scored) in samples.iter().zip(&scored) {
                let hidden = backbone.hidden(&backbone.tokens(&[&sample.ids]).expect("legal ids"), factors, None);
                let logits: Vec<f32> = backbone.logits(hidden, factors).into_data().try_to_vec().expect("f32");
                let supervised = (1..sample.ids.len()).filter(|i| sample.mask[*i]);
                let expected: Vec<(f64, bool)> =
                    supervised.map(|i| from_logits(&logits, backbone.config.vocab_size, i, sample.ids[i] as usize)).collect();
                assert_eq!((&scored.id, scored.nll_nats.len()), (&sample.id, expected.len()));
                for ((nll, top1), (own_nll, own_top1)) in expected.iter().zip(scored.nll_nats.iter().zip(&scored.top1)) {
                    assert!((nll - own_nll).abs() < 1e-4 && top1 == own_top1, "{}: {own_nll}, expected {nll}", sample.id);
                }
            }
            scores.push(scored);
        }
        assert_ne!(scores[0], scores[1]);
    }

    fn from_logits(logits: &[f32], vocab: usize, i: usize, token: usize) -> (f64, bool) {
        let z: Vec<f64> = logits[(i - 1) * vocab..i * vocab].iter().map(|z| f64::from(*z)).collect();
        let largest = z.iter().copied().fold(f64::MIN, f64::max);
        let log_sum = largest + z.iter().map(|z| (z - largest).exp()).sum::<f64>().ln();
        (log_sum - z[token], z[token] == largest)
    }
}
