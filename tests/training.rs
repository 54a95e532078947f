//! Training as its user meets it: `weact train` on a tiny model, killed, interrupted, out of disk, wrongly configured; and what
//! the adapter and the model have learned in the end.
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tempfile::TempDir;
use weact::{
    core::{
        Backbone,
        chat::{Chat, ToolProtocol},
        io::{atomic, checkpoint::Checkpoint, peft},
        sample::{self, Sample},
        trajectory,
    },
    infer::{
        engine::Engine,
        sampler::{Sampler, Sampling},
        session::Finish,
    },
    train::{
        config::Run,
        gradient::{Plan, batch_gradient},
        log::{Done, Event, Log, Step, Validation},
        optim,
        schedule::learning_rate,
        trainable::Trainable,
    },
};

/// A folder with the toy fixture.
fn scene() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    common::toy(folder.path());
    folder
}

const BASE: &str = r#"
model = "model"
data = ["train.jsonl"]
[lora]
rank = 4
[train]
batch_rows = 4
steps = 6
lr = 1e-2
save_every = 3
"#;

/// Writes `NAME.toml`: a short training of one adapter into the folder NAME, with these keys set otherwise. With `capabilities`
/// among them it is a full training.
fn configure(folder: &TempDir, name: &str, keys: &str) {
    let mut run: toml::Table = toml::from_str(BASE).expect("TOML");
    for (key, value) in toml::from_str::<toml::Table>(keys).expect("TOML") {
        match (run.get_mut(&key), value) {
            (Some(toml::Value::Table(section)), toml::Value::Table(more)) => section.extend(more),
            (_, value) => _ = run.insert(key, value),
        }
    }
    run.entry("out").or_insert(name.into());
    if run.contains_key("capabilities") {
        run.insert("kind".to_owned(), "full".into());
    } else {
        run.insert("kind".to_owned(), "lora".into());
        run.entry("capability").or_insert("plan".into());
    }
    fs::write(folder.path().join(format!("{name}.toml")), run.to_string()).expect("a writable folder");
}

const FULL: &str = "capabilities = [\"plan\", \"search\", \"write\"]\n";

struct Outcome {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

/// The command line `weact LINE` in `folder`.
fn command(folder: &TempDir, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weact"));
    command.args(line.split(' ')).args(["--device", "cpu"]).current_dir(folder).stdin(Stdio::null());
    command
}

fn weact(folder: &TempDir, line: &str) -> Outcome {
    let output = command(folder, line).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Outcome { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `weact train LINE` to its end and gives what it said.
fn train(folder: &TempDir, line: &str) -> Outcome {
    let outcome = weact(folder, &format!("train {line}"));
    assert_eq!(outcome.status, Some(0), "train {line}: {}", outcome.stderr);
    outcome
}

/// Runs `weact train LINE`, which fails with this status and says all of this on stderr.
fn refused(folder: &TempDir, line: &str, status: i32, said: &[&str]) -> String {
    let outcome = weact(folder, &format!("train {line}"));
    assert_eq!(outcome.status, Some(status), "train {line}: {}", outcome.stderr);
    for part in said {
        assert!(outcome.stderr.contains(part), "train {line} says {:?} without {part:?}", outcome.stderr);
    }
    outcome.stderr
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs")
}

/// Waits until the run's log has `n` lines with this text.
fn wait_for(run: &Path, text: &str, n: usize) {
    let begun = Instant::now();
    let log = || fs::read_to_string(run.join("log.jsonl")).unwrap_or_default();
    while log().lines().filter(|line| line.contains(text)).count() < n {
        assert!(begun.elapsed() < Duration::from_secs(120), "{} has not {n} lines with {text}: {}", run.display(), log());
        thread::sleep(Duration::from_millis(1));
    }
}

/// All files below `dir` with their bytes.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.insert(path.clone(), fs::read(&path).expect("a file"));
        }
    }
    all
}

/// What an interrupted write left below `dir`.
fn half_written(dir: &Path) -> Vec<PathBuf> {
    let is_inside = |path: &PathBuf| path.strip_prefix(dir).expect("below").iter().any(atomic::is_leftover);
    files(dir).into_keys().filter(is_inside).collect()
}

/// The log's batches without what differs from run to run: seconds and memory.
fn batches(run: &Path) -> Vec<Step> {
    let step = |event| if let Event::Step(step) = event { Some(Step { wall_s: 0.0, peak_bytes: None, ..step }) } else { None };
    Log::read(run).expect("a log").into_iter().filter_map(step).collect()
}

fn validations(run: &Path) -> Vec<Validation> {
    let validation = |event| if let Event::Valid(validation) = event { Some(validation) } else { None };
    Log::read(run).expect("a log").into_iter().filter_map(validation).collect()
}

fn done(run: &Path) -> Done {
    match Log::read(run).expect("a log").pop() {
        Some(Event::Done(done)) => done,
        other => panic!("the log ends with {other:?}"),
    }
}

/// Two runs made the same: result, losses, rates, and the last checkpoint with the optimiser's state; nothing half-written is left.
fn check_same(run: &Path, unbroken: &Path) {
    let made = |run: &Path| {
        let names = ["adapter_model.safetensors", "adapter_config.json", "card.toml", "model.safetensors", "config.json"];
        let mut made: Vec<PathBuf> = names.iter().map(|name| run.join(name)).filter(|path| path.exists()).collect();
        let checkpoints =
            fs::read_dir(run.join("checkpoints")).expect("checkpoints").map(|entry| entry.expect("an entry").path());
        made.push(checkpoints.max().expect("a checkpoint").join("state.safetensors"));
        made
    };
    let (made, expected) = (made(run), made(unbroken));
    assert!(expected.len() >= 3, "{expected:?}");
    let relative = |paths: &[PathBuf], to: &Path| -> Vec<PathBuf> {
        paths.iter().map(|path| path.strip_prefix(to).expect("inside").to_owned()).collect()
    };
    assert_eq!(relative(&made, run), relative(&expected, unbroken));
    for (a, b) in made.iter().zip(&expected) {
        assert!(fs::read(a).expect("a file") == fs::read(b).expect("a file"), "{} and {} differ", a.display(), b.display());
    }
    assert_eq!(batches(run), batches(unbroken));
    assert!(half_written(run).is_empty());
}

fn backbone(model: &Path) -> Backbone {
    Checkpoint::open(model, false).expect("a checkpoint").load(&Device::flex(), DType::F32).expect("loadable")
}

/// The samples that a run with this configuration is trained on.
fn samples(folder: &TempDir, name: &str) -> Vec<Sample> {
    let run = Run::read(&folder.path().join(format!("{name}.toml"))).expect("a run");
    let chat = Chat::open(&folder.path().join("model"), ToolProtocol::Template).expect("a chat");
    let rows = trajectory::read(&folder.path().join(&run.data[0])).expect("rows");
    let of = |capability| sample::samples(&chat, &rows, &capability, run.rules()).expect("samples").kept;
    run.supervised().into_iter().flat_map(of).collect()
}

/// SIGKILL at 20 moments of adapter runs that save after every one, two or three batches, and at 3 of a full training. A run that
/// ends before its moments are used up is begun again.
#[test]
fn killed_at_random_moments_and_resumed_gives_the_same_bytes() {
    let folder = scene();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let steps = "train.steps = 20\ntrain.keep = 1\n";
    for (unbroken, keys, interrupted) in [("whole", "", vec![(1, 7), (2, 7), (3, 6)]), ("whole-full", FULL, vec![(1, 3)])] {
        configure(&folder, unbroken, &format!("{keys}{steps}"));
        let begun = Instant::now();
        train(&folder, &format!("{unbroken}.toml"));
        let duration = begun.elapsed();
        for (save_every, n_kills) in interrupted {
            let name = format!("{unbroken}-{save_every}");
            configure(&folder, &name, &format!("{keys}{steps}train.save_every = {save_every}\n"));
            let (run, mut kills) = (folder.path().join(&name), 0);
            fs::create_dir(&run).expect("a new folder");
            fs::write(run.join(".config.toml.part"), "kin").expect("a writable folder"); // killed before there was anything
            loop {
                let mut child = start(command(&folder, &format!("train {name}.toml --resume")));
                if kills < n_kills {
                    thread::sleep(duration.mul_f64(rng.random_range(0.0..0.7)));
                    child.kill().expect("a signal can be sent");
                }
                let status = child.wait().expect("it ends");
                if status.signal() == Some(9) {
                    kills += 1;
                    continue;
                }
                assert!(status.success(), "{name} after {kills} kills: {status}");
                check_same(&run, &folder.path().join(unbroken));
                if kills == n_kills {
                    break;
                }
                fs::remove_dir_all(&run).expect("removable");
            }
        }
    }
}

#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let folder = scene();
    for name in ["whole", "it's"] {
        configure(&folder, name, "train.steps = 120\ntrain.save_every = 50\n");
    }
    train(&folder, "whole.toml --seed 3");
    let (run, stderr) = (folder.path().join("it's"), folder.path().join("stderr"));
    let mut next = command(&folder, "train it's.toml --seed 3");
    for (signal, event, n) in [("-INT", "loss", 5), ("-TERM", "resumed", 1)] {
        next.stdout(Stdio::null()).stderr(File::create(&stderr).expect("a file"));
        let mut child = next.spawn().expect("it runs");
        wait_for(&run, event, n);
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill runs").success());
        assert_eq!(child.wait().expect("it ends").code(), Some(130));
        // A second Ctrl-C, while this checkpoint was being written, would have left:
        fs::create_dir_all(run.join("checkpoints/.step-00000007.part")).expect("a writable folder");
        fs::write(run.join("checkpoints/.step-00000007.part/state.safetensors"), "half").expect("a writable folder");
        let said = fs::read_to_string(&stderr).expect("text");
        let (_, line) = said.trim_end().rsplit_once("Go on with: ").expect("the command to go on with");
        assert!(line.contains("--seed 3") && line.matches("--resume").count() == 1, "{line}");
        next = Command::new("sh");
        next.args(["-c", &format!("exec {line}")]).current_dir(&folder);
    }
    assert!(next.output().expect("it runs").status.success());
    check_same(&run, &folder.path().join("whole"));
}

/// A small file system in memory; unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path, options: &str) -> bool {
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        output.is_ok_and(|output| output.status.success())
    }

    fn new(at: PathBuf, bytes: u64) -> Option<Self> {
        fs::create_dir(&at).expect("a new folder");
        Self::mount(&at, &format!("size={bytes}")).then(|| Self(at))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_the_last_good_checkpoint() {
    let folder = scene();
    let keys = "lora.rank = 16\ntrain.steps = 9\n";
    configure(&folder, "whole", keys);
    configure(&folder, "plan", &format!("{keys}out = \"disk/plan\"\n"));
    train(&folder, "whole.toml");
    let state = folder.path().join("whole/checkpoints/step-00000009/state.safetensors");
    let bytes = fs::metadata(state).expect("a file").len();
    let Some(disk) = Disk::new(folder.path().join("disk"), bytes * 3 / 2 + (40 << 10)) else {
        println!("skipped: needs the right to mount a tmpfs");
        return;
    };
    let needed = format!("{bytes} bytes are needed");
    let said = refused(&folder, "plan.toml", 1, &["can't write disk/plan/checkpoints/", "No space left", &needed]);
    let error = said.lines().last().expect("a line");
    let free = error.rsplit_once(", ").and_then(|(_, end)| end.strip_suffix(" bytes are free")).expect("free bytes");
    assert!((1..bytes).contains(&free.parse().expect("a number")), "{error}");
    let checkpoints: Vec<_> = fs::read_dir(disk.0.join("plan/checkpoints")).expect("a folder").collect();
    assert_eq!((checkpoints.len(), half_written(&disk.0)), (1, vec![]));

    assert!(Disk::mount(&disk.0, &format!("remount,size={}", bytes * 8)));
    let resumed = train(&folder, "plan.toml --resume");
    assert!(resumed.stderr.contains("going on after batch 3"), "{}", resumed.stderr);
    check_same(&disk.0.join("plan"), &folder.path().join("whole"));
}

/// The newest checkpoint is cut short: the one before it serves, and batch 11 has the rate of batch 11.
#[test]
fn a_broken_checkpoint_is_passed_over_and_the_learning_rate_goes_on() {
    let folder = scene();
    for name in ["whole", "plan"] {
        configure(&folder, name, "train.steps = 20\ntrain.save_every = 10\ntrain.warmup = 4.0\n");
        train(&folder, &format!("{name}.toml"));
    }
    let run = folder.path().join("plan");
    let newest = run.join("checkpoints/step-00000020/state.safetensors");
    let bytes = fs::read(&newest).expect("a file");
    fs::write(&newest, &bytes[..bytes.len() / 2]).expect("a writable file");
    let resumed = train(&folder, "plan.toml --resume");
    assert!(resumed.stderr.contains("is broken and passed over"), "{}", resumed.stderr);
    let events = Log::read(&run).expect("a log");
    assert!(
        events.iter().any(|e| matches!(e, Event::Resumed { step: 10, passed_over, .. } if passed_over.len() == 1)),
        "{events:?}"
    );
    let settings = Run::read(&folder.path().join("plan.toml")).expect("a run").train;
    let rates: Vec<f64> = batches(&run).iter().map(|step| step.lr).collect();
    assert_eq!(rates, (1..=20).map(|step| learning_rate(&settings, step, 20)).collect::<Vec<_>>());
    assert!((rates[10] - 0.5e-2 * (1.0 + (std::f64::consts::PI * 6.0 / 16.0).cos())).abs() < 1e-12, "{rates:?}");
    check_same(&run, &folder.path().join("whole"));
}

#[test]
fn training_search_leaves_plan_bitwise_unchanged() {
    let folder = scene();
    configure(&folder, "plan", "");
    configure(&folder, "search", "capability = \"search\"\n");
    train(&folder, "plan.toml");
    let (plan, model) = (folder.path().join("plan"), folder.path().join("model"));
    let before = (files(&plan), files(&model));
    train(&folder, "search.toml");
    assert!(before == (files(&plan), files(&model)));
    let end = done(&folder.path().join("search"));
    assert_eq!(end.base, Checkpoint::open(&model, false).expect("a checkpoint").digest());
    assert_eq!(end.others.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["plan"]);
    let [plan, search] = ["plan", "search"].map(|name| peft::read(&folder.path().join(name)).expect("an adapter"));
    assert_eq!(end.digest, search.digest());
    assert_ne!(plan.digest(), search.digest());

    configure(&folder, "write", "capability = \"write\"\ntrain.steps = 100\n");
    let mut write = start(command(&folder, "train write.toml"));
    wait_for(&folder.path().join("write"), "loss", 2);
    configure(&folder, "meanwhile", "");
    train(&folder, "meanwhile.toml");
    assert!(write.wait().expect("it ends").success(), "another adapter that appears meanwhile is no fault");
}

#[test]
fn a_second_run_into_the_same_directory_is_refused_and_touches_nothing() {
    let folder = scene();
    configure(&folder, "plan", "");
    train(&folder, "plan.toml");
    let run = folder.path().join("plan");
    let first = files(&run);
    let untouched = |line: &str, said: &[&str]| {
        refused(&folder, line, 2, said);
        assert!(first == files(&run), "{line} touched the run");
    };
    untouched("plan.toml", &["plan: is not empty", "--resume", "--overwrite"]);
    untouched("plan.toml --dry-run", &["is not empty"]);
    configure(&folder, "plan", "train.lr = 2e-2\nlora.alpha = 8.0\n");
    untouched("plan.toml --resume", &["other values of lora.alpha, train.lr"]);
    configure(&folder, "onwards", "out = \"plan\"\nlora.continue_from = \"plan\"\n");
    untouched("onwards.toml --overwrite", &["would be overwritten, but the run starts from plan"]);
    configure(&folder, "foreign", "out = \"model\"\n");
    refused(&folder, "foreign.toml --overwrite", 2, &["model: holds files but no config.toml"]);

    train(&folder, "plan.toml --overwrite");
    configure(&folder, "fresh", "train.lr = 2e-2\nlora.alpha = 8.0\n");
    train(&folder, "fresh.toml");
    check_same(&run, &folder.path().join("fresh"));
    assert_ne!(first[&run.join("adapter_model.safetensors")], files(&run)[&run.join("adapter_model.safetensors")]);
}

#[test]
fn two_processes_cannot_train_into_one_directory() {
    let folder = scene();
    configure(&folder, "plan", "train.steps = 100000\n");
    let mut first = start(command(&folder, "train plan.toml"));
    wait_for(&folder.path().join("plan"), "loss", 2);
    for line in ["plan.toml --resume", "plan.toml --overwrite"] {
        refused(&folder, line, 2, &["plan: another process is training into it"]);
    }
    assert_eq!(first.try_wait().expect("a process"), None, "the first goes on");
    first.kill().expect("a signal can be sent");
    first.wait().expect("it ends");
}

#[test]
fn unknown_keys_exit_2_with_line_and_hint() {
    let folder = scene();
    configure(&folder, "plan", "");
    let good = fs::read_to_string(folder.path().join("plan.toml")).expect("text");
    let (before, _) = good.split_once("[lora]").expect("a section");
    let line = before.lines().count() + 2;
    for (section, said) in [
        ("[train]\nlearning_rte = 1e-3", "in [train]: unknown field `learning_rte`, expected one of"),
        ("[lora]\nlr = 1e-3", "in [lora]: unknown field `lr`"),
        ("[lora]\nlora_alpha = 8", "did you mean `alpha`?"),
        ("[train]\nsave_evry = 8", "did you mean `save_every`?"),
        ("[train]\nlr = \"fast\"", "in [train]: invalid type: string \"fast\""),
        ("[train]\n lr 1", "in [train]: "),
    ] {
        fs::write(folder.path().join("bad.toml"), format!("{before}{section}\n")).expect("a writable folder");
        let said_all = refused(&folder, "bad.toml", 2, &[&format!("bad.toml: line {line}"), said]);
        assert_eq!(said_all.lines().count(), 1, "{said_all}");
    }
    refused(&folder, "absent.toml", 2, &["absent.toml: No such file"]);
    assert!(!folder.path().join("plan").exists());
}

#[test]
fn rows_that_train_nothing_are_named() {
    let folder = scene();
    let rows = fs::read_to_string(folder.path().join("train.jsonl")).expect("text");
    let mut rows: Vec<Value> = rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect();
    let write = |name: &str, rows: &[Value]| {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        fs::write(folder.path().join(format!("{name}.jsonl")), lines).expect("a writable folder");
        configure(&folder, name, &format!("data = [\"{name}.jsonl\"]\n"));
    };
    write("without", &[&rows[..1], &rows[2..]].concat());
    rows[1]["spans"] = json!([]);
    let id = rows[1]["id"].as_str().expect("an id").to_owned();
    write("with", &rows);
    refused(&folder, "with.toml", 1, &["1 of 16 rows have no labelled stage", "--allow-empty", &id]);
    assert!(!folder.path().join("with").exists());
    let said = train(&folder, "with.toml --allow-empty").stderr;
    assert!(said.contains("left out: 1 no stage of this capability"), "{said}");
    train(&folder, "without.toml");
    check_same(&folder.path().join("with"), &folder.path().join("without"));

    write("nothing", &rows[1..2]);
    refused(&folder, "nothing.toml --allow-empty", 1, &["no sample is left to train on"]);
}

#[test]
fn too_long_rows_beyond_the_allowed_share_are_refused() {
    let folder = scene();
    let of_length = |more: &str| format!("capability = \"search\"\ntrain.max_length = 118\n{more}");
    configure(&folder, "short", &of_length(""));
    let second = trajectory::read(&folder.path().join("train.jsonl")).expect("rows").swap_remove(1); // the first of two hops
    let row = format!("{}#1 needs 120 tokens, max_length is 118", second.id);
    refused(&folder, "short.toml", 1, &["8 of 16 stages are too long, more than the 1%", &row, " and 3 more", "max_lost"]);
    assert!(!folder.path().join("short").exists());
    configure(&folder, "allowed", &of_length("train.max_lost = 0.5\n"));
    let said = train(&folder, "allowed.toml").stderr;
    assert!(said.contains("8 samples") && said.contains("left out: 8 longer than 118 tokens"), "{said}");
}

#[test]
fn a_target_that_matches_nothing_is_refused() {
    let folder = scene();
    configure(&folder, "plan", "lora.targets = [\"q_proj\", \"qproj\"]\n");
    refused(&folder, "plan.toml", 2, &["plan.toml: [lora] target \"qproj\" matches no module", "did you mean q_proj?"]);
    assert!(!folder.path().join("plan").exists());
    for (targets, n_modules) in [("", 14), ("lora.targets = \"paper\"\n", 15), ("lora.targets = [\"q_proj\"]\n", 2)] {
        configure(&folder, "plan", targets);
        let preview: Value = serde_json::from_str(&train(&folder, "plan.toml --dry-run --json").stdout).expect("JSON");
        assert_eq!(preview["modules"].as_array().map(Vec::len), Some(n_modules), "{preview}");
        assert_eq!(preview["trained_tensors"], json!(2 * n_modules));
    }
    assert!(!folder.path().join("plan").exists());
}

#[test]
fn training_twice_gives_the_same_bytes() {
    let folder = scene();
    for name in ["first", "second"] {
        configure(&folder, name, "");
        train(&folder, &format!("{name}.toml"));
    }
    check_same(&folder.path().join("first"), &folder.path().join("second"));
}

/// Whoever computes a number adds it up in the same order.
#[test]
fn the_number_of_threads_changes_nothing() {
    let folder = scene();
    for (kind, keys) in [("lora", ""), ("full", FULL)] {
        for threads in ["1", "3"] {
            let name = format!("{kind}-{threads}");
            configure(&folder, &name, keys);
            let mut command = command(&folder, &format!("train {name}.toml"));
            let output = command.env("RAYON_NUM_THREADS", threads).output().expect("the binary runs");
            assert!(output.status.success(), "{output:?}");
        }
        check_same(&folder.path().join(format!("{kind}-1")), &folder.path().join(format!("{kind}-3")));
    }
}

#[test]
fn composed_and_fused_operators_give_the_same_losses() {
    let folder = scene();
    for (kind, keys) in [("lora", ""), ("full", FULL)] {
        let [composed, fused, default] = ["composed", "fused", ""].map(|operators| {
            let name = format!("{kind}-{operators}");
            let chosen = if operators.is_empty() { String::new() } else { format!("train.operators = \"{operators}\"\n") };
            configure(&folder, &name, &format!("{keys}train.steps = 50\ntrain.lr = 1e-3\n{chosen}"));
            train(&folder, &format!("{name}.toml"));
            batches(&folder.path().join(name))
        });
        assert_eq!((composed.len(), &fused), (50, &default));
        let loss = |step: &Step| step.loss.expect("supervised tokens");
        let differences = composed.iter().zip(&fused).map(|(a, b)| (loss(a) - loss(b)).abs());
        let largest = differences.fold(0.0, f64::max);
        assert!(largest > 0.0 && largest < 1e-4, "{kind}: the losses differ by {largest:e}");
    }
    let f16 = "train.operators = \"fused\"\ntrain.dtype = \"f16\"\n";
    configure(&folder, "f16", f16);
    refused(&folder, "f16.toml", 1, &["[train] operators = \"fused\": this device has none for F16"]);
}

/// Samples are packed one after another, so that none is padded however their lengths differ.
#[test]
fn the_share_of_padding_is_logged() {
    let folder = scene();
    configure(&folder, "plan", "train.batch_rows = 16\n");
    let lengths: BTreeSet<usize> = samples(&folder, "plan").iter().map(|s| s.ids.len()).collect();
    assert!(lengths.len() > 1, "{lengths:?}");
    train(&folder, "plan.toml");
    let log = fs::read_to_string(folder.path().join("plan/log.jsonl")).expect("a log");
    let steps: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let steps: Vec<&Value> = steps.iter().filter(|event| event["event"] == "step").collect();
    assert_eq!(steps.len(), 6);
    assert!(steps.iter().all(|step| step["padding"] == json!(0.0)), "{log}");
}

/// The prediction's parts add up to its total, which no run exceeds.
#[test]
fn a_dry_run_predicts_the_peak_memory_by_part() {
    let folder = scene();
    for (kind, keys) in [("lora", ""), ("full", FULL)] {
        let [kept, recomputed] = [false, true].map(|recompute| {
            let name = format!("{kind}-{recompute}");
            configure(&folder, &name, &format!("{keys}train.recompute = {recompute}\nvalid.data = [\"valid.jsonl\"]\n"));
            let preview: Value =
                serde_json::from_str(&train(&folder, &format!("{name}.toml --dry-run --json")).stdout).expect("JSON");
            let memory = &preview["memory"];
            let n_trained = preview["trained_parameters"].as_u64().expect("a number");
            let part = |name: &str| memory["bytes"][name].as_u64().unwrap_or_else(|| panic!("{name} of {memory}"));
            assert_eq!((part("trained_parameters"), part("moments")), (4 * n_trained, 8 * n_trained));
            let parts: u64 = memory["bytes"].as_object().expect("parts").values().filter_map(Value::as_u64).sum();
            assert_eq!(parts, 2 * part("total"), "{memory}");
            let expected = if recompute { memory["micro_batches"].as_u64() } else { Some(0) };
            assert_eq!(memory["recomputed"].as_u64(), expected);

            train(&folder, &format!("{name}.toml"));
            if let Some(peak) = done(&folder.path().join(&name)).peak_bytes {
                assert!(peak <= part("total"), "{name}: {peak} bytes, {memory}");
            }
            (part("activations"), part("block_inputs"))
        });
        assert!(kept.0 == 2 * recomputed.0 && kept.1 == 0 && recomputed.1 > 0, "{kept:?} {recomputed:?}");
    }
}

#[test]
fn b_is_trained_from_step_one_and_frozen_weights_have_no_gradient() {
    let folder = scene();
    configure(&folder, "plan", "lora.targets = \"paper\"\n");
    train(&folder, "plan.toml");
    let config = peft::read(&folder.path().join("plan")).expect("an adapter").config().clone();
    let backbone = backbone(&folder.path().join("model"));
    let (trainable, mut parameters) = Trainable::fresh_lora(config, &backbone.config, 0, &Device::flex()).expect("modules");
    assert_eq!(parameters.len(), 2 * 15);
    let batch = samples(&folder, "plan");
    let batch: Vec<&Sample> = batch.iter().take(4).collect();
    let norms = |parameters: &[optim::Parameter]| -> Vec<f64> {
        let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
        let plan = Plan { micro_rows: Some(2), recompute: None };
        let result = batch_gradient(&trainable, &backbone, &values, &batch, plan).expect("ids fit").expect("supervised tokens");
        result.gradients.into_iter().map(|g| optim::global_norm(&[g.expect("a gradient")])).collect()
    };
    for (parameter, norm) in parameters.iter().zip(norms(&parameters)) {
        assert_eq!(norm > 0.0, parameter.name.ends_with(".lora_B"), "{} has the norm {norm}", parameter.name);
    }
    for parameter in &mut parameters {
        parameter.value = parameter.value.clone() + 0.01;
    }
    assert!(norms(&parameters).iter().all(|norm| *norm > 0.0), "with B unequal to zero, A has a gradient too");
    let mut n_tracked = 0;
    backbone.map(&mut |_, weight| {
        n_tracked += usize::from(match &weight {
            weact::core::model::Parameter::Vector(v) => v.is_require_grad(),
            weact::core::model::Parameter::Matrix(m) => m.is_require_grad(),
        });
        weight
    });
    assert_eq!(n_tracked, 0);
}

/// Also, 900 batches of two lengths need no more memory than 300.
#[test]
fn logs_without_a_terminal_are_plain_and_short() {
    let folder = scene();
    configure(&folder, "plan", "train.steps = 1000\ntrain.batch_rows = 1\ntrain.save_every = 250\n");
    let path = folder.path().join("log");
    let file = File::create(&path).expect("a file");
    let mut command = command(&folder, "train plan.toml");
    command.stdout(file.try_clone().expect("a handle")).stderr(file);
    let mut child = command.spawn().expect("it runs");
    let memory = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok())
    };
    wait_for(&folder.path().join("plan"), "loss", 300);
    let early = memory();
    wait_for(&folder.path().join("plan"), "loss", 900);
    let late = memory();
    assert!(child.wait().expect("it ends").success());
    if let (Some(early), Some(late)) = (early, late) {
        // A mebibyte of the allocator's own is 20 % here. Keeping one gradient of each batch would take ten.
        assert!(late <= early + 1024, "{early} kB after 300 batches, {late} kB after 900");
    }
    let log = fs::read_to_string(path).expect("text");
    assert!(!log.contains(['\r', '\x1b']), "{log:?}");
    assert!((20..200).contains(&log.lines().count()), "{log}");
}

#[test]
fn continue_from_goes_on_from_the_adapters_factors() {
    let folder = scene();
    let valid = "valid.data = [\"valid.jsonl\"]\n";
    configure(&folder, "first", valid);
    configure(&folder, "second", &format!("{valid}lora.continue_from = \"first\"\n"));
    configure(&folder, "third", "lora.continue_from = \"first\"\nlora.rank = 8\n");
    train(&folder, "first.toml");
    train(&folder, "second.toml");
    let [first, second] = ["first", "second"].map(|name| validations(&folder.path().join(name)));
    let (begins, ended) = (&second[0], first.last().expect("a validation"));
    assert_eq!((begins.step, begins.nll), (0, ended.nll));
    assert!(begins.nll < first[0].nll && second.last().expect("a validation").nll != begins.nll);
    refused(&folder, "third.toml", 1, &["must be those of the adapter that continue_from names"]);
}

#[test]
fn validation_loss_falls() {
    let folder = scene();
    configure(&folder, "plan", "train.steps = 25\nvalid.data = [\"valid.jsonl\"]\nvalid.every = 10\n");
    train(&folder, "plan.toml");
    let validations = validations(&folder.path().join("plan"));
    assert_eq!(validations.iter().map(|v| v.step).collect::<Vec<_>>(), [0, 10, 20, 25]);
    assert!(validations.windows(2).all(|pair| pair[1].nll < pair[0].nll && pair[0].tokens == pair[1].tokens), "{validations:?}");
    assert!(validations[0].nll - validations[3].nll > 1.0, "{validations:?}");
}

#[test]
fn full_training_writes_a_model_that_loads_scores_lower_and_leaves_the_source_untouched() {
    let folder = scene();
    configure(&folder, "full", &format!("{FULL}train.steps = 20\n"));
    let source = files(&folder.path().join("model"));
    train(&folder, "full.toml");
    assert!(source == files(&folder.path().join("model")));
    let rows: String = samples(&folder, "full")
        .iter()
        .map(|s| {
            format!("{}\n", json!({"id": s.id, "ids": s.ids, "mask": s.mask.iter().map(|m| u8::from(*m)).collect::<Vec<_>>()}))
        })
        .collect();
    fs::write(folder.path().join("rows.jsonl"), rows).expect("a writable folder");
    let [before, after] = ["model", "full"].map(|model| {
        let outcome = weact(&folder, &format!("score --model {model} --input rows.jsonl --out {model}.scores --json"));
        let summary: Value = serde_json::from_str(&outcome.stdout).unwrap_or_else(|_| panic!("{}", outcome.stderr));
        summary["nll_nats_mean"].as_f64().expect("a number")
    });
    assert!(before - after > 1.0, "{before} and {after}");
    assert_eq!(batches(&folder.path().join("full")).len(), 20);
    Chat::open(&folder.path().join("full"), ToolProtocol::Template).expect("the model brings its tokenizer and template");
}

/// The token that ends a turn is trained, so that a policy which knows a row by heart ends each of its turns.
#[test]
fn over_fitting_one_row_makes_greedy_decoding_stop_by_itself() {
    let folder = scene();
    let rows = fs::read_to_string(folder.path().join("train.jsonl")).expect("text");
    fs::write(folder.path().join("one.jsonl"), rows.lines().next().expect("a row")).expect("a writable folder");
    let keys = "data = [\"one.jsonl\"]\nlora.targets = \"paper\"\nlora.rank = 16\ntrain.steps = 60\ntrain.lr = 3e-2\n";
    configure(&folder, "search", &format!("capability = \"search\"\n{keys}"));
    train(&folder, "search.toml");

    let checkpoint = Checkpoint::open(&folder.path().join("model"), false).expect("a checkpoint");
    let chat = Chat::open(&folder.path().join("model"), ToolProtocol::Template).expect("a chat");
    let engine = Engine::new(Arc::new(backbone(&folder.path().join("model"))), checkpoint.digest());
    let adapter = peft::read(&folder.path().join("search")).expect("an adapter");
    let handle = engine.make_resident(&adapter).expect("it fits");
    let [sample] = &samples(&folder, "search")[..] else { panic!("one sample") };
    let starts: Vec<usize> = (1..sample.mask.len()).filter(|i| sample.mask[*i] && !sample.mask[*i - 1]).collect();
    assert!(starts.len() >= 2, "a search and the exit call");
    for start in starts {
        let turn: Vec<u32> =
            sample.ids[start..].iter().zip(&sample.mask[start..]).take_while(|(_, m)| **m).map(|(id, _)| *id).collect();
        assert_eq!(turn.last(), Some(&chat.end_of_turn()));
        let mut session = engine.session();
        session.switch(Some((sample.capability.clone(), handle.clone())));
        session.append(&sample.ids[..start]);
        let mut greedy = Sampler::new(Sampling::default()).expect("legal settings");
        let stop = BTreeSet::from([chat.end_of_turn()]);
        let said = session.generate(&mut greedy, turn.len() + 2, &stop, &|| false, &mut |_| {}).expect("it runs");
        assert_eq!((said.ids, said.finish), (turn, Finish::Stop));
    }
}
