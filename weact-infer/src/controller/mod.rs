//! Controllers: who decides when which weights act.

pub mod hard;
pub mod plain;
