//! How fast the simulator is: `cargo run --release -p braid-sim --example speed`.

#![allow(clippy::disallowed_methods, reason = "an example, not the pure crate, reads the clock")]

use std::time::{Duration, Instant};

use braid_model::{Bytes, Rate};
use braid_sim::{Arrivals, Class, LinkSpec, Scenario, ServerLink, ServerSpec, Size, simulate};

fn main() -> Result<(), braid_sim::ScenarioError> {
    let ms = Duration::from_millis;
    let links = vec![
        LinkSpec::symmetric("wifi", Rate::from_mbps(300), ms(20)),
        LinkSpec::symmetric("lte", Rate::from_mbps(60), ms(60)).with_loss(0.0005),
        LinkSpec::symmetric("wire", Rate::from_mbps(600), ms(10)),
    ];
    let profile = braid_netem::Profile { rate: Rate::from_mbps(900).into(), ..braid_netem::Profile::default() };
    let web = Class::downloads("web", Arrivals::Poisson { per_second: 200.0 }, Size::Exponential(Bytes::new(100_000)));
    let mut workload = vec![web];
    workload.extend((0..6).map(|flow| Class::downloads(&format!("bulk {flow}"), Arrivals::once(), Size::Endless)));
    let mut scenario = Scenario { links, workload, ..Scenario::default() };
    for shared in [false, true] {
        let link = shared.then(|| ServerLink { down: profile.clone(), up: profile.clone() });
        scenario.servers = vec![ServerSpec { link }];
        let begin = Instant::now();
        let outcome = simulate(&scenario)?;
        let took = begin.elapsed().as_secs_f64();
        let counters = outcome.counters;
        println!(
            "server link {shared}: {} of goodput, {:.2} M packets and {:.2} M events in {took:.2} s: {:.2} M packets/s, {:.2} M events/s",
            outcome.goodput(),
            counters.packets as f64 / 1e6,
            counters.events as f64 / 1e6,
            counters.packets as f64 / 1e6 / took,
            counters.events as f64 / 1e6 / took,
        );
    }
    Ok(())
}
