//! Name patterns with `*`. Rules and energy profiles select devices by them.

use std::fmt;

/// Maximum length of a process name in the kernel, in bytes.
pub const NAME_LIMIT: usize = 15;

/// The part of a process name that the kernel keeps.
pub(crate) fn kernel_name(name: &str) -> &[u8] {
    &name.as_bytes()[..name.len().min(NAME_LIMIT)]
}

/// A name pattern. Each `*` matches any text, including the empty text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(String);

impl Pattern {
    /// Creates a pattern from its text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        let Some((head, tail)) = self.0.split_once('*') else { return self.0 == name };
        let Some(mut rest) = name.strip_prefix(head) else { return false };
        let mut parts = tail.split('*').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }

    /// Whether the pattern consists of `*` only, so that every name matches.
    pub fn is_any(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte == b'*')
    }

    /// The pattern's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
