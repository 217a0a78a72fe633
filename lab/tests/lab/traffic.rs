//! Real programs and servers reach the rates of the links.

use std::time::{Duration, Instant};

use braid_lab::{Lab, LinkSpec, Responder, Web, effective_user, mbps, ms, workload};
use braid_model::ByteCount;

/// Whether labs can be created. In CI it is an error if they cannot.
fn able() -> bool {
    if effective_user() == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "the lab's tests need root");
    println!("skipped: needs root");
    false
}

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn one_download_reaches_nine_tenths_of_the_payload_rate() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10))).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let begin = Instant::now();
    // As soon as the machine has time for it: a busy one makes curl late, never early.
    loop {
        let plan = workload::together(1, ByteCount::new(4_000_000));
        let records = workload::run(&web, &plan, LIMIT, |curl| lab.client().command(curl)).unwrap();
        let summary = workload::summarise(&records);
        let counters = lab.counters(0).unwrap();
        println!("{summary:?} {counters:?}");
        assert!(records[0].complete(), "{records:?}");
        assert_eq!(records[0].local, Some([10, 77, 0, 2].into()));
        assert!(summary.goodput < mbps(20), "{}", summary.goodput);
        assert_eq!(counters.missed, 0);
        // 1,448 of 1,500 bytes are payload.
        if summary.goodput.bps() as f64 > 0.9 * 20e6 * 1448.0 / 1500.0 {
            return;
        }
        assert!(begin.elapsed() < LIMIT, "{}", summary.goodput);
    }
}

#[test]
fn eight_links_at_once_lose_no_frame() {
    if !able() {
        return;
    }
    let links = (0..8).map(|i| LinkSpec::new(&format!("link{i}")).rate(mbps(20)).delay(ms(10)));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let url = web.url(ByteCount::new(4_000_000)).unwrap();
    let children: Vec<_> = (0..8)
        .map(|i| {
            let mut curl = lab.client().command("curl").unwrap();
            curl.args(["-s", "-o", "/dev/null", "--interface", &format!("link{i}"), &url]).spawn().unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    for link in 0..8 {
        let counters = lab.counters(link).unwrap();
        assert!(counters.down.delivered_bytes.get() > 4_000_000 && counters.missed == 0, "{counters:?}");
    }
}

#[test]
fn names_are_resolved_and_datagrams_are_echoed() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let dig = |args: &[&str]| {
        let output = lab.client().command_as(Some(65534), "dig").unwrap().args(["+short", "+time=30", "+tries=2"]).args(args).output();
        String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
    };
    assert_eq!(dig(&["n12.lab"]), "203.0.113.12", "by resolv.conf, unprivileged");
    assert_eq!(dig(&["@10.77.0.1", "www.example.net"]), "203.0.113.10");
    assert_eq!(dig(&["@2001:db8:113::10", "n11.lab", "AAAA"]), "2001:db8:113::11");
    let echoed = lab.client().run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.send_to(b"hello", "203.0.113.30:7").unwrap();
        let mut buffer = [0; 16];
        let (length, from) = socket.recv_from(&mut buffer).unwrap();
        (buffer[..length].to_vec(), from)
    });
    assert_eq!(echoed.unwrap(), (b"hello".to_vec(), "203.0.113.30:7".parse().unwrap()));
}

#[test]
fn a_direct_link_carries_traffic_and_is_not_counted() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let records =
        workload::run(&web, &workload::together(3, ByteCount::new(16_000_000)), LIMIT, |curl| lab.client().command(curl)).unwrap();
    assert!(records.iter().all(workload::Record::complete), "{records:?}");
    workload::page(&web, 30, ByteCount::new(10_000), |curl| lab.client().command(curl)).unwrap();
    assert!(lab.counters(0).is_err());
}
