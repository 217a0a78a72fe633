//! One QUIC stream from server to client on the bond's sockets, within this program: the cost of QUIC alone.

use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use braid_peer::keys::KeyPair;
use braid_peer::tls::{self, Clients, Expect};
use braid_transport::{Binding, UdpLink};
use bytes::Bytes;
use noq_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Dir, Endpoint, EndpointConfig, Event, FourTuple, ServerConfig, StreamEvent,
    VarInt,
};

use crate::lab::Lab;
use crate::namespace::Namespace;

const PORT: u16 = 9009;
/// Bytes per write.
const BLOCK: usize = 64 << 10;
/// Datagrams of one call, as many as the bond's.
const BATCH: NonZeroUsize = NonZeroUsize::new(40).expect("not zero");
/// Timeout for the start of a handshake.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What came through, in what time, and what the client's and the server's thread spent on it (user, kernel).
pub(super) struct Outcome {
    pub(super) bytes: ByteCount,
    pub(super) took: Duration,
    pub(super) cpu: [[f64; 2]; 2],
}

/// Downloads for `span` from 203.0.113.`host`.
pub(super) fn download(lab: &Lab, host: u8, span: Duration) -> Result<Outcome> {
    let address = SocketAddr::from((Lab::internet(host), PORT));
    let keys = KeyPair::generate().context("cannot make a key")?;
    // Bound before the client connects.
    let (ready, listening) = mpsc::channel();
    let inside = |namespace: &Namespace, work: &mut (dyn FnMut() -> Result<(u64, Duration)> + Send)| -> Result<(u64, Duration, [f64; 2])> {
        namespace.run(|| {
            let (bytes, took) = work()?;
            Ok((bytes, took, spent_here()?))
        })?
    };
    let (server, client) = thread::scope(|scope| {
        let server = scope.spawn(|| inside(lab.server(), &mut || within(serve(address, &keys, &ready))));
        listening.recv_timeout(TIMEOUT).context("the server does not listen")?;
        let client = inside(lab.client(), &mut || within(fetch(address, span)));
        let server = server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        anyhow::Ok((server?, client?))
    })?;
    Ok(Outcome { bytes: ByteCount::new(client.0), took: client.1, cpu: [client.2, server.2] })
}

/// CPU seconds of the thread that asks: user, kernel.
fn spent_here() -> Result<[f64; 2]> {
    let stat = fs::read_to_string("/proc/thread-self/stat").context("cannot read /proc/thread-self/stat")?;
    parse_spent(&stat).with_context(|| format!("/proc/thread-self/stat has no times: {stat}"))
}

fn within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?.block_on(work)
}

async fn serve(address: SocketAddr, keys: &KeyPair, ready: &mpsc::Sender<()>) -> Result<(u64, Duration)> {
    let config = Arc::new(ServerConfig::with_crypto(tls::server(keys, Clients::Anonymous)?));
    let endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), Some(config), true);
    let mut end = End::new(endpoint, UdpLink::bind(false, &Binding { address: Some(address), ..Binding::default() })?);
    let _ = ready.send(());
    let block = Bytes::from(vec![0x5a; BLOCK]);
    let (mut stream, mut written) = (None, 0u64);
    let begin = Instant::now();
    loop {
        end.turn(Instant::now() + TIMEOUT).await?;
        let Some((_, connection)) = &mut end.connection else {
            ensure!(begin.elapsed() < TIMEOUT, "no client connects");
            continue;
        };
        while let Some(event) = connection.poll() {
            match event {
                Event::Connected => stream = connection.streams().open(Dir::Uni),
                Event::ConnectionLost { .. } => return Ok((written, begin.elapsed())),
                _ => {}
            }
        }
        if let Some(stream) = stream {
            while let Ok(count) = connection.send_stream(stream).write_chunks(&mut &mut [block.clone()][..]) {
                written += count as u64;
            }
        }
        end.transmit();
    }
}

async fn fetch(address: SocketAddr, span: Duration) -> Result<(u64, Duration)> {
    let config = ClientConfig::new(tls::client(None, Expect::Any)?);
    let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, true);
    let begin = Instant::now();
    let connection = endpoint.connect(begin, config, address, tls::SERVER_NAME).context("cannot connect")?;
    let mut end = End::new(endpoint, UdpLink::bind(false, &Binding::default())?);
    end.connection = Some(connection);
    let (mut stream, mut received) = (None, 0u64);
    end.transmit();
    while begin.elapsed() < span {
        end.turn(begin + span).await?;
        let Some((_, connection)) = &mut end.connection else { continue };
        while let Some(event) = connection.poll() {
            match event {
                Event::Stream(StreamEvent::Opened { dir: Dir::Uni }) => stream = connection.streams().accept(Dir::Uni),
                Event::ConnectionLost { reason } => return Err(reason).context("the connection is lost"),
                _ => {}
            }
        }
        if let Some(stream) = stream {
            let mut stream = connection.recv_stream(stream);
            let mut chunks = stream.read(true).context("the stream is gone")?;
            while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
                received += chunk.bytes.len() as u64;
            }
            let _ = chunks.finalize();
        }
        end.transmit();
    }
    let took = begin.elapsed();
    ensure!(received > 0, "nothing came within {span:?}");
    if let Some((_, connection)) = &mut end.connection {
        connection.close(Instant::now(), VarInt::from_u32(0), Bytes::new());
    }
    end.transmit();
    Ok((received, took))
}

/// One host of the connection.
struct End {
    endpoint: Endpoint,
    link: UdpLink,
    connection: Option<(ConnectionHandle, Connection)>,
    read: Vec<u8>,
    buffer: Vec<u8>,
}

impl End {
    fn new(endpoint: Endpoint, link: UdpLink) -> Self {
        Self { endpoint, link, connection: None, read: Vec::new(), buffer: Vec::new() }
    }

    /// Waits for datagrams or the timer, until `end` at most, and takes in what came.
    async fn turn(&mut self, end: Instant) -> Result<()> {
        let due = self.connection.as_mut().and_then(|(_, connection)| connection.poll_timeout()).map_or(end, |due| due.min(end));
        let mut datagrams = Vec::new();
        tokio::select! {
            read = self.link.receive(&mut self.read, |from, to, ecn, data| datagrams.push((from, to, ecn, data))) => read?,
            flushed = self.link.flush() => flushed?,
            () = tokio::time::sleep_until(due.into()) => {}
        }
        let now = Instant::now();
        for (from, to, ecn, data) in datagrams {
            match self.endpoint.handle(now, FourTuple::new(from, to), ecn, data, &mut self.buffer) {
                Some(DatagramEvent::ConnectionEvent(_, event)) => {
                    if let Some((_, connection)) = &mut self.connection {
                        connection.handle_event(event);
                    }
                }
                Some(DatagramEvent::NewConnection(incoming)) if self.connection.is_none() => {
                    let accepted = self.endpoint.accept(incoming, now, &mut self.buffer, None);
                    self.connection = Some(accepted.map_err(|error| error.cause).context("cannot accept")?);
                }
                _ => {}
            }
        }
        let Some((handle, connection)) = &mut self.connection else { return Ok(()) };
        if connection.poll_timeout().is_some_and(|due| due <= now) {
            connection.handle_timeout(now);
        }
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(answer);
            }
        }
        Ok(())
    }

    fn transmit(&mut self) {
        let Some((_, connection)) = &mut self.connection else { return };
        self.buffer.clear();
        while let Some(transmit) = connection.poll_transmit(Instant::now(), BATCH, &mut self.buffer) {
            self.link.send(&transmit, &self.buffer[..transmit.size]);
            self.buffer.clear();
        }
    }
}

/// Fields 14 and 15, in hundredths of a second (proc_pid_stat(5)); the second, in parentheses, may hold anything.
pub(super) fn parse_spent(stat: &str) -> Option<[f64; 2]> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11).map(|field| field.parse::<f64>().ok());
    Some([fields.next()?? / 100.0, fields.next()?? / 100.0])
}
