//! Negative log-likelihood of supervised tokens: the sum of Eq. 5 and the mean of Appendix E.3, from hidden states.

use burn::tensor::{Device, Int, Tensor, TensorData, activation::log_softmax};

use crate::{Backbone, lora::FactorMap};

/// Which positions of a padded batch predict a supervised token, and which token.
#[derive(Clone, Debug)]
pub struct Targets {
    positions: Tensor<1, Int>, // [n], flat index of the position *before* the token
    tokens: Tensor<1, Int>,    // [n]
    n: usize,
}

impl Targets {
    /// Of `rows` (ids and mask, equally long), padded to `width`: token `i` of a row counts where its mask is true and is
    /// predicted from position `i - 1`; token 0 has no prediction and counts for nothing. `None` where nothing counts.
    pub fn new(rows: &[(&[u32], &[bool])], width: usize, device: &Device) -> Option<Self> {
        let mut positions = Vec::new();
        let mut tokens = Vec::new();
        for (row, (ids, mask)) in rows.iter().enumerate() {
            for i in (1..ids.len()).filter(|i| mask[*i]) {
                positions.push((row * width + i - 1) as i64);
                tokens.push(i64::from(ids[i]));
            }
        }
        let n = tokens.len();
        let place = |values: Vec<i64>| Tensor::from_data(TensorData::new(values, [n]), device);
        (n > 0).then(|| Self { positions: place(positions), tokens: place(tokens), n })
    }

    /// How many tokens count.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Whether none does: never true, [`Targets::new`] gives `None` then.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}

/// Supervised tokens under a policy.
#[derive(Clone, Debug)]
pub struct Scored {
    /// Negative log-likelihood of each, in nats, `[n]`.
    pub nll: Tensor<1>,
    /// Id of the most likely token at each place, `[n]`.
    pub best: Tensor<1, Int>,
    tokens: Tensor<1, Int>, // [n]
}

impl Scored {
    /// How many supervised tokens are the most likely ones.
    pub fn n_top1(&self) -> usize {
        let hits = self.best.clone().equal(self.tokens.clone()).int().sum();
        hits.into_scalar::<i64>() as usize
    }
}

/// Scores each supervised token. Logits are computed for supervised positions only.
///
/// # Shapes
/// - `hidden`: `[rows, width, d]`
pub fn per_token(backbone: &Backbone, factors: Option<&FactorMap>, hidden: Tensor<3>, targets: &Targets) -> Scored {
    let logits = supervised_logits(backbone, factors, hidden, targets);
    let best = logits.clone().argmax(1).squeeze_dim::<1>(1); // [n]
    Scored { nll: negative_log_likelihood(logits, targets), best, tokens: targets.tokens.clone() }
}

/// Eq. 5 over one batch: `sum_n m_n * -log pi(x_n | x_<n)`, in nats. Who averages, divides by the supervised tokens of the whole
/// update.
pub fn masked_sum(backbone: &Backbone, factors: Option<&FactorMap>, hidden: Tensor<3>, targets: &Targets) -> Tensor<1> {
    negative_log_likelihood(supervised_logits(backbone, factors, hidden, targets), targets).sum()
}

fn supervised_logits(backbone: &Backbone, factors: Option<&FactorMap>, hidden: Tensor<3>, targets: &Targets) -> Tensor<2> {
    let [rows, width, d] = hidden.dims();
    let supervised = hidden.reshape([rows * width, d]).select(0, targets.positions.clone()); // [n, d]
    backbone.logits(supervised, factors) // [n, vocab]
}

fn negative_log_likelihood(logits: Tensor<2>, targets: &Targets) -> Tensor<1> {
    let of_tokens = log_softmax(logits, 1).gather(1, targets.tokens.clone().unsqueeze_dim::<2>(1)); // [n, 1]
    of_tokens.squeeze_dim::<1>(1).neg() // [n]
}

/// E.3's mean over one record's supervised tokens; `None` where there is none.
pub fn masked_mean(nll: &[f32], mask: &[bool]) -> Option<f64> {
    let counted: Vec<f64> = nll.iter().zip(mask).filter(|(_, m)| **m).map(|(x, _)| f64::from(*x)).collect();
    (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64)
}
