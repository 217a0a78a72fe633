#![no_main]
#![allow(dead_code, reason = "the model of the tests can more")]

#[path = "../../crates/network/tests/network/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::entry::sfnet(bytes));
