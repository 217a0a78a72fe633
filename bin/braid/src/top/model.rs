//! The state that `braid top` shows, built from the API's events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use braid_api::{
    AdhocNeighbour, AdhocStatus, App, AppHistory, AppsSample, ClientStatus, Flow, FlowChanges, History, LinkSample, List, Note, Peer,
    Sample, Status, Versioned,
};
use serde::de::DeserializeOwned;

/// Number of samples kept for the curves, as on the web page.
const SAMPLES: usize = 150;
/// Number of notes kept.
const NOTES: usize = 200;

/// The view below the links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Flows,
    Apps,
    Clients,
    Radios,
    Peers,
    Events,
}

/// Name of an event and the path of the API with its data, for what the daemon's events do not have.
pub(super) type Polled = (&'static str, &'static str);

impl View {
    pub(super) const ALL: [(Self, &'static str); 6] = [
        (Self::Flows, "Flows"),
        (Self::Apps, "Applications"),
        (Self::Clients, "Clients"),
        (Self::Radios, "Radios"),
        (Self::Peers, "Peers"),
        (Self::Events, "Events"),
    ];

    /// What is polled while the view is shown.
    pub(super) fn polled(self) -> Option<Polled> {
        match self {
            Self::Clients => Some(("clients", "/v1/clients")),
            Self::Radios => Some(("adhoc", "/v1/adhoc")),
            Self::Flows | Self::Apps | Self::Peers | Self::Events => None,
        }
    }
}

/// Sort order of flows.
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

/// A flow and its current rate.
#[derive(Debug, Clone)]
pub(super) struct LiveFlow {
    pub(super) flow: Flow,
    /// Bytes in the last second; `None` until the flow has been reported twice.
    pub(super) down: Option<u64>,
    pub(super) up: Option<u64>,
}

/// A program, with all ports it connects to.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Program {
    pub(super) application: String,
    pub(super) class: String,
    /// The port with the most samples, and the number of other ports.
    pub(super) port: Option<u16>,
    pub(super) others: usize,
    /// Expected bytes of a flow to that port, and the confidence of the estimate.
    pub(super) demand_bytes: Option<u64>,
    pub(super) confidence: Option<f64>,
    pub(super) flows: u64,
    /// Number of flows that the profile was learnt from.
    samples: u64,
}

/// Everything that is shown.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) status: Option<Status>,
    pub(super) flows: BTreeMap<(u64, String), LiveFlow>,
    pub(super) apps: Vec<App>,
    /// Clients of the gateway; `None` until they were asked for.
    pub(super) clients: Option<Vec<ClientStatus>>,
    /// The ad-hoc device; `None` until it was asked for, or if there is none.
    pub(super) adhoc: Option<AdhocStatus>,
    pub(super) peers: Vec<Peer>,
    pub(super) notes: VecDeque<Note>,
    pub(super) samples: VecDeque<Sample>,
    /// Samples of applications, one a second, like `samples` of links.
    pub(super) app_samples: VecDeque<AppsSample>,
    pub(super) view: View,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// The user is typing the filter.
    pub(super) typing: bool,
    pub(super) selected: usize,
    /// Braid handles the mouse (scrolling, selecting views); otherwise the terminal does, to select text.
    pub(super) mouse: bool,
    /// Reason why the connection to the daemon was lost.
    pub(super) lost: Option<String>,
}

/// A user action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
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
    /// Handles an event. Unknown events are ignored: a newer daemon may send more.
    pub(super) fn on_event(&mut self, name: &str, data: &str) {
        match name {
            "status" => self.on_status(whole(data)),
            "flows" => drop(serde_json::from_str(data).map(|changes| self.on_flows(changes))),
            "apps" => drop(whole(data).map(|apps: List<App>| self.apps = apps.items)),
            "clients" => drop(whole(data).map(|clients: List<ClientStatus>| self.clients = Some(clients.items))),
            // An answer may arrive after the device is gone.
            "adhoc" if self.has_adhoc() => self.adhoc = whole(data).or(self.adhoc.take()),
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

    fn on_status(&mut self, status: Option<Status>) {
        self.status = status.or(self.status.take());
        if !self.has_adhoc() {
            self.adhoc = None;
            if self.view == View::Radios {
                (self.view, self.selected) = (View::default(), 0);
            }
        }
    }

    fn has_adhoc(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.adhoc.is_some())
    }

    /// The views that have something to show, with their titles.
    pub(super) fn views(&self) -> Vec<(View, &'static str)> {
        View::ALL.into_iter().filter(|(view, _)| *view != View::Radios || self.has_adhoc()).collect()
    }

    fn on_flows(&mut self, changes: FlowChanges) {
        let mut before = std::mem::take(&mut self.flows);
        if !changes.full {
            // Flows that are not listed transferred nothing.
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
            self.flows.insert(key, LiveFlow { down, up, flow });
        }
    }

    /// The daemon is gone, or does not answer.
    pub(super) fn on_lost(&mut self, why: String) {
        self.lost = Some(why);
    }

    /// Handles a user action; returns false to quit.
    pub(super) fn handle(&mut self, action: Action) -> bool {
        if action == Action::Interrupt {
            return false;
        }
        if self.typing {
            match action {
                Action::Char(c) if self.filter.chars().count() < 60 => self.filter.push(c),
                Action::Backspace => drop(self.filter.pop()),
                Action::Enter => self.typing = false,
                Action::Escape => (self.typing, self.filter) = (false, String::new()),
                _ => {}
            }
            self.selected = 0;
            return true;
        }
        let views = self.views();
        let shown = views.iter().position(|(view, _)| *view == self.view).unwrap_or(0);
        let turn = |step: usize| views[(shown + step) % views.len()].0;
        match action {
            Action::Char('q') => return false,
            Action::Escape if self.filter.is_empty() => return false,
            Action::Escape => self.filter.clear(),
            Action::Char('/') => self.typing = true,
            Action::Char('s') => {
                let at = Sort::ALL.iter().position(|(sort, _)| *sort == self.sort).unwrap_or(0);
                self.sort = Sort::ALL[(at + 1) % Sort::ALL.len()].0;
            }
            Action::Char('m') => self.mouse = !self.mouse,
            Action::Char('r') => self.reversed = !self.reversed,
            Action::NextView => (self.view, self.selected) = (turn(1), 0),
            Action::PreviousView => (self.view, self.selected) = (turn(views.len() - 1), 0),
            Action::View(view) => (self.view, self.selected) = (view, 0),
            Action::Move(by) => self.selected = self.selected.saturating_add_signed(by),
            Action::First => self.selected = 0,
            Action::Last => self.selected = usize::MAX,
            _ => {}
        }
        let rows = match self.view {
            View::Flows => self.shown_flows().len(),
            View::Apps => self.shown_apps().len(),
            View::Clients => self.shown_clients().len(),
            View::Radios => self.shown_neighbours().len(),
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

    /// Flows that match the filter, sorted.
    pub(super) fn shown_flows(&self) -> Vec<&LiveFlow> {
        let passes = |live: &&LiveFlow| {
            let flow = &live.flow;
            let own = flow.virtual_interface.as_deref().unwrap_or_default();
            self.passes(&[&flow.application, &flow.remote, &flow.link, &flow.carry, flow.class.as_deref().unwrap_or_default(), own])
        };
        let mut flows: Vec<&LiveFlow> = self.flows.values().filter(passes).collect();
        let moved = |live: &LiveFlow| live.flow.rx_bytes.unwrap_or(0) + live.flow.tx_bytes.unwrap_or(0);
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

    /// Programs that match the filter, those with flows first.
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

    /// Clients that match the filter, the busiest first, then those with the most flows.
    pub(super) fn shown_clients(&self) -> Vec<&ClientStatus> {
        let passes = |client: &&ClientStatus| {
            let optional = [&client.name, &client.mac].map(|text| text.as_deref().unwrap_or_default());
            self.passes(&[optional[0], &client.address, optional[1], &client.device])
        };
        let mut clients: Vec<&ClientStatus> = self.clients.iter().flatten().filter(passes).collect();
        clients.sort_by_key(|client| (std::cmp::Reverse((client.rate, client.flows)), &client.address));
        if self.reversed {
            clients.reverse();
        }
        clients
    }

    /// Neighbours of the ad-hoc device that match the filter, once for each radio that reaches them.
    pub(super) fn shown_neighbours(&self) -> Vec<&AdhocNeighbour> {
        let passes = |one: &&AdhocNeighbour| self.passes(&[&one.mac, &one.radio, one.at.as_deref().unwrap_or_default(), &one.state]);
        let mut neighbours: Vec<&AdhocNeighbour> = self.adhoc.iter().flat_map(|device| &device.neighbours).filter(passes).collect();
        if self.reversed {
            neighbours.reverse();
        }
        neighbours
    }

    /// Receive and send rate of a program in the last second, in bit/s; `None` if unknown, since the daemon lists only the busiest programs.
    pub(super) fn moving(&self, application: &str) -> [Option<u64>; 2] {
        let Some(sample) = self.app_samples.back() else { return [None; 2] };
        let rest = [sample.rest_rx_bps, sample.rest_tx_bps];
        match sample.apps.iter().find(|app| app.application == application) {
            Some(app) => [Some(app.rx_bps), Some(app.tx_bps)],
            None => rest.map(|rest| (rest == 0).then_some(0)),
        }
    }

    /// Rate of a program, both directions together, in each of the last `count` seconds.
    pub(super) fn app_curve(&self, application: &str, count: usize) -> Vec<u64> {
        let moved = |sample: &AppsSample| {
            let app = sample.apps.iter().find(|app| app.application == application);
            app.map_or(0, |app| app.rx_bps + app.tx_bps)
        };
        self.app_samples.iter().skip(self.app_samples.len().saturating_sub(count)).map(moved).collect()
    }

    /// Latest sample of a link.
    pub(super) fn sample(&self, link: &str) -> Option<&LinkSample> {
        self.samples.back()?.links.iter().find(|sample| sample.name == link)
    }

    /// Rate of a link, both directions together, in each of the last `count` samples.
    pub(super) fn curve(&self, link: &str, count: usize) -> Vec<u64> {
        let moved = |sample: &Sample| {
            let sample = sample.links.iter().find(|sample| sample.name == link);
            sample.map_or(0, |sample| sample.rx_bps.unwrap_or(0) + sample.tx_bps.unwrap_or(0))
        };
        self.samples.iter().skip(self.samples.len().saturating_sub(count)).map(moved).collect()
    }
}

/// Parses an API answer or an event; `None` if this version cannot read it.
fn whole<T: DeserializeOwned>(data: &str) -> Option<T> {
    serde_json::from_str::<Versioned<T>>(data).ok().map(|answer| answer.content)
}

/// Appends the samples that are newer than the known ones, and drops the oldest.
fn append<T>(known: &mut VecDeque<T>, more: impl IntoIterator<Item = T>, at_ms: impl Fn(&T) -> u64) {
    for sample in more {
        if known.back().is_none_or(|last| at_ms(last) < at_ms(&sample)) {
            known.push_back(sample);
        }
    }
    known.drain(..known.len().saturating_sub(SAMPLES));
}
