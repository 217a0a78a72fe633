//! Replays the fuzzer's corpus, and pseudo-random histories.

#![allow(clippy::disallowed_methods, reason = "the corpus consists of files")]

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use crate::support::entry;

#[test]
fn the_corpus_does_not_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in &files {
        eprintln!("{}", path.display());
        entry::slicer(&std::fs::read(path).unwrap());
    }
    assert!(files.len() > 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_lies_and_changes_ends_in_peace(script in prop::collection::vec(any::<u8>(), 1..200)) {
        entry::slicer(&script);
    }
}
