//! Streams of a client and a network's controller: lines of [`braid_network::wire`] over TLS.

use std::io;
use std::time::Duration;

use braid_network::wire::MAX_LINE;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};
use tokio::net::TcpStream;

/// Time for the handshake of TLS.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// After this time without a packet the other end is asked whether it is there, and again after each [`ASKED`].
const QUIET: Duration = Duration::from_secs(5);
const ASKED: Duration = Duration::from_secs(2);
/// Unanswered questions after which a connection ends.
const QUESTIONS: u32 = 3;

/// The next line without its end; `None`: the other end has closed the stream. Not cancel safe.
///
/// # Errors
/// Those of the stream; `InvalidData` for a line of more than [`MAX_LINE`] bytes, or one that is no text.
pub(crate) async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    reader.take(MAX_LINE as u64).read_until(b'\n', &mut line).await?;
    let invalid = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => String::from_utf8(line).map(Some).or_else(|_| invalid("a line is no text".to_owned())),
        Some(_) if line.len() + 1 == MAX_LINE => invalid(format!("a line has more than {MAX_LINE} bytes")),
        Some(_) => invalid("the stream ended in the middle of a line".to_owned()),
    }
}

/// Lines are small and wait for nothing, and the stream ends when the other end is gone without a word.
pub(crate) fn set_up(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    // A client talks over the radio that moves: what is lost then is sent again at even intervals, and not after twice the time each time.
    let _ = SockRef::from(stream).set_tcp_thin_linear_timeouts(true);
    let keepalive = TcpKeepalive::new().with_time(QUIET).with_interval(ASKED).with_retries(QUESTIONS);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
    // While something is not acknowledged, nothing else is asked.
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(QUIET + ASKED * QUESTIONS));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_have_an_end_and_a_limit() {
        let long = vec![b'x'; MAX_LINE];
        for (bytes, expected) in [
            (&b"one\ntwo\n"[..], vec![Ok("one"), Ok("two")]),
            (b"\n", vec![Ok("")]),
            (b"half", vec![Err("in the middle of a line")]),
            (&long, vec![Err("more than 16384 bytes")]),
            (b"\xff\xfe\n", vec![Err("is no text")]),
        ] {
            let mut reader = bytes;
            for expected in expected {
                let line = read_line(&mut reader).await.map_err(|error| error.to_string());
                match (line, expected) {
                    (Ok(line), Ok(expected)) => assert_eq!(line.as_deref(), Some(expected)),
                    (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
                    (line, expected) => panic!("{line:?} is not {expected:?}"),
                }
            }
        }
        assert_eq!(read_line(&mut &b""[..]).await.unwrap(), None);
    }
}
