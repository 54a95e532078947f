//! First-order interference of shared updates (Eq. 3): where two capabilities' gradients point against each other, a step for one raises the
//! loss of the other.
//!
//! `L_j(w - eta g_k) - L_j(w) = -eta g_j . g_k + O(eta^2)`
//!
//! Appendix D has no source text. Our reading: inner products and cosines of mini-batch gradients, in all, by layer and by projection, averaged
//! over the pairs of mini-batches; of one capability with itself over the pairs of *different* mini-batches, so that no gradient meets
//! itself. The diagonal then says how alike two mini-batches of one capability are, which is what the other entries are to be held against.
//! Intervals resample mini-batches within each capability; a draw that has one mini-batch twice makes no pair of it either.

use serde::Serialize;
use weact_core::{
    Capability,
    lora::{Module, Projection},
    stats::{Estimate, estimate},
};

use crate::{Error, Result};

/// The gradient of one mini-batch's mean loss.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// Whose tokens the mini-batch supervises.
    pub capability: Capability,
    /// Flat, one for each parameter, in nats per unit of the parameter.
    pub parameters: Vec<Vec<f32>>,
}

/// Which parameters an entry is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// All of them.
    Total,
    /// The modules of one block, from 0.
    Layer(usize),
    /// One projection in all blocks. The output head is here, and in no layer.
    Projection(Projection),
}

impl Part {
    fn has(self, module: Module) -> bool {
        match self {
            Self::Total => true,
            Self::Layer(layer) => module.layer == Some(layer),
            Self::Projection(projection) => module.projection == projection,
        }
    }
}

/// What two capabilities' gradients have to do with each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Over which parameters.
    pub part: Part,
    /// Whose loss.
    pub j: Capability,
    /// Whose step.
    pub k: Capability,
    /// `g_j . g_k`, averaged over pairs of mini-batches. Unknown where a capability would meet itself and has one mini-batch.
    pub product: Option<Estimate>,
    /// The cosine, averaged over the same pairs; unknown where a gradient is zero.
    pub cosine: Option<Estimate>,
}

/// All pairs `j <= k` of the capabilities of `gradients`, in the order in which they first occur, over all parts that `modules` has: the module
/// of each parameter. `seed` draws the resamples.
///
/// # Errors
/// If there is no gradient, two have other parameters, or a number is not finite.
pub fn interference(modules: &[Module], gradients: &[Gradient], seed: u64) -> Result<Vec<Pair>> {
    let groups = groups(modules, gradients)?;
    let mut parts = vec![Part::Total];
    let mut layers: Vec<Part> = modules.iter().filter_map(|module| module.layer).map(Part::Layer).collect();
    let mut projections: Vec<Part> = modules.iter().map(|module| Part::Projection(module.projection)).collect();
    for own in [&mut layers, &mut projections] {
        own.sort();
        own.dedup();
        parts.append(own);
    }
    let mut pairs = Vec::new();
    for part in parts {
        let products = products(modules, gradients, part);
        for (j, (capability, of_j)) in groups.iter().enumerate() {
            pairs.extend(groups[j..].iter().map(|(other, of_k)| {
                let estimate = |value: &dyn Fn(usize, usize) -> Option<f64>| mean_over_pairs(of_j, of_k, seed, value);
                let cosine = |a: usize, b: usize| {
                    let norms = (products[a][a] * products[b][b]).sqrt();
                    (norms > 0.0).then(|| products[a][b] / norms)
                };
                let (j, k) = (capability.clone(), other.clone());
                Pair { part, j, k, product: estimate(&|a, b| Some(products[a][b])), cosine: estimate(&cosine) }
            }));
        }
    }
    Ok(pairs)
}

/// The capabilities with the indices of their gradients.
fn groups(modules: &[Module], gradients: &[Gradient]) -> Result<Vec<(Capability, Vec<usize>)>> {
    let refuse = |i: usize, why: &str| Err(Error::Gradients(format!("mini-batch {i} of {}: {why}", gradients[i].capability)));
    let mut groups: Vec<(Capability, Vec<usize>)> = Vec::new();
    for (i, gradient) in gradients.iter().enumerate() {
        let sizes = |g: &Gradient| g.parameters.iter().map(Vec::len).collect::<Vec<_>>();
        if gradient.parameters.len() != modules.len() || sizes(gradient) != sizes(&gradients[0]) {
            return refuse(i, "it has other parameters than the first");
        }
        if gradient.parameters.iter().flatten().any(|x| !x.is_finite()) {
            return refuse(i, "its gradient is not finite");
        }
        match groups.iter_mut().find(|(capability, _)| *capability == gradient.capability) {
            Some((_, own)) => own.push(i),
            None => groups.push((gradient.capability.clone(), vec![i])),
        }
    }
    if groups.is_empty() { Err(Error::Gradients("there is none".to_owned())) } else { Ok(groups) }
}

/// The inner product of every two gradients over a part, in f64.
fn products(modules: &[Module], gradients: &[Gradient], part: Part) -> Vec<Vec<f64>> {
    let of = |a: &Gradient, b: &Gradient| {
        let own = modules.iter().zip(a.parameters.iter().zip(&b.parameters)).filter(|(module, _)| part.has(**module));
        own.map(|(_, (x, y))| dot(x, y)).sum()
    };
    gradients.iter().map(|a| gradients.iter().map(|b| of(a, b)).collect()).collect()
}

/// The inner product of two flat gradients, in f64.
pub fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

/// The mean of `value` over the pairs of one of `of_j` and one of `of_k` that are not the same.
fn mean_over_pairs(of_j: &[usize], of_k: &[usize], seed: u64, value: &dyn Fn(usize, usize) -> Option<f64>) -> Option<Estimate> {
    let is_same = of_j == of_k;
    let values: Vec<Vec<Option<f64>>> = of_j.iter().map(|a| of_k.iter().map(|b| value(*a, *b)).collect()).collect();
    let sizes = if is_same { vec![of_j.len()] } else { vec![of_j.len(), of_k.len()] };
    estimate(&sizes, seed, &|counts| {
        let (mut sum, mut n) = (0.0, 0.0);
        for (a, row) in values.iter().enumerate() {
            for (b, value) in row.iter().enumerate().filter(|(b, _)| !(is_same && a == *b)) {
                let times = f64::from(counts[0][a]) * f64::from(counts[counts.len() - 1][b]);
                if times > 0.0 {
                    sum += times * (*value)?;
                    n += times;
                }
            }
        }
        (n > 0.0).then(|| sum / n)
    })
}

/// Eq. 3 at one step: what it predicts, and what happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FirstOrder {
    /// Whose loss.
    pub j: Capability,
    /// Whose step.
    pub k: Capability,
    /// The step's length in units of the gradient.
    pub eta: f64,
    /// `-eta g_j . g_k`, in nats per token.
    pub predicted_nats: f64,
    /// `L_j(w - eta g_k) - L_j(w)`, in nats per token.
    pub measured_nats: f64,
}

impl FirstOrder {
    /// What the first order leaves: of the size of `eta^2`.
    pub fn residual_nats(&self) -> f64 {
        self.measured_nats - self.predicted_nats
    }

    /// The exponent with which the residual shrinks from this step to `smaller`: 2 where Eq. 3 holds and both are small enough to have a second
    /// order only, and large enough to stand above rounding. Unknown where a residual is zero or the steps are equal.
    pub fn exponent(&self, smaller: &Self) -> Option<f64> {
        let exponent = (self.residual_nats() / smaller.residual_nats()).abs().ln() / (self.eta / smaller.eta).ln();
        exponent.is_finite().then_some(exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(capability: &str, values: [f32; 4]) -> Gradient {
        let parameters = vec![values[..2].to_vec(), values[2..].to_vec()];
        Gradient { capability: Capability::new(capability).expect("legal"), parameters }
    }

    fn modules() -> [Module; 2] {
        [0, 1].map(|layer| Module { layer: Some(layer), projection: Projection::QProj })
    }

    fn entry(pairs: &[Pair], part: Part, j: &str, k: &str) -> (Option<f64>, Option<f64>) {
        let pair = pairs.iter().find(|pair| pair.part == part && pair.j.as_str() == j && pair.k.as_str() == k).expect("there");
        (pair.product.map(|e| e.value), pair.cosine.map(|e| e.value))
    }

    #[test]
    fn products_and_cosines_are_as_worked_by_hand_by_layer_and_in_all() {
        let gradients = [
            gradient("plan", [1.0, 0.0, 3.0, 4.0]),
            gradient("plan", [0.0, 2.0, 3.0, 4.0]),
            gradient("write", [-1.0, 0.0, 0.0, 0.0]),
            gradient("write", [-3.0, 0.0, 0.0, 0.0]),
        ];
        let pairs = interference(&modules(), &gradients, 0).expect("they fit");
        assert_eq!(entry(&pairs, Part::Layer(0), "plan", "write"), (Some(-1.0), Some(-0.5)));
        assert_eq!(entry(&pairs, Part::Layer(1), "plan", "write"), (Some(0.0), None), "a gradient is zero there");
        // Orthogonal in layer 0, the same in layer 1: with itself the product would be 1 and 4 there.
        assert_eq!(entry(&pairs, Part::Layer(0), "plan", "plan"), (Some(0.0), Some(0.0)));
        assert_eq!(entry(&pairs, Part::Layer(1), "plan", "plan"), (Some(25.0), Some(1.0)));
        assert_eq!(entry(&pairs, Part::Layer(0), "write", "write"), (Some(3.0), Some(1.0)));
        let (product, _) = entry(&pairs, Part::Total, "plan", "plan");
        assert_eq!(product, Some(25.0));
        assert_eq!(
            entry(&pairs, Part::Projection(Projection::QProj), "plan", "plan"),
            entry(&pairs, Part::Total, "plan", "plan")
        );
        let n_parts = 4;
        assert_eq!(pairs.len(), n_parts * 3);
    }

    #[test]
    fn a_capability_with_one_mini_batch_does_not_meet_itself() {
        let gradients = [gradient("plan", [1.0; 4]), gradient("write", [2.0; 4])];
        let pairs = interference(&modules(), &gradients, 0).expect("they fit");
        assert_eq!(entry(&pairs, Part::Total, "plan", "plan"), (None, None));
        let (product, cosine) = entry(&pairs, Part::Total, "plan", "write");
        assert_eq!(product, Some(8.0));
        assert!((cosine.expect("not zero") - 1.0).abs() < 1e-12);
    }

    #[test]
    fn gradients_that_do_not_fit_are_refused() {
        let check = |gradients: &[Gradient], why: &str| {
            let error = interference(&modules(), gradients, 0).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        };
        check(&[], "there is none");
        check(&[gradient("plan", [f32::NAN; 4])], "mini-batch 0 of plan: its gradient is not finite");
        let mut shorter = gradient("write", [1.0; 4]);
        shorter.parameters[1].pop();
        check(&[gradient("plan", [1.0; 4]), shorter], "mini-batch 1 of write: it has other parameters");
    }

    /// `L(w) = w^2 / 2` at 3, with a step along its own gradient: `-9 eta + 4.5 eta^2`.
    #[test]
    fn the_residual_of_a_parabola_is_its_second_order() {
        let capability = Capability::new("plan").expect("legal");
        let at = |eta: f64| {
            let loss = |w: f64| w * w / 2.0;
            let measured_nats = loss(3.0 - eta * 3.0) - loss(3.0);
            FirstOrder { j: capability.clone(), k: capability.clone(), eta, predicted_nats: -eta * 9.0, measured_nats }
        };
        assert!((at(0.5).residual_nats() - 4.5 * 0.25).abs() < 1e-12);
        assert!((at(0.5).exponent(&at(0.25)).expect("known") - 2.0).abs() < 1e-12);
        assert_eq!(at(0.5).exponent(&at(0.5)), None);
    }
}
