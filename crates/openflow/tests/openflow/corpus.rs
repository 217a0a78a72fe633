//! Replays the fuzzer's corpus, and pseudo-random inputs. The prefix of a file's name in `tests/corpus` selects its entry point.

#![allow(clippy::disallowed_methods, reason = "the corpus consists of files")]

use std::path::{Path, PathBuf};

use crate::support::{entry, vectors};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

#[test]
fn the_corpus_does_not_panic() {
    let mut counts = [0; 2];
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "bin")) {
        let name = path.file_name().unwrap().to_string_lossy();
        let bytes = std::fs::read(path).unwrap();
        eprintln!("{name}");
        let at = match name.split('-').next().unwrap_or_default() {
            "message" => (entry::message(&bytes), 0).1,
            "connection" => (entry::connection(&bytes), 1).1,
            _ => panic!("{name} has no entry point's name as prefix"),
        };
        counts[at] += 1;
    }
    assert!(counts.iter().all(|count| *count > 1), "{counts:?}");
}

/// Pseudo-random numbers (SplitMix64).
struct Drawn(u64);

impl Drawn {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// A few bytes of a vector are changed, removed or repeated.
#[test]
fn damaged_vectors_do_not_panic() {
    let vectors: Vec<_> = vectors().into_iter().filter(|(_, bytes)| bytes.len() < 1000).collect();
    let mut drawn = Drawn(1);
    for _ in 0..40_000 {
        let mut bytes = vectors[drawn.below(vectors.len())].1.to_vec();
        for _ in 0..=drawn.below(6) {
            let at = drawn.below(bytes.len());
            match drawn.below(4) {
                0 => bytes[at] = drawn.next() as u8,
                1 => bytes[at] ^= 1 << drawn.below(8),
                2 => drop(bytes.drain(at..(at + 1 + drawn.below(16)).min(bytes.len()))),
                _ => bytes.extend_from_within(at..(at + 8).min(bytes.len())),
            }
            bytes.resize(bytes.len().max(8), 0);
        }
        let length = (bytes.len() as u16).to_be_bytes();
        bytes[2..4].copy_from_slice(&length);
        entry::message(&bytes);
    }
}

fn script(seed: u64, length: usize) -> Vec<u8> {
    let mut drawn = Drawn(seed);
    (0..length).map(|_| drawn.next() as u8).collect()
}

#[test]
fn random_scripts_do_not_break_connections() {
    for seed in 0..2000 {
        entry::connection(&script(seed, 30 + seed as usize % 200));
        // Without forged and lost bytes, all requests are answered.
        let honest = |byte: &u8| byte >> 1 & 7 != 6 && (byte >> 1 & 7 != 7 || byte >> 4 < 4);
        entry::connection(&script(seed, 200).into_iter().filter(honest).collect::<Vec<_>>());
    }
}

/// Rewrites the corpus, except files that the fuzzer found: `cargo test -p braid-openflow write_the_corpus -- --ignored`.
#[test]
#[ignore = "writes files"]
fn write_the_corpus() {
    std::fs::create_dir_all(folder()).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder().join(format!("{name}.bin")), bytes).unwrap();
    let wanted = ["flow_mod", "group_mod", "meter_mod", "table_features_request", "hello", "flow_reply", "features_reply", "packet_out"];
    for (name, bytes) in vectors().iter().filter(|(name, bytes)| !name.starts_with("captured/") && bytes.len() < 1000) {
        let parts: Vec<&str> = name.split('/').collect();
        if wanted.contains(&parts[2]) {
            write(&format!("message-{}-{}", parts[1], parts[2].replace('_', "-")), bytes);
        }
    }
    for number in 0..8 {
        write(&format!("connection-{number:02}"), &script(number, 100 + 50 * number as usize));
    }
}
