//! What the controller promises, over real QUIC connections in virtual time.

mod support;

use std::time::Duration;

use braid_model::Time;
use support::{Controllers, Source, World, bottleneck};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn seconds(count: u64) -> Time {
    Time::from_millis(count * 1000)
}

#[test]
fn alone_it_fills_the_link_and_keeps_the_queue_short() {
    let mut world = World::new(bottleneck(5.0, ms(40), 1_000_000), 1);
    let flow = world.add(&Controllers::radio(), Source::Bulk, Time::ZERO);
    world.run_until(seconds(15));
    assert!(world.goodput(flow, seconds(2), seconds(15)) > 0.92 * 5e6);
    assert!(world.wait(None, 0.5, seconds(2), seconds(15)) <= ms(5));
}
