//! Messages from the supervisor to the front, over a pipe.

use std::io::{self, Read, Write};

/// A message to the front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// The command runs under this process ID.
    Started(i32),
    /// The command ended with this status.
    Ended(i32),
    /// The command could not be started, for this reason (`errno`).
    NoCommand(i32),
    /// The filter was refused, for this reason (`errno`).
    NoFilter(i32),
}

impl Message {
    /// Sends the message. The write is atomic: it is shorter than `PIPE_BUF`.
    pub(super) fn send(self, mut to: impl Write) -> io::Result<()> {
        let (kind, value) = match self {
            Self::Started(process) => (1, process),
            Self::Ended(status) => (2, status),
            Self::NoCommand(errno) => (3, errno),
            Self::NoFilter(errno) => (4, errno),
        };
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&i32::to_ne_bytes(kind));
        bytes[4..].copy_from_slice(&value.to_ne_bytes());
        to.write_all(&bytes)
    }

    /// Receives a message; `None` at the end of the pipe.
    pub(super) fn receive(mut from: impl Read) -> io::Result<Option<Self>> {
        let mut bytes = [0; 8];
        match from.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let [a, b, c, d, e, f, g, h] = bytes;
        let value = i32::from_ne_bytes([e, f, g, h]);
        Ok(Some(match i32::from_ne_bytes([a, b, c, d]) {
            1 => Self::Started(value),
            2 => Self::Ended(value),
            3 => Self::NoCommand(value),
            4 => Self::NoFilter(value),
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("unknown message {other}"))),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_cross_a_pipe_and_stop_at_its_end() {
        let (reader, writer) = io::pipe().unwrap();
        let all = [Message::Started(42), Message::Ended(143), Message::NoCommand(2), Message::NoFilter(-1)];
        all.iter().for_each(|message| message.send(&writer).unwrap());
        drop(writer);
        for message in all {
            assert_eq!(Message::receive(&reader).unwrap(), Some(message));
        }
        assert_eq!(Message::receive(&reader).unwrap(), None);
        assert!(Message::receive(&[9u8; 8][..]).is_err());
    }
}
