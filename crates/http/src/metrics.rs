//! `GET /v1/metrics`: the status and the gateway's clients in Prometheus' text format. Unknown values are omitted.

use std::fmt::Write;

use braid_api::{ClientStatus, LinkState, LinkStatus, Status, VirtualInterfaceStatus};

/// Formats `status` and `clients` as metrics.
pub(super) fn text(status: &Status, clients: &[ClientStatus]) -> String {
    let mut out = links(status);
    own(&mut out, status.virtual_interface.as_ref());
    of_clients(&mut out, clients);
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
        let text = text(&status, &[]);
        for line in [
            "braid_flows 2",
            "# TYPE braid_link_up gauge",
            "braid_link_up{link=\"w\\\"0\"} 1",
            "braid_link_capacity_down_bps{link=\"w\\\"0\"} 20000000",
            "braid_link_rtt_seconds{link=\"w\\\"0\"} 0.0015",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        for absent in ["capacity_up", "battery", "energy", "loss", "uptime", "tx_bytes", "virtual", "client"] {
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
        let text = text(&status, &[client]);
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
        let text = text(&status, &[]);
        let dashboard = include_str!("../../../docs/grafana.json");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let named: std::collections::BTreeSet<&str> = dashboard.split(|c| !is_name(c)).filter(|word| word.starts_with("braid_")).collect();
        assert!(named.len() > 10, "{named:?}");
        for name in named {
            assert!(text.contains(&format!("# TYPE {name} ")), "unknown metric {name}");
        }
    }
}
