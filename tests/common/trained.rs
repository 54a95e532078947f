//! Three adapters over the toy backbone, trained in less than a minute on questions of two hops.

use std::{fs, path::Path, sync::Arc};

use burn::tensor::{DType, Device};
use weact::{
    core::{
        chat::{Chat, ToolProtocol},
        episode::Event,
        io::checkpoint::Checkpoint,
        registry::{Against, Registry},
        stage::Stage,
    },
    eval::world::{
        self, World, WorldConfig,
        gold::Form,
        question::{Family, Question, Split},
        tools::Library,
    },
    infer::{
        agent::{Finished, Parts, Run, Settings},
        controller::hard::{self, Hard},
        engine::Engine,
        record::Recorder,
    },
    train::{
        config,
        log::Done,
        run_directory::Existing,
        sft::{self, Options, Outcome},
    },
};

const BACKBONE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/toy/backbone");

/// The toy world, and what its runs need.
pub(crate) struct Toy {
    pub(crate) world: World,
    pub(crate) library: Library,
    pub(crate) chat: Chat,
    pub(crate) engine: Engine,
    pub(crate) registry: Registry,
}

impl Toy {
    /// Opens the adapters in folders of `adapters`, over the toy backbone.
    pub(crate) fn open(adapters: &Path) -> Self {
        let world = World::new(&WorldConfig::default().smooth()).expect("a world");
        let library = world.library().expect("a library");
        let checkpoint = Checkpoint::open(Path::new(BACKBONE), false).expect("the toy backbone");
        let chat = Chat::open(&checkpoint.dir, ToolProtocol::Template).expect("template and tokenizer");
        let against = Against {
            base: checkpoint.digest(),
            tokenizer: chat.tokenizer.digest().to_owned(),
            template: chat.template_digest(),
        };
        let (registry, warnings) = Registry::open(adapters, &against).expect("adapters");
        assert_eq!(warnings, [""; 0], "each has a card");
        let backbone = checkpoint.load(&Device::flex(), DType::F32).expect("loadable");
        Self { world, library, chat, engine: Engine::new(Arc::new(backbone), checkpoint.digest()), registry }
    }

    /// A run of WeAct-hard.
    pub(crate) fn answer(&self, question: &Question, recorder: Recorder) -> Finished {
        let tools = self.library.tools().expect("tools");
        let parts = Parts { engine: &self.engine, chat: &self.chat, registry: &self.registry, tools: &tools };
        let mut settings = Settings { system: Some(world::SYSTEM.to_owned()), ..Settings::default() };
        settings.budget.max_new = 64;
        let mut rules = Hard::default();
        rules.workflow[1].max_turns = 6;
        let mut observe = |_: &Event| {};
        let run = Run::begin(parts, settings, "hard", &question.text, recorder, &mut observe, &|| false);
        hard::run(run.expect("a fitting run"), &rules).expect("a run")
    }
}

/// Writes gold trajectories of 256 training questions.
pub(crate) fn write_gold(path: &Path) {
    let world = World::new(&WorldConfig::default().smooth()).expect("a world");
    let library = world.library().expect("a library");
    let gold = |question: &Question| {
        let gold = world.gold(question, Form::Staged, &library.tools().expect("tools")).expect("a gold trajectory");
        serde_json::to_string(&gold).expect("JSON")
    };
    let rows: String = questions(&world, Split::Train, 256).iter().map(|question| gold(question) + "\n").collect();
    fs::write(path, rows).expect("a writable folder");
}

/// The first `n` questions of two hops.
pub(crate) fn questions(world: &World, split: Split, n: usize) -> Vec<Question> {
    world.family(Family::Chain(2), split, n)
}

/// Trains the adapter of one stage.
pub(crate) fn train(stage: &Stage, data: &Path, adapters: &Path) -> Done {
    let run = config::Run {
        kind: config::Kind::Lora,
        model: BACKBONE.into(),
        data: vec![data.to_owned()],
        capability: Some(stage.alias.clone()),
        capabilities: Vec::new(),
        out: adapters.join(stage.alias.as_str()),
        lora: config::Lora { rank: 8, alpha: 16.0, ..Default::default() },
        train: config::Train { steps: Some(80), batch_rows: 8, max_length: 512, lr: 5e-3, warmup: 10.0, ..Default::default() },
        context: Default::default(),
        valid: None,
    };
    let options = Options { existing: Existing::Refuse, allow_empty: false, tie_embeddings: false };
    match sft::train(&run, options, &Device::flex(), &mut |_| {}, &|| false).expect("a training") {
        Outcome::Done(done) => done,
        Outcome::Interrupted { .. } => panic!("nobody interrupted it"),
    }
}
