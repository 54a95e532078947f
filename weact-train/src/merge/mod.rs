//! Static merges: several adapters made into one. What switching is measured against.

mod additive;

pub use additive::additive;
