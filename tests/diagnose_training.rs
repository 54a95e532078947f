//! The retention and interference studies from outside: on the two-layer fixture, interrupted, resumed, and wrongly fed.

mod common;

use std::{cell::Cell, fs, path::Path};

use burn::tensor::Device;
use tempfile::TempDir;
use weact::{
    core::{
        Capability,
        chat::{Chat, ToolProtocol},
        context::Retention,
        io::peft,
        sample::{self, Rules},
        trajectory,
    },
    diagnostics::{
        content::{self, TokenKind},
        interference::Part,
        retention::Set,
    },
    interference,
    retention::{self, Arm, Outcome, Study},
    train::{
        config::{Context, Lora, Train},
        run_directory::Existing,
    },
};

fn capabilities(names: &[&str]) -> Vec<Capability> {
    names.iter().map(|name| Capability::new(name).expect("legal")).collect()
}

/// Two capabilities, so that two orders are trained: 2 + 2 stages for each shared adapter, 2 apart, 4 + 4 at random.
fn study(folder: &Path) -> Study {
    Study {
        model: folder.join("model"),
        data: vec![folder.join("train.jsonl")],
        valid: vec![folder.join("valid.jsonl")],
        monitor: 1,
        capabilities: capabilities(&["plan", "write"]),
        rank_active: 2,
        rank_total: 4,
        alpha_per_rank: 2.0,
        targets: Lora::default().targets,
        seed: 0,
        out: folder.join("study"),
        train: Train { steps: Some(2), batch_rows: 4, lr: 1e-2, ..Train::default() },
        context: Context::default(),
    }
}

fn run(study: &Study, existing: Existing) -> weact::train::Result<Outcome> {
    retention::run(study, existing, &Device::flex(), &mut |_| {}, &|| false)
}

fn scene() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    common::toy(folder.path());
    folder
}

#[test]
fn an_interrupted_study_goes_on_to_the_same_records_and_capabilities_apart_keep_all() {
    let folder = scene();
    let whole = study(folder.path());
    assert_eq!(run(&whole, Existing::Refuse).expect("a study"), Outcome::Done);
    let records = fs::read(whole.out.join("records.jsonl")).expect("records");

    let broken = Study { out: folder.path().join("broken"), ..whole.clone() };
    let mut existing = Existing::Refuse;
    let mut n_breaks = 0;
    loop {
        // Further each time; within stages and between points.
        let asked = Cell::new(0);
        let stops = || {
            asked.set(asked.get() + 1);
            asked.get() > 7
        };
        match retention::run(&broken, existing, &Device::flex(), &mut |_| {}, &stops).expect("a study") {
            Outcome::Done => break,
            Outcome::Interrupted => n_breaks += 1,
        }
        existing = Existing::Resume;
        assert!(n_breaks < 50, "it does not get on");
    }
    assert!(n_breaks > 2, "{n_breaks}");
    assert_eq!(fs::read(broken.out.join("records.jsonl")).expect("records"), records);

    let records = retention::read(&whole.out).expect("records");
    let (_, numbers) = retention::report(&whole, &records).expect("complete");
    let of = |arm: Arm| numbers.iter().find(|n| n.arm == arm.name() && n.set == Set::Valid).expect("there");
    assert_eq!(of(Arm::ByCapability).mean_loss.value, 0.0);
    assert_eq!(of(Arm::ByCapability).mean_forgotten_nats.map(|e| e.value), Some(0.0));
    assert_ne!(of(Arm::SharedActive).mean_forgotten_nats.map(|e| e.value), Some(0.0));
    assert_eq!(of(Arm::SharedActive).n_trajectories, 3);
    // Both orders begin at one base, the same for every arm.
    let base = |arm: Arm| &of(arm).sequences[0].points[0];
    assert!(Arm::ALL.iter().all(|arm| base(*arm) == base(Arm::Random)));

    // A study that is whole trains no further, and its adapters stay the same to the bit.
    let plan = whole.out.join("stages/by-capability/plan");
    let digest = peft::read(&plan).expect("an adapter").digest().to_owned();
    assert_eq!(run(&whole, Existing::Resume).expect("a study"), Outcome::Done);
    assert_eq!(peft::read(&plan).expect("an adapter").digest(), digest);

    let changed = Study { rank_total: 6, ..whole.clone() };
    let error = run(&changed, Existing::Resume).expect_err("another configuration").to_string();
    assert!(error.contains("rank_total"), "{error}");
    let error = run(&whole, Existing::Refuse).expect_err("it is used").to_string();
    assert!(error.contains("--resume"), "{error}");
    fs::write(folder.path().join("valid.jsonl"), without_its_first_line(&folder.path().join("valid.jsonl"))).expect("writable");
    let error = run(&whole, Existing::Resume).expect_err("other trajectories").to_string();
    assert!(error.contains("other trajectories of valid"), "{error}");
}

fn without_its_first_line(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("readable");
    text.lines().skip(1).map(|line| format!("{line}\n")).collect()
}

#[test]
fn what_can_not_be_studied_is_refused_before_anything_is_written() {
    let folder = scene();
    let check = |study: Study, why: &str| {
        let error = run(&study, Existing::Refuse).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert!(!study.out.exists(), "{why}");
    };
    let good = || study(folder.path());
    check(Study { capabilities: capabilities(&["plan", "code"]), ..good() }, "code has no sample in data");
    check(Study { monitor: 4, ..good() }, "monitor = 4 leaves nothing of the 4 trajectories");
    check(Study { monitor: 99, ..good() }, "monitor = 99 leaves nothing");
    check(Study { rank_active: 0, ..good() }, "rank_active and rank_total must be at least 1");
    let twice = vec![folder.path().join("train.jsonl"), folder.path().join("copy.jsonl")];
    fs::copy(&twice[0], &twice[1]).expect("a copy");
    check(Study { data: twice, ..good() }, "two trajectories of data have the id");
    check(Study { valid: good().data, ..good() }, "is in data and in valid");
    let lonely = folder.path().join("one.jsonl");
    let text = fs::read_to_string(folder.path().join("train.jsonl")).expect("readable");
    fs::write(&lonely, text.lines().next().expect("a line")).expect("writable");
    check(Study { data: vec![lonely], ..good() }, "has no sample of plan: there are 1 of it for 2 parts");
}

#[test]
fn of_the_toys_turns_words_are_content_and_tags_are_not() {
    let folder = scene();
    let chat = Chat::open(&folder.path().join("model"), ToolProtocol::Template).expect("template and tokenizer");
    let rows = trajectory::read(&folder.path().join("valid.jsonl")).expect("trajectories");
    let rules = Rules { retention: Retention::default(), max_length: 4096, require_exit: true };
    let samples = sample::samples(&chat, &rows, &capabilities(&["search"])[0], rules).expect("renderable").kept;
    for sample in &samples {
        let kinds = content::kinds(&chat.tokenizer, sample).expect("decodable");
        assert_eq!(kinds.len(), sample.n_supervised());
        let ids = (1..sample.ids.len()).filter(|i| sample.mask[*i]).map(|i| sample.ids[i]);
        let text = |kind: TokenKind| {
            let own: Vec<u32> = ids.clone().zip(&kinds).filter(|(_, k)| **k == kind).map(|(id, _)| id).collect();
            chat.tokenizer.decode(&own).expect("decodable")
        };
        // A token of the toy holds a call's opening with the tool's name in it.
        let (content, form) = (text(TokenKind::Content), text(TokenKind::Scaffolding));
        assert!(content.contains("search") && content.contains("offload_lora"), "{content}");
        assert!(
            ["<tool_call>", "<|im_end|>"].iter().all(|part| !content.contains(part) && form.contains(part)),
            "{content} {form}"
        );
        assert_eq!(text(TokenKind::Thinking), "", "the toy does not think");
    }
    assert_eq!(samples.len(), 4);
}

fn interference_study(folder: &Path) -> interference::Study {
    interference::Study {
        model: folder.join("model"),
        adapter: None,
        data: vec![folder.join("train.jsonl")],
        capabilities: capabilities(&["plan", "search", "write"]),
        batches: 4,
        batch_rows: 4,
        etas: vec![0.04, 0.02],
        max_length: 1024,
        seed: 0,
        out: folder.join("interference"),
        lora: Some(Lora { rank: 4, alpha: 8.0, ..Lora::default() }),
        context: Context::default(),
    }
}

fn found(study: &interference::Study) -> interference::Found {
    interference::run(study, &Device::flex(), &mut |_, _| {}, &|| false).expect("a study").expect("nobody interrupted it")
}

/// Eq. 3: what the first order leaves is of the second, so that halving the step divides it by four. The third order moves that by up to 0.55 at
/// these steps, and more at longer ones; at steps four times as short the residuals, of 1e-7 nats, are those of f32.
#[test]
fn the_residual_of_equation_3_shrinks_with_the_square_of_the_step() {
    let folder = scene();
    let trained = Study { out: folder.path().join("study"), ..study(folder.path()) };
    assert_eq!(run(&trained, Existing::Refuse).expect("a study"), Outcome::Done);
    let study = interference::Study {
        adapter: Some(trained.out.join("stages/shared-active/plan/then-write")),
        lora: None,
        etas: vec![0.008, 0.004],
        ..interference_study(folder.path())
    };
    let found = found(&study);
    let mut ratios = Vec::new();
    for pair in found.first_order.chunks(3 * study.etas.len()) {
        for j in &study.capabilities {
            let of_j: Vec<_> = pair.iter().filter(|step| step.j == *j).collect();
            ratios.push(of_j[0].residual_nats() / of_j[1].residual_nats());
        }
    }
    assert_eq!(ratios.len(), 9);
    assert!(ratios.iter().all(|ratio| (3.4..4.6).contains(ratio)), "{ratios:?}");
}

#[test]
fn of_a_fresh_adapter_b_alone_has_a_gradient() {
    let folder = scene();
    let found = found(&interference_study(folder.path()));
    assert_eq!(found.adapter, None);
    let total: Vec<_> = found.pairs.iter().filter(|pair| pair.part == Part::Total).collect();
    assert_eq!(total.len(), 6);
    for pair in total {
        let cosine = pair.cosine.expect("gradients are there").value;
        assert!((-1.0..=1.0).contains(&cosine), "{cosine}");
    }
    interference::write(&interference_study(folder.path()), &found).expect("writable");
    assert!(folder.path().join("interference/report/report.html").exists());
}

#[test]
fn too_few_samples_for_the_mini_batches_are_named() {
    let folder = scene();
    let study = interference::Study { batches: 9, ..interference_study(folder.path()) };
    let error = interference::run(&study, &Device::flex(), &mut |_, _| {}, &|| false).expect_err("too few").to_string();
    assert!(error.contains("plan has 16 samples in data: 9 mini-batches of 4 samples need 36"), "{error}");
}
