//! Looks at the flows: what they move, and what that teaches.

use std::time::Duration;

use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::netlink;
use braid_platform::linux::sys::bpf::{now, thread_time};
use braid_platform::steering::{Steering, SteeringError};

use super::Daemon;
use super::answers::CARRIED_BY;
use super::system::unix;
use crate::server::FlowList;

/// Up to so many flows are looked at in between; more of them by a thread of its own, since clients and packets must not wait for it.
const FEW_FLOWS: usize = 200;
/// Looks at the flows take one part in so many of a processor's time at most.
const LOOKS_SHARE: u32 = 50;
/// The flows could not be looked at.
const LOOK: &str = "cannot look at the flows";

/// What a look found, and the processor time it took.
pub(super) type Looked = (Result<<BpfSteering as Steering>::Walked, SteeringError>, Duration);

impl Daemon<'_> {
    /// Looks at the flows: at once if they are few, else with a thread's help.
    pub(super) fn begin_look(&mut self) {
        let begun = thread_time();
        let walk = self.core.begin_look(now());
        let Some(walk) = self.bear(LOOK, walk) else { return self.tell_flows() };
        if self.core.flow_count() <= FEW_FLOWS {
            let walked = walk();
            return self.end_look(walked, thread_time().since(begun));
        }
        let answer = self.looks.0.clone();
        self.looking = true;
        tokio::task::spawn_blocking(move || {
            let begun = thread_time();
            let walked = walk();
            let _ = answer.blocking_send((walked, thread_time().since(begun)));
        });
    }

    /// Takes in what a look found; `spent` is the processor time that took so far.
    pub(super) fn end_look(&mut self, walked: Result<<BpfSteering as Steering>::Walked, SteeringError>, spent: Duration) {
        let begun = thread_time();
        self.looking = false;
        let looked = walked.map_err(anyhow::Error::from).and_then(|walked| self.take_look(walked));
        self.bear(LOOK, looked);
        self.tell_flows();
        // What the CPU does for others meanwhile does not count: on a busy machine a dead link would be found later.
        self.next_look = now() + (spent + thread_time().since(begun)) * LOOKS_SHARE;
    }

    fn take_look(&mut self, walked: <BpfSteering as Steering>::Walked) -> anyhow::Result<()> {
        self.core.end_look(now(), walked)?;
        let counters = netlink::device_counters()?;
        self.core.on_counters(now(), unix(), &counters);
        // An allowance may have been used up.
        Ok(self.core.tick(now())?)
    }

    /// Answers those who asked for the flows. What cannot be looked at now is told as it was.
    fn tell_flows(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let time = now();
        let flows = FlowList { direct: self.core.flows_view(time), bonded: self.peers.flow_views(time, CARRIED_BY) };
        self.waiting.drain(..).for_each(|answer| drop(answer.send(Ok(flows.clone()))));
    }
}
