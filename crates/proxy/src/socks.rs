//! SOCKS5 client connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use braid_model::address::Address;
use braid_peer::destination::Reason;
use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::associate;
use crate::outbound::{Opened, Origin};
use crate::shared::{GREETING_TIMEOUT, Shared, join};
use crate::wire::{self, Command, Malformed, Parsed, Reply};

/// Placeholder for an address without meaning in a reply.
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

pub(crate) async fn serve(stream: TcpStream, client: SocketAddr, shared: Arc<Shared>) -> io::Result<()> {
    let mut connection = SocksConnection { stream, buffered: BytesMut::new() };
    let Some((origin, command, target)) = timeout(GREETING_TIMEOUT, connection.handshake(client, &shared)).await?? else { return Ok(()) };
    match (command, target) {
        (Command::Connect, Some(target)) => connect(connection, origin, target, &shared).await,
        (Command::Connect, None) => connection.refuse(Reply::NoAddress).await,
        (Command::Associate, announced) => match shared.outbound.datagrams(&origin).await {
            Ok(datagrams) => associate::serve(connection.stream, client, announced, datagrams, &shared.access).await,
            Err(error) => {
                tracing::debug!(%client, %error, "cannot forward datagrams");
                connection.refuse(Reply::Failure).await
            }
        },
        (Command::Other(_), _) => connection.refuse(Reply::NoCommand).await,
    }
}

async fn connect(mut connection: SocksConnection, origin: Origin, target: Address, shared: &Shared) -> io::Result<()> {
    match shared.outbound.connect(&origin, &target).await {
        Ok(Opened { stream: mut onward, .. }) => {
            connection.stream.write_all(&wire::reply(Reply::Succeeded, NOWHERE)).await?;
            // Bytes that the client has already sent.
            onward.write_all(&connection.buffered).await?;
            join(connection.stream, onward).await;
            Ok(())
        }
        Err(error) => {
            tracing::debug!(client = %origin.client, %error, "cannot open a connection");
            connection.refuse(reply(error.reason)).await
        }
    }
}

fn reply(reason: Reason) -> Reply {
    match reason {
        Reason::Refused => Reply::Refused,
        Reason::HostUnreachable | Reason::NameNotFound => Reply::HostUnreachable,
        Reason::NetworkUnreachable => Reply::NetworkUnreachable,
        Reason::TimedOut => Reply::TimedOut,
        Reason::Forbidden(_) => Reply::NotAllowed,
        Reason::Exhausted | Reason::Other(_) => Reply::Failure,
    }
}

/// A client connection, with the received bytes that are not parsed yet.
struct SocksConnection {
    stream: TcpStream,
    buffered: BytesMut,
}

impl SocksConnection {
    /// Reads the greeting and the request. `None`: the client was denied.
    async fn handshake(&mut self, client: SocketAddr, shared: &Shared) -> io::Result<Option<(Origin, Command, Option<Address>)>> {
        let credentials = &shared.access.credentials;
        let methods = self.message(|bytes| owned(wire::methods(bytes), <[u8]>::to_vec)).await?;
        let method = if credentials.is_empty() { wire::NO_PASSWORD } else { wire::PASSWORD };
        if !methods.contains(&method) {
            self.stream.write_all(&[wire::VERSION, wire::NO_METHOD]).await?;
            return Ok(None);
        }
        self.stream.write_all(&[wire::VERSION, method]).await?;
        let mut user = None;
        if method == wire::PASSWORD {
            let pair = |(name, password): (&[u8], &[u8])| (String::from_utf8_lossy(name).into_owned(), password.to_vec());
            let (name, password) = self.message(|bytes| owned(wire::password(bytes), pair)).await?;
            let right = credentials.allow(&name, &password);
            self.stream.write_all(&wire::password_answer(right)).await?;
            if !right {
                tracing::info!(client = %client.ip(), "denied: wrong name or password");
                return Ok(None);
            }
            user = Some(name);
        }
        match self.message(wire::request).await {
            Ok((command, target)) => Ok(Some((Origin { client, user }, command, target))),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => self.refuse(Reply::NoAddress).await.map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Reads the next message.
    async fn message<T>(&mut self, parse: impl Fn(&[u8]) -> Parsed<T>) -> io::Result<T> {
        loop {
            match parse(&self.buffered) {
                Ok(Some((message, length))) => {
                    let _ = self.buffered.split_to(length);
                    return Ok(message);
                }
                Ok(None) if self.buffered.len() >= wire::MAX_MESSAGE => return Err(io::ErrorKind::InvalidData.into()),
                Ok(None) => {
                    if self.stream.read_buf(&mut self.buffered).await? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(Malformed::Version | Malformed::Address) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    async fn refuse(&mut self, why: Reply) -> io::Result<()> {
        self.stream.write_all(&wire::reply(why, NOWHERE)).await?;
        self.stream.shutdown().await
    }
}

/// Converts a parsed message that borrows into an owned one.
fn owned<T, U>(parsed: Parsed<T>, own: impl Fn(T) -> U) -> Parsed<U> {
    parsed.map(|found| found.map(|(message, length)| (own(message), length)))
}
