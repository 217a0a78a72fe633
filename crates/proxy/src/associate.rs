//! UDP datagrams of a SOCKS5 client (`UDP ASSOCIATE`), for the lifetime of its connection.

use std::io;
use std::net::SocketAddr;

use braid_model::Protocol;
use braid_model::address::{Address, Host};
use braid_platform::linux::sockdiag::owner;
use braid_transport::datagram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use crate::access::Access;
use crate::outbound::Datagrams;
use crate::wire::{self, Reply};

/// Forwards datagrams between the client and its targets until the connection ends. Accepts only datagrams from the client's address, and from
/// the announced port or else the first port that sends and whose user is allowed.
pub(crate) async fn serve(
    mut stream: TcpStream,
    client: SocketAddr,
    announced: Option<Address>,
    onward: Box<dyn Datagrams>,
    access: &Access,
) -> io::Result<()> {
    let socket = UdpSocket::bind(SocketAddr::new(stream.local_addr()?.ip(), 0)).await?;
    stream.write_all(&wire::reply(Reply::Succeeded, socket.local_addr()?)).await?;
    let announced = announced.filter(|address| is_client(&address.host, client)).map(|address| address.port());
    // The client's port, once its user has been checked.
    let mut port = None;
    let mut word = [0; 64];
    loop {
        tokio::select! {
            // The client has nothing more to send here; the end of the connection ends the association.
            read = stream.read(&mut word) => if matches!(read, Ok(0) | Err(_)) {
                return Ok(());
            },
            ready = socket.readable() => {
                ready?;
                let (mut payload, from) = match datagram::try_receive_from(&socket) {
                    Ok(received) => received,
                    // The ICMP error of an earlier answer, or a spurious wake-up.
                    Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock) => continue,
                    Err(error) => return Err(error),
                };
                if from.ip().to_canonical() != client.ip().to_canonical() || port.or(announced).is_some_and(|port| port != from.port()) {
                    continue;
                }
                let owner = || owner(Protocol::Udp, from, socket.local_addr()?);
                if port.is_none() && let Err(why) = access.check(from.ip(), owner) {
                    tracing::info!(client = %from.ip(), "datagrams denied: {why}");
                    continue;
                }
                port = Some(from.port());
                if let Some((target, at)) = wire::datagram(&payload) {
                    onward.send(&target, payload.split_off(at)).await;
                }
            }
            answer = onward.receive() => {
                let (from, payload) = answer?;
                if let Some(port) = port.or(announced) {
                    let mut datagram = wire::datagram_head(from);
                    datagram.extend_from_slice(&payload);
                    let _ = socket.send_to(&datagram, SocketAddr::new(client.ip(), port)).await;
                }
            }
        }
    }
}

/// Whether `host` is the client's address, and not an address behind NAT that has no meaning here.
fn is_client(host: &Host, client: SocketAddr) -> bool {
    matches!(host, Host::Ip(ip) if ip.to_canonical() == client.ip().to_canonical())
}
