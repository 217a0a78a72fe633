//! Rate limits for unadmitted clients by source network.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use braid_bond::host::SourceLimiter;

const PAUSE: Duration = Duration::from_millis(100);

fn from(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn taken(begins: &mut SourceLimiter, now: Instant, remotes: impl IntoIterator<Item = String>) -> usize {
    remotes.into_iter().filter(|remote| begins.take(now, from(remote))).count()
}

#[allow(clippy::disallowed_methods, reason = "only differences matter")]
fn now() -> Instant {
    Instant::now()
}

#[test]
fn events_are_rate_limited_per_source() {
    let (mut begins, now) = (SourceLimiter::new(8, PAUSE, 1000), now());
    let ports = |address: &str| (0..50).map(|port| format!("{address}:{port}")).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, ports("198.51.100.1")), 8);
    assert_eq!(taken(&mut begins, now, ports("[::ffff:198.51.100.1]")), 0, "the same address");
    assert_eq!(taken(&mut begins, now, ports("198.51.100.2")), 8);
    assert_eq!(taken(&mut begins, now + 3 * PAUSE, ports("198.51.100.1")), 3);
    assert_eq!(taken(&mut begins, now + 3 * PAUSE + PAUSE / 2, ports("198.51.100.1")), 0);
    assert_eq!(taken(&mut begins, now + 4 * PAUSE, ports("198.51.100.1")), 1);
    assert_eq!(begins.remembered(), 2);
    assert!(begins.take(now + 20 * PAUSE, from("198.51.100.3:1")));
    assert_eq!(begins.remembered(), 1, "sources with a full budget are removed");
}

/// The owner of a /48 network had 65,536 sources.
#[test]
fn regression_neighbouring_networks_share_the_limit_of_the_wider_network() {
    let (mut begins, now) = (SourceLimiter::new(8, PAUSE, 1000), now());
    let hosts = |count: u16| (0..count).map(|host| format!("[2001:db8:1:aa00::{host:x}]:1")).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, hosts(50)), 8, "/64");
    let nets = |first: u16| (0..256).map(move |net: u16| format!("[2001:db8:1:{:x}::1]:1", first + net)).collect::<Vec<_>>();
    assert_eq!(taken(&mut begins, now, nets(0xaa00)), 8, "/56: 16 in total");
    assert_eq!(taken(&mut begins, now, nets(0xab00)), 16, "/48: 32 in total");
    assert_eq!(taken(&mut begins, now, nets(0xac00)), 0);
    assert!(begins.take(now, from("[2001:db8:2::1]:1")), "another network");
}

#[test]
fn the_number_of_sources_is_bounded() {
    let (mut begins, now) = (SourceLimiter::new(8, PAUSE, 10), now());
    assert_eq!(taken(&mut begins, now, (0..50).map(|host| format!("198.51.100.{host}:1"))), 10);
    assert!(begins.take(now, from("198.51.100.3:1")), "a remembered source");
    assert!(begins.take(now + 20 * PAUSE, from("198.51.100.60:1")));
}
