//! The state that `braid top` shows, kept from the API's events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use braid_api::{App, AppHistory, AppsSample, Flow, FlowChanges, History, LinkSample, List, Note, Peer, Sample, Status, Versioned};
use serde::de::DeserializeOwned;

/// Samples kept for the little curves, as many as the page's show.
const SAMPLES: usize = 150;
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

/// A program, whatever ports it speaks to.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Program {
    pub(super) application: String,
    pub(super) class: String,
    /// The port that most was learnt of, and how many others there are.
    pub(super) port: Option<u16>,
    pub(super) others: usize,
    /// What its flows there usually move, and how sure that is.
    pub(super) demand_bytes: Option<u64>,
    pub(super) confidence: Option<f64>,
    pub(super) flows: u64,
    /// Flows it was learnt from.
    samples: u64,
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
    /// What applications moved, second by second, as `samples` tells of links.
    pub(super) app_samples: VecDeque<AppsSample>,
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
            "status" => self.status = whole(data).or(self.status.take()),
            "flows" => drop(serde_json::from_str(data).map(|changes| self.hear_flows(changes))),
            "apps" => drop(whole(data).map(|apps: List<App>| self.apps = apps.items)),
            "peers" => drop(whole(data).map(|peers: List<Peer>| self.peers = peers.items)),
            "note" => drop(serde_json::from_str(data).map(|note: Note| {
                if self.notes.back().is_none_or(|last| last.id < note.id) {
                    self.notes.push_back(note);
                }
            })),
            "sample" => drop(serde_json::from_str(data).map(|sample| append(&mut self.samples, [sample], |sample| sample.at_ms))),
            "app_sample" => drop(serde_json::from_str(data).map(|sample| append(&mut self.app_samples, [sample], |sample| sample.at_ms))),
            "history" => {
                drop(serde_json::from_str(data).map(|History { samples, .. }| append(&mut self.samples, samples, |sample| sample.at_ms)))
            }
            "app_history" => {
                drop(
                    serde_json::from_str(data)
                        .map(|AppHistory { samples, .. }| append(&mut self.app_samples, samples, |sample| sample.at_ms)),
                );
            }
            _ => {}
        }
        while self.notes.len() > NOTES {
            self.notes.pop_front();
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

    /// The programs that pass the filter, those with flows first.
    pub(super) fn shown_apps(&self) -> Vec<Program> {
        let mut known: Vec<&App> = self.apps.iter().collect();
        known.sort_by_key(|app| (&app.application, std::cmp::Reverse(app.samples), app.port));
        let program = |ports: &[&App]| {
            let most = ports[0];
            Program {
                application: most.application.clone(),
                class: most.class.clone(),
                port: most.port,
                others: ports.len() - 1,
                demand_bytes: most.demand_bytes,
                confidence: most.confidence,
                flows: ports.iter().map(|app| app.flows).sum(),
                samples: ports.iter().map(|app| app.samples).sum(),
            }
        };
        let programs = known.chunk_by(|a, b| a.application == b.application).map(program);
        let mut shown: Vec<Program> = programs.filter(|program| self.passes(&[&program.application, &program.class])).collect();
        shown.sort_by(|a, b| b.flows.cmp(&a.flows).then(b.samples.cmp(&a.samples)));
        if self.reversed {
            shown.reverse();
        }
        shown
    }

    /// What a program received and sent in the last second, in bit/s; `None` where the daemon did not say: it names the busiest only.
    pub(super) fn moving(&self, application: &str) -> [Option<u64>; 2] {
        let Some(sample) = self.app_samples.back() else { return [None; 2] };
        let rest = [sample.rest_rx_bps, sample.rest_tx_bps];
        match sample.apps.iter().find(|app| app.application == application) {
            Some(app) => [Some(app.rx_bps), Some(app.tx_bps)],
            None => rest.map(|rest| (rest == 0).then_some(0)),
        }
    }

    /// What a program moved, both ways together, in the last so many seconds.
    pub(super) fn app_curve(&self, application: &str, count: usize) -> Vec<u64> {
        let moved = |sample: &AppsSample| {
            let app = sample.apps.iter().find(|app| app.application == application);
            app.map_or(0, |app| app.rx_bps + app.tx_bps)
        };
        self.app_samples.iter().skip(self.app_samples.len().saturating_sub(count)).map(moved).collect()
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

/// Puts what is newer behind what is known.
/// What an answer or an event holds, if this program can read it.
fn whole<T: DeserializeOwned>(data: &str) -> Option<T> {
    serde_json::from_str::<Versioned<T>>(data).ok().map(|answer| answer.content)
}

fn append<T>(known: &mut VecDeque<T>, more: impl IntoIterator<Item = T>, at_ms: impl Fn(&T) -> u64) {
    for sample in more {
        if known.back().is_none_or(|last| at_ms(last) < at_ms(&sample)) {
            known.push_back(sample);
        }
    }
    known.drain(..known.len().saturating_sub(SAMPLES));
}
