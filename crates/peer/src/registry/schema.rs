//! The registry's database file and schema.

use std::fs::{OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::RegistryError;
use crate::state::StateDir;

/// Schema version that this program writes. It does not change a file with a later version.
const SCHEMA: i64 = 2;

/// Name of the file in the state directory.
pub(super) const FILE: &str = "relay.sqlite";

/// Time to wait for another process's transaction; each takes milliseconds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

const CREATE: &str = "
    CREATE TABLE client (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE COLLATE NOCASE,
        joined INTEGER NOT NULL, seen INTEGER, revoked INTEGER, rate_down INTEGER, rate_up INTEGER, flows INTEGER, monthly INTEGER);
    CREATE TABLE token (digest BLOB PRIMARY KEY, name TEXT, made INTEGER NOT NULL, expires INTEGER NOT NULL, redeemer BLOB,
        rate_down INTEGER, rate_up INTEGER, flows INTEGER, monthly INTEGER) WITHOUT ROWID;
    CREATE TABLE usage (client INTEGER NOT NULL REFERENCES client, month INTEGER NOT NULL, down INTEGER NOT NULL, up INTEGER NOT NULL,
        PRIMARY KEY (client, month)) WITHOUT ROWID;";

/// Migration from schema 1: adds limits to invitations.
const FROM_1: &str = "
    ALTER TABLE token ADD COLUMN rate_down INTEGER; ALTER TABLE token ADD COLUMN rate_up INTEGER;
    ALTER TABLE token ADD COLUMN flows INTEGER; ALTER TABLE token ADD COLUMN monthly INTEGER;";

/// Opens the file in `dir`, creates it if there is none, and checks its integrity.
pub(super) fn open(dir: &StateDir) -> Result<(PathBuf, Connection), RegistryError> {
    let path = dir.path().join(FILE);
    let unusable = |reason: &dyn std::fmt::Display| RegistryError::Unusable { path: path.clone(), reason: reason.to_string() };
    // Created here instead of by SQLite, so that it is private from the first moment; -wal and -shm inherit its mode.
    match dir.create(&path) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(unusable(&error)),
    }
    // Checks and changes apply to the same file. An O_PATH descriptor, because closing a regular one would release SQLite's locks.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&path).map_err(|error| unusable(&error))?;
    let found = file.metadata().map_err(|error| unusable(&error))?;
    if !found.is_file() {
        return Err(unusable(&"it is not a plain file"));
    }
    if found.permissions().mode() & 0o077 != 0 {
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        std::fs::set_permissions(itself, Permissions::from_mode(0o600)).map_err(|error| unusable(&error))?;
    }
    let connection = reopen(&path)?;
    Ok((path, connection))
}

/// Opens an existing file and checks its integrity.
pub(super) fn reopen(path: &Path) -> Result<Connection, RegistryError> {
    let failed = |error| failure(path, error);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
    let schema = prepare(&mut connection).map_err(failed)?;
    if schema > SCHEMA {
        return Err(RegistryError::Later { path: path.to_owned(), found: schema });
    }
    let sound: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(failed)?;
    if sound != "ok" {
        return Err(RegistryError::Damaged { path: path.to_owned(), reason: sound });
    }
    Ok(connection)
}

/// Device and inode, which distinguish a file from its replacement.
pub(super) fn identity(path: &Path) -> Result<(u64, u64), RegistryError> {
    let found = path.symlink_metadata();
    let found = found.map_err(|error| RegistryError::Unusable { path: path.to_owned(), reason: error.to_string() })?;
    Ok((found.dev(), found.ino()))
}

/// Configures the connection, creates or migrates the schema, and returns its version.
fn prepare(connection: &mut Connection) -> rusqlite::Result<i64> {
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A revocation or a redeemed token must survive a power failure.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut schema: i64 = transaction.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let step = match schema {
        0 => CREATE,
        1 => FROM_1,
        _ => "",
    };
    if !step.is_empty() {
        transaction.execute_batch(step)?;
        transaction.pragma_update(None, "user_version", SCHEMA)?;
        schema = SCHEMA;
    }
    transaction.commit()?;
    Ok(schema)
}

/// Maps a SQLite error to a registry error.
pub(super) fn failure(path: &Path, error: rusqlite::Error) -> RegistryError {
    use rusqlite::ErrorCode::{CannotOpen, DatabaseCorrupt, NotADatabase, PermissionDenied, ReadOnly};
    let (path, reason) = (path.to_owned(), error.to_string());
    // A database with another structure counts as damaged too.
    let foreign = matches!(
        error,
        rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::SqlInputError { .. }
    );
    match error.sqlite_error_code() {
        Some(DatabaseCorrupt | NotADatabase) => RegistryError::Damaged { path, reason },
        Some(CannotOpen | PermissionDenied | ReadOnly) => RegistryError::Unusable { path, reason },
        _ if foreign => RegistryError::Damaged { path, reason },
        _ => RegistryError::Failed { path, reason },
    }
}
