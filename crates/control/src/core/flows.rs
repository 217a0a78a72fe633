//! Living flows: what they move, what that teaches, and which of them are stuck.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::class;
use braid_decide::energy::{ByteCost, EnergyMeter};
use braid_decide::health::Suffering;
use braid_model::{ByteCount, Class, Direction, Family, FlowId, LinkIndex, PerDirection, Protocol, Rate, Time, Traffic};

use super::Core;
use super::apps::Ended;
use super::living::{self, Living, Progress};
use crate::history::AppPulse;
use crate::steering::{AppId, Dump, FlowRow, Steering, SteeringError, SteeringEvent, UNANSWERED};

/// Ended flows remembered for people to look at.
const RECENT: usize = 256;
/// A flow that moved nothing for this long does not count as being in progress.
const IN_PROGRESS: Duration = Duration::from_secs(2);

/// A flow to be ended because its link is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stuck {
    /// The flow.
    pub id: FlowId,
    /// Its transport.
    pub protocol: Protocol,
    /// This end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The device it is bound to.
    pub link: LinkIndex,
    /// Not since its link is dead, but since its destination belongs to a tunnel now.
    pub tunnelled: bool,
}

impl Stuck {
    pub(super) fn of(row: &FlowRow) -> Self {
        Self {
            id: row.id,
            protocol: row.protocol,
            local: SocketAddr::new(row.local.0, row.local.1),
            remote: SocketAddr::new(row.remote.0, row.remote.1),
            link: row.link,
            tunnelled: false,
        }
    }
}

impl<S: Steering> Core<S> {
    /// Events from the kernel.
    ///
    /// All are taken in, also when one fails; the first error is returned.
    pub fn on_events(&mut self, now: Time, events: Vec<SteeringEvent>) -> Result<(), SteeringError> {
        let mut first = Ok(());
        for event in events {
            let taken = self.on_event(now, event);
            first = first.and(taken);
        }
        first
    }

    fn on_event(&mut self, now: Time, event: SteeringEvent) -> Result<(), SteeringError> {
        match event {
            SteeringEvent::Ended(row) => {
                self.consider(now, &row);
                self.on_ended(&row)?;
            }
            SteeringEvent::NewApp { app, process, cgroup, class } => {
                let (application, cgroup) = self.names.application(&app, process, cgroup);
                self.apps.meet(app.clone(), application, cgroup, class, now);
                if let Some(met) = self.apps.get(&app).filter(|met| met.class != class) {
                    self.steering.set_class(&app, met.class)?;
                }
            }
            SteeringEvent::Suffering { link, family, connecting, .. } => {
                if let Some(link) = self.links.get_mut(link) {
                    let kind = if connecting { Suffering::NoAnswer } else { Suffering::Timeout };
                    link.health.get_mut(family).on_suffering(now, kind);
                }
            }
        }
        Ok(())
    }

    fn on_ended(&mut self, row: &FlowRow) -> Result<(), SteeringError> {
        let before = self.flows.find(&living::key(row)).filter(|living| living.row.started == row.started && !self.is_over(living));
        let before = before.map(|living| living.progress);
        self.ended.insert(living::key(row), row.started);
        let cost = self.links.get(row.link).and_then(|link| self.byte_cost(link, row.read_at));
        let energy = advance(before.as_ref(), row, row.read_at, cost).energy;
        count(&mut self.moved, before.as_ref(), row);
        self.ending.remove(&row.id);
        if let Some(link) = self.links.get_mut(row.link) {
            link.ended += Traffic { rx: row.rx, tx: row.tx };
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(row.clone());
        self.apps.ended(&row.into(), energy).map_or(Ok(()), |class| self.steering.set_class(&row.app, class))
    }

    /// A bonded flow has ended: its application's demand and traffic are learnt from it as from those over one link.
    pub fn on_carried(&mut self, flow: &Ended, energy: EnergyMeter) -> Result<(), SteeringError> {
        let class = self.apps.ended(flow, energy);
        class.map_or(Ok(()), |class| self.steering.set_class(&flow.app, class))?;
        self.steering.learn(&flow.app, flow.port, flow.rx, flow.tx, flow.at)
    }

    /// Reads the living flows: loads, progress, estimates. To be called several times a second while there are any.
    pub fn poll(&mut self, now: Time) -> Result<(), SteeringError> {
        let dumped = self.begin_poll(now)?()?;
        self.end_poll(now, dumped)
    }

    /// Begins a poll: what is returned takes milliseconds where there are thousands of flows, on whatever thread.
    pub fn begin_poll(&mut self, now: Time) -> Result<Dump<S::Dumped>, SteeringError> {
        self.steering.begin_dump(now)
    }

    /// Takes in what a poll found. `now` is the present, not when it was begun.
    pub fn end_poll(&mut self, now: Time, dumped: S::Dumped) -> Result<(), SteeringError> {
        let mut rows = self.steering.end_dump(now, dumped)?;
        // Those that ended meanwhile have been counted.
        rows.retain(|row| self.ended.get(&living::key(row)) != Some(&row.started));
        rows.iter().for_each(|row| self.consider(now, row));
        let polled = std::mem::replace(&mut self.polled, now);
        let mut moved: BTreeMap<(LinkIndex, Family), (bool, bool)> = BTreeMap::new();
        for link in self.links.values_mut() {
            link.living = Traffic::default();
        }
        self.ended.clear();
        self.unanswered_due = if self.config.move_connects { rows.iter().filter_map(|row| unanswered_due(row, now)).min() } else { None };
        let costs = self.byte_costs(now);
        let (links, by_app, apps) = (&mut self.links, &mut self.moved, &mut self.apps);
        self.flows = self.flows.next(rows, |row, before| {
            let next = advance(before, row, now, costs.get(&row.link).copied());
            count(by_app, before, row);
            if class::is_large(row.rx, row.tx, now.since(row.started).as_secs_f64()) {
                apps.grew_large(row);
            }
            let (received, waiting) = moved.entry((row.link, row.family)).or_default();
            *received |= next.receiving;
            *waiting |= !next.receiving && now.since(next.grown) < IN_PROGRESS && row.rx > ByteCount::ZERO;
            if let Some(link) = links.get_mut(row.link) {
                link.living += Traffic { rx: row.rx, tx: row.tx };
                link.learn(now, before.map(|before| (before.retransmissions, before.segments)), row);
            }
            next
        });
        self.links_with_flows = moved.keys().copied().collect();
        for ((index, family), (received, waiting)) in moved {
            if let Some(link) = self.links.get_mut(index) {
                let health = link.health.get_mut(family);
                if received {
                    health.on_progress(now, polled);
                } else if waiting {
                    tracing::debug!(link = link.facts.name, ?family, "flows receive nothing any more");
                    health.on_suffering(now, Suffering::Stall);
                }
            }
        }
        self.judge(now)
    }

    /// How many flows there were at the last poll.
    pub fn flow_count(&self) -> usize {
        self.flows.len()
    }

    /// Those of them that have not ended since the last poll.
    pub(super) fn living_count(&self) -> usize {
        let over = self.ended.iter().filter(|(key, started)| self.flows.find(key).is_some_and(|living| living.row.started == **started));
        self.flows.len() - over.count()
    }

    /// Whether it has ended since the last poll.
    pub(super) fn is_over(&self, living: &Living) -> bool {
        self.ended.get(&living.key()) == Some(&living.row.started)
    }

    /// Flows on a link that has been dead for longer than the grace, while another link could carry them.
    pub(super) fn find_stuck(&mut self, now: Time) {
        self.stuck_due = None;
        let Some(grace) = self.config.reconnect_after else { return };
        // Asked at every turn, while links seldom die and flows may be thousands.
        if !self.links_with_flows.iter().any(|link| self.dead_since.contains_key(link)) {
            return;
        }
        for living in self.flows.iter() {
            let row = &living.row;
            let Some(since) = self.dead_since.get(&(row.link, row.family)) else { continue };
            let rule = self.rule_then(row.started, row.rule);
            let pinned = rule.is_some_and(|(_, rule)| rule.links.is_some()) || self.is_forgotten(row.started, row.rule);
            let elsewhere = self.links.usable(row.family).iter().any(|slot| slot != row.slot);
            let unusable = self.links.get(row.link).is_none_or(|link| !link.usable(row.family));
            let movable = unusable && elsewhere && (!pinned || self.config.destroy_pinned) && row.protocol == Protocol::Tcp;
            if !movable || self.ending.contains(&row.id) || self.is_over(living) {
                continue;
            }
            let due = *since + grace;
            if due <= now {
                self.ending.insert(row.id);
                self.todo.stuck.push(Stuck::of(row));
            } else {
                self.stuck_due = Some(self.stuck_due.map_or(due, |first| first.min(due)));
            }
        }
    }

    /// Moves connects that wait for an answer, when that is due. The next poll tells what is due then.
    pub(super) fn move_connects(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.unanswered_due.is_none_or(|due| due > now) {
            return Ok(());
        }
        self.unanswered_due = None;
        self.steering.move_connects()
    }

    /// What applications moved since the last call; those that moved nothing are left out.
    pub fn take_moved(&mut self) -> Vec<AppPulse> {
        let moved = std::mem::take(&mut self.moved);
        let mut flows: BTreeMap<&AppId, u64> = moved.keys().map(|app| (app, 0)).collect();
        for living in self.flows.iter() {
            if let Some(count) = flows.get_mut(&living.row.app) {
                *count += 1;
            }
        }
        let pulse = |(app, traffic): (&AppId, &Traffic)| AppPulse {
            application: self.apps.name(app),
            rx: traffic.rx,
            tx: traffic.tx,
            flows: flows.get(app).copied().unwrap_or(0),
        };
        moved.iter().map(pulse).collect()
    }

    /// How busy each link has been since the last poll, by direction.
    pub(super) fn busy(&self, now: Time) -> BTreeMap<LinkIndex, PerDirection<Busy>> {
        let mut busy: BTreeMap<LinkIndex, PerDirection<Busy>> = BTreeMap::new();
        let mut remotes: BTreeSet<(LinkIndex, IpAddr)> = BTreeSet::new();
        for Living { row, progress } in self.flows.iter().filter(|living| !self.is_over(living)) {
            if now.since(progress.grown) > Duration::from_millis(600) {
                continue;
            }
            if self.apps.get(&row.app).map_or(row.class, |met| met.class) == Class::RealTime {
                // It sends at its own pace, whatever the link could carry.
                continue;
            }
            let link = self.links.get(row.link);
            // Acknowledgements and requests leave most of a link empty, and say nothing of what it could carry.
            if progress.toward == Direction::Up && !fills(row, link.and_then(|link| link.rate.up)) {
                continue;
            }
            let fresh = remotes.insert((row.link, row.remote.0));
            let least = link.and_then(|link| link.rtt.least());
            let entry = &mut busy.entry(row.link).or_default()[progress.toward];
            entry.flows += 1;
            entry.destinations += u32::from(fresh);
            // It was there for the whole interval and had more to move than it has moved.
            entry.backlogged |= now.since(row.started) > Duration::from_millis(600);
            let rtt = row.rtt_us.map(|micros| Duration::from_micros(micros.into()));
            entry.queued |= matches!((rtt, least), (Some(rtt), Some(least)) if rtt > least * 6 / 5 + Duration::from_millis(2));
        }
        busy
    }
}

/// When its connect is to be moved, or settled after it was.
fn unanswered_due(row: &FlowRow, now: Time) -> Option<Time> {
    let settled = (row.moving && !row.connecting).then_some(now);
    row.unanswered_since.map(|since| since + UNANSWERED).or(settled)
}

/// Whether a sender has more to send than its way takes: by the kernel's word, which stands until it has sent as much again, so that it
/// counts only beside what the device sends now (`rate`). Nobody tells that of datagrams.
fn fills(row: &FlowRow, rate: Option<Rate>) -> bool {
    matches!((row.delivery_rate, rate), (Some(sample), Some(rate)) if sample.bps() / 4 <= rate.bps())
}

/// Adds what a flow moved since `before` to its application's.
fn count(moved: &mut BTreeMap<AppId, Traffic>, before: Option<&Progress>, row: &FlowRow) {
    let before = before.map_or(Traffic::default(), |before| Traffic { rx: before.rx, tx: before.tx });
    let more = Traffic { rx: row.rx, tx: row.tx }.since(before);
    if more == Traffic::default() {
        return;
    }
    // Most flows that move something are of programs that have moved something.
    match moved.get_mut(&row.app) {
        Some(sum) => *sum += more,
        None => drop(moved.insert(row.app.clone(), more)),
    }
}

fn advance(before: Option<&Progress>, row: &FlowRow, now: Time, cost: Option<ByteCost>) -> Progress {
    let receiving = before.is_some_and(|before| row.rx > before.rx) || (before.is_none() && row.rx > ByteCount::ZERO);
    let sending = before.is_some_and(|before| row.tx > before.tx);
    let grown = match before {
        Some(before) if !receiving && !sending => before.grown,
        _ => now,
    };
    let (rx, tx) = before.map_or((ByteCount::ZERO, ByteCount::ZERO), |before| (before.rx, before.tx));
    let (received, sent) = (row.rx.saturating_sub(rx), row.tx.saturating_sub(tx));
    let toward = match received.cmp(&sent) {
        Ordering::Greater => Direction::Down,
        Ordering::Less => Direction::Up,
        Ordering::Equal => before.map_or(row.direction, |before| before.toward),
    };
    let mut energy = before.map_or(EnergyMeter::default(), |before| before.energy);
    energy.count(cost, received, sent);
    Progress {
        rx: row.rx,
        tx: row.tx,
        grown,
        receiving,
        toward,
        retransmissions: row.retransmissions.unwrap_or(0),
        segments: row.segments_out.unwrap_or(0),
        energy,
    }
}
