//! Runs the registry on its own thread: a slow or full disk, or a locked file, must not delay forwarding.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use braid_bond::Hello;
use braid_bond::host::{ConnectionId, refusals};
use braid_model::ByteCount;
use braid_model::key::PublicKey;
use braid_peer::registry::{ClientId, Month, RedeemError, RegisteredClient, Registry};
use tokio::sync::{mpsc, oneshot};

/// Capacity of the command queue: one command per unadmitted connection (their number is limited), plus one refresh and one write.
const MAX_COMMANDS: usize = 1026;
/// Time limit for the last write of usage.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that proved a key and requests a path.
#[derive(Debug)]
pub(super) struct Applicant {
    pub(super) connection: ConnectionId,
    pub(super) hello: Box<Hello>,
    pub(super) remote: SocketAddr,
    pub(super) key: PublicKey,
}

/// Bytes that a client transferred, towards it and from it. Zero records its presence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    pub(super) client: ClientId,
    pub(super) down: ByteCount,
    pub(super) up: ByteCount,
}

/// Command to the registry's thread.
#[derive(Debug)]
enum RegistryCommand {
    Judge(Applicant),
    /// Report these clients' current entries if another process changed the registry.
    Refresh(Vec<PublicKey>),
    Write(Vec<Used>),
}

/// The registered client and its usage of this month; or a code of [`refusals`] and the reason.
pub(super) type RegistryDecision = Result<(RegisteredClient, Month), (u64, String)>;

/// Event from the registry's thread.
#[derive(Debug)]
pub(super) enum RegistryEvent {
    /// Decision about an applicant.
    Judged(Applicant, Box<RegistryDecision>),
    /// Current entries of the requested clients; empty if the registry was not changed.
    Refreshed(Vec<(PublicKey, Option<RegisteredClient>)>),
    /// Usage was written, or kept for the next attempt.
    Written,
}

/// The relay's handle to the thread.
pub(super) struct RegistryWorker {
    commands: SyncSender<RegistryCommand>,
    events: mpsc::UnboundedReceiver<RegistryEvent>,
    ended: oneshot::Receiver<()>,
    refreshing: bool,
    writing: bool,
}

impl RegistryWorker {
    /// Starts the thread.
    pub(super) fn start(registry: Registry) -> std::io::Result<Self> {
        let (commands, inbox) = sync_channel(MAX_COMMANDS);
        let (sender, events) = mpsc::unbounded_channel();
        let (end, ended) = oneshot::channel();
        std::thread::Builder::new().name("registry".to_owned()).spawn(move || {
            work(registry, &inbox, &sender);
            let _ = end.send(());
        })?;
        Ok(Self { commands, events, ended, refreshing: false, writing: false })
    }

    /// Waits for the next event.
    pub(super) async fn event(&mut self) -> RegistryEvent {
        let Some(event) = self.events.recv().await else { return std::future::pending().await };
        match event {
            RegistryEvent::Judged(..) => {}
            RegistryEvent::Refreshed(_) => self.refreshing = false,
            RegistryEvent::Written => self.writing = false,
        }
        event
    }

    /// Requests a decision about an applicant; `false` if the queue is full.
    pub(super) fn judge(&self, applicant: Applicant) -> bool {
        self.commands.try_send(RegistryCommand::Judge(applicant)).is_ok()
    }

    /// Requests the current entries of these clients, unless a request is pending.
    pub(super) fn refresh(&mut self, clients: Vec<PublicKey>) {
        self.refreshing = self.refreshing || self.commands.try_send(RegistryCommand::Refresh(clients)).is_ok();
    }

    /// Whether a write is in progress.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Writes usage.
    pub(super) fn write(&mut self, used: Vec<Used>) {
        self.writing |= self.commands.try_send(RegistryCommand::Write(used)).is_ok();
    }

    /// Waits until everything is written, with a time limit for a disk that does not answer.
    pub(super) async fn end(self) {
        let Self { commands, ended, .. } = self;
        drop(commands);
        if tokio::time::timeout(FLUSH_TIMEOUT, ended).await.is_err() {
            tracing::error!("the registry's disk does not answer: the clients' latest usage is lost");
        }
    }
}

fn work(mut registry: Registry, commands: &Receiver<RegistryCommand>, events: &mpsc::UnboundedSender<RegistryEvent>) {
    while let Ok(command) = commands.recv() {
        let event = match command {
            RegistryCommand::Judge(applicant) => {
                let decision = judge(&mut registry, &applicant);
                RegistryEvent::Judged(applicant, Box::new(decision))
            }
            RegistryCommand::Refresh(clients) => RegistryEvent::Refreshed(refresh(&mut registry, clients)),
            RegistryCommand::Write(used) => {
                used.into_iter().for_each(|used| registry.count(used.client, used.down, used.up, SystemTime::now()));
                if let Some(trouble) = registry.flush() {
                    tracing::error!(trouble, "cannot write usage to the registry");
                }
                RegistryEvent::Written
            }
        };
        // After the relay has stopped listening, usage is still written.
        let _ = events.send(event);
    }
}

/// Decides whether a client that proved its key may have a path.
fn judge(registry: &mut Registry, applicant: &Applicant) -> RegistryDecision {
    let Applicant { hello, key, .. } = applicant;
    let unknown = |why: String| (refusals::UNKNOWN, why);
    let trouble = |error: &dyn std::fmt::Display| {
        tracing::error!(%error, "cannot read the registry");
        (refusals::BUSY, "the relay cannot read its registry".to_owned())
    };
    let known = registry.lookup(key).map_err(|error| trouble(&error))?;
    let client = match (known.filter(|client| client.revoked.is_none()), hello.token) {
        (Some(client), _) => client,
        (None, Some(token)) => {
            let wished = hello.name.parse().ok();
            let redeemed = registry.redeem(&token.into(), key, wished.as_ref(), SystemTime::now());
            redeemed.map_err(|error| match error {
                // The client may retry.
                RedeemError::Registry(error) => trouble(&error),
                error => unknown(error.to_string()),
            })?
        }
        (None, None) => {
            return Err(unknown(
                "the client's key is not registered, or was revoked: ask the relay's operator for an invitation".to_owned(),
            ));
        }
    };
    let month = registry.used(client.id, SystemTime::now()).map_err(|error| trouble(&error))?;
    Ok((client, month))
}

/// The current entries of these clients, if another process changed the registry.
fn refresh(registry: &mut Registry, clients: Vec<PublicKey>) -> Vec<(PublicKey, Option<RegisteredClient>)> {
    let failed = |error| tracing::error!(%error, "cannot read the registry: the relay keeps the current clients and limits");
    match registry.changed() {
        Ok(true) => {}
        Ok(false) => return Vec::new(),
        Err(error) => {
            failed(error);
            return Vec::new();
        }
    }
    let now = |key: PublicKey| Some((key, registry.lookup(&key).map_err(failed).ok()?));
    clients.into_iter().filter_map(now).collect()
}
