//! Every test that the threat model names must exist.

use std::collections::BTreeSet;
use std::path::Path;

fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text.lines().filter_map(|line| line.trim_start().trim_start_matches("async ").strip_prefix("fn "));
            found.extend(names.filter_map(|rest| Some(rest.split_once('(')?.0.to_owned())));
        }
    }
}

#[test]
fn every_test_that_the_threat_model_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = BTreeSet::new();
    ["crates", "bin", "lab/tests", "lab/src"].iter().for_each(|folder| functions(&root.join(folder), &mut found));
    let text = std::fs::read_to_string(root.join("docs/threat-model.md")).unwrap();
    let is_test = |word: &&str| {
        word.matches('_').count() >= 2 && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let named: Vec<&str> = text.split('`').filter(is_test).collect();
    assert!(named.len() > 40, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !found.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/threat-model.md names tests that do not exist: {missing:?}");
}
