//! What is trained, as flat parameters, and the policy that they make.

use std::{borrow::Cow, collections::BTreeMap};

use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weact_core::{
    Adapter, Backbone,
    adapter::{LoraConfig, PlainFactors},
    io::checkpoint::dims,
    lora::{FactorMap, Factors, Module},
    model::{Config, Parameter as Weight},
};

use crate::{Result, optim::Parameter};

/// What is trained.
#[derive(Clone, Debug)]
pub enum Trainable {
    /// The factors of one adapter; the backbone is frozen.
    Lora {
        /// Shapes and scales.
        config: LoraConfig,
        /// The adapted modules; parameters `2 i` and `2 i + 1` are the factors `a` and `b` of module `i`.
        modules: Vec<Module>,
    },
    /// Every weight of the backbone, in the order of [`Backbone::map`].
    Full,
}

/// Weights and factors that act together.
#[derive(Debug)]
pub struct Policy<'a> {
    /// The backbone.
    pub backbone: Cow<'a, Backbone>,
    /// The adapter's factors.
    pub factors: Option<FactorMap>,
}

impl Trainable {
    /// A fresh adapter: `A` uniform in `±1/sqrt(d_in)` as PEFT draws it (Kaiming with a = sqrt 5), `B` zero, so that training
    /// begins at the backbone.
    ///
    /// # Errors
    /// If `config` names no module.
    pub fn fresh_lora(config: LoraConfig, model: &Config, seed: u64, device: &Device) -> Result<(Self, Vec<Parameter>)> {
        let modules = config.modules(model)?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let draw = |module: &Module| {
            let (d_in, d_out) = dims(model, module.projection);
            let rank = config.rank_of(*module);
            let bound = 1.0 / (d_in as f32).sqrt();
            let a = (0..d_in * rank).map(|_| rng.random_range(-bound..bound)).collect();
            (*module, PlainFactors { a, b: vec![0.0; rank * d_out], d_in, rank, d_out })
        };
        let plain: BTreeMap<Module, PlainFactors> = modules.iter().map(draw).collect();
        let parameters = factor_parameters(&plain, device);
        Ok((Self::Lora { config, modules }, parameters))
    }

    /// The factors of a finished adapter, to go on from.
    pub fn from_adapter(adapter: &Adapter, device: &Device) -> (Self, Vec<Parameter>) {
        let modules = adapter.plain().keys().copied().collect();
        (Self::Lora { config: adapter.config().clone(), modules }, factor_parameters(adapter.plain(), device))
    }

    /// Every weight of `backbone`, in f32.
    pub fn full(backbone: &Backbone) -> (Self, Vec<Parameter>) {
        let mut parameters = Vec::new();
        backbone.map(&mut |name, weight| {
            let (flat, decays) = match &weight {
                Weight::Vector(v) => (v.clone(), false),
                Weight::Matrix(m) => (m.clone().flatten(0, 1), true),
            };
            parameters.push(Parameter::new(name.to_owned(), decays, flat.cast(DType::F32)));
            weight
        });
        (Self::Full, parameters)
    }

    /// The policy of these parameter values, which may track gradients.
    pub fn policy<'a>(&self, backbone: &'a Backbone, values: &[Tensor<1>]) -> Policy<'a> {
        match self {
            Self::Lora { config, modules } => {
                let factors = modules.iter().zip(values.chunks_exact(2)).map(|(module, pair)| {
                    let (d_in, d_out) = dims(&backbone.config, module.projection);
                    let rank = config.rank_of(*module);
                    let (a, b) = (pair[0].clone().reshape([d_in, rank]), pair[1].clone().reshape([rank, d_out]));
                    (*module, Factors { a, b, scale: config.scale_of(*module) })
                });
                Policy { backbone: Cow::Borrowed(backbone), factors: Some(factors.collect()) }
            }
            Self::Full => {
                let mut next = values.iter();
                let mapped = backbone.map(&mut |_, weight| {
                    let value = next.next().expect("one value per weight").clone();
                    match weight {
                        Weight::Vector(_) => Weight::Vector(value),
                        Weight::Matrix(m) => Weight::Matrix(value.reshape(m.dims())),
                    }
                });
                Policy { backbone: Cow::Owned(mapped), factors: None }
            }
        }
    }

    /// The adapter of these values.
    ///
    /// # Errors
    /// If a value is not finite.
    ///
    /// # Panics
    /// If the whole backbone is trained.
    pub fn adapter(&self, model: &Config, parameters: &[Parameter]) -> Result<Adapter> {
        let Self::Lora { config, modules } = self else { panic!("a full training makes a model, not an adapter") };
        let plain = modules.iter().zip(parameters.chunks_exact(2)).map(|(module, pair)| {
            let (d_in, d_out) = dims(model, module.projection);
            let factors = PlainFactors {
                a: values_of(&pair[0].value),
                b: values_of(&pair[1].value),
                d_in,
                rank: config.rank_of(*module),
                d_out,
            };
            (*module, factors)
        });
        Ok(Adapter::new(config.clone(), plain.collect())?)
    }
}

/// The numbers of a flat tensor.
pub fn values_of(tensor: &Tensor<1>) -> Vec<f32> {
    tensor.clone().into_data().try_to_vec::<f32>().expect("parameters are f32")
}

/// A flat tensor of these numbers.
pub fn flat(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

fn factor_parameters(plain: &BTreeMap<Module, PlainFactors>, device: &Device) -> Vec<Parameter> {
    let pair = |(module, f): (&Module, &PlainFactors)| {
        let name = |half: &str| format!("{}.lora_{half}", module.path());
        [Parameter::new(name("A"), true, flat(f.a.clone(), device)), Parameter::new(name("B"), true, flat(f.b.clone(), device))]
    };
    plain.iter().flat_map(pair).collect()
}
