//! Client usage per calendar month (UTC).

use std::collections::BTreeMap;
use std::time::SystemTime;

use braid_decide::allowance::period_of;
use braid_model::ByteCount;
use rusqlite::params;

use super::{ClientId, Registry, RegistryError, integer, seconds};

/// Payload bytes of a client in a month. Each byte counts once, although it passes the relay twice (in and out).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Month {
    /// First day of the month, in days of Unix time.
    pub first_day: i64,
    /// Bytes towards the client.
    pub down: ByteCount,
    /// Bytes from the client.
    pub up: ByteCount,
}

impl Month {
    /// Bytes of both directions.
    pub fn total(&self) -> ByteCount {
        self.down + self.up
    }
}

/// The first day, in days of Unix time, of the month (UTC) that contains `now`.
pub fn month_of(now: SystemTime) -> i64 {
    period_of(seconds(now).div_euclid(86_400), 1)
}

/// Usage that is not written yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    usage: BTreeMap<(ClientId, i64), Month>,
    seen: BTreeMap<ClientId, i64>,
    trouble: Option<String>,
}

impl Registry {
    /// Counts a client's bytes. Also updates the time when it was last seen, even if it moved nothing.
    pub fn count(&mut self, id: ClientId, down: ByteCount, up: ByteCount, now: SystemTime) {
        self.pending.seen.insert(id, seconds(now));
        if down == ByteCount::ZERO && up == ByteCount::ZERO {
            return;
        }
        let first_day = month_of(now);
        let month = self.pending.usage.entry((id, first_day)).or_insert(Month { first_day, ..Month::default() });
        month.down += down;
        month.up += up;
    }

    /// Writes the counted usage in one transaction. Keeps it for the next call if the write fails.
    ///
    /// Returns a text, once per change, when writes begin to fail or work again. Blocks for the disk.
    pub fn flush(&mut self) -> Option<String> {
        if self.pending.usage.is_empty() && self.pending.seen.is_empty() {
            return None;
        }
        let (usage, seen) = (std::mem::take(&mut self.pending.usage), std::mem::take(&mut self.pending.seen));
        let written = self.change(|transaction| {
            // Saturate at SQLite's largest integer: a larger sum would become a floating-point number.
            let mut add = transaction.prepare_cached(
                "INSERT INTO usage (client, month, down, up) VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO UPDATE SET
                    down = down + MIN(excluded.down, 9223372036854775807 - down), up = up + MIN(excluded.up, 9223372036854775807 - up)",
            )?;
            for ((id, first_day), month) in &usage {
                add.execute(params![id.0, first_day, integer(month.down.get()), integer(month.up.get())])?;
            }
            let mut see = transaction.prepare_cached("UPDATE client SET seen = ?2 WHERE id = ?1")?;
            for (id, seen) in &seen {
                see.execute(params![id.0, seen])?;
            }
            Ok(())
        });
        match written {
            Ok(()) => self.pending.trouble.take().map(|_| format!("the registry {} can be written again", self.path.display())),
            Err(error) => {
                self.pending.usage = usage;
                self.pending.seen = seen;
                let text = format!("client usage is counted, but cannot be saved: {error}");
                self.pending.trouble.replace(text.clone()).is_none().then_some(text)
            }
        }
    }

    /// The current error that prevents writes.
    pub fn trouble(&self) -> Option<&str> {
        self.pending.trouble.as_deref()
    }

    /// A client's usage in the month that contains `now`, including usage not written yet.
    pub fn used(&self, id: ClientId, now: SystemTime) -> Result<Month, RegistryError> {
        let first_day = month_of(now);
        let mut month = self.months(id)?.into_iter().find(|month| month.first_day == first_day).unwrap_or_default();
        month.first_day = first_day;
        if let Some(pending) = self.pending.usage.get(&(id, first_day)) {
            month.down += pending.down;
            month.up += pending.up;
        }
        Ok(month)
    }

    /// All written months of a client, oldest first.
    pub fn months(&self, id: ClientId) -> Result<Vec<Month>, RegistryError> {
        let bytes = |count: i64| ByteCount::new(count.max(0) as u64);
        self.read(|connection| {
            let mut statement = connection.prepare_cached("SELECT month, down, up FROM usage WHERE client = ?1 ORDER BY month")?;
            let months = statement
                .query_map([id.0], |row| Ok(Month { first_day: row.get(0)?, down: bytes(row.get(1)?), up: bytes(row.get(2)?) }))?;
            months.collect()
        })
    }
}
