//! Duration of a decision of the pure schedulers.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use braid_decide::connection::{LoadTable, Mode, Request};
use braid_decide::midrr::{Flags, Midrr};
use braid_decide::operetta::{self, Interface, New, NewKind, Target, Utility};
use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Power, Rate};
use braid_netem::Random;
use serde_json::json;

use super::Settings;
use super::report::Report;
use super::stats::{median, quantile};

/// Decisions that are timed together: a clock takes longer to read than a decision to make.
const BATCH: u32 = 64;

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "schedulers",
        "The schedulers alone",
        "Each figure is nanoseconds per decision over batches of 64 consecutive decisions, on random instances; median and 99th percentile of the \
         batches. miDRR: every flow always has a packet of 64 to 1,500 bytes, may use a random half of the links and has a weight of 1 to 10; \
         links request packets in random order; a decision is next() and the announcement of the next head packet. OPERETTA: 100 streams, half of \
         them packet-oriented, summed up and solved for a new connection. Connection rule: maximum throughput, choice and reservation.",
    );
    let batches = if settings.quick { 200 } else { 20_000 };
    let mut raw = json!({});
    let mut rows = Vec::new();
    for (flags, name) in [(Flags::Bit, "service flag (thesis)"), (Flags::COUNTED, "service counter")] {
        for (links, flows) in [(16, 10), (16, 100), (16, 1_000), (16, 10_000), (2, 1_000), (4, 1_000), (8, 1_000), (32, 1_000)] {
            let times = midrr(flags, links, flows, batches)?;
            let middle = median(&times);
            rows.push(vec![name.to_owned(), links.to_string(), flows.to_string(), ns(middle), ns(quantile(&times, 0.99))]);
            raw[format!("midrr {name}, {links} links, {flows} flows")] = json!(middle);
            if (links, flows) == (16, 1_000) {
                report.aim(format!("miDRR ({name}): median under 50 ns at 16 links and 1,000 flows"), ns(middle), middle < 50.0);
            }
        }
    }
    report.table("miDRR:", "variant | links | flows | median | 99th percentile", rows);
    let mut rows = Vec::new();
    for links in [2, 4, 8, 16] {
        let times = [operetta(links, batches / 10)?, connection(links, batches)];
        let middles = times.each_ref().map(|times| median(times));
        rows.push(vec![links.to_string(), ns(middles[0]), ns(quantile(&times[0], 0.99)), ns(middles[1]), ns(quantile(&times[1], 0.99))]);
        raw[format!("operetta, {links} links")] = json!(middles[0]);
        raw[format!("connection rule, {links} links")] = json!(middles[1]);
        if links == 8 {
            report.aim("OPERETTA under 1 µs at 8 links and 100 streams", ns(middles[0]), middles[0] < 1000.0);
            report.aim("the connection rule under 100 ns at 8 links", ns(middles[1]), middles[1] < 100.0);
        }
    }
    report.table("For a new connection:", "links | OPERETTA | 99th percentile | connection rule | 99th percentile", rows);
    report.raw = raw;
    Ok(report)
}

/// Nanoseconds of one decision, batch by batch; a tenth of the batches goes before.
fn time(batches: usize, mut decide: impl FnMut()) -> Vec<f64> {
    let mut times = Vec::with_capacity(batches);
    for batch in 0..batches + batches / 10 {
        let begin = Instant::now();
        (0..BATCH).for_each(|_| decide());
        let took = begin.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH);
        if batch >= batches / 10 {
            times.push(took);
        }
    }
    times
}

fn midrr(flags: Flags, links: usize, flows: usize, batches: usize) -> Result<Vec<f64>> {
    let mut random = Random::new(1);
    let mut scheduler = Midrr::new(links, ByteCount::new(1500), flags)?;
    let mut packet = || Some(ByteCount::new(64 + random.up_to(1436)));
    let mut choice = Random::new(2);
    for flow in 0..flows {
        let mut allowed: LinkSet = (0..links).filter(|_| choice.up_to(1) == 1).collect();
        allowed.0 |= 1 << (flow % links);
        let key = scheduler.add_flow((1 + choice.up_to(9)) as f64, allowed)?;
        scheduler.set_head(key, packet())?;
    }
    let asks: Vec<usize> = (0..4096).map(|_| choice.up_to(links as u64 - 1) as usize).collect();
    let heads: Vec<Option<ByteCount>> = (0..4096).map(|_| packet()).collect();
    let mut turn = 0;
    let mut idle = 0;
    let times = time(batches, || {
        turn = (turn + 1) % asks.len();
        match scheduler.next(asks[turn]) {
            // The flow is there: it was told.
            Some(grant) => drop(scheduler.set_head(grant.flow, heads[turn])),
            None => idle += 1,
        }
    });
    anyhow::ensure!(idle == 0 || flows < links, "{idle} decisions found no flow");
    Ok(times)
}

fn operetta(links: usize, batches: usize) -> Result<Vec<f64>> {
    let mut random = Random::new(3);
    let interface = |_| Interface {
        rate: Rate::from_bps(1_000_000 + random.up_to(99_000_000)),
        power: Power::from_milliwatts(50.0 + random.up_to(2_000) as f64),
    };
    let interfaces: Vec<Interface> = (0..links).map(interface).collect();
    let mut random = Random::new(4);
    let stream = |number: usize| {
        let load = ByteCount::new(10_000 + random.up_to(10_000_000));
        let link = random.up_to(links as u64 - 1) as usize;
        operetta::Stream { load, kind: if number.is_multiple_of(2) { operetta::Kind::Packet } else { operetta::Kind::Connection(link) } }
    };
    let streams: Vec<_> = (0..100).map(stream).collect();
    let allowed = LinkSet((1 << links) - 1);
    let new = New { load: ByteCount::new(1_000_000), kind: NewKind::Connection, allowed };
    let target = Target::Utility(Utility::new(0.7).context("0.7 is a utility")?);
    operetta::schedule(&interfaces, &streams, new, target)?;
    Ok(time(batches, || {
        let _ = black_box(operetta::schedule(black_box(&interfaces), black_box(&streams), new, target));
    }))
}

fn connection(links: usize, batches: usize) -> Vec<f64> {
    let mut load_table = LoadTable::default();
    let mut random = Random::new(5);
    for link_load in load_table.loads.iter_mut().take(links) {
        let rate = 125_000 + random.up_to(12_500_000);
        (link_load.rate, link_load.load) = (PerDirection::both(rate), PerDirection::both(random.up_to(10_000_000)));
    }
    let request = Request { allowed: LinkSet((1 << links) - 1), direction: Direction::Down, demand: ByteCount::new(100_000) };
    time(batches, || {
        // What is reserved ends at once: loads stay what they are.
        if let Some(slot) = black_box(load_table.choose(Mode::CheapestInTime { target: None }, black_box(&request))) {
            load_table.loads[slot].load.down -= 100_000;
        }
    })
}

fn ns(nanoseconds: f64) -> String {
    format!("{nanoseconds:.0} ns")
}
