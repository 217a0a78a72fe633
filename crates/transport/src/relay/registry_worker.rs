//! The registry on a thread of its own: a disk that is slow or full, or a file that is locked, must not hold up what is forwarded.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use braid_bond::Hello;
use braid_bond::host::{ConnectionId, refusals};
use braid_model::ByteCount;
use braid_model::key::PublicKey;
use braid_peer::registry::{ClientId, Month, RedeemError, RegisteredClient, Registry};
use tokio::sync::{mpsc, oneshot};

/// Commands that wait at most. Each is of a connection that has not been let in, of which there are no more, or one of two others.
const WAITING: usize = 1026;
/// How long the last usage may take to be written down.
const LAST_WORD: Duration = Duration::from_secs(10);

/// Asks for a path: a connection that has proved a key.
#[derive(Debug)]
pub(super) struct Applicant {
    pub(super) connection: ConnectionId,
    pub(super) hello: Box<Hello>,
    pub(super) remote: SocketAddr,
    pub(super) key: PublicKey,
}

/// What a client moved, towards it and from it; nothing: it was there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    pub(super) client: ClientId,
    pub(super) down: ByteCount,
    pub(super) up: ByteCount,
}

/// What the registry's thread is asked to do.
#[derive(Debug)]
enum RegistryCommand {
    Judge(Applicant),
    /// Whether others have changed it, and what these clients are now.
    Refresh(Vec<PublicKey>),
    Write(Vec<Used>),
}

/// Who an applicant is, and what it has used of its month; or a code of [`refusals`] and the reason.
pub(super) type RegistryDecision = Result<(RegisteredClient, Month), (u64, String)>;

/// What the registry's thread reports.
#[derive(Debug)]
pub(super) enum RegistryEvent {
    /// Whether an applicant may have a path.
    Judged(Applicant, Box<RegistryDecision>),
    /// Who the clients are now that were asked for; empty if nobody has changed anything.
    Refreshed(Vec<(PublicKey, Option<RegisteredClient>)>),
    /// Usage is written down, or kept for the next time.
    Written,
}

/// The relay's end.
pub(super) struct RegistryWorker {
    commands: SyncSender<RegistryCommand>,
    events: mpsc::UnboundedReceiver<RegistryEvent>,
    ended: oneshot::Receiver<()>,
    refreshing: bool,
    writing: bool,
}

impl RegistryWorker {
    /// Gives the registry its thread.
    pub(super) fn start(registry: Registry) -> std::io::Result<Self> {
        let (commands, inbox) = sync_channel(WAITING);
        let (say, events) = mpsc::unbounded_channel();
        let (end, ended) = oneshot::channel();
        std::thread::Builder::new().name("registry".to_owned()).spawn(move || {
            work(registry, &inbox, &say);
            let _ = end.send(());
        })?;
        Ok(Self { commands, events, ended, refreshing: false, writing: false })
    }

    /// The next event.
    pub(super) async fn event(&mut self) -> RegistryEvent {
        let Some(event) = self.events.recv().await else { return std::future::pending().await };
        match event {
            RegistryEvent::Judged(..) => {}
            RegistryEvent::Refreshed(_) => self.refreshing = false,
            RegistryEvent::Written => self.writing = false,
        }
        event
    }

    /// Asks who an applicant is; `false` where too many wait.
    pub(super) fn judge(&self, applicant: Applicant) -> bool {
        self.commands.try_send(RegistryCommand::Judge(applicant)).is_ok()
    }

    /// Asks what these clients are now, unless the last answer is still awaited.
    pub(super) fn refresh(&mut self, clients: Vec<PublicKey>) {
        self.refreshing = self.refreshing || self.commands.try_send(RegistryCommand::Refresh(clients)).is_ok();
    }

    /// Whether usage is still being written down.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }

    /// Has usage written down.
    pub(super) fn write(&mut self, used: Vec<Used>) {
        self.writing |= self.commands.try_send(RegistryCommand::Write(used)).is_ok();
    }

    /// Waits until all is written down, but not for a disk that does not answer.
    pub(super) async fn end(self) {
        let Self { commands, ended, .. } = self;
        drop(commands);
        if tokio::time::timeout(LAST_WORD, ended).await.is_err() {
            tracing::error!("the registry's disk does not answer: what clients used last is not written down");
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
                    tracing::error!(trouble, "usage cannot be written down");
                }
                RegistryEvent::Written
            }
        };
        // Once the relay listens no more, usage is still written down.
        let _ = events.send(event);
    }
}

/// Whether the client that has proved its key may have a path.
fn judge(registry: &mut Registry, applicant: &Applicant) -> RegistryDecision {
    let Applicant { hello, key, .. } = applicant;
    let unknown = |why: String| (refusals::UNKNOWN, why);
    let trouble = |error: &dyn std::fmt::Display| {
        tracing::error!(%error, "the registry cannot be read");
        (refusals::BUSY, "the relay cannot read its registry".to_owned())
    };
    let known = registry.lookup(key).map_err(|error| trouble(&error))?;
    let client = match (known.filter(|client| client.revoked.is_none()), hello.token) {
        (Some(client), _) => client,
        (None, Some(token)) => {
            let wished = hello.name.parse().ok();
            let redeemed = registry.redeem(&token.into(), key, wished.as_ref(), SystemTime::now());
            redeemed.map_err(|error| match error {
                // The client may ask again.
                RedeemError::Registry(error) => trouble(&error),
                error => unknown(error.to_string()),
            })?
        }
        (None, None) => {
            return Err(unknown("its key is not known here, or was revoked: ask the relay's operator for an invitation".to_owned()));
        }
    };
    let month = registry.used(client.id, SystemTime::now()).map_err(|error| trouble(&error))?;
    Ok((client, month))
}

/// What these clients are now, if others have changed the registry.
fn refresh(registry: &mut Registry, clients: Vec<PublicKey>) -> Vec<(PublicKey, Option<RegisteredClient>)> {
    let failed = |error| tracing::error!(%error, "the registry cannot be read: who is known stays so");
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
