//! What the tests at the root start from.

use std::{fs, path::Path};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use weact::{
    core::io::{checkpoint, hf_config, tensors},
    eval::world::{
        self, World, WorldConfig,
        gold::Form,
        question::{Family, Question, Split},
    },
};

/// Writes a model of the toy world with two layers and random weights into `dir/model`, and gold trajectories of sixteen training
/// and four validation questions, of one and two hops in turn, into `dir/train.jsonl` and `dir/valid.jsonl`. Always the same bytes.
pub(crate) fn toy(dir: &Path) {
    let model = dir.join("model");
    fs::create_dir(&model).expect("a new folder");
    world::checkpoint::write_checkpoint_files(&model).expect("a writable folder");
    let mut config: Value = serde_json::from_str(&world::checkpoint::config_json()).expect("JSON");
    for (key, size) in [("num_hidden_layers", 2), ("hidden_size", 32), ("intermediate_size", 64), ("head_dim", 12)] {
        config[key] = json!(size); // heads are wider than hidden_size / n_heads
    }
    config["layer_types"] = json!(vec!["full_attention"; 2]);
    fs::write(model.join("config.json"), config.to_string()).expect("a writable folder");

    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut draw = |shape: &[usize]| match shape {
        [n] => vec![1.0; *n],
        _ => (0..shape.iter().product()).map(|_| rng.random_range(-0.3_f32..0.3)).collect(), // about 1 / sqrt(hidden_size)
    };
    let shapes = checkpoint::shapes(&hf_config::read(&model).expect("a legal configuration"));
    let weights: Vec<(String, Vec<usize>, Vec<f32>)> =
        shapes.into_iter().map(|(name, shape)| (name, shape.clone(), draw(&shape))).collect();
    let named: Vec<tensors::Named<'_>> = weights.iter().map(|(n, s, v)| (n.clone(), s.clone(), v.as_slice())).collect();
    tensors::write(&model.join("model.safetensors"), &named).expect("a writable folder");

    let world = World::new(&WorldConfig::default().smooth()).expect("a world");
    let library = world.library().expect("a library");
    let gold = |question: &Question| {
        let gold = world.gold(question, Form::Staged, &library.tools().expect("tools")).expect("a gold trajectory");
        serde_json::to_string(&gold).expect("JSON") + "\n"
    };
    for (name, split, n_pairs) in [("train.jsonl", Split::Train, 8), ("valid.jsonl", Split::Val, 2)] {
        let of = |hops| world.family(Family::Chain(hops), split, n_pairs);
        let rows: String = of(1).iter().zip(&of(2)).flat_map(|(a, b)| [gold(a), gold(b)]).collect();
        fs::write(dir.join(name), rows).expect("a writable folder");
    }
}
