//! Flows that change their link while they run (`ebpf/rewrite.bpf.c`).

use std::collections::BTreeMap;

use aya::maps::HashMap;
use braid_control::steering::{Ends, MAX_REWRITES, Rewrite, SteeringError};

use super::forward::{forward_key, ignore_missing};
use super::{BpfSteering, failed, iterate};
use crate::linux::sys::abi;

const ACTION: &str = "rewrite moved flows";

impl BpfSteering {
    /// Makes these the rewritten flows. An entry that did not change keeps its counter. After an error the next call continues.
    pub(super) fn rewrite(&mut self, wanted: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError> {
        let was_used = !self.rewrites.is_empty();
        let mut map: HashMap<_, abi::ForwardKey, abi::Rewrite> = typed_map!(self, HashMap, "rewrites", "rewrite moved flows");
        let mut changed = false;
        let gone: Vec<Ends> = self.rewrites.keys().filter(|ends| !wanted.contains_key(ends)).copied().collect();
        for ends in gone {
            ignore_missing(map.remove(&key(&ends))).map_err(failed(ACTION))?;
            changed |= self.rewrites.remove(&ends).is_some_and(|rewrite| !rewrite.arrives);
        }
        for (ends, rewrite) in wanted {
            let is_new = !self.rewrites.contains_key(ends);
            if self.rewrites.get(ends) == Some(rewrite) || (is_new && self.rewrites.len() >= MAX_REWRITES) {
                continue;
            }
            map.insert(key(ends), raw(ends, rewrite), 0).map_err(failed(ACTION))?;
            self.rewrites.insert(*ends, *rewrite);
            changed |= !rewrite.arrives;
        }
        if was_used == self.rewrites.is_empty() {
            self.switch()?;
        }
        self.departs |= changed;
        self.depart()
    }

    /// Makes the sockets of the moved flows send through Braid's device, and others not, if that is not done yet.
    pub(super) fn depart(&mut self) -> Result<(), SteeringError> {
        let Some(departer) = self.departer.as_mut().ok().filter(|_| self.departs) else { return Ok(()) };
        let run = departer.run(iterate::WAIT).map_err(|error| SteeringError { action: ACTION, reason: error.to_string() })?;
        // A run that still waits for a socket's lock may have passed others before this change.
        self.departs = !run.ended;
        Ok(())
    }
}

fn key(ends: &Ends) -> abi::ForwardKey {
    forward_key(ends.protocol, ends.source, ends.destination)
}

fn raw(ends: &Ends, rewrite: &Rewrite) -> abi::Rewrite {
    abi::Rewrite {
        to: forward_key(ends.protocol, rewrite.source, rewrite.destination),
        device: rewrite.device.map_or(0, |device| device.0),
        mark: rewrite.mark,
        arrives: rewrite.arrives.into(),
        ..Default::default()
    }
}
