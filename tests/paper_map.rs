//! `docs/paper-map.md` tells for each part of the papers where it is implemented. It can't name a file that is gone.

use std::{fs, path::Path};

/// What marks a row of the map whose part of a paper has no code.
const NO_CODE: &str = "no code yet";

/// The code spans of a line that look like a path in this repository.
fn paths(line: &str) -> impl Iterator<Item = &str> {
    let is_path = |span: &&str| span.contains('/') && [".rs", ".md", ".toml", "/"].iter().any(|end| span.ends_with(end));
    line.split('`').skip(1).step_by(2).filter(is_path)
}

/// What is wrong with the map, one message per fault; a directory's path ends with a slash.
fn faults(map: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut faults = Vec::new();
    for (line, number) in map.lines().zip(1..) {
        let unwritten = line.starts_with('|') && line.contains(NO_CODE);
        for path in paths(line) {
            if unwritten {
                faults.push(format!("docs/paper-map.md:{number}: the row says `{NO_CODE}` and names {path}"));
            } else if !exists(path) {
                faults.push(format!("docs/paper-map.md:{number}: {path} does not exist"));
            }
        }
    }
    faults
}

#[test]
fn every_path_of_the_map_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let map = fs::read_to_string(root.join("docs/paper-map.md")).expect("docs/paper-map.md is readable");
    let exists = |path: &str| if path.ends_with('/') { root.join(path).is_dir() } else { root.join(path).is_file() };
    let faults = faults(&map, exists);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(map.lines().any(|line| paths(line).next().is_some()), "docs/paper-map.md names no path");
}

#[test]
fn a_missing_path_and_a_path_without_code_are_faults() {
    let map = "\
Rows marked `no code yet` wait; `docs/gone.md` is checked everywhere, `Load/Offload` and `nll.rs` are no paths.
| Eq. 1 | factors | `weact-core/src/lora.rs`, `weact-core/src/` |
| Eq. 5 | loss | `weact-core/src/nll.rs` |
| App. D | prompts | no code yet, `weact-infer/src/` |
| App. F | ranks | `no code yet` |
";
    let exists = |path: &str| ["weact-core/src/lora.rs", "weact-core/src/", "weact-infer/src/"].contains(&path);
    let expected = [
        "docs/paper-map.md:1: docs/gone.md does not exist",
        "docs/paper-map.md:3: weact-core/src/nll.rs does not exist",
        "docs/paper-map.md:4: the row says `no code yet` and names weact-infer/src/",
    ];
    assert_eq!(faults(map, exists), expected);
}
