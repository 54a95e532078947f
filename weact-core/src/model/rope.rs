//! The angles of rotary position embedding; `ops::rope` applies them.

use std::f64::consts::PI;

use burn::tensor::{Device, Tensor, TensorData};

use super::config::{Rope, Scaling};

/// Cosines and sines of some positions.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// `[n, head_dim / 2]`, f32
    pub cos: Tensor<2>,
    /// `[n, head_dim / 2]`, f32
    pub sin: Tensor<2>,
}

impl Rotation {
    /// For the given positions, computed in f64.
    pub fn new(rope: &Rope, head_dim: usize, positions: &[usize], device: &Device) -> Self {
        let (frequencies, scale) = frequencies(rope, head_dim);
        let angles = || positions.iter().flat_map(|p| frequencies.iter().map(move |f| *p as f64 * f));
        let table = |values: Vec<f32>| {
            let n = values.len() / (head_dim / 2);
            Tensor::from_data(TensorData::new(values, [n, head_dim / 2]), device)
        };
        Self {
            cos: table(angles().map(|a| (a.cos() * scale) as f32).collect()),
            sin: table(angles().map(|a| (a.sin() * scale) as f32).collect()),
        }
    }
}

/// The angle per position of each pair of dimensions, and the scale of cosines and sines.
fn frequencies(rope: &Rope, head_dim: usize) -> (Vec<f64>, f64) {
    let half = head_dim / 2;
    let plain = |i: usize| rope.theta.powf(-(2.0 * i as f64) / head_dim as f64);
    match &rope.scaling {
        Scaling::Default => ((0..half).map(plain).collect(), 1.0),
        Scaling::Yarn { factor, original_max, beta_fast, beta_slow, attention_factor, truncate } => {
            let dimension =
                |rotations: f64| head_dim as f64 * (original_max / (rotations * 2.0 * PI)).ln() / (2.0 * rope.theta.ln());
            let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let blend = |i: usize| {
                let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) / factor * interpolated + plain(i) * (1.0 - interpolated)
            };
            ((0..half).map(blend).collect(), *attention_factor)
        }
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max } => {
            let stretch = |i: usize| {
                let frequency = plain(i);
                let wave = 2.0 * PI / frequency;
                if wave > original_max / low_freq_factor {
                    frequency / factor
                } else if wave < original_max / high_freq_factor {
                    frequency
                } else {
                    let smooth = (original_max / wave - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            };
            ((0..half).map(stretch).collect(), 1.0)
        }
    }
}
