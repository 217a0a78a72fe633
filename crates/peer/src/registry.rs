//! A relay's registry: its clients with their limits and usage, and the pending invitations.
//!
//! The registry is a SQLite file in the relay's state directory; the running relay and the command line both open it. It grants permissions,
//! so every failure denies access: an unreadable registry has no clients, and Braid never replaces a damaged file with a new one. Tokens are
//! stored as digests and redeemed in one transaction, so only one of two concurrent redeemers succeeds.
//!
//! Client usage accumulates in memory until [`flush`](Registry::flush), and stays there while the disk accepts no writes.

mod schema;
mod usage;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use braid_model::{ByteCount, Rate};
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};

use crate::invite::{NoRandomness, Token};
use crate::limits::Limits;
use crate::name::ClientName;
use crate::state::StateDir;
use braid_model::key::PublicKey;

use usage::Pending;
pub use usage::{Month, month_of};

/// Maximum number of clients.
const CLIENT_LIMIT: i64 = 100_000;

/// Maximum number of pending invitations.
const TOKEN_LIMIT: i64 = 10_000;

/// Time that an expired invitation is kept, so that a late client gets the reason.
const TOKEN_RETENTION: Duration = Duration::from_secs(30 * 86_400);

/// A client's number in the registry; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(i64);

impl ClientId {
    /// The number.
    pub fn number(self) -> u64 {
        self.0.unsigned_abs()
    }
}

/// A client of the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredClient {
    /// Number in the registry.
    pub id: ClientId,
    /// Public key.
    pub key: PublicKey,
    /// Name; unique, ignoring case.
    pub name: ClientName,
    /// Time when it joined.
    pub joined: SystemTime,
    /// Time when it was last connected, as of the last flush.
    pub seen: Option<SystemTime>,
    /// Time when it was revoked.
    pub revoked: Option<SystemTime>,
    /// Limits of the client.
    pub limits: Limits,
}

/// Error of a registry operation.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The file cannot be created or opened.
    #[error("cannot open the registry {}: {reason}; run braid as the user that owns it, or specify another --state-dir", path.display())]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Error from the system or SQLite.
        reason: String,
    },
    /// The file is damaged.
    #[error(
        "the registry {path} is damaged ({reason}): restore a copy, or remove it and its -wal and -shm; then all clients must be invited again",
        path = path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Error from SQLite.
        reason: String,
    },
    /// A later version of Braid wrote it.
    #[error("the registry {} was written by a later version of braid (schema {found}); install that version here", path.display())]
    Later {
        /// Path of the file.
        path: PathBuf,
        /// Schema version of the file.
        found: i64,
    },
    /// The file cannot be read or written now.
    #[error("cannot read or write the registry {}: {reason}; free disk space, check which process locks it, and try again", path.display())]
    Failed {
        /// Path of the file.
        path: PathBuf,
        /// Error from SQLite.
        reason: String,
    },
    /// There are too many pending invitations.
    #[error("{TOKEN_LIMIT} invitations are already pending; wait until some are used or expire")]
    TooManyInvites,
    /// The system's random number generator failed.
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

/// Reason why a token cannot be redeemed.
#[derive(Debug, thiserror::Error)]
pub enum RedeemError {
    /// The relay did not create the token, or has deleted it.
    #[error("the relay does not know this invitation; it may be old, or for another relay: ask its operator for a new one")]
    Unknown,
    /// The invitation has expired.
    #[error("this invitation has expired; ask the relay's operator for a new one")]
    Expired,
    /// Another key has redeemed the token.
    #[error("another device has already used this invitation, which is valid for one device: ask the relay's operator for a new one")]
    Used,
    /// The relay has reached its client limit.
    #[error("the relay has its maximum of {CLIENT_LIMIT} clients; ask its operator to make room")]
    Full,
    /// The registry failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Reason why no client is found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No client has this name or key.
    #[error("no client has the name or key {0:?}; \"braid relay clients\" lists them")]
    Nobody(String),
    /// Several keys start with this text.
    #[error("the keys of several clients begin with {0:?}; give more of the key, or a name")]
    Several(String),
    /// The registry failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The registry of one relay.
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    connection: Connection,
    /// Device and inode of the open file.
    identity: (u64, u64),
    pending: Pending,
    version: i64,
}

impl Registry {
    /// Opens the registry in `dir`, or creates it if there is none.
    pub fn open(dir: &StateDir) -> Result<Self, RegistryError> {
        let (path, connection) = schema::open(dir)?;
        let identity = schema::identity(&path)?;
        let mut registry = Self { path, connection, identity, pending: Pending::default(), version: 0 };
        registry.version = registry.data_version()?;
        Ok(registry)
    }

    /// Whether there is a registry in the directory.
    pub fn exists(dir: &Path) -> bool {
        dir.join(schema::FILE).exists()
    }

    /// Creates an invitation that is valid for `lifetime` from `now`. A client that redeems it gets `name`, if given.
    pub fn invite(&mut self, name: Option<&ClientName>, lifetime: Duration, now: SystemTime) -> Result<Token, RegistryError> {
        self.invite_limited(name, Limits::default(), lifetime, now)
    }

    /// Creates an invitation with limits. A returning client keeps its old value for each limit that the invitation does not set.
    pub fn invite_limited(
        &mut self,
        name: Option<&ClientName>,
        limits: Limits,
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<Token, RegistryError> {
        let token = Token::generate()?;
        let (made, expires) = (seconds(now), seconds(now).saturating_add_unsigned(lifetime.as_secs()));
        let stored = self.change(|transaction| {
            transaction.execute("DELETE FROM token WHERE expires < ?1", [made.saturating_sub_unsigned(TOKEN_RETENTION.as_secs())])?;
            let out: i64 = transaction.query_row("SELECT COUNT(*) FROM token WHERE redeemer IS NULL", [], |row| row.get(0))?;
            if out >= TOKEN_LIMIT {
                return Ok(false);
            }
            transaction.execute(
                "INSERT INTO token (digest, name, made, expires, rate_down, rate_up, flows, monthly) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    token.digest(),
                    name.map(ClientName::as_str),
                    made,
                    expires,
                    stored(limits.rate_down),
                    stored(limits.rate_up),
                    limits.flows,
                    limits.monthly.map(|bytes| integer(bytes.get())),
                ],
            )?;
            Ok(true)
        })?;
        if stored { Ok(token) } else { Err(RegistryError::TooManyInvites) }
    }

    /// Registers the holder of `key`, who has proved the key and presents `token`, as a client. The client gets the name of the invitation, else
    /// `wished`, with a number suffix if another client has that name.
    ///
    /// Redeeming again with the same key returns the same answer, so a client may retry after a lost answer. A revoked client is readmitted by a
    /// new invitation, with its old limits where the invitation sets none.
    pub fn redeem(
        &mut self,
        token: &Token,
        key: &PublicKey,
        wished: Option<&ClientName>,
        now: SystemTime,
    ) -> Result<RegisteredClient, RedeemError> {
        let now = seconds(now);
        self.change(|transaction| {
            let found = transaction
                .query_row("SELECT name, expires, redeemer FROM token WHERE digest = ?1", [token.digest()], |row| {
                    Ok((row.get::<_, Option<String>>(0)?, row.get::<_, i64>(1)?, row.get::<_, Option<[u8; 32]>>(2)?))
                })
                .optional()?;
            let Some((given, expires, redeemer)) = found else { return Ok(Err(RedeemError::Unknown)) };
            let known = select(transaction, "WHERE key = ?1", params![key.as_bytes()])?.pop();
            match (redeemer, known) {
                (Some(redeemer), Some(client)) if redeemer == *key.as_bytes() && client.revoked.is_none() => return Ok(Ok(client)),
                (Some(_), _) => return Ok(Err(RedeemError::Used)),
                (None, _) if expires <= now => return Ok(Err(RedeemError::Expired)),
                (None, Some(client)) => {
                    let given = given.and_then(|name| name.parse().ok());
                    let name = free_name(transaction, given.as_ref().unwrap_or(&client.name), Some(client.id))?;
                    transaction
                        .execute("UPDATE client SET revoked = NULL, name = ?2 WHERE id = ?1", params![client.id.0, name.as_str()])?;
                }
                (None, None) => {
                    let count: i64 = transaction.query_row("SELECT COUNT(*) FROM client", [], |row| row.get(0))?;
                    if count >= CLIENT_LIMIT {
                        return Ok(Err(RedeemError::Full));
                    }
                    let wanted = given.and_then(|name| name.parse().ok()).or_else(|| wished.cloned());
                    let wanted = wanted.map_or_else(|| "client".parse(), Ok).map_err(|_| rusqlite::Error::InvalidQuery)?;
                    let name = free_name(transaction, &wanted, None)?;
                    transaction.execute(
                        "INSERT INTO client (key, name, joined) VALUES (?1, ?2, ?3)",
                        params![key.as_bytes(), name.as_str(), now],
                    )?;
                }
            }
            transaction.execute(
                "UPDATE client SET (rate_down, rate_up, flows, monthly) = (SELECT coalesce(token.rate_down, client.rate_down),
                    coalesce(token.rate_up, client.rate_up), coalesce(token.flows, client.flows), coalesce(token.monthly, client.monthly)
                    FROM token WHERE digest = ?1) WHERE key = ?2",
                params![token.digest(), key.as_bytes()],
            )?;
            transaction.execute("UPDATE token SET redeemer = ?2 WHERE digest = ?1", params![token.digest(), key.as_bytes()])?;
            let client = select(transaction, "WHERE key = ?1", params![key.as_bytes()])?.pop();
            Ok(client.ok_or(RedeemError::Unknown))
        })?
    }

    /// The client with this key, including a revoked one.
    pub fn lookup(&self, key: &PublicKey) -> Result<Option<RegisteredClient>, RegistryError> {
        self.read(|connection| select(connection, "WHERE key = ?1", params![key.as_bytes()])).map(|mut found| found.pop())
    }

    /// All clients, by name.
    pub fn clients(&self) -> Result<Vec<RegisteredClient>, RegistryError> {
        self.read(|connection| select(connection, "ORDER BY name", []))
    }

    /// Finds a client by its name, its key, or the first eight or more characters of the key.
    pub fn find(&self, text: &str) -> Result<RegisteredClient, FindError> {
        if let Some(client) = self.read(|connection| select(connection, "WHERE name = ?1", [text]))?.pop() {
            return Ok(client);
        }
        let start = text.to_ascii_lowercase();
        let nobody = || FindError::Nobody(text.chars().take(80).collect());
        if start.len() < 8 {
            return Err(nobody());
        }
        let mut matching = self.clients()?.into_iter().filter(|client| client.key.to_string().starts_with(&start));
        match (matching.next(), matching.next()) {
            (None, _) => Err(nobody()),
            (Some(client), None) => Ok(client),
            (Some(_), Some(_)) => Err(FindError::Several(start)),
        }
    }

    /// Revokes a client from `now` on; its name, limits and usage stay. Returns whether it was admitted before.
    pub fn revoke(&mut self, id: ClientId, now: SystemTime) -> Result<bool, RegistryError> {
        let now = seconds(now);
        self.change(|transaction| {
            Ok(transaction.execute("UPDATE client SET revoked = ?2 WHERE id = ?1 AND revoked IS NULL", params![id.0, now])? == 1)
        })
    }

    /// Sets all limits of a client.
    pub fn set_limits(&mut self, id: ClientId, limits: Limits) -> Result<(), RegistryError> {
        self.change(|transaction| {
            transaction.execute(
                "UPDATE client SET rate_down = ?2, rate_up = ?3, flows = ?4, monthly = ?5 WHERE id = ?1",
                params![
                    id.0,
                    stored(limits.rate_down),
                    stored(limits.rate_up),
                    limits.flows,
                    limits.monthly.map(|bytes| integer(bytes.get()))
                ],
            )?;
            Ok(())
        })
    }

    /// Whether another process has changed the registry since the last call; if so, look up connected clients again. Call it every second; it
    /// costs two system calls.
    ///
    /// If another file has replaced the open one, opens that file. If the file is missing, returns an error, and known clients remain valid.
    pub fn changed(&mut self) -> Result<bool, RegistryError> {
        if schema::identity(&self.path)? != self.identity {
            let connection = schema::reopen(&self.path)?;
            self.identity = schema::identity(&self.path)?;
            self.connection = connection;
            self.version = self.data_version()?;
            return Ok(true);
        }
        let version = self.data_version()?;
        Ok(std::mem::replace(&mut self.version, version) != version)
    }

    fn data_version(&self) -> Result<i64, RegistryError> {
        self.read(|connection| connection.query_row("PRAGMA data_version", [], |row| row.get(0)))
    }

    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, RegistryError> {
        read(&self.connection).map_err(|error| schema::failure(&self.path, error))
    }

    /// Runs `change` in a transaction. The file is locked first, so the values that it reads stay valid until it writes.
    fn change<T>(&mut self, change: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, RegistryError> {
        let changed = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).and_then(|transaction| {
            let answer = change(&transaction)?;
            transaction.commit()?;
            Ok(answer)
        });
        changed.map_err(|error| schema::failure(&self.path, error))
    }
}

fn select(connection: &Connection, which: &str, parameters: impl rusqlite::Params) -> rusqlite::Result<Vec<RegisteredClient>> {
    let columns = "SELECT id, key, name, joined, seen, revoked, rate_down, rate_up, flows, monthly FROM client";
    let mut statement = connection.prepare_cached(&format!("{columns} {which}"))?;
    statement.query_map(parameters, client_of)?.collect()
}

fn client_of(row: &Row<'_>) -> rusqlite::Result<RegisteredClient> {
    let name: String = row.get(2)?;
    let rate = |bps: Option<i64>| bps.map(|bps| Rate::from_bps(bps.max(0) as u64));
    Ok(RegisteredClient {
        id: ClientId(row.get(0)?),
        key: PublicKey::from(row.get::<_, [u8; 32]>(1)?),
        name: name.parse().map_err(|error| rusqlite::Error::FromSqlConversionFailure(2, rusqlite::types::Type::Text, Box::new(error)))?,
        joined: moment(row.get(3)?),
        seen: row.get::<_, Option<i64>>(4)?.map(moment),
        revoked: row.get::<_, Option<i64>>(5)?.map(moment),
        limits: Limits {
            rate_down: rate(row.get(6)?),
            rate_up: rate(row.get(7)?),
            flows: row.get(8)?,
            monthly: row.get::<_, Option<i64>>(9)?.map(|bytes| ByteCount::new(bytes.max(0) as u64)),
        },
    })
}

/// `wanted`, with the first number suffix, if necessary, that makes it unique among all clients except `own`.
fn free_name(connection: &Connection, wanted: &ClientName, own: Option<ClientId>) -> rusqlite::Result<ClientName> {
    let mut taken = connection.prepare_cached("SELECT EXISTS (SELECT 1 FROM client WHERE name = ?1 AND id IS NOT ?2)")?;
    let mut name = wanted.clone();
    let mut number = 2;
    while taken.query_row(params![name.as_str(), own.map(|id| id.0)], |row| row.get(0))? {
        name = wanted.numbered(number);
        number += 1;
    }
    Ok(name)
}

fn stored(rate: Option<Rate>) -> Option<i64> {
    rate.map(|rate| integer(rate.bps()))
}

/// Seconds of Unix time; times before 1970 become 0.
fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |span| integer(span.as_secs()))
}

fn moment(seconds: i64) -> SystemTime {
    let span = Duration::from_secs(seconds.max(0) as u64);
    UNIX_EPOCH.checked_add(span).unwrap_or(UNIX_EPOCH)
}

/// Converts to SQLite's signed integers, saturating.
fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
