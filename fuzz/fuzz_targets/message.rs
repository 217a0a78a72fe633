#![no_main]

#[path = "../../crates/openflow/tests/support/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::message(bytes));
