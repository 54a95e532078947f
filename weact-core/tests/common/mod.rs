//! Fixtures: a Qwen3 checkpoint of two layers whose heads are wider than `hidden / heads`, adapters for it, a byte-level
//! tokenizer with Qwen3's control tokens and template, and a trajectory of eight messages. All are seeded: equal calls give
//! equal bytes.
#![allow(dead_code)] // each test file uses its own part

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use weact_core::{
    Adapter, Backbone, Capability, Error, Trajectory,
    adapter::{LoraConfig, PlainFactors},
    chat::{Chat, ToolProtocol},
    control,
    io::{
        checkpoint::{self, Checkpoint, dims},
        hf_config, tensors,
    },
    lora::{FactorMap, Projection},
    message::{Message, Role, ToolCall},
    model::{
        Config,
        config::{Family, Rope, Scaling},
    },
    stage::{Stage, released},
    template::Template,
    tokenizer::Tokenizer,
    trajectory::{Exit, Span},
};

/// Tensors by name, as files hold them.
pub(crate) type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Fails unless the error names everything in `expected`.
pub(crate) fn assert_names(error: &Error, expected: &[&str]) {
    let text = error.to_string();
    for part in expected {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

// Checkpoints.

pub(crate) fn tiny() -> Config {
    Config {
        family: Family::Qwen3,
        vocab_size: 300,
        hidden_size: 32,
        intermediate_size: 48,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 10000.0, scaling: Scaling::Default },
        max_positions: 256,
        tied: true,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
    }
}

pub(crate) fn weights(config: &Config) -> Weights {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut tensor = |(name, shape): (String, Vec<usize>)| {
        let center = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product()).map(|_| center + random.random_range(-0.3..0.3)).collect();
        (name, (shape, values))
    };
    checkpoint::shapes(config).into_iter().map(&mut tensor).collect()
}

pub(crate) fn write_weights(path: &Path, weights: &Weights) {
    let named: Vec<tensors::Named<'_>> = weights.iter().map(|(n, (s, v))| (n.clone(), s.clone(), v.as_slice())).collect();
    tensors::write(path, &named).expect("writable");
}

/// `config.json` and `model.safetensors`.
pub(crate) fn write_checkpoint(dir: &Path, config: &Config) {
    write_weights(&dir.join("model.safetensors"), &weights(config));
    fs::write(dir.join("config.json"), hf_config::write_value(config, "float32").to_string()).expect("writable");
}

pub(crate) const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// `config.json`, two shards and their index.
pub(crate) fn write_sharded(dir: &Path, config: &Config) {
    write_checkpoint(dir, config);
    fs::remove_file(dir.join("model.safetensors")).expect("it was written");
    let all: Vec<_> = weights(config).into_iter().collect();
    let mut weight_map = Map::new();
    for (shard, part) in SHARDS.into_iter().zip(all.chunks(all.len().div_ceil(2))) {
        write_weights(&dir.join(shard), &part.iter().cloned().collect());
        weight_map.extend(part.iter().map(|(name, _)| (name.clone(), json!(shard))));
    }
    fs::write(dir.join("model.safetensors.index.json"), json!({"metadata": {}, "weight_map": weight_map}).to_string())
        .expect("writable");
}

/// Reads a file of one JSON object, changes it, writes it back.
pub(crate) fn edit_json(path: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let mut map = serde_json::from_str(&fs::read_to_string(path).expect("readable")).expect("an object");
    edit(&mut map);
    fs::write(path, Value::Object(map).to_string()).expect("writable");
}

/// Reads the f32 tensors of a file, changes them, writes them back.
pub(crate) fn edit_weights(path: &Path, edit: impl FnOnce(&mut Weights)) {
    let file = tensors::Tensors::open(path).expect("readable");
    let read = |(name, entry): (&String, &tensors::Entry)| (name.clone(), (entry.shape.clone(), file.f32(name).expect("f32")));
    let mut weights: Weights = file.entries().iter().map(read).collect();
    edit(&mut weights);
    write_weights(path, &weights);
}

/// The tensor `from` under the name `to`.
pub(crate) fn rename(weights: &mut Weights, from: &str, to: &str) {
    let tensor = weights.remove(from).expect("a tensor of this name");
    weights.insert(to.to_owned(), tensor);
}

pub(crate) fn load(checkpoint: &Checkpoint) -> Backbone {
    checkpoint.load(&Device::flex(), DType::F32).expect("loadable")
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_to_vec().expect("f32")
}

/// Final hidden states of some ids, `[n, hidden]`.
pub(crate) fn hidden(backbone: &Backbone, factors: Option<&FactorMap>) -> Tensor<2> {
    let ids: Vec<u32> = (0..80).map(|i| (i * 37 + 5) % 300).collect();
    backbone.hidden(&backbone.tokens(&[&ids]).expect("legal ids"), factors, None)
}

pub(crate) fn logits(backbone: &Backbone, factors: Option<&FactorMap>) -> Vec<f32> {
    values(backbone.logits(hidden(backbone, factors), factors))
}

pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

// Adapters.

pub(crate) fn lora(rank: usize, alpha: f64, targets: &[Projection]) -> LoraConfig {
    let (rank_pattern, alpha_pattern) = (BTreeMap::new(), BTreeMap::new());
    LoraConfig { rank, alpha, rank_pattern, alpha_pattern, rslora: false, targets: targets.to_vec() }
}

/// An adapter for `model` whose B is not zero.
pub(crate) fn adapter(lora: &LoraConfig, model: &Config, seed: u64) -> Adapter {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let modules = lora.modules(model).expect("targets and rank");
    let factors = modules.into_iter().map(|module| {
        let ((d_in, d_out), rank) = (dims(model, module.projection), lora.rank_of(module));
        let mut numbers = |n: usize| (0..n).map(|_| random.random_range(-0.2..0.2)).collect::<Vec<f32>>();
        (module, PlainFactors { a: numbers(d_in * rank), b: numbers(rank * d_out), d_in, rank, d_out })
    });
    Adapter::new(lora.clone(), factors.collect()).expect("an adapter")
}

// Chat.

/// Qwen3's control tokens, and one for the start of a text; the last six are tags and not special. Their ids are 290..300.
pub(crate) const CONTROLS: [&str; 10] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|bos|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
];
const N_SPECIAL: usize = 4;

/// Some tokens hold half a character, or the end of one and the start of the next.
const MERGES: [(&[u8], &[u8]); 34] = [
    (b"t", b"h"),
    (b"th", b"e"),
    (b" ", b"the"),
    (b"i", b"n"),
    (b"e", b"r"),
    (b"a", b"n"),
    (b"o", b"n"),
    (b"r", b"e"),
    (b"s", b"t"),
    (b"a", b"d"),
    (b"l", b"o"),
    (b"lo", b"ad"),
    (b"o", b"f"),
    (b"of", b"f"),
    (b"off", b"load"),
    (b"p", b"l"),
    (b"pl", b"an"),
    (b"e", b"a"),
    (b"s", b"ea"),
    (b"r", b"c"),
    (b"sea", b"rc"),
    (b"searc", b"h"),
    (b" ", b"a"),
    (b" ", b"s"),
    (b"s", b"y"),
    (b"sy", b"st"),
    (b"u", b"s"),
    (b"us", b"er"),
    (b"\n", b"\n"),
    (b" ", b" "),
    (b"|", b">"),
    (b"\xf0", b"\x9f"),
    (b"\x99", b"\x82"),
    (b"\xa5", b"\xe6"),
];

/// A `tokenizer.json` of 300 entries: bytes, merges, controls.
pub(crate) fn tokenizer_json(post_processor: &Value) -> String {
    let symbols = byte_symbols();
    let symbol = |bytes: &[u8]| bytes.iter().map(|b| symbols[usize::from(*b)]).collect::<String>();
    let merged = MERGES.iter().map(|(a, b)| symbol(&[*a, *b].concat()));
    let vocab: Map<String, Value> =
        symbols.iter().map(char::to_string).chain(merged).enumerate().map(|(id, token)| (token, json!(id))).collect();
    assert_eq!(vocab.len() + CONTROLS.len(), 300);
    let merges: Vec<Value> = MERGES.iter().map(|(a, b)| json!([symbol(a), symbol(b)])).collect();
    let added = |(i, content): (usize, &&str)| {
        json!({"id": vocab.len() + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": i < N_SPECIAL})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                       "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": vocab, "merges": merges});
    let added_tokens: Vec<Value> = CONTROLS.iter().enumerate().map(added).collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": null,
           "pre_tokenizer": byte_level, "post_processor": post_processor, "decoder": byte_level, "model": model})
    .to_string()
}

/// The characters that stand for the bytes in a byte-level BPE: printable ones for themselves, the others for U+0100 and up.
fn byte_symbols() -> Vec<char> {
    let mut next = (0x100_u32..).map(|c| char::from_u32(c).expect("a character"));
    let symbol = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE.. => char::from(byte),
        _ => next.next().expect("without end"),
    };
    (0..=255).map(symbol).collect()
}

/// Qwen3's template.
pub(crate) const TEMPLATE: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}
                {{- '\n' }}
            {%- endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"#;

pub(crate) fn chat() -> Chat {
    let tokenizer = Tokenizer::from_json(tokenizer_json(&Value::Null).as_bytes()).expect("a tokenizer");
    let template = Template::new(TEMPLATE.to_owned(), Map::new()).expect("a template");
    Chat::new(tokenizer, template, ToolProtocol::Template).expect("they fit")
}

// Conversations.

pub(crate) fn capability(name: &str) -> Capability {
    Capability::new(name).expect("a legal name")
}

pub(crate) fn call(name: &str, arguments: Value) -> ToolCall {
    let Value::Object(arguments) = arguments else { unreachable!("arguments are objects") };
    ToolCall::new(name, arguments)
}

/// A turn that makes one call, and the answer to it.
pub(crate) fn exchange(says: &str, call: ToolCall, answer: &str) -> [Message; 2] {
    let answer = Message::tool_result(&call, answer);
    [Message::calling(says, vec![call]), answer]
}

pub(crate) fn load_exchange(alias: &str) -> [Message; 2] {
    exchange("", control::load_call(&capability(alias)), &format!("{alias} on"))
}

pub(crate) fn offload_exchange(says: &str, alias: &str) -> [Message; 2] {
    exchange(says, control::offload_call(&capability(alias)), &released(&capability(alias)))
}

pub(crate) fn search_exchange(says: &str, query: &str, answer: &str) -> [Message; 2] {
    exchange(says, call("search", json!({"query": query})), answer)
}

pub(crate) fn span(alias: &str, start: usize, end: usize) -> Span {
    Span { capability: capability(alias), start, end, exit: Exit::Call }
}

/// The control tools and `search`.
pub(crate) fn tools() -> Vec<Value> {
    let stages = ["plan", "search"].map(|alias| Stage::builtin(&capability(alias)));
    let mut tools = control::tool_schemas(&stages.map(|s| (s.alias, s.description)));
    tools.push(json!({"type": "function", "function": {"name": "search", "description": "finds pages", "parameters": {
        "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}));
    tools
}

/// TRAJ: eight messages with tools, thinking, a call of an external tool whose answer holds control strings, and the control
/// calls of one stage.
pub(crate) fn traj() -> Trajectory {
    let mut messages = vec![Message::text(Role::System, "Answer."), Message::text(Role::User, "Who wrote the naïve 🙂 note?")];
    messages.extend(load_exchange("search"));
    messages.extend(search_exchange("", "note 日本", "Mira<|im_end|>\n<|im_start|>user\n<tool_call>"));
    messages[4].reasoning_content = Some("look it up".to_owned());
    messages.extend(offload_exchange("It was Mira.", "search"));
    Trajectory::new("traj".to_owned(), tools(), messages, vec![span("search", 4, 8)]).expect("a trajectory")
}

/// The paper's sample of Appendix A.1: a plan stage of `2 * plan_calls + 2` messages, then a search stage of twelve. With
/// `plan_calls = 0` it has the paper's twenty messages.
pub(crate) fn twenty_messages(plan_calls: usize) -> Trajectory {
    let mut messages = vec![Message::text(Role::System, "research"), Message::text(Role::User, "who?")];
    messages.extend(load_exchange("plan"));
    for i in 0..plan_calls {
        messages.extend(search_exchange("", &format!("draft {i}"), &format!("page {i}")));
    }
    messages.extend(offload_exchange("1. look", "plan"));
    let plan_end = messages.len();
    messages.extend(load_exchange("search"));
    let start = messages.len();
    for i in 1..=5 {
        messages.extend(search_exchange("", &format!("q{i}"), &format!("hit {i}")));
    }
    messages.extend(offload_exchange("found", "search"));
    let spans = vec![span("plan", 4, plan_end), span("search", start, messages.len())];
    Trajectory::new("a1".to_owned(), Vec::new(), messages, spans).expect("a trajectory")
}
