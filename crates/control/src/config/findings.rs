//! Findings about a configuration file, each with its position, reason and remedy.

use std::fmt;
use std::ops::Range;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The file is refused.
    Error,
    /// The file is accepted, but may not do what the user intended.
    Warning,
}

/// A problem in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// Name of the file, as the user gave it.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// Position of the character in the line, from 1.
    pub column: usize,
    /// Text of the line.
    pub excerpt: String,
    /// Number of marked characters, at least 1.
    pub width: usize,
    /// The problem.
    pub reason: String,
    /// The nearest valid name, if there is one.
    pub nearest: Option<String>,
    /// The remedy, if there is one.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding at `span` (in bytes) of `text`.
    pub fn at(severity: Severity, file: &str, text: &str, span: Range<usize>, reason: String) -> Self {
        let start = floor_boundary(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let excerpt = text[line_start..line_end].trim_end_matches('\r');
        let end = floor_boundary(text, span.end.min(line_start + excerpt.len()).max(start));
        Self {
            severity,
            file: file.to_owned(),
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            excerpt: excerpt.to_owned(),
            width: text[start..end].chars().count().max(1),
            reason,
            nearest: None,
            remedy: None,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        let number = self.line.to_string();
        let margin = " ".repeat(number.len());
        // Keep tabs under the line, so that the marks stay below the marked characters.
        let lead: String = self.excerpt.chars().take(self.column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        writeln!(f, "{}:{}:{}: {word}: {}", self.file, self.line, self.column, self.reason)?;
        writeln!(f, " {number} | {}", self.excerpt)?;
        write!(f, " {margin} | {lead}{}", "^".repeat(self.width))?;
        if let Some(nearest) = &self.nearest {
            write!(f, "\n {margin} = did you mean \"{nearest}\"?")?;
        }
        if let Some(remedy) = &self.remedy {
            write!(f, "\n {margin} = {remedy}")?;
        }
        Ok(())
    }
}

fn floor_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_shows_its_line_and_marks_the_place() {
        let text = "version = 1\n\tschedüler = 3\n";
        let start = text.find("schedüler").unwrap();
        let mut finding = Finding::at(Severity::Error, "f.toml", text, start..start + "schedüler".len(), "no such key".into());
        finding.nearest = Some("scheduler".into());
        finding.remedy = Some("write it so".into());
        assert_eq!((finding.line, finding.column, finding.width), (2, 2, 9));
        let expected =
            "f.toml:2:2: error: no such key\n 2 | \tschedüler = 3\n   | \t^^^^^^^^^\n   = did you mean \"scheduler\"?\n   = write it so";
        assert_eq!(finding.to_string(), expected);
    }

    #[test]
    fn spans_outside_the_text_or_within_a_character_are_accepted() {
        for span in [0..0, 1..2, 5..90, 90..91] {
            let finding = Finding::at(Severity::Warning, "f", "ü\n", span, String::new());
            assert!(finding.width >= 1 && finding.line <= 2);
        }
    }
}
