//! The learning rate of each update.

use crate::config::{Schedule, Train};

/// The learning rate of update `step` (from 1) of `n_steps`: a linear rise over the warm-up, then the schedule.
///
/// Cosine is `lr/2 (1 + cos(pi (step - 1 - warmup) / (n_steps - warmup)))`, as transformers' `get_cosine_schedule_with_warmup`.
pub fn learning_rate(train: &Train, step: usize, n_steps: usize) -> f64 {
    let warmup = if train.warmup < 1.0 { (train.warmup * n_steps as f64).ceil() } else { train.warmup.floor() };
    let done = (step - 1) as f64;
    if done < warmup {
        return train.lr * step as f64 / warmup;
    }
    match train.schedule {
        Schedule::Constant => train.lr,
        Schedule::Cosine => {
            let progress = (done - warmup) / (n_steps as f64 - warmup).max(1.0);
            train.lr * 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_then_falls_as_worked_by_hand() {
        let train = Train { lr: 1.0, warmup: 2.0, schedule: Schedule::Cosine, ..Train::default() };
        let rates: Vec<f64> = (1..=6).map(|step| learning_rate(&train, step, 6)).collect();
        let half_cosine = |x: f64| 0.5 * (1.0 + (std::f64::consts::PI * x).cos());
        let expected = [0.5, 1.0, half_cosine(0.0), half_cosine(0.25), half_cosine(0.5), half_cosine(0.75)];
        for (rate, expected) in rates.iter().zip(expected) {
            assert!((rate - expected).abs() < 1e-12, "{rates:?}");
        }
        let constant = Train { schedule: Schedule::Constant, warmup: 0.0, ..train };
        assert_eq!(learning_rate(&constant, 5, 6), 1.0);
    }
}
