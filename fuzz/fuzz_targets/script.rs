#![no_main]

#[path = "../../crates/bond/tests/support/forge.rs"]
mod forge;
#[path = "../../crates/bond/tests/support/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| script::run(bytes));
