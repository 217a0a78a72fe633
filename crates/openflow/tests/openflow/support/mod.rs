//! Test vectors, and the messages that they encode.
pub(crate) mod any;
pub(crate) mod entry;
pub(crate) mod memory;
pub(crate) mod pair;
pub(crate) mod samples;

use bytes::Bytes;

/// Name and bytes of each vector in `vectors.txt`.
pub(crate) fn vectors() -> Vec<(&'static str, Bytes)> {
    include_str!("../../vectors.txt").lines().map(vector).collect()
}

fn vector(line: &'static str) -> (&'static str, Bytes) {
    let (name, digits) = line.split_once(": ").expect("a name and digits");
    (name, unhex(digits))
}

pub(crate) fn unhex(digits: &str) -> Bytes {
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits")).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
