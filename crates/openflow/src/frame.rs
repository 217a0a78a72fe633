//! Splits a stream of bytes into messages.

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

use crate::message::{HEADER, Header};
use crate::wire::MAX_MESSAGE;

/// Splits a stream of bytes into messages, of any version.
///
/// It keeps the bytes that were pushed and nothing else: a header that announces a long message causes no allocation.
#[derive(Debug)]
pub struct Splitter {
    buffer: BytesMut,
    largest: usize,
    /// The first error. What follows it has no meaning.
    failed: Option<FrameError>,
}

/// Why a stream cannot be split any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The length is shorter than the header that it includes.
    #[error("a message announces {} bytes, fewer than its header has", header.length)]
    Short {
        /// The header.
        header: Header,
    },
    /// The length is above the limit.
    #[error("a message announces {} bytes, more than the limit of {limit}", header.length)]
    Long {
        /// The header.
        header: Header,
        /// The limit.
        limit: usize,
    },
}

impl Default for Splitter {
    fn default() -> Self {
        Self::new(MAX_MESSAGE)
    }
}

impl Splitter {
    /// A splitter that refuses messages of more than `largest` bytes. The protocol itself allows [`MAX_MESSAGE`].
    pub fn new(largest: usize) -> Self {
        Self { buffer: BytesMut::new(), largest, failed: None }
    }

    /// Adds received bytes. After an error they are ignored.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// Bytes that belong to no complete message yet, and those of messages that were not taken.
    pub fn waiting(&self) -> usize {
        self.buffer.len()
    }

    /// Takes the next complete message. The first error is final.
    pub fn next_message(&mut self) -> Result<Option<Bytes>, FrameError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let Some(header) = Header::read(&self.buffer) else { return Ok(None) };
        let length = usize::from(header.length);
        if length < HEADER || length > self.largest {
            let error = if length < HEADER { FrameError::Short { header } } else { FrameError::Long { header, limit: self.largest } };
            self.failed = Some(error);
            self.buffer = BytesMut::new();
            return Err(error);
        }
        // A copy, so that a message that is kept does not keep the bytes of its neighbours.
        let message = self.buffer.get(..length).map(Bytes::copy_from_slice);
        self.buffer.advance(message.as_ref().map_or(0, Bytes::len));
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: u16, xid: u8) -> Vec<u8> {
        let mut message = vec![4, 2, 0, 0, 0, 0, 0, xid];
        message[2..4].copy_from_slice(&length.to_be_bytes());
        message.resize(usize::from(length).max(HEADER), xid);
        message
    }

    #[test]
    fn a_stream_splits_alike_in_any_pieces() {
        let messages = [message(8, 1), message(1000, 2), message(u16::MAX, 3), message(9, 4)];
        let stream = messages.concat();
        for piece in [1, 7, 8, 1001, stream.len()] {
            let mut splitter = Splitter::default();
            let mut found = Vec::new();
            for bytes in stream.chunks(piece) {
                splitter.push(bytes);
                while let Some(message) = splitter.next_message().unwrap() {
                    found.push(message.to_vec());
                }
            }
            assert!(found == messages, "{piece}");
            assert_eq!(splitter.waiting(), 0);
        }
    }

    #[test]
    fn wrong_lengths_end_the_stream() {
        for (length, largest) in [(0, 100), (7, 100), (101, 100)] {
            let mut splitter = Splitter::new(largest);
            splitter.push(&[message(8, 1), message(length, 2)].concat());
            assert!(splitter.next_message().unwrap().is_some());
            let error = splitter.next_message().unwrap_err();
            splitter.push(&message(8, 3));
            assert_eq!((splitter.next_message(), splitter.waiting()), (Err(error), 0));
        }
    }

    #[test]
    fn an_announced_length_allocates_nothing() {
        let mut splitter = Splitter::default();
        splitter.push(&message(u16::MAX, 1)[..100]);
        assert_eq!(splitter.next_message(), Ok(None));
        assert!(splitter.buffer.capacity() < 1000);
    }
}
