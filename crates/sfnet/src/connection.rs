//! A connection to the controller: lines over TCP, with TLS or without.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use braid_network::sfnet::MAX_ANSWER;
use braid_peer::tls::SERVER_NAME;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use socket2::{SockRef, TcpKeepalive};

/// Time to connect, and to write a line.
const CONNECT: Duration = Duration::from_secs(5);
/// After this time without a packet the controller is asked whether it is there, and again after each [`ASKED`].
const QUIET: Duration = Duration::from_secs(5);
const ASKED: Duration = Duration::from_secs(2);
const QUESTIONS: u32 = 3;
/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    own: Option<Ipv4Addr>,
    /// What was read, and is not a whole line yet.
    read: Vec<u8>,
    /// Bytes of it that hold no end of a line.
    looked: usize,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &stream.sock,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }
}

impl Connection {
    pub(crate) fn open(address: SocketAddr, tls: Option<Arc<ClientConfig>>) -> io::Result<Self> {
        let refused = |error: io::Error| io::Error::new(error.kind(), format!("cannot connect to the controller at {address}: {error}"));
        let stream = TcpStream::connect_timeout(&address, CONNECT).map_err(refused)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(CONNECT))?;
        let keepalive = TcpKeepalive::new().with_time(QUIET).with_interval(ASKED).with_retries(QUESTIONS);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        SockRef::from(&stream).set_tcp_user_timeout(Some(QUIET + ASKED * QUESTIONS))?;
        let own = match stream.local_addr()?.ip().to_canonical() {
            IpAddr::V4(own) => Some(own),
            IpAddr::V6(_) => None,
        };
        let stream = match tls {
            None => Stream::Plain(stream),
            Some(config) => {
                let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
                let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
                Stream::Tls(Box::new(StreamOwned::new(connection, stream)))
            }
        };
        Ok(Self { stream, own, read: Vec::new(), looked: 0 })
    }

    pub(crate) fn own_address(&self) -> Option<Ipv4Addr> {
        self.own
    }

    pub(crate) fn send(&mut self, line: &str) -> io::Result<()> {
        self.stream.write(line.as_bytes())
    }

    /// The next line, without its end; `None` if there is none in this time.
    pub(crate) fn read(&mut self, limit: Duration) -> io::Result<Option<String>> {
        if let Some(line) = self.line()? {
            return Ok(Some(line));
        }
        // Zero would mean for ever.
        self.stream.socket().set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        let mut piece = [0; PIECE];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the controller has closed the connection")),
            Ok(length) => {
                self.read.extend(&piece[..length]);
                self.line()
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn line(&mut self) -> io::Result<Option<String>> {
        let Some(end) = self.read.get(self.looked..).and_then(|new| new.iter().position(|byte| *byte == b'\n')) else {
            self.looked = self.read.len();
            if self.looked > MAX_ANSWER {
                return Err(io::Error::new(ErrorKind::InvalidData, format!("the controller sent a line of more than {MAX_ANSWER} bytes")));
            }
            return Ok(None);
        };
        let mut line: Vec<u8> = self.read.drain(..=self.looked + end).collect();
        self.looked = 0;
        line.pop();
        String::from_utf8(line).map(Some).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
    }
}
