//! Replays the fuzzer's corpus. The prefix of a file's name in `tests/corpus` selects its entry point.

#![allow(clippy::disallowed_methods, reason = "the corpus consists of files")]

#[path = "support/entry.rs"]
mod entry;
#[path = "support/forge.rs"]
mod forge;
#[path = "support/script.rs"]
mod script;

use std::path::{Path, PathBuf};

use forge::{numbered, quiet};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

#[test]
fn the_corpus_does_not_panic() {
    let mut counts = [0; 4];
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "bin")) {
        let name = path.file_name().unwrap().to_string_lossy();
        let bytes = std::fs::read(path).unwrap();
        let kind = name.split('-').next().unwrap_or_default();
        eprintln!("{name}");
        let at = match kind {
            "frames" => (entry::frames(&bytes), 0).1,
            "hello" => (entry::hello(&bytes), 1).1,
            "welcome" => (entry::welcome(&bytes), 2).1,
            "script" => (script::run(&bytes), 3).1,
            _ => panic!("{name} has no entry point's name as prefix"),
        };
        counts[at] += 1;
    }
    assert!(counts.iter().all(|count| *count > 1), "{counts:?}");
}

#[test]
fn truncated_or_corrupted_frames_do_not_panic() {
    let table = include_str!("../../../docs/protocol.md").lines().skip_while(|line| *line != "| frame | bytes |").skip(4);
    let mut count = 0;
    for line in table.take_while(|line| line.starts_with('|')) {
        let digits: Vec<u32> = line.split('`').nth(1).unwrap_or_default().chars().filter_map(|digit| digit.to_digit(16)).collect();
        let mut datagram = vec![0];
        datagram.extend(digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8));
        for bit in 0..datagram.len() * 8 {
            let mut flipped = datagram.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            entry::frames(&flipped);
            entry::frames(&datagram[..bit / 8]);
            count += 1;
        }
    }
    assert!(count > 1000, "{count}");
}

/// Pseudo-random byte.
fn drawn(seed: u64) -> u8 {
    let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 48) as u8
}

/// Rewrites the corpus, except files that the fuzzer found: `cargo test -p braid-bond --test corpus -- --ignored`.
#[test]
#[ignore = "writes files"]
fn write_the_corpus() {
    std::fs::create_dir_all(folder()).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder().join(format!("{name}.bin")), bytes).unwrap();
    let frames = [
        ("open", quiet().open(0, 0).chunk(0, 0, b"hello", true)),
        ("ranges", (0..62).fold(numbered(1 << 40), |forge, _| forge.ping()).ack(0, (0, 0), 1 << 60, &[])),
        ("messages", quiet().open(3, 1).message(3, 0, b"m").fragment(3, 1, 254, 255, b"f").fragment(3, 1, 0, 1, b"g")),
        ("credit", quiet().credit(0, (1 << 62) - 1).total_credit((1 << 62) - 1).path(0, 1).path(0, 2).path(9, 0)),
        ("reset", quiet().open(0, 0).reset(0, 104, 512 << 10).stop(0, 32).policy(0, 1, 65_535, 0, 255, 1)),
        ("ahead", quiet().open((1 << 16) - 1, 0).message((1 << 17) - 1, (1 << 62) - 1, b"")),
        ("answers", quiet().opened(0, 111).ack(7, (0, (1 << 62) - 1), 0, &[])),
        ("long-numbers", quiet().byte(0x0a).raw(&[0xc0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 9])),
        ("empty", quiet()),
    ];
    for (name, forge) in frames {
        write(&format!("frames-{name}"), &forge.done());
    }
    let hello: Vec<u8> = [&[0, 81, 0, 1][..], &[0; 8], &[1; 16], &[2; 32], &[0, 0, 0, 7, 3, 5], &[0; 16], &[0]].concat();
    write("hello-plain", &hello);
    write("hello-longer", &[&[0, 84][..], &hello[2..], b"new"].concat());
    write("hello-link", &[&hello[..66], &[64], &hello[67..]].concat());
    write("hello-name", &[&[0, 83][..], &hello[2..hello.len() - 1], &[2, 0xc3, 0x28]].concat());
    write("hello-long", &[4, 1, 0]);
    let welcome = [&[0, 23, 0, 1][..], &[0; 15], &[6, 4], b"gone"].concat();
    write("welcome-gone", &welcome);
    write("welcome-short", &[&[0, 3][..], &welcome[2..]].concat());
    write("welcome-cut", &welcome[..20]);
    for number in 0..24u64 {
        let bytes: Vec<u8> = (0..300 + 40 * number).map(|at| drawn(number * 100_000 + at)).collect();
        write(&format!("script-{number:02}"), &[&[u8::from(number % 3 != 0)][..], &bytes].concat());
    }
}
