//! Traffic of this process through the virtual interface. The functions are to be called inside the client namespace.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Result;
use braid_model::ByteCount;
use socket2::{Domain, Socket, Type};

use super::OWN;
use crate::lab::Lab;

/// Interval between the datagrams of an exchange.
const EVERY: Duration = Duration::from_millis(20);
/// Interval between new connections.
const CONNECT_EVERY: Duration = Duration::from_millis(100);
/// How long a new connection may take until its first byte.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How often a reader that waits looks whether it should end.
const LOOK: Duration = Duration::from_millis(200);

fn datagram_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((OWN, 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((OWN, 0)).into())?;
    socket.connect_timeout(&to.into(), CONNECT_LIMIT)?;
    Ok(socket.into())
}

/// Whether a datagram is answered.
pub(super) fn echoes(to: SocketAddr) -> io::Result<bool> {
    let socket = datagram_socket(to)?;
    socket.send(&[0; 64])?;
    Ok(socket.recv(&mut [0; 64]).is_ok())
}

/// Sends datagrams on one socket until `stop`. Returns when answers arrived.
pub(super) fn exchange(to: SocketAddr, stop: &AtomicBool) -> io::Result<Vec<Instant>> {
    let socket = datagram_socket(to)?;
    Ok(thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Without a link there is an error; the next datagram may have one.
                let _ = socket.send(&[0; 160]);
                thread::sleep(EVERY);
            }
        });
        let mut answers = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            match socket.recv(&mut [0; 160]) {
                Ok(_) => answers.push(Instant::now()),
                Err(error) if is_timeout(&error) => {}
                Err(_) => thread::sleep(EVERY),
            }
        }
        answers
    }))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Opens connections to an HTTP server until `stop`. Returns when each was opened, and the time until its first byte; `None` for those that got none.
pub(super) fn open_many(to: SocketAddr, path: &str, stop: &AtomicBool) -> Vec<(Instant, Option<Duration>)> {
    thread::scope(|scope| {
        let mut attempts = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            attempts.push((Instant::now(), scope.spawn(move || first_byte(to, path).ok())));
            thread::sleep(CONNECT_EVERY);
        }
        attempts.into_iter().map(|(at, attempt)| (at, attempt.join().unwrap_or_default())).collect()
    })
}

fn first_byte(to: SocketAddr, path: &str) -> io::Result<Duration> {
    let begin = Instant::now();
    let mut stream = connect(to)?;
    stream.set_read_timeout(Some(CONNECT_LIMIT.saturating_sub(begin.elapsed()).max(EVERY)))?;
    request(&mut stream, path)?;
    stream.read_exact(&mut [0])?;
    Ok(begin.elapsed())
}

fn request(stream: &mut TcpStream, path: &str) -> io::Result<()> {
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")
}

/// Downloads, each followed by the next, until this value is dropped.
pub(super) struct Downloads {
    counts: Arc<Counts>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    moved: AtomicU64,
    broken: AtomicU64,
    stop: AtomicBool,
}

impl Downloads {
    /// Starts `count` of them, of this file of the lab's web server.
    pub(super) fn start(lab: &Lab, count: usize, size: ByteCount) -> Result<Self> {
        let mut this = Self { counts: Arc::default(), threads: Vec::new() };
        let to = SocketAddr::from((Lab::internet(10), 80));
        for _ in 0..count {
            let counts = this.counts.clone();
            this.threads.push(lab.client().spawn_thread("lab-download", move || counts.download_all(to, size))?);
        }
        Ok(this)
    }

    /// Bytes received so far, HTTP headers included.
    pub(super) fn moved(&self) -> u64 {
        self.counts.moved.load(Ordering::Relaxed)
    }

    /// Connections that were established and ended before the file did.
    pub(super) fn broken(&self) -> u64 {
        self.counts.broken.load(Ordering::Relaxed)
    }
}

impl Counts {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn download_all(&self, to: SocketAddr, size: ByteCount) {
        while !self.stopped() {
            match connect(to).map(|stream| self.download(stream, size)) {
                Ok(true) => {}
                Ok(false) => {
                    self.broken.fetch_add(1, Ordering::Relaxed);
                }
                Err(_) => thread::sleep(EVERY),
            }
        }
    }

    /// Whether the whole file arrived, or as much as came before the end.
    fn download(&self, mut stream: TcpStream, size: ByteCount) -> bool {
        let path = format!("/{}.bin", size.get());
        if stream.set_read_timeout(Some(LOOK)).and_then(|()| request(&mut stream, &path)).is_err() {
            return false;
        }
        let (mut buffer, mut got) = (vec![0; 65_536], 0);
        loop {
            if self.stopped() {
                return true;
            }
            match stream.read(&mut buffer) {
                Ok(0) => return got >= size.get(),
                Ok(count) => {
                    got += count as u64;
                    self.moved.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if is_timeout(&error) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        self.counts.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_download_is_broken_if_the_file_is_not_complete() {
        for (sent, whole) in [(3000, true), (999, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let server = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                assert!(stream.read(&mut [0; 64]).unwrap() > 0);
                stream.write_all(&vec![0; sent]).unwrap();
            });
            let counts = Counts::default();
            assert_eq!(counts.download(stream, ByteCount::new(2000)), whole);
            server.join().unwrap();
            assert_eq!(counts.moved.load(Ordering::Relaxed), sent as u64);
        }
    }
}
