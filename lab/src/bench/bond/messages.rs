//! Small packets: over several lossy links at once, and urgent ones during a bulk flow.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use serde_json::json;

use super::origin::{Origin, TcpVariant};
use super::{Bonded, Settings};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};

/// Mbit/s and RTT in milliseconds of the links that lose packets.
const LOSSY: [(u64, u64); 3] = [(20, 10), (10, 60), (10, 30)];
const LOSS: f64 = 0.03;
/// A packet's payload in bytes, and how many leave in a second: 1 Mbit/s.
const SIZE: usize = 100;
const A_SECOND: u64 = 1250;
/// How many are sent, with each number of copies, and which part may be missing.
const SENT: usize = 100_000;
const CASES: [(u8, f64); 2] = [(2, 0.0015), (3, 0.0001)];
/// Of what the packets leave, a bulk flow beside them is to have this part.
const BULK: f64 = 0.8;
/// The link on which urgent packets meet a bulk flow.
const SLOW: (u64, u64) = (5, 20);
/// How often an urgent packet leaves, and what it may wait for the bulk flow: median and 99th percentile, in seconds.
const EVERY: Duration = ms(20);
const WAITS: [(&str, f64, f64); 2] = [("median", 0.5, 0.005), ("99th percentile", 0.99, 0.020)];
/// Numbered packets, those that are echoed, and bulk flows.
const NUMBERED: u16 = 4000;
const ECHOED: u16 = 4001;
const BULKY: u16 = 8080;
/// Packets that have not arrived after this time are lost.
const LATE: Duration = Duration::from_secs(2);

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-messages",
        "Small packets",
        "Through the relay, classified as real-time by a rule. Over several links: packets of 100 bytes, 1 Mbit/s of payload in total, from the \
         client to a server, with `carry = \"duplicate\"` and two or three `copies`, over links of 20, 10 and 10 Mbit/s with RTTs of 10, 60 and 30 \
         ms that lose 3 % of all frames at random, together with one bulk upload. The upload's share is its payload as a part of the capacity that \
         loss and packets leave (a full bond packet has about 0.95 payload). Urgent: a packet every 20 ms on one link of 5 Mbit/s with an RTT of \
         20 ms, echoed by the server: alone, during an endless download and during an endless upload.",
    );
    let count = if settings.quick { SENT / 20 } else { SENT };
    for (copies, most) in CASES {
        let Found { missing, bulk } = several(settings, copies, count)?;
        progress(&format!("{copies} copies: {:.4} % missing, bulk {bulk:.3}", missing * 100.0));
        let row = [copies.to_string(), count.to_string(), format!("{:.4} %", missing * 100.0), format!("{bulk:.3}")];
        report.row("Over several links:", "copies | packets | missing | bulk flow, of the rest", row.to_vec());
        report.aim(format!("{copies} copies: under {} % missing", most * 100.0), format!("{:.4} %", missing * 100.0), missing < most);
        report.aim(format!("{copies} copies: a bulk flow keeps {BULK} of the rest"), format!("{bulk:.3}"), bulk > BULK);
        report.measured(json!({ "copies": copies, "packets": count, "missing": missing, "bulk": bulk }));
        settings.keep(&report)?;
    }
    let span = Duration::from_secs(if settings.quick { 10 } else { 60 });
    let found = urgent(settings, span)?;
    let names = ["alone", "beside a download", "beside an upload"];
    for (name, trips) in names.into_iter().zip(&found) {
        let cells = WAITS.map(|(_, part, _)| format!("{:.1} ms", quantile(trips, part) * 1e3));
        progress(&format!("{name}: {}", cells.join(", ")));
        let row = [name.to_owned(), trips.len().to_string()].into_iter().chain(cells).collect();
        report.row("Round trips of urgent packets:", "urgent packets | came back | median | 99th percentile", row);
    }
    for (beside, trips) in names.into_iter().zip(&found).skip(1) {
        for (name, part, most) in WAITS {
            let extra = quantile(trips, part) - quantile(&found[0], part);
            let aim = format!("urgent packets {beside}: at most {:.0} ms more ({name})", most * 1e3);
            report.aim(aim, format!("{:.1} ms", extra * 1e3), extra <= most);
        }
    }
    report.measured(json!({ "urgent_rtt_s": found.each_ref().map(|trips| summary(trips)) }));
    Ok(report)
}

/// Results of packets over several links.
struct Found {
    missing: f64,
    /// The bulk flow's part of what the packets left.
    bulk: f64,
}

fn several(settings: &Settings, copies: u8, count: usize) -> Result<Found> {
    let links = LOSSY.iter().enumerate();
    let link =
        |(at, (rate, trip)): (usize, &(u64, u64))| LinkSpec::new(&format!("link{at}")).rate(mbps(*rate)).delay(ms(*trip) / 2).loss(LOSS);
    let lab = links.map(link).fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let origin = Origin::start(&lab, 10, BULKY, TcpVariant::PLAIN)?;
    let more = format!("class = \"real-time\"\ncarry = \"duplicate\"\ncopies = {copies}\n");
    let _bonded = Bonded::with_rules(settings, &lab, &(rule(NUMBERED, &more) + &rule(BULKY, "carry = \"bond\"\n")))?;
    let (sink, to) = served(&lab, NUMBERED)?;
    let span = Duration::from_secs_f64(count as f64 / A_SECOND as f64);
    let settle = Duration::from_secs(3);
    let (arrived, bulk) = thread::scope(|scope| -> Result<(usize, f64)> {
        let sink = scope.spawn(|| take_in(&sink, count, settle + span + LATE));
        // A new thread inherits the namespace of its creator.
        let bulk = lab.client().run(|| -> Result<f64> {
            let upload = scope.spawn(|| origin.put(TcpVariant::PLAIN, ByteCount::new(1 << 40), settle + span));
            thread::sleep(settle);
            let (begin, before) = (Instant::now(), origin.received());
            send_out(to, count)?;
            let rate = origin.received().saturating_sub(before).per(begin.elapsed());
            upload.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok(rate.bps() as f64)
        })??;
        Ok((sink.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?, bulk))
    })?;
    let sum: u64 = LOSSY.iter().map(|(rate, _)| rate).sum();
    let rest = mbps(sum).bps() as f64 * (1.0 - LOSS) - f64::from(copies) * (A_SECOND as usize * SIZE * 8) as f64;
    Ok(Found { missing: 1.0 - arrived as f64 / count as f64, bulk: bulk / rest })
}

/// Round trips, in seconds, of urgent packets alone, beside a download, and beside an upload.
fn urgent(settings: &Settings, span: Duration) -> Result<[Vec<f64>; 3]> {
    let lab = Lab::builder().link(LinkSpec::new("link0").rate(mbps(SLOW.0)).delay(ms(SLOW.1) / 2)).start()?;
    let origin = Origin::start(&lab, 10, BULKY, TcpVariant::PLAIN)?;
    let _bonded = Bonded::with_rules(
        settings,
        &lab,
        &(rule(ECHOED, "class = \"real-time\"\ncarry = \"bond\"\n") + &rule(BULKY, "carry = \"bond\"\n")),
    )?;
    let (echo, to) = served(&lab, ECHOED)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| echo_back(&echo, &stop));
        let trips = lab.client().run(|| -> Result<[Vec<f64>; 3]> {
            let alone = ask(to, span)?;
            let settle = Duration::from_secs(3);
            let all = settle + span + LATE;
            let beside = |down: bool| -> Result<Vec<f64>> {
                let origin = &origin;
                let bulk = scope.spawn(move || match down {
                    true => origin.drain(TcpVariant::PLAIN, Instant::now() + all).map(|_| ()),
                    false => origin.put(TcpVariant::PLAIN, ByteCount::new(1 << 40), all).map(|_| ()),
                });
                thread::sleep(settle);
                let trips = ask(to, span)?;
                bulk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                Ok(trips)
            };
            Ok([alone, beside(true)?, beside(false)?])
        });
        stop.store(true, Ordering::Relaxed);
        trips?
    })
}

fn rule(port: u16, more: &str) -> String {
    format!("[[app]]\nmatch = {{ port = {port} }}\n{more}")
}

/// A server socket and its address.
fn served(lab: &Lab, port: u16) -> Result<(UdpSocket, SocketAddr)> {
    let address: SocketAddr = (Lab::internet(10), port).into();
    let socket = lab.server().run(|| UdpSocket::bind(address))?.with_context(|| format!("cannot listen at {address}"))?;
    socket.set_read_timeout(Some(ms(100)))?;
    Ok((socket, address))
}

/// Sends `count` numbered packets, evenly. To be called inside the client namespace.
fn send_out(to: SocketAddr, count: usize) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(to)?;
    let begin = Instant::now();
    for number in 0..count as u64 {
        thread::sleep((begin + Duration::from_nanos(1_000_000_000 / A_SECOND * number)).saturating_duration_since(Instant::now()));
        let mut packet = [0; SIZE];
        packet[..8].copy_from_slice(&number.to_be_bytes());
        socket.send(&packet)?;
    }
    Ok(())
}

/// How many of `count` numbered packets come, until nothing came for a while, or nothing at all within `first`.
fn take_in(socket: &UdpSocket, count: usize, first: Duration) -> Result<usize> {
    let (mut seen, mut packet, mut last) = (vec![false; count], [0; 2 * SIZE], None::<Instant>);
    let begin = Instant::now();
    loop {
        match socket.recv(&mut packet) {
            Ok(SIZE) => {
                let number = u64::from_be_bytes(packet[..8].try_into().expect("eight bytes"));
                *seen.get_mut(number as usize).context("a packet that was never sent")? = true;
                last = Some(Instant::now());
            }
            Ok(size) => anyhow::bail!("a packet of {size} bytes"),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if last.map_or(begin.elapsed() > first, |last| last.elapsed() > LATE) {
                    return Ok(seen.iter().filter(|seen| **seen).count());
                }
            }
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
}

fn echo_back(socket: &UdpSocket, stop: &AtomicBool) {
    let mut packet = [0; 2 * SIZE];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((size, from)) = socket.recv_from(&mut packet) {
            let _ = socket.send_to(&packet[..size], from);
        }
    }
}

/// Round trips of packets that are echoed, in seconds, in rising order. To be called inside the client namespace.
fn ask(to: SocketAddr, span: Duration) -> Result<Vec<f64>> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(to)?;
    let count = (span.as_millis() / EVERY.as_millis()) as u32;
    let begin = Instant::now();
    let (mut sent, mut trips) = (Vec::new(), Vec::new());
    let mut packet = [0; SIZE];
    while begin.elapsed() < EVERY * count + LATE && trips.len() < count as usize {
        let due = EVERY * sent.len() as u32;
        if sent.len() < count as usize && begin.elapsed() >= due {
            packet[..8].copy_from_slice(&(sent.len() as u64).to_be_bytes());
            sent.push(Instant::now());
            socket.send(&packet)?;
            continue;
        }
        let left = if sent.len() < count as usize { due.saturating_sub(begin.elapsed()) } else { LATE };
        socket.set_read_timeout(Some(left.max(Duration::from_micros(100))))?;
        match socket.recv(&mut packet) {
            Ok(_) => {
                let number = u64::from_be_bytes(packet[..8].try_into().expect("eight bytes"));
                let at = sent.get(number as usize).context("an answer to a packet that was never sent")?;
                trips.push(at.elapsed().as_secs_f64());
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    // QUIC's datagrams get lost where a queue is full; urgent ones find none.
    ensure!(trips.len() as f64 >= 0.99 * f64::from(count), "only {} of {count} packets were echoed", trips.len());
    trips.sort_unstable_by(f64::total_cmp);
    Ok(trips)
}

/// Of rising values that are there.
fn quantile(values: &[f64], part: f64) -> f64 {
    values[((values.len() - 1) as f64 * part) as usize]
}

fn summary(trips: &[f64]) -> serde_json::Value {
    json!({ "count": trips.len(), "median": quantile(trips, 0.5), "p99": quantile(trips, 0.99), "most": quantile(trips, 1.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_packets_are_counted_and_duplicates_count_once() {
        let sink = UdpSocket::bind("127.0.0.1:0").unwrap();
        sink.set_read_timeout(Some(ms(10))).unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        for number in [0u64, 2, 2, 3] {
            let mut packet = [0; SIZE];
            packet[..8].copy_from_slice(&number.to_be_bytes());
            from.send_to(&packet, sink.local_addr().unwrap()).unwrap();
        }
        assert_eq!(take_in(&sink, 4, ms(100)).unwrap(), 3);
        assert_eq!(take_in(&sink, 4, ms(100)).unwrap(), 0, "nothing more comes");
        assert_eq!((quantile(&[1.0, 2.0, 9.0], 0.5), quantile(&[1.0, 2.0, 9.0], 0.99)), (2.0, 2.0));
    }

    #[test]
    fn round_trips_are_of_what_was_asked() {
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        echo.set_read_timeout(Some(ms(10))).unwrap();
        let (to, stop) = (echo.local_addr().unwrap(), AtomicBool::new(false));
        let trips = thread::scope(|scope| {
            scope.spawn(|| echo_back(&echo, &stop));
            let trips = ask(to, ms(200));
            stop.store(true, Ordering::Relaxed);
            trips
        });
        assert_eq!(trips.unwrap().len(), 10);
    }
}
