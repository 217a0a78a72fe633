//! `braid run` begins a connect again over another link when its link died silently: real programs of a user without privilege.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use crate::support::user::User;
use crate::support::*;
use braid_lab::Web;
use braid_model::ByteCount;

const TURNS: [&str; 4] = ["run", "--scheduler", "round-robin", "--"];

/// `connects.py KIND HOST PORT COUNT`: connects `COUNT` times at once and prints the outcome of each; see the file.
const PROGRAM: &str = include_str!("support/connects.py");

/// The outcome of one connect.
#[derive(Debug)]
struct Outcome {
    /// Number of the link that it went over, or the error.
    link: Result<usize, String>,
    seconds: f64,
    /// Violations of what the program may expect from its socket, as text.
    wrong: String,
}

/// Runs `count` connects of this kind at once, after the first link's silence has begun: both links are known to work, and then idle.
fn connects(user: &User, kind: &str, host: &str, count: usize) -> Vec<Outcome> {
    user.keep("connects.py", PROGRAM);
    let program = ["python3", "connects.py", kind, host, "80", &count.to_string()];
    let mut child = user.braid(&[&TURNS[..], &program].concat()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let first = lines.next();
    assert_eq!(first.as_deref(), Some("both links 2 2"), "four connects take turns");
    user.lab.dark(1).unwrap();
    writeln!(child.stdin.take().unwrap(), "go").unwrap();
    let outcome = |line: String| {
        let [address, seconds, wrong] = line.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
        let link = address.parse().map(number).map_err(|_| address.to_owned());
        Outcome { link, seconds: seconds.parse().unwrap(), wrong: wrong.to_owned() }
    };
    let outcomes: Vec<_> = lines.map(outcome).collect();
    assert!(child.wait().unwrap().success());
    user.lab.bright(1).unwrap();
    assert_eq!(outcomes.len(), count);
    outcomes
}

/// The durations of the connects that did not find a working link at once, sorted. None has failed, and each ended up on the living link.
#[track_caller]
fn late(kind: &str, outcomes: &[Outcome]) -> Vec<f64> {
    for outcome in outcomes {
        assert_eq!((&outcome.link, outcome.wrong.as_str()), (&Ok(0), "ok"), "{kind}: {outcome:?}");
    }
    let mut late: Vec<f64> = outcomes.iter().map(|outcome| outcome.seconds).filter(|seconds| *seconds > 0.4).collect();
    late.sort_by(f64::total_cmp);
    let (median, longest) = (late.get(late.len() / 2), late.last());
    println!("{kind}: {} of {} connects found the dead link; median {median:?} s, longest {longest:?} s", late.len(), outcomes.len());
    late
}

fn user() -> (User, Web) {
    let user = User::new();
    let web = Web::start(&user.lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    (user, web)
}

#[test]
fn no_connect_fails_when_a_link_dies_silently() {
    if !able() {
        return;
    }
    let (user, _web) = user();
    for host in [remote(10, 80).ip(), remote6(10, 80).ip()] {
        for kind in ["blocking", "poll", "epoll"] {
            let what = format!("{kind} to {host}");
            let late = late(&what, &connects(&user, kind, &host.to_string(), 100));
            assert!(late.len() >= 20, "{what}: {} were late", late.len());
        }
    }
}

#[test]
fn a_program_keeps_its_socket_options_and_flags() {
    if !able() {
        return;
    }
    let (user, _web) = user();
    let late = late("configured", &connects(&user, "configured", "203.0.113.10", 8));
    assert!(late.len() >= 2, "{} were late", late.len());
}

/// A second socket cannot replace one that is registered elsewhere: an epoll instance or another descriptor would keep the first one.
#[test]
fn a_socket_with_other_references_is_left_alone() {
    if !able() {
        return;
    }
    let (user, _web) = user();
    for kind in ["registered", "duplicated"] {
        let outcomes = connects(&user, kind, "203.0.113.10", 8);
        let living = outcomes.iter().filter(|outcome| outcome.link == Ok(0)).count();
        assert!((4..8).contains(&living), "{kind}: those on the dead link wait as without Braid: {outcomes:?}");
        assert!(outcomes.iter().all(|outcome| outcome.wrong == "ok"), "{kind}: {outcomes:?}");
    }
}

/// One program that connects in an event loop, `curl` with many transfers at once: its connects wait for a link in doubt together, not one by one.
#[test]
fn parallel_transfers_of_one_event_loop_are_not_delayed_one_by_one() {
    if !able() {
        return;
    }
    let (user, _web) = user();
    let script = "for turn in 1 2; do curl -sS -o /dev/null http://203.0.113.10/1000.bin; done; read go && sleep 2.5 && \
                  exec curl -sS --parallel --parallel-immediate --max-time 10 -w '%{local_ip} %{time_connect}\\n' $URLS";
    let urls: String = (0..20).map(|_| "-o /dev/null http://203.0.113.10/1000.bin ").collect();
    let mut command = user.braid(&[&TURNS[..], &["bash", "-c", script]].concat());
    let mut child = command.env("URLS", urls).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    eventually("both links were used", || user.received().iter().all(|bytes| *bytes > 1000));
    user.lab.dark(1).unwrap();
    writeln!(child.stdin.take().unwrap(), "go").unwrap();
    let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
    assert!(child.wait().unwrap().success(), "{lines:?}");
    println!("curl --parallel: {lines:?}");
    assert!(lines.len() == 20 && lines.iter().all(|line| line.starts_with("10.77.0.2 ")), "{lines:?}");
}
