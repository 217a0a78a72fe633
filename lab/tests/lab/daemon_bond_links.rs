//! Bonds under priorities, roles, power saving and allowances: bytes of each link by capture, in both directions.

use std::fs;
use std::thread;

use crate::support::bonded::{Capture, Relay, curl, curl_upload, ended, good_paths, start_sink};
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Lab, Web, ms};
use braid_model::{ByteCount, Direction};

const DIRECTIONS: [Direction; 2] = [Direction::Up, Direction::Down];
/// Control traffic of an unused path, and what a backup carries while a busy machine delays the other path. At most 4 % of a transfer.
const CONTROL: u64 = 120_000;
const SINK: u16 = 8080;

/// curl's flows are bonded; `wlan` and `lte` are more keys of the links. A byte over lte0 costs a third of one over wlan0.
fn config(top: &str, [wlan, lte]: [&str; 2]) -> String {
    let link = |name: &str, mbps: u32, milliwatts: u32, more: &str| {
        format!(
            "[[link]]\nname = \"{name}\"\ncapacity_down = \"{mbps} Mbit/s\"\ncapacity_up = \"{mbps} Mbit/s\"\n\
             energy = {{ idle_mw = 100, receive_mw = {milliwatts}, transmit_mw = {milliwatts} }}\n{more}\n"
        )
    };
    let links = link("wlan0", 20, 6100, wlan) + &link("lte0", 10, 1100, lte);
    format!("{top}\n{links}[[app]]\nmatch = {{ name = \"curl\" }}\ncarry = \"bond\"\n")
}

fn reload(up: &Up<'_>, config: &str) {
    up.configure(config);
    let reloaded = up.braid(&["reload"]);
    assert!(reloaded.status.success(), "{}", text(&reloaded.stderr));
}

/// Starts a transfer of `size` bytes through the relay.
fn start(lab: &Lab, web: &Web, direction: Direction, size: u64) -> std::process::Child {
    let size = ByteCount::new(size);
    match direction {
        Direction::Down => curl(lab, &web.url(size).unwrap()),
        Direction::Up => {
            start_sink(lab, 11, SINK);
            curl_upload(lab, &web.file(size).unwrap(), 11, SINK)
        }
    }
}

/// Makes a transfer and returns the bytes on each link in its direction.
fn transfer(lab: &Lab, web: &Web, direction: Direction, size: u64) -> [u64; 2] {
    let capture = Capture::start(lab);
    assert_eq!(ended(start(lab, web, direction, size)).0, size);
    capture.bytes(direction)
}

fn path_state(up: &Up<'_>, link: &str) -> String {
    let status = up.status().unwrap();
    let paths = status["peers"][0]["paths"].as_array().cloned().unwrap_or_default();
    paths.iter().find(|path| path["link"] == link).map_or("none", |path| path["state"].as_str().unwrap_or("none")).to_owned()
}

/// A link of lower priority and one in reserve carry nothing of a bonded flow, in either direction.
#[test]
fn links_of_lower_priority_and_backups_carry_no_bonded_bytes() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let up = relay.join(&config("", ["", ""]));
    for key in ["priority = 1", "role = \"backup\""] {
        reload(&up, &config("", ["", ""]));
        eventually("both paths are good", || good_paths(&up) == 2);
        for direction in DIRECTIONS {
            let [wlan, lte] = transfer(&lab, &web, direction, 3_000_000);
            println!("without a key, {direction:?}: {wlan} bytes over wlan0, {lte} over lte0");
            assert!(wlan > 1_000_000 && lte > 500_000, "{direction:?}: {wlan} and {lte} bytes");
        }
        reload(&up, &config("", [key, ""]));
        eventually("wlan0 is a backup", || path_state(&up, "wlan0") == "backup");
        for direction in DIRECTIONS {
            let [wlan, lte] = transfer(&lab, &web, direction, 3_000_000);
            println!("{key}, {direction:?}: {wlan} bytes over wlan0, {lte} over lte0");
            assert!(wlan < CONTROL && lte > 3_000_000, "{key}, {direction:?}: {wlan} and {lte} bytes");
        }
    }
}

/// With a low battery a bonded flow uses the link with the cheapest byte alone, in either direction.
#[test]
fn power_saving_leaves_bonded_bytes_one_link() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let sys = lab.directory().join("sys");
    let battery = sys.join("class/power_supply/BAT0");
    fs::create_dir_all(&battery).unwrap();
    fs::create_dir_all(sys.join("class/net")).unwrap();
    for (file, text) in [("type", "Battery"), ("status", "Discharging"), ("capacity", "60"), ("power_now", "8250000")] {
        fs::write(battery.join(file), format!("{text}\n")).unwrap();
    }
    let state = lab.directory().join("braid/state");
    let saving = config("power_saving = true\n", ["", ""]);
    let up = relay.join_from(Up::start_told(&lab, &saving, &state, &["--sys", sys.to_str().unwrap()]));
    for direction in DIRECTIONS {
        let [wlan, lte] = transfer(&lab, &web, direction, 3_000_000);
        assert!(wlan > 1_000_000 && lte > 500_000, "60 %, {direction:?}: {wlan} and {lte} bytes");
    }
    fs::write(battery.join("capacity"), "5\n").unwrap();
    eventually("wlan0 is a backup", || path_state(&up, "wlan0") == "backup");
    for direction in DIRECTIONS {
        let [wlan, lte] = transfer(&lab, &web, direction, 3_000_000);
        println!("5 %, {direction:?}: {wlan} bytes over wlan0, {lte} over lte0");
        assert!(wlan < CONTROL && lte > 3_000_000, "5 %, {direction:?}: {wlan} and {lte} bytes");
    }
}

/// A metered link whose allowance ends during a bonded flow carries nothing more of it, from either end, until the allowance grows.
#[test]
fn a_cap_reached_in_mid_flow_stops_both_ends() {
    if !able() {
        return;
    }
    const CAP: u64 = 3_000_000;
    const SIZE: u64 = 20_000_000;
    for direction in DIRECTIONS {
        let lab = two_links().start().unwrap();
        let web = Web::start(&lab).unwrap();
        let relay = Relay::start(&lab);
        let up = relay.join(&config("", ["", "metered = true\ncap = \"3 MB\""]));
        let capture = Capture::start(&lab);
        let child = start(&lab, &web, direction, SIZE);
        up.wait_state("lte0", "capped");
        eventually("nothing enters lte0 any more", || {
            let before = capture.sum(1);
            thread::sleep(ms(200));
            let more = capture.sum(1) - before;
            println!("{direction:?}: {more} bytes entered lte0 in 200 ms");
            more < 3_000
        });
        let before = [capture.bytes(direction)[0], capture.sum(1)];
        let explained = bonded_explanation(&up);
        assert!(explained.contains("its allowance is used up"), "{explained}");
        assert_eq!(ended(child).0, SIZE);
        let after = [capture.bytes(direction)[0], capture.sum(1)];
        println!("{direction:?}: lte0 carried {} bytes, then {}; wlan0 then {}", before[1], after[1] - before[1], after[0] - before[0]);
        assert!(after[0] - before[0] > 5_000_000, "{direction:?}: wlan0 carries the rest, {before:?} to {after:?}");
        assert!(after[1] - before[1] < CONTROL, "{direction:?}: lte0 carried {before:?} to {after:?}");
        // The device also counts Ethernet headers, 1 %, and what came before the capture. Its counters are read once a second at the latest; then
        // one queue of 125 kB and one window are in flight.
        assert!((CAP / 100 * 95..CAP + 2_000_000).contains(&after[1]), "{direction:?}: {} bytes for an allowance of {CAP}", after[1]);
        let used = up.link("lte0")["used_bytes"].as_u64().unwrap();
        let counted = lab.counters(1).unwrap();
        let carried = counted.up.delivered_bytes.get() + counted.down.delivered_bytes.get();
        assert!(used.abs_diff(carried) * 20 < carried, "{direction:?}: counted {used}, carried {carried}");
        reload(&up, &config("", ["", "metered = true\ncap = \"60 MB\""]));
        eventually("lte0 carries bonded flows again", || good_paths(&up) == 2);
        let [_, lte] = transfer(&lab, &web, Direction::Down, 3_000_000);
        assert!(lte > 500_000, "{direction:?}: {lte} bytes");
    }
}

/// The explanation of the bonded flow.
fn bonded_explanation(up: &Up<'_>) -> String {
    let id = crate::support::bonded::bond_flow(up).and_then(|flow| flow["id"].as_u64()).expect("the flow is there");
    text(&up.braid(&["explain", &id.to_string()]).stdout)
}
