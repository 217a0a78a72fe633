//! A flood of made-up Ethernet addresses beside living neighbours.

use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{DELAY, RADIOS, devices, pings};
use crate::adhoc::{AdhocHost, adhoc_host};
use crate::bench::footprint::resident;
use crate::bench::report::Report;
use crate::bench::{Settings, progress};
use crate::flood::flood_addresses;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps};

/// Made-up addresses a second.
const RATE: u32 = 10_000;

pub(super) fn flood(settings: &Settings, report: &mut Report) -> Result<()> {
    let lab =
        RADIOS[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name).rate(mbps(200)).delay(DELAY))).start()?;
    let mut devices = devices(settings, &lab, "")?;
    let pid = devices[1].process().id();
    let (before, _) = resident(pid)?;
    let seconds: u32 = if settings.quick { 5 } else { 60 };
    let count = (seconds * 10) as usize;
    let span = Duration::from_secs(seconds.into());
    let (sent, answers) = thread::scope(|scope| {
        let flooding = scope.spawn(|| adhoc_host(&lab, 0).run(|| flood_addresses(RADIOS[0], RATE * seconds, span)));
        let answers = pings(&lab, AdhocHost::ADDRESSES[1], count, "0.1");
        (flooding.join().expect("the thread does not panic"), answers)
    });
    let (sent, lost, after) = (sent??, count - answers?.len(), resident(pid)?.0);
    let pairs = devices[1].neighbours()?;
    let up = pairs.iter().filter(|row| row["state"] == "up" && row["braid"] == true).count();
    progress(&format!(
        "flood: {sent} frames, {lost} of {count} pings lost, {up} pairs up of {}, {before:.1} MB before, {after:.1} after",
        pairs.len()
    ));
    report.table(
        format!("A flood of {RATE} made-up addresses a second for {seconds} s over one of two radios:"),
        "what | measured",
        vec![
            vec!["frames sent".to_owned(), sent.to_string()],
            vec!["pings of the living neighbour that were lost".to_owned(), format!("{lost} of {count}")],
            vec!["its radios that are up afterwards".to_owned(), format!("{up} of 2")],
            vec!["pairs in the database afterwards".to_owned(), pairs.len().to_string()],
            vec!["resident memory before and after".to_owned(), format!("{before:.1} MB, {after:.1} MB")],
        ],
    );
    report.aim("a flood: the living neighbour stays over both radios", format!("{up} of 2"), up == 2);
    report.aim("a flood: memory grows by less than 20 MB", format!("{:.1} MB", after - before), after - before < 20.0);
    report.measured(
        json!({ "flood": { "sent": sent, "pings": count, "lost": lost, "up": up, "pairs": pairs.len(), "mb": [before, after] } }),
    );
    Ok(())
}
