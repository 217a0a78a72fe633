//! Dials a remote controller, again and again, and carries bytes.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use braid_control::config::DatapathSettings;
use braid_model::Protocol;
use braid_model::address::{Address, Host};
use braid_platform::linux::sockdiag;
use braid_platform::linux::sys::process::own_user;
use braid_platform::linux::worker::Worker;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use super::tls;

/// Time to find the controller, to connect and to agree on TLS.
const CONNECT: Duration = Duration::from_secs(10);
/// Time for one of its addresses.
const ATTEMPT: Duration = Duration::from_secs(4);
/// Delay before it is dialled again, which doubles up to the second one.
const AGAIN: Duration = Duration::from_millis(500);
const SELDOM: Duration = Duration::from_secs(30);
/// After a connection of at least this time, delays begin anew.
const STEADY: Duration = Duration::from_secs(10);
/// Size of a piece that is read at most. The daemon's loop handles one at a time, and does its other work in between.
const PIECE: usize = 4 << 10;
/// What waits in the kernel to be read. What a lost controller has sent last is handled before its end is noticed, so it is little.
const WAITING: u32 = 64 << 10;
/// Time for the last bytes of a connection that is being closed.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time to find the user of the controller's socket.
const OWNER_WAIT: Duration = Duration::from_secs(1);

/// What to do if TLS fails.
const TLS_REMEDY: &str =
    "[datapath] needs ca = the roots of the controller's certificate, which names its host, and a certificate that the controller trusts";

/// What the task reports.
pub(crate) enum Arrival {
    /// There is a connection. It takes what is to be sent, a piece at a time, and ends with this sender.
    Connected(mpsc::Sender<Vec<u8>>),
    /// The controller sent this.
    Bytes(Vec<u8>),
    /// The last piece is written.
    Written,
    /// The connection has ended, or there is none, for this reason.
    Ended(String),
}

/// Asks the kernel for the owners of sockets. Before Linux 6.9 another program can hold up the answer.
static OWNERS: Worker = Worker::new("braid-owners", 1);

/// A connection, and its ends if the user of the controller's socket is to be checked.
struct Dialled {
    stream: Box<dyn Stream>,
    ends: Option<(SocketAddr, SocketAddr)>,
}

/// A byte stream.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Keeps a connection, until nobody listens. `devices`: those over which the controller may be dialled.
pub(super) async fn keep(settings: DatapathSettings, devices: watch::Receiver<Vec<String>>, arrivals: mpsc::Sender<Arrival>) {
    let (mut delay, mut attempt) = (AGAIN, 0);
    loop {
        let device = device(&settings.controller, &devices.borrow(), attempt);
        let (reason, lasted) = match connect(&settings, device.as_deref()).await {
            Ok(dialled) => {
                let begun = Instant::now();
                (carry(dialled, &arrivals).await, begun.elapsed())
            }
            Err(reason) => (reason, Duration::ZERO),
        };
        if arrivals.send(Arrival::Ended(reason)).await.is_err() {
            return;
        }
        if lasted >= STEADY {
            (delay, attempt) = (AGAIN, 0);
        } else {
            attempt += 1;
        }
        sleep(delay).await;
        delay = (delay * 2).min(SELDOM);
    }
}

/// The device over which an attempt goes: first by the system's choice, which may be dead, then over each link, and so on. `None`: by the system's choice.
fn device(controller: &Address, usable: &[String], attempt: usize) -> Option<String> {
    if matches!(controller.host, Host::Ip(host) if host.is_loopback()) {
        return None;
    }
    let place = attempt.checked_rem(usable.len() + 1)?.checked_sub(1)?;
    usable.get(place).cloned()
}

/// A connection to the controller, or why there is none.
async fn connect(settings: &DatapathSettings, device: Option<&str>) -> Result<Dialled, String> {
    let late = || format!("no answer within {} s: start the controller, or correct its address", CONNECT.as_secs());
    timeout(CONNECT, dial(settings, device)).await.unwrap_or_else(|_| Err(late()))
}

async fn dial(settings: &DatapathSettings, device: Option<&str>) -> Result<Dialled, String> {
    let Some(files) = settings.tls.clone() else {
        let stream = open(&settings.controller, device).await?;
        let ends = stream.local_addr().and_then(|own| Ok((own, stream.peer_addr()?))).map_err(|error| error.to_string())?;
        let is_here = ends.1.ip().to_canonical().is_loopback() && !settings.insecure;
        return Ok(Dialled { stream: Box::new(stream), ends: is_here.then_some(ends) });
    };
    // A disk may not respond.
    let connector = tokio::task::spawn_blocking(move || tls::connector(&files)).await;
    let connector = connector.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let name = match &settings.controller.host {
        Host::Ip(address) => ServerName::from(*address),
        Host::Name(name) => ServerName::try_from(name.to_string()).map_err(|error| format!("{name}: {error}"))?,
    };
    let stream = open(&settings.controller, device).await?;
    let failed = |error: io::Error| format!("TLS: {error}; {TLS_REMEDY}");
    Ok(Dialled { stream: Box::new(connector.connect(name, stream).await.map_err(failed)?), ends: None })
}

/// Refuses a controller on this machine that another user runs: everybody may listen at an address of the loopback device. The user is known once the
/// controller has accepted the connection, as one that has sent something has.
async fn check_user((own, far): (SocketAddr, SocketAddr)) -> io::Result<()> {
    let owner = OWNERS.ask_async(OWNER_WAIT, move || sockdiag::owner(Protocol::Tcp, far, own)).await??;
    match owner.and_then(|owner| owner.user) {
        Some(user) if user == 0 || user == own_user() => Ok(()),
        user => {
            let who = user.map_or("nobody knows which user".to_owned(), |user| format!("user {user}, neither root nor the daemon's,"));
            let text = format!("{who} runs the program at {far}: run the controller as root, or write insecure = true in [datapath]");
            Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
        }
    }
}

async fn open(controller: &Address, device: Option<&str>) -> Result<TcpStream, String> {
    let port = controller.port();
    let addresses: Vec<SocketAddr> = match &controller.host {
        Host::Ip(address) => vec![SocketAddr::new(*address, port)],
        Host::Name(name) => lookup_host((name.as_str(), port)).await.map_err(|error| format!("{name}: {error}"))?.collect(),
    };
    let mut last = "it has no address".to_owned();
    for address in addresses {
        let reason = match timeout(ATTEMPT, open_one(address, device)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", ATTEMPT.as_secs()),
        };
        let over = device.map(|device| format!(" over {device}")).unwrap_or_default();
        last = format!("{address}{over}: {reason}");
    }
    Err(last)
}

async fn open_one(address: SocketAddr, device: Option<&str>) -> io::Result<TcpStream> {
    let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    if let Some(device) = device {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    socket.set_recv_buffer_size(WAITING)?;
    let stream = socket.connect(address).await?;
    // Answers are small, and wait for nothing.
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Carries bytes until the connection ends. Returns why.
async fn carry(Dialled { stream, mut ends }: Dialled, arrivals: &mpsc::Sender<Arrival>) -> String {
    let (mut reading, mut writing) = tokio::io::split(stream);
    let (pieces, mut given) = mpsc::channel::<Vec<u8>>(1);
    if arrivals.send(Arrival::Connected(pieces)).await.is_err() {
        return String::new();
    }
    let read = async {
        let mut piece = vec![0; PIECE];
        loop {
            let size = reading.read(&mut piece).await?;
            let Some(bytes) = piece.get(..size).filter(|bytes| !bytes.is_empty()) else {
                return Err(io::Error::other("the controller closed the connection"));
            };
            if let Some(ends) = ends.take() {
                check_user(ends).await?;
            }
            // If nobody listens, the task ends soon.
            let _ = arrivals.send(Arrival::Bytes(bytes.to_vec())).await;
        }
    };
    let write = async {
        while let Some(piece) = given.recv().await {
            let mut written = pin!(async {
                writing.write_all(&piece).await?;
                writing.flush().await
            });
            tokio::select! {
                done = &mut written => done?,
                // The next piece comes when this one is written. So this is the end, and the controller may not read.
                _ = given.recv() => {
                    let _ = timeout(FAREWELL, written).await;
                    break;
                }
            }
            let _ = arrivals.send(Arrival::Written).await;
        }
        let _ = timeout(FAREWELL, writing.shutdown()).await;
        Err(io::Error::other("closed by Braid"))
    };
    either(read, write).await.to_string()
}

/// The error of the one that fails first.
async fn either(one: impl Future<Output = io::Result<Infallible>>, other: impl Future<Output = io::Result<Infallible>>) -> io::Error {
    let Err(error) = tokio::select! {
        ended = one => ended,
        ended = other => ended,
    };
    error
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn settings(listener: &TcpListener) -> DatapathSettings {
        DatapathSettings { controller: listener.local_addr().unwrap().into(), tls: None, insecure: false, id: None }
    }

    #[tokio::test]
    async fn a_controller_is_dialled_again_after_each_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (arrived, mut arrivals) = mpsc::channel(4);
        let (_devices, usable) = watch::channel(vec!["wlan0".to_owned()]);
        let task = tokio::spawn(keep(settings(&listener), usable, arrived));
        // Closed by the controller, then by the device.
        for round in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let Some(Arrival::Connected(pieces)) = arrivals.recv().await else { panic!("no connection") };
            stream.write_all(b"to the device").await.unwrap();
            let Some(Arrival::Bytes(bytes)) = arrivals.recv().await else { panic!("no bytes") };
            assert_eq!(bytes, b"to the device");
            pieces.send(b"back".to_vec()).await.unwrap();
            assert!(matches!(arrivals.recv().await, Some(Arrival::Written)));
            let mut back = [0; 4];
            stream.read_exact(&mut back).await.unwrap();
            assert_eq!(&back, b"back");
            let expected = if round == 0 {
                drop(stream);
                "the controller closed"
            } else {
                drop(pieces);
                "closed by Braid"
            };
            let Some(Arrival::Ended(reason)) = arrivals.recv().await else { panic!("not ended") };
            assert!(reason.contains(expected), "{reason}");
        }
        drop(listener);
        let Some(Arrival::Ended(reason)) = arrivals.recv().await else { panic!("connected to nobody") };
        assert!(reason.contains("127.0.0.1") && reason.contains("refused"), "{reason}");
        task.abort();
    }

    #[tokio::test]
    async fn a_connection_to_a_controller_that_does_not_read_ends_soon() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (arrived, mut arrivals) = mpsc::channel(4);
        let (_devices, usable) = watch::channel(Vec::new());
        let task = tokio::spawn(keep(settings(&listener), usable, arrived));
        let (_stream, _) = listener.accept().await.unwrap();
        let Some(Arrival::Connected(pieces)) = arrivals.recv().await else { panic!("no connection") };
        pieces.send(vec![0; 32 << 20]).await.unwrap();
        sleep(Duration::from_millis(100)).await;
        drop(pieces);
        let ended = timeout(FAREWELL * 5, arrivals.recv()).await.expect("it waits for the controller");
        assert!(matches!(ended, Some(Arrival::Ended(_))));
        task.abort();
    }

    #[test]
    fn each_link_is_tried_in_turn() {
        let usable = ["wlan0", "lte0"].map(str::to_owned);
        let far: Address = "192.0.2.1:6653".parse().unwrap();
        let over: Vec<_> = (0..5).map(|attempt| device(&far, &usable, attempt)).collect();
        assert_eq!(over, [None, Some("wlan0".to_owned()), Some("lte0".to_owned()), None, Some("wlan0".to_owned())]);
        assert_eq!(device(&far, &[], 3), None);
        assert_eq!(device(&"[::1]:6653".parse().unwrap(), &usable, 1), None);
    }
}
