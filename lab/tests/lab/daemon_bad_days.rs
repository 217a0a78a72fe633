//! The daemon dies, hangs, or finds a full disk or bad files: the network continues to work, and nothing is left behind.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, Web};
use braid_model::ByteCount;

const EAGER: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";

/// Whether both links get flows. Without Braid, the first default route takes all.
fn steered(lab: &Lab) -> bool {
    let links = chosen_many(lab, remote(10, 9), 6);
    links.contains(&0) && links.contains(&1)
}

/// Whether flows of both families follow the system alone.
fn unsteered(lab: &Lab) -> bool {
    let first = |to| chosen_many(lab, to, 6) == [0; 6];
    first(remote(10, 9)) && first(remote6(10, 9))
}

#[test]
fn a_suspended_daemon_stops_steering_and_resumes() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, EAGER);
    assert!(steered(&lab));
    let (mut stream, link) = std::iter::repeat_with(|| open(&lab, remote(10, 80))).find(|(_, link)| *link == 1).unwrap();
    up.signal("STOP");
    let took = eventually("traffic follows the system", || unsteered(&lab));
    println!("stopped: the system's own way after {took:?}");
    assert!(fetch(&mut stream, "/").is_ok(), "a flow on link {link} goes on");
    let (mut stream, _) = open(&lab, remote(11, 80));
    assert!(fetch(&mut stream, "/").is_ok());
    up.signal("CONT");
    let took = eventually("Braid steers again", || steered(&lab));
    println!("continued: steered again after {took:?}");
    up.wait_state("wlan0", "up");
}

#[test]
fn a_killed_daemon_leaves_nothing_and_the_next_one_starts() {
    if !able() {
        return;
    }
    // Under a strict filter, flows on all links except the system's first would be ended.
    let links = NAMES[..2].iter().map(|name| LinkSpec::new(name));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start().unwrap();
    let _web = Web::start(&lab).unwrap();
    let before = routing(&lab);
    for _ in 0..2 {
        let mut up = Up::start(&lab, EAGER);
        assert!(steered(&lab) && routing(&lab) != before);
        let (mut stream, _) = std::iter::repeat_with(|| open(&lab, remote(10, 80))).find(|(_, link)| *link == 1).unwrap();
        up.signal("KILL");
        let begin = Instant::now();
        up.wait_end();
        eventually("rules and routes are gone", || routing(&lab) == before);
        eventually("flows are not steered", || unsteered(&lab));
        println!("killed: all gone after {:?}", begin.elapsed());
        assert!(fetch(&mut stream, "/").is_ok(), "an established flow goes on");
    }
}

#[test]
fn flows_blocked_by_a_strict_filter_end_with_the_daemon() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    for ends in ["KILL", "TERM"] {
        let mut up = Up::start(&lab, EAGER);
        assert!(steered(&lab));
        let on = |wanted| std::iter::repeat_with(|| open(&lab, remote(10, 80))).find(|(_, link)| *link == wanted).unwrap().0;
        let (mut first, mut second) = (on(0), on(1));
        up.signal(ends);
        up.wait_end();
        second.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(second.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted, "its program may connect anew");
        assert!(fetch(&mut first, "/").is_ok(), "a connection that receives answers continues");
        assert!(fetch(&mut open(&lab, remote(10, 80)).0, "/").is_ok());
    }
}

#[test]
fn the_next_start_sweeps_after_daemon_and_watchdog_are_killed() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let before = routing(&lab);
    for next in ["down", "up"] {
        let mut up = Up::start(&lab, EAGER);
        up.signal("STOP");
        for watchdog in children(up.pid()) {
            assert!(std::process::Command::new("kill").args(["-9", &watchdog.to_string()]).status().unwrap().success());
        }
        up.signal("KILL");
        up.wait_end();
        eventually("flows are not steered", || unsteered(&lab));
        assert_ne!(routing(&lab), before, "nobody cleared away");
        if next == "down" {
            let output = up.braid(&["down"]);
            assert!(output.status.success(), "{}", text(&output.stderr));
        } else {
            drop(Up::start(&lab, EAGER));
        }
        assert_eq!(routing(&lab), before, "after braid {next}");
    }
}

/// Processes this one started.
fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn braid_down_leaves_nothing() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let before = routing(&lab);
    let mut up = Up::start(&lab, EAGER);
    assert!(steered(&lab));
    assert!(up.braid(&["down"]).status.success());
    up.wait_end();
    assert_eq!(routing(&lab), before);
    assert!(unsteered(&lab));
    assert!(!lab.directory().join("braid/socket").exists());
}

#[test]
fn a_second_daemon_is_refused_and_the_first_continues() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, EAGER);
    let there = routing(&lab);
    let other = lab.directory().join("other");
    let paths =
        ["--state-dir", &other.join("state").to_string_lossy(), "--socket", &other.join("socket").to_string_lossy()].map(str::to_owned);
    let arguments: Vec<&str> = ["up", "--foreground"].into_iter().chain(paths.iter().map(String::as_str)).collect();
    let output = up.braid(&arguments);
    let message = text(&output.stderr);
    assert!(
        !output.status.success()
            && message.contains("Braid already runs in this network namespace (process ")
            && message.contains("braid down"),
        "{message}"
    );
    assert_eq!(routing(&lab), there);
    assert!(steered(&lab));
}

/// A file system of 256 kB, visible only to the client, that is removed with the lab.
fn tiny(lab: &Lab) -> PathBuf {
    let path = lab.directory().join("tiny");
    fs::create_dir(&path).unwrap();
    client(lab, &format!("mount -t tmpfs -o size=256k,mode=700 tmpfs {}", path.display()));
    path
}

/// Fills the client's file system.
fn fill(lab: &Lab, path: &Path) {
    lab.client().run(|| fs::write(path.join("filler"), vec![0; 1 << 20]).unwrap_err()).unwrap();
}

#[test]
fn a_full_disk_is_reported_and_the_daemon_continues() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let state = tiny(&lab);
    fill(&lab, &state);
    let up = Up::start_with(&lab, EAGER, &state);
    eventually("flows are steered", || steered(&lab));
    let warnings = || up.status().unwrap()["warnings"].to_string();
    eventually("the trouble is told", || warnings().contains(&*state.to_string_lossy()));
    let (mut stream, _) = open(&lab, remote(10, 80));
    assert!(fetch(&mut stream, "/").is_ok());
    let told = up.status().unwrap()["warnings"].as_array().unwrap().len();
    assert_eq!(told, 1, "{}", warnings());
}

#[test]
fn a_disk_that_fills_later_loses_nothing_that_was_stored() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let state = tiny(&lab);
    let learn = |up: &Up<'_>, flows: u64| {
        let (mut stream, _) = open(&lab, remote(10, 80));
        fetch(&mut stream, "/").unwrap();
        drop(stream);
        eventually("the end is learnt from", || learnt(up) == Some(flows));
    };
    let finish = |mut up: Up<'_>| {
        assert!(up.braid(&["down"]).status.success());
        up.wait_end();
        up.log()
    };
    let up = Up::start_with(&lab, EAGER, &state);
    learn(&up, 1);
    let before = finish(up);

    let up = Up::start_with(&lab, EAGER, &state);
    eventually("what was stored is known", || learnt(&up) == Some(1));
    fill(&lab, &state);
    learn(&up, 2);
    let log = finish(up).split_off(before.len());
    assert!(log.contains(&*state.to_string_lossy()), "the trouble is told: {log}");

    lab.client().run(|| fs::remove_file(state.join("filler")).unwrap()).unwrap();
    let up = Up::start_with(&lab, EAGER, &state);
    eventually("what was stored is known still", || learnt(&up) == Some(1));
    assert!(steered(&lab));
}

/// How many flows to port 80 a program's demand was learnt from.
fn learnt(up: &Up<'_>) -> Option<u64> {
    let apps: serde_json::Value = serde_json::from_slice(&up.braid(&["apps", "--json"]).stdout).unwrap();
    apps["apps"].as_array().unwrap().iter().find(|app| app["port"] == 80)?["samples"].as_u64()
}

#[test]
fn a_corrupt_state_is_moved_aside_and_reported() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let state = lab.directory().join("braid/state");
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("braid.sqlite"), "this is no database at all, and was not for a long time".repeat(100)).unwrap();
    let up = Up::start(&lab, EAGER);
    assert!(steered(&lab));
    let warnings = up.status().unwrap()["warnings"].to_string();
    assert!(warnings.contains("braid.sqlite"), "{warnings}");
    let kept = fs::read_dir(&state).unwrap().flatten().any(|file| fs::read(file.path()).unwrap().starts_with(b"this is no database"));
    assert!(kept, "what was there is not thrown away: {warnings}");
}

#[test]
fn regression_a_rule_for_a_missing_program_does_not_prevent_the_start() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let rules = "[[app]]\nmatch = { exe = \"/opt/uninstalled/zoom\" }\nprefer = [\"lte0\"]\n[[app]]\nmatch = { port = 9 }\nlinks = [\"usb7\", \"lte0\"]\n";
    let up = Up::start(&lab, &format!("{EAGER}{rules}"));
    assert!(
        up.log().contains("there is currently no program /opt/uninstalled/zoom") && up.log().contains("there is currently no link usb7"),
        "{}",
        up.log()
    );
    assert_eq!(chosen_many(&lab, remote(10, 9), 6), [1; 6], "the rest of the rule holds");
    let refused = text(&up.braid(&["reload"]).stderr);
    assert!(
        refused.contains("error: there is currently no link usb7") && refused.contains("warning: there is currently no program"),
        "{refused}"
    );
    up.configure(&format!("{EAGER}{}", rules.replace("\"usb7\", ", "")));
    let taken = up.braid(&["reload"]);
    assert!(taken.status.success() && text(&taken.stdout).contains("there is currently no program"), "{taken:?}");
}

#[test]
fn a_bad_reload_changes_nothing_and_names_line_and_remedy() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, &format!("{EAGER}[[app]]\nmatch = {{ port = 9 }}\nlinks = [\"lte0\"]\n"));
    assert_eq!(chosen_many(&lab, remote(10, 9), 6), [1; 6]);
    up.configure(&format!("{EAGER}[[app]]\nmatch = {{ port = 9 }}\nlinks = [\"lte0\"]\nlinsk = [\"wlan0\"]\n"));
    let output = up.braid(&["reload"]);
    let message = text(&output.stderr);
    assert!(!output.status.success() && message.contains("braid.toml:6") && message.contains("links"), "{message}");
    assert_eq!(chosen_many(&lab, remote(10, 9), 6), [1; 6]);
    up.configure("scheduler = \"max-troughput\"\n");
    up.signal("HUP");
    eventually("the log tells", || up.log().contains("max-troughput"));
    assert!(up.log().contains("max-throughput"), "the nearest valid name");
    assert_eq!(chosen_many(&lab, remote(10, 9), 6), [1; 6]);
    let status = up.status().unwrap();
    assert_eq!(status["scheduler"], "round-robin");
    assert!(status["warnings"].to_string().contains("refused"), "{status}");
    up.configure(EAGER);
    assert!(up.braid(&["reload"]).status.success());
    assert_eq!(up.status().unwrap()["warnings"].as_array().unwrap().len(), 0);
}

#[test]
fn a_reload_changes_the_policy_for_new_flows_only() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let rule = |link: &str| format!("{EAGER}[[app]]\nmatch = {{ port = 80 }}\nlinks = [\"{link}\"]\n");
    let up = Up::start(&lab, &rule("wlan0"));
    let (mut old, link) = open(&lab, remote(10, 80));
    assert_eq!(link, 0);
    up.configure(&rule("lte0"));
    assert!(up.braid(&["reload"]).status.success());
    assert_eq!(chosen_many(&lab, remote(10, 80), 6), [1; 6]);
    let port = old.local_addr().unwrap().port();
    let watches = watch_all(&lab, Filter { source_port: Some(port), ..Filter::to(Lab::internet(10)) });
    assert!(fetch(&mut old, "/1000.bin").unwrap() > 1000);
    let counts = packets(&lab, &watches);
    assert!(counts[0] > 0 && counts[1] == 0, "the old flow stays where it is: {counts:?}");
    up.configure(&rule("wlan0"));
    up.signal("HUP");
    eventually("the third policy is in force", || chosen_many(&lab, remote(10, 80), 6) == [0; 6]);
}

#[test]
fn ten_thousand_short_flows_leave_only_correct_counts() {
    if !able() {
        return;
    }
    const WORKERS: usize = 20;
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, EAGER);
    let burst = |count: usize| {
        let work = || {
            for _ in 0..count / WORKERS {
                let mut stream = TcpStream::connect_timeout(&remote(10, 80), LIMIT).unwrap();
                assert!(fetch(&mut stream, "/1000.bin").unwrap() > 1000);
            }
        };
        lab.client().run(|| std::thread::scope(|scope| (0..WORKERS).for_each(|_| drop(scope.spawn(work))))).unwrap();
    };
    // The first flows fill caches and maps.
    burst(2000);
    eventually("no flow is left", || up.status().unwrap()["flows"] == 0);
    let (memory, before) = (up.resident(), up.status().unwrap());
    let begin = Instant::now();
    burst(10_000);
    println!("10,000 flows in {:?}", begin.elapsed());
    let idle = |status: &serde_json::Value| {
        let links = status["links"].as_array().unwrap();
        links.iter().all(|link| link["flows"] == 0 && link["load_down_bytes"] == 0 && link["load_up_bytes"] == 0)
    };
    eventually("loads are back to nothing", || up.status().is_some_and(|status| status["flows"] == 0 && idle(&status)));
    let after = up.status().unwrap();
    let grown = |key: &str| after["counters"][key].as_u64().unwrap() - before["counters"][key].as_u64().unwrap();
    assert_eq!(grown("steered"), 10_000);
    assert_eq!((grown("denied"), grown("failed"), grown("untracked"), grown("lost_events")), (0, 0, 0, 0));
    let moved = |status: &serde_json::Value| -> u64 {
        status["links"].as_array().unwrap().iter().map(|link| link["rx_bytes"].as_u64().unwrap()).sum()
    };
    let each = (moved(&after) - moved(&before)) / 10_000;
    assert!((1000..1500).contains(&each), "a file and its header: {each} bytes a flow");
    let growth = up.resident().saturating_sub(memory);
    println!("resident {} kB, {growth} kB more than before", up.resident());
    assert!(growth < 4096, "{growth} kB more than before");
}
