//! History of events and measurements: notes, samples at four resolutions, and Braid's gains by day. It reads no clock and does no I/O. The
//! store keeps its rows across restarts.
//!
//! **Memory is bounded**: 1,000 notes of at most 500 bytes, which are stored; 1,668 samples (300 of one second, 360 of ten seconds, 288 of
//! five minutes, 720 of one hour) of at most [`MAX_LINKS`] links at some 150 bytes, so 0.8 MB with three links and 8 MB with 32; 400 days
//! of at most 64 links; and the bytes of [applications](apps), 2.7 MB, or 8 MB with the longest names.

mod apps;
mod changes;
mod gains;
mod rings;
mod watch;

use std::collections::{BTreeMap, VecDeque};

use braid_api::{AppHistory, AppsSample, Gains, History, LinkSample, Note, Resolution, Sample};
use braid_decide::energy::ByteCost;
use braid_model::{ByteCount, Joules, LinkIndex, LinkState, MAX_LINKS, Time, Traffic};

pub use apps::AppPulse;
use apps::AppRings;
pub use changes::changes;
use gains::Days;
use rings::Rings;
use watch::StateWatcher;

/// Kind of a note's row in the store.
const NOTE_KIND: &str = "note";
/// Maximum number of notes.
const MAX_NOTES: usize = 1000;
/// Maximum length of a note in bytes.
const MAX_NOTE_BYTES: usize = 500;

/// State of one link at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Pulse {
    /// Interface index.
    pub index: LinkIndex,
    /// Name of the interface.
    pub name: String,
    /// State of the link.
    pub state: LinkState,
    /// Reason for the state, if there is one.
    pub reason: Option<String>,
    /// Number of times it went down or died.
    pub falls: u64,
    /// Whether it may get flows now.
    pub usable: bool,
    /// Lowest metric of its default routes; `None` if it has none. The lowest rank is the system's choice.
    pub rank: Option<u32>,
    /// Counters of the device.
    pub device: Option<Traffic>,
    /// When the counters were read.
    pub read_at: Time,
    /// Smoothed RTT in microseconds.
    pub rtt_us: Option<u64>,
    /// Fraction of retransmitted segments.
    pub loss: Option<f64>,
    /// Energy of all its bytes so far.
    pub energy: Option<Joules>,
    /// Energy per byte.
    pub cost: Option<ByteCost>,
    /// Price of a gigabyte.
    pub money_per_gb: f64,
    /// Living flows bound to it.
    pub flows: u64,
    /// Living bonded flows that have used it.
    pub bonded: u64,
}

/// Power supply and power saving.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Power {
    /// Whether the machine is plugged in; `None`: no battery is known.
    pub plugged: Option<bool>,
    /// Whether all flows use the link that takes the least energy.
    pub saving: bool,
}

/// Rows for the store: kind, time and JSON.
pub type Rows = BTreeMap<(&'static str, u64), String>;

/// History of links, applications and the daemon, as far back as each resolution goes.
#[derive(Debug, Default)]
pub struct HistoryStore {
    notes: VecDeque<Note>,
    last_note: u64,
    /// Number of latest notes that are not stored yet.
    fresh_notes: usize,
    rings: Rings,
    apps: AppRings,
    apps_at_ms: Option<u64>,
    days: Days,
    watcher: StateWatcher,
    before: Option<LastSecond>,
}

/// State one second ago.
#[derive(Debug)]
struct LastSecond {
    at_ms: u64,
    links: Vec<Pulse>,
}

impl HistoryStore {
    /// Restores the rows of an earlier run; ignores malformed rows.
    pub fn recall<'a>(&mut self, rows: impl IntoIterator<Item = (&'a str, u64, &'a str)>) {
        for (kind, at, body) in rows {
            match kind {
                gains::KIND => self.days.recall(at, body),
                NOTE_KIND => self.recall_note(body),
                _ => {
                    self.rings.recall(kind, body);
                    self.apps.recall(kind, body);
                }
            }
        }
    }

    /// Adds a note. `kind` and `level` as in [`Note`]; `at_ms` in Unix time.
    pub fn note(&mut self, at_ms: u64, kind: &str, level: &str, text: impl Into<String>) {
        let mut text: String = text.into();
        if text.len() > MAX_NOTE_BYTES {
            let end = (0..=MAX_NOTE_BYTES - 4).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
            text.push('…');
        }
        // Ids follow the clock, so that they keep increasing across restarts.
        self.last_note = at_ms.max(self.last_note.saturating_add(1));
        self.fresh_notes = (self.fresh_notes + 1).min(MAX_NOTES);
        self.put_note(Note { id: self.last_note, at_ms, kind: kind.to_owned(), level: level.to_owned(), text });
    }

    /// Restores a note. Notes arrive in order.
    fn recall_note(&mut self, body: &str) {
        if let Ok(note) = serde_json::from_str::<Note>(body)
            && note.id > self.last_note
        {
            self.last_note = note.id;
            self.put_note(note);
        }
    }

    fn put_note(&mut self, note: Note) {
        if self.notes.len() == MAX_NOTES {
            self.notes.pop_front();
        }
        self.notes.push_back(note);
    }

    fn note_rows(&mut self) -> Rows {
        let fresh = std::mem::take(&mut self.fresh_notes);
        let notes = self.notes.iter().skip(self.notes.len().saturating_sub(fresh));
        notes.filter_map(|note| Some(((NOTE_KIND, note.id), serde_json::to_string(note).ok()?))).collect()
    }

    /// Notes with an id above `id`, oldest first.
    pub fn notes_after(&self, id: u64) -> Vec<Note> {
        self.notes.iter().filter(|note| note.id > id).cloned().collect()
    }

    /// The last `count` notes.
    pub fn last_notes(&self, count: usize) -> Vec<Note> {
        self.notes.iter().skip(self.notes.len().saturating_sub(count)).cloned().collect()
    }

    /// Id of the last note; 0 if there is none.
    pub fn last_note(&self) -> u64 {
        self.last_note
    }

    /// Notes that flows were ended because their link was dead and another was usable.
    pub fn on_ended(&mut self, at_ms: u64, count: u64, link: &str) {
        self.days.today(at_ms).flows_ended += count;
        let (flows, their) =
            if count == 1 { ("1 flow", "its program reconnects") } else { (&*format!("{count} flows"), "their programs reconnect") };
        self.note(at_ms, "flow", "info", format!("ended {flows} on {link}, so that {their} over a working link"));
    }

    /// Records the state of every link; call it once a second. Returns the sample.
    pub fn on_second(&mut self, at_ms: u64, links: Vec<Pulse>, power: Power) -> Sample {
        let links: Vec<Pulse> = links.into_iter().take(MAX_LINKS).collect();
        let changes = self.watcher.on_second(&links, power);
        for change in changes {
            self.days.today(at_ms).flows_moved += change.moved;
            self.note(at_ms, change.kind, change.level, change.text);
        }
        let sample = self.sample(at_ms, &links);
        if let Some(before) = &self.before {
            self.days.count(at_ms, &before.links, &links, at_ms.saturating_sub(before.at_ms));
        }
        self.rings.push(&sample);
        self.before = Some(LastSecond { at_ms, links });
        sample
    }

    /// Records the bytes that applications moved since the last call; call it once a second. Returns the sample.
    pub fn on_apps(&mut self, at_ms: u64, apps: &[AppPulse]) -> AppsSample {
        // If the clock was set meanwhile, the length of the interval is unknown.
        let span_ms = self.apps_at_ms.replace(at_ms).and_then(|before| at_ms.checked_sub(before)).filter(|span| *span > 0);
        self.apps.push(at_ms, span_ms.unwrap_or(1_000), apps)
    }

    /// History of applications' traffic, of all or of the named one.
    pub fn app_history(&self, resolution: Resolution, since_ms: u64, application: Option<&str>) -> AppHistory {
        self.apps.history(resolution, since_ms, application)
    }

    fn sample(&self, at_ms: u64, links: &[Pulse]) -> Sample {
        let before = |pulse: &Pulse| {
            let before = self.before.as_ref()?;
            let link = before.links.iter().find(|link| link.index == pulse.index)?;
            // Use the time between the readings of the counters, not between the samples: the counters may have skipped a second.
            let span = pulse.read_at.since(link.read_at).as_millis() as u64;
            Some((link, Some(span).filter(|span| *span > 0)?))
        };
        let link = |pulse: &Pulse| {
            let rate = |way: fn(Traffic) -> ByteCount| {
                let (before, span_ms) = before(pulse)?;
                // A counter that decreased means that the device was recreated.
                let moved = way(pulse.device?).get().checked_sub(way(before.device?).get())?;
                Some((moved as f64 * 8000.0 / span_ms as f64) as u64)
            };
            let power = before(pulse).and_then(|(before, span_ms)| {
                let joules = pulse.energy?.get() - before.energy.map_or(0.0, Joules::get);
                (joules >= 0.0).then(|| joules * 1000.0 / span_ms as f64)
            });
            LinkSample {
                name: pulse.name.clone(),
                rx_bps: rate(|traffic| traffic.rx),
                tx_bps: rate(|traffic| traffic.tx),
                rtt_us: pulse.rtt_us,
                loss: pulse.loss,
                power_w: power,
            }
        };
        Sample { at_ms, links: links.iter().map(link).collect() }
    }

    /// `GET /v1/history`.
    pub fn history(&self, resolution: Resolution, since_ms: u64) -> History {
        self.rings.history(resolution, since_ms)
    }

    /// `GET /v1/gains`.
    pub fn gains(&self, at_ms: u64, days: u32) -> Gains {
        self.days.gains(at_ms, days)
    }

    /// Rows that are new or changed since the last call.
    pub fn rows(&mut self) -> Rows {
        let mut rows = self.rings.rows();
        rows.extend(self.days.rows());
        rows.extend(self.note_rows());
        rows.extend(self.apps.rows());
        rows
    }
}

/// Number of rows of a kind that the store keeps: those that the history restores.
pub fn kept(kind: &str) -> usize {
    match kind {
        gains::KIND => gains::MAX_DAYS,
        NOTE_KIND => MAX_NOTES,
        _ => rings::kept(kind).max(apps::kept(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn pulse(index: u32, name: &str) -> Pulse {
        Pulse {
            index: LinkIndex(index),
            name: name.to_owned(),
            state: LinkState::Up,
            reason: None,
            falls: 0,
            usable: true,
            rank: Some(index),
            device: Some([ByteCount::ZERO; 2].into()),
            read_at: Time::ZERO,
            rtt_us: Some(1000 * u64::from(index)),
            loss: None,
            energy: None,
            cost: None,
            money_per_gb: 0.0,
            flows: 0,
            bonded: 0,
        }
    }

    #[test]
    fn a_sample_is_the_growth_of_the_counters() {
        let mut history = HistoryStore::default();
        let first = history.on_second(1_000, vec![pulse(1, "wlan0")], Power::default());
        assert_eq!((first.links[0].rx_bps, first.links[0].rtt_us, first.links[0].power_w), (None, Some(1000), None));
        let read_at = |seconds: u64| Time::from_millis(seconds * 1000);
        let moved =
            Pulse { device: Some([ByteCount::new(1000), ByteCount::new(500)].into()), energy: Some(Joules::new(3.0)), ..pulse(1, "wlan0") };
        let second = history.on_second(3_000, vec![Pulse { read_at: read_at(2), ..moved.clone() }], Power::default());
        assert_eq!((second.links[0].rx_bps, second.links[0].tx_bps, second.links[0].power_w), (Some(4000), Some(2000), Some(1.5)));
        let anew = history.on_second(4_000, vec![Pulse { read_at: read_at(3), ..pulse(1, "wlan0") }], Power::default());
        assert_eq!((anew.links[0].rx_bps, anew.links[0].power_w), (None, None), "the device was recreated");
        let other = history.on_second(5_000, vec![Pulse { read_at: read_at(3), ..pulse(1, "wlan0") }], Power::default());
        assert_eq!(other.links[0].rx_bps, None, "the counters were not read since");
        let late = history.on_second(6_000, vec![Pulse { read_at: read_at(7), ..moved }], Power::default());
        assert_eq!(late.links[0].rx_bps, Some(2000), "the counters grew over four seconds, not one");
    }

    #[test]
    fn notes_are_bounded_and_their_ids_grow_even_when_the_clock_does_not() {
        let mut history = HistoryStore::default();
        for n in 0..MAX_NOTES + 10 {
            history.note(1_000, "config", "info", format!("note {n}"));
        }
        assert_eq!(history.notes_after(0).len(), MAX_NOTES);
        let last = history.last_notes(2);
        assert_eq!((last[1].id, last[1].id - last[0].id, history.last_note()), (1_000 + MAX_NOTES as u64 + 9, 1, last[1].id));
        assert_eq!(history.notes_after(last[0].id), last[1..]);
        history.note(1_000, "link", "info", "ü".repeat(5000));
        assert!(history.last_notes(1)[0].text.len() <= MAX_NOTE_BYTES);
    }

    #[test]
    fn notes_survive_a_restart_and_their_ids_keep_increasing() {
        let mut history = HistoryStore::default();
        for n in 0..MAX_NOTES + 10 {
            history.note(5_000, "link", "info", format!("note {n}"));
        }
        let rows = history.rows();
        assert_eq!(rows.len(), MAX_NOTES);
        let mut next = HistoryStore::default();
        next.recall(rows.iter().map(|((kind, at), body)| (*kind, *at, body.as_str())).chain([("note", 7, "{}")]));
        assert_eq!(next.notes_after(0), history.notes_after(0));
        next.note(1_000, "link", "info", "the clock was set back meanwhile");
        assert_eq!((next.last_note(), next.notes_after(0).len()), (history.last_note() + 1, MAX_NOTES));
        assert_eq!(next.rows().len(), 1, "only new rows are written");
    }

    #[test]
    fn stored_rows_are_restored_and_malformed_ones_ignored() {
        let mut history = HistoryStore::default();
        for second in 0..7200u64 {
            let device = Some([ByteCount::new(1000 * second); 2].into());
            history.on_second(
                second * 1000,
                vec![Pulse { device, read_at: Time::from_millis(second * 1000), ..pulse(1, "wlan0") }],
                Power::default(),
            );
        }
        let rows = history.rows();
        let mut next = HistoryStore::default();
        next.recall(rows.iter().map(|((kind, at), body)| (*kind, *at, body.as_str())).chain([
            ("5m", 1, "{"),
            ("day", 2, "[]"),
            ("x", 3, ""),
        ]));
        for resolution in [Resolution::FiveMinutes, Resolution::Hour] {
            let (had, has) = (history.history(resolution, 0), next.history(resolution, 0));
            assert!(had == has && !has.samples.is_empty(), "{had:?} {has:?}");
        }
        assert_eq!(history.gains(7_200_000, 30), next.gains(7_200_000, 30));
        assert_eq!(next.gains(7_200_000, 30).links[0].rx_bytes, 7_199_000);
        assert_eq!(next.history(Resolution::Second, 0).samples, []);
        assert!(history.rows().is_empty(), "nothing has changed since");
    }
}
