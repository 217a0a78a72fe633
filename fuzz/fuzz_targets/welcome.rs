#![no_main]

#[path = "../../crates/bond/tests/support/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::welcome(bytes));
