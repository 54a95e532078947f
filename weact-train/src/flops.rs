//! Nominal training compute (App. B.1), in FLOPs:
//!
//! ```text
//! F_full = 6 P D + 6 L a Q        F_lora = (4 P + 6 P_r) D + 6 L a Q
//! ```
//!
//! `P` are the matrix parameters a token passes through, `P_r` those of the adapter, `D` the tokens of all passes, `Q` the sum of squared
//! lengths, `L` the layers and `a` the width of all heads together. A frozen backbone needs no gradients of its weights: 4 instead of 6.
//! Elementwise operations, the optimizer, recomputation and communication are left out.
//!
//! For Qwen3-32B this gives the paper's constants: P = 31.984e9 with the output head and without the embedding, P_r = 8.546e6 r over the seven
//! projections and the head, L = 64, a = 8192.

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;
use weact_core::{io::checkpoint::dims, lora::Projection, model::Config};

/// What a model's shape contributes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Model {
    /// `P`: parameters of the blocks' projections and the output head.
    pub p: f64,
    /// `L`.
    pub layers: f64,
    /// `a`: heads times their width.
    pub attention_width: f64,
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trained {
    /// All weights.
    Full,
    /// An adapter with so many parameters, `P_r`.
    Lora(f64),
}

/// What one training run sees.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exposure {
    /// Tokens of each sample of the data set, in one pass.
    pub lengths: Vec<usize>,
    /// Passes.
    pub epochs: usize,
    /// Further tokens that a pass computes for padding; they count in dense operations only.
    pub padding: usize,
}

/// A run's compute, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compute {
    /// `D`.
    pub tokens: f64,
    /// `Q`.
    pub squared_lengths: f64,
    /// FLOPs of matrices.
    pub dense: f64,
    /// FLOPs of causal attention.
    pub attention: f64,
}

impl Compute {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.dense + self.attention
    }
}

impl Model {
    /// Of a decoder's shape.
    pub fn of(config: &Config) -> Self {
        let block: usize = Projection::BLOCK.iter().map(|projection| parameters(config, *projection)).sum();
        let head = parameters(config, Projection::LmHead);
        Self {
            p: (config.n_layers * block + head) as f64,
            layers: config.n_layers as f64,
            attention_width: (config.n_heads * config.head_dim) as f64,
        }
    }
}

/// `P_r` of an adapter of rank `rank` on `projections`: `r (d_in + d_out)` for each module.
pub fn adapter_parameters(config: &Config, projections: &[Projection], rank: usize) -> f64 {
    let of = |projection: &Projection| {
        let (d_in, d_out) = dims(config, *projection);
        let n = if *projection == Projection::LmHead { 1 } else { config.n_layers };
        n * rank * (d_in + d_out)
    };
    projections.iter().map(of).sum::<usize>() as f64
}

/// The compute of one run.
pub fn compute(model: &Model, trained: Trained, exposure: &Exposure) -> Compute {
    let epochs = exposure.epochs as f64;
    let tokens = epochs * (exposure.lengths.iter().sum::<usize>() + exposure.padding) as f64;
    let squared_lengths = epochs * exposure.lengths.iter().map(|n| (*n as f64).powi(2)).sum::<f64>();
    let per_token = match trained {
        Trained::Full => 6.0 * model.p,
        Trained::Lora(p_r) => 4.0 * model.p + 6.0 * p_r,
    };
    Compute {
        tokens,
        squared_lengths,
        dense: per_token * tokens,
        attention: 6.0 * model.layers * model.attention_width * squared_lengths,
    }
}

/// The 95 % bootstrap interval of a run's total over its length statistics: samples are drawn anew with replacement, `seed` decides how.
///
/// # Panics
/// If there is no sample.
pub fn interval(model: &Model, trained: Trained, exposure: &Exposure, seed: u64) -> (f64, f64) {
    const RESAMPLES: usize = 2000;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let lengths = &exposure.lengths;
    let mut totals: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = (0..lengths.len()).map(|_| lengths[rng.random_range(0..lengths.len())]).collect();
            compute(model, trained, &Exposure { lengths: drawn, ..exposure.clone() }).total()
        })
        .collect();
    totals.sort_by(f64::total_cmp);
    let at = |level: f64| totals[((level * RESAMPLES as f64).ceil() as usize).clamp(1, RESAMPLES) - 1];
    (at(0.025), at(0.975))
}

fn parameters(config: &Config, projection: Projection) -> usize {
    let (d_in, d_out) = dims(config, projection);
    d_in * d_out
}

#[cfg(test)]
mod tests {
    use std::fs;

    use weact_core::io::hf_config;

    use super::*;

    fn qwen3_32b() -> Config {
        let dir = tempfile::tempdir().expect("a folder");
        let text = r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
            "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"}"#;
        fs::write(dir.path().join("config.json"), text).expect("a writable folder");
        hf_config::read(dir.path()).expect("a legal configuration")
    }

    #[test]
    fn the_paper_s_constants_are_qwen3_32b_s() {
        let config = qwen3_32b();
        let Model { p, layers, attention_width } = Model::of(&config);
        assert!((p / 31.984e9 - 1.0).abs() < 1e-4, "{p}");
        assert_eq!((layers, attention_width), (64.0, 8192.0));
        let all: Vec<Projection> = Projection::BLOCK.into_iter().chain([Projection::LmHead]).collect();
        let per_rank = adapter_parameters(&config, &all, 1);
        assert!((per_rank / 8.546e6 - 1.0).abs() < 1e-4, "{per_rank}");
        assert_eq!(adapter_parameters(&config, &all, 128), 128.0 * per_rank);
    }

    /// P = 100, P_r = 10, L = 2, a = 8; samples of 3 and 5 tokens, two epochs, one token of padding a pass: D = 18, Q = 68.
    #[test]
    fn a_small_run_is_the_one_worked_by_hand() {
        let model = Model { p: 100.0, layers: 2.0, attention_width: 8.0 };
        let exposure = Exposure { lengths: vec![3, 5], epochs: 2, padding: 1 };
        let full = compute(&model, Trained::Full, &exposure);
        assert_eq!((full.tokens, full.squared_lengths, full.dense, full.attention), (18.0, 68.0, 10_800.0, 6528.0));
        let lora = compute(&model, Trained::Lora(10.0), &exposure);
        assert_eq!((lora.dense, lora.attention, lora.total()), (8280.0, 6528.0, 14_808.0));
        let (low, high) = interval(&model, Trained::Full, &exposure, 3);
        assert!(low <= full.total() && full.total() <= high && low < high);
        assert_eq!(interval(&model, Trained::Full, &exposure, 3), (low, high));
        let even = Exposure { lengths: vec![4; 6], ..exposure };
        let total = compute(&model, Trained::Full, &even).total();
        assert_eq!(interval(&model, Trained::Full, &even, 3), (total, total));
    }

    /// What B.1 prints of the three recipes: WeAct computes 142.8 EFLOPs, 7.3 % less than Full and 1.96 times Single LoRA, at 1.23 and
    /// 2.06 times their tokens. Full and Single see the same samples, five times and three times. Two unknowns, their samples' number and
    /// length, give all the rest.
    #[test]
    fn the_paper_s_ratios_follow_from_the_formulas() {
        let config = qwen3_32b();
        let model = Model::of(&config);
        let all: Vec<Projection> = Projection::BLOCK.into_iter().chain([Projection::LmHead]).collect();
        let lora = |rank| Trained::Lora(adapter_parameters(&config, &all, rank));
        let run = |trained, n: usize, length: usize, epochs| {
            compute(&model, trained, &Exposure { lengths: vec![length; n], epochs, padding: 0 })
        };
        let (n, length) = (4513, 25_200);
        let (full, single) = (run(Trained::Full, n, length, 5), run(lora(128), n, length, 3));
        let weact = 142.8e18;
        assert!((full.total() / (weact / (1.0 - 0.073)) - 1.0).abs() < 0.01, "{}", full.total());
        assert!((single.total() / (weact / 1.96) - 1.0).abs() < 0.01, "{}", single.total());
        // The tokens of the three adapters, by either printed ratio.
        let tokens = 2.06 * single.tokens;
        assert!((tokens / (1.23 * full.tokens) - 1.0).abs() < 0.01, "{tokens}");
        // A token costs 0.95 of what it does for Single LoRA: for ranks of 32 to 64, that is at lengths just below Single's.
        let per_token = |rank, length| run(lora(rank), 1, length, 1).total() / length as f64;
        let wanted = weact / tokens;
        assert!((wanted / (single.total() / single.tokens) - 0.95).abs() < 0.01);
        assert!(per_token(32, 22_000) < wanted && wanted < per_token(64, 25_200), "{wanted}");
    }
}
