//! Updates on one batch whose every token is supervised, as `weact train` makes them where its configuration is silent.

use anyhow::{Context, Result, ensure};
use weact::{
    core::{Backbone, Capability, context::LeftOut, sample::Sample},
    train::{
        gradient::{Plan, batch_gradient},
        optim::{self, AdamW, Parameter},
        trainable::Trainable,
    },
};

/// What is trained, on what, and how far it is.
pub(super) struct Training {
    trainable: Trainable,
    parameters: Vec<Parameter>,
    samples: Vec<Sample>,
    plan: Plan,
    n_updates: usize,
}

/// Ids that cover the vocabulary, the same on every machine.
pub(super) fn token_ids(backbone: &Backbone, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + 13) % backbone.config.vocab_size) as u32).collect()
}

impl Training {
    /// Of `n_samples` samples of `length` tokens each.
    pub(super) fn new(
        backbone: &Backbone,
        (trainable, parameters): (Trainable, Vec<Parameter>),
        (n_samples, length): (usize, usize),
        recompute: Option<bool>,
    ) -> Result<Self> {
        let capability: Capability = "search".parse()?;
        let sample = |ids: &[u32]| Sample {
            id: String::new(),
            capability: capability.clone(),
            ids: ids.to_vec(),
            mask: vec![true; ids.len()],
            left_out: LeftOut::default(),
            dropped_exchanges: 0,
        };
        let samples = token_ids(backbone, n_samples * length).chunks(length).map(sample).collect();
        Ok(Self { trainable, parameters, samples, plan: Plan { micro_rows: None, recompute }, n_updates: 0 })
    }

    /// One update, done when this returns. Gives the loss before it, in nats per token.
    pub(super) fn update(&mut self, backbone: &Backbone) -> Result<f64> {
        let values: Vec<_> = self.parameters.iter().map(|p| p.value.clone()).collect();
        let batch: Vec<&Sample> = self.samples.iter().collect();
        let result = batch_gradient(&self.trainable, backbone, &values, &batch, self.plan)?.context("no token is supervised")?;
        let gradients = result.gradients.into_iter().collect::<Option<Vec<_>>>().context("a parameter has no gradient")?;
        drop(values);
        let norm = optim::global_norm(&gradients);
        ensure!(result.loss.is_finite() && norm.is_finite(), "loss {} or gradient norm {norm} is not finite", result.loss);
        self.n_updates += 1;
        let adam = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        adam.update(&mut self.parameters, gradients, (optim::clip_scale(norm, 1.0), 1e-4), self.n_updates);
        backbone.device().sync().context("the device failed")?;
        Ok(result.loss)
    }
}
