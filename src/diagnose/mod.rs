//! Diagnostics from files to figures: what `weact diagnose` and the examples share. The measures are those of
//! [`weact_diagnostics`]; tables and figures are pure functions of the records that are written.

mod error;
pub mod config;
pub mod subjects;
pub mod nll_gap;
pub mod mismatch;

pub use error::{Error, Result};
pub use subjects::{Fusion, Specialist, Subjects};
