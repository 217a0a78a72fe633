//! Living flows: their byte counts, what is learned from them, and which of them are stuck.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::class;
use braid_decide::energy::{ByteCost, EnergyMeter};
use braid_decide::health::Symptom;
use braid_model::{ByteCount, Class, Direction, Family, FlowId, LinkIndex, PerDirection, Protocol, Rate, Time, Traffic};

use super::Core;
use super::apps::{AppRecord, Ended};
use super::living::{self, Living, Progress};
use crate::history::AppPulse;
use crate::steering::{AppId, Dump, Ends, FlowRow, Steering, SteeringError, SteeringEvent, UNANSWERED};

/// Number of ended flows that are kept for display.
const MAX_RECENT: usize = 256;
/// Maximum number of programs whose paths are read at one poll, because they had ended before the path of their first flow was read.
const MAX_UNREAD: usize = 16;
/// A flow without progress for this long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(2);

/// A flow to be ended because its link is dead, or because its destination now belongs to a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stuck {
    /// Id of the flow.
    pub id: FlowId,
    /// User of the program that has it.
    pub user: u32,
    /// Its transport protocol.
    pub protocol: Protocol,
    /// Its local address.
    pub local: SocketAddr,
    /// Its remote address.
    pub remote: SocketAddr,
    /// The interface it is bound to.
    pub link: LinkIndex,
    /// Whether the reason is a tunnel rather than a dead link.
    pub tunnelled: bool,
    /// Whether it is a client's flow, which has no socket here unless it comes through the virtual interface.
    pub forwarded: bool,
    /// Whether its handshake has not been answered yet.
    pub connecting: bool,
    /// Address and device of its socket if it comes through the virtual interface, while `local` is what connection tracking knows.
    pub socket: Option<(SocketAddr, Option<LinkIndex>)>,
}

impl Stuck {
    pub(super) fn of(row: &FlowRow) -> Self {
        Self {
            id: row.id,
            user: row.user,
            protocol: row.protocol,
            local: SocketAddr::new(row.local.0, row.local.1),
            remote: SocketAddr::new(row.remote.0, row.remote.1),
            link: row.link,
            tunnelled: false,
            forwarded: row.forwarded,
            connecting: row.connecting,
            socket: None,
        }
    }
}

impl<S: Steering> Core<S> {
    /// Processes events from the kernel.
    ///
    /// Processes all of them, even if one fails. Returns the first error.
    pub fn on_events(&mut self, now: Time, events: Vec<SteeringEvent>) -> Result<(), SteeringError> {
        let mut first = Ok(());
        for event in events {
            let taken = self.on_event(now, event);
            first = first.and(taken);
        }
        // The end of a program's last flow may end the condition of a rule.
        if self.asks_running() {
            let context = self.update_context(now);
            first = first.and(context).and(self.update_params(now));
        }
        first
    }

    fn on_event(&mut self, now: Time, event: SteeringEvent) -> Result<(), SteeringError> {
        match event {
            SteeringEvent::Ended(row) => {
                self.ask_if_new(now, &row);
                self.on_ended(&row)?;
            }
            SteeringEvent::NewApp { app, process, cgroup, class } => {
                let (application, cgroup) = self.names.application(&app, process, cgroup);
                self.apps.record(app.clone(), application, cgroup, class, now);
                let classes = self.apps.get(&app).map(AppRecord::kernel_classes);
                if let Some((wanted, learnt)) = classes.filter(|classes| *classes != (class, Class::Unclassified)) {
                    self.steering.set_class(&app, wanted, learnt)?;
                }
            }
            SteeringEvent::Symptom { link, family, connecting, .. } => {
                if let Some(link) = self.links.get_mut(link) {
                    let kind = if connecting { Symptom::NoAnswer } else { Symptom::Timeout };
                    link.health.get_mut(family).on_symptom(now, kind);
                }
            }
        }
        Ok(())
    }

    pub(super) fn on_ended(&mut self, row: &FlowRow) -> Result<(), SteeringError> {
        let before = self.flows.find(&living::key(row)).filter(|living| living.row.started == row.started && !self.has_ended(living));
        let before = before.map(|living| living.progress);
        self.ended.insert(living::key(row), row.started);
        let cost = self.links.get(row.link).and_then(|link| self.byte_cost(link, row.read_at));
        let energy = advance(before.as_ref(), row, row.read_at, cost).energy;
        count(&mut self.moved, before.as_ref(), row);
        self.ending.remove(&row.id);
        self.note_end(row);
        if let Some(link) = self.links.get_mut(row.link) {
            link.ended += Traffic { rx: row.rx, tx: row.tx };
        }
        if self.recent.len() == MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(row.clone());
        // What others fetch from a program says nothing about what it fetches.
        if row.accepted {
            return Ok(());
        }
        self.apps.ended(&row.into(), energy).map_or(Ok(()), |(class, learnt)| self.steering.set_class(&row.app, class, learnt))
    }

    /// Processes the end of a bonded flow: updates the demand and traffic of its application, as for flows over one link.
    pub fn on_bonded_ended(&mut self, flow: &Ended, energy: EnergyMeter) -> Result<(), SteeringError> {
        let classes = self.apps.ended(flow, energy);
        classes.map_or(Ok(()), |(class, learnt)| self.steering.set_class(&flow.app, class, learnt))?;
        self.steering.learn(&flow.app, flow.port, flow.rx, flow.tx, flow.at)
    }

    /// Reads the living flows and updates loads, progress and estimates. Call it several times a second while there are flows.
    pub fn poll(&mut self, now: Time) -> Result<(), SteeringError> {
        let dumped = self.begin_poll(now)?()?;
        self.end_poll(now, dumped)
    }

    /// Starts a poll. The returned function takes milliseconds if there are thousands of flows; it may run on any thread.
    pub fn begin_poll(&mut self, now: Time) -> Result<Dump<S::Dumped>, SteeringError> {
        self.steering.begin_dump(now)
    }

    /// Processes the result of a poll. `now` is the current time, not the start of the poll.
    pub fn end_poll(&mut self, now: Time, dumped: S::Dumped) -> Result<(), SteeringError> {
        let mut rows = self.steering.end_dump(now, dumped)?;
        self.place_datagrams(&mut rows);
        let ended = self.take_accepted(now, &mut rows);
        // Flows that ended meanwhile are counted already.
        rows.retain(|row| self.ended.get(&living::key(row)) != Some(&row.started));
        rows.iter().for_each(|row| self.ask_if_new(now, row));
        let polled = std::mem::replace(&mut self.polled, now);
        let mut moved: BTreeMap<(LinkIndex, Family), (bool, bool)> = BTreeMap::new();
        for link in self.links.values_mut() {
            link.living = Traffic::default();
        }
        self.ended.clear();
        self.drop_list();
        self.unanswered_due = if self.config.move_connects { rows.iter().filter_map(|row| unanswered_due(row, now)).min() } else { None };
        let costs = self.byte_costs(now);
        let (links, by_app, apps, own_traffic) = (&mut self.links, &mut self.moved, &mut self.apps, &mut self.own_traffic);
        let mut unread: BTreeMap<AppId, (u32, u64)> = BTreeMap::new();
        // They say nothing about the link on which the kernel counts them.
        let in_tunnels = self.moving.in_tunnels();
        self.flows = self.flows.next(rows, |row, before| {
            let next = advance(before, row, now, costs.get(&row.link).copied());
            count(by_app, before, row);
            if row.fast && row.is_through_virtual_device() {
                own_traffic.fast += more_than(before, row);
            }
            if before.is_none() && unread.len() < MAX_UNREAD && apps.get(&row.app).is_some_and(|record| record.application.exe.is_none()) {
                unread.insert(row.app.clone(), (row.process, row.cgroup));
            }
            // What others fetch from a program says nothing about what it fetches.
            if !row.accepted && class::is_large(row.rx, row.tx, now.since(row.started).as_secs_f64()) {
                apps.on_large_flow(row);
            }
            if !in_tunnels.is_empty() && in_tunnels.contains(&Ends::of(row)) {
                return next;
            }
            // Accepted flows may not have been read since the last poll.
            if row.accepted && before.is_some_and(|before| before.read_at == row.read_at) {
                return next;
            }
            let (received, waiting) = moved.entry((row.link, row.family)).or_default();
            *received |= next.receiving;
            *waiting |= !next.receiving && now.since(next.grown) < IDLE_AFTER && row.rx > ByteCount::ZERO;
            if let Some(link) = links.get_mut(row.link) {
                link.living += Traffic { rx: row.rx, tx: row.tx };
                link.learn(now, before.map(|before| (before.retransmissions, before.segments)), next.least_rtt, row);
                // The kernel reports timeouts of the flows that it has placed.
                if row.timeouts > before.map_or(0, |before| before.timeouts) {
                    link.health.get_mut(row.family).on_symptom(now, Symptom::Timeout);
                }
            }
            next
        });
        for (app, (process, cgroup)) in unread {
            let (application, cgroup) = self.names.application(&app, process, cgroup);
            if application.exe.is_some() {
                self.apps.record(app, application, cgroup, Class::Unclassified, now);
            }
        }
        self.note_flows();
        self.follow_shares(now);
        let fast_path = self.follow_fast_path(now);
        self.links_with_flows = moved.keys().copied().collect();
        for ((index, family), (received, waiting)) in moved {
            if let Some(link) = self.links.get_mut(index) {
                let health = link.health.get_mut(family);
                if received {
                    health.on_progress(now, polled);
                } else if waiting {
                    tracing::debug!(link = link.facts.name, ?family, "flows have stopped receiving");
                    health.on_symptom(now, Symptom::Stall);
                }
            }
        }
        self.reevaluate(now).and(fast_path).and(ended)
    }

    /// Whether polls must make room for new flows of the gateway's clients.
    pub fn is_under_pressure(&self) -> bool {
        self.steering.is_under_pressure()
    }

    /// Number of flows at the last poll.
    pub fn flow_count(&self) -> usize {
        self.flows.len()
    }

    /// Number of flows of the last poll that have not ended since.
    pub(super) fn living_count(&self) -> usize {
        let over = self.ended.iter().filter(|(key, started)| self.flows.find(key).is_some_and(|living| living.row.started == **started));
        self.flows.len() - over.count()
    }

    /// Whether the flow has ended since the last poll.
    pub(super) fn has_ended(&self, living: &Living) -> bool {
        self.ended.get(&living.key()) == Some(&living.row.started)
    }

    /// Finds flows on a link that has been dead for longer than the grace period while another link is usable, and unanswered connects that cannot move
    /// away from a dead link.
    pub(super) fn find_stuck(&mut self, now: Time) {
        self.stuck_due = None;
        let Some(grace) = self.config.reconnect_after else { return };
        // This runs on every pass, while links rarely die and there may be thousands of flows.
        if !self.links_with_flows.iter().any(|link| self.dead_since.contains_key(link)) {
            return;
        }
        for living in self.flows.iter() {
            let row = &living.row;
            let Some(since) = self.dead_since.get(&(row.link, row.family)) else { continue };
            let rule = self.rule_at(row.started, row.rule);
            let pinned = rule.is_some_and(|(_, rule)| rule.links.is_some()) || self.rule_expired(row.started, row.rule);
            let elsewhere = self.links.usable(row.family).iter().any(|slot| slot != row.slot);
            let unusable = self.links.get(row.link).is_none_or(|link| !link.usable(row.family));
            // A client's flow without connection changes its link by itself: the switch gives its next packet another one.
            // To end a connection that the other host opened does not make that host connect again.
            let movable =
                !row.accepted && unusable && elsewhere && (!pinned || self.config.destroy_pinned) && row.protocol == Protocol::Tcp;
            if !movable || self.is_moved(row) || self.ending.contains(&row.id) || self.has_ended(living) {
                continue;
            }
            // The kernel would only send the SYN again over the dead link. The connect has nothing to lose, so it need not wait.
            let stays = row.unanswered_since.is_none() || !self.config.move_connects;
            let due = if row.connecting && !row.moving && stays { *since } else { *since + grace };
            if due <= now {
                self.ending.insert(row.id);
                self.actions.stuck.push(Stuck::of(row));
            } else {
                self.stuck_due = Some(self.stuck_due.map_or(due, |first| first.min(due)));
            }
        }
    }

    /// Moves unanswered connects, if that is due. The next poll computes the next due time.
    pub(super) fn move_connects(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.unanswered_due.is_none_or(|due| due > now) {
            return Ok(());
        }
        self.unanswered_due = None;
        self.steering.move_connects()
    }

    /// Bytes that applications moved since the last call, without applications that moved nothing.
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
            client: app.client_address(),
        };
        moved.iter().map(pulse).collect()
    }

    /// How busy each link has been since the last poll, by direction.
    pub(super) fn busy(&self, now: Time) -> BTreeMap<LinkIndex, PerDirection<Busy>> {
        let mut busy: BTreeMap<LinkIndex, PerDirection<Busy>> = BTreeMap::new();
        let mut remotes: BTreeSet<(LinkIndex, IpAddr)> = BTreeSet::new();
        let in_tunnels = self.moving.in_tunnels();
        for Living { row, progress } in self.flows.iter().filter(|living| !self.has_ended(living)) {
            if !in_tunnels.is_empty() && in_tunnels.contains(&Ends::of(row)) {
                continue;
            }
            if now.since(progress.grown) > Duration::from_millis(600) {
                continue;
            }
            if self.apps.get(&row.app).map_or(row.class, |record| record.class) == Class::RealTime {
                // A real-time flow sends at its own rate, whatever the link's capacity.
                continue;
            }
            let link = self.links.get(row.link);
            // Acknowledgements and requests leave most of a link unused, so they are no evidence of its capacity.
            if progress.toward == Direction::Up && !fills(row, link.and_then(|link| link.rate.up)) {
                continue;
            }
            let fresh = remotes.insert((row.link, row.remote.0));
            let least = link.and_then(|link| link.rtt.least());
            let entry = &mut busy.entry(row.link).or_default()[progress.toward];
            entry.flows += 1;
            entry.destinations += u32::from(fresh);
            // The flow existed during the whole interval and had more data to send.
            entry.backlogged |= now.since(row.started) > Duration::from_millis(600) && !self.shares.limits(row.id, progress.toward);
            let rtt = row.rtt_us.map(|micros| Duration::from_micros(micros.into()));
            entry.queued |= matches!((rtt, least), (Some(rtt), Some(least)) if rtt > least * 6 / 5 + Duration::from_millis(2));
        }
        busy
    }
}

/// When a connect must be moved, or confirmed after a move.
fn unanswered_due(row: &FlowRow, now: Time) -> Option<Time> {
    let settled = (row.moving && !row.connecting).then_some(now);
    row.unanswered_since.map(|since| since + UNANSWERED).or(settled)
}

/// Whether a sender is limited by the network: according to the kernel's delivery rate sample. That sample stays until the flow has sent as
/// much again, so it counts only together with the device's current send `rate`. There is no such sample for UDP.
fn fills(row: &FlowRow, rate: Option<Rate>) -> bool {
    matches!((row.delivery_rate, rate), (Some(sample), Some(rate)) if sample.bps() / 4 <= rate.bps())
}

/// Adds the bytes that a flow moved since `before` to those of its application.
/// What a flow has moved since the last poll.
fn more_than(before: Option<&Progress>, row: &FlowRow) -> Traffic {
    let before = before.map_or(Traffic::default(), |before| Traffic { rx: before.rx, tx: before.tx });
    Traffic { rx: row.rx, tx: row.tx }.since(before)
}

fn count(moved: &mut BTreeMap<AppId, Traffic>, before: Option<&Progress>, row: &FlowRow) {
    let more = more_than(before, row);
    if more == Traffic::default() {
        return;
    }
    // Look up first: most flows belong to applications that are already in the map.
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
        timeouts: row.timeouts,
        read_at: row.read_at,
        segments: row.segments_out.unwrap_or(0),
        energy,
        least_rtt: row
            .rtt_us
            .map(|micros| Duration::from_micros(micros.into()))
            .into_iter()
            .chain(before.and_then(|before| before.least_rtt))
            .min(),
    }
}
