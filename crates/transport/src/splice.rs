//! Joins a TCP connection and a flow, so that each end sees what it would have seen: bytes, half-closes, resets. Far ends that are gone are
//! noticed, and what nothing moves on for a day is reset.

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
use crate::host_driver::{BondFlow, FlowEnd};
use crate::lasting::{IDLE, Lull, copy_within, keep_alive};

/// The most that is read at a time.
const READ: usize = 64 << 10;

/// Moves bytes both ways until both directions have ended. Returns how many went from `stream` to `flow`, and back.
pub async fn splice(stream: TcpStream, flow: BondFlow) -> (u64, u64) {
    join(stream, flow, None).await
}

/// The same, at the pace that a client of a relay may have; from `stream` is what the client downloads.
pub(crate) async fn splice_metered(stream: TcpStream, flow: BondFlow, account: &Account) -> (u64, u64) {
    join(stream, flow, Some(account)).await
}

/// Moves bytes both ways between two TCP connections until both directions have ended. Whatever breaks one resets the other: a transfer that was
/// cut off must not look complete.
pub async fn splice_connections(one: TcpStream, other: TcpStream) {
    splice_within(one, other, IDLE).await;
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
    // Braid decides what goes together; the system would wait for more.
    let _ = stream.set_nodelay(true);
    // Goes before the socket does.
    let _counted = account.map(|account| account.count_socket(flow.bond(), &stream));
    // Should this be cut short, be it by the end of the process, the other end hears of a reset and not of an orderly end.
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    keep_alive(&stream);
    let (lull, mut up, mut down) = (Lull::default(), 0, 0);
    let (reader, writer) = stream.split();
    let ended = tokio::select! {
        ended = async { tokio::try_join!(send(reader, &flow, account, (&mut up, &lull)), receive(writer, &flow, account, (&mut down, &lull))) } => ended.is_ok(),
        () = lull.lasts(IDLE) => {
            flow.reset(libc::ETIMEDOUT as u64);
            false
        }
    };
    if ended {
        let _ = SockRef::from(&stream).set_linger(None);
    }
    (up, down)
}

/// What a direction has moved, and what moving ends.
type Moved<'a> = (&'a mut u64, &'a Lull);

async fn send(mut from: ReadHalf<'_>, flow: &BondFlow, account: Option<&Account>, (count, lull): Moved<'_>) -> Result<(), FlowEnd> {
    loop {
        let room = flow.room().await?.min(READ);
        // One that waits has no buffer. What is wrong with the socket, reading it tells.
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
                lull.end();
                pass(account, flow, Direction::Down, read).await?;
                flow.write(take(&mut buffer));
            }
            Err(error) => {
                flow.reset(code(&error));
                return Err(FlowEnd(code(&error)));
            }
        }
    }
}

async fn pass(account: Option<&Account>, flow: &BondFlow, direction: Direction, amount: usize) -> Result<(), FlowEnd> {
    match account {
        Some(account) if !account.pass(direction, amount).await => {
            flow.reset(codes::QUOTA);
            Err(FlowEnd(codes::QUOTA))
        }
        _ => Ok(()),
    }
}

/// Small pieces are copied, so that they do not hold a large buffer.
fn take(buffer: &mut BytesMut) -> Bytes {
    let part = buffer.split();
    if part.len() < READ / 4 * 3 { Bytes::copy_from_slice(&part) } else { part.freeze() }
}

async fn receive(mut to: WriteHalf<'_>, flow: &BondFlow, account: Option<&Account>, (count, lull): Moved<'_>) -> Result<(), FlowEnd> {
    loop {
        // What nobody takes stays in the bond, which counts it and gives no credit for it.
        let _ = to.writable().await;
        let Some(data) = flow.read().await? else {
            let _ = to.shutdown().await;
            return Ok(());
        };
        *count += data.len() as u64;
        pass(account, flow, Direction::Up, data.len()).await?;
        lull.end();
        if let Err(error) = to.write_all(&data).await {
            flow.stop(code(&error));
            return Err(FlowEnd(code(&error)));
        }
    }
}

/// An error of the system as a flow's code.
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
    async fn regression_a_reset_of_one_connection_is_a_reset_of_the_other() {
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

    /// A second descriptor of a socket, to look at its options by.
    fn watched(stream: &TcpStream) -> socket2::Socket {
        SockRef::from(stream).try_clone().unwrap()
    }

    #[tokio::test]
    async fn regression_spliced_connections_notice_far_ends_that_are_gone() {
        let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
        let sockets = [watched(&near), watched(&onward)];
        tokio::spawn(splice_connections(near, onward));
        program.write_all(b"question").await.unwrap();
        server.read_exact(&mut [0; 8]).await.unwrap();
        for socket in sockets {
            let span = socket.tcp_keepalive_time().unwrap();
            assert!(socket.keepalive().unwrap() && span < Duration::from_secs(7200), "sooner than the system would: {span:?}");
        }
    }

    #[tokio::test]
    async fn regression_spliced_connections_on_which_nothing_moves_are_reset() {
        let ((mut program, near), (mut server, onward)) = (pair().await, pair().await);
        let spliced = tokio::spawn(splice_within(near, onward, Duration::from_millis(1)));
        for end in [&mut program, &mut server] {
            assert_eq!(all(end).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        spliced.await.unwrap();
    }

    #[tokio::test]
    async fn an_orderly_end_stays_one_and_each_direction_ends_alone() {
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
