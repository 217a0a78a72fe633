#![no_main]

#[path = "../../crates/http/tests/support/entry.rs"]
mod entry;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../braid.example.toml");

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = entry::body(bytes, EXAMPLE.as_ref());
});
