//! General skill after training, in the toy (App. H): what full fine-tuning costs, and that switching costs nothing.

use std::{path::PathBuf, sync::Arc};

use burn::tensor::{DType, Device};
use weact::{
    core::{
        Backbone, Capability,
        chat::{Chat, ToolProtocol},
        io::{checkpoint::Checkpoint, peft},
    },
    eval::world::{
        World, WorldConfig,
        document::Tools,
        gold::{self, Form},
        skill::{self, Skill},
    },
    infer::engine::Engine,
};

const N: usize = 64;

fn toy(part: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "datasets", "toy", part].iter().collect()
}

fn backbone(part: &str) -> (Backbone, String) {
    let checkpoint = Checkpoint::open(&toy(part), false).expect("a toy model");
    (checkpoint.load(&Device::flex(), DType::F32).expect("loadable"), checkpoint.digest())
}

fn measure(backbone: &Backbone) -> [Skill; 2] {
    let chat = Chat::open(&toy("backbone"), ToolProtocol::Template).expect("template and tokenizer");
    let of_a_run = World::new(&WorldConfig::default()).and_then(|world| world.library()?.tools()).expect("tools");
    let schemas = |form| gold::schemas(form, &of_a_run);
    let tools = Tools { staged: schemas(Form::Staged), plain: schemas(Form::Plain) };
    skill::measure(backbone, None, &chat, &tools, N).expect("documents")
}

#[test]
fn full_fine_tuning_loses_general_skill() {
    let before = measure(&backbone("backbone").0);
    let after = measure(&backbone("full").0);
    for (before, after) in before.iter().zip(&after) {
        let lost = after.mean_nll_nats() - before.mean_nll_nats();
        assert!(lost > 0.1, "{}: {:.3} nats before, {:.3} after", before.suite, before.mean_nll_nats(), after.mean_nll_nats());
    }
}

#[test]
fn weact_with_no_adapter_active_is_bit_equal_to_the_base() {
    let (base, digest) = backbone("backbone");
    let before = measure(&base);
    let engine = Engine::new(Arc::new(base), digest);
    let mut session = engine.session();
    session.append(&[1, 2, 3]);
    for alias in ["plan", "search", "write"] {
        let adapter = peft::read(&toy("adapters").join(alias)).expect("a toy adapter");
        let handle = engine.make_resident(&Arc::new(adapter)).expect("it fits");
        session.switch(Some((Capability::new(alias).expect("a legal name"), handle)));
        session.rebuild().expect("a cache");
    }
    session.switch(None);
    session.rebuild().expect("a cache");
    assert_eq!(measure(engine.backbone()), before);
}
