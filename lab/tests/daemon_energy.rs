//! The scheduler for energy and money: the kernel chooses the right link, and the daemon reports joules.

mod support;

use braid_lab::{Lab, Web};
use braid_model::ByteCount;
use socket2::{Domain, Protocol, Socket, Type};
use support::*;

/// Two links of 10 Mbit/s: wlan0, the system's own choice, needs three times as much as lte0.
fn config(utility: &str) -> String {
    let link = |name: &str, milliwatts: u32| {
        format!(
            "[[link]]\nname = \"{name}\"\ncapacity_down = \"10 Mbit/s\"\ncapacity_up = \"5 Mbit/s\"\n\
             energy = {{ receive_mw = {milliwatts}, transmit_mw = {milliwatts} }}\n"
        )
    };
    format!("scheduler = \"operetta\"\nprobe = \"continuous\"\nutility = {utility}\n{}{}", link("wlan0", 3000), link("lte0", 1000))
}

/// Number of ten concurrent connections that each link gets.
fn together(lab: &Lab) -> [usize; 2] {
    let links = lab.client().run(|| {
        let begin = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
            socket.set_nonblocking(true).unwrap();
            // Under way is all it needs to be.
            let _ = socket.connect(&remote(10, 9).into());
            socket
        };
        let sockets: Vec<Socket> = (0..10).map(|_| begin()).collect();
        sockets.iter().map(|socket| number(socket.local_addr().unwrap().as_socket().unwrap().ip())).collect::<Vec<_>>()
    });
    let links = links.unwrap();
    [0, 1].map(|link| links.iter().filter(|found| **found == link).count())
}

#[test]
fn a_reloaded_utility_applies_to_the_next_flow() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1_000_000)).unwrap();
    let up = Up::start(&lab, &config("0"));
    assert_eq!(together(&lab), [0, 10], "least energy");
    let status = up.status().unwrap();
    assert_eq!((&status["utility"], &status["scheduler"]), (&0.0.into(), &"operetta".into()));
    let target = |which: &str| status[which].as_u64().unwrap();
    assert!((9_700_000..=10_000_000).contains(&target("target_down_bps")) && (4_850_000..=5_000_000).contains(&target("target_up_bps")));
    assert!(status["battery"].is_null() || status["battery"]["level"].is_number());

    let reload = |utility: &str| {
        up.configure(&config(utility));
        let output = up.braid(&["reload"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    reload("1.0");
    assert_eq!(together(&lab), [5, 5], "most throughput");
    reload("\"match-default\"");
    assert_eq!(together(&lab), [0, 10], "the system's own throughput for less");

    let (mut stream, link) = open(&lab, remote(10, 80));
    assert_eq!(link, 1);
    fetch(&mut stream, "/1000000.bin").unwrap();
    // 1 MB at 10 Mbit/s and 1 W take 0.8 J, and headers and capacity as the kernel knows it a little more.
    eventually("the link's joules are told", || up.link("lte0")["energy_j"].as_f64().is_some_and(|joules| (0.8..1.2).contains(&joules)));
    assert_eq!(up.link("lte0")["energy_source"], "the configuration");
    let explained = text(&up.braid(&["explain", "curl", "203.0.113.10:80"]).stdout);
    assert!(explained.contains("goes over lte0") && explained.contains("cheapest link that finishes within"), "{explained}");
}
