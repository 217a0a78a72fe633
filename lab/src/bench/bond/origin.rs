//! A small HTTP server and client that use TCP or multipath TCP with a selected congestion control. Real programs leave this choice to
//! the system, but a measurement must make it.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use braid_netem::Random;
use socket2::{Domain, Protocol, Socket, Type};

use crate::lab::Lab;
use crate::namespace::Namespace;

/// Period of the content in bytes: a prime number, so that data shifted by any block size differs.
const PERIOD: usize = 999_983;
/// Timeout without a received byte.
const SILENCE: Duration = Duration::from_secs(30);

/// Which TCP a connection uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TcpVariant {
    /// Multipath TCP, else TCP.
    pub(super) multipath: bool,
    /// The congestion control; `None` is the system's choice.
    pub(super) congestion: Option<&'static str>,
}

impl TcpVariant {
    /// TCP with the system's congestion control.
    pub(super) const PLAIN: Self = Self { multipath: false, congestion: None };

    /// Multipath TCP with this congestion control on every subflow.
    pub(super) const fn multipath(congestion: &'static str) -> Self {
        Self { multipath: true, congestion: Some(congestion) }
    }

    fn socket(self) -> io::Result<Socket> {
        let protocol = if self.multipath { Protocol::MPTCP } else { Protocol::TCP };
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(protocol))?;
        if let Some(congestion) = self.congestion {
            socket.set_tcp_congestion(congestion.as_bytes())?;
        }
        Ok(socket)
    }

    fn connect(self, to: SocketAddr) -> Result<TcpStream> {
        let socket = self.socket().with_context(|| format!("this kernel has no socket for {self:?}"))?;
        socket.connect_timeout(&to.into(), SILENCE).with_context(|| format!("cannot connect to {to}"))?;
        socket.set_read_timeout(Some(SILENCE))?;
        socket.set_write_timeout(Some(SILENCE))?;
        Ok(socket.into())
    }
}

/// A server on the lab's Internet that runs as long as the lab. GET /N returns N bytes, PUT accepts any body.
#[derive(Debug)]
pub(super) struct Origin {
    /// Listening address.
    pub(super) address: SocketAddr,
    received: Arc<AtomicU64>,
}

impl Origin {
    /// Starts it at 203.0.113.`host`.
    pub(super) fn start(lab: &Lab, host: u8, port: u16, variant: TcpVariant) -> Result<Self> {
        Self::start_on(lab.server(), (Lab::internet(host), port).into(), variant)
    }

    /// Starts it on a host that has this address.
    pub(super) fn start_on(host: &Namespace, address: SocketAddr, variant: TcpVariant) -> Result<Self> {
        let listener = host.run(|| -> io::Result<Socket> {
            let socket = variant.socket()?;
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            socket.listen(4096)?;
            Ok(socket)
        })?;
        let listener = listener.with_context(|| format!("cannot listen at {address} with {variant:?}"))?;
        let received = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&received);
        let content: Arc<[u8]> = content().into();
        thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                let (content, count) = (Arc::clone(&content), Arc::clone(&count));
                // A client that disconnects early is not an error of the server.
                thread::spawn(move || serve(&mut socket.into(), &content, &count));
            }
        });
        Ok(Self { address, received })
    }

    /// Bytes received by PUTs so far.
    pub(super) fn received(&self) -> ByteCount {
        ByteCount::new(self.received.load(Ordering::Relaxed))
    }

    /// Gets `size` bytes, or what comes within `limit`; every piece is compared with what it should be and then told to `arrived`. To be
    /// called inside the client namespace.
    pub(super) fn get(&self, variant: TcpVariant, size: ByteCount, limit: Duration, mut arrived: impl FnMut(usize)) -> Result<()> {
        let (mut stream, early) = self.ask(variant, size)?;
        let begin = Instant::now();
        let content = content();
        let (mut buffer, mut got, mut count) = (vec![0; 256 * 1024], 0u64, early.len());
        buffer[..count].copy_from_slice(&early);
        loop {
            // Never beyond the content's end.
            let at = (got % PERIOD as u64) as usize;
            ensure!(buffer[..count] == content[at..at + count], "what came is not what was sent");
            got += count as u64;
            arrived(count);
            if got >= size.get() || begin.elapsed() > limit {
                return Ok(());
            }
            let room = buffer.len().min(PERIOD - (got % PERIOD as u64) as usize);
            count = stream.read(&mut buffer[..room]).with_context(|| format!("nothing came any more after {got} bytes"))?;
            ensure!(count > 0, "the connection ended after {got} bytes");
        }
    }

    /// Gets without end and without a look at the content until `end`; gives how much came. To be called inside the client namespace.
    pub(super) fn drain(&self, variant: TcpVariant, end: Instant) -> Result<ByteCount> {
        let (mut stream, early) = self.ask(variant, ByteCount::new(1 << 50))?;
        let (mut buffer, mut got) = (vec![0; 1 << 20], early.len() as u64);
        while Instant::now() < end {
            let count = stream.read(&mut buffer).with_context(|| format!("nothing came any more after {got} bytes"))?;
            ensure!(count > 0, "the connection ended after {got} bytes");
            got += count as u64;
        }
        Ok(ByteCount::new(got))
    }

    /// A connection that will bring `size` bytes, and those that are there.
    fn ask(&self, variant: TcpVariant, size: ByteCount) -> Result<(TcpStream, Vec<u8>)> {
        let mut stream = variant.connect(self.address)?;
        write!(stream, "GET /{} HTTP/1.1\r\nHost: lab\r\n\r\n", size.get())?;
        let (_, early) = head(&mut stream)?;
        Ok((stream, early))
    }

    /// Puts `size` bytes and waits for the answer, for `limit` at most; gives what the server received and how long that took. To be called
    /// inside the client namespace.
    pub(super) fn put(&self, variant: TcpVariant, size: ByteCount, limit: Duration) -> Result<(ByteCount, Duration)> {
        let mut stream = variant.connect(self.address)?;
        let before = self.received();
        let begin = Instant::now();
        write!(stream, "PUT / HTTP/1.1\r\nHost: lab\r\nContent-Length: {}\r\n\r\n", size.get())?;
        let content = content();
        let mut left = size.get();
        while left > 0 && begin.elapsed() < limit {
            let at = ((size.get() - left) % PERIOD as u64) as usize;
            let end = PERIOD.min(at + 65_536).min(at + usize::try_from(left).unwrap_or(usize::MAX));
            left -= stream.write(&content[at..end])? as u64;
        }
        if left == 0 {
            head(&mut stream)?;
        }
        Ok((self.received().saturating_sub(before), begin.elapsed()))
    }
}

fn content() -> Vec<u8> {
    let mut random = Random::new(7);
    let mut content: Vec<u8> = (0..PERIOD.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    content.truncate(PERIOD);
    content
}

/// Reads to the end of the head; gives it and what came after it.
fn head(stream: &mut TcpStream) -> Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 16_384];
    loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return Ok((String::from_utf8_lossy(&bytes).into_owned(), rest));
        }
        let count = stream.read(&mut buffer).context("no answer")?;
        ensure!(count > 0 && bytes.len() < 65_536, "the connection ended before the head did");
        bytes.extend_from_slice(&buffer[..count]);
    }
}

fn serve(stream: &mut TcpStream, content: &[u8], received: &AtomicU64) -> Result<()> {
    let (head, early) = head(stream)?;
    let line = head.lines().next().unwrap_or_default();
    if let Some(path) = line.strip_prefix("GET /") {
        let size: u64 = path.split(' ').next().unwrap_or_default().parse().context("GET wants a number")?;
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n")?;
        let mut left = size;
        while left > 0 {
            let at = ((size - left) % PERIOD as u64) as usize;
            let end = PERIOD.min(at + usize::try_from(left).unwrap_or(usize::MAX));
            left -= stream.write(&content[at..end])? as u64;
        }
        return Ok(());
    }
    let field = |name: &str| {
        let value =
            |line: &str| line.split_once(':').filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned());
        head.lines().find_map(value)
    };
    let size: u64 = field("Content-Length").context("PUT wants a length")?.parse()?;
    if field("Expect").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let mut left = size.saturating_sub(early.len() as u64);
    received.fetch_add(early.len() as u64, Ordering::Relaxed);
    let mut buffer = vec![0; 256 * 1024];
    while left > 0 {
        let count = stream.read(&mut buffer)?;
        ensure!(count > 0, "the client left");
        received.fetch_add(count as u64, Ordering::Relaxed);
        left = left.saturating_sub(count as u64);
    }
    Ok(stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?)
}
