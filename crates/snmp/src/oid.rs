//! Names of managed objects.

use std::fmt;
use std::str::FromStr;

/// Most parts of a name. Source: RFC 3416 section 4.1.
pub const MAX_PARTS: usize = 128;

/// An OBJECT IDENTIFIER. The order is that in which agents are walked: part by part, and a prefix comes before what begins with it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Oid(Vec<u32>);

/// The text is no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an object identifier: write 2 to 128 numbers with dots, such as 1.3.6.1.2.1.1")]
pub struct OidError;

impl Oid {
    /// A name of these parts.
    ///
    /// # Errors
    /// There are fewer than 2 or more than [`MAX_PARTS`], or the first two cannot be encoded (X.690 section 8.19.4).
    pub fn new(parts: Vec<u32>) -> Result<Self, OidError> {
        let fits = match parts[..] {
            [0 | 1, second, ..] => second < 40,
            [2, second, ..] => second <= u32::MAX - 80,
            _ => false,
        };
        if fits && parts.len() <= MAX_PARTS { Ok(Self(parts)) } else { Err(OidError) }
    }

    /// A name that is known to be one.
    pub(crate) fn known(parts: &[u32]) -> Self {
        debug_assert!(Self::new(parts.to_vec()).is_ok());
        Self(parts.to_vec())
    }

    /// Its parts.
    pub fn parts(&self) -> &[u32] {
        &self.0
    }

    /// Whether it is `prefix` or below that.
    pub fn starts_with(&self, prefix: &Self) -> bool {
        self.0.starts_with(&prefix.0)
    }

    /// The name below this one by these parts; `None` if it has too many.
    pub fn below(&self, parts: &[u32]) -> Option<Self> {
        (self.0.len() + parts.len() <= MAX_PARTS).then(|| Self([&self.0, parts].concat()))
    }

    /// A name before this one, with next to nothing between: GetNext on it finds this one first. The third part is the first that may change.
    pub(crate) fn before(&self) -> Self {
        let mut parts = self.0.clone();
        match parts.pop() {
            Some(last) if last > 0 => {
                parts.push(last - 1);
                if parts.len() < MAX_PARTS {
                    parts.push(u32::MAX);
                }
            }
            _ => {}
        }
        Self(parts)
    }

    /// A name at the end of what is below this one.
    pub(crate) fn end(&self) -> Self {
        let mut parts = self.0.clone();
        if parts.len() < MAX_PARTS {
            parts.push(u32::MAX);
        }
        Self(parts)
    }
}

impl FromStr for Oid {
    type Err = OidError;

    fn from_str(text: &str) -> Result<Self, OidError> {
        let text = text.strip_prefix('.').unwrap_or(text);
        Self::new(parts(text).ok_or(OidError)?)
    }
}

/// Numbers with dots, such as the index of a row; `None` if the text is something else, or too long.
pub fn parts(text: &str) -> Option<Vec<u32>> {
    let number = |part: &str| part.bytes().all(|digit| digit.is_ascii_digit()).then(|| part.parse().ok()).flatten();
    let parts: Vec<u32> = text.split('.').map(number).collect::<Option<_>>()?;
    (parts.len() <= MAX_PARTS).then_some(parts)
}

impl fmt::Display for Oid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, part) in self.0.iter().enumerate() {
            if place > 0 {
                f.write_str(".")?;
            }
            write!(f, "{part}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Oid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oid(text: &str) -> Oid {
        text.parse().unwrap()
    }

    #[test]
    fn names_are_read_and_written() {
        assert_eq!(oid(".1.3.6.1").to_string(), "1.3.6.1");
        let long = vec!["1"; 129].join(".");
        for text in ["", "1", "1.40", "3.1", "1.3.", "1..3", "1.+3", "1.3.4294967296", "1.3.-1", &long] {
            assert_eq!(text.parse::<Oid>(), Err(OidError), "{text}");
        }
    }

    #[test]
    fn the_name_before_is_next_to_the_name() {
        for (name, before) in [("1.3.6.2", "1.3.6.1.4294967295"), ("1.3.6.0", "1.3.6")] {
            assert_eq!(oid(name).before(), oid(before));
            assert!(oid(before) < oid(name));
        }
        let full = Oid::new([vec![1; 127], vec![7]].concat()).unwrap();
        assert_eq!(full.before().parts().len(), MAX_PARTS);
        assert!(full.before() < full && full.end() == full);
    }
}
