//! What clients use, per calendar month (UTC).

use std::collections::BTreeMap;
use std::time::SystemTime;

use braid_decide::allowance::period_of;
use braid_model::ByteCount;
use rusqlite::params;

use super::{ClientId, Registry, RegistryError, integer, seconds};

/// What a client moved in a month: payload, once for both of its ways through the relay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Month {
    /// The month's first day, in days of Unix time.
    pub first_day: i64,
    /// Towards the client.
    pub down: ByteCount,
    /// From the client.
    pub up: ByteCount,
}

impl Month {
    /// Both directions.
    pub fn total(&self) -> ByteCount {
        self.down + self.up
    }
}

/// The first day, in days of Unix time, of the month (UTC) that `now` lies in.
pub fn month_of(now: SystemTime) -> i64 {
    period_of(seconds(now).div_euclid(86_400), 1)
}

/// What is not written yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    usage: BTreeMap<(ClientId, i64), Month>,
    seen: BTreeMap<ClientId, i64>,
    trouble: Option<String>,
}

impl Registry {
    /// Counts what a client moved; that it was there is counted also with nothing moved.
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

    /// Writes what was counted, in one transaction. What cannot be written is kept for the next time.
    ///
    /// The text, if any, says that writing began to fail, or works again; it is given once per change. Blocks for the disk.
    pub fn flush(&mut self) -> Option<String> {
        if self.pending.usage.is_empty() && self.pending.seen.is_empty() {
            return None;
        }
        let (usage, seen) = (std::mem::take(&mut self.pending.usage), std::mem::take(&mut self.pending.seen));
        let written = self.change(|transaction| {
            // Never above what SQLite's integers hold: a sum beyond would become a fraction.
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
                let text = format!("what clients use is counted, but not written down: {error}");
                self.pending.trouble.replace(text.clone()).is_none().then_some(text)
            }
        }
    }

    /// What keeps usage from being written now.
    pub fn trouble(&self) -> Option<&str> {
        self.pending.trouble.as_deref()
    }

    /// What a client has used in the month that `now` lies in, with what is not written yet.
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

    /// All months of a client that are written down, oldest first.
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
