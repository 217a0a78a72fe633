//! Polls the flows: their byte counts and what is learned from them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use braid_control::steering::{Steering, SteeringError};
use braid_http::{FlowList, ReplySender};
use braid_model::Time;
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::netlink;
use braid_platform::linux::sys::bpf::{now, thread_time};

use super::system::unix;
use super::{Daemon, RETRY_AFTER};
use crate::peers::packets::PacketRow;

/// Up to this many flows are read inline. More are read on a separate thread, so that clients and packets do not wait.
const MAX_INLINE_FLOWS: usize = 200;
/// Polls use at most one part in this many of one processor's time.
const POLL_SHARE: u32 = 50;
/// The same while polls must make room for new flows of clients.
const PRESSURE_SHARE: u32 = 10;
/// Maximum age of a cached list that answers a request while there are many flows.
const MAX_LIST_AGE: Duration = Duration::from_secs(1);
/// The list is serialised for this long after the last request.
const SERIALISE_FOR: Duration = Duration::from_secs(3);
/// Error context of a failed poll.
const POLL: &str = "cannot read the flows";

/// Result of a poll, and the processor time that reading took.
pub(super) type Polled = (Result<<BpfSteering as Steering>::Dumped, SteeringError>, Duration);

impl Daemon<'_> {
    /// Reads the flows: inline if there are few, else on a thread.
    pub(super) fn begin_poll(&mut self) {
        let begun = thread_time();
        let dump = self.core.begin_poll(now());
        let Some(dump) = self.log_and_retry(POLL, dump) else { return self.send_flows() };
        if self.core.flow_count() <= MAX_INLINE_FLOWS {
            let dumped = dump();
            return self.end_poll(dumped, thread_time().since(begun));
        }
        let answer = self.polls.0.clone();
        // tokio would panic if the system had no thread left.
        let reader = thread::Builder::new().name("braid-flows".to_owned()).spawn(move || {
            let begun = thread_time();
            let dumped = dump();
            let _ = answer.blocking_send((dumped, thread_time().since(begun)));
        });
        self.polling = self.log_and_retry(POLL, reader).is_some();
        if !self.polling {
            self.send_flows();
            self.next_poll = now() + RETRY_AFTER;
        }
    }

    /// Processes the result of a poll. `spent` is the processor time used so far.
    pub(super) fn end_poll(&mut self, dumped: Result<<BpfSteering as Steering>::Dumped, SteeringError>, spent: Duration) {
        let begun = thread_time();
        self.polling = false;
        let polled = dumped.map_err(anyhow::Error::from).and_then(|dumped| self.take_poll(dumped));
        self.log_and_retry(POLL, polled);
        self.send_flows();
        // Only this process's CPU time counts. With wall time, a busy machine would detect a dead link later.
        let share = if self.core.is_under_pressure() { PRESSURE_SHARE } else { POLL_SHARE };
        self.next_poll = now() + (spent + thread_time().since(begun)) * share;
    }

    fn take_poll(&mut self, dumped: <BpfSteering as Steering>::Dumped) -> anyhow::Result<()> {
        let packets = dumped.packet_flows().into_iter();
        let named = packets.map(|row| PacketRow { application: self.core.application_named(&row.app), row });
        let rows: Vec<PacketRow> = named.collect();
        self.peers.set_packet_flows(rows);
        self.core.end_poll(now(), dumped)?;
        let hosts = self.core.hosts_to_ask_for_moves(now());
        if !hosts.is_empty() {
            // A bond may start and needs the current links.
            self.peers.set_links(self.core.bond_links());
            self.peers.keep_bonds(hosts);
        }
        let counters = netlink::device_counters()?;
        self.core.on_counters(now(), unix(), &counters);
        // An allowance may have been used up.
        Ok(self.core.tick(now())?)
    }

    /// `GET /v1/flows`. Few flows are read for each request. Reading many takes longer than a response should: a client that asks
    /// repeatedly gets the previous list, at most a second old, and the next poll starts in the background.
    pub(super) fn ask_flows(&mut self, time: Time, reply: ReplySender<Arc<FlowList>>) {
        let known = if self.core.flow_count() > MAX_INLINE_FLOWS { self.lists.for_now(time) } else { None };
        match known {
            Some(known) => drop(reply.send(Ok(known))),
            None => self.waiting.push(reply),
        }
        self.lists.asked = Some(time);
        if !self.polling {
            self.begin_poll();
        }
    }

    /// Answers pending requests for flows. If reading failed, the answer holds the last known state.
    fn send_flows(&mut self) {
        let time = now();
        let asked = self.lists.asked.is_some_and(|asked| time.since(asked) < SERIALISE_FOR);
        if !asked && self.waiting.is_empty() {
            self.lists = Lists::default();
            return;
        }
        let own = self.core.virtual_device().map(|own| &*own.name);
        let flows = Arc::new(FlowList::new(self.core.flows_view(time), self.peers.flow_views(time, own)));
        self.waiting.drain(..).for_each(|reply| drop(reply.send(Ok(flows.clone()))));
        if self.core.flow_count() > MAX_INLINE_FLOWS {
            let list = flows.clone();
            // Without a thread the first answer serialises it.
            let _ = thread::Builder::new().spawn(move || drop(list.text()));
            self.lists.put(time, flows);
        }
    }
}

/// The last two lists of flows, each serialised once. The newest may not be serialised yet.
#[derive(Default)]
pub(super) struct Lists {
    newest: Option<(Time, Arc<FlowList>)>,
    before: Option<(Time, Arc<FlowList>)>,
    asked: Option<Time>,
}

impl Lists {
    fn put(&mut self, time: Time, flows: Arc<FlowList>) {
        self.before = self.newest.replace((time, flows));
    }

    /// The newest fresh list, preferring one that is serialised.
    fn for_now(&self, time: Time) -> Option<Arc<FlowList>> {
        let fresh =
            || [&self.newest, &self.before].into_iter().flatten().filter(|(at, _)| time.since(*at) <= MAX_LIST_AGE).map(|(_, list)| list);
        fresh().find(|list| list.written().is_some()).or_else(|| fresh().next()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_serialised_list_is_used_and_stale_ones_are_not() {
        let mut lists = Lists::default();
        let at = Time::from_millis;
        assert!(lists.for_now(at(0)).is_none());
        let [first, second] = [(); 2].map(|()| Arc::new(FlowList::default()));
        let answered = |lists: &Lists, ms| lists.for_now(at(ms)).map(|list| Arc::as_ptr(&list));
        lists.put(at(1000), first.clone());
        assert_eq!(answered(&lists, 1100), Some(Arc::as_ptr(&first)), "the only fresh list");
        first.text();
        lists.put(at(1500), second.clone());
        assert_eq!(answered(&lists, 1600), Some(Arc::as_ptr(&first)));
        assert_eq!(answered(&lists, 2400), Some(Arc::as_ptr(&second)), "the first is too old");
        second.text();
        assert_eq!(answered(&lists, 1600), Some(Arc::as_ptr(&second)));
        assert_eq!(answered(&lists, 2501), None);
    }
}
