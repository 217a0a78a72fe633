//! Datagrams of a SOCKS5 client (`UDP ASSOCIATE`), for as long as its connection lasts.

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

/// Carries datagrams between the client and its targets until the connection ends. They are taken from the client's address only, and
/// from the first port that sends and whose user is let in, or the one that it has announced.
pub(crate) async fn serve(
    mut stream: TcpStream,
    client: SocketAddr,
    announced: Option<Address>,
    onward: Box<dyn Datagrams>,
    access: &Access,
) -> io::Result<()> {
    let socket = UdpSocket::bind(SocketAddr::new(stream.local_addr()?.ip(), 0)).await?;
    stream.write_all(&wire::reply(Reply::Succeeded, socket.local_addr()?)).await?;
    let announced = announced.filter(|address| is(&address.host, client)).map(|address| address.port());
    // The client's, once its user has shown.
    let mut port = None;
    let mut word = [0; 64];
    loop {
        tokio::select! {
            // Nothing is to be said there any more; its end is the association's.
            read = stream.read(&mut word) => if matches!(read, Ok(0) | Err(_)) {
                return Ok(());
            },
            ready = socket.readable() => {
                ready?;
                let (mut payload, from) = match datagram::try_receive_from(&socket) {
                    Ok(received) => received,
                    // What an earlier answer met.
                    Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock) => continue,
                    Err(error) => return Err(error),
                };
                if from.ip().to_canonical() != client.ip().to_canonical() || port.or(announced).is_some_and(|port| port != from.port()) {
                    continue;
                }
                let owner = || owner(Protocol::Udp, from, socket.local_addr()?);
                if port.is_none() && let Err(why) = access.judge(from.ip(), owner) {
                    tracing::info!(client = %from.ip(), "datagrams turned away: {why}");
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

/// Whether that is the client's address, and not one behind a translator that means nothing here.
fn is(host: &Host, client: SocketAddr) -> bool {
    matches!(host, Host::Ip(ip) if ip.to_canonical() == client.ip().to_canonical())
}
