//! Sanitizing untrusted text for terminal output.

/// Replaces each character for which [`steers`] is true with U+FFFD. Names of processes, files and devices come from others and may
/// contain escape sequences.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if steers(c) { '\u{fffd}' } else { c }).collect()
}

/// Whether `c` can affect a terminal beyond printing a glyph: control characters, and Unicode characters that change the writing
/// direction, have no width or break lines.
pub fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_replacement_characters() {
        assert_eq!(printable("a\x1b[2Jb\n\u{9b}c\u{202e}"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c\u{fffd}");
        assert_eq!(printable("plain ü 網"), "plain ü 網");
    }
}
