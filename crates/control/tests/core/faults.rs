//! A backend whose calls fail.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_control::core::Core;
use braid_control::fake::FakeSteering;
use braid_control::steering::{AppId, FlowRow, Steering, SteeringEvent};
use braid_decide::health::Outcome;
use braid_decide::policy::Scheduler;
use braid_model::{ByteCount, Class, Family, FlowId, LinkIndex, Time};

use super::world::*;

#[test]
fn failures_are_errors_and_never_panics() {
    for every in 1..40 {
        let names = FakeNames(BTreeMap::new());
        let Ok(mut core) = Core::new(FakeSteering::chaos(every), Box::new(names), config(Scheduler::MaxThroughput), Time::ZERO) else {
            continue;
        };
        let mut now = Time::from_millis(1);
        for step in 0..200 {
            now = now + Duration::from_millis(50);
            let _ = match step % 5 {
                0 => core.on_network(now, network(&[facts(1, "wlan0"), facts(2, "lte0")])),
                1 => core.poll(now),
                2 => core.tick(now),
                3 => core.on_probe(now, LinkIndex(1 + step % 3), Family::V4, Outcome::Silent),
                _ => core.reconfigure(now, config(Scheduler::RoundRobin)),
            };
            core.status(now);
            core.take_actions();
        }
    }
}

#[test]
fn regression_a_failed_event_does_not_drop_later_ones() {
    let mut donor = World::new(config(Scheduler::RoundRobin));
    donor.connect("ssh", 22);
    let now = donor.now;
    let pattern = donor.core.steering().flows(now).unwrap().remove(0);
    let events = |number: u64| {
        let app = AppId { name: format!("app{number}"), ..pattern.app.clone() };
        let row = FlowRow { id: FlowId(number), app: app.clone(), remote: (SERVER, 22), rx: ByteCount::new(100), ..pattern.clone() };
        [SteeringEvent::NewApp { app, process: 1, cgroup: 1, class: Class::Unclassified }, SteeringEvent::Ended(Box::new(row))]
    };
    let mut failed = 0;
    for every in 2..20 {
        let names = Box::new(FakeNames(BTreeMap::new()));
        let mut core = Core::new(FakeSteering::chaos(every), names, config(Scheduler::RoundRobin), Time::ZERO).unwrap();
        // Links are known even if the update of the backend failed.
        let _ = core.on_network(now, network(&donor.devices));
        failed += u32::from(core.on_events(now, (1..=10).flat_map(events).collect()).is_err());
        let moved: u64 = core.links(now).iter().map(|link| link.rx_bytes.unwrap()).sum();
        assert_eq!(moved, 1000, "every {every}th call fails");
    }
    assert!(failed > 0, "no call failed, so the test tested nothing");
}
