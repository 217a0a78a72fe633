//! Screens of `braid top` at several terminal sizes.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::layout::Rect;
use serde_json::{Value, json};

use super::model::{Action, Model, View};
use super::view::{draw, view_at};

fn link(name: &str, state: &str, down: u64) -> Value {
    json!({
        "name": name, "state": state, "kind": "wired", "addresses": [], "capacity_down_bps": 20_000_000, "capacity_up_bps": 5_000_000,
        "rtt_us": 20_500, "loss": 0.012, "rx_bytes": down, "tx_bytes": 1000, "flows": 2,
    })
}

fn flow(id: u64, application: &str, link: &str, rx: u64) -> Value {
    json!({
        "id": id, "application": application, "protocol": "tcp", "local": null, "remote": format!("203.0.113.{id}:443"), "link": link,
        "carry": "direct", "scheduler": "max-throughput", "rx_bytes": rx, "tx_bytes": 500, "rtt_us": 20_000, "age_ms": 61_000,
    })
}

fn client(name: Option<&str>, address: &str, flows: u64, down: u64) -> Value {
    json!({"name": name, "address": address, "mac": "02:00:00:00:00:20", "device": "br-lan", "flows": flows, "rate": down + 1000,
        "rate_down_bps": down, "rate_up_bps": 1000, "idle_ms": 4000, "rule": name.map(|_| 2)})
}

/// A model with three links, a virtual interface, four flows, three clients and an event, after two seconds of events.
fn model() -> Model {
    let mut model = Model::default();
    let links = [link("wlan0", "up", 9), link("lte0", "dead", 1), link("eth0", "backup", 0)];
    let status = json!({"schema_version": 1, "version": "0.1.0", "scheduler": "operetta", "links": links, "flows": 4, "uptime_ms": 125_000,
        "battery": {"level": 0.62, "plugged": false}, "utility": 0.62, "warnings": [],
        "virtual_interface": {"name": "braid0", "addresses": ["10.99.0.1", "fd99::1"], "up": true, "reason": null, "flows": 1,
            "rate_down_bps": 4800, "rate_up_bps": 0}});
    model.on_event("status", &status.to_string());
    let flows = |rx: u64| {
        [flow(1, "/usr/bin/curl", "wlan0", 1000 * rx), flow(2, "<script>\x1b[2J", "lte0", 7), {
            let mut through = flow(3, "/usr/bin/firefox", "wlan0", 300 * rx);
            through["virtual_interface"] = json!("braid0");
            through
        }]
    };
    model.on_event("flows", &json!({"full": true, "put": flows(1), "gone": []}).to_string());
    model.on_event("flows", &json!({"full": false, "put": [flows(2)[0], flows(2)[2], flow(4, "ssh", "eth0", 10)], "gone": []}).to_string());
    let clients =
        [client(None, "192.168.7.21", 0, 0), client(Some("tv\x1b[2J"), "192.168.7.20", 2, 12_000_000), client(None, "fd07::9", 9, 0)];
    model.on_event("clients", &json!({"schema_version": 1, "clients": clients}).to_string());
    for second in 0..12u64 {
        let link = |name: &str, rx: u64| json!({"name": name, "rx_bps": rx, "tx_bps": 1000, "rtt_us": null, "loss": null, "power_w": 0.25});
        let links = [link("wlan0", second * 1_000_000), link("lte0", 0), link("eth0", 500_000)];
        model.on_event("sample", &json!({"at_ms": 1_000_000 + second * 1000, "links": links}).to_string());
    }
    for (id, level, text) in [(1, "info", "wlan0 is up"), (2, "warning", "lte0 went dark (no answer): 2 flows bound to it wait")] {
        model.on_event("note", &json!({"id": id, "at_ms": 1_000_000, "kind": "link", "level": level, "text": text}).to_string());
    }
    let app = |application: &str, port: u16, samples: u64, flows: u64| {
        json!({"application": application, "name": "x", "port": port, "class": "bulk", "class_source": null, "demand_bytes": 1_500_000,
            "samples": samples, "confidence": 0.5, "age_ms": 1, "rate_down_bps": 3_000_000, "rate_up_bps": null, "max_rate_down_bps": null,
            "max_rate_up_bps": null, "flows": flows})
    };
    let apps = [
        app("/usr/bin/curl", 80, 1, 0),
        app("/usr/bin/rsync", 873, 9, 0),
        app("/usr/bin/curl", 443, 3, 1),
        app("<script>\x1b[2J", 1, 1, 0),
    ];
    model.on_event("apps", &json!({"schema_version": 1, "apps": apps}).to_string());
    let moved = |second: u64| {
        let curl = json!({"application": "/usr/bin/curl", "rx_bps": second * 1_000_000, "tx_bps": 20_000, "flows": 1});
        let rsync = json!({"application": "/usr/bin/rsync", "rx_bps": 1_000, "tx_bps": 2_000, "flows": 1});
        let apps = if second.is_multiple_of(3) { vec![curl] } else { vec![curl, rsync] };
        json!({"at_ms": 1_000_000 + second * 1000, "apps": apps, "rest_rx_bps": 0, "rest_tx_bps": 500})
    };
    model.on_event("app_history", &json!({"resolution_ms": 1000, "samples": (0..6).map(moved).collect::<Vec<_>>()}).to_string());
    (4..13).for_each(|second| model.on_event("app_sample", &moved(second).to_string()));
    let path = json!({"link": "wlan0", "state": "good", "rtt_us": 20_000, "cwnd": 1, "rate_bps": 9_000_000, "loss": 0.0, "queued": 0});
    model.on_event(
        "peers",
        &json!({"schema_version": 1, "peers": [{"name": "home", "kind": "relay", "address": "x", "state": "up", "paths": [path]}]})
            .to_string(),
    );
    model
}

/// The daemon's status, with or without an ad-hoc device.
fn status_with_adhoc(model: &Model, name: Option<&str>) -> String {
    let mut status = versioned(model.status.as_ref().unwrap());
    status["adhoc"] = json!(name);
    status.to_string()
}

fn versioned(answer: &impl serde::Serialize) -> Value {
    let mut answer = serde_json::to_value(answer).unwrap();
    answer["schema_version"] = json!(1);
    answer
}

/// The model with an ad-hoc device: three radios, of which one does not work, and three neighbours over four pairs.
fn model_with_adhoc() -> Model {
    let mut model = model();
    model.on_event("status", &status_with_adhoc(&model, Some("vi0")));
    let radio = |name: &str, reason: Option<&str>, priority: u32, neighbours: u64| {
        json!({"name": name, "mac": null, "up": reason.is_none(), "reason": reason, "priority": priority, "technology": null,
            "translates": false, "neighbours": neighbours})
    };
    let pair = |mac: &str, radio: &str, state: &str, rtt_us: Option<u64>, share: f64| {
        json!({"mac": mac, "radio": radio, "at": null, "braid": state != "new", "state": state, "last_heard_ms": 4200, "rtt_us": rtt_us,
            "loss": rtt_us.map(|_| 0.031), "share": share})
    };
    let neighbours = [
        pair("02:00:00:00:00:0a", "wlan0", "up", Some(2_200), 0.75),
        pair("02:00:00:00:00:0a", "eth0", "up", Some(6_500), 0.25),
        pair("02:00:00:00:00:0b", "wlan0", "dead", Some(40_000), 0.0),
        pair("02:00:00:00:00:0c", "eth0", "new", None, 0.0),
    ];
    let radios =
        [radio("wlan0", None, 0, 2), radio("eth0", None, 0, 2), radio("bt\x1b[2J", Some("it is off, or has no carrier\x1b[2J"), 1, 0)];
    let device = json!({"schema_version": 1, "name": "vi0", "mac": "02:00:00:00:00:01", "mtu": 1500, "authenticated": false, "by_frame": false,
        "hysteresis_ms": 1000, "expiry_ms": 10_000, "power_saving": true, "saving_power": false, "radios": radios, "neighbours": neighbours,
        "counts": {"duplicates": 1, "own": 0, "storms": 0, "flooded": 0, "foreign": 0, "no_radio": 0},
        "warnings": ["wlan0 and eth0 are in one network\x1b[2J"]});
    model.on_event("adhoc", &device.to_string());
    model
}

fn screen(model: &Model, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(|y| line(y) + "\n").collect()
}

/// Compares with the checked-in screen.
fn assert_shows(name: &str, shown: &str) {
    let path = format!("{}/src/top/screens/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("BRAID_WRITE_SCREENS").is_some() {
        std::fs::write(&path, shown).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(shown == wanted, "{name} differs (BRAID_WRITE_SCREENS=1 updates it):\n{shown}\nis not\n{wanted}");
}

#[test]
fn regression_a_link_without_a_path_is_shown_with_the_reason() {
    let mut model = model();
    let path = json!({"link": "usb0", "state": "none", "reason": "it has no IPv4"});
    model.on_event(
        "peers",
        &json!({"schema_version": 1, "peers": [{"name": "home", "kind": "relay", "address": "x", "state": "up", "paths": [path]}]})
            .to_string(),
    );
    (0..3).for_each(|_| assert!(model.handle(Action::NextView)));
    let shown = screen(&model, 120, 16);
    assert!(shown.contains("none: it has no IPv4"), "{shown}");
}

#[test]
fn every_view_matches_its_screen() {
    let mut radios = model_with_adhoc();
    assert!(radios.handle(Action::View(View::Radios)));
    assert_shows("radios", &screen(&radios, 120, 20));
    assert_shows("radios-small", &screen(&radios, 60, 14));
    let mut model = model();
    for view in ["flows", "apps", "clients", "peers", "events"] {
        assert_shows(view, &screen(&model, 120, 16));
        assert!(model.handle(Action::NextView));
    }
    assert_shows("small", &screen(&model, 60, 10));
    model.on_lost("the Braid daemon is not running".to_owned());
    assert_shows("lost", &screen(&model, 80, 12));
    assert_shows("waiting", &screen(&Model::default(), 40, 4));
}

#[test]
fn any_size_works_and_names_cannot_steer_the_terminal() {
    let mut model = model_with_adhoc();
    for (width, height) in [(1, 1), (3, 2), (20, 3), (40, 5), (300, 100)] {
        for _ in View::ALL {
            let shown = screen(&model, width, height);
            assert!(!shown.contains('\x1b'), "{shown:?}");
            model.handle(Action::NextView);
        }
    }
}

#[test]
fn flows_are_filtered_sorted_and_selected() {
    let mut model = model();
    let order = |model: &Model| model.shown_flows().iter().map(|live| live.flow.id).collect::<Vec<_>>();
    assert_eq!(order(&model), [1, 3, 4, 2], "the busiest flow comes first");
    model.handle(Action::Char('r'));
    assert_eq!(order(&model), [2, 4, 3, 1]);
    model.handle(Action::Char('r'));
    for expected in [vec![1, 3, 4, 2], vec![1, 2, 3, 4], vec![1, 3, 2, 4], vec![4, 2, 1, 3]] {
        model.handle(Action::Char('s'));
        assert_eq!(order(&model), expected, "{:?}", model.sort);
    }
    model.handle(Action::Char('/'));
    for c in "FireQ".chars() {
        assert!(model.handle(Action::Char(c)), "letters are no commands while typing");
    }
    model.handle(Action::Backspace);
    assert_eq!((order(&model), model.typing), (vec![3], true));
    model.handle(Action::Enter);
    assert!(model.handle(Action::Escape), "the first Esc clears the filter");
    assert_eq!(order(&model).len(), 4);
    model.handle(Action::Last);
    model.handle(Action::Move(5));
    assert_eq!(model.selected, 3);
    model.handle(Action::Move(-9));
    assert_eq!(model.selected, 0);
    assert!(!model.handle(Action::Escape) && !model.handle(Action::Char('q')) && !model.handle(Action::Interrupt));
}

#[test]
fn clients_are_filtered_and_the_busiest_come_first() {
    let mut model = model();
    let order = |model: &Model| model.shown_clients().iter().map(|client| client.address.clone()).collect::<Vec<_>>();
    assert_eq!(order(&model), ["192.168.7.20", "fd07::9", "192.168.7.21"]);
    model.handle(Action::View(View::Clients));
    "/192.168.7".chars().for_each(|c| assert!(model.handle(Action::Char(c))));
    assert_eq!(order(&model), ["192.168.7.20", "192.168.7.21"]);
    model.handle(Action::Char('x'));
    assert!(screen(&model, 80, 12).contains("no client matches the filter"));
    model.on_event("clients", &json!({"schema_version": 1, "clients": []}).to_string());
    assert!(screen(&model, 80, 12).contains("no clients: [gateway]"));
}

#[test]
fn neighbours_are_filtered_and_selected() {
    let mut model = model_with_adhoc();
    let pairs = |model: &Model| model.shown_neighbours().iter().map(|one| format!("{} {}", &one.mac[15..], one.radio)).collect::<Vec<_>>();
    assert_eq!(pairs(&model), ["0a wlan0", "0a eth0", "0b wlan0", "0c eth0"]);
    model.handle(Action::View(View::Radios));
    model.handle(Action::Last);
    assert_eq!(model.selected, 3);
    "/DEAD".chars().for_each(|c| assert!(model.handle(Action::Char(c))));
    assert_eq!((pairs(&model), model.selected), (vec!["0b wlan0".to_owned()], 0));
    model.handle(Action::Char('x'));
    assert!(screen(&model, 120, 20).contains("no neighbour matches the filter"));
    model.handle(Action::Escape);
    model.handle(Action::Char('r'));
    assert_eq!(pairs(&model)[0], "0c eth0");
    let mut device = versioned(model.adhoc.as_ref().unwrap());
    let many = (0..1000u32).map(|number| {
        let mut one = device["neighbours"][0].clone();
        one["mac"] = json!(format!("02:00:00:00:{:02x}:{:02x}", number / 256, number % 256));
        one
    });
    device["neighbours"] = many.collect();
    model.on_event("adhoc", &device.to_string());
    model.handle(Action::Last);
    let shown = screen(&model, 120, 20);
    assert!(shown.contains("02:00:00:00:00:00 ") && !shown.contains("02:00:00:00:03:e7"), "the order is reversed:\n{shown}");
}

#[test]
fn the_view_of_the_radios_exists_while_the_adhoc_device_does() {
    let mut without = model();
    assert!(!screen(&without, 120, 16).contains("Radios"));
    for _ in without.views() {
        assert!(without.view != View::Radios && without.view.polled().is_none_or(|(_, path)| path != "/v1/adhoc"));
        without.handle(Action::NextView);
    }
    assert_eq!(without.view, View::Flows, "all views were passed");
    let mut model = model_with_adhoc();
    model.handle(Action::View(View::Clients));
    model.handle(Action::NextView);
    assert_eq!((model.view, model.view.polled()), (View::Radios, Some(("adhoc", "/v1/adhoc"))));
    let late_answer = versioned(model.adhoc.as_ref().unwrap()).to_string();
    model.on_event("status", &status_with_adhoc(&model, None));
    model.on_event("adhoc", &late_answer);
    assert!(model.view == View::Flows && model.adhoc.is_none(), "{:?}", model.view);
    model.on_event("status", &status_with_adhoc(&model, Some("vi1")));
    model.handle(Action::View(View::Radios));
    assert!(screen(&model, 120, 16).contains("waiting for the ad-hoc device"));
}

#[test]
fn a_virtual_interface_that_does_not_work_shows_why() {
    let mut model = model();
    let own = json!({"name": "braid0", "addresses": ["10.99.0.1"], "up": false, "reason": "there is another device braid0", "flows": 0,
        "rate_down_bps": null, "rate_up_bps": null});
    let status =
        json!({"schema_version": 1, "version": "0.1.0", "scheduler": "operetta", "links": [], "flows": 4, "virtual_interface": own});
    model.on_event("status", &status.to_string());
    assert!(screen(&model, 100, 12).contains("virtual interface braid0: down: there is another device braid0"));
}

#[test]
fn ended_flows_disappear_and_rates_are_of_the_last_second() {
    let mut model = model();
    let down = |model: &Model, id: u64| model.flows.values().find(|live| live.flow.id == id).map(|live| live.down);
    assert_eq!((down(&model, 1), down(&model, 2), down(&model, 4)), (Some(Some(1000)), Some(Some(0)), Some(None)));
    model.on_event("flows", &json!({"full": false, "put": [], "gone": [1]}).to_string());
    assert_eq!((down(&model, 1), down(&model, 3)), (None, Some(Some(0))));
    model.on_event("flows", &json!({"full": true, "put": [flow(9, "x", "eth0", 1)], "gone": []}).to_string());
    assert_eq!(model.flows.len(), 1);
    model.on_event("flows", "nonsense");
    model.on_event("from the future", "{}");
    assert_eq!(model.flows.len(), 1);
}

#[test]
fn programs_show_their_current_rate_over_all_ports() {
    let mut model = model();
    let shown = model.shown_apps();
    let curl = &shown[0];
    assert_eq!((shown.len(), curl.application.as_str(), curl.port, curl.others, curl.flows), (3, "/usr/bin/curl", Some(443), 1, 1));
    assert_eq!(shown[1].application, "/usr/bin/rsync", "the program with more samples");
    assert_eq!(model.moving("/usr/bin/curl"), [Some(12_000_000), Some(20_000)]);
    assert_eq!(model.moving("/usr/bin/rsync"), [Some(0), None], "other programs received nothing in total; their sent bytes are unknown");
    let megabits = |model: &Model| model.app_curve("/usr/bin/curl", 100).iter().map(|bps| bps / 1_000_000).collect::<Vec<_>>();
    assert_eq!(megabits(&model), (0..13).collect::<Vec<_>>(), "history and events overlap, but no sample counts twice");
    assert_eq!(model.app_curve("/usr/bin/rsync", 3), [3_000, 3_000, 0]);
    for second in 13..400u64 {
        model.on_event(
            "app_sample",
            &json!({"at_ms": 1_000_000 + second * 1000, "apps": [], "rest_rx_bps": 0, "rest_tx_bps": 0}).to_string(),
        );
    }
    assert_eq!(megabits(&model), [0; 100], "old samples are dropped");
    assert!(model.app_samples.len() < 200);
}

#[test]
fn the_mouse_is_captured_on_request_and_selects_views() {
    assert_eq!(model_with_adhoc().views(), View::ALL);
    [model(), model_with_adhoc()].into_iter().for_each(mouse_selects_views);
}

fn mouse_selects_views(mut model: Model) {
    let shown = screen(&model, 120, 16);
    let (row, tabs) = shown.lines().enumerate().find(|(_, line)| line.contains("Applications")).unwrap();
    let area = Rect::new(0, 0, 120, 16);
    for (view, name) in model.views() {
        let column = u16::try_from(tabs.find(name).unwrap()).unwrap();
        assert_eq!(view_at(&model, area, column, row as u16), Some(view));
        assert_eq!(view_at(&model, area, column, row as u16 + 1), None);
    }
    assert_eq!(view_at(&model, area, 119, row as u16), None);
    assert!(!model.mouse);
    assert!(model.handle(Action::Char('m')));
    assert!(model.mouse);
    model.handle(Action::View(View::Events));
    assert_eq!(model.view, View::Events);
    model.handle(Action::Char('m'));
    assert!(!model.mouse);
}
