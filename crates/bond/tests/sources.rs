//! How much strangers may begin, by the networks that they come from.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use braid_bond::host::Begins;

const PAUSE: Duration = Duration::from_millis(100);

fn from(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn taken(begins: &mut Begins, now: Instant, remotes: impl IntoIterator<Item = String>) -> usize {
    remotes.into_iter().filter(|remote| begins.take(now, from(remote))).count()
}

#[allow(clippy::disallowed_methods, reason = "only differences count")]
fn now() -> Instant {
    Instant::now()
}

#[test]
fn one_source_is_slowed_down_and_no_other_is() {
    let (mut begins, now) = (Begins::new(8, PAUSE, 1000), now());
    let ports = |address: &str| (0..50).map(|port| format!("{address}:{port}")).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, ports("198.51.100.1")), 8);
    assert_eq!(taken(&mut begins, now, ports("[::ffff:198.51.100.1]")), 0, "the same address");
    assert_eq!(taken(&mut begins, now, ports("198.51.100.2")), 8);
    assert_eq!(taken(&mut begins, now + 3 * PAUSE, ports("198.51.100.1")), 3);
    assert_eq!(taken(&mut begins, now + 3 * PAUSE + PAUSE / 2, ports("198.51.100.1")), 0);
    assert_eq!(taken(&mut begins, now + 4 * PAUSE, ports("198.51.100.1")), 1);
    assert_eq!(begins.remembered(), 2);
    assert!(begins.take(now + 20 * PAUSE, from("198.51.100.3:1")));
    assert_eq!(begins.remembered(), 1, "those who have everything left are forgotten");
}

/// Whoever has a network of 48 bits had 65,536 sources.
#[test]
fn regression_neighbouring_networks_share_what_wider_ones_may() {
    let (mut begins, now) = (Begins::new(8, PAUSE, 1000), now());
    let hosts = |count: u16| (0..count).map(|host| format!("[2001:db8:1:aa00::{host:x}]:1")).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, hosts(50)), 8, "64 bits");
    let nets = |first: u16| (0..256).map(move |net: u16| format!("[2001:db8:1:{:x}::1]:1", first + net)).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, nets(0xaa00)), 8, "56 bits: 16 in all");
    assert_eq!(taken(&mut begins, now, nets(0xab00)), 16, "48 bits: 32 in all");
    assert_eq!(taken(&mut begins, now, nets(0xac00)), 0);
    assert!(begins.take(now, from("[2001:db8:2::1]:1")), "somebody else");
}

#[test]
fn no_more_sources_are_remembered_than_may_be() {
    let (mut begins, now) = (Begins::new(8, PAUSE, 10), now());
    assert_eq!(taken(&mut begins, now, (0..50).map(|host| format!("198.51.100.{host}:1"))), 10);
    assert!(begins.take(now, from("198.51.100.3:1")), "one that is known");
    assert!(begins.take(now + 20 * PAUSE, from("198.51.100.60:1")));
}
