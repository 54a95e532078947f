//! The toy model's tokenizer: bytes, and whole words and fragments of the format as added tokens.

use serde_json::{Map, Value, json};
use weact_core::{control, stage};

use super::{
    SYSTEM,
    dialect::CODES,
    facts::{Entity, Relation, YEARS},
    general,
    pages::{ARCHIVE, N_ADDRESSES, SEE, url},
    question::UNKNOWN,
    stages,
};

/// The end of a text: padding.
pub const PAD: &str = "<|endoftext|>";
/// The end of a turn, at which sampling stops.
pub const END_OF_TURN: &str = "<|im_end|>";

/// Qwen3's control tokens, of those that the template writes, and whether they are special.
const CONTROL: [(&str, bool); 9] = [
    (PAD, true),
    ("<|im_start|>", true),
    (END_OF_TURN, true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];

/// How the format's fixed texts are cut. None holds a control token or is a tag itself: calls and turns are known by theirs.
const FRAGMENTS: [&str; 46] = [
    "system\n",
    "user\n",
    "assistant\n",
    "\nload_lora offload_lora search visit compute",
    "\nsearch visit compute",
    "what is the",
    " what is the",
    "from ",
    " of the",
    " of",
    " ?",
    "which has the earlier year ,",
    " or",
    "who is the",
    " and the",
    "how many years between",
    " and",
    "step1",
    " step2",
    " step3",
    "\n{\"name\": \"load_lora\", \"arguments\": {\"adapter\": \"",
    "\n{\"name\": \"offload_lora\", \"arguments\": {\"adapter\": \"",
    "\"}}\n",
    "\n{\"name\": \"search\", \"arguments\": {\"query\": [\"",
    "\n{\"name\": \"visit\", \"arguments\": {\"url\": [\"",
    "\n{\"name\": \"compute\", \"arguments\": {\"expr\": \"",
    "\"]}}\n",
    "\n1. (",
    "\n2. (",
    "\n3. (",
    "):",
    "\n(",
    " (",
    "\nerror: timeout\n",
    "\nno results\n",
    "\n=",
    " -",
    " copy",
    " reverse",
    " sort",
    " more",
    "cite",
    " <answer>",
    "</answer>",
    general::SYSTEM,
    SYSTEM,
];

/// The `tokenizer.json` of the toy model, in the form of the `tokenizers` library: a byte-level BPE without merges, so that any
/// text has tokens, and added tokens for names, words, codes and the format's fragments.
pub fn tokenizer_json() -> String {
    let vocab: Map<String, Value> = byte_symbols().enumerate().map(|(id, symbol)| (symbol.to_string(), json!(id))).collect();
    let added = |(i, (content, special)): (usize, (String, bool))| {
        json!({"id": vocab.len() + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": special})
    };
    let added_tokens: Vec<Value> = added_tokens().into_iter().enumerate().map(added).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []}});
    format!("{tokenizer:#}\n")
}

/// Entries of the vocabulary.
pub(super) fn vocab_size() -> usize {
    byte_symbols().count() + added_tokens().len()
}

/// The id of a control token.
pub(super) fn control_id(content: &str) -> usize {
    let place = CONTROL.iter().position(|&(control, _)| control == content).expect("a control token");
    vocab_size() - CONTROL.len() + place
}

/// With whether they are special, in the order of their ids. The control tokens stand last: a tokenizer without them, as
/// untrusted text needs it, gives the others the same ids.
fn added_tokens() -> Vec<(String, bool)> {
    let exchanges = stages().into_iter().flat_map(|stage| {
        let call = |tool: &str| format!("\n{{\"name\": \"{tool}\", \"arguments\": {{\"adapter\": \"{}\"}}}}\n", stage.alias);
        let results = [stage.activation.clone(), stage::released(&stage.alias)].map(|result| format!("\n{result}\n"));
        [call(control::LOAD), call(control::OFFLOAD)].into_iter().chain(results)
    });
    let names = Entity::all().map(Entity::name);
    let words = Relation::all().map(Relation::word);
    let page_words = Relation::all().map(Relation::page_word).filter(|&word| Relation::all().all(|r| r.word() != word));
    let spaced = names.chain(words).chain(page_words).chain(CODES).map(|word| format!(" {word}"));
    let years = YEARS.map(|year| format!(" {year}"));
    let differences = (1..YEARS.len()).map(|n| format!(" {n}"));
    let others = [ARCHIVE, SEE, UNKNOWN].map(|word| format!(" {word}"));
    let fragments = FRAGMENTS.iter().map(|&fragment| fragment.to_owned());
    let ordinary = fragments
        .chain(exchanges)
        .chain(spaced)
        .chain(others)
        .chain(years)
        .chain(differences)
        .chain((0..N_ADDRESSES).map(url))
        .map(|content| (content, false));
    ordinary.chain(CONTROL.map(|(content, special)| (content.to_owned(), special))).collect()
}

/// The character that stands for each byte in a byte-level BPE: printable bytes for themselves, the others, in order, for
/// U+0100 and up (as in GPT-2).
fn byte_symbols() -> impl Iterator<Item = char> {
    let mut next = 0x100_u32;
    (0..=255_u8).map(move |byte| {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..) {
            return char::from(byte);
        }
        next += 1;
        char::from_u32(next - 1).expect("U+0100 to U+0143 are characters")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokenizers::Tokenizer;

    use super::*;

    fn load() -> Tokenizer {
        tokenizer_json().parse().expect("the tokenizers library reads it")
    }

    fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        let ids = tokenizer.encode_fast(text, false).expect("any text encodes").get_ids().to_vec();
        ids.into_iter().map(|id| tokenizer.decode(&[id], false).expect("every id decodes")).collect()
    }

    #[test]
    fn ids_are_those_written_and_few() {
        let tokenizer = load();
        let added: Vec<String> = added_tokens().into_iter().map(|(content, _)| content).collect();
        assert_eq!(added.iter().collect::<BTreeSet<_>>().len(), added.len(), "a token stands twice");
        for (content, id) in added.iter().zip(256..) {
            assert_eq!(tokenizer.token_to_id(content), Some(id), "{content:?}");
        }
        assert_eq!(tokenizer.get_vocab_size(true), vocab_size());
        assert!(vocab_size() <= 1500, "{} entries", vocab_size());
        for (control, _) in CONTROL {
            assert_eq!(tokenizer.token_to_id(control), Some(control_id(control) as u32));
            assert_eq!(added.iter().filter(|token| token.contains(control)).count(), 1, "{control} is part of a fragment");
        }
    }

    #[test]
    fn a_word_is_one_token_wherever_it_stands() {
        let tokenizer = load();
        for [name, word, code] in [["Orun", "captain", "k11"], ["Drux", "craft", "k00"]] {
            for (text, expected) in [
                (format!("what is the {word} of the {word} of {name} ?"), 7),
                (format!("step1 {code} step2 {word}"), 4),
                (format!("\n{{\"name\": \"search\", \"arguments\": {{\"query\": [\" {name} {code}\"]}}}}\n"), 4),
                ("\n{\"name\": \"compute\", \"arguments\": {\"expr\": \" 1755 - 1742\"}}\n".to_owned(), 5),
                (format!("\n1. (p123): {name} {word} {name} {name} {code}\n2. (p045): {name} {word} {name} {name} {word}\n"), 17),
                (format!("\n(p959)\n {name} {code} more\n {name} {word} {name}\n"), 12),
                (format!("cite {name} {code} {name} {name} {word} 1742 <answer> 39</answer>"), 10),
            ] {
                assert_eq!(tokens(&tokenizer, &text).len(), expected, "{text}: {:?}", tokens(&tokenizer, &text));
            }
        }
        for (word, _) in added_tokens().iter().filter(|(token, _)| token.starts_with(' ')) {
            assert_eq!(tokens(&tokenizer, &format!("\"{word}{word}")), ["\"", word, word]);
        }
    }

    #[test]
    fn other_text_is_bytes_and_every_text_comes_back() {
        let tokenizer = load();
        let foreign = "  naïve 🙂 日本\n\tx Quux\"]}";
        assert_eq!(tokenizer.encode_fast(foreign, false).expect("ids").len(), foreign.len());
        let all_bytes = byte_symbols().collect::<String>();
        for text in [foreign, "", " Orunx captaincy k111 of theory", "Orun", "<|im_end|></answer>", &all_bytes] {
            let ids = tokenizer.encode_fast(text, false).expect("any text encodes");
            assert_eq!(tokenizer.decode(ids.get_ids(), false).expect("ids decode"), text);
        }
    }
}
