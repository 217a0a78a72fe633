//! Looks for the controller.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::{Duration, Instant};

use braid_network::sfnet::{DISCOVERY, Offer, discover as question};
use socket2::{Domain, Protocol, Socket, Type};

/// Time between two questions.
const AGAIN: Duration = Duration::from_millis(500);
/// Interval at which answers are looked for.
const LOOKED: Duration = Duration::from_micros(500);
/// Most devices that are asked.
const MAX_DEVICES: usize = 64;

/// A controller that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Where it takes programs.
    pub offer: Offer,
    /// Where the answer came from.
    pub from: SocketAddr,
    /// Time to the answer.
    pub after: Duration,
}

/// Finds the controller by a device, or by any.
///
/// # Errors
/// There is no such device, or no answer in this time.
pub fn discover(device: Option<&str>, limit: Duration) -> io::Result<Found> {
    let (begun, sockets) = (Instant::now(), sockets(device)?);
    let mut next = begun;
    while begun.elapsed() < limit {
        if Instant::now() >= next {
            next = Instant::now() + AGAIN;
            ask(&sockets);
        }
        for socket in &sockets {
            let mut datagram = [0; 1500];
            let Ok((length, from)) = socket.recv_from(&mut datagram) else { continue };
            if let Some(offer) = datagram.get(..length).and_then(Offer::read) {
                return Ok(Found { offer, from, after: begun.elapsed() });
            }
        }
        sleep(LOOKED);
    }
    let by = device.map_or_else(|| "any device".to_owned(), |device| device.to_owned());
    let reason = format!(
        "no controller answers at {DISCOVERY} by {by}: its configuration needs [sfnet] with the address that it has in this network; or name the controller"
    );
    Err(io::Error::new(ErrorKind::TimedOut, reason))
}

/// Asks for the controller once, and waits for no answer: the controller learns the address of this host.
pub fn announce(device: Option<&str>) {
    if let Ok(sockets) = sockets(device) {
        ask(&sockets);
    }
}

fn ask(sockets: &[UdpSocket]) {
    for socket in sockets {
        // A device may be down, or have no address.
        let _ = socket.send_to(&question(), DISCOVERY);
    }
}

/// A socket for each device. A route to the address is not needed then.
fn sockets(device: Option<&str>) -> io::Result<Vec<UdpSocket>> {
    let open = |device: &str| -> io::Result<UdpSocket> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        socket.bind_device(Some(device.as_bytes()))?;
        socket.set_nonblocking(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
        Ok(socket.into())
    };
    match device {
        Some(device) => {
            let reason = |error: io::Error| io::Error::new(error.kind(), format!("cannot ask by the device {device}: {error}"));
            Ok(vec![open(device).map_err(reason)?])
        }
        None => Ok(devices()?.iter().take(MAX_DEVICES).filter_map(|device| open(device).ok()).collect()),
    }
}

/// Names of the network devices of this network namespace.
fn devices() -> io::Result<Vec<String>> {
    let table = std::fs::read_to_string("/proc/net/dev")?;
    Ok(table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect())
}
