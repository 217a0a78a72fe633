//! Reads `detect`: the hosts that are asked whether they run Braid, and whether first connections wait for their answers.

use std::net::IpAddr;
use std::time::Duration;

use braid_control::config::{Config, Detect};
use braid_decide::detection::is_private;
use ipnet::IpNet;

use super::reader::Value;

/// Longest time that a connection may wait. Programs take a longer one for a failure, and try other addresses.
const MAX_HOLD: Duration = Duration::from_secs(2);

/// Reads `detect`: false, true, a list of hosts, or a section with `hosts`, `networks`, `hold` and `moves`.
pub(super) fn detect(value: &Value<'_>, config: &mut Config) {
    if !value.is_table() {
        config.detect = hosts(value).unwrap_or_default();
        return;
    }
    let Some(mut section) = value.section("[detect]") else { return };
    config.detect = section.take("hosts").and_then(|value| hosts(&value)).unwrap_or_default();
    config.detect_networks = section.take("networks").and_then(|value| networks(&value)).unwrap_or_default();
    if let Some(value) = section.take("hold") {
        config.hold = hold(&value).unwrap_or_default();
        if !config.hold.is_zero() && !config.detects_any() {
            value.refuse::<()>(
                "hold has no effect, because no host is asked".to_owned(),
                "write also hosts = true, hosts = [...] or networks = [...]".into(),
            );
        }
    }
    if let Some(value) = section.take("moves") {
        config.moves = value.flag().unwrap_or_default();
        if config.moves && !config.detects_any() {
            value.refuse::<()>(
                "moves has no effect, because no host is asked".to_owned(),
                "write also hosts = true, hosts = [...] or networks = [...]".into(),
            );
        }
    }
    section.finish();
}

fn hold(value: &Value<'_>) -> Option<Duration> {
    let hold = value.duration()?;
    if hold > MAX_HOLD {
        return value.refuse("hold is longer than 2 s".to_owned(), "write at most \"2 s\", or 0 to let no connection wait".into());
    }
    Some(hold)
}

fn networks(value: &Value<'_>) -> Option<Vec<IpNet>> {
    let read = |value: &Value<'_>| {
        let text = value.text()?;
        let Some(net) = net(text) else {
            return value.refuse(format!("{text:?} is not a network"), "write \"10.0.0.0/8\" or \"192.168.7.20\"".into());
        };
        if !is_private(&net) {
            return value.refuse(format!("{text} is not private"), "list public hosts and networks in hosts".into());
        }
        Some(net)
    };
    Some(value.list()?.iter().filter_map(read).collect())
}

fn hosts(value: &Value<'_>) -> Option<Detect> {
    if !value.is_list() {
        return Some(if value.flag_or_list()? { Detect::Everybody } else { Detect::Nobody });
    }
    let (mut nets, mut names) = (Vec::new(), Vec::new());
    for element in value.list()? {
        let text = element.text()?;
        if let Some(net) = net(text) {
            if is_private(&net) {
                let remedy = "list public addresses here, and private networks in [detect] networks; or join a relay there (braid join)";
                return element
                    .refuse(format!("{text} is private, and a private address means a different host in each network"), remedy.into());
            }
            nets.push(net);
        } else {
            match text.parse() {
                Ok(name) => names.push(name),
                Err(_) => {
                    let remedy = "write \"server.example.org\", \"203.0.113.10\" or \"203.0.113.0/24\"";
                    return element.refuse(format!("{text:?} is neither a host name nor an address"), remedy.into());
                }
            }
        }
    }
    Some(Detect::Listed { nets, names })
}

/// An address or a prefix.
fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}
