#![no_main]

#[path = "../../crates/openflow/tests/openflow/support/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::message(bytes));
