//! Hard handover: the route follows the host. Packets are lost until it has entered the new access point (thesis section 5.5.2).

use braid_model::{Mac, Time};

use super::{Action, HostEvent, Manager, View, leave};

/// Routes a host to the attachment where it appeared last. Needs nothing from the host, so it serves hosts without Braid.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hard;

impl Manager for Hard {
    fn name(&self) -> &'static str {
        "hard"
    }

    fn handle(&mut self, _now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
        match event {
            HostEvent::Attached(place) => actions.push(Action::Route { host, to: vec![*place] }),
            HostEvent::Detached(place) => {
                leave(view, host, *place, actions);
            }
            _ => {}
        }
    }
}
