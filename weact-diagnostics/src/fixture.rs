//! What the tests of this crate start from: a tiny checkpoint with an adapter, and samples of any ids.

use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device};
use weact_core::{
    Adapter, Backbone, Capability,
    context::LeftOut,
    io::{checkpoint::Checkpoint, peft},
    sample::Sample,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../weact-core/tests/golden/qwen3-tied")
}

/// A Qwen3 decoder of two layers, on the CPU.
pub(crate) fn backbone() -> Backbone {
    let checkpoint = Checkpoint::open(&folder(), false).expect("a whole checkpoint");
    checkpoint.load(&Device::flex(), DType::F32).expect("loadable")
}

/// PEFT's adapter for it.
pub(crate) fn adapter() -> Adapter {
    peft::read(&folder().join("adapter")).expect("an adapter")
}

/// A sample of these ids, whose mask is true at `supervised`.
pub(crate) fn sample(id: &str, ids: Vec<u32>, supervised: &[usize]) -> Sample {
    let mask = (0..ids.len()).map(|i| supervised.contains(&i)).collect();
    let capability = Capability::new("search").expect("a legal name");
    Sample { id: id.to_owned(), capability, ids, mask, left_out: LeftOut::default(), dropped_exchanges: 0 }
}
