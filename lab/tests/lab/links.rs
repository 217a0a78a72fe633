//! The links behave as specified, for real programs.

use std::time::{Duration, Instant};

use braid_lab::{Direction, Filter, Lab, LinkSpec, effective_user, mbps, ms};

/// Whether labs can be created. In CI it is an error if they cannot.
fn able() -> bool {
    if effective_user() == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "the lab's tests need root");
    println!("skipped: needs root");
    false
}

/// Waits until `check` holds; fails after a minute.
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(ms(20));
    }
}

fn ping(lab: &Lab, args: &[&str]) -> (bool, String) {
    let output = lab.client().command("ping").unwrap().args(args).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The smallest round trip ping reports, in milliseconds.
fn least_round_trip(report: &str) -> f64 {
    let figures = report.rsplit_once("= ").expect(report).1;
    figures.split('/').next().unwrap().parse().unwrap()
}

/// The minimum RTT of many lies in this span, in milliseconds: none is shorter, and on a machine with idle time at least one is not longer.
#[track_caller]
fn takes(lab: &Lab, target: &str, span: std::ops::Range<f64>) {
    eventually(&format!("{target} answers within {span:?} ms"), || {
        let (answered, report) = ping(lab, &["-c", "5", "-i", "0.05", "-W", "60", target]);
        assert!(answered, "{report}");
        let least = least_round_trip(&report);
        assert!(least >= span.start, "{target}: {least} ms");
        least < span.end
    });
}

#[test]
fn round_trips_take_twice_the_delay_in_both_families() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10))).start().unwrap();
    for target in ["203.0.113.10", "2001:db8:113::30", "10.77.0.1", "fd77::1"] {
        takes(&lab, target, 20.0..21.5);
    }
}

#[test]
fn a_dark_link_keeps_its_carrier_and_comes_back() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    let reach = |patience: &str| ping(&lab, &["-c", "1", "-W", patience, "203.0.113.10"]).0;
    assert!(reach("60"));
    let requests = lab.watch(0, Filter::to([203, 0, 113, 10])).unwrap();
    lab.dark(0).unwrap();
    assert!(!reach("0.3"));
    eventually("what enters a dark link is still seen", || lab.watched(requests).packets == 1);
    let carrier = || lab.client().run(|| std::fs::read_to_string("/sys/class/net/wlan0/carrier")).unwrap();
    assert_eq!(carrier().unwrap().trim(), "1");
    lab.bright(0).unwrap();
    assert!(reach("60"));
    assert!(lab.counters(0).unwrap().up.dark >= 1);
}

#[test]
fn carrier_can_be_removed_and_restored() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).start().unwrap();
    let carrier = |name: &str| {
        let path = format!("/sys/class/net/{name}/carrier");
        lab.client().run(|| std::fs::read_to_string(path)).unwrap().unwrap().trim().to_owned()
    };
    lab.carrier(0, false).unwrap();
    eventually("carrier lost", || carrier("wlan0") == "0");
    assert_eq!(carrier("lte0"), "1");
    lab.carrier(0, true).unwrap();
    eventually("reachable again", || ping(&lab, &["-c", "1", "-W", "1", "10.77.0.1"]).0);
}

#[test]
fn packets_of_one_link_are_not_seen_on_another() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).rp_filter(2).start().unwrap();
    let target = [203, 0, 113, 11];
    let asked = [0, 1].map(|link| lab.watch(link, Filter::to(target)).unwrap());
    let answered = [0, 1].map(|link| lab.watch(link, Filter { source: Some(target.into()), ..Filter::default() }).unwrap());
    assert!(ping(&lab, &["-c", "3", "-i", "0.05", "-W", "60", "-I", "lte0", "203.0.113.11"]).0);
    assert_eq!(asked.map(|watch| lab.watched(watch).packets), [0, 3]);
    assert_eq!(answered.map(|watch| lab.watched(watch).packets), [0, 3]);
}

#[test]
fn a_profile_changes_while_the_link_runs() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    takes(&lab, "203.0.113.10", 0.0..2.0);
    lab.set(0, Direction::Down, |profile| profile.delay = ms(30)).unwrap();
    takes(&lab, "203.0.113.10", 30.0..32.0);
}
