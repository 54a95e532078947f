//! Statistics of rates and means: intervals, and paired comparisons of two methods on the same tasks. Pure functions, in f64.
//!
//! An unknown number is `None`: the error of one sample, a rate of nothing.

mod intervals;
mod paired;
mod bootstrap;
mod resample;

pub use bootstrap::{Bootstrap, Law, Resampling, cluster_bootstrap, mean_bootstrap};
pub use intervals::{Mean, Z95, binomial_se, mean_of_benchmarks, sample_se, wilson};
pub use paired::{Outcome, Paired, Verdict, mcnemar, paired};
pub use resample::{Estimate, estimate};
