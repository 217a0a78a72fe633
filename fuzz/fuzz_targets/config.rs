#![no_main]

#[path = "../../crates/http/tests/support/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::config(bytes));
