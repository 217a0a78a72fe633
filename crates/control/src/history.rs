//! What happened and what was measured, for people to look back on: notes in plain words, samples at four resolutions, and what Braid
//! gained by day. It reads no clock and does no I/O; what is to outlive the daemon is handed to the store as rows.
//!
//! **Memory is bounded**: 1,000 notes of at most 500 bytes, which outlive the daemon; 1,668 samples (300 of a second, 360 of ten seconds, 288 of five minutes, 720 of
//! an hour) of at most [`MAX_LINKS`] links at some 150 bytes, so 0.8 MB with three links and 8 MB with 32; 400 days of at most 64 links; and what [applications](apps) moved, 2.7 MB,
//! or 8 MB with the longest names.

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
use watch::Watched;

/// The kind of row a note is.
const NOTE_KIND: &str = "note";
/// Notes remembered.
const NOTES: usize = 1000;
/// The longest note.
const NOTE_BYTES: usize = 500;

/// One link at one moment, as the history sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Pulse {
    /// The device's number.
    pub index: LinkIndex,
    /// Its name.
    pub name: String,
    /// Whether it lives.
    pub state: LinkState,
    /// Why it does not.
    pub reason: Option<String>,
    /// How often it went down or died so far.
    pub falls: u64,
    /// Whether it may be given flows now.
    pub usable: bool,
    /// The system's order, least first; `None`: it has no default route.
    pub rank: Option<u32>,
    /// The device's counters, received and sent.
    pub device: Option<Traffic>,
    /// When they were read.
    pub read_at: Time,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Share of segments sent again.
    pub loss: Option<f64>,
    /// What its bytes took so far.
    pub energy: Option<Joules>,
    /// What one byte takes.
    pub cost: Option<ByteCost>,
    /// What a gigabyte costs in money.
    pub money_per_gb: f64,
    /// Live flows bound to it.
    pub flows: u64,
    /// Live bonded flows that used it.
    pub bonded: u64,
}

/// What the machine runs on and does about it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Power {
    /// Plugged in; `None`: no battery is known.
    pub plugged: Option<bool>,
    /// All flows go where they take least energy.
    pub saving: bool,
}

/// Rows for the store: kind, moment, JSON.
pub type Rows = BTreeMap<(&'static str, u64), String>;

/// What happened to links, applications and the daemon, as far back as each resolution goes.
#[derive(Debug, Default)]
pub struct HistoryStore {
    notes: VecDeque<Note>,
    last_note: u64,
    /// How many of the last are not stored yet.
    fresh_notes: usize,
    rings: Rings,
    apps: AppRings,
    apps_at_ms: Option<u64>,
    days: Days,
    watched: Watched,
    before: Option<Before>,
}

/// The last second.
#[derive(Debug)]
struct Before {
    at_ms: u64,
    links: Vec<Pulse>,
}

impl HistoryStore {
    /// Takes up what an earlier life stored; rows that make no sense are passed over.
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

    /// Notes something. `kind` and `level` as in [`Note`]; `at_ms` in Unix time.
    pub fn note(&mut self, at_ms: u64, kind: &str, level: &str, text: impl Into<String>) {
        let mut text: String = text.into();
        if text.len() > NOTE_BYTES {
            let end = (0..=NOTE_BYTES - 4).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
            text.push('…');
        }
        // Ids follow the clock, so that they grow from one life of the daemon to the next.
        self.last_note = at_ms.max(self.last_note.saturating_add(1));
        self.fresh_notes = (self.fresh_notes + 1).min(NOTES);
        self.put_note(Note { id: self.last_note, at_ms, kind: kind.to_owned(), level: level.to_owned(), text });
    }

    /// Takes up a stored note; they come in their order.
    fn recall_note(&mut self, body: &str) {
        if let Ok(note) = serde_json::from_str::<Note>(body)
            && note.id > self.last_note
        {
            self.last_note = note.id;
            self.put_note(note);
        }
    }

    fn put_note(&mut self, note: Note) {
        if self.notes.len() == NOTES {
            self.notes.pop_front();
        }
        self.notes.push_back(note);
    }

    fn note_rows(&mut self) -> Rows {
        let fresh = std::mem::take(&mut self.fresh_notes);
        let notes = self.notes.iter().skip(self.notes.len().saturating_sub(fresh));
        notes.filter_map(|note| Some(((NOTE_KIND, note.id), serde_json::to_string(note).ok()?))).collect()
    }

    /// The notes after the one of this id, oldest first.
    pub fn notes_after(&self, id: u64) -> Vec<Note> {
        self.notes.iter().filter(|note| note.id > id).cloned().collect()
    }

    /// The last few notes.
    pub fn last_notes(&self, count: usize) -> Vec<Note> {
        self.notes.iter().skip(self.notes.len().saturating_sub(count)).cloned().collect()
    }

    /// The id of the last note; 0 before the first.
    pub fn last_note(&self) -> u64 {
        self.last_note
    }

    /// Flows were ended, since their link was dead and another was not.
    pub fn on_ended(&mut self, at_ms: u64, count: u64, link: &str) {
        self.days.today(at_ms).flows_ended += count;
        let (flows, their) =
            if count == 1 { ("1 flow", "its program connects") } else { (&*format!("{count} flows"), "their programs connect") };
        self.note(at_ms, "flow", "info", format!("{flows} on {link} ended, so that {their} anew over a link that lives"));
    }

    /// Once a second: what every link does. Returns the sample.
    pub fn on_second(&mut self, at_ms: u64, links: Vec<Pulse>, power: Power) -> Sample {
        let links: Vec<Pulse> = links.into_iter().take(MAX_LINKS).collect();
        let changes = self.watched.on_second(&links, power);
        for change in changes {
            self.days.today(at_ms).flows_moved += change.moved;
            self.note(at_ms, change.kind, change.level, change.text);
        }
        let sample = self.sample(at_ms, &links);
        if let Some(before) = &self.before {
            self.days.count(at_ms, &before.links, &links, at_ms.saturating_sub(before.at_ms));
        }
        self.rings.push(&sample);
        self.before = Some(Before { at_ms, links });
        sample
    }

    /// Once a second: what applications moved since the last call. Returns the sample.
    pub fn on_apps(&mut self, at_ms: u64, apps: &[AppPulse]) -> AppsSample {
        // What was gathered before the clock was set belongs to no span that can be told.
        let span_ms = self.apps_at_ms.replace(at_ms).and_then(|before| at_ms.checked_sub(before)).filter(|span| *span > 0);
        self.apps.push(at_ms, span_ms.unwrap_or(1_000), apps)
    }

    /// What applications moved; of one only, where it is named.
    pub fn app_history(&self, resolution: Resolution, since_ms: u64, application: Option<&str>) -> AppHistory {
        self.apps.history(resolution, since_ms, application)
    }

    fn sample(&self, at_ms: u64, links: &[Pulse]) -> Sample {
        let before = |pulse: &Pulse| {
            let before = self.before.as_ref()?;
            let link = before.links.iter().find(|link| link.index == pulse.index)?;
            // Not the time since the last sample: where the counters were not read meanwhile, what they grow by next took longer.
            let span = pulse.read_at.since(link.read_at).as_millis() as u64;
            Some((link, Some(span).filter(|span| *span > 0)?))
        };
        let link = |pulse: &Pulse| {
            let rate = |way: fn(Traffic) -> ByteCount| {
                let (before, span_ms) = before(pulse)?;
                // A count that went back: the device was made anew.
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

    /// The rows that are new or changed since they were asked for.
    pub fn rows(&mut self) -> Rows {
        let mut rows = self.rings.rows();
        rows.extend(self.days.rows());
        rows.extend(self.note_rows());
        rows.extend(self.apps.rows());
        rows
    }
}

/// How many rows of a kind the store keeps: what the history would recall.
pub fn kept(kind: &str) -> usize {
    match kind {
        gains::KIND => gains::KEPT,
        NOTE_KIND => NOTES,
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
    fn a_sample_is_what_the_counters_grew_by() {
        let mut history = HistoryStore::default();
        let first = history.on_second(1_000, vec![pulse(1, "wlan0")], Power::default());
        assert_eq!((first.links[0].rx_bps, first.links[0].rtt_us, first.links[0].power_w), (None, Some(1000), None));
        let read_at = |seconds: u64| Time::from_millis(seconds * 1000);
        let moved =
            Pulse { device: Some([ByteCount::new(1000), ByteCount::new(500)].into()), energy: Some(Joules::new(3.0)), ..pulse(1, "wlan0") };
        let second = history.on_second(3_000, vec![Pulse { read_at: read_at(2), ..moved.clone() }], Power::default());
        assert_eq!((second.links[0].rx_bps, second.links[0].tx_bps, second.links[0].power_w), (Some(4000), Some(2000), Some(1.5)));
        let anew = history.on_second(4_000, vec![Pulse { read_at: read_at(3), ..pulse(1, "wlan0") }], Power::default());
        assert_eq!((anew.links[0].rx_bps, anew.links[0].power_w), (None, None), "the device was made anew");
        let other = history.on_second(5_000, vec![Pulse { read_at: read_at(3), ..pulse(1, "wlan0") }], Power::default());
        assert_eq!(other.links[0].rx_bps, None, "the counters were not read meanwhile");
        let late = history.on_second(6_000, vec![Pulse { read_at: read_at(7), ..moved }], Power::default());
        assert_eq!(late.links[0].rx_bps, Some(2000), "what they grew by took four seconds, not one");
    }

    #[test]
    fn notes_are_bounded_and_their_ids_grow_even_when_the_clock_does_not() {
        let mut history = HistoryStore::default();
        for n in 0..NOTES + 10 {
            history.note(1_000, "config", "info", format!("note {n}"));
        }
        assert_eq!(history.notes_after(0).len(), NOTES);
        let last = history.last_notes(2);
        assert_eq!((last[1].id, last[1].id - last[0].id, history.last_note()), (1_000 + NOTES as u64 + 9, 1, last[1].id));
        assert_eq!(history.notes_after(last[0].id), last[1..]);
        history.note(1_000, "link", "info", "ü".repeat(5000));
        assert!(history.last_notes(1)[0].text.len() <= NOTE_BYTES);
    }

    #[test]
    fn notes_outlive_the_daemon_and_their_ids_grow_on() {
        let mut history = HistoryStore::default();
        for n in 0..NOTES + 10 {
            history.note(5_000, "link", "info", format!("note {n}"));
        }
        let rows = history.rows();
        assert_eq!(rows.len(), NOTES);
        let mut next = HistoryStore::default();
        next.recall(rows.iter().map(|((kind, at), body)| (*kind, *at, body.as_str())).chain([("note", 7, "{}")]));
        assert_eq!(next.notes_after(0), history.notes_after(0));
        next.note(1_000, "link", "info", "the clock was set back meanwhile");
        assert_eq!((next.last_note(), next.notes_after(0).len()), (history.last_note() + 1, NOTES));
        assert_eq!(next.rows().len(), 1, "only what is new is written");
    }

    #[test]
    fn what_is_stored_is_recalled_and_nonsense_passed_over() {
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
