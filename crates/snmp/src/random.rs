//! Numbers that nobody else can guess, from a seed.

use std::fmt;

use ring::hmac;

/// A stream of numbers.
pub(crate) struct Random {
    key: hmac::Key,
    count: u64,
}

impl Random {
    pub(crate) fn new(seed: &[u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, seed), count: 0 }
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.count += 1;
        let tag = hmac::sign(&self.key, &self.count.to_be_bytes());
        tag.as_ref().iter().take(8).fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// A number of a message or request.
    pub(crate) fn id(&mut self) -> i32 {
        (self.word() >> 33) as i32
    }
}

impl fmt::Debug for Random {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Random").field("count", &self.count).finish_non_exhaustive()
    }
}
