//! Dynamic weight switching for agents: one LoRA adapter per capability over a frozen decoder, and an agent that changes its own
//! active adapter by tool calls inside one conversation (*WeAct*, arXiv 2610.26847).
//!
//! This crate gathers the parts; the binary `weact` is a thin layer over them.
//!
//! ```
//! use weact::core::{Capability, control::{Action, transition}};
//!
//! # fn main() -> Result<(), weact::core::Error> {
//! let (plan, search): (Capability, Capability) = ("plan".parse()?, "search".parse()?);
//! // Eq. 6: an adapter is loaded where none is active, and released by its own name alone.
//! let active = transition(None, &Action::Load(search.clone()));
//! assert_eq!(transition(active.clone(), &Action::Load(plan)), active);
//! assert_eq!(transition(active, &Action::Offload(search)), None);
//! # Ok(())
//! # }
//! ```

pub use weact_core as core;
pub use weact_diagnostics as diagnostics;
pub use weact_eval as eval;
pub use weact_infer as infer;
pub use weact_train as train;

pub mod diagnose;
pub mod doctor;
pub mod retention;
pub mod interference;
