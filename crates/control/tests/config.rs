//! The default configuration, the hosts that it asks, and the presentation of findings to users and clients.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use braid_control::config::{Config, Detect, Finding, Severity};
use braid_control::{Cause, RequestError};
use braid_decide::policy::ProbeMode;
use braid_decide::steer::Prefixes;

const TEXT: &str = "version = 1\r\n[[link]]\r\n\tröle = \"none\" # why\r\nlast";

/// A finding at the position of `what` in [`TEXT`].
fn at(what: &str) -> Finding {
    let start = TEXT.find(what).unwrap();
    Finding::at(Severity::Warning, "braid.toml", TEXT, start..start + what.len(), "is wrong".into())
}

fn listed(nets: &[&str], names: &[&str]) -> Detect {
    Detect::Listed {
        nets: nets.iter().map(|net| net.parse().unwrap()).collect(),
        names: names.iter().map(|name| name.parse().unwrap()).collect(),
    }
}

#[test]
fn by_default_no_host_is_asked_nothing_is_measured_and_stuck_flows_are_ended() {
    let config = Config::default();
    assert!(!config.detect.any() && config.measure.servers.is_empty() && config.probe_targets.is_empty());
    assert_eq!((config.probe, config.reconnect_after, config.destroy_pinned), (ProbeMode::OnDemand, Some(Duration::from_secs(5)), false));
    assert!(config.profiles.iter().count() > 0 && config.warnings.is_empty());
}

#[test]
fn a_listed_host_is_asked_by_its_prefix_or_its_names_current_address() {
    let detect = listed(&["198.51.100.0/24", "2001:db8::1/128"], &["relay.example"]);
    let mut named = BTreeSet::from(["203.0.113.9".parse().unwrap()]);
    let asked = |named: &BTreeSet<IpAddr>| {
        ["198.51.100.255", "198.51.101.0", "2001:db8::1", "2001:db8::2", "203.0.113.9"]
            .map(|host| detect.asks(host.parse().unwrap(), named))
    };
    assert_eq!(asked(&named), [true, false, true, false, true]);
    named.clear();
    assert_eq!(asked(&named), [true, false, true, false, false], "the name now has another address");
    assert_eq!(detect.names().iter().map(ToString::to_string).collect::<Vec<_>>(), ["relay.example"]);
}

#[test]
fn everybody_means_every_host_and_nobody_means_none() {
    let host: IpAddr = "192.0.2.1".parse().unwrap();
    let named = BTreeSet::from([host]);
    assert_eq!([Detect::Everybody, Detect::Nobody].map(|detect| (detect.any(), detect.asks(host, &named))), [(true, true), (false, false)]);
    assert!(Detect::Everybody.asks(host, &BTreeSet::new()) && Detect::Everybody.names().is_empty(), "there is no name to resolve");
    assert!(listed(&[], &[]).any() && !listed(&[], &[]).asks(host, &BTreeSet::new()));
}

/// The kernel gets prefixes, of which the longest decides. They must mean the same as the function that decides in the daemon.
#[test]
fn the_prefixes_for_the_kernel_cover_exactly_the_hosts_that_are_asked() {
    let named = BTreeSet::from(["203.0.113.9", "10.1.2.3", "2001:db8::9", "fd00::9"].map(|host| host.parse().unwrap()));
    let hosts = [
        "0.0.0.0",
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "10.0.0.0",
        "10.1.2.3",
        "10.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.64.0.1",
        "100.127.255.255",
        "100.128.0.0",
        "127.0.0.1",
        "169.254.1.1",
        "172.15.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "172.32.0.0",
        "192.168.0.1",
        "192.169.0.0",
        "198.51.100.7",
        "203.0.113.9",
        "223.255.255.255",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "1fff::1",
        "2000::1",
        "2001:db8::1",
        "2001:db8::9",
        "3fff::1",
        "4000::1",
        "fd00::9",
        "fe80::1",
        "ff02::1",
    ];
    let lists = [
        Detect::Nobody,
        Detect::Everybody,
        listed(&[], &["relay.example"]),
        listed(&["198.51.100.0/24", "2001:db8::/32"], &[]),
        listed(&["8.0.0.0/5", "192.0.0.0/2", "::/0"], &["relay.example"]),
        listed(&["0.0.0.0/0", "2001:db8::1/128"], &[]),
        listed(&["10.0.0.0/8", "fd00::/8", "2000::/2"], &[]),
    ];
    for detect in lists {
        for networks in [vec![], vec!["10.1.0.0/16", "fd00::/8"], vec!["192.168.0.0/16", "100.64.0.0/10"]] {
            let detect_networks = networks.iter().map(|net| net.parse().unwrap()).collect();
            let config = Config { detect: detect.clone(), detect_networks, ..Config::default() };
            let prefixes = Prefixes::new(config.asked_prefixes(&named));
            for host in hosts.map(|host| host.parse::<IpAddr>().unwrap()) {
                assert_eq!(prefixes.contains(host), config.asks(host, &named), "{host}: {:?} {networks:?}", config.detect);
            }
        }
    }
}

#[test]
fn positions_are_counted_in_characters_from_one() {
    let place = |what| {
        let finding = at(what);
        (finding.line, finding.column, finding.width)
    };
    assert_eq!(["version", "röle", "\"none\"", "last"].map(place), [(1, 1, 7), (3, 2, 4), (3, 9, 6), (4, 1, 4)]);
}

#[test]
fn a_span_of_several_lines_is_marked_in_the_first_line_only() {
    let finding = at("[[link]]\r\n\tröle = ");
    assert_eq!((finding.line, finding.excerpt.as_str()), (2, "[[link]]"));
    let marks = finding.to_string().lines().last().unwrap().matches('^').count();
    assert_eq!(marks, 8, "not the end of the line");
}

#[test]
fn marks_stand_below_the_text_and_remedies_below_the_marks() {
    let finding = Finding { nearest: Some("role".into()), remedy: Some("take it out".into()), ..at("röle") };
    let shown =
        "braid.toml:3:2: warning: is wrong\n 3 | \tröle = \"none\" # why\n   | \t^^^^\n   = did you mean \"role\"?\n   = take it out";
    assert_eq!(finding.to_string(), shown);
    let far = Finding { line: 1234, ..at("\"none\"") };
    let bars = far.to_string().lines().skip(1).map(|line| line.find('|')).collect::<Vec<_>>();
    assert_eq!(bars, [Some(6), Some(6)], "the margin is as wide as the number");
}

#[test]
fn a_finding_can_be_at_the_end_of_the_file() {
    let finding = Finding::at(Severity::Error, "f", "a = 1\n", 6..6, "something is missing".into());
    assert_eq!((finding.line, finding.column, finding.width, finding.excerpt.as_str()), (2, 1, 1, ""));
    assert_eq!(finding.to_string(), "f:2:1: error: something is missing\n 2 | \n   | ^");
}

#[test]
fn errors_sort_before_warnings() {
    assert!(Severity::Error < Severity::Warning);
}

#[test]
fn a_request_error_has_a_title_a_detail_and_a_cause() {
    let shown = [
        RequestError::unclear("days is over 400"),
        RequestError::not_found("No such link", "wlan7 is no link"),
        RequestError::conflict("Busy", "wlan0 is measured now"),
        RequestError::invalid("Refused", "line 3 is wrong"),
        RequestError::failed("Not written", "the disk is full"),
    ]
    .map(|error| (error.cause, error.to_string()));
    let expected = [
        (Cause::Unclear, "Not understood: days is over 400"),
        (Cause::NotFound, "No such link: wlan7 is no link"),
        (Cause::Conflict, "Busy: wlan0 is measured now"),
        (Cause::Invalid, "Refused: line 3 is wrong"),
        (Cause::Failed, "Not written: the disk is full"),
    ];
    assert_eq!(shown, expected.map(|(cause, text)| (cause, text.to_owned())));
}
