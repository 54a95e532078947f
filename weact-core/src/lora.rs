//! Low-rank updates (Eq. 1): `W_k = W_0 + (alpha / r) B A`, applied beside the frozen weights and never welded to them.

use std::{collections::BTreeMap, fmt, str::FromStr};

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A linear map that an adapter can change. Named as Hugging Face names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Projection {
    /// Queries.
    QProj,
    /// Keys.
    KProj,
    /// Values.
    VProj,
    /// Attention output.
    OProj,
    /// Gate of the feed-forward part.
    GateProj,
    /// Up-projection of the feed-forward part.
    UpProj,
    /// Down-projection of the feed-forward part.
    DownProj,
    /// Output head; on a tied model the update applies to the head alone.
    LmHead,
}

impl Projection {
    /// The seven projections of a block: what every serving engine loads.
    pub const BLOCK: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// The name in checkpoints and PEFT files.
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
            Self::LmHead => "lm_head",
        }
    }
}

impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Projection {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = Self::BLOCK.into_iter().chain([Self::LmHead]);
        let known: Vec<Self> = all.collect();
        known.iter().copied().find(|p| p.name() == name).ok_or_else(|| {
            let letters = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>();
            let near = known.iter().find(|p| letters(p.name()) == letters(name));
            let hint = near.map_or_else(String::new, |p| format!("; did you mean {p}?"));
            let names: Vec<&str> = known.iter().map(|p| p.name()).collect();
            Error::Model(format!("target {name:?} matches no module (known: {}){hint}", names.join(", ")))
        })
    }
}

/// One adapted module: a projection of a layer, or the output head (which has no layer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Module {
    /// The block, from 0; `None` for the output head.
    pub layer: Option<usize>,
    /// Which map.
    pub projection: Projection,
}

impl Module {
    /// The module's path in a Hugging Face model, as `model.layers.0.self_attn.q_proj`.
    pub fn path(self) -> String {
        use Projection::{DownProj, GateProj, LmHead, UpProj};
        let part = match self.projection {
            GateProj | UpProj | DownProj => "mlp",
            LmHead => return "lm_head".to_owned(),
            _ => "self_attn",
        };
        let layer = self.layer.expect("a block's projection has a layer");
        format!("model.layers.{layer}.{part}.{}", self.projection)
    }
}

/// The factors of one module's update `delta W = scale * a b`.
///
/// # Shapes
/// - `a`: `[d_in, r]`, the transpose of the paper's `A`
/// - `b`: `[r, d_out]`, the transpose of the paper's `B`
#[derive(Clone, Debug)]
pub struct Factors {
    /// Down-projection.
    pub a: Tensor<2>,
    /// Up-projection; zero when training begins.
    pub b: Tensor<2>,
    /// `alpha / r`, or `alpha / sqrt(r)` where rank-stabilised.
    pub scale: f64,
}

impl Factors {
    /// The update's contribution `scale * (x a) b`, in f32 whatever the weights' dtype, returned in `x`'s.
    ///
    /// # Shapes
    /// - `x`: `[n, d_in]`
    /// - output: `[n, d_out]`
    pub fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = x.dtype();
        if dtype == DType::F32 {
            return (x.matmul(self.a.clone()) * self.scale).matmul(self.b.clone());
        }
        (x.cast(DType::F32).matmul(self.a.clone()) * self.scale).matmul(self.b.clone()).cast(dtype)
    }
}

/// The factors of a whole adapter by module.
pub type FactorMap = BTreeMap<Module, Factors>;

/// Checks that every module of `factors` stands in a model with `n_layers` blocks, and that there is at least one: an adapter
/// that changes nothing must not pass for one that is active.
///
/// # Errors
/// If it holds no module, or a layer that the model lacks.
pub fn check_modules(factors: &FactorMap, n_layers: usize) -> Result<()> {
    if factors.is_empty() {
        return Err(Error::Model("the adapter changes no module of the model".to_owned()));
    }
    match factors.keys().find(|m| m.layer.is_some_and(|layer| layer >= n_layers)) {
        Some(module) => Err(Error::Model(format!("the adapter has {} but the model has {n_layers} layers", module.path()))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_matches_nothing_is_refused_with_the_near_name() {
        let error = "qproj".parse::<Projection>().expect_err("no such module").to_string();
        assert!(error.contains("did you mean q_proj?"), "{error}");
        assert_eq!("lm_head".parse::<Projection>().expect("known"), Projection::LmHead);
    }
}
