//! Standard errors and intervals of single rates.

use serde::Serialize;

/// The two-sided 95 % point of the standard normal distribution.
pub const Z95: f64 = 1.959_963_984_540_054;

/// The standard error of a share of `n` as Table 1 prints it: `sqrt(p (1 - p) / n)`, with `n`, not `n - 1`. `None` without samples.
pub fn binomial_se(n_right: usize, n: usize) -> Option<f64> {
    let p = share(n_right, n)?;
    Some((p * (1.0 - p) / n as f64).sqrt())
}

/// The standard error of a mean: the sample's standard deviation (with `n - 1`) over `sqrt(n)`. `None` below two samples.
pub fn sample_se(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    if values.len() < 2 {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    Some((variance / n).sqrt())
}

/// Wilson's interval of a share, as (low, high), at the normal point `z`. `None` without samples.
pub fn wilson(n_right: usize, n: usize, z: f64) -> Option<(f64, f64)> {
    let p = share(n_right, n)?;
    let n_f = n as f64;
    let centre = p + z * z / (2.0 * n_f);
    let half = z * (p * (1.0 - p) / n_f + z * z / (4.0 * n_f * n_f)).sqrt();
    let scale = 1.0 + z * z / n_f;
    // Exact ends: rounding must not leave 2e-17 where nobody was right.
    let low = if n_right == 0 { 0.0 } else { (centre - half) / scale };
    let high = if n_right == n { 1.0 } else { (centre + half) / scale };
    Some((low, high))
}

/// A mean with its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Its standard error.
    pub se: f64,
}

/// The unweighted mean of benchmarks, each given with its standard error, as in the last column of Table 1: its error is
/// `sqrt(sum se_i^2) / k`. `None` without benchmarks.
pub fn mean_of_benchmarks(benchmarks: &[Mean]) -> Option<Mean> {
    let k = benchmarks.len() as f64;
    (!benchmarks.is_empty()).then(|| Mean {
        mean: benchmarks.iter().map(|b| b.mean).sum::<f64>() / k,
        se: benchmarks.iter().map(|b| b.se * b.se).sum::<f64>().sqrt() / k,
    })
}

fn share(n_right: usize, n: usize) -> Option<f64> {
    assert!(n_right <= n, "{n_right} of {n} is no share");
    (n > 0).then(|| n_right as f64 / n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first row of Table 1 as printed, with the public sizes of its benchmarks.
    #[test]
    fn table_1_s_first_row_is_reproduced() {
        let row = [
            (35.92, 4.73, 103),
            (46.20, 1.58, 1000),
            (53.60, 4.46, 125),
            (13.98, 0.71, 2417),
            (27.35, 1.71, 680),
            (35.00, 4.77, 100),
            (4.00, 1.39, 200),
            (48.67, 1.74, 824),
        ];
        let mut benchmarks = Vec::new();
        for (accuracy, se, n) in row {
            let n_right = (accuracy / 100.0 * f64::from(n)).round() as usize;
            let own = 100.0 * binomial_se(n_right, n as usize).expect("samples");
            assert!((own - se).abs() <= 0.005, "{accuracy} of {n}: {own}, printed {se}");
            benchmarks.push(Mean { mean: accuracy, se });
        }
        let Mean { mean, se } = mean_of_benchmarks(&benchmarks).expect("eight");
        assert!((mean - 33.09).abs() <= 0.01 && (se - 1.09).abs() <= 0.01, "{mean} {se}");
    }

    #[test]
    fn what_is_unknown_is_none() {
        assert_eq!(binomial_se(0, 0), None);
        assert_eq!(binomial_se(3, 3), Some(0.0));
        assert_eq!(sample_se(&[1.0]), None);
        assert_eq!(sample_se(&[1.0, 3.0]), Some(1.0));
        assert_eq!(wilson(0, 0, Z95), None);
        assert_eq!(mean_of_benchmarks(&[]), None);
    }

    #[test]
    fn wilson_is_inside_the_unit_interval_and_holds_the_share() {
        for n in [1, 2, 7, 55, 1000] {
            for n_right in [0, 1, n / 2, n] {
                let (low, high) = wilson(n_right, n, Z95).expect("samples");
                let p = n_right as f64 / n as f64;
                assert!(0.0 <= low && low <= p && p <= high && high <= 1.0, "{n_right} of {n}: {low} {high}");
            }
        }
        let (low, high) = wilson(55, 55, Z95).expect("samples");
        assert!((low - 0.93472).abs() < 1e-5 && high == 1.0);
    }
}
