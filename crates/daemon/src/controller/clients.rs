//! Clients of a network's controller: hosts that run Braid, prove their keys, report where they are, and get notices ([`braid_network::wire`]).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use braid_bond::host::{Source, source};
use braid_decide::bucket::Bucket;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Mac, Rate};
use braid_network::mobility::{Notice, Report};
use braid_network::wire::{Message, decode_report, encode_message};
use braid_network::{AccessId, Controller, Reservation};
use braid_peer::quota::{Permit, Quota};
use braid_peer::tls::stream_key;
use braid_platform::linux::sys::bpf::now;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::ACCEPT_AGAIN;
use crate::lines::{HANDSHAKE, read_line, set_up};

/// Most connections of clients, and of one source.
const MAX_CONNECTIONS: (usize, usize) = (4096, 64);
/// Messages that may wait for a client. One that reads none is cut off, and gets the whole state with its next connection.
const MAX_MESSAGES: usize = 64;
/// Bytes of reports that a client may send: as many as a radio that changes its access point ten times a second needs.
const REPORTS: (Rate, ByteCount) = (Rate::from_bps(32_000), ByteCount::new(32 << 10));

/// The hosts of keys.
pub(super) type Keys = Arc<BTreeMap<PublicKey, Mac>>;

/// What the tasks of clients report.
pub(super) enum ClientArrival {
    /// A client has proven its key.
    Joined { host: Mac, session: u64, peer: SocketAddr, messages: mpsc::Sender<Message> },
    /// It reports something.
    Report { host: Mac, session: u64, report: Report },
    /// Its connection has ended.
    Left { host: Mac, session: u64, reason: String },
    /// A connection ended before a host was known.
    Refused { peer: SocketAddr, reason: String },
}

/// What all listeners share: places for connections, of which those without a known key make room for others, and numbers of sessions.
#[derive(Clone)]
pub(super) struct Places {
    connections: Quota<Source>,
    sessions: Arc<AtomicU64>,
}

impl Default for Places {
    fn default() -> Self {
        Self { connections: Quota::new(MAX_CONNECTIONS.0, MAX_CONNECTIONS.1), sessions: Arc::default() }
    }
}

/// Accepts clients until this process ends.
pub(super) async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    places: Places,
    keys: watch::Receiver<Keys>,
    arrivals: mpsc::Sender<ClientArrival>,
) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client; trying again");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // Without a word: whoever makes so many connections gets no log either.
        let Some((permit, displaced)) = places.connections.take(source(peer)) else { continue };
        let session = places.sessions.fetch_add(1, Ordering::Relaxed);
        let (acceptor, keys, arrivals) = (acceptor.clone(), keys.clone(), arrivals.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = serve(stream, (peer, session), &permit, &acceptor, keys, &arrivals) => {}
                _ = displaced => {}
            }
        });
    }
}

async fn serve(
    stream: TcpStream,
    (peer, session): (SocketAddr, u64),
    permit: &Permit<Source>,
    acceptor: &TlsAcceptor,
    mut keys: watch::Receiver<Keys>,
    arrivals: &mpsc::Sender<ClientArrival>,
) {
    set_up(&stream);
    let refused = async |reason: String| drop(arrivals.send(ClientArrival::Refused { peer, reason }).await);
    let secured = match timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(secured)) => secured,
        Ok(Err(error)) => return refused(format!("it is no client of Braid: {error}")).await,
        Err(_) => return refused("it does not begin".to_owned()).await,
    };
    let Some(key) = stream_key(secured.get_ref().1.peer_certificates()) else { return refused("it has shown no key".to_owned()).await };
    let host = keys.borrow_and_update().get(&key).copied();
    let (reading, mut writing) = tokio::io::split(secured);
    let Some(host) = host else {
        let reason = format!("no [[host]] of the controller has the key {key}: add one with this client's Ethernet address");
        let _ = timeout(HANDSHAKE, writing.write_all(encode_message(&Message::Refused(reason.clone())).as_bytes())).await;
        let _ = timeout(HANDSHAKE, writing.shutdown()).await;
        return refused(reason).await;
    };
    permit.keep();
    let (messages, mut given) = mpsc::channel(MAX_MESSAGES);
    // The first message, for which there is room.
    let _ = messages.try_send(Message::Welcome(host));
    // The sender of the task's own would keep it open for ever.
    let answers = messages.downgrade();
    if arrivals.send(ClientArrival::Joined { host, session, peer, messages }).await.is_err() {
        return;
    }
    let reader = async {
        let mut reader = BufReader::new(reading);
        let mut allowed = Bucket::new(REPORTS.0, REPORTS.1, now());
        loop {
            let line = match read_line(&mut reader).await {
                Ok(Some(line)) => line,
                Ok(None) => return "it has closed the connection".to_owned(),
                Err(error) => return error.to_string(),
            };
            while !allowed.take(ByteCount::new(line.len() as u64 + 1), now()) {
                sleep(Duration::from_millis(50)).await;
            }
            match decode_report(&line) {
                Ok(report) => {
                    if arrivals.send(ClientArrival::Report { host, session, report }).await.is_err() {
                        return "the controller ends".to_owned();
                    }
                }
                Err(error) => {
                    let Some(answers) = answers.upgrade() else { return "another connection of this client has replaced it".to_owned() };
                    if answers.try_send(Message::Refused(error.to_string())).is_err() {
                        return "it does not read".to_owned();
                    }
                }
            }
        }
    };
    let writer = async {
        while let Some(message) = given.recv().await {
            let line = encode_message(&message);
            let written = async {
                writing.write_all(line.as_bytes()).await?;
                writing.flush().await
            };
            if !matches!(timeout(HANDSHAKE, written).await, Ok(Ok(()))) {
                return "it does not read".to_owned();
            }
        }
        let _ = timeout(HANDSHAKE, writing.shutdown()).await;
        "another connection of this client has replaced it".to_owned()
    };
    let changed = async {
        // The operator may give the host another key.
        while keys.changed().await.is_ok() {
            if keys.borrow_and_update().get(&key) != Some(&host) {
                return "its key was removed from the controller's configuration".to_owned();
            }
        }
        std::future::pending().await
    };
    let reason = tokio::select! {
        reason = reader => reason,
        reason = writer => reason,
        reason = changed => reason,
    };
    let _ = arrivals.send(ClientArrival::Left { host, session, reason }).await;
}

/// The clients that are connected.
#[derive(Default)]
pub(super) struct Clients {
    sessions: BTreeMap<Mac, (u64, mpsc::Sender<Message>)>,
    /// What they were told last about the loads of access points.
    loads: Vec<(AccessId, u16)>,
}

impl Clients {
    /// Takes what a client's task reports. Returns a line for the log, and whether an operator should look at it.
    pub(super) fn on_arrival(&mut self, controller: &mut Controller, arrival: ClientArrival) -> Option<(String, bool)> {
        match arrival {
            ClientArrival::Joined { host, session, peer, messages } => {
                if !self.loads.is_empty() {
                    let _ = messages.try_send(Message::Loads(self.loads.clone()));
                }
                // A former connection of this client ends with its sender, and what it has reserved.
                if self.sessions.insert(host, (session, messages)).is_some() {
                    controller.client_left(now(), host);
                }
                Some((format!("client {host} has joined from {peer}"), false))
            }
            ClientArrival::Report { host, session, report } => {
                let (_, messages) = self.sessions.get(&host).filter(|(current, _)| *current == session)?;
                let error = controller.report(now(), host, report).err()?;
                let _ = messages.try_send(Message::Refused(error.to_string()));
                Some((format!("a report of client {host} was refused: {error}"), false))
            }
            ClientArrival::Left { host, session, reason } => {
                let is_current = self.sessions.get(&host).is_some_and(|(current, _)| *current == session);
                if is_current {
                    self.sessions.remove(&host);
                    controller.client_left(now(), host);
                }
                is_current.then(|| (format!("client {host} has left: {reason}; its packets go where it was"), false))
            }
            ClientArrival::Refused { peer, reason } => Some((format!("{peer} was refused as a client: {reason}"), true)),
        }
    }

    /// Passes on what a mobility manager tells a client. One that is not connected gets nothing: it reports its state when it comes back.
    pub(super) fn tell(&mut self, controller: &mut Controller, host: Mac, notice: Notice) {
        let Some((_, messages)) = self.sessions.get(&host) else { return };
        if messages.try_send(Message::Notice(notice)).is_err() {
            self.sessions.remove(&host);
            controller.client_left(now(), host);
        }
    }

    /// Tells a client what is reserved for it. Returns a line for the log. A client that is not connected has nothing reserved.
    pub(super) fn tell_reservation(&mut self, controller: &mut Controller, host: Mac, reservation: &Reservation) -> Option<String> {
        let (_, messages) = self.sessions.get(&host)?;
        let (kept, reason) = (reservation.kept.iter().map(|(access, rates)| (*access, *rates)).collect(), reservation.reason());
        let line = reason.as_ref().map(|reason| format!("what client {host} asks for is not reserved: {reason}"));
        if messages.try_send(Message::Reserved { kept, reason }).is_err() {
            self.sessions.remove(&host);
            controller.client_left(now(), host);
        }
        line
    }

    /// Tells each client what its access points can still carry.
    pub(super) fn tell_free(&self, controller: &Controller) {
        for (host, (_, messages)) in &self.sessions {
            let free = controller.free_at(*host);
            if !free.is_empty() {
                let _ = messages.try_send(Message::Free(free));
            }
        }
    }

    /// Tells all clients how busy access points are, if that has changed.
    pub(super) fn tell_loads(&mut self, loads: Vec<(AccessId, u16)>) {
        if loads == self.loads {
            return;
        }
        for (_, messages) in self.sessions.values() {
            let _ = messages.try_send(Message::Loads(loads.clone()));
        }
        self.loads = loads;
    }
}
