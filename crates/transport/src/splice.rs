//! Joins a TCP connection and a flow. Each end sees the same bytes, half-closes and resets as with a direct connection. Dead far ends are detected,
//! and a connection that is idle for a day is reset.

use std::io;
use std::time::Duration;

use braid_bond::codes;
use braid_peer::limits::Direction;
use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

use crate::account::Account;
use crate::host_driver::{BondFlow, ResetCode};
use crate::lasting::{IDLE_TIMEOUT, IdleTimer, copy_within, keep_alive};

/// Maximum size of one read.
const READ: usize = 64 << 10;

/// Copies both ways until both directions have ended. Returns the number of bytes from `stream` to `flow`, and back.
pub async fn splice(stream: TcpStream, flow: BondFlow) -> (u64, u64) {
    join(stream, flow, None).await
}

/// Like [`splice`], limited to the rate of a relay's client. Data from `stream` is the client's download.
pub(crate) async fn splice_metered(stream: TcpStream, flow: BondFlow, account: &Account) -> (u64, u64) {
    join(stream, flow, Some(account)).await
}

/// Copies both ways between two TCP connections until both directions have ended. An error of one resets the other: a truncated transfer must not
/// look complete.
pub async fn splice_connections(one: TcpStream, other: TcpStream) {
    splice_within(one, other, IDLE_TIMEOUT).await;
}

async fn splice_within(mut one: TcpStream, mut other: TcpStream, idle: Duration) {
    let linger = |one: &TcpStream, other: &TcpStream, time| {
        let _ = SockRef::from(one).set_linger(time);
        let _ = SockRef::from(other).set_linger(time);
    };
    linger(&one, &other, Some(Duration::ZERO));
    keep_alive(&other);
    if copy_within(&mut one, &mut other, idle).await.is_ok() {
        linger(&one, &other, None);
    }
}

async fn join(mut stream: TcpStream, flow: BondFlow, account: Option<&Account>) -> (u64, u64) {
    // The bond combines data into datagrams; the system's Nagle algorithm would only add delay.
    let _ = stream.set_nodelay(true);
    // Must be dropped before the socket.
    let _counted = account.map(|account| account.count_socket(flow.bond(), &stream));
    // If this is interrupted, even by the end of the process, the other end must see a reset and not an orderly end.
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    keep_alive(&stream);
    let (idle_timer, mut up, mut down) = (IdleTimer::default(), 0, 0);
    let (reader, writer) = stream.split();
    let ended = tokio::select! {
        ended = async { tokio::try_join!(send(reader, &flow, account, (&mut up, &idle_timer)), receive(writer, &flow, account, (&mut down, &idle_timer))) } => ended.is_ok(),
        () = idle_timer.expired(IDLE_TIMEOUT) => {
            flow.reset(libc::ETIMEDOUT as u64);
            false
        }
    };
    if ended {
        let _ = SockRef::from(&stream).set_linger(None);
    }
    (up, down)
}

/// Byte count of a direction, and the idle timer that transfers reset.
type Moved<'a> = (&'a mut u64, &'a IdleTimer);

async fn send(mut from: ReadHalf<'_>, flow: &BondFlow, account: Option<&Account>, (count, idle_timer): Moved<'_>) -> Result<(), ResetCode> {
    loop {
        let room = flow.room().await?.min(READ);
        // A waiting direction has no buffer. An error of the socket is returned by the read.
        let _ = from.readable().await;
        let mut buffer = BytesMut::with_capacity(READ);
        let mut part = (&mut from).take(room as u64);
        match part.read_buf(&mut buffer).await {
            Ok(0) => {
                flow.finish();
                return Ok(());
            }
            Ok(read) => {
                *count += read as u64;
                idle_timer.reset();
                pass(account, flow, Direction::Down, read).await?;
                flow.write(take(&mut buffer));
            }
            Err(error) => {
                flow.reset(code(&error));
                return Err(ResetCode(code(&error)));
            }
        }
    }
}

async fn pass(account: Option<&Account>, flow: &BondFlow, direction: Direction, amount: usize) -> Result<(), ResetCode> {
    match account {
        Some(account) if !account.pass(direction, amount).await => {
            flow.reset(codes::QUOTA);
            Err(ResetCode(codes::QUOTA))
        }
        _ => Ok(()),
    }
}

/// Copies small pieces, so that they do not keep a large buffer alive.
fn take(buffer: &mut BytesMut) -> Bytes {
    let part = buffer.split();
    if part.len() < READ / 4 * 3 { Bytes::copy_from_slice(&part) } else { part.freeze() }
}

async fn receive(
    mut to: WriteHalf<'_>,
    flow: &BondFlow,
    account: Option<&Account>,
    (count, idle_timer): Moved<'_>,
) -> Result<(), ResetCode> {
    loop {
        // Data stays in the bond until the socket accepts it. The bond counts it and grants no credit for it.
        let _ = to.writable().await;
        let Some(data) = flow.read().await? else {
            let _ = to.shutdown().await;
            return Ok(());
        };
        *count += data.len() as u64;
        pass(account, flow, Direction::Up, data.len()).await?;
        idle_timer.reset();
        if let Err(error) = to.write_all(&data).await {
            flow.stop(code(&error));
            return Err(ResetCode(code(&error)));
        }
    }
}

/// Converts a system error to a flow's code.
pub(crate) fn code(error: &io::Error) -> u64 {
    error.raw_os_error().unwrap_or(libc::ECONNRESET) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    async fn all(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.map(|_| bytes)
    }

    #[tokio::test]
    async fn regression_a_reset_of_one_connection_resets_the_other() {
        for swapped in [false, true] {
            let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
            let (one, other) = if swapped { (onward, near) } else { (near, onward) };
            let spliced = tokio::spawn(splice_connections(one, other));
            server.write_all(b"half of it").await.unwrap();
            let mut half = [0; 10];
            program.read_exact(&mut half).await.unwrap();
            SockRef::from(&server).set_linger(Some(Duration::ZERO)).unwrap();
            drop(server);
            assert_eq!(all(&mut program).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            spliced.await.unwrap();
        }
    }

    /// A second descriptor of a socket, for access to its options.
    fn watched(stream: &TcpStream) -> socket2::Socket {
        SockRef::from(stream).try_clone().unwrap()
    }

    #[tokio::test]
    async fn regression_spliced_connections_enable_keepalive() {
        let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
        let sockets = [watched(&near), watched(&onward)];
        tokio::spawn(splice_connections(near, onward));
        program.write_all(b"question").await.unwrap();
        server.read_exact(&mut [0; 8]).await.unwrap();
        for socket in sockets {
            let span = socket.tcp_keepalive_time().unwrap();
            assert!(socket.keepalive().unwrap() && span < Duration::from_secs(7200), "earlier than the system default: {span:?}");
        }
    }

    #[tokio::test]
    async fn regression_idle_spliced_connections_are_reset() {
        let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
        let spliced = tokio::spawn(splice_within(near, onward, Duration::from_millis(1)));
        for end in [&mut program, &mut server] {
            assert_eq!(all(end).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        spliced.await.unwrap();
    }

    #[tokio::test]
    async fn orderly_ends_are_preserved_per_direction() {
        let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
        tokio::spawn(splice_connections(near, onward));
        program.write_all(b"question").await.unwrap();
        program.shutdown().await.unwrap();
        assert_eq!(all(&mut server).await.unwrap(), b"question");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        assert_eq!(all(&mut program).await.unwrap(), b"answer");
    }
}
