//! What `explain` says of moves.

use super::super::Core;
use super::{Stage, can_move};
use crate::steering::{Ends, FlowRow, Steering};

impl<S: Steering> Core<S> {
    /// What `explain` says of a flow on its link, if its destination may change that.
    pub(in crate::core) fn explain_move(&self, row: &FlowRow) -> Option<String> {
        let own = Ends::of(row);
        let name = |slot: usize| self.links.in_slot(slot).map_or("a link that is gone", |link| &link.facts.name);
        if let Some(moved) = self.moving.flows.get(&own) {
            let Some(slot) = moved.way.slot else {
                let text = match moved.stage {
                    Stage::Moved(_) => {
                        "or another link, and it goes on in UDP, because what is on the way over other links drops or translates its packets: they pass the \
                         bond to its host, over all links, which encrypts them between both hosts"
                    }
                    _ => "and it is moving into the bond to its host, in UDP",
                };
                return Some(text.to_owned());
            };
            return Some(match moved.stage {
                Stage::Moved(_) => format!(
                    "or another link, and it has moved to {}{}: on the way its packets have the addresses {} and {}, and Braid does not encrypt them",
                    name(slot),
                    moved.way.waypoint.as_ref().map_or(String::new(), |waypoint| format!(
                        " through the waypoint {}, which its host sees as {}",
                        waypoint.relay, waypoint.far
                    )),
                    moved.way.wire.source,
                    moved.way.wire.destination
                ),
                Stage::Preparing(_) | Stage::Asked(_) | Stage::Testing { .. } => format!("and it is moving to {}", name(slot)),
            });
        }
        if let Some(refusal) = self.moving.refused.get(&own) {
            return Some(format!("and it stays there, because it cannot move: {}", refusal.reason));
        }
        if let (true, Err(reason)) = (self.moving.hosts.contains(&own.destination.ip()), self.moving.datagrams.check(&own)) {
            return can_move(row).then(|| format!("and it stays there for now: {reason}"));
        }
        let text = match self.moving.hosts.contains(&own.destination.ip()) {
            true => "and it can change its link while it runs, because its host runs Braid and agrees; Braid does not encrypt it",
            false => {
                "and it stays there, because its host does not agree to moves (\"braid relay --local --moves\" there), without which it cannot pass a waypoint either"
            }
        };
        (self.config.moves && can_move(row)).then(|| text.to_owned())
    }
}
