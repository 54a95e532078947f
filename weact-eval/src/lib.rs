//! Evaluation: the toy research world, benchmarks and their graders, the harness that turns methods and tasks into records, and
//! the reports made of records.

mod error;
pub mod benchmark;
pub mod task;
pub mod suite;
pub mod grade;
pub mod config;
pub mod method;
pub mod agent_method;
pub mod record;
pub mod run;
pub mod score;
pub mod report;
pub mod search_graph;
pub mod world;

pub use error::{Error, Result};
