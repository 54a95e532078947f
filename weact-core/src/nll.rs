//! Negative log-likelihood of supervised tokens: the sum of Eq. 5 and the mean of Appendix E.3, from hidden states.

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{Backbone, lora::FactorMap, model::backbone::head_factors, ops};

/// Which positions of packed sequences predict a supervised token, and which token.
#[derive(Clone, Debug)]
pub struct Targets {
    positions: Tensor<1, Int>, // [n], the position *before* the token
    tokens: Tensor<1, Int>,    // [n]
    n: usize,
}

impl Targets {
    /// Of `rows` (ids and mask, equally long), one after another: token `i` of a row counts where its mask is true and is
    /// predicted from position `i - 1`; token 0 has no prediction and counts for nothing. `None` where nothing counts.
    pub fn new(rows: &[(&[u32], &[bool])], device: &Device) -> Option<Self> {
        let mut positions = Vec::new();
        let mut tokens = Vec::new();
        let mut first = 0;
        for (ids, mask) in rows {
            for i in (1..ids.len()).filter(|i| mask[*i]) {
                positions.push((first + i - 1) as i64);
                tokens.push(i64::from(ids[i]));
            }
            first += ids.len();
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
/// - `hidden`: `[n, d]`, the rows' positions one after another
pub fn per_token(backbone: &Backbone, factors: Option<&FactorMap>, hidden: Tensor<2>, targets: &Targets) -> Scored {
    let supervised = hidden.select(0, targets.positions.clone());
    let tokens = targets.tokens.clone();
    let (nll, best) = ops::token_scores(backbone.operators, supervised, &backbone.head, head_factors(factors), tokens.clone());
    Scored { nll, best, tokens }
}

/// Eq. 5 over one batch: `sum_n m_n * -log pi(x_n | x_<n)`, in nats. Who averages, divides by the supervised tokens of the whole
/// update.
pub fn masked_sum(backbone: &Backbone, factors: Option<&FactorMap>, hidden: Tensor<2>, targets: &Targets) -> Tensor<1> {
    let supervised = hidden.select(0, targets.positions.clone());
    ops::token_nll(backbone.operators, supervised, &backbone.head, head_factors(factors), targets.tokens.clone()).sum()
}

/// E.3's mean over one record's supervised tokens; `None` where there is none.
pub fn masked_mean(nll: &[f32], mask: &[bool]) -> Option<f64> {
    let counted: Vec<f64> = nll.iter().zip(mask).filter(|(_, m)| **m).map(|(x, _)| f64::from(*x)).collect();
    (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64)
}
