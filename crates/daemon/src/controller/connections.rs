//! Connections of switches: tasks that accept them, agree on TLS, read and write.
//!
//! Until its switch is known, a connection has one of a few places. A new one takes the place of the oldest, first of its own source, so that those that
//! never show a switch keep nobody out.

use std::net::SocketAddr;
use std::time::Duration;

use braid_bond::host::{Source, source};
use braid_network::ConnectionId;
use braid_peer::quota::{Ended, Permit, Quota};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::{ACCEPT_AGAIN, tls};

/// Most connections whose switches are not known, and most of them from one source: all switches may return at once.
const MAX_NEW: usize = 512;
const MAX_NEW_OF_SOURCE: usize = 128;
/// Time to agree on TLS.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of a piece that is read at most.
const PIECE: usize = 16 << 10;

pub(crate) type Reading = Box<dyn AsyncRead + Send + Unpin>;
pub(crate) type Writing = Box<dyn AsyncWrite + Send + Unpin>;

/// What the tasks of connections report.
pub(crate) enum Arrival {
    /// Somebody has connected.
    New(Newcomer),
    /// Somebody did not get that far, as the text says.
    Failed(String),
    /// A switch sent this.
    Bytes(ConnectionId, Vec<u8>),
    /// What it was given is written.
    Written(ConnectionId),
    /// Its place went to another connection.
    Displaced(ConnectionId),
    /// It ended the connection, or the connection failed.
    Ended(ConnectionId),
}

/// A connection whose switch is not known.
pub(crate) struct Newcomer {
    pub(crate) peer: SocketAddr,
    pub(crate) reading: Reading,
    pub(crate) writing: Writing,
    /// Its place.
    pub(crate) place: Permit<Source>,
    /// Resolves when the place is another's, or returned.
    pub(crate) displaced: Ended,
}

/// The places of connections whose switches are not known.
pub(crate) fn places() -> Quota<Source> {
    Quota::new(MAX_NEW, MAX_NEW_OF_SOURCE)
}

/// Accepts connections for ever.
pub(crate) async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, places: Quota<Source>, arrivals: mpsc::Sender<Arrival>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // There is one: none is kept.
                let Some((place, displaced)) = places.take(source(peer)) else { continue };
                let (acceptor, arrivals) = (acceptor.clone(), arrivals.clone());
                tokio::spawn(enter(stream, peer, acceptor, place, displaced, arrivals));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a switch; trying again");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

/// Agrees on TLS, if that is in use, and reports the connection.
async fn enter(
    stream: TcpStream,
    peer: SocketAddr,
    acceptor: Option<TlsAcceptor>,
    place: Permit<Source>,
    mut displaced: Ended,
    arrivals: mpsc::Sender<Arrival>,
) {
    let secured = tokio::select! {
        secured = secure(stream, peer, acceptor) => secured,
        _ = &mut displaced => {
            let text = format!("{peer} was refused: it did not agree on TLS before others took its place");
            let _ = arrivals.try_send(Arrival::Failed(text));
            return;
        }
    };
    // If all that has arrived waits, so does this one, as long as it has its place.
    let slot = tokio::select! {
        slot = arrivals.reserve() => slot,
        _ = &mut displaced => return,
    };
    let Ok(slot) = slot else { return };
    slot.send(match secured {
        Ok((reading, writing)) => Arrival::New(Newcomer { peer, reading, writing, place, displaced }),
        Err(text) => Arrival::Failed(text),
    });
}

async fn secure(stream: TcpStream, peer: SocketAddr, acceptor: Option<TlsAcceptor>) -> Result<(Reading, Writing), String> {
    // Commands are small, and wait for nothing.
    let _ = stream.set_nodelay(true);
    let Some(acceptor) = acceptor else {
        let (reading, writing) = stream.into_split();
        return Ok((Box::new(reading), Box::new(writing)));
    };
    match timeout(TLS_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let (reading, writing) = tokio::io::split(stream);
            Ok((Box::new(reading), Box::new(writing)))
        }
        Ok(Err(error)) => Err(tls::refusal(peer, &error)),
        Err(_) => Err(format!(
            "{peer} was refused: it did not agree on TLS within {} s; connect switches by ssl:ADDRESS:PORT",
            TLS_TIMEOUT.as_secs()
        )),
    }
}

/// Reads until the connection ends.
pub(crate) async fn read(mut stream: Reading, id: ConnectionId, mut displaced: Ended, arrivals: mpsc::Sender<Arrival>) {
    let mut piece = vec![0; PIECE];
    let mut has_place = true;
    loop {
        let arrival = tokio::select! {
            size = stream.read(&mut piece) => match size {
                Ok(size @ 1..) => Arrival::Bytes(id, piece[..size].to_vec()),
                _ => break,
            },
            _ = &mut displaced, if has_place => {
                has_place = false;
                Arrival::Displaced(id)
            }
        };
        if arrivals.send(arrival).await.is_err() {
            return;
        }
    }
    let _ = arrivals.send(Arrival::Ended(id)).await;
}

/// Writes piece by piece, and ends the connection when there are no more.
pub(crate) async fn write(mut stream: Writing, id: ConnectionId, mut pieces: mpsc::Receiver<Vec<u8>>, arrivals: mpsc::Sender<Arrival>) {
    while let Some(piece) = pieces.recv().await {
        let written = match stream.write_all(&piece).await {
            Ok(()) => stream.flush().await,
            failed => failed,
        };
        let arrival = if written.is_ok() { Arrival::Written(id) } else { Arrival::Ended(id) };
        if arrivals.send(arrival).await.is_err() || written.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    #[tokio::test]
    async fn newcomers_of_one_source_displace_each_other() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (arrivals, mut arrived) = mpsc::channel(8);
        let accepting = tokio::spawn(accept(listener, None, places(), arrivals.clone()));
        let (mut open, mut newcomers) = (Vec::new(), Vec::new());
        for _ in 0..=MAX_NEW_OF_SOURCE {
            open.push(TcpStream::connect(address).await.unwrap());
            let Some(Arrival::New(newcomer)) = arrived.recv().await else { panic!("refused") };
            newcomers.push(newcomer);
        }
        let first = newcomers.remove(0);
        tokio::spawn(read(first.reading, ConnectionId(1), first.displaced, arrivals));
        assert!(matches!(arrived.recv().await, Some(Arrival::Displaced(ConnectionId(1)))));
        assert!(newcomers.iter_mut().all(|newcomer| newcomer.displaced.try_recv() == Err(TryRecvError::Empty)));
        accepting.abort();
    }
}
