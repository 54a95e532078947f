//! Real conversations to labelled trajectories: [`import`] reads foreign formats, [`label`] marks what each capability did,
//! [`weave`] inserts the load and offload exchanges between.

mod import;
mod label;
mod weave;
mod jsonl;
pub mod annotate;
mod export;

mod hermes;
mod openai;
mod sharegpt;
mod mcp_xml;
mod dr_tulu;
mod swe_agent;

mod pairing;
mod tags;
mod tool_schema;
mod python_literal;

pub use export::{IGNORED, write_parquet};
pub use import::{Dropped, Format, Imported, import};
pub use jsonl::write_jsonl;
pub use label::{Rules, label};
pub use weave::weave;
