//! Replays the fuzzer's corpus, and pseudo-random scripts. The prefix of a file's name in `tests/corpus` selects its entry point.

#![allow(clippy::disallowed_methods, reason = "the corpus consists of files")]

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use crate::support::entry;

#[test]
fn the_corpus_does_not_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut counts = [0; 4];
    for path in files {
        let name = path.file_name().unwrap().to_string_lossy();
        let bytes = std::fs::read(&path).unwrap();
        eprintln!("{name}");
        let at = match name.split('-').next().unwrap_or_default() {
            "line" => (entry::line(&bytes), 0).1,
            "network" => (entry::network(&bytes), 1).1,
            "ask" => (entry::ask(&bytes), 2).1,
            "sfnet" => (entry::sfnet(&bytes), 3).1,
            _ => panic!("{name} has no entry point's name as prefix"),
        };
        counts[at] += 1;
    }
    assert!(counts.iter().all(|count| *count > 1), "{counts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_lies_and_requests_ends_in_peace(script in prop::collection::vec(any::<u8>(), 1..150)) {
        entry::network(&script);
    }
}
