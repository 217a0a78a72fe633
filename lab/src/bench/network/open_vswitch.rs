//! Traffic through Open vSwitch while a cable breaks, and while the controller is killed and started anew.

use std::collections::BTreeMap;
use std::io;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{AIM, Settings, progress};
use crate::bench::bond::cut::gap;
use crate::bench::report::Report;
use crate::bench::stats::{median, worst};
use crate::lab::Lab;
use crate::network::{Controller, Host, Switches};
use crate::spec::LinkSpec;
use crate::sys;

/// Port at which a host returns datagrams.
const ECHO: u16 = 7;
/// Interval between datagrams.
const EVERY: Duration = Duration::from_millis(1);
/// The cable of the shortest path.
const CABLE: &str = "s1-s2";
/// Time before an event, and after it.
const SPAN: Duration = Duration::from_secs(2);
/// Time after which a new controller has checked all entries of its predecessor.
const CHECKED: Duration = Duration::from_secs(35);
/// Time in which the last answers come.
const LAST: Duration = Duration::from_millis(300);
/// How often a thread that waits looks whether it should end.
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let switches = Switches::ring(&lab, "OpenFlow13")?;
    let (mut controller, hosts) = switches.serve(&settings.braid, &["s1"])?;
    let (mut breaks, mut returns, mut restarts) = (Rounds::default(), Rounds::default(), Rounds::default());
    for _ in 0..if settings.quick { 3 } else { 10 } {
        let ([broken, repaired, end], traffic) = exchange(&hosts, || cut(&switches, &controller))?;
        breaks.add(&traffic, broken, repaired);
        returns.add(&traffic, repaired, end);
    }
    progress(&format!("Open vSwitch, a cable breaks: {breaks:?}, returns: {returns:?}"));
    for _ in 0..if settings.quick { 1 } else { 3 } {
        let former = controller;
        let ((next, killed), traffic) = exchange(&hosts, || restart(&lab, settings, former))?;
        restarts.add(&traffic, killed, Instant::now());
        controller = next;
    }
    progress(&format!("Open vSwitch, the controller is killed and started anew: {restarts:?}"));
    let row = |what: &str, rounds: &Rounds| -> Vec<String> {
        let gaps = [median(&rounds.gaps), worst(&rounds.gaps)].map(|gap| format!("{gap:.1} ms"));
        let lost = format!("{} of {}", rounds.lost, rounds.sent);
        [what.to_owned(), rounds.gaps.len().to_string()].into_iter().chain(gaps).chain([lost]).collect()
    };
    report.table(
        "Open vSwitch, a datagram every millisecond:",
        "event | rounds | gap: median | longest | lost",
        vec![row("a cable breaks", &breaks), row("it returns", &returns), row("the controller is killed and started anew", &restarts)],
    );
    let longest = worst(&breaks.gaps);
    report.aim(format!("Open vSwitch, a cable breaks: longest gap under {AIM} ms"), format!("{longest:.1} ms"), longest < AIM);
    let lost = restarts.lost;
    report.aim("Open vSwitch, the controller is killed and started anew: no datagram is lost", lost.to_string(), lost == 0);
    report.measured(json!({ "open_vswitch": { "breaks": breaks.json(), "returns": returns.json(), "restarts": restarts.json() } }));
    Ok(())
}

/// What datagrams met after an event, in several rounds.
#[derive(Debug, Default)]
struct Rounds {
    /// The longest time between two answers, in milliseconds, by round.
    gaps: Vec<f64>,
    sent: usize,
    lost: usize,
}

impl Rounds {
    fn add(&mut self, traffic: &Traffic, from: Instant, to: Instant) {
        let mut arrivals: Vec<Instant> = traffic.answers.values().copied().collect();
        arrivals.sort();
        let last = traffic.sent.last().map_or(to, |last| to.min(*last));
        self.gaps.push(1e3 * gap(&arrivals, from, last));
        let sent = traffic.sent.iter().zip(0u32..).filter(|(at, _)| (from..to).contains(*at));
        let numbers: Vec<u32> = sent.map(|(_, number)| number).collect();
        self.sent += numbers.len();
        self.lost += numbers.iter().filter(|number| !traffic.answers.contains_key(*number)).count();
    }

    fn json(&self) -> Value {
        json!({ "gaps_ms": self.gaps, "sent": self.sent, "lost": self.lost })
    }
}

/// Breaks the cable and repairs it. Returns when, and when the round ends.
fn cut(switches: &Switches<'_>, controller: &Controller<'_>) -> Result<[Instant; 3]> {
    thread::sleep(SPAN);
    let broken = Instant::now();
    switches.set_cable(CABLE, false)?;
    thread::sleep(SPAN);
    controller.converges(3, 2)?;
    let repaired = Instant::now();
    switches.set_cable(CABLE, true)?;
    // The kernel reports a carrier up to a second after the event before.
    thread::sleep(SPAN);
    controller.converges(3, 3)?;
    Ok([broken, repaired, Instant::now()])
}

/// Kills the controller and starts another one. Returns that, and when the first one was killed.
fn restart<'a>(lab: &'a Lab, settings: &Settings, former: Controller<'a>) -> Result<(Controller<'a>, Instant)> {
    thread::sleep(SPAN);
    let killed = Instant::now();
    former.kill()?;
    let controller = Controller::start(lab, &settings.braid)?;
    thread::sleep(SPAN);
    controller.converges(3, 3)?;
    thread::sleep(if settings.quick { SPAN } else { CHECKED });
    controller.converges(3, 3)?;
    Ok((controller, killed))
}

/// Datagrams from one host to the other, and back.
struct Traffic {
    /// When each was sent, by number.
    sent: Vec<Instant>,
    /// When the answers arrived.
    answers: BTreeMap<u32, Instant>,
}

/// Exchanges datagrams between the hosts while `during` runs.
fn exchange<T>([one, other]: &[Host; 2], during: impl FnOnce() -> Result<T>) -> Result<(T, Traffic)> {
    let echo = other.namespace().run(|| UdpSocket::bind((other.address, ECHO)))?.context("the second host cannot answer")?;
    let connect = || -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((one.address, 0))?;
        socket.connect((other.address, ECHO))?;
        Ok(socket)
    };
    let socket = one.namespace().run(connect)?.context("the first host cannot send")?;
    for waiting in [&echo, &socket] {
        waiting.set_read_timeout(Some(LOOK))?;
    }
    let (enough, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| answer(&echo, &over));
        let receiving = scope.spawn(|| receive(&socket, &over));
        let sending = scope.spawn(|| send(&socket, &enough));
        let result = during();
        enough.store(true, Ordering::Relaxed);
        let sent = sending.join().expect("the thread does not panic");
        thread::sleep(LAST);
        over.store(true, Ordering::Relaxed);
        let answers = receiving.join().expect("the thread does not panic");
        Ok((result?, Traffic { sent, answers }))
    })
}

/// Sends numbers until it is enough. One that is late delays no other.
fn send(socket: &UdpSocket, enough: &AtomicBool) -> Vec<Instant> {
    sys::precise_timers();
    let (begin, mut sent) = (Instant::now(), Vec::new());
    while !enough.load(Ordering::Relaxed) {
        let number = sent.len() as u32;
        thread::sleep((begin + EVERY * number).saturating_duration_since(Instant::now()));
        sent.push(Instant::now());
        // One that cannot be sent is lost.
        let _ = socket.send(&number.to_be_bytes());
    }
    sent
}

fn receive(socket: &UdpSocket, over: &AtomicBool) -> BTreeMap<u32, Instant> {
    let (mut answers, mut number) = (BTreeMap::new(), [0; 4]);
    while !over.load(Ordering::Relaxed) {
        if let Ok(4) = socket.recv(&mut number) {
            answers.entry(u32::from_be_bytes(number)).or_insert_with(Instant::now);
        }
    }
    answers
}

fn answer(socket: &UdpSocket, over: &AtomicBool) {
    let mut number = [0; 4];
    while !over.load(Ordering::Relaxed) {
        if let Ok((size, from)) = socket.recv_from(&mut number) {
            let _ = socket.send_to(&number[..size], from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_without_an_answer_are_lost_and_make_a_gap() {
        let zero = Instant::now();
        let at = |millis: u32| zero + EVERY * millis;
        let sent: Vec<Instant> = (0..1000).map(at).collect();
        // The answers take half a millisecond. Three are lost before the event, 40 after it.
        let is_lost = |number: &u32| (97..100).contains(number) || (200..240).contains(number);
        let answers = (0..1000).filter(|number| !is_lost(number)).map(|number| (number, at(number) + EVERY / 2)).collect();
        let mut rounds = Rounds::default();
        rounds.add(&Traffic { sent, answers }, at(200), at(2000));
        assert_eq!((rounds.sent, rounds.lost), (800, 40));
        assert!((rounds.gaps[0] - 41.0).abs() < 0.01, "{rounds:?}");
    }
}
