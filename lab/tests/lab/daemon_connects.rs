//! A connect on a link that died silently moves to another link.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use socket2::SockRef;

const ROUND_ROBIN: &str = "scheduler = \"round-robin\"\n";
/// Upper bound for a moved connect. A connect that waits on the dead link until the kernel gives up takes longer.
const TIMEOUT: Duration = Duration::from_secs(20);

fn two_links() -> Lab {
    let links = NAMES.iter().zip([10, 40]).map(|(name, delay)| LinkSpec::new(name).rate(mbps(20)).delay(ms(delay)));
    links.take(2).fold(Lab::builder(), |builder, link| builder.link(link)).rp_filter(2).start().unwrap()
}

/// A connect of the client: its duration and local address.
fn connect(to: SocketAddr) -> Result<(Duration, IpAddr, TcpStream), String> {
    let begin = Instant::now();
    let stream = TcpStream::connect_timeout(&to, TIMEOUT).map_err(|error| format!("after {:?}: {error}", begin.elapsed()))?;
    let local = stream.local_addr().map_err(|error| error.to_string())?.ip();
    Ok((begin.elapsed(), local, stream))
}

/// Opens `count` connections at the same time.
fn connect_many(lab: &Lab, user: Option<u32>, to: SocketAddr, count: usize) -> Vec<Result<(Duration, IpAddr, TcpStream), String>> {
    let all = || {
        let threads: Vec<_> = (0..count).map(|_| std::thread::spawn(move || connect(to))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    };
    lab.client().run_as(user, all).unwrap()
}

fn moved(up: &Up<'_>) -> u64 {
    up.status().unwrap()["counters"]["moved"].as_u64().unwrap()
}

fn dynaddr(lab: &Lab) -> String {
    client(lab, "sysctl -n net.ipv4.ip_dynaddr").trim().to_owned()
}

#[test]
fn no_connect_fails_when_a_link_dies_silently() {
    if !able() {
        return;
    }
    let lab = two_links();
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    for user in [None, Some(NOBODY)] {
        let up = Up::start(&lab, ROUND_ROBIN);
        eventually("both links are up", || ["wlan0", "lte0"].iter().all(|name| up.state(name) == "up"));
        assert_eq!(chosen_many(&lab, remote(10, 80), 4).iter().sum::<usize>(), 2, "both are used");
        lab.dark(1).unwrap();
        let done = connect_many(&lab, user, remote(10, 80), 100);
        let mut late: Vec<Duration> = Vec::new();
        for outcome in done {
            let (took, local, mut stream) = outcome.unwrap_or_else(|error| panic!("as {user:?}, a connect failed {error}\n{}", up.log()));
            assert_eq!(number(local), 0, "it ends up on the link that lives");
            assert!(fetch(&mut stream, "/1000.bin").unwrap() > 1000);
            if took > ms(400) {
                late.push(took);
            }
        }
        late.sort();
        println!(
            "as {user:?}: {} of 100 connects found the dead link; median {:?}, longest {:?}",
            late.len(),
            late[late.len() / 2],
            late[late.len() - 1]
        );
        assert!(late.len() >= 20 && moved(&up) >= late.len() as u64, "{} were late, {} moved", late.len(), moved(&up));
        lab.bright(1).unwrap();
    }
}

/// Two connects may have the same local port if they use different links. A move must not give both the same address and port.
#[test]
fn a_moved_connect_takes_no_address_and_port_of_a_living_connection() {
    if !able() {
        return;
    }
    let lab = two_links();
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    eventually("both links are up", || ["wlan0", "lte0"].iter().all(|name| up.state(name) == "up"));
    // With so few ports, most ports that one link uses are used by the other one too.
    lab.client().run(|| std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40127")).unwrap().unwrap();
    lab.dark(1).unwrap();
    let mut living = Vec::new();
    // A connect fails if its port is in use on the link that lives.
    for (_, local, stream) in connect_many(&lab, None, remote(10, 80), 100).into_iter().flatten() {
        assert_eq!(number(local), 0, "it ends up on the link that lives");
        living.push(stream);
    }
    let ports: std::collections::BTreeSet<_> = living.iter().map(|stream| stream.local_addr().unwrap().port()).collect();
    println!("{} of 100 connects succeeded, {} moved", living.len(), moved(&up));
    assert!(moved(&up) > 0);
    assert_eq!(ports.len(), living.len(), "each connection has its own port");
    for stream in &mut living {
        assert!(fetch(stream, "/1000.bin").unwrap() > 1000);
    }
}

/// An IPv6 connect cannot move. It ends as soon as its link is judged dead, so that its program can try again.
#[test]
fn an_ipv6_connect_ends_with_its_link_and_the_next_one_avoids_it() {
    if !able() {
        return;
    }
    let lab = two_links();
    let _web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    eventually("both links are up", || ["wlan0", "lte0"].iter().all(|name| up.state(name) == "up"));
    let to = remote6(10, 80);
    assert_eq!(chosen_many(&lab, to, 4).iter().sum::<usize>(), 2, "both are used");
    lab.dark(1).unwrap();
    let attempt = |_| {
        std::thread::spawn(move || {
            let begin = Instant::now();
            let first = TcpStream::connect_timeout(&to, TIMEOUT).map_err(|error| (error.kind(), begin.elapsed()));
            let then = first.is_err().then(|| TcpStream::connect_timeout(&to, TIMEOUT).unwrap().local_addr().unwrap());
            (first.err(), then, begin.elapsed())
        })
    };
    let all = || (0..100).map(attempt).collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>();
    let done = lab.client().run_as(Some(NOBODY), all).unwrap();
    let mut ended = Vec::new();
    for (failed, then, took) in done {
        let Some((kind, after)) = failed else { continue };
        assert_eq!(kind, std::io::ErrorKind::ConnectionAborted, "after {after:?}\n{}", up.log());
        assert_eq!(number(then.unwrap().ip()), 0, "the second attempt uses the link that lives");
        ended.push((after, took));
    }
    ended.sort();
    println!("IPv6: {} of 100 connects ended; median and total with the second attempt {:?}", ended.len(), ended[ended.len() / 2]);
    assert!(ended.len() >= 20, "{ended:?}");
}

#[test]
fn a_moved_connect_survives_the_end_of_braid() {
    if !able() {
        return;
    }
    let lab = two_links();
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let mut up = Up::start(&lab, "scheduler = \"round-robin\"\n");
    lab.dark(0).unwrap();
    let mut streams: Vec<_> = connect_many(&lab, None, remote(10, 80), 4).into_iter().map(Result::unwrap).collect();
    assert!(moved(&up) >= 2 && streams.iter().all(|(_, local, _)| number(*local) == 1), "{streams:?}");
    eventually("each is bound to its link, and no mark is left", || {
        streams.iter().all(|(_, _, stream)| {
            let socket = SockRef::from(stream);
            socket.mark().unwrap() == 0 && socket.device().unwrap().as_deref() == Some(b"lte0".as_slice())
        })
    });
    up.signal("KILL");
    up.wait_end();
    eventually("what it did to the system is undone", || !routing(&lab).contains("unreachable") && dynaddr(&lab) == "0");
    for (_, _, stream) in &mut streams {
        assert!(fetch(stream, "/1000.bin").unwrap() > 1000);
    }
}

#[test]
fn the_system_setting_is_restored_and_a_users_setting_is_kept() {
    if !able() {
        return;
    }
    let lab = two_links();
    assert_eq!(dynaddr(&lab), "0");
    let mut up = Up::start(&lab, ROUND_ROBIN);
    assert_eq!(dynaddr(&lab), "1");
    up.signal("TERM");
    up.wait_end();
    assert_eq!(dynaddr(&lab), "0");
    client(&lab, "sysctl -w net.ipv4.ip_dynaddr=1");
    let mut up = Up::start(&lab, ROUND_ROBIN);
    up.signal("TERM");
    up.wait_end();
    assert_eq!(dynaddr(&lab), "1", "it was the user's");
    client(&lab, "sysctl -w net.ipv4.ip_dynaddr=0");
    let _up = Up::start(&lab, "move_connects = false\n");
    assert_eq!(dynaddr(&lab), "0", "it is not wanted");
}

#[test]
fn a_connect_with_one_allowed_link_is_not_moved() {
    if !able() {
        return;
    }
    let lab = two_links();
    let _web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, "[[app]]\nmatch = { port = 80 }\nlinks = [\"lte0\"]\n");
    lab.dark(1).unwrap();
    let to = remote(10, 80);
    let failed = lab.client().run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2)).map(drop)).unwrap();
    assert!(failed.is_err());
    assert_eq!(moved(&up), 0);
}
