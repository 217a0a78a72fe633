//! Replays the fuzzer's corpus: each file of `tests/corpus` through the entry that its name starts with, whole, truncated, and with a bit flipped.

#[path = "support/entry.rs"]
mod entry;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../braid.example.toml");

fn through(kind: &str, bytes: &[u8]) {
    match kind {
        "config" => entry::config(bytes),
        "body" => {
            let _ = entry::body(bytes, Path::new(EXAMPLE));
        }
        other => panic!("unknown entry {other}"),
    }
}

/// The corpus: each file's name, entry and content.
fn corpus() -> Vec<(String, String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let file = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let kind = name.split('-').next().unwrap_or_default().to_owned();
        (name, kind, std::fs::read(path).unwrap())
    };
    files.into_iter().map(file).collect()
}

#[test]
fn the_corpus_causes_no_panic() {
    let mut counts = [0; 2];
    for (name, kind, bytes) in corpus() {
        eprintln!("{name}");
        through(&kind, &bytes);
        counts[usize::from(kind == "body")] += 1;
    }
    assert!(counts.iter().all(|count| *count > 1), "{counts:?}");
}

#[test]
fn every_request_body_of_the_api_has_an_entry_and_a_corpus_file() {
    let document: serde_json::Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let paths = document["paths"].as_object().unwrap().iter();
    let bodies: BTreeSet<&str> =
        paths.filter(|(_, methods)| methods["post"]["requestBody"].is_object()).map(|(path, _)| path.as_str()).collect();
    assert_eq!(bodies, entry::OPERATIONS.into_iter().collect());
    let files = corpus();
    for (place, operation) in entry::OPERATIONS.iter().enumerate() {
        assert!(
            files.iter().any(|(_, kind, bytes)| kind == "body" && bytes[0] == b'0' + place as u8),
            "{operation} has no file in the corpus"
        );
    }
}

#[test]
fn truncated_and_bit_flipped_inputs_cause_no_panic() {
    let mut count = 0;
    for (_, kind, bytes) in corpus() {
        // About 200 positions of a long file.
        let step = (bytes.len() / 200).max(1);
        for at in (0..bytes.len()).step_by(step) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 7);
            through(&kind, &flipped);
            through(&kind, &bytes[..at]);
            count += 1;
        }
    }
    assert!(count > 500, "{count}");
}

#[test]
fn the_example_configuration_is_accepted() {
    entry::config(&std::fs::read(EXAMPLE).unwrap());
}
