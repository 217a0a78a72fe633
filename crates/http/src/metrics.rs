//! `GET /v1/metrics`: the status, the gateway's clients and the ad-hoc device in Prometheus' text format. Unknown values are omitted.

use std::fmt::Write;

use braid_api::{AdhocNeighbour, AdhocRadio, AdhocStatus, ClientStatus, LinkState, LinkStatus, Status, VirtualInterfaceStatus};

/// Maximum number of pairs of neighbour and radio in the metrics, as their help says. The device may have thousands.
const MAX_PAIRS: usize = 256;

/// Formats `status`, `clients` and the ad-hoc device as metrics.
pub(super) fn text(status: &Status, clients: &[ClientStatus], adhoc: Option<&AdhocStatus>) -> String {
    let mut out = links(status);
    own(&mut out, status.virtual_interface.as_ref());
    of_clients(&mut out, clients);
    if let Some(device) = adhoc {
        of_radios(&mut out, device);
        of_neighbours(&mut out, device);
    }
    out
}

fn own(out: &mut String, own: Option<&VirtualInterfaceStatus>) {
    type Read = fn(&VirtualInterfaceStatus) -> Option<f64>;
    let metrics: [(&str, &str, &str, Read); 4] = [
        ("braid_virtual_interface_up", "gauge", "1 while flows can use the virtual interface.", |own| Some(f64::from(u8::from(own.up)))),
        ("braid_virtual_interface_flows", "gauge", "Live flows through it.", |own| Some(own.flows as f64)),
        ("braid_virtual_interface_rate_down_bps", "gauge", "Rate towards programs.", |own| own.rate_down_bps.map(|bps| bps as f64)),
        ("braid_virtual_interface_rate_up_bps", "gauge", "Rate away from programs.", |own| own.rate_up_bps.map(|bps| bps as f64)),
    ];
    for (name, kind, help, read) in metrics {
        metric(out, name, kind, help, own.map(|own| (format!("{{device=\"{}\"}}", escape(&own.name)), read(own))));
    }
}

/// Clients are named by their addresses only: they choose their names, and each name would be another series.
fn of_clients(out: &mut String, clients: &[ClientStatus]) {
    type Read = fn(&ClientStatus) -> u64;
    let metrics: [(&str, &str, &str, Read); 3] = [
        ("braid_client_flows", "gauge", "Live flows of a client of the gateway.", |client| client.flows),
        ("braid_client_rate_down_bps", "gauge", "Rate towards the client.", |client| client.rate_down_bps),
        ("braid_client_rate_up_bps", "gauge", "Rate away from the client.", |client| client.rate_up_bps),
    ];
    for (name, kind, help, read) in metrics {
        let samples = clients.iter().map(|client| (format!("{{client=\"{}\"}}", escape(&client.address)), Some(read(client) as f64)));
        metric(out, name, kind, help, samples);
    }
}

fn of_radios(out: &mut String, device: &AdhocStatus) {
    let own = escape(&device.name);
    let counts = &device.counts;
    let outcomes = [
        ("duplicates", counts.duplicates),
        ("own", counts.own),
        ("storms", counts.storms),
        ("flooded", counts.flooded),
        ("foreign", counts.foreign),
        ("no_radio", counts.no_radio),
    ];
    let outcomes = outcomes.map(|(outcome, count)| (format!("{{device=\"{own}\",outcome=\"{outcome}\"}}"), Some(count as f64)));
    metric(
        out,
        "braid_adhoc_frames_total",
        "counter",
        "Frames that the ad-hoc device dropped or sent over all radios, by outcome.",
        outcomes,
    );
    type Read = fn(&AdhocRadio) -> u64;
    let metrics: [(&str, &str, &str, Read); 2] = [
        ("braid_adhoc_radio_up", "gauge", "1 while frames of the ad-hoc device may leave over the radio.", |radio| u64::from(radio.up)),
        ("braid_adhoc_radio_neighbours", "gauge", "Neighbours that the radio reaches.", |radio| radio.neighbours),
    ];
    for (name, kind, help, read) in metrics {
        let labels = |radio: &AdhocRadio| format!("{{device=\"{own}\",radio=\"{}\"}}", escape(&radio.name));
        metric(out, name, kind, help, device.radios.iter().map(|radio| (labels(radio), Some(read(radio) as f64))));
    }
}

/// Pairs that have answered come first: whoever is in reach of a radio can make up addresses that do not answer.
fn of_neighbours(out: &mut String, device: &AdhocStatus) {
    type Read = fn(&AdhocNeighbour) -> Option<f64>;
    let metrics: [(&str, &str, &str, Read); 4] = [
        (
            "braid_adhoc_neighbour_last_heard_seconds",
            "gauge",
            "Time since the neighbour was last heard over the radio; at most 256 pairs of neighbour and radio.",
            |pair| Some(pair.last_heard_ms as f64 / 1000.0),
        ),
        (
            "braid_adhoc_neighbour_rtt_seconds",
            "gauge",
            "Smoothed round-trip time to the neighbour over the radio; at most 256 pairs of neighbour and radio.",
            |pair| pair.rtt_us.map(|us| us as f64 / 1e6),
        ),
        (
            "braid_adhoc_neighbour_loss_ratio",
            "gauge",
            "Share of the neighbour's announcements that did not arrive over the radio; at most 256 pairs of neighbour and radio.",
            |pair| pair.loss,
        ),
        (
            "braid_adhoc_neighbour_share_ratio",
            "gauge",
            "Share of the radio in what leaves for the neighbour; at most 256 pairs of neighbour and radio.",
            |pair| Some(pair.share),
        ),
    ];
    let (answered, new): (Vec<_>, Vec<_>) = device.neighbours.iter().partition(|pair| pair.state != "new");
    let pairs: Vec<&AdhocNeighbour> = answered.into_iter().chain(new).take(MAX_PAIRS).collect();
    let device = escape(&device.name);
    for (name, kind, help, read) in metrics {
        let labels = |pair: &AdhocNeighbour| {
            format!("{{device=\"{device}\",neighbour=\"{}\",radio=\"{}\"}}", escape(&pair.mac), escape(&pair.radio))
        };
        metric(out, name, kind, help, pairs.iter().map(|pair| (labels(pair), read(pair))));
    }
}

fn links(status: &Status) -> String {
    let mut out = String::new();
    metric(&mut out, "braid_flows", "gauge", "Live flows.", [(String::new(), Some(status.flows as f64))]);
    metric(
        &mut out,
        "braid_uptime_seconds",
        "gauge",
        "Time since the daemon's start.",
        [(String::new(), status.uptime_ms.map(|ms| ms as f64 / 1000.0))],
    );
    let counters = &status.counters;
    let outcomes = [
        ("steered", counters.steered),
        ("left", counters.left),
        ("denied", counters.denied),
        ("failed", counters.failed),
        ("redirected", counters.redirected),
    ];
    let outcomes = outcomes.map(|(name, count)| (format!("{{outcome=\"{name}\"}}"), count.map(|count| count as f64)));
    metric(&mut out, "braid_flows_total", "counter", "Flows seen, by outcome.", outcomes);
    let lost = [(String::new(), counters.lost_events.map(|count| count as f64))];
    metric(&mut out, "braid_lost_events_total", "counter", "Kernel events that were lost.", lost);
    let battery = [(String::new(), status.battery.map(|battery| battery.level))];
    metric(&mut out, "braid_battery_level_ratio", "gauge", "Charge of the batteries.", battery);
    type Read = fn(&LinkStatus) -> Option<f64>;
    let per_link: [(&str, &str, &str, Read); 10] = [
        ("braid_link_up", "gauge", "1 while the link may be given flows.", |link| Some(f64::from(u8::from(link.state == LinkState::Up)))),
        ("braid_link_flows", "gauge", "Live flows on the link.", |link| Some(link.flows as f64)),
        ("braid_link_capacity_down_bps", "gauge", "Estimated capacity towards this machine.", |link| {
            link.capacity_down_bps.map(|v| v as f64)
        }),
        ("braid_link_capacity_up_bps", "gauge", "Estimated capacity away from this machine.", |link| {
            link.capacity_up_bps.map(|v| v as f64)
        }),
        ("braid_link_rtt_seconds", "gauge", "Round-trip time.", |link| link.rtt_us.map(|v| v as f64 / 1e6)),
        ("braid_link_loss_ratio", "gauge", "Share of retransmitted segments.", |link| link.loss),
        ("braid_link_rx_bytes_total", "counter", "Bytes that flows received.", |link| link.rx_bytes.map(|v| v as f64)),
        ("braid_link_tx_bytes_total", "counter", "Bytes that flows sent.", |link| link.tx_bytes.map(|v| v as f64)),
        ("braid_link_energy_joules_total", "counter", "Energy for the device's traffic.", |link| link.energy_j),
        ("braid_link_used_bytes", "gauge", "Bytes used of the allowance since its reset.", |link| link.used_bytes.map(|v| v as f64)),
    ];
    for (name, kind, help, read) in per_link {
        let samples = status.links.iter().map(|link| (format!("{{link=\"{}\"}}", escape(&link.name)), read(link)));
        metric(&mut out, name, kind, help, samples);
    }
    out
}

fn metric(out: &mut String, name: &str, kind: &str, help: &str, samples: impl IntoIterator<Item = (String, Option<f64>)>) {
    let mut head = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    for (labels, value) in samples {
        if let Some(value) = value {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{}{name}{labels} {value}", std::mem::take(&mut head));
        }
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_omitted() {
        let status: Status = serde_json::from_value(serde_json::json!({
            "schema_version": 1, "version": "v", "scheduler": "only-one", "flows": 2,
            "links": [{
                "name": "w\"0", "state": "up", "kind": "wireless", "addresses": [], "capacity_down_bps": 20_000_000,
                "capacity_up_bps": null, "rtt_us": 1500, "loss": null, "rx_bytes": 7, "tx_bytes": null, "flows": 2,
            }],
        }))
        .unwrap();
        let text = text(&status, &[], None);
        for line in [
            "braid_flows 2",
            "# TYPE braid_link_up gauge",
            "braid_link_up{link=\"w\\\"0\"} 1",
            "braid_link_capacity_down_bps{link=\"w\\\"0\"} 20000000",
            "braid_link_rtt_seconds{link=\"w\\\"0\"} 0.0015",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        for absent in ["capacity_up", "battery", "energy", "loss", "uptime", "tx_bytes", "virtual", "client", "adhoc"] {
            assert!(!text.contains(absent), "{absent} in\n{text}");
        }
    }

    #[test]
    fn clients_and_the_virtual_interface_are_included() {
        let status: Status = serde_json::from_value(serde_json::json!({
            "schema_version": 1, "version": "v", "scheduler": "only-one", "flows": 0, "links": [],
            "virtual_interface": {"name": "braid0", "addresses": ["10.99.0.1"], "up": false, "reason": "it is down", "flows": 0,
                "rate_down_bps": null, "rate_up_bps": null},
        }))
        .unwrap();
        let client: ClientStatus = serde_json::from_value(serde_json::json!({
            "name": "a\"} 1\nforged", "address": "192.168.7.20", "mac": null, "device": "br-lan", "flows": 3, "rate": 9, "rate_down_bps": 8,
            "rate_up_bps": 1, "idle_ms": 5,
        }))
        .unwrap();
        let text = text(&status, &[client], None);
        for line in [
            "braid_virtual_interface_up{device=\"braid0\"} 0",
            "braid_virtual_interface_flows{device=\"braid0\"} 0",
            "# TYPE braid_client_flows gauge",
            "braid_client_flows{client=\"192.168.7.20\"} 3",
            "braid_client_rate_down_bps{client=\"192.168.7.20\"} 8",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        assert!(!text.contains("forged") && !text.contains("interface_rate"), "{text}");
    }

    fn empty_status() -> Status {
        let status = serde_json::json!({"schema_version": 1, "version": "v", "scheduler": "only-one", "flows": 0, "links": []});
        serde_json::from_value(status).unwrap()
    }

    fn adhoc(radios: serde_json::Value, neighbours: &[serde_json::Value]) -> AdhocStatus {
        serde_json::from_value(serde_json::json!({
            "name": "vi\\0", "mac": "02:00:00:00:00:01", "mtu": 1500, "authenticated": false, "by_frame": false, "hysteresis_ms": 1000,
            "expiry_ms": 10_000, "power_saving": true, "saving_power": false, "radios": radios, "neighbours": neighbours,
            "counts": {"duplicates": 7, "own": 1, "storms": 2, "flooded": 3, "foreign": 4, "no_radio": 5}, "warnings": [],
        }))
        .unwrap()
    }

    fn pair(mac: &str, radio: &str, state: &str) -> serde_json::Value {
        serde_json::json!({"mac": mac, "radio": radio, "at": null, "braid": true, "state": state, "last_heard_ms": 1250, "rtt_us": 1500,
            "loss": 0.25, "share": 0.75})
    }

    #[test]
    fn the_adhoc_device_is_included() {
        let radio = |name: &str, up: bool, neighbours: u64| {
            serde_json::json!({"name": name, "mac": null, "up": up, "reason": null, "priority": 0, "technology": null, "translates": false,
                "neighbours": neighbours})
        };
        let mut silent = pair("02:00:00:00:00:03", "eth0", "new");
        (silent["rtt_us"], silent["loss"]) = (serde_json::Value::Null, serde_json::Value::Null);
        let radios = serde_json::json!([radio("w\"} 1\nforged", true, 1), radio("eth0", false, 2)]);
        let device = adhoc(radios, &[pair("02:00:00:00:00:02", "w\"} 1\nforged", "up"), silent]);
        let text = text(&empty_status(), &[], Some(&device));
        for line in [
            r#"# TYPE braid_adhoc_frames_total counter"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="duplicates"} 7"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="own"} 1"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="storms"} 2"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="flooded"} 3"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="foreign"} 4"#,
            r#"braid_adhoc_frames_total{device="vi\\0",outcome="no_radio"} 5"#,
            r#"# TYPE braid_adhoc_radio_up gauge"#,
            r#"braid_adhoc_radio_up{device="vi\\0",radio="w\"} 1\nforged"} 1"#,
            r#"braid_adhoc_radio_up{device="vi\\0",radio="eth0"} 0"#,
            r#"braid_adhoc_radio_neighbours{device="vi\\0",radio="eth0"} 2"#,
            r#"braid_adhoc_neighbour_last_heard_seconds{device="vi\\0",neighbour="02:00:00:00:00:02",radio="w\"} 1\nforged"} 1.25"#,
            r#"braid_adhoc_neighbour_rtt_seconds{device="vi\\0",neighbour="02:00:00:00:00:02",radio="w\"} 1\nforged"} 0.0015"#,
            r#"braid_adhoc_neighbour_loss_ratio{device="vi\\0",neighbour="02:00:00:00:00:02",radio="w\"} 1\nforged"} 0.25"#,
            r#"braid_adhoc_neighbour_share_ratio{device="vi\\0",neighbour="02:00:00:00:00:02",radio="w\"} 1\nforged"} 0.75"#,
            r#"braid_adhoc_neighbour_last_heard_seconds{device="vi\\0",neighbour="02:00:00:00:00:03",radio="eth0"} 1.25"#,
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        assert!(!text.lines().any(|line| line.starts_with("forged")), "{text}");
        for unknown in ["rtt_seconds", "loss_ratio"] {
            let line = format!(r#"braid_adhoc_neighbour_{unknown}{{device="vi\\0",neighbour="02:00:00:00:00:03""#);
            assert!(!text.contains(&line), "{line} in\n{text}");
        }
    }

    #[test]
    fn the_number_of_adhoc_neighbours_is_limited_and_those_that_answer_come_first() {
        let mac = |number: usize| format!("02:00:00:00:{:02x}:{:02x}", number / 256, number % 256);
        let mut pairs: Vec<serde_json::Value> = (0..1000).map(|number| pair(&mac(number), "eth0", "new")).collect();
        pairs.extend([pair(&mac(1000), "eth0", "up"), pair(&mac(1001), "eth0", "dead")]);
        let text = text(&empty_status(), &[], Some(&adhoc(serde_json::json!([]), &pairs)));
        for name in ["last_heard_seconds", "rtt_seconds", "loss_ratio", "share_ratio"] {
            let name = format!("braid_adhoc_neighbour_{name}");
            let samples: Vec<&str> = text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect();
            assert_eq!(samples.len(), MAX_PAIRS, "{name}");
            for (place, number) in [(0, 1000), (1, 1001), (2, 0), (MAX_PAIRS - 1, MAX_PAIRS - 3)] {
                assert!(samples[place].contains(&mac(number)), "{place}: {}", samples[place]);
            }
            let help = text.lines().find(|line| line.starts_with(&format!("# HELP {name} "))).unwrap();
            assert!(help.contains(&format!("at most {MAX_PAIRS} pairs")), "{help}");
        }
    }

    #[test]
    fn the_dashboard_uses_existing_metrics() {
        let link = serde_json::json!({
            "name": "wlan0", "state": "up", "kind": "wireless", "addresses": [], "capacity_down_bps": 1, "capacity_up_bps": 1, "rtt_us": 1,
            "loss": 0.1, "rx_bytes": 1, "tx_bytes": 1, "flows": 1, "energy_j": 1.0, "used_bytes": 1,
        });
        let status: Status = serde_json::from_value(serde_json::json!({
            "schema_version": 1, "version": "v", "scheduler": "only-one", "flows": 1, "links": [link], "uptime_ms": 1000,
            "counters": {"steered": 1, "lost_events": 0}, "battery": {"level": 0.5, "plugged": true},
        }))
        .unwrap();
        let device = adhoc(serde_json::json!([]), &[pair("02:00:00:00:00:02", "eth0", "up")]);
        let text = text(&status, &[], Some(&device));
        let dashboard = include_str!("../../../docs/grafana.json");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let named: std::collections::BTreeSet<&str> = dashboard.split(|c| !is_name(c)).filter(|word| word.starts_with("braid_")).collect();
        assert!(named.len() > 10, "{named:?}");
        for name in named {
            assert!(text.contains(&format!("# TYPE {name} ")), "unknown metric {name}");
        }
    }
}
