//! How far the logits of two policies are apart, where they should be the same function: an adapter beside its backbone, and the
//! checkpoint that it was folded into.

use burn::tensor::Tensor;
use weact_core::{
    Backbone, Result,
    lora::{FactorMap, Factors},
    model::backbone::head_factors,
    ops::{self, Operators},
};

/// Logits compared at a time: 64 MiB of each policy.
const BLOCK_LOGITS: usize = 1 << 24;

/// What one policy makes of some rows, in a form that is small beside the policy: the final hidden states, and the head that turns
/// them into logits. The policy itself can go before the other one is loaded.
#[derive(Clone, Debug)]
pub struct Recorded {
    hidden: Vec<Tensor<2>>, // [n, d] of each row
    head: Tensor<2>,        // [d, vocab]
    head_factors: Option<Factors>,
    operators: Operators,
}

/// Runs `rows` of token ids through a policy.
///
/// # Errors
/// If a row has an id outside the vocabulary, or more tokens than the model has positions.
pub fn record(backbone: &Backbone, factors: Option<&FactorMap>, rows: &[Vec<u32>]) -> Result<Recorded> {
    let hidden = |row: &Vec<u32>| Ok(backbone.hidden(&backbone.tokens(&[row])?, factors, None));
    Ok(Recorded {
        hidden: rows.iter().map(hidden).collect::<Result<_>>()?,
        head: backbone.head.clone(),
        head_factors: head_factors(factors).cloned(),
        operators: backbone.operators,
    })
}

/// How far two policies are apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitGap {
    /// Positions compared.
    pub n_positions: usize,
    /// The largest `|logit - logit|` of all positions and tokens; NaN if a logit is.
    pub max_difference: f64,
    /// Share of positions at which both have the same most likely token; none without positions.
    pub top1_agreement: Option<f64>,
}

/// The gap between two policies on the same rows.
///
/// # Panics
/// If the rows or the vocabularies are not of the same size.
pub fn logit_gap(one: &Recorded, other: &Recorded) -> LogitGap {
    assert_eq!(one.hidden.len(), other.hidden.len(), "both policies saw the same rows");
    let block = (BLOCK_LOGITS / one.head.dims()[1]).max(1);
    let (mut n_positions, mut n_agree, mut max_difference) = (0, 0, 0.0_f64);
    for (a, b) in one.hidden.iter().zip(&other.hidden) {
        assert_eq!(a.dims()[0], b.dims()[0], "both policies saw the same rows");
        for (a, b) in a.clone().split(block, 0).into_iter().zip(b.clone().split(block, 0)) {
            let (a, b) = (logits(one, a), logits(other, b)); // [block, vocab]
            n_positions += a.dims()[0];
            let agree = a.clone().argmax(1).equal(b.clone().argmax(1)).int().sum();
            n_agree += agree.into_scalar::<i64>() as usize;
            let differences = (a - b).abs().into_data();
            // Not `f64::max`, which passes NaN over.
            for difference in differences.iter::<f32>().map(f64::from) {
                max_difference = if difference > max_difference || difference.is_nan() { difference } else { max_difference };
            }
        }
    }
    let top1_agreement = (n_positions > 0).then(|| n_agree as f64 / n_positions as f64);
    LogitGap { n_positions, max_difference, top1_agreement }
}

fn logits(recorded: &Recorded, hidden: Tensor<2>) -> Tensor<2> {
    ops::linear(recorded.operators, hidden, &recorded.head, recorded.head_factors.as_ref(), None)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// A policy of two tokens whose logits are its hidden states.
    fn recorded(rows: &[[[f32; 2]; 2]]) -> Recorded {
        let device = Device::flex();
        Recorded {
            hidden: rows.iter().map(|row| Tensor::from_data(*row, &device)).collect(),
            head: Tensor::from_data([[1.0_f32, 0.0], [0.0, 1.0]], &device),
            head_factors: None,
            operators: Operators::Composed,
        }
    }

    #[test]
    fn the_largest_difference_and_the_share_of_equal_choices() {
        let one = recorded(&[[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.25], [2.0, 0.0]]]);
        let other = recorded(&[[[1.0, 0.25], [0.75, 0.5]], [[0.5, 0.25], [2.0, 0.0]]]);
        let expected = LogitGap { n_positions: 4, max_difference: 0.75, top1_agreement: Some(0.75) };
        assert_eq!(logit_gap(&one, &other), expected);
        let none = recorded(&[]);
        assert_eq!(logit_gap(&none, &none), LogitGap { n_positions: 0, max_difference: 0.0, top1_agreement: None });
    }

    #[test]
    fn a_logit_that_is_no_number_is_not_passed_over() {
        let one = recorded(&[[[1.0, 0.0], [0.0, 1.0]]]);
        let broken = recorded(&[[[f32::NAN, 0.0], [0.0, 9.0]]]);
        assert!(logit_gap(&one, &broken).max_difference.is_nan());
    }
}
