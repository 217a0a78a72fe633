//! What `braid top` knows, from what it hears.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use braid_api::{App, Flow, FlowChanges, LinkSample, Note, Peer, Sample, Status};

/// Samples kept for the little curves.
const SAMPLES: usize = 120;
/// Notes kept.
const NOTES: usize = 200;

/// What is shown below the links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Flows,
    Apps,
    Peers,
    Events,
}

impl View {
    pub(super) const ALL: [(Self, &'static str); 4] =
        [(Self::Flows, "Flows"), (Self::Apps, "Applications"), (Self::Peers, "Peers"), (Self::Events, "Events")];

    pub(super) fn index(self) -> usize {
        Self::ALL.iter().position(|(view, _)| *view == self).unwrap_or(0)
    }
}

/// By what flows are sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Rate,
    Moved,
    Age,
    Application,
    Link,
}

impl Sort {
    pub(super) const ALL: [(Self, &'static str); 5] =
        [(Self::Rate, "rate"), (Self::Moved, "bytes"), (Self::Age, "age"), (Self::Application, "application"), (Self::Link, "link")];

    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(sort, _)| *sort == self).map_or("", |(_, name)| name)
    }
}

/// A flow and what it moves now.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) flow: Flow,
    /// Bytes in the last second; `None` until it was seen twice.
    pub(super) down: Option<u64>,
    pub(super) up: Option<u64>,
}

/// Everything that is shown.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) status: Option<Status>,
    pub(super) flows: BTreeMap<(u64, String), Live>,
    pub(super) apps: Vec<App>,
    pub(super) peers: Vec<Peer>,
    pub(super) notes: VecDeque<Note>,
    pub(super) samples: VecDeque<Sample>,
    pub(super) view: View,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// The filter is being typed.
    pub(super) typing: bool,
    pub(super) selected: usize,
    /// The mouse scrolls and turns to views; else it is the terminal's, to select text.
    pub(super) mouse: bool,
    /// Why nothing is heard any more.
    pub(super) lost: Option<String>,
}

/// What was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Press {
    Char(char),
    Enter,
    Escape,
    Backspace,
    NextView,
    PreviousView,
    View(View),
    Move(isize),
    First,
    Last,
    Interrupt,
}

impl Model {
    /// Takes in an event; one that is not understood is passed over, since a later daemon may tell more.
    pub(super) fn hear(&mut self, name: &str, data: &str) {
        match name {
            "status" => self.status = serde_json::from_str(data).ok().or(self.status.take()),
            "flows" => drop(serde_json::from_str(data).map(|changes| self.hear_flows(changes))),
            "apps" => drop(serde_json::from_str(data).map(|apps| self.apps = apps)),
            "peers" => drop(serde_json::from_str(data).map(|peers| self.peers = peers)),
            "note" => drop(serde_json::from_str(data).map(|note: Note| {
                if self.notes.back().is_none_or(|last| last.id < note.id) {
                    self.notes.push_back(note);
                }
            })),
            "sample" => drop(serde_json::from_str(data).map(|sample| self.samples.push_back(sample))),
            _ => {}
        }
        while self.notes.len() > NOTES {
            self.notes.pop_front();
        }
        while self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
        self.lost = None;
    }

    fn hear_flows(&mut self, changes: FlowChanges) {
        let mut before = std::mem::take(&mut self.flows);
        if !changes.full {
            // What is not told of moved nothing.
            self.flows = before.clone();
            self.flows.values_mut().for_each(|live| (live.down, live.up) = (Some(0), Some(0)));
            let gone: BTreeSet<u64> = changes.gone.into_iter().collect();
            self.flows.retain(|(id, _), _| !gone.contains(id));
        }
        for flow in changes.put {
            let key = (flow.id, flow.remote.clone());
            let known = before.remove(&key);
            let grown = |read: fn(&Flow) -> Option<u64>| read(&flow)?.checked_sub(read(&known.as_ref()?.flow)?);
            let (down, up) = (grown(|flow| flow.rx_bytes), grown(|flow| flow.tx_bytes));
            self.flows.insert(key, Live { down, up, flow });
        }
    }

    /// The daemon is gone, or does not speak.
    pub(super) fn lose(&mut self, why: String) {
        self.lost = Some(why);
    }

    /// Takes in what was pressed; false to end.
    pub(super) fn press(&mut self, press: Press) -> bool {
        if press == Press::Interrupt {
            return false;
        }
        if self.typing {
            match press {
                Press::Char(c) if self.filter.chars().count() < 60 => self.filter.push(c),
                Press::Backspace => drop(self.filter.pop()),
                Press::Enter => self.typing = false,
                Press::Escape => (self.typing, self.filter) = (false, String::new()),
                _ => {}
            }
            self.selected = 0;
            return true;
        }
        let turn = |step: usize| View::ALL[(self.view.index() + step) % View::ALL.len()].0;
        match press {
            Press::Char('q') => return false,
            Press::Escape if self.filter.is_empty() => return false,
            Press::Escape => self.filter.clear(),
            Press::Char('/') => self.typing = true,
            Press::Char('s') => {
                let at = Sort::ALL.iter().position(|(sort, _)| *sort == self.sort).unwrap_or(0);
                self.sort = Sort::ALL[(at + 1) % Sort::ALL.len()].0;
            }
            Press::Char('m') => self.mouse = !self.mouse,
            Press::Char('r') => self.reversed = !self.reversed,
            Press::NextView => (self.view, self.selected) = (turn(1), 0),
            Press::PreviousView => (self.view, self.selected) = (turn(View::ALL.len() - 1), 0),
            Press::View(view) => (self.view, self.selected) = (view, 0),
            Press::Move(by) => self.selected = self.selected.saturating_add_signed(by),
            Press::First => self.selected = 0,
            Press::Last => self.selected = usize::MAX,
            _ => {}
        }
        let rows = match self.view {
            View::Flows => self.shown_flows().len(),
            View::Apps => self.shown_apps().len(),
            View::Peers => self.peers.len(),
            View::Events => self.notes.len(),
        };
        self.selected = self.selected.min(rows.saturating_sub(1));
        true
    }

    fn passes(&self, texts: &[&str]) -> bool {
        let wanted = self.filter.to_lowercase();
        wanted.is_empty() || texts.iter().any(|text| text.to_lowercase().contains(&wanted))
    }

    /// The flows that pass the filter, sorted.
    pub(super) fn shown_flows(&self) -> Vec<&Live> {
        let passes = |live: &&Live| {
            let flow = &live.flow;
            self.passes(&[&flow.application, &flow.remote, &flow.link, &flow.carry, flow.class.as_deref().unwrap_or_default()])
        };
        let mut flows: Vec<&Live> = self.flows.values().filter(passes).collect();
        let moved = |live: &Live| live.flow.rx_bytes.unwrap_or(0) + live.flow.tx_bytes.unwrap_or(0);
        match self.sort {
            Sort::Rate => flows.sort_by_key(|live| std::cmp::Reverse((live.down.unwrap_or(0) + live.up.unwrap_or(0), moved(live)))),
            Sort::Moved => flows.sort_by_key(|live| std::cmp::Reverse(moved(live))),
            Sort::Age => flows.sort_by_key(|live| std::cmp::Reverse(live.flow.age_ms)),
            Sort::Application => flows.sort_by(|a, b| a.flow.application.cmp(&b.flow.application)),
            Sort::Link => flows.sort_by(|a, b| a.flow.link.cmp(&b.flow.link)),
        }
        if self.reversed {
            flows.reverse();
        }
        flows
    }

    /// The applications that pass the filter, those with flows first.
    pub(super) fn shown_apps(&self) -> Vec<&App> {
        let mut apps: Vec<&App> = self.apps.iter().filter(|app| self.passes(&[&app.application, &app.class])).collect();
        apps.sort_by(|a, b| b.flows.cmp(&a.flows).then_with(|| a.application.cmp(&b.application)).then(a.port.cmp(&b.port)));
        if self.reversed {
            apps.reverse();
        }
        apps
    }

    /// What a link did last.
    pub(super) fn sample(&self, link: &str) -> Option<&LinkSample> {
        self.samples.back()?.links.iter().find(|sample| sample.name == link)
    }

    /// What a link moved, both ways together, in the last so many samples.
    pub(super) fn curve(&self, link: &str, count: usize) -> Vec<u64> {
        let moved = |sample: &Sample| {
            let sample = sample.links.iter().find(|sample| sample.name == link);
            sample.map_or(0, |sample| sample.rx_bps.unwrap_or(0) + sample.tx_bps.unwrap_or(0))
        };
        self.samples.iter().skip(self.samples.len().saturating_sub(count)).map(moved).collect()
    }
}
