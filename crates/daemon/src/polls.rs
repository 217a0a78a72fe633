//! Polls the flows: what they move, and what that teaches.

use std::sync::Arc;
use std::time::Duration;

use braid_control::steering::{Steering, SteeringError};
use braid_http::{FlowList, ReplySender};
use braid_model::Time;
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::netlink;
use braid_platform::linux::sys::bpf::{now, thread_time};

use super::Daemon;
use super::system::unix;

/// Up to so many flows are read in between; more of them by a thread of its own, since clients and packets must not wait for it.
const FEW_FLOWS: usize = 200;
/// Polls take one part in so many of a processor's time at most.
const POLL_SHARE: u32 = 50;
/// Whoever asks for many flows may be told of a poll so old.
const FRESH: Duration = Duration::from_secs(1);
/// Polls are written for as long after the last question.
const ASKED_LATELY: Duration = Duration::from_secs(3);
/// The flows could not be read.
const POLL: &str = "cannot read the flows";

/// What a poll found, and the processor time it took.
pub(super) type Polled = (Result<<BpfSteering as Steering>::Dumped, SteeringError>, Duration);

impl Daemon<'_> {
    /// Reads the flows: at once if they are few, else with a thread's help.
    pub(super) fn begin_poll(&mut self) {
        let begun = thread_time();
        let dump = self.core.begin_poll(now());
        let Some(dump) = self.log_and_retry(POLL, dump) else { return self.tell_flows() };
        if self.core.flow_count() <= FEW_FLOWS {
            let dumped = dump();
            return self.end_poll(dumped, thread_time().since(begun));
        }
        let answer = self.polls.0.clone();
        self.polling = true;
        tokio::task::spawn_blocking(move || {
            let begun = thread_time();
            let dumped = dump();
            let _ = answer.blocking_send((dumped, thread_time().since(begun)));
        });
    }

    /// Takes in what a poll found; `spent` is the processor time that took so far.
    pub(super) fn end_poll(&mut self, dumped: Result<<BpfSteering as Steering>::Dumped, SteeringError>, spent: Duration) {
        let begun = thread_time();
        self.polling = false;
        let polled = dumped.map_err(anyhow::Error::from).and_then(|dumped| self.take_poll(dumped));
        self.log_and_retry(POLL, polled);
        self.tell_flows();
        // What the CPU does for others meanwhile does not count: on a busy machine a dead link would be found later.
        self.next_poll = now() + (spent + thread_time().since(begun)) * POLL_SHARE;
    }

    fn take_poll(&mut self, dumped: <BpfSteering as Steering>::Dumped) -> anyhow::Result<()> {
        self.core.end_poll(now(), dumped)?;
        let counters = netlink::device_counters()?;
        self.core.on_counters(now(), unix(), &counters);
        // An allowance may have been used up.
        Ok(self.core.tick(now())?)
    }

    /// `GET /v1/flows`. Few flows are read for whoever asks. Many take longer than an answer should: while somebody asks again and again,
    /// he is told of the poll before, at most a second old, which the next one is begun behind.
    pub(super) fn ask_flows(&mut self, time: Time, reply: ReplySender<Arc<FlowList>>) {
        let known = if self.core.flow_count() > FEW_FLOWS { self.lists.for_now(time) } else { None };
        match known {
            Some(known) => drop(reply.send(Ok(known))),
            None => self.waiting.push(reply),
        }
        self.lists.asked = Some(time);
        if !self.polling {
            self.begin_poll();
        }
    }

    /// Answers those who asked for the flows. What cannot be read now is told as it was.
    fn tell_flows(&mut self) {
        let time = now();
        let asked = self.lists.asked.is_some_and(|asked| time.since(asked) < ASKED_LATELY);
        if !asked && self.waiting.is_empty() {
            self.lists = Lists::default();
            return;
        }
        let flows = Arc::new(FlowList::new(self.core.flows_view(time), self.peers.flow_views(time)));
        self.waiting.drain(..).for_each(|reply| drop(reply.send(Ok(flows.clone()))));
        if self.core.flow_count() > FEW_FLOWS {
            let list = flows.clone();
            tokio::task::spawn_blocking(move || list.text());
            self.lists.put(time, flows);
        }
    }
}

/// The last two polls as clients are told of them, each written once: the newest may not have been yet.
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

    /// The newest that is fresh, and has been written if any has.
    fn for_now(&self, time: Time) -> Option<Arc<FlowList>> {
        let fresh = || [&self.newest, &self.before].into_iter().flatten().filter(|(at, _)| time.since(*at) <= FRESH).map(|(_, list)| list);
        fresh().find(|list| list.written().is_some()).or_else(|| fresh().next()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_list_that_is_written_is_told_and_none_that_is_old() {
        let mut lists = Lists::default();
        let at = Time::from_millis;
        assert!(lists.for_now(at(0)).is_none());
        let [first, second] = [(); 2].map(|()| Arc::new(FlowList::default()));
        let told = |lists: &Lists, ms| lists.for_now(at(ms)).map(|list| Arc::as_ptr(&list));
        lists.put(at(1000), first.clone());
        assert_eq!(told(&lists, 1100), Some(Arc::as_ptr(&first)), "it will be soon");
        first.text();
        lists.put(at(1500), second.clone());
        assert_eq!(told(&lists, 1600), Some(Arc::as_ptr(&first)));
        assert_eq!(told(&lists, 2400), Some(Arc::as_ptr(&second)), "the first is too old");
        second.text();
        assert_eq!(told(&lists, 1600), Some(Arc::as_ptr(&second)));
        assert_eq!(told(&lists, 2501), None);
    }
}
