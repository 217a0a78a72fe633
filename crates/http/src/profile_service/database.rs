//! SQLite database of the profile service.

use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_decide::energy::{Profile, Row, Technology};
use rusqlite::{Connection, params};

/// Schema version that this program writes.
const SCHEMA: i64 = 1;

/// Error of the profile database.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// SQLite returned an error.
    #[error("cannot use the profile database {path}: {error}; specify a writable file with --db")]
    Sqlite {
        /// Path of the file.
        path: PathBuf,
        /// Error from SQLite.
        error: rusqlite::Error,
    },
    /// The file has a later schema version.
    #[error("the profile database {path} was written by a later version of braid: specify another file with --db")]
    Later {
        /// Path of the file.
        path: PathBuf,
    },
}

/// A profile database.
#[derive(Debug)]
pub struct Database {
    path: PathBuf,
    connection: Connection,
}

impl Database {
    /// Opens the file, or creates it with the profiles that ship with Braid.
    pub fn open(path: &Path) -> Result<Self, DatabaseError> {
        let failed = |error| DatabaseError::Sqlite { path: path.to_owned(), error };
        let connection = Connection::open(path).map_err(failed)?;
        connection.busy_timeout(Duration::from_secs(2)).map_err(failed)?;
        let mut database = Self { path: path.to_owned(), connection };
        let have: i64 = database.connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
        match have {
            SCHEMA => {}
            0 => {
                database.create().map_err(failed)?;
                database.put(braid_control::profiles::shipped().iter())?;
            }
            _ => return Err(DatabaseError::Later { path: path.to_owned() }),
        }
        Ok(database)
    }

    fn create(&mut self) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        transaction.execute_batch(
            "CREATE TABLE profile (technology TEXT NOT NULL, model TEXT NOT NULL, idle_mw REAL NOT NULL, receive_mw REAL NOT NULL,
                transmit_mw REAL NOT NULL, down_mw_per_mbps REAL NOT NULL, up_mw_per_mbps REAL NOT NULL, limit_down_mbps REAL,
                limit_up_mbps REAL, source TEXT NOT NULL, PRIMARY KEY (technology, model)) WITHOUT ROWID;",
        )?;
        transaction.pragma_update(None, "user_version", SCHEMA)?;
        transaction.commit()
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> DatabaseError + use<> {
        let path = self.path.clone();
        move |error| DatabaseError::Sqlite { path: path.clone(), error }
    }

    /// Stores profiles, all or none; replaces a profile with the same model and technology.
    pub fn put<'a>(&mut self, profiles: impl IntoIterator<Item = &'a Profile>) -> Result<(), DatabaseError> {
        let failed = self.failed();
        let transaction = self.connection.transaction().map_err(&failed)?;
        for profile in profiles {
            let row = profile.row();
            transaction
                .execute(
                    "INSERT OR REPLACE INTO profile VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                    params![
                        row.technology.to_string(),
                        row.model,
                        row.idle_mw,
                        row.receive_mw,
                        row.transmit_mw,
                        row.down_mw_per_mbps,
                        row.up_mw_per_mbps,
                        row.limit_down_mbps,
                        row.limit_up_mbps,
                        row.source
                    ],
                )
                .map_err(&failed)?;
        }
        transaction.commit().map_err(failed)
    }

    /// The profiles of a technology, or all. Skips rows from other sources that are not valid profiles.
    pub fn profiles(&self, technology: Option<Technology>) -> Result<Vec<Profile>, DatabaseError> {
        let name = technology.map(|technology| technology.to_string());
        let mut query = self
            .connection
            .prepare_cached("SELECT * FROM profile WHERE ?1 IS NULL OR technology = ?1 ORDER BY technology, model")
            .map_err(self.failed())?;
        let read = |row: &rusqlite::Row<'_>| -> rusqlite::Result<Option<Profile>> {
            let Ok(technology) = row.get::<_, String>(0)?.parse() else { return Ok(None) };
            let row = Row {
                technology,
                model: row.get(1)?,
                idle_mw: row.get(2)?,
                receive_mw: row.get(3)?,
                transmit_mw: row.get(4)?,
                down_mw_per_mbps: row.get(5)?,
                up_mw_per_mbps: row.get(6)?,
                limit_down_mbps: row.get(7)?,
                limit_up_mbps: row.get(8)?,
                source: row.get(9)?,
            };
            Ok(Profile::try_from(row).ok())
        };
        let rows = query.query_map(params![name], read).and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>);
        Ok(rows.map_err(self.failed())?.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_database_holds_the_shipped_profiles_and_keeps_added_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("energy.sqlite");
        let shipped = braid_control::profiles::shipped();
        let mut database = Database::open(&path).unwrap();
        assert_eq!(database.profiles(None).unwrap().len(), shipped.iter().count());
        let mine = Row { source: "mine".into(), ..shipped.find(None, Technology::FiveG).unwrap().row().clone() };
        database.put([&Profile::try_from(mine).unwrap()]).unwrap();
        drop(database);
        let again = Database::open(&path).unwrap().profiles(Some(Technology::FiveG)).unwrap();
        assert_eq!(again.iter().filter(|profile| profile.row().source == "mine").count(), 1);
        assert!(again.iter().all(|profile| profile.row().technology == Technology::FiveG) && again.len() == 2);
    }

    #[test]
    fn foreign_files_and_later_databases_are_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("energy.sqlite");
        std::fs::write(&path, "this is no database, and long enough to be looked at as one").unwrap();
        assert!(Database::open(&path).unwrap_err().to_string().contains("--db"));
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("this is no database"));
        let later = folder.path().join("later.sqlite");
        Connection::open(&later).unwrap().pragma_update(None, "user_version", 9).unwrap();
        assert!(matches!(Database::open(&later), Err(DatabaseError::Later { .. })));
    }

    #[test]
    fn rows_that_are_not_profiles_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("energy.sqlite")).unwrap();
        let before = database.profiles(None).unwrap().len();
        for row in ["'6g', 'x', 1, 2, 3, 0, 0, NULL, NULL, 's'", "'lte', 'x', 9, 2, 3, 0, 0, NULL, NULL, 's'"] {
            database.connection.execute(&format!("INSERT INTO profile VALUES ({row})"), []).unwrap();
        }
        assert_eq!(database.profiles(None).unwrap().len(), before);
    }
}
