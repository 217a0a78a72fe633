//! Learned values, kept across restarts in a SQLite file in the state directory.
//!
//! Errors of the store never stop Braid. A damaged file is moved aside. If writing fails, values stay in memory and are written later;
//! stored data is not lost.

#![forbid(unsafe_code)]

pub mod joined;
pub mod lock;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_decide::stability::StabilitySums;
use braid_model::LinkFacts;
use braid_platform::linux::sys::process::own_user;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use crate::lock::{SERVICE, user_number};

/// Version of the schema. A file with a later version is left untouched.
const SCHEMA: i64 = 1;

/// Maximum number of rows of each table; the oldest are removed first.
const ROW_LIMIT: usize = 10_000;

/// File name in the state directory.
const FILE: &str = "braid.sqlite";

/// Key of learned demand.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AppKey {
    /// Path of the executable; empty if unknown.
    pub exe: String,
    /// Name of the process.
    pub name: String,
    /// Destination port; 0 stands for the application as a whole.
    pub port: u16,
}

/// Learned demand of an application. Times are seconds of Unix time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AppRow {
    /// Expected received bytes of a flow.
    pub demand_down: u64,
    /// Expected sent bytes of a flow.
    pub demand_up: u64,
    /// Number of flows behind the estimate.
    pub samples: u64,
    /// Time of the last update.
    pub updated: u64,
}

/// Identity of a link across restarts, which interface indexes do not survive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkKey {
    /// Name of the interface.
    pub name: String,
    /// Name of its kind.
    pub kind: String,
    /// The gateway's address, which distinguishes networks; empty if there is none.
    pub network: String,
}

impl LinkKey {
    /// Key of a link from its current facts.
    pub fn of(facts: &LinkFacts) -> Self {
        let gateway = [&facts.gateways.v4, &facts.gateways.v6].into_iter().flatten().find_map(|route| route.gateway);
        Self {
            name: facts.name.clone(),
            kind: facts.kind.to_string(),
            network: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        }
    }
}

/// Learned capacities of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkRow {
    /// Capacity for received data in bits per second; `None`: not learned.
    pub capacity_down: Option<u64>,
    /// Capacity for sent data in bits per second; `None`: not learned.
    pub capacity_up: Option<u64>,
    /// Time of the last update, in seconds of Unix time.
    pub updated: u64,
}

/// Used part of a metered link's allowance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageRow {
    /// Bytes since the start of the period.
    pub used: u64,
    /// First day of the period, in days of Unix time.
    pub period: i64,
    /// Time of the last update, in seconds of Unix time.
    pub updated: u64,
}

/// How often a link fell. The network in its key is empty: a link that is down has none.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StabilityRow {
    /// Sums behind the estimate. They are as read, and possibly impossible.
    pub sums: StabilitySums,
    /// Time of the last update, in seconds of Unix time.
    pub updated: u64,
}

/// Bytes that active measurements of a link spent. The network in its key is empty: the limit is the device's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasuredRow {
    /// Bytes since the start of the day.
    pub spent: u64,
    /// Start of the day, in seconds of Unix time.
    pub since: u64,
}

/// Rows to be written. A later row replaces an earlier one with the same key.
#[derive(Debug, Clone, Default)]
struct Batch {
    apps: BTreeMap<AppKey, AppRow>,
    links: BTreeMap<LinkKey, LinkRow>,
    usage: BTreeMap<LinkKey, UsageRow>,
    stability: BTreeMap<LinkKey, StabilityRow>,
    measured: BTreeMap<LinkKey, MeasuredRow>,
    history: BTreeMap<(&'static str, u64), String>,
}

impl Batch {
    fn is_empty(&self) -> bool {
        let links = self.links.is_empty() && self.usage.is_empty() && self.stability.is_empty() && self.measured.is_empty();
        links && self.apps.is_empty() && self.history.is_empty()
    }

    /// Limits the size of the batch while writing fails.
    fn bound(&mut self) {
        prune(&mut self.apps, |row| row.updated);
        prune(&mut self.links, |row| row.updated);
        prune(&mut self.stability, |row| row.updated);
        prune(&mut self.measured, |row| row.since);
        while self.history.len() > ROW_LIMIT {
            self.history.pop_first();
        }
    }
}

/// Removes the oldest rows. Keeps at least [`ROW_LIMIT`] rows, at most a tenth more.
pub fn prune<K: Ord + Clone, V>(rows: &mut BTreeMap<K, V>, updated: impl Fn(&V) -> u64) {
    if rows.len() > ROW_LIMIT + ROW_LIMIT / 10 {
        let mut ages: Vec<_> = rows.iter().map(|(key, row)| (updated(row), key.clone())).collect();
        ages.sort();
        ages.iter().take(rows.len() - ROW_LIMIT).for_each(|(_, key)| drop(rows.remove(key)));
    }
}

/// All stored rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Learnt {
    /// Demand of applications.
    pub apps: BTreeMap<AppKey, AppRow>,
    /// Capacities of links.
    pub links: BTreeMap<LinkKey, LinkRow>,
    /// Usage of metered links.
    pub usage: BTreeMap<LinkKey, UsageRow>,
    /// Stability of links.
    pub stability: BTreeMap<LinkKey, StabilityRow>,
    /// Bytes spent on measurements of links.
    pub measured: BTreeMap<LinkKey, MeasuredRow>,
    /// Rows of the [history](braid_control::history), by kind and time.
    pub history: BTreeMap<(String, u64), String>,
}

/// The store. Changes are collected in memory until [`flush`](Self::flush).
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    connection: Option<Connection>,
    pending: Batch,
    trouble: Option<String>,
}

/// Why the store is unusable. Each flush retries.
#[derive(Debug, thiserror::Error)]
enum StoreError {
    #[error("{path}: {error}")]
    Folder { path: PathBuf, error: std::io::Error },
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("a later version of Braid wrote it (its schema is {0}; this version supports {SCHEMA})")]
    Later(i64),
}

impl Store {
    /// Whether `folder` contains a store.
    pub fn exists(folder: &Path) -> bool {
        folder.join(FILE).exists()
    }

    /// Opens the store in `folder`, which is created with mode 0700 if it does not exist, and reads all rows. Never fails: the returned
    /// messages describe each error and its consequence, for the log and `braid status`.
    pub fn open(folder: &Path) -> (Self, Learnt, Vec<String>) {
        let mut notes = Vec::new();
        let mut store = Self { folder: folder.to_owned(), connection: None, pending: Batch::default(), trouble: None };
        let learnt = match store.connect().and_then(|()| store.read()) {
            Ok(learnt) => learnt,
            Err(error) if damaged(&error) => store.replace_damaged(&error, &mut notes),
            Err(error) => {
                notes.extend(store.suspend(&error));
                Learnt::default()
            }
        };
        (store, learnt, notes)
    }

    /// Queues an application's demand.
    pub fn put_app(&mut self, key: AppKey, row: AppRow) {
        self.pending.apps.insert(key, row);
        self.pending.bound();
    }

    /// Queues a link's capacities.
    pub fn put_link(&mut self, key: LinkKey, row: LinkRow) {
        self.pending.links.insert(key, row);
        self.pending.bound();
    }

    /// Queues a metered link's usage. Never pruned: there is one row per link.
    pub fn put_usage(&mut self, key: LinkKey, row: UsageRow) {
        self.pending.usage.insert(key, row);
    }

    /// Queues a link's stability.
    pub fn put_stability(&mut self, key: LinkKey, row: StabilityRow) {
        self.pending.stability.insert(key, row);
        self.pending.bound();
    }

    /// Queues what measurements of a link spent.
    pub fn put_measured(&mut self, key: LinkKey, row: MeasuredRow) {
        self.pending.measured.insert(key, row);
        self.pending.bound();
    }

    /// Queues a row of the history.
    pub fn put_history(&mut self, kind: &'static str, at: u64, body: String) {
        self.pending.history.insert((kind, at), body);
        self.pending.bound();
    }

    /// Writes the queued rows in one transaction. Rows that cannot be written stay queued.
    ///
    /// Returns a message when writing starts to fail, and when it works again. Blocks on the disk: do not call it on the event loop.
    pub fn flush(&mut self) -> Option<String> {
        if self.pending.is_empty() && self.trouble.is_none() {
            return None;
        }
        let mut notes = Vec::new();
        let written = match self.connect().and_then(|()| self.write()) {
            Err(error) if damaged(&error) => {
                self.replace_damaged(&error, &mut notes);
                if self.connection.is_some() { self.write() } else { return notes.pop() }
            }
            other => other,
        };
        match written {
            Ok(()) => {
                self.pending = Batch::default();
                let restored = self.trouble.take().map(|_| format!("the store in {} works again", self.folder.display()));
                notes.pop().or(restored)
            }
            Err(error) => self.suspend(&error),
        }
    }

    /// The current error of the store, for `braid status`.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    fn connect(&mut self) -> Result<(), StoreError> {
        // If the file was removed or replaced, writes to the open connection would be lost.
        if self.connection.is_some() && self.file().exists() {
            return Ok(());
        }
        self.connection = None;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| StoreError::Folder { path, error }
        };
        if !self.folder.exists() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder).map_err(failed(&self.folder))?;
        }
        let path = self.file();
        // Created here rather than by SQLite, so that it is private from the start; -wal and -shm inherit its mode.
        // Symbolic links are not followed: the owner of the folder could redirect root to another file.
        let mut options = std::fs::OpenOptions::new();
        let made = options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path).map_err(failed(&path))?;
        made.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(failed(&path))?;
        let mut connection = Connection::open(&path)?;
        connection.busy_timeout(Duration::from_millis(500))?;
        migrate(&mut connection)?;
        self.connection = Some(connection);
        Ok(())
    }

    fn read(&self) -> Result<Learnt, StoreError> {
        let Some(connection) = &self.connection else { return Ok(Learnt::default()) };
        let sound: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if sound != "ok" {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
            return Err(rusqlite::Error::SqliteFailure(code, Some(sound)).into());
        }
        Ok(read_all(connection)?)
    }

    fn write(&mut self) -> Result<(), StoreError> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let transaction = connection.transaction()?;
        write_batch(&transaction, &self.pending)?;
        Ok(transaction.commit()?)
    }

    /// Moves a damaged file aside and continues with a new one.
    fn replace_damaged(&mut self, error: &StoreError, notes: &mut Vec<String>) -> Learnt {
        self.connection = None;
        let path = self.file();
        let aside = (1u32..).map(|n| self.folder.join(format!("{FILE}.corrupt-{n}"))).find(|path| !path.exists()).unwrap_or_default();
        let moved = std::fs::rename(&path, &aside);
        for suffix in ["-wal", "-shm"] {
            let beside = |path: &Path| PathBuf::from(format!("{}{suffix}", path.display()));
            let _ = std::fs::rename(beside(&path), beside(&aside));
        }
        notes.push(format!("the store {} is damaged ({error}): moved to {}, continuing with a new one", path.display(), aside.display()));
        if let Err(error) = moved.map_err(|error| StoreError::Folder { path, error }).and_then(|()| self.connect()) {
            notes.extend(self.suspend(&error));
        }
        Learnt::default()
    }

    /// Continues in memory. Returns a message unless the store was already suspended.
    fn suspend(&mut self, error: &StoreError) -> Option<String> {
        self.connection = None;
        let text = format!(
            "cannot write to the store in {}: {error}; continuing in memory and retrying: {}",
            self.folder.display(),
            remedy(error, owner(&self.folder), own_user())
        );
        self.trouble.replace(text.clone()).is_none().then_some(text)
    }
}

/// The remedy for a failed write to a folder of this owner.
fn remedy(error: &StoreError, owner: Option<u32>, own: u32) -> String {
    use rusqlite::ErrorCode::{DiskFull, SystemIoFailure};
    let full = match error {
        StoreError::Folder { error, .. } => matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded),
        StoreError::Sqlite(error) => matches!(error.sqlite_error_code(), Some(DiskFull | SystemIoFailure)),
        StoreError::Later(_) => false,
    };
    match owner {
        _ if full => "free space, or name a writable --state-dir".to_owned(),
        // Root without CAP_DAC_OVERRIDE is refused like any user.
        Some(owner) if owner != own => {
            let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
            match user_number(&users, SERVICE) == Some(owner) {
                true => format!(
                    "the folder belongs to the package's service: stop this Braid and start the service (`sudo systemctl start {SERVICE}`), or \
                     name another --state-dir"
                ),
                false => format!("the folder belongs to user {owner}, but this Braid runs as user {own}: name another --state-dir"),
            }
        }
        _ => "name a writable --state-dir".to_owned(),
    }
}

/// Owner of the folder, or of its nearest existing ancestor.
fn owner(folder: &Path) -> Option<u32> {
    folder.ancestors().find_map(|path| std::fs::metadata(path).ok()).map(|facts| facts.uid())
}

/// Whether the file itself is damaged, as opposed to a full disk or an inaccessible directory.
fn damaged(error: &StoreError) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    let StoreError::Sqlite(error) = error else { return false };
    // A database with another layout (a missing column, or one of another type) is unusable too.
    let foreign = matches!(error, rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::IntegralValueOutOfRange(..));
    foreign || matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase))
}

fn migrate(connection: &mut Connection) -> Result<(), StoreError> {
    // FULL: the usage of a metered link must survive a power failure. One transaction every few seconds is cheap.
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    let have: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    match have {
        // Earlier versions ignore these tables, so they do not need a new schema version.
        SCHEMA => Ok(connection.execute_batch(CREATE_ADDED)?),
        0 => {
            let transaction = connection.transaction()?;
            transaction.execute_batch(CREATE)?;
            transaction.execute_batch(CREATE_ADDED)?;
            transaction.pragma_update(None, "user_version", SCHEMA)?;
            Ok(transaction.commit()?)
        }
        later => Err(StoreError::Later(later)),
    }
}

const CREATE: &str = "
    CREATE TABLE app (exe TEXT NOT NULL, name TEXT NOT NULL, port INTEGER NOT NULL, demand_down INTEGER NOT NULL,
        demand_up INTEGER NOT NULL, samples INTEGER NOT NULL, updated INTEGER NOT NULL, PRIMARY KEY (exe, name, port)) WITHOUT ROWID;
    CREATE TABLE link (name TEXT NOT NULL, kind TEXT NOT NULL, network TEXT NOT NULL, capacity_down INTEGER, capacity_up INTEGER,
        updated INTEGER NOT NULL, PRIMARY KEY (name, kind, network)) WITHOUT ROWID;
    CREATE TABLE usage (name TEXT NOT NULL, kind TEXT NOT NULL, network TEXT NOT NULL, used INTEGER NOT NULL, period INTEGER NOT NULL,
        updated INTEGER NOT NULL, PRIMARY KEY (name, kind, network)) WITHOUT ROWID;";

/// Tables of later versions with the same schema number.
const CREATE_ADDED: &str = "
    CREATE TABLE IF NOT EXISTS history (kind TEXT NOT NULL, at INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, at)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS stability (name TEXT NOT NULL, kind TEXT NOT NULL, network TEXT NOT NULL, observed REAL NOT NULL,
        alive REAL NOT NULL, falls REAL NOT NULL, updated INTEGER NOT NULL, PRIMARY KEY (name, kind, network)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS measured (name TEXT NOT NULL, kind TEXT NOT NULL, network TEXT NOT NULL, spent INTEGER NOT NULL,
        updated INTEGER NOT NULL, PRIMARY KEY (name, kind, network)) WITHOUT ROWID;";

fn write_batch(transaction: &Transaction<'_>, batch: &Batch) -> rusqlite::Result<()> {
    let mut put = transaction.prepare_cached("INSERT OR REPLACE INTO app VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")?;
    for (key, row) in &batch.apps {
        put.execute(params![key.exe, key.name, key.port, int(row.demand_down), int(row.demand_up), int(row.samples), int(row.updated)])?;
    }
    let mut put = transaction.prepare_cached("INSERT OR REPLACE INTO link VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
    for (key, row) in &batch.links {
        put.execute(params![key.name, key.kind, key.network, row.capacity_down.map(int), row.capacity_up.map(int), int(row.updated)])?;
    }
    // Within one period the count never decreases: this keeps what was counted before a start that could not read the store.
    let mut put = transaction.prepare_cached(
        "INSERT INTO usage VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO UPDATE SET updated = excluded.updated, period = excluded.period,
         used = CASE WHEN period = excluded.period THEN max(used, excluded.used) ELSE excluded.used END",
    )?;
    for (key, row) in &batch.usage {
        put.execute(params![key.name, key.kind, key.network, int(row.used), row.period, int(row.updated)])?;
    }
    let mut put = transaction.prepare_cached("INSERT OR REPLACE INTO stability VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")?;
    for (key, StabilityRow { sums, updated }) in &batch.stability {
        put.execute(params![key.name, key.kind, key.network, sums.observed, sums.alive, sums.falls, int(*updated)])?;
    }
    let mut put = transaction.prepare_cached("INSERT OR REPLACE INTO measured VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for (key, row) in &batch.measured {
        put.execute(params![key.name, key.kind, key.network, int(row.spent), int(row.since)])?;
    }
    let mut put = transaction.prepare_cached("INSERT OR REPLACE INTO history VALUES (?1, ?2, ?3)")?;
    for ((kind, at), body) in &batch.history {
        put.execute(params![kind, int(*at), body])?;
    }
    let mut prune = transaction.prepare_cached(
        "DELETE FROM history WHERE kind = ?1 AND at < (SELECT at FROM history WHERE kind = ?1 ORDER BY at DESC LIMIT 1 OFFSET ?2)",
    )?;
    for kind in batch.history.keys().map(|(kind, _)| *kind).collect::<BTreeSet<_>>() {
        prune.execute(params![kind, int(braid_control::history::kept(kind).saturating_sub(1) as u64)])?;
    }
    bound_table(transaction, "app", "exe, name, port")?;
    bound_table(transaction, "link", "name, kind, network")?;
    bound_table(transaction, "stability", "name, kind, network")?;
    bound_table(transaction, "measured", "name, kind, network")
}

fn bound_table(transaction: &Transaction<'_>, table: &str, key: &str) -> rusqlite::Result<()> {
    let count: i64 = transaction.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))?;
    let excess = count - ROW_LIMIT as i64;
    if excess > 0 {
        let prune = format!("DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} ORDER BY updated LIMIT ?1)");
        transaction.execute(&prune, [excess])?;
    }
    Ok(())
}

fn read_all(connection: &Connection) -> rusqlite::Result<Learnt> {
    let mut learnt = Learnt::default();
    let mut select = connection.prepare("SELECT * FROM app")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let key = AppKey { exe: row.get(0)?, name: row.get(1)?, port: row.get(2)? };
        let value = AppRow { demand_down: uint(row, 3)?, demand_up: uint(row, 4)?, samples: uint(row, 5)?, updated: uint(row, 6)? };
        learnt.apps.insert(key, value);
    }
    let mut select = connection.prepare("SELECT * FROM link")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let value = LinkRow { capacity_down: maybe(row, 3)?, capacity_up: maybe(row, 4)?, updated: uint(row, 5)? };
        learnt.links.insert(link_key(row)?, value);
    }
    let mut select = connection.prepare("SELECT * FROM usage")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        learnt.usage.insert(link_key(row)?, UsageRow { used: uint(row, 3)?, period: row.get(4)?, updated: uint(row, 5)? });
    }
    let mut select = connection.prepare("SELECT * FROM stability")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let sums = StabilitySums { observed: row.get(3)?, alive: row.get(4)?, falls: row.get(5)? };
        learnt.stability.insert(link_key(row)?, StabilityRow { sums, updated: uint(row, 6)? });
    }
    let mut select = connection.prepare("SELECT * FROM measured")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        learnt.measured.insert(link_key(row)?, MeasuredRow { spent: uint(row, 3)?, since: uint(row, 4)? });
    }
    let mut select = connection.prepare("SELECT * FROM history ORDER BY kind, at")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        learnt.history.insert((row.get(0)?, uint(row, 1)?), row.get(2)?);
    }
    Ok(learnt)
}

fn link_key(row: &rusqlite::Row<'_>) -> rusqlite::Result<LinkKey> {
    Ok(LinkKey { name: row.get(0)?, kind: row.get(1)?, network: row.get(2)? })
}

/// SQLite integers are signed.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn uint(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(column, value))
}

fn maybe(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    if row.get_ref(column)? == rusqlite::types::ValueRef::Null { Ok(None) } else { uint(row, column).map(Some) }
}

/// Schema version of the file in `folder`, for tests and `doctor`; `None` if there is no file.
pub fn schema_of(folder: &Path) -> Option<i64> {
    let path = folder.join(FILE);
    let connection = Connection::open_with_flags(path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY).ok()?;
    connection.query_row("PRAGMA user_version", [], |row| row.get(0)).optional().ok()?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(name: &str, port: u16) -> AppKey {
        AppKey { exe: format!("/usr/bin/{name}"), name: name.into(), port }
    }

    fn link() -> LinkKey {
        LinkKey { name: "wlan0".into(), kind: "wireless".into(), network: "10.0.0.1".into() }
    }

    #[test]
    fn regression_no_state_is_written_through_a_symbolic_link() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o644)).unwrap();
        let state = folder.path().join("state");
        std::fs::create_dir(&state).unwrap();
        std::os::unix::fs::symlink(&victim, state.join(FILE)).unwrap();
        let (mut store, _, warnings) = Store::open(&state);
        store.put_app(app("curl", 443), AppRow::default());
        store.flush();
        assert!(!warnings.is_empty(), "the refusal is reported");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(victim.metadata().unwrap().permissions().mode() & 0o777, 0o644);
    }

    const MEASURED: MeasuredRow = MeasuredRow { spent: 95_000_000, since: 9 };
    const STABILITY: StabilityRow = StabilityRow { sums: StabilitySums { observed: 90.5, alive: 60.25, falls: 1.5 }, updated: 8 };

    /// Opens a store, writes one row to each table except the history, and returns what a second open reads.
    fn filled(folder: &Path) -> Learnt {
        let (mut store, learnt, notes) = Store::open(folder);
        assert_eq!((learnt, notes), (Learnt::default(), vec![]));
        store.put_app(app("curl", 443), AppRow { demand_down: 1 << 60, demand_up: 2, samples: 3, updated: 4 });
        store.put_link(link(), LinkRow { capacity_down: Some(20_000_000), capacity_up: None, updated: 5 });
        store.put_usage(link(), UsageRow { used: 7, period: 20_000, updated: 6 });
        store.put_stability(link(), STABILITY);
        store.put_measured(link(), MEASURED);
        assert_eq!(store.flush(), None);
        let (_, learnt, _) = Store::open(folder);
        learnt
    }

    #[test]
    fn regression_another_users_folder_is_not_reported_as_a_full_disk() {
        let failed = |kind: ErrorKind| StoreError::Folder { path: "/var/lib/braid".into(), error: kind.into() };
        let denied = failed(ErrorKind::PermissionDenied);
        let others = remedy(&denied, Some(4_000_000), 0);
        assert!(others.contains("belongs to user 4000000") && others.contains("--state-dir") && !others.contains("space"), "{others}");
        assert_eq!(remedy(&denied, Some(0), 0), "name a writable --state-dir");
        assert!(remedy(&failed(ErrorKind::StorageFull), Some(0), 0).contains("free space"));
        let full = rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL), None).into();
        assert!(remedy(&full, Some(4_000_000), 0).contains("free space"));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(owner(&folder.path().join("not/yet")), owner(folder.path()));
        assert_eq!(owner(folder.path()), Some(own_user()));
    }

    #[test]
    fn flushed_rows_are_read_back_and_the_file_is_private() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("state");
        let learnt = filled(&folder);
        assert_eq!(learnt.apps[&app("curl", 443)], AppRow { demand_down: 1 << 60, demand_up: 2, samples: 3, updated: 4 });
        assert_eq!(learnt.links[&link()], LinkRow { capacity_down: Some(20_000_000), capacity_up: None, updated: 5 });
        assert_eq!(learnt.usage[&link()], UsageRow { used: 7, period: 20_000, updated: 6 });
        assert_eq!((learnt.stability[&link()], learnt.measured[&link()]), (STABILITY, MEASURED));
        assert_eq!(schema_of(&folder), Some(SCHEMA));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&folder.join(FILE))), (0o700, 0o600));
    }

    #[test]
    fn history_rows_are_limited_and_old_files_accept_them() {
        let folder = tempfile::tempdir().unwrap();
        filled(folder.path());
        Connection::open(folder.path().join(FILE)).unwrap().execute_batch("DROP TABLE history").unwrap();
        let (mut store, ..) = Store::open(folder.path());
        for at in 0..1000 {
            store.put_history("5m", at, format!("{{{at}}}"));
        }
        store.put_history("day", 3, "x".into());
        assert_eq!(store.flush(), None);
        let history = Store::open(folder.path()).1.history;
        assert_eq!(history.len(), braid_control::history::kept("5m") + 1);
        assert_eq!((history.keys().next().unwrap().1, &*history[&("day".to_owned(), 3)]), (712, "x"));
    }

    #[test]
    fn usage_never_falls_within_its_period() {
        let folder = tempfile::tempdir().unwrap();
        filled(folder.path());
        for (used, period, kept) in [(3, 20_000, 7), (9, 20_000, 9), (1, 20_030, 1)] {
            let (mut store, ..) = Store::open(folder.path());
            store.put_usage(link(), UsageRow { used, period, updated: 8 });
            store.flush();
            assert_eq!(Store::open(folder.path()).1.usage[&link()], UsageRow { used: kept, period, updated: 8 });
        }
    }

    #[test]
    fn a_damaged_file_is_moved_aside_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        for n in 1..=2 {
            std::fs::write(folder.path().join(FILE), "this is no database, however long one looks at it".repeat(100)).unwrap();
            let (mut store, learnt, notes) = Store::open(folder.path());
            assert_eq!(learnt, Learnt::default());
            assert!(notes.len() == 1 && notes[0].contains(&format!("corrupt-{n}")), "{notes:?}");
            assert!(folder.path().join(format!("{FILE}.corrupt-{n}")).exists());
            store.put_app(app("a", 1), AppRow::default());
            assert_eq!(store.flush(), None);
        }
        assert_eq!(Store::open(folder.path()).1.apps.len(), 1);
    }

    #[test]
    fn a_damaged_page_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        filled(folder.path());
        let path = folder.path().join(FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        let tail = bytes.len() - 4096;
        bytes[tail..].fill(0xff);
        std::fs::write(&path, bytes).unwrap();
        let (_, _, notes) = Store::open(folder.path());
        assert!(notes.iter().any(|note| note.contains("damaged")), "{notes:?}");
    }

    #[test]
    fn an_unwritable_store_continues_in_memory_and_writes_later() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("state");
        // A file in place of the directory also stops root.
        std::fs::write(&folder, "").unwrap();
        let (mut store, _, notes) = Store::open(&folder);
        assert!(notes.len() == 1 && notes[0].contains("--state-dir"), "{notes:?}");
        store.put_app(app("curl", 443), AppRow { samples: 9, ..AppRow::default() });
        assert_eq!(store.flush(), None, "reported once, not at every flush");
        assert!(store.trouble().is_some());
        std::fs::remove_file(&folder).unwrap();
        assert!(store.flush().unwrap().contains("works again"));
        assert_eq!(store.trouble(), None);
        assert_eq!(Store::open(&folder).1.apps[&app("curl", 443)].samples, 9);
    }

    #[test]
    fn a_full_disk_loses_nothing_already_stored() {
        let folder = tempfile::tempdir().unwrap();
        let before = filled(folder.path());
        let (mut store, ..) = Store::open(folder.path());
        // SQLite's own limit simulates a full disk: it also returns SQLITE_FULL.
        store.connection.as_ref().unwrap().query_row("PRAGMA max_page_count = 1", [], |_| Ok(())).unwrap();
        for port in 0..2000 {
            store.put_app(app("curl", port), AppRow { samples: 1, ..AppRow::default() });
        }
        assert!(store.flush().unwrap().contains("continuing in memory"));
        assert_eq!(Store::open(folder.path()).1, before);
        // With space again, the next flush reopens the file and writes all rows.
        assert!(store.flush().unwrap().contains("works again"));
        assert_eq!(Store::open(folder.path()).1.apps.len(), 2000);
    }

    #[test]
    fn a_file_of_a_later_version_is_left_untouched() {
        let folder = tempfile::tempdir().unwrap();
        filled(folder.path());
        Connection::open(folder.path().join(FILE)).unwrap().pragma_update(None, "user_version", 99).unwrap();
        let (mut store, _, notes) = Store::open(folder.path());
        assert!(notes[0].contains("later version"), "{notes:?}");
        store.put_app(app("a", 1), AppRow::default());
        store.flush();
        assert_eq!(schema_of(folder.path()), Some(99));
    }

    #[test]
    fn the_oldest_rows_are_removed_first() {
        let folder = tempfile::tempdir().unwrap();
        let (mut store, ..) = Store::open(folder.path());
        for n in 0..(ROW_LIMIT + 50) as u64 {
            store.put_app(app(&format!("app{n}"), 1), AppRow { updated: n, ..AppRow::default() });
        }
        assert_eq!(store.flush(), None);
        let apps = Store::open(folder.path()).1.apps;
        assert_eq!(apps.len(), ROW_LIMIT);
        assert_eq!(apps.values().map(|row| row.updated).min(), Some(50));
    }
}
