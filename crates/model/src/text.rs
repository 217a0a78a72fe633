//! Text of others, on its way to a terminal.

/// `text` with a mark in place of what would steer a terminal: control characters, and what turns the direction of writing, takes no
/// room or breaks lines. Names of processes, files and devices are others' to choose.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if steers(c) { '\u{fffd}' } else { c }).collect()
}

/// Whether a terminal may do anything with `c` but show it.
pub fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_becomes_a_mark() {
        assert_eq!(printable("a\x1b[2Jb\n\u{9b}c\u{202e}"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c\u{fffd}");
        assert_eq!(printable("plain ü 網"), "plain ü 網");
    }
}
