//! Flows soon avoid a link that dies, and use it again after its return.
//!
//! The tests print the times. The bounds are wide, so that they hold on a busy machine; without Braid a dead link is used for ever.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{Lab, LinkSpec, mbps, ms};

const EAGER: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";
const SPARING: &str = "scheduler = \"round-robin\"\n";

fn three_links() -> Lab {
    let links = NAMES.iter().zip([10, 40, 80]).map(|(name, delay)| LinkSpec::new(name).rate(mbps(10)).delay(ms(delay)));
    links.fold(Lab::builder(), |builder, link| builder.link(link)).start().unwrap()
}

/// Begins a flow every few milliseconds until `quiet` has passed since the last one on `link`, and tells when, from now, that was.
#[track_caller]
fn last_use(lab: &Lab, to: SocketAddr, link: usize, quiet: Duration) -> Duration {
    let outcome = lab.client().run(|| {
        let begin = Instant::now();
        let mut last = Duration::ZERO;
        while begin.elapsed() < last + quiet {
            if number(local_of(to).unwrap()) == link {
                last = begin.elapsed();
            }
            if last > LIMIT {
                return Err(last);
            }
            thread::sleep(ms(3));
        }
        Ok(last)
    });
    outcome.unwrap().unwrap_or_else(|last| panic!("link {link} is dead and gets flows after {last:?}"))
}

/// Time until a new flow uses `link`.
#[track_caller]
fn first_use(lab: &Lab, to: SocketAddr, link: usize, limit: Duration) -> Duration {
    within(limit, &format!("link {link} gets flows"), || chosen_many(lab, to, 3).contains(&link))
}

#[test]
fn continuous_probing_detects_an_idle_dark_link_and_its_return() {
    if !able() {
        return;
    }
    let lab = three_links();
    let up = Up::start(&lab, EAGER);
    for round in 0..3 {
        for to in [remote(10, 9), remote6(10, 9)] {
            // Looked at only now: a flow that is begun and dropped leaves nothing in progress.
            lab.dark(1).unwrap();
            let left = last_use(&lab, to, 1, ms(700));
            println!("eager and idle, {to}, round {round}: left after {left:?}");
            up.wait_state("lte0", "dead");
            lab.bright(1).unwrap();
            let back = first_use(&lab, to, 1, LIMIT);
            println!("eager and idle, {to}, round {round}: used again after {back:?}");
            up.wait_state("lte0", "up");
            if round > 0 {
                // A link that died several times in a minute is rightly kept out for longer: one death of each family will do.
                return;
            }
        }
    }
}

/// A server that sends endlessly to every client.
fn endless(lab: &Lab) -> SocketAddr {
    let listener = lab.server().run(|| TcpListener::bind("[::]:9000")).unwrap().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut stream: TcpStream = stream;
                while stream.write_all(&[0; 16384]).is_ok() {}
            });
        }
    });
    remote(10, 9000)
}

/// Starts a flow on each link that reads until `stop`.
fn downloads(lab: &Lab, from: SocketAddr, count: usize) -> Vec<(TcpStream, usize)> {
    let flows: Vec<_> = (0..count).map(|_| open(lab, from)).collect();
    let mut links: Vec<_> = flows.iter().map(|(_, link)| *link).collect();
    links.sort();
    links.dedup();
    assert_eq!(links, [0, 1, 2]);
    flows
}

/// Ends the readers, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn read_until(mut stream: &TcpStream, stop: &AtomicBool) -> Result<(), ErrorKind> {
    let mut buffer = vec![0; 65536];
    stream.set_read_timeout(Some(ms(100))).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.kind()),
        }
    }
    Ok(())
}

#[test]
fn flows_in_progress_reveal_a_dark_link_with_on_demand_probing() {
    if !able() {
        return;
    }
    let lab = three_links();
    let from = endless(&lab);
    let up = Up::start(&lab, SPARING);
    let flows = downloads(&lab, from, 3);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = Stop(&stop);
        for (flow, _) in &flows {
            scope.spawn(|| read_until(flow, &stop));
        }
        eventually("every link moves something", || {
            up.status().unwrap()["links"].as_array().unwrap().iter().all(|link| link["rx_bytes"].as_u64() > Some(300_000))
        });
        lab.dark(0).unwrap();
        let left = last_use(&lab, remote(10, 9), 0, ms(700));
        println!("sparing, flows in progress: left after {left:?}");
        eventually("wlan0 is dead for IPv4", || up.link("wlan0")["state_v4"] == "dead");
        lab.bright(0).unwrap();
        let back = first_use(&lab, remote(10, 9), 0, LIMIT);
        println!("sparing, flows in progress: used again after {back:?}");
    });
}

#[test]
fn loss_of_carrier_takes_effect_at_once_and_the_link_is_used_again() {
    if !able() {
        return;
    }
    let lab = three_links();
    let up = Up::start(&lab, SPARING);
    for to in [remote(10, 9), remote6(10, 9)] {
        lab.carrier(2, false).unwrap();
        let left = last_use(&lab, to, 2, ms(500));
        println!("carrier lost, {to}: left after {left:?}");
        up.wait_state("eth0", "down");
        lab.carrier(2, true).unwrap();
        let back = first_use(&lab, to, 2, LIMIT);
        println!("carrier lost, {to}: used again after {back:?}");
    }
}

#[test]
fn one_family_of_a_link_dies_alone() {
    if !able() {
        return;
    }
    let lab = three_links();
    let up = Up::start(&lab, EAGER);
    // The gateway stops answering over IPv6.
    lab.server().sysctl("ipv6/conf/l1/disable_ipv6", "1").unwrap();
    eventually("lte0 is dead for IPv6", || up.link("lte0")["state_v6"] == "dead");
    assert_eq!(up.link("lte0")["state_v4"], "up");
    let six = chosen_many(&lab, remote6(10, 9), 9);
    assert!(!six.contains(&1) && six.contains(&0) && six.contains(&2), "{six:?}");
    let four = chosen_many(&lab, remote(10, 9), 9);
    assert!((0..3).all(|link| four.contains(&link)), "{four:?}");
}

#[test]
fn links_that_are_all_dead_are_treated_as_up() {
    if !able() {
        return;
    }
    let lab = three_links();
    let up = Up::start(&lab, EAGER);
    for link in 0..3 {
        lab.dark(link).unwrap();
    }
    for name in NAMES {
        up.wait_state(name, "dead");
    }
    let links = chosen_many(&lab, remote(10, 9), 9);
    assert!((0..3).all(|link| links.contains(&link)), "the network may be better than the judgement: {links:?}");
    lab.bright(2).unwrap();
    eventually("the one that lives gets all", || chosen_many(&lab, remote(10, 9), 6) == [2; 6]);
}

/// Darkens a link, waits until the flows for which `ends` holds have ended, and checks that they failed as ended connections do, and no
/// other flow failed.
#[track_caller]
fn assert_ended(lab: &Lab, flows: &[(TcpStream, usize)], dark: usize, ends: impl Fn(&TcpStream, usize) -> bool) {
    let stop = AtomicBool::new(false);
    let ends: Vec<_> = flows.iter().map(|(flow, link)| ends(flow, *link)).collect();
    let outcomes: Vec<_> = thread::scope(|scope| {
        let readers: Vec<_> = flows.iter().map(|(flow, _)| scope.spawn(|| read_until(flow, &stop))).collect();
        let end = Stop(&stop);
        lab.dark(dark).unwrap();
        let all_ended = || ends.iter().zip(&readers).all(|(ends, reader)| !ends || reader.is_finished());
        let took = eventually("the stuck flows have ended", all_ended);
        println!("stuck flows ended after {took:?}");
        drop(end);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let wanted: Vec<_> = ends.iter().map(|ends| if *ends { Err(ErrorKind::ConnectionAborted) } else { Ok(()) }).collect();
    assert_eq!(outcomes, wanted, "{flows:?}");
}

#[test]
fn flows_stuck_on_a_dead_link_are_ended() {
    if !able() {
        return;
    }
    let lab = three_links();
    let from = endless(&lab);
    let up = Up::start(&lab, &format!("reconnect_after = \"500 ms\"\n{EAGER}"));
    let flows = downloads(&lab, from, 6);
    assert_ended(&lab, &flows, 1, |_, link| link == 1);
    drop(flows);
    eventually("no flow is left", || up.flows().is_empty());
}

#[test]
fn pinned_flows_on_a_dead_link_are_not_ended() {
    if !able() {
        return;
    }
    let lab = three_links();
    let from = endless(&lab);
    let rule = "[[app]]\nmatch = { destination = \"203.0.113.11\" }\nlinks = [\"lte0\"]\n";
    let _up = Up::start(&lab, &format!("reconnect_after = \"500 ms\"\n{EAGER}{rule}"));
    let mut flows = downloads(&lab, from, 3);
    flows.push(open(&lab, remote(11, 9000)));
    assert_ended(&lab, &flows, 1, |flow, link| link == 1 && flow.peer_addr().unwrap() == from);
    lab.bright(1).unwrap();
    let (mut pinned, link) = flows.pop().unwrap();
    assert_eq!(link, 1);
    let mut buffer = vec![0; 1_000_000];
    pinned.set_read_timeout(Some(LIMIT)).unwrap();
    pinned.read_exact(&mut buffer).unwrap();
}
