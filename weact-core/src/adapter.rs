//! An adapter: immutable factors with the settings that give them their scale, identified by content.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    Error, Result,
    io::{checkpoint::dims, tensors::hex},
    lora::{self, FactorMap, Factors, Module, Projection},
    model::Config,
};

/// What decides an adapter's shapes and scales: the part of PEFT's `LoraConfig` that is applied here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank `r` of modules that no pattern names.
    pub rank: usize,
    /// `alpha` of modules that no pattern names.
    pub alpha: f64,
    /// Ranks by module: keys are matched as PEFT matches them, as a whole path or its end.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas by module.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Scale by `alpha / sqrt(r)` (<https://arxiv.org/abs/2312.03732>) instead of `alpha / r`.
    pub rslora: bool,
    /// The adapted projections, in [`Projection`]'s order.
    pub targets: Vec<Projection>,
}

impl LoraConfig {
    /// Rank of a module.
    pub fn rank_of(&self, module: Module) -> usize {
        by_pattern(&self.rank_pattern, module).unwrap_or(self.rank)
    }

    /// The factor before `B A`.
    pub fn scale_of(&self, module: Module) -> f64 {
        let alpha = by_pattern(&self.alpha_pattern, module).unwrap_or(self.alpha);
        let rank = self.rank_of(module) as f64;
        if self.rslora { alpha / rank.sqrt() } else { alpha / rank }
    }

    /// That a module's factors may have this rank.
    pub(crate) fn check_rank(&self, module: Module, rank: usize) -> Result<()> {
        let path = module.path();
        if rank == 0 {
            return Err(Error::Model(format!("{path} has rank 0, the rank must be at least 1")));
        }
        if is_ambiguous(&self.rank_pattern, module) || is_ambiguous(&self.alpha_pattern, module) {
            return Err(Error::Model(format!("two patterns give {path} different values: name it in one of them")));
        }
        match self.rank_of(module) {
            told if told != rank => Err(Error::Model(format!("{path} has rank {rank}, the adapter's config says {told}"))),
            _ => Ok(()),
        }
    }

    /// The modules that these targets name in a model, in order.
    ///
    /// # Errors
    /// If there is no target or no rank.
    pub fn modules(&self, config: &Config) -> Result<Vec<Module>> {
        if self.targets.is_empty() {
            return Err(Error::Model("the adapter has no targets: nothing would be trained".to_owned()));
        }
        if self.rank == 0 || self.rank_pattern.values().any(|r| *r == 0) {
            return Err(Error::Model("the rank must be at least 1".to_owned()));
        }
        let blocks = self.targets.iter().filter(|p| **p != Projection::LmHead);
        let mut modules: Vec<Module> =
            blocks.flat_map(|p| (0..config.n_layers).map(|layer| Module { layer: Some(layer), projection: *p })).collect();
        if self.targets.contains(&Projection::LmHead) {
            modules.push(Module { layer: None, projection: Projection::LmHead });
        }
        modules.sort();
        Ok(modules)
    }
}

/// The values of the patterns that name `module`: as in PEFT, a key names the path that it equals or is the end of, after a dot.
fn matches<T: Copy>(patterns: &BTreeMap<String, T>, module: Module) -> impl Iterator<Item = T> {
    let path = module.path();
    patterns.iter().filter(move |(key, _)| path == **key || path.ends_with(&format!(".{key}"))).map(|(_, value)| *value)
}

fn by_pattern<T: Copy>(patterns: &BTreeMap<String, T>, module: Module) -> Option<T> {
    matches(patterns, module).next()
}

/// Of several keys PEFT takes the first in the file, an order that is not kept here: they may not differ.
fn is_ambiguous<T: Copy + PartialEq>(patterns: &BTreeMap<String, T>, module: Module) -> bool {
    by_pattern(patterns, module).is_some_and(|first| matches(patterns, module).any(|value| value != first))
}

/// One module's factors as plain numbers, in the orientation of [`Factors`].
#[derive(Clone, Debug, PartialEq)]
pub struct PlainFactors {
    /// `[d_in, r]`, row-major.
    pub a: Vec<f32>,
    /// `[r, d_out]`, row-major.
    pub b: Vec<f32>,
    /// `d_in`
    pub d_in: usize,
    /// `r`
    pub rank: usize,
    /// `d_out`
    pub d_out: usize,
}

/// A finished adapter. It is never changed: training makes a new one.
///
/// Invariant: the digest is that of configuration and factors, so that equal digests mean equal weights.
#[derive(Clone, Debug)]
pub struct Adapter {
    config: LoraConfig,
    plain: BTreeMap<Module, PlainFactors>,
    digest: String,
}

impl Adapter {
    /// An adapter of these factors.
    ///
    /// # Errors
    /// If there is no module, a module's rank is 0 or not the config's, two patterns give it different values, or a number is
    /// not finite.
    pub fn new(config: LoraConfig, plain: BTreeMap<Module, PlainFactors>) -> Result<Self> {
        if plain.is_empty() {
            return Err(Error::Model("an adapter needs at least one module".to_owned()));
        }
        for (module, f) in &plain {
            config.check_rank(*module, f.rank)?;
            let path = module.path();
            assert_eq!((f.a.len(), f.b.len()), (f.d_in * f.rank, f.rank * f.d_out), "{path}'s factors have their sizes");
            if f.a.iter().chain(&f.b).any(|x| !x.is_finite()) {
                return Err(Error::Model(format!("the adapter's factors of {path} are not finite")));
            }
        }
        let digest = digest(&config, &plain);
        Ok(Self { config, plain, digest })
    }

    /// Shapes and scales.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// SHA-256 over canonical config and tensors: the adapter's identity.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The factors by module.
    pub fn plain(&self) -> &BTreeMap<Module, PlainFactors> {
        &self.plain
    }

    /// Trainable numbers.
    pub fn n_parameters(&self) -> usize {
        self.plain.values().map(|f| f.a.len() + f.b.len()).sum()
    }

    /// Checks every module's dimensions against a model, and that no module of the model that the targets name is without factors.
    ///
    /// # Errors
    /// If a module is not in the model, has other dimensions there, or is missing.
    pub fn check_fits(&self, model: &Config) -> Result<()> {
        let wrong = |module: &Module, f: &PlainFactors| {
            let absent = module.layer.is_some_and(|layer| layer >= model.n_layers);
            absent || dims(model, module.projection) != (f.d_in, f.d_out)
        };
        let bad: Vec<String> = self
            .plain
            .iter()
            .filter(|(m, f)| wrong(m, f))
            .map(|(m, f)| format!("{} [{}, {}]", m.path(), f.d_in, f.d_out))
            .collect();
        let two = |names: &[String]| names.iter().take(2).cloned().collect::<Vec<_>>().join(", ");
        if !bad.is_empty() {
            let (n, of, shown) = (bad.len(), self.plain.len(), two(&bad));
            return Err(Error::Model(format!("{n} of the adapter's {of} modules don't fit the model, as {shown}")));
        }
        let targets = self.config.modules(model)?;
        let missing: Vec<String> = targets.iter().filter(|m| !self.plain.contains_key(m)).map(|m| m.path()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let (n, of, shown) = (missing.len(), targets.len(), two(&missing));
        Err(Error::Model(format!("the adapter lacks {n} of the {of} modules that its targets name, as {shown}")))
    }

    /// The factors on a device.
    ///
    /// # Errors
    /// If they don't fit `model`.
    pub fn to_device(&self, model: &Config, device: &Device) -> Result<FactorMap> {
        self.check_fits(model)?;
        let place = |(module, f): (&Module, &PlainFactors)| {
            let a = Tensor::from_data(TensorData::new(f.a.clone(), [f.d_in, f.rank]), device);
            let b = Tensor::from_data(TensorData::new(f.b.clone(), [f.rank, f.d_out]), device);
            (*module, Factors { a, b, scale: self.config.scale_of(*module) })
        };
        let factors: FactorMap = self.plain.iter().map(place).collect();
        lora::check_modules(&factors, model.n_layers)?;
        Ok(factors)
    }
}

fn digest(config: &LoraConfig, plain: &BTreeMap<Module, PlainFactors>) -> String {
    let mut identity = Identity::new(config);
    plain.iter().for_each(|(module, f)| identity.add(*module, f));
    identity.finish()
}

/// An adapter's digest in the making: configuration, then the modules in order.
pub(crate) struct Identity(Sha256);

impl Identity {
    pub(crate) fn new(config: &LoraConfig) -> Self {
        let canonical = serde_json::to_string(config).expect("a plain struct serialises");
        Self(Sha256::new_with_prefix(canonical))
    }

    pub(crate) fn add(&mut self, module: Module, f: &PlainFactors) {
        self.0.update(format!("\0{}\0{}\0{}\0{}\0", module.path(), f.d_in, f.rank, f.d_out));
        for value in f.a.iter().chain(&f.b) {
            self.0.update(value.to_le_bytes());
        }
    }

    pub(crate) fn finish(self) -> String {
        hex(&self.0.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_alpha_over_r_or_over_its_root() {
        let config = |rslora| LoraConfig {
            rank: 16,
            alpha: 16.0,
            rank_pattern: BTreeMap::from([("down_proj".to_owned(), 4)]),
            alpha_pattern: BTreeMap::from([("layers.1.self_attn.q_proj".to_owned(), 8.0)]),
            rslora,
            targets: vec![Projection::QProj, Projection::DownProj],
        };
        let module = |layer, projection| Module { layer: Some(layer), projection };
        assert_eq!(config(false).scale_of(module(0, Projection::QProj)), 1.0);
        assert_eq!(config(true).scale_of(module(0, Projection::QProj)), 4.0);
        assert_eq!(config(false).scale_of(module(1, Projection::QProj)), 0.5);
        assert_eq!(config(true).scale_of(module(0, Projection::DownProj)), 8.0);
    }
}
