//! `braid log`, `braid history` and `braid gains`: data that the daemon recorded.

use std::io::{self, Write};
use std::ops::ControlFlow;

use braid_api::{AppHistory, AppSample, AppsSample, Compared, Gains, History, LinkSample, List, Note, Sample};
use braid_model::{ByteCount, Rate};

use crate::cli;
use crate::client;
use crate::print;
use crate::table::{Page, Tone, UNKNOWN, Zone, age, cell, colour_wanted, joules, micros, numbers, percent, rate, words};

/// `braid log`.
pub(crate) fn log(log: &cli::Log) -> anyhow::Result<()> {
    let (socket, zone) = (&log.query.daemon.socket, Zone::of(log.times.utc));
    let mut notes: Vec<Note> = client::list(socket, "/v1/notes")?;
    let last = notes.last().map_or(0, |note| note.id);
    notes.drain(..notes.len().saturating_sub(log.lines));
    print(log.query.json, &List::<Note>::of(notes), |page, notes| match notes.items.as_slice() {
        [] if !log.follow => page.line("nothing has happened yet"),
        notes => notes.iter().try_for_each(|note| show_note(page, note, &zone)),
    })?;
    if log.follow { follow(log, last, &zone) } else { Ok(()) }
}

/// Prints the notes that follow the note with id `last`.
fn follow(log: &cli::Log, mut last: u64, zone: &Zone) -> anyhow::Result<()> {
    let mut written = Ok(());
    client::listen(&log.query.daemon.socket, "/v1/events", |name, data| {
        let note = serde_json::from_str::<Note>(data).ok().filter(|note| name == "note" && note.id > last);
        let Some(note) = note else { return ControlFlow::Continue(()) };
        last = note.id;
        let mut text = Vec::new();
        written = show_note(&mut Page::new(&mut text, colour_wanted()), &note, zone).and_then(|()| io::stdout().write_all(&text));
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(written?)
}

fn show_note(page: &mut Page<'_>, note: &Note, zone: &Zone) -> io::Result<()> {
    let tone = if note.level == "warning" { Tone::Doubtful } else { Tone::Plain };
    page.toned(tone, &format!("{}  {}", zone.moment(note.at_ms).as_deref().unwrap_or(UNKNOWN), note.text))
}

/// `braid history`.
pub(crate) fn history(history: &cli::History) -> anyhow::Result<()> {
    let (socket, step, zone) = (&history.query.daemon.socket, history.resolution.name(), Zone::of(history.times.utc));
    if !history.apps {
        let facts: History = client::read(socket, &format!("/v1/history?resolution={step}"))?;
        return Ok(print(history.query.json, &facts, |page, facts| show_links(page, facts, history.all, &zone))?);
    }
    let only: String = history.app.iter().flat_map(|name| name.bytes()).map(|byte| format!("%{byte:02x}")).collect();
    let only = if history.app.is_some() { format!("&application={only}") } else { String::new() };
    let facts: AppHistory = client::read(socket, &format!("/v1/history/apps?resolution={step}{only}"))?;
    Ok(print(history.query.json, &facts, |page, facts| show_apps(page, facts, history.app.is_some(), &zone))?)
}

const NOTHING_YET: &str = "nothing has been measured yet";

/// Omits samples in which no link transferred data, unless `all` is set.
fn show_links(page: &mut Page<'_>, history: &History, all: bool, zone: &Zone) -> io::Result<()> {
    let columns = [words("WHEN"), words("LINK"), numbers("DOWN"), numbers("UP"), numbers("RTT"), numbers("LOSS"), numbers("POWER")];
    let row = |sample: &Sample, link: &LinkSample| {
        vec![
            cell(zone.moment(sample.at_ms)),
            cell(Some(&link.name)),
            cell(rate(link.rx_bps)),
            cell(rate(link.tx_bps)),
            cell(micros(link.rtt_us)),
            cell(percent(link.loss)),
            cell(link.power_w.map(|watts| format!("{watts:.2} W"))),
        ]
    };
    let moved = |sample: &&Sample| all || sample.links.iter().any(|link| link.rx_bps.unwrap_or(0) + link.tx_bps.unwrap_or(0) > 0);
    let listed: Vec<&Sample> = history.samples.iter().filter(moved).collect();
    let rows: Vec<_> = listed.iter().flat_map(|sample| sample.links.iter().map(|link| row(sample, link))).collect();
    let quiet = history.samples.len() - listed.len();
    page.table(&columns, &rows, if quiet > 0 { "no link transferred data in that time" } else { NOTHING_YET })?;
    match quiet {
        0 => Ok(()),
        quiet => page.line(format!("({quiet} of {} samples without traffic are omitted: --all shows them)", history.samples.len())),
    }
}

fn show_apps(page: &mut Page<'_>, history: &AppHistory, one: bool, zone: &Zone) -> io::Result<()> {
    let columns = [words("WHEN"), words("APPLICATION"), numbers("DOWN"), numbers("UP"), numbers("FLOWS")];
    let row = |sample: &AppsSample, app: &AppSample| {
        let (rx, tx) = (Rate::from_bps(app.rx_bps), Rate::from_bps(app.tx_bps));
        vec![cell(zone.moment(sample.at_ms)), cell(Some(&app.application)), cell(Some(rx)), cell(Some(tx)), cell(Some(app.flows))]
    };
    let rest = |sample: &AppsSample| {
        let (rx, tx) = (Rate::from_bps(sample.rest_rx_bps), Rate::from_bps(sample.rest_tx_bps));
        let more = !one && sample.rest_rx_bps + sample.rest_tx_bps > 0;
        more.then(|| vec![cell(zone.moment(sample.at_ms)), cell(Some("(others)")), cell(Some(rx)), cell(Some(tx)), cell(None::<u64>)])
    };
    let rows = history.samples.iter().flat_map(|sample| sample.apps.iter().map(|app| row(sample, app)).chain(rest(sample)));
    let nothing = if history.samples.is_empty() { NOTHING_YET } else { "no application transferred data in that time" };
    page.table(&columns, &rows.collect::<Vec<_>>(), nothing)
}

/// `braid gains`.
pub(crate) fn gains(gains: &cli::Gains) -> anyhow::Result<()> {
    let facts: Gains = client::read(&gains.query.daemon.socket, &format!("/v1/gains?days={}", gains.days))?;
    Ok(print(gains.query.json, &facts, show_gains)?)
}

fn show_gains(page: &mut Page<'_>, gains: &Gains) -> io::Result<()> {
    let days = if gains.days == 1 { "today".to_owned() } else { format!("the last {} days", gains.days) };
    page.toned(Tone::Strong, &format!("What Braid gained, {days} (energy, money and outages are estimates)"))?;
    page.line(format!("flows continued over another link     {}", gains.flows_moved))?;
    page.line(format!("flows ended to restart elsewhere      {}", gains.flows_ended))?;
    let bridged = age(Some(gains.outage_bridged_s.saturating_mul(1000))).unwrap_or_default();
    page.line(format!("outages of the default link bridged   {bridged}"))?;
    let compared = |what: &str, sums: Compared, show: fn(Option<f64>) -> Option<String>| {
        let known = show(sums.actual).zip(show(sums.only_one));
        known.map(|(actual, only)| format!("{what:<38}{actual}, over the default link alone {only}"))
    };
    let money = gains.money.and_then(|money| compared("money", money, |sum| sum.map(|sum| format!("{sum:.2}"))));
    for line in [compared("energy for transfers", gains.energy_j, joules), money].into_iter().flatten() {
        page.line(line)?;
    }
    page.line("")?;
    let row = |link: &braid_api::LinkGain| {
        vec![cell(Some(&link.name)), cell(Some(ByteCount::new(link.rx_bytes))), cell(Some(ByteCount::new(link.tx_bytes)))]
    };
    let columns = [words("LINK"), numbers("RECEIVED"), numbers("SENT")];
    page.table(&columns, &gains.links.iter().map(row).collect::<Vec<_>>(), "no link has transferred data yet")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn samples_without_traffic_are_counted_but_not_listed() {
        let sample = |at_ms: u64, rx_bps: u64| json!({"at_ms": at_ms, "links": [{"name": "wlan0", "rx_bps": rx_bps, "tx_bps": null}]});
        let shown = |samples: serde_json::Value, all| {
            let history = serde_json::from_value(json!({"resolution_ms": 1000, "samples": samples})).unwrap();
            let mut out = Vec::new();
            show_links(&mut Page::new(&mut out, false), &history, all, &Zone::of(true)).unwrap();
            String::from_utf8(out).unwrap()
        };
        let some = json!([sample(0, 0), sample(1000, 8_000), sample(2000, 0)]);
        let text = shown(some.clone(), false);
        assert!(text.lines().count() == 3 && text.contains("00:00:01  wlan0") && text.ends_with("--all shows them)\n"), "{text}");
        assert_eq!(shown(some, true).lines().count(), 4);
        assert!(shown(json!([sample(0, 0)]), false).starts_with("no link transferred data in that time\n(1 of 1 samples"));
        assert_eq!(shown(json!([]), false), "nothing has been measured yet\n");
    }
}
