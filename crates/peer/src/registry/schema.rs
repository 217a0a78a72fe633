//! The registry's file.

use std::fs::{OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::RegistryError;
use crate::state::StateDir;

/// The schema this program writes. A file of a later one is left untouched.
const SCHEMA: i64 = 2;

/// The file in the state directory.
pub(super) const FILE: &str = "relay.sqlite";

/// How long another process's change is waited for; each takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

const CREATE: &str = "
    CREATE TABLE client (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE COLLATE NOCASE,
        joined INTEGER NOT NULL, seen INTEGER, revoked INTEGER, rate_down INTEGER, rate_up INTEGER, flows INTEGER, monthly INTEGER);
    CREATE TABLE token (digest BLOB PRIMARY KEY, name TEXT, made INTEGER NOT NULL, expires INTEGER NOT NULL, redeemer BLOB,
        rate_down INTEGER, rate_up INTEGER, flows INTEGER, monthly INTEGER) WITHOUT ROWID;
    CREATE TABLE usage (client INTEGER NOT NULL REFERENCES client, month INTEGER NOT NULL, down INTEGER NOT NULL, up INTEGER NOT NULL,
        PRIMARY KEY (client, month)) WITHOUT ROWID;";

/// What schema 1 lacked: limits that come with an invitation.
const FROM_1: &str = "
    ALTER TABLE token ADD COLUMN rate_down INTEGER; ALTER TABLE token ADD COLUMN rate_up INTEGER;
    ALTER TABLE token ADD COLUMN flows INTEGER; ALTER TABLE token ADD COLUMN monthly INTEGER;";

/// Opens the file in `dir`, makes it if there is none, and looks whether it is whole.
pub(super) fn open(dir: &StateDir) -> Result<(PathBuf, Connection), RegistryError> {
    let path = dir.path().join(FILE);
    let unusable = |reason: &dyn std::fmt::Display| RegistryError::Unusable { path: path.clone(), reason: reason.to_string() };
    // Made here rather than by SQLite, so that it is nobody else's to read from the first moment; -wal and -shm take its mode.
    match dir.create(&path) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(unusable(&error)),
    }
    // What is looked at is what is changed. A descriptor that opens nothing, since closing another would undo SQLite's locks.
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

/// Opens a file that is there, and looks whether it is whole.
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

/// What tells a file from another that is put in its place.
pub(super) fn identity(path: &Path) -> Result<(u64, u64), RegistryError> {
    let found = path.symlink_metadata();
    let found = found.map_err(|error| RegistryError::Unusable { path: path.to_owned(), reason: error.to_string() })?;
    Ok((found.dev(), found.ino()))
}

/// Sets the file up and returns its schema.
fn prepare(connection: &mut Connection) -> rusqlite::Result<i64> {
    connection.busy_timeout(PATIENCE)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A revocation or a redeemed token must outlast a power cut.
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

/// What an error of SQLite means for the registry.
pub(super) fn failure(path: &Path, error: rusqlite::Error) -> RegistryError {
    use rusqlite::ErrorCode::{CannotOpen, DatabaseCorrupt, NotADatabase, PermissionDenied, ReadOnly};
    let (path, reason) = (path.to_owned(), error.to_string());
    // A file that is a database, but not of this form, is of no use either.
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
