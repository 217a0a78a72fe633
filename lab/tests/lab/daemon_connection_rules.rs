//! The schedulers "least-finish", "least-makespan" and "random" give connections the links that their rules say, in the kernel.

use std::net::TcpStream;

use crate::support::*;
use braid_lab::{Lab, Web};
use braid_model::ByteCount;
use serde_json::json;

/// Three links. wlan0, the system's own choice, has a quarter of the capacity of each of the others. Flows of the user nobody use eth0 only.
fn config(scheduler: &str) -> String {
    let link = |(name, mbps): (&&str, u32)| format!("[[link]]\nname = \"{name}\"\ncapacity_down = \"{mbps} Mbit/s\"\n");
    let links: String = NAMES.iter().zip([20, 80, 80]).map(link).collect();
    format!(
        "scheduler = \"{scheduler}\"\nprobe = \"continuous\"\ndefault_demand = \"2 MB\"\n{links}[[app]]\nmatch = {{ user = {NOBODY} }}\nlinks = [\"eth0\"]\n"
    )
}

/// Opens connections one after the other. Returns them with the numbers of their links.
fn open_many(lab: &Lab, user: Option<u32>, count: usize) -> (Vec<TcpStream>, Vec<usize>) {
    let one = |_| {
        let stream = TcpStream::connect_timeout(&remote(10, 80), LIMIT).unwrap();
        let link = number(stream.local_addr().unwrap().ip());
        (stream, link)
    };
    lab.client().run_as(user, || (0..count).map(one).unzip()).unwrap()
}

/// Link and reason that `braid explain` gives for the next connection.
fn explained(up: &Up<'_>) -> (String, String) {
    let (status, answer) = up.api("POST /v1/explain", &json!({"name": "x", "destination": remote(10, 80).ip().to_string(), "port": 80}));
    assert_eq!(status, 200, "{answer}");
    (answer["link"].as_str().unwrap().to_owned(), answer["reason"].as_str().unwrap().to_owned())
}

/// Starts the scheduler with 20 flows of 2 MB on eth0, which it needs 4 s for, and passes the daemon on.
fn with_busy_link(scheduler: &str, check: impl FnOnce(&Lab, &Up<'_>)) {
    let lab = lab(3);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, &config(scheduler));
    assert_eq!(up.status().unwrap()["scheduler"], scheduler);
    let (_busy, links) = open_many(&lab, Some(NOBODY), 20);
    assert_eq!(links, [2; 20]);
    check(&lab, &up);
}

#[test]
fn least_finish_takes_the_link_that_finishes_first() {
    if !able() {
        return;
    }
    with_busy_link("least-finish", |lab, up| {
        let (link, why) = explained(up);
        assert!(link == "lte0" && why.starts_with("it finishes its load and the flow first, in 0.2"), "{link}: {why}");
        // 2 MB take 0.2 s on lte0 and 0.8 s on wlan0.
        let (_flows, links) = open_many(lab, None, 5);
        assert_eq!(links, [1, 1, 1, 0, 1]);
    });
}

#[test]
fn least_makespan_takes_the_systems_choice_while_the_whole_ends_no_later() {
    if !able() {
        return;
    }
    with_busy_link("least-makespan", |lab, up| {
        let (link, why) = explained(up);
        assert!(link == "wlan0" && why.contains("before the busiest link finishes its load, in 4."), "{link}: {why}");
        // 5 flows take 4 s on wlan0, then 20 take 4 s on lte0.
        let (_flows, links) = open_many(lab, None, 25);
        assert_eq!((&links[..5], &links[5..]), (&[0; 5][..], &[1; 20][..]));
        let text = text(&up.braid(&["explain", "curl", "203.0.113.10:80"]).stdout);
        assert!(text.contains("no link finishes the flow before the busiest one finishes its load"), "{text}");
    });
}

#[test]
fn random_takes_each_link_with_the_same_probability() {
    if !able() {
        return;
    }
    let mut sequences = Vec::new();
    for _ in 0..2 {
        with_busy_link("random", |lab, up| {
            for _ in 0..5 {
                let (link, why) = explained(up);
                assert!(why.starts_with("the next flow draws it at random among 3 links"), "{why}");
                assert_eq!(NAMES[open_many(lab, None, 1).1[0]], link, "the next flow draws what the explanation says");
            }
            let (_flows, links) = open_many(lab, None, 300);
            // 100 expected, standard deviation 8.
            let counts = [0, 1, 2].map(|link| links.iter().filter(|found| **found == link).count());
            assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
            println!("300 connections: {counts:?}");
            sequences.push(links);
        });
    }
    // Two equal sequences of 300 have a probability of 3^-300; a third of the links are equal by chance.
    assert_ne!(sequences[0], sequences[1], "each daemon draws its own seed");
}
