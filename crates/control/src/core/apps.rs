//! The applications seen so far: their ids in the kernel and their traffic.

use std::collections::BTreeMap;

use braid_decide::class::{self, Pattern, PatternClass};
use braid_decide::energy::EnergyMeter;
use braid_model::{Application, ByteCount, Class, Time};

use crate::steering::{AppId, FlowRow};

/// Maximum number of stored applications. The one that was idle longest is removed first.
const MAX_APPS: usize = 4096;
/// Minimum number of flows before the traffic pattern determines the class, unless a flow is large.
const PATTERN_FLOWS: u64 = 5;

/// An application that the daemon has seen.
#[derive(Debug, Clone)]
pub struct AppRecord {
    /// Executable and name.
    pub application: Application,
    /// Its class.
    pub class: Class,
    /// Source of the class: `user`, `executable`, `port` or `pattern`; empty if there is none.
    pub source: &'static str,
    /// Its class by pattern, as far as it is confident.
    learnt: PatternClass,
    /// The class that the kernel has, without the one by pattern.
    kernel: Class,
    /// Its control group.
    pub cgroup: Option<String>,
    /// When it was last seen.
    pub seen: Time,
    /// Sums of its ended flows.
    traffic: FlowSums,
}

/// Sums over an application's ended flows (DNIS III.A).
#[derive(Debug, Clone, Copy, Default)]
pub struct FlowSums {
    /// Number of ended flows.
    pub flows: u64,
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
    /// Total duration of the flows in seconds.
    pub seconds: f64,
    /// Energy of the flows.
    pub energy: EnergyMeter,
    /// Highest mean receive rate of a flow in bits per second.
    pub max_down: u64,
    /// Highest mean send rate of a flow in bits per second.
    pub max_up: u64,
    /// Bytes of large flows, in both directions.
    large: ByteCount,
    first: Option<Time>,
}

/// An ended flow, bonded or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Its application.
    pub app: AppId,
    /// The remote port.
    pub port: u16,
    /// When it started.
    pub started: Time,
    /// When it ended.
    pub at: Time,
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
}

impl From<&FlowRow> for Ended {
    fn from(row: &FlowRow) -> Self {
        Self { app: row.app.clone(), port: row.service(), started: row.started, at: row.read_at, rx: row.rx, tx: row.tx }
    }
}

impl FlowSums {
    fn add(&mut self, flow: &Ended) {
        let span = flow.at.since(flow.started);
        self.flows += 1;
        self.rx += flow.rx;
        self.tx += flow.tx;
        self.seconds += span.as_secs_f64();
        if class::is_large(flow.rx, flow.tx, span.as_secs_f64()) {
            self.large += flow.rx + flow.tx;
        }
        // The rate of a flow shorter than a round trip is meaningless.
        if span.as_millis() >= 20 {
            self.max_down = self.max_down.max(flow.rx.per(span).bps());
            self.max_up = self.max_up.max(flow.tx.per(span).bps());
        }
        self.first.get_or_insert(flow.started);
    }

    /// Mean receive and send rates in bits per second; `None` if the total duration is zero.
    pub fn mean_rates(&self) -> Option<(u64, u64)> {
        (self.seconds > 0.0)
            .then(|| ((self.rx.get() as f64 * 8.0 / self.seconds) as u64, (self.tx.get() as f64 * 8.0 / self.seconds) as u64))
    }
}

impl AppRecord {
    /// Sums of its ended flows.
    pub fn traffic(&self) -> &FlowSums {
        &self.traffic
    }

    /// The class that the kernel has for its flows, and the class by pattern that counts for rules while the first is unclassified.
    pub fn kernel_classes(&self) -> (Class, Class) {
        (self.kernel, self.learnt.confident())
    }

    /// The class that rules compare.
    pub fn class_for_rules(&self) -> Class {
        if self.kernel == Class::Unclassified { self.learnt.confident() } else { self.kernel }
    }
}

/// All applications seen.
#[derive(Debug, Default)]
pub struct Apps {
    records: BTreeMap<AppId, AppRecord>,
    /// Classes set by the user, by executable path or name.
    set: BTreeMap<String, Class>,
}

impl Apps {
    /// Adds an application or updates it.
    pub fn record(&mut self, id: AppId, application: Application, cgroup: Option<String>, class: Class, now: Time) {
        // The kernel reports it again after dropping it from a full map.
        if let Some(known) = self.records.get_mut(&id) {
            (known.application, known.cgroup, known.seen) = (application, cgroup, now);
            return;
        }
        if self.records.len() >= MAX_APPS
            && let Some(oldest) = self.records.iter().min_by_key(|(_, record)| record.seen).map(|(id, _)| id.clone())
        {
            self.records.remove(&oldest);
        }
        let source = if class == Class::Unclassified { "" } else { "executable" };
        let (class, source) = match self.set_class(&application) {
            Some(class) => (class, "user"),
            None => (class, source),
        };
        let (learnt, traffic) = (PatternClass::default(), FlowSums::default());
        self.records.insert(id, AppRecord { application, class, source, learnt, kernel: class, cgroup, seen: now, traffic });
    }

    fn set_class(&self, application: &Application) -> Option<Class> {
        let exe = application.exe.as_ref().map(|exe| exe.display().to_string());
        exe.and_then(|exe| self.set.get(&exe)).or_else(|| self.set.get(&application.name)).copied()
    }

    /// The application with this id.
    pub fn get(&self, id: &AppId) -> Option<&AppRecord> {
        self.records.get(id)
    }

    /// Display name of an application.
    pub fn name(&self, id: &AppId) -> String {
        self.records.get(id).map_or_else(|| id.name.clone(), |record| record.application.to_string())
    }

    /// All applications.
    pub fn iter(&self) -> impl Iterator<Item = (&AppId, &AppRecord)> {
        self.records.iter()
    }

    /// The kernel's ids of an executable.
    pub fn ids_of<'a>(&'a self, exe: &'a str) -> impl Iterator<Item = &'a AppId> {
        self.records
            .iter()
            .filter(move |(_, record)| record.application.exe.as_ref().is_some_and(|path| path.as_os_str() == exe))
            .map(|(id, _)| id)
    }

    /// Adds an ended flow and its energy. Returns the new [classes](AppRecord::kernel_classes) if the kernel must have them. A class derived from the
    /// traffic pattern is shown at once, and counts for rules once it is confident. It never counts for affinity and duplication, which follow the
    /// class without a rule: a guess must not tie a program's flows to one link.
    pub fn ended(&mut self, flow: &Ended, energy: EnergyMeter) -> Option<(Class, Class)> {
        let record = self.records.get_mut(&flow.app)?;
        record.seen = flow.at;
        record.traffic.add(flow);
        record.traffic.energy.absorb(energy);
        if matches!(record.source, "user" | "executable") {
            return None;
        }
        let before = record.kernel_classes();
        let by_port = class::by_port(flow.port);
        let enough = record.traffic.flows >= PATTERN_FLOWS || record.traffic.large > ByteCount::ZERO;
        let by_pattern = enough.then(|| class::by_pattern(&pattern(record, flow))).flatten();
        record.learnt.on_ended(by_pattern, flow.at.since(flow.started));
        match (by_port, by_pattern) {
            (Some(class), _) => (record.class, record.source, record.kernel) = (class, "port", class),
            (None, Some(class)) => (record.class, record.source) = (class, "pattern"),
            (None, None) => {}
        }
        let after = record.kernel_classes();
        (after != before).then_some(after)
    }

    /// Includes a living flow that [is large](class::is_large), since a download is bulk before its end. The class is only shown, like
    /// every guess.
    pub fn on_large_flow(&mut self, row: &FlowRow) {
        let Some(record) =
            self.records.get_mut(&row.app).filter(|record| matches!(record.source, "" | "pattern") && record.class != Class::Bulk)
        else {
            return;
        };
        let (traffic, moved) = (&record.traffic, row.rx + row.tx);
        if in_large(traffic.large + moved, traffic.rx + traffic.tx + moved) >= 0.5 {
            (record.class, record.source) = (Class::Bulk, "pattern");
        }
    }
}

/// Fraction of bytes in large flows.
fn in_large(large: ByteCount, all: ByteCount) -> f64 {
    large.get() as f64 / all.get().max(1) as f64
}

fn pattern(record: &AppRecord, flow: &Ended) -> Pattern {
    let traffic = &record.traffic;
    let minutes = traffic.first.map_or(0.0, |first| flow.at.since(first).as_secs_f64() / 60.0);
    Pattern {
        // Count at least one minute: five requests of a script within a second are not 300 a minute.
        flows_per_minute: traffic.flows as f64 / minutes.max(1.0),
        mean_down: ByteCount::new(traffic.rx.get() / traffic.flows.max(1)),
        mean_up: ByteCount::new(traffic.tx.get() / traffic.flows.max(1)),
        mean_seconds: traffic.seconds / traffic.flows.max(1) as f64,
        in_large: in_large(traffic.large, traffic.rx + traffic.tx),
        port: flow.port,
    }
}
