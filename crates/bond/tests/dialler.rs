//! Timing of dials, in virtual time.

#![allow(clippy::disallowed_methods, reason = "any start instant is sufficient")]

use std::time::{Duration, Instant};

use braid_bond::dialler::{DIAL_TIMEOUT, Dialler, Due, EXTENDED_DIAL_TIMEOUT, Loss, MAX_PAUSE, Route};
use braid_model::Family;

const ROUTE: Route = (0, Family::V4);

struct World {
    dialler: Dialler<u32>,
    now: Instant,
    connections: u32,
}

impl World {
    fn new() -> Self {
        let mut world = Self { dialler: Dialler::default(), now: Instant::now(), connections: 0 };
        world.dialler.on_link(world.now, ROUTE);
        world
    }

    /// Waits until the route is due, and dials. Returns the connection and the waiting time.
    fn dial(&mut self) -> (u32, Duration) {
        let begun = self.now;
        self.now = self.dialler.poll_timeout().expect("nothing is due").max(self.now);
        assert_eq!(self.dialler.due(self.now), [ROUTE]);
        assert!(matches!(self.dialler.on_due(self.now, ROUTE, |_| false), Due::Dial(_)));
        self.connections += 1;
        let path = self.dialler.next_path();
        self.dialler.on_dialled(self.now, ROUTE, self.connections, path);
        (self.connections, self.now - begun)
    }

    fn address(&self) -> usize {
        self.dialler.address(ROUTE).0
    }
}

#[test]
fn regression_the_next_address_is_dialled_only_after_a_failure() {
    let mut world = World::new();
    let (connection, _) = world.dial();
    world.dialler.on_joined(connection);
    assert_eq!(world.dialler.on_lost(world.now, connection, Loss::TimedOut), Some(true));
    assert_eq!(world.address(), 0, "this address answered");
    let (connection, _) = world.dial();
    world.dialler.on_lost(world.now, connection, Loss::TimedOut);
    assert_eq!(world.address(), 1, "the address did not answer");
    let (connection, _) = world.dial();
    world.dialler.on_joined(connection);
    world.dialler.on_addresses(|_, old| Some(old + 1));
    assert_eq!(world.address(), 2, "the joined address is kept at its new index");
    world.dialler.on_lost(world.now, connection, Loss::TimedOut);
    world.dialler.on_addresses(|_, old| Some(old));
    assert_eq!(world.address(), 0, "without a path the first address is used");
}

#[test]
fn regression_a_peer_that_keeps_refusing_is_dialled_with_growing_pauses() {
    for loss in [Loss::Closed, Loss::UnknownBond] {
        let mut world = World::new();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let (connection, waited) = world.dial();
            pauses.push(waited);
            let joined = world.dialler.on_lost(world.now, connection, loss).expect("the connection is unknown");
            if loss == Loss::UnknownBond {
                world.dialler.restart_unknown_bond(world.now, joined);
            }
        }
        assert!(pauses.is_sorted() && pauses[7] == MAX_PAUSE, "{loss:?}: {pauses:?}");
    }
}

#[test]
fn a_restarted_peer_is_redialled_at_once() {
    let mut world = World::new();
    let (connection, _) = world.dial();
    world.dialler.on_joined(connection);
    world.dialler.on_lost(world.now, connection, Loss::Closed);
    assert_eq!(world.dial().1, Duration::ZERO);
}

#[test]
fn a_connection_that_answers_gets_more_time_once() {
    let mut world = World::new();
    let (connection, _) = world.dial();
    world.now += DIAL_TIMEOUT;
    assert_eq!(world.dialler.on_due(world.now, ROUTE, |_| true), Due::Wait);
    assert_eq!(world.dialler.poll_timeout(), Some(world.now + EXTENDED_DIAL_TIMEOUT));
    world.now += EXTENDED_DIAL_TIMEOUT;
    assert_eq!(world.dialler.on_due(world.now, ROUTE, |_| true), Due::Dial(Some(connection)));
    assert_eq!(world.address(), 1);
}

#[test]
fn a_recovered_link_is_dialled_at_once_unless_it_has_a_path() {
    let mut world = World::new();
    let (connection, _) = world.dial();
    world.dialler.on_lost(world.now, connection, Loss::Refused);
    assert_eq!(world.dialler.poll_timeout(), Some(world.now + MAX_PAUSE));
    world.dialler.on_link(world.now, ROUTE);
    assert_eq!(world.dialler.poll_timeout(), Some(world.now));
    let (connection, _) = world.dial();
    world.dialler.on_joined(connection);
    world.dialler.on_link(world.now, ROUTE);
    assert_eq!(world.dialler.poll_timeout(), None);
}

#[test]
fn pauses_grow_until_an_address_is_found() {
    let mut world = World::new();
    for expected in [500, 1000, 2000] {
        world.now = world.dialler.poll_timeout().unwrap();
        assert_eq!(world.dialler.on_due(world.now, ROUTE, |_| false), Due::Dial(None));
        world.dialler.on_dial_failed(world.now, ROUTE, false);
        assert_eq!(world.dialler.poll_timeout(), Some(world.now + Duration::from_millis(expected)));
    }
    world.dialler.on_found(world.now);
    assert_eq!((world.dialler.poll_timeout(), world.address()), (Some(world.now), 0));
}
