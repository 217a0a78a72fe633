//! A relay's clients: who they are, what they may use and have used; and the invitations that are out.
//!
//! A SQLite file in the relay's state directory, which the running relay and the command line both have open. It lists who may do
//! something, so whatever goes wrong with it lets nobody in: where it cannot be read there are no clients, and a damaged file is never
//! replaced by a fresh one. Tokens are stored as digests, and redeemed in one transaction: of two redeemers one wins.
//!
//! What clients use gathers in memory until [`flush`](Registry::flush) and is kept there while the disk takes nothing.

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

/// The most clients.
const CLIENT_LIMIT: i64 = 100_000;

/// The most invitations that are out.
const TOKEN_LIMIT: i64 = 10_000;

/// How long an invitation that is over is remembered, so that who comes late is told why.
const TOKEN_MEMORY: Duration = Duration::from_secs(30 * 86_400);

/// A client's number in the registry; never given to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(i64);

/// A client of the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredClient {
    /// Its number.
    pub id: ClientId,
    /// Its key.
    pub key: PublicKey,
    /// Its name; no other client has it, in whichever case.
    pub name: ClientName,
    /// When it joined.
    pub joined: SystemTime,
    /// When it was last connected, as far as that is written down.
    pub seen: Option<SystemTime>,
    /// Since when it is shut out.
    pub revoked: Option<SystemTime>,
    /// What it may use.
    pub limits: Limits,
}

/// Why the registry does not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The file cannot be made or opened.
    #[error("cannot open the registry {}: {reason}; run as the user that it belongs to, or name another --state-dir", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What the system or SQLite says.
        reason: String,
    },
    /// The file is damaged.
    #[error(
        "the registry {path} is damaged ({reason}): put a copy back, or remove it and its -wal and -shm; all clients must be invited again then",
        path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        reason: String,
    },
    /// A later version of Braid wrote it.
    #[error("the registry {} was written by a later version of braid (schema {found}); install that version here", path.display())]
    Later {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: i64,
    },
    /// It cannot be read or written now.
    #[error("the registry {} cannot be read or written: {reason}; free disk space, see who keeps it locked, and try again", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        reason: String,
    },
    /// There are too many invitations.
    #[error("{TOKEN_LIMIT} invitations are out already; let some be used or expire")]
    TooManyInvites,
    /// Nothing random to be had.
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

/// Why a token is not redeemed.
#[derive(Debug, thiserror::Error)]
pub enum RedeemError {
    /// The relay never made it, or has forgotten it.
    #[error("the relay does not know this invitation; it may be of another relay, or old: ask its operator for a new one")]
    Unknown,
    /// It is too old.
    #[error("this invitation has expired; ask the relay's operator for a new one")]
    Expired,
    /// Somebody with another key came first.
    #[error("this invitation was used already, by another device; each is good for one: ask the relay's operator for a new one")]
    Used,
    /// The relay has all the clients it can have.
    #[error("the relay has {CLIENT_LIMIT} clients and takes no more")]
    Full,
    /// The registry fails.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Why no client is found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// None has this name or key.
    #[error("no client has the name or key {0:?}; \"braid relay clients\" lists them")]
    Nobody(String),
    /// Several keys begin like this.
    #[error("the keys of several clients begin with {0:?}; give more of the key, or a name")]
    Several(String),
    /// The registry fails.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The registry of one relay.
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    connection: Connection,
    /// The device and number of the file that is open.
    identity: (u64, u64),
    pending: Pending,
    version: i64,
}

impl Registry {
    /// Opens the registry in `dir`, and makes it if there is none.
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

    /// Makes an invitation that is good until `lifetime` from `now`. A client that redeems it gets `name`, if one is given.
    pub fn invite(&mut self, name: Option<&ClientName>, lifetime: Duration, now: SystemTime) -> Result<Token, RegistryError> {
        self.invite_limited(name, Limits::default(), lifetime, now)
    }

    /// The same, for a client that shall have these limits. One that was here before keeps its own where none is given.
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
            transaction.execute("DELETE FROM token WHERE expires < ?1", [made.saturating_sub_unsigned(TOKEN_MEMORY.as_secs())])?;
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

    /// Makes the holder of `key` a client, who has proved the key and shows `token`. The name is that of the invitation, else the wished
    /// one, with a number behind it if another client has it.
    ///
    /// Who redeems twice with the same key is told what they were told before, so a lost answer may be asked for again. A client that is
    /// shut out comes back in by a new invitation, with its old limits where that sets no others.
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

    /// The client with this key, also one that is shut out.
    pub fn lookup(&self, key: &PublicKey) -> Result<Option<RegisteredClient>, RegistryError> {
        self.read(|connection| select(connection, "WHERE key = ?1", params![key.as_bytes()])).map(|mut found| found.pop())
    }

    /// All clients, by name.
    pub fn clients(&self) -> Result<Vec<RegisteredClient>, RegistryError> {
        self.read(|connection| select(connection, "ORDER BY name", []))
    }

    /// The client that a person means by its name, its key, or eight characters or more of the key's beginning.
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

    /// Shuts a client out from `now` on, and withdraws nothing else: its name, limits and usage stay. Whether it was in.
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

    /// Whether another process has changed the registry since this was last asked: time to look living clients up again. Ask every
    /// second; it costs two system calls.
    ///
    /// A file that was put in the place of the open one is opened; while there is none this fails, and who is known stays so.
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

    /// Does all or nothing of `change`. The file is locked first, so what is read in it stays true until it is written.
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

/// `wanted`, or the first with a number behind it that no client but `own` has.
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

/// Seconds of Unix time; what lies before 1970 becomes 1970.
fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |span| integer(span.as_secs()))
}

fn moment(seconds: i64) -> SystemTime {
    let span = Duration::from_secs(seconds.max(0) as u64);
    UNIX_EPOCH.checked_add(span).unwrap_or(UNIX_EPOCH)
}

/// SQLite's integers are signed.
fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
