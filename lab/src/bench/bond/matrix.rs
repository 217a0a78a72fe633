//! Pairs of links that differ in rate, RTT, buffer and loss: the bond over both compared with the bond over the better one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_model::ByteCount;
use serde_json::json;

use super::origin::{Origin, TcpVariant};
use super::{Bonded, Settings};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};

/// Mbit/s, RTT in milliseconds, queue in milliseconds, and the share that is lost.
type LinkParams = (u64, u64, u64, f64);

const NAMES: [&str; 2] = ["link0", "link1"];
/// Ports of the servers whose flows may use both links, the first only, and the second only.
const PORTS: [u16; 3] = [8080, 8081, 8082];
/// Aim for the rate of both links, as a multiple of the better link's rate.
const AIM: f64 = 0.97;

const PAIRS: [[LinkParams; 2]; 18] = [
    [(20, 20, 150, 0.0), (20, 20, 150, 0.0)],
    [(20, 20, 150, 0.0), (10, 20, 150, 0.0)],
    [(20, 20, 150, 0.0), (4, 20, 150, 0.0)],
    [(20, 20, 150, 0.0), (2, 20, 150, 0.0)],
    [(20, 20, 150, 0.0), (1, 20, 150, 0.0)],
    [(20, 20, 150, 0.0), (20, 100, 150, 0.0)],
    [(20, 10, 150, 0.0), (20, 200, 150, 0.0)],
    [(20, 20, 150, 0.0), (4, 100, 150, 0.0)],
    [(20, 10, 150, 0.0), (1, 200, 150, 0.0)],
    [(20, 200, 150, 0.0), (1, 10, 150, 0.0)],
    [(20, 100, 150, 0.0), (5, 10, 150, 0.0)],
    [(20, 20, 20, 0.0), (5, 80, 20, 0.0)],
    [(20, 20, 150, 0.0), (5, 20, 2000, 0.0)],
    [(20, 20, 20, 0.0), (1, 20, 2000, 0.0)],
    [(20, 20, 150, 0.0), (10, 60, 150, 0.03)],
    [(20, 20, 150, 0.03), (10, 60, 150, 0.0)],
    [(20, 20, 150, 0.01), (2, 200, 150, 0.03)],
    [(10, 60, 20, 0.03), (10, 200, 1000, 0.01)],
];

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-matrix",
        "Two links compared with the better one",
        "One transfer over two links through the relay, cut off after some seconds, compared with the same transfer over either link alone: the \
         same bond, with a rule that limits the flow to one link. Figures are Mbit/s of payload from the start, including the time to learn the \
         links: each transfer starts with a new relay and daemon. In parentheses: RTT, then the capacity of the link's queue in milliseconds; loss \
         is random, in each direction.",
    );
    let span = Duration::from_secs(if settings.quick { 2 } else { 6 });
    let step = if settings.quick { 5 } else { 1 };
    let caption = format!("Transfers of {} s:", span.as_secs());
    for pair in PAIRS.iter().step_by(step) {
        let ways = one(settings, pair, span).with_context(|| title(pair))?;
        for (direction, rates) in ["download", "upload"].into_iter().zip(ways) {
            let best = rates[1].max(rates[2]);
            let ratio = rates[0] / best;
            let row = [title(pair), direction.to_owned(), format!("{:.2}", rates[0]), format!("{best:.2}"), format!("{ratio:.3}")];
            progress(&row.join(", "));
            report.row(&caption, "links | | both | the better one | both / better", row.to_vec());
            report.aim(format!("{}, {direction}: {AIM} of the better link", title(pair)), format!("{ratio:.3}"), ratio >= AIM);
            report.measured(json!({ "links": title(pair), "direction": direction, "both_mbps": rates[0], "first_mbps": rates[1], "second_mbps": rates[2] }));
        }
        settings.keep(&report)?;
    }
    Ok(report)
}

fn title(pair: &[LinkParams; 2]) -> String {
    let link = |(rate, trip, queue, loss): &LinkParams| {
        let loss = if *loss > 0.0 { format!(", {:.0} %", loss * 100.0) } else { String::new() };
        format!("{rate} Mbit/s ({trip} ms, {queue} ms{loss})")
    };
    pair.iter().map(link).collect::<Vec<_>>().join(" + ")
}

/// Mbit/s down and up: over both links, the first and the second.
fn one(settings: &Settings, pair: &[LinkParams; 2], span: Duration) -> Result<[[f64; 3]; 2]> {
    let link = |((rate, trip, queue, loss), name): (&LinkParams, &str)| {
        let queue = ByteCount::new(mbps(*rate).bytes_per_second() * queue / 1000);
        LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*trip) / 2).queue(queue).loss(*loss)
    };
    let lab = pair.iter().zip(NAMES).map(link).fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let origins = PORTS.map(|port| Origin::start(&lab, 10, port, TcpVariant::PLAIN));
    let kept = NAMES.iter().zip(&PORTS[1..]).map(|(name, port)| rule(*port, &format!("links = [\"{name}\"]\n")));
    let rules: String = [rule(PORTS[0], "")].into_iter().chain(kept).collect();
    let mut rates = [[0.0; 3]; 2];
    for (place, origin) in origins.into_iter().enumerate() {
        let origin = origin?;
        // Each transfer starts without estimates of the links.
        let _bonded = Bonded::with_rules(settings, &lab, &rules)?;
        [rates[0][place], rates[1][place]] = lab.client().run(|| -> Result<[f64; 2]> {
            let (begin, mut got) = (Instant::now(), 0);
            origin.get(TcpVariant::PLAIN, ByteCount::new(1 << 40), span, |count| got += count as u64)?;
            let down = ByteCount::new(got).per(begin.elapsed());
            let (sent, took) = origin.put(TcpVariant::PLAIN, ByteCount::new(1 << 40), span)?;
            Ok([down, sent.per(took)].map(|rate| rate.bps() as f64 / 1e6))
        })??;
    }
    Ok(rates)
}

fn rule(port: u16, more: &str) -> String {
    format!("[[app]]\nmatch = {{ port = {port} }}\ncarry = \"bond\"\n{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pairs_differ_as_described() {
        let most = |of: fn(&LinkParams) -> f64| {
            let ratio = |pair: &[LinkParams; 2]| (of(&pair[0]) / of(&pair[1])).max(of(&pair[1]) / of(&pair[0]));
            PAIRS.iter().map(ratio).fold(0.0, f64::max)
        };
        assert_eq!((most(|link| link.0 as f64), most(|link| link.1 as f64), most(|link| link.2 as f64)), (20.0, 20.0, 100.0));
        assert!(PAIRS.len() >= 16 && PAIRS.iter().flatten().any(|link| link.3 == 0.03));
        assert_eq!(title(&PAIRS[14]), "20 Mbit/s (20 ms, 150 ms) + 10 Mbit/s (60 ms, 150 ms, 3 %)");
    }
}
