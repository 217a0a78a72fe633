//! The links are what they are said to be, for real programs.

use std::time::{Duration, Instant};

use braid_lab::{Filter, Lab, LinkSpec, Way, effective_user, mbps, ms};

/// Whether labs can be made. In CI they must.
fn able() -> bool {
    if effective_user() == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "the lab's tests need root");
    println!("skipped: needs root");
    false
}

/// Waits until `check` holds; fails after ten seconds.
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < Duration::from_secs(10), "never: {what}");
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

#[test]
fn round_trips_take_twice_the_delay_in_both_families() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10))).start().unwrap();
    for target in ["203.0.113.10", "2001:db8:113::30", "10.77.0.1", "fd77::1"] {
        let (answered, report) = ping(&lab, &["-c", "5", "-i", "0.05", target]);
        assert!(answered, "{report}");
        let least = least_round_trip(&report);
        assert!((20.0..21.5).contains(&least), "{target}: {least} ms");
    }
}

#[test]
fn a_dark_link_keeps_its_carrier_and_comes_back() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    let reach = || ping(&lab, &["-c", "1", "-W", "0.3", "203.0.113.10"]).0;
    assert!(reach());
    let requests = lab.watch(0, Filter::to([203, 0, 113, 10])).unwrap();
    lab.dark(0).unwrap();
    assert!(!reach());
    assert_eq!(lab.watched(requests).packets, 1, "what enters a dark link is still seen");
    let carrier = || lab.client().run(|| std::fs::read_to_string("/sys/class/net/wlan0/carrier")).unwrap();
    assert_eq!(carrier().unwrap().trim(), "1");
    lab.bright(0).unwrap();
    assert!(reach());
    assert!(lab.counters(0).unwrap().up.dark >= 1);
}

#[test]
fn carrier_goes_and_comes() {
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
    eventually("reachable again", || ping(&lab, &["-c", "1", "-W", "0.3", "10.77.0.1"]).0);
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
    assert!(ping(&lab, &["-c", "3", "-i", "0.05", "-I", "lte0", "203.0.113.11"]).0);
    assert_eq!(asked.map(|watch| lab.watched(watch).packets), [0, 3]);
    assert_eq!(answered.map(|watch| lab.watched(watch).packets), [0, 3]);
}

#[test]
fn a_profile_changes_while_the_link_runs() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    let round_trip = || least_round_trip(&ping(&lab, &["-c", "4", "-i", "0.05", "203.0.113.10"]).1);
    assert!(round_trip() < 2.0);
    lab.set(0, Way::Down, |profile| profile.delay = ms(30)).unwrap();
    assert!((30.0..32.0).contains(&round_trip()));
}
