//! Figure 2.7: five downloads over two links, beside those over each link alone.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{CONFIG, Carry, OWN, Settings, Up, ensure_none_missed, progress};
use crate::bench::gateway::{DOWNLOADS, PAYLOAD, RATES};
use crate::bench::overhead::interval;
use crate::bench::report::Report;
use crate::bench::stats::Mean;
use crate::bench::whole::{WARM_UP, shown, warm_up};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::responder::Responder;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload;
use braid_model::ByteCount;

/// Names of the links.
pub(super) const LINKS: [&str; 2] = ["wlan0", "lte0"];
/// Aim for the share of the sum.
const AIM: f64 = 0.95;

/// The lab of this figure and the next.
pub(super) fn two_links() -> Result<Lab> {
    let links = LINKS.iter().zip(RATES).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(10)));
    links.fold(Lab::builder(), |builder, link| builder.link(link)).start()
}

/// Mbit/s of one round: over each link alone, and by each [`Carry`] over both.
#[derive(Debug, Clone, Copy)]
struct Round {
    alone: [f64; 2],
    both: [f64; 2],
}

pub(super) fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let (lab, relayed) = (two_links()?, two_links()?);
    let (web, relayed_web) = (Web::start(&lab)?, Web::start(&relayed)?);
    let _responders = [Responder::start(&lab)?, Responder::start(&relayed)?];
    progress(&format!("two links: learnt {}", shown(&warm_up(&lab, &web, &settings.braid, WARM_UP)?)));
    let bonded = Up::start(settings, &relayed, Carry::Bonded)?;
    let mut rounds = Vec::new();
    for _ in 0..if settings.quick { 1 } else { 5 } {
        let mut round = Round { alone: [0.0; 2], both: [0.0; 2] };
        for (link, alone) in round.alone.iter_mut().enumerate() {
            let rule = format!("[[app]]\nmatch = {{ name = \"curl\" }}\nlinks = [\"{}\"]\n{CONFIG}", LINKS[link]);
            let _daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &rule)?;
            *alone = five(settings, &lab, &web, false)?;
        }
        {
            let _up = Up::start(settings, &lab, Carry::Direct)?;
            round.both[0] = five(settings, &lab, &web, true)?;
        }
        round.both[1] = five(settings, &relayed, &relayed_web, true)?;
        progress(&format!("two links: {round:?} Mbit/s"));
        rounds.push(round);
    }
    drop(bonded);
    ensure_none_missed(&lab, 0..LINKS.len())?;
    ensure_none_missed(&relayed, 0..LINKS.len())?;
    tell(&rounds, report);
    let raw = rounds.iter().map(|it| json!({ "alone_mbps": it.alone, "direct_mbps": it.both[0], "bonded_mbps": it.both[1] }));
    report.measured(json!({ "two_links": raw.collect::<Vec<_>>() }));
    Ok(())
}

/// Mbit/s of five downloads, through the virtual interface or not.
fn five(settings: &Settings, lab: &Lab, web: &Web, bound: bool) -> Result<f64> {
    let (count, span) = if settings.quick { (DOWNLOADS.0, DOWNLOADS.1 / 3) } else { DOWNLOADS };
    let downloads = workload::together(count, ByteCount::new(1_000_000_000));
    let records = workload::run_until(web, &downloads, span, |curl| {
        let mut command = lab.client().command(curl)?;
        if bound {
            command.args(["--interface", &OWN.to_string()]);
        }
        Ok(command)
    })?;
    let connected = records.iter().filter(|record| record.local.is_some()).count();
    ensure!(connected == count, "only {connected} of {count} downloads got a connection");
    Ok(workload::summarise(&records).goodput.bps() as f64 / 1e6)
}

fn tell(rounds: &[Round], report: &mut Report) {
    let row = |what: String, values: Vec<f64>, of_alone: Option<Vec<f64>>, capacity: u64| {
        let of_links: Vec<_> = values.iter().map(|value| value / (capacity as f64 * PAYLOAD)).collect();
        let of_alone = of_alone.map_or(String::new(), |shares| interval(&Mean::of(&shares)));
        vec![what, format!("{:.2}", Mean::of(&values).mean), of_alone, interval(&Mean::of(&of_links))]
    };
    let mut rows = Vec::new();
    for (link, (name, rate)) in LINKS.iter().zip(RATES).enumerate() {
        rows.push(row(format!("{name} alone"), rounds.iter().map(|it| it.alone[link]).collect(), None, rate));
    }
    for (number, carry) in Carry::ALL.into_iter().enumerate() {
        let shares: Vec<_> = rounds.iter().map(|it| it.both[number] / it.alone.iter().sum::<f64>()).collect();
        let values = rounds.iter().map(|it| it.both[number]).collect();
        let title = format!("both through the virtual interface, {}", carry.name());
        rows.push(row(title.clone(), values, Some(shares.clone()), RATES.iter().sum()));
        let mean = Mean::of(&shares);
        report.aim(format!("five downloads, {title}: {AIM} of the sum of the two alone"), interval(&mean), mean.mean >= AIM);
    }
    let head = "five downloads | Mbit/s | of the sum of the two alone | of the links' payload";
    report.table(format!("Two links, {} rounds:", rounds.len()), head, rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_what_the_links_carry_alone_are_judged() {
        let mut report = Report::new("virtual", "", "");
        tell(&[Round { alone: [19.0, 9.0], both: [27.0, 26.0] }], &mut report);
        assert_eq!(report.aims.iter().map(|aim| aim.met).collect::<Vec<_>>(), [true, false], "{report:?}");
        assert_eq!(report.tables[0].rows[2][1..3], ["27.00", "0.964 ± 0.000"]);
    }
}
