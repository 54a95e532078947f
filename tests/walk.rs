//! The walk of `docs/walk.md` with the toy model: from lines of JSONL to graded answers, each step from what the one before made.

#[path = "common/trained.rs"]
mod trained;

use weact::{
    core::{
        card::Card,
        episode::{Author, Cause, Event},
        io::peft,
        sample::{self, Rules},
        trajectory,
    },
    eval::world::{self, question::Split},
    infer::{agent::Finished, record::Recorder},
    train::log::{Event as Logged, Log},
};

const N_QUESTIONS: usize = 6;

#[test]
fn lines_of_jsonl_become_graded_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, adapters) = (folder.path().join("train.jsonl"), folder.path().join("adapters"));
    let rules = Rules { retention: Default::default(), max_length: 512, require_exit: true };

    // Lines of JSONL, trajectories.
    trained::write_gold(&data);
    let rows = trajectory::read(&data).expect("trajectories");
    assert!(rows.iter().all(|row| row.spans().len() == 3));

    for stage in world::stages() {
        // Loss and gradients of the factors of one capability; an adapter and its card on disk.
        let done = trained::train(&stage, &data, &adapters);
        let out = adapters.join(stage.alias.as_str());
        let card = Card::read(&out).expect("readable").expect("a card");
        let adapter = peft::read(&out).expect("an adapter");
        assert_eq!((card.stage(), &card.digest), (stage, &done.digest));
        assert_eq!((adapter.digest(), &card.base), (done.digest.as_str(), &done.base));
        let losses: Vec<f64> = Log::read(&out)
            .expect("a log")
            .iter()
            .filter_map(|event| if let Logged::Step(step) = event { step.loss } else { None })
            .collect();
        assert!(losses[losses.len() - 1] < losses[0] / 10.0, "{} learned: {losses:?}", card.alias);
    }

    // Registry, engine, agent: an episode file.
    let toy = trained::Toy::open(&adapters);
    let file = folder.path().join("episodes.jsonl");
    let questions = trained::questions(&toy.world, Split::Test, N_QUESTIONS);
    let mut n_right = 0;
    let mut finished = Vec::new();
    for question in &questions {
        let recorder = Recorder::append_to(&file, question.id.clone()).expect("a writable file");
        let episode = toy.answer(question, recorder);
        // A graded answer.
        n_right += usize::from(toy.world.grade(question, &report(&episode)).right);
        finished.push(episode);
    }
    assert!(n_right * 2 > N_QUESTIONS, "{n_right} of {N_QUESTIONS} right");

    // The episodes are trajectories again, and samples like those that were trained on.
    let episodes = trajectory::read(&file).expect("episodes");
    let views: Vec<_> = finished.iter().map(|f| f.recorder.trajectory().expect("a trajectory")).collect();
    assert_eq!(episodes, views);
    for stage in world::stages() {
        let n_left = finished.iter().filter(|f| f.outcome.stages.contains(&(stage.alias.clone(), Cause::ExitCall))).count();
        for (rows, n) in [(&rows, rows.len()), (&episodes, n_left)] {
            assert_eq!(sample::samples(&toy.chat, rows, &stage.alias, rules).expect("samples").kept.len(), n);
        }
    }
}

/// The last text that the policy wrote.
fn report(finished: &Finished) -> String {
    let mut by_model = finished.recorder.events().iter().rev().filter_map(|event| match event {
        Event::Message(m) if m.author == Author::Model && !m.message.content.is_empty() => Some(&m.message.content),
        _ => None,
    });
    by_model.next().cloned().unwrap_or_default()
}
