//! Test vectors of `docs/protocol.md`. The document is the reference that the code is compared with.

const DOCUMENT: &str = include_str!("../../../docs/protocol.md");

/// Rows of the table whose first column has the heading `heading`: description and bytes.
pub(crate) fn table(heading: &str) -> Vec<(String, Vec<u8>)> {
    let head = format!("| {heading} | bytes |");
    let rows = DOCUMENT.lines().skip_while(|line| *line != head).skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<_> = rows.map(row).collect();
    assert!(!rows.is_empty(), "the document has no table {head}");
    rows
}

fn row(line: &str) -> (String, Vec<u8>) {
    let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
    let digits: Vec<u8> = cells[1].bytes().filter_map(|digit| (digit as char).to_digit(16)).map(|digit| digit as u8).collect();
    (cells[0].to_owned(), digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
