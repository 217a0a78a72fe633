//! Reads `detect`: the hosts that are asked whether they run Braid.

use std::net::IpAddr;

use braid_control::config::Detect;
use braid_decide::detection::is_public;
use ipnet::IpNet;

use super::reader::Value;

/// Reads `detect`.
pub(super) fn detect(value: &Value<'_>) -> Option<Detect> {
    if !value.is_list() {
        return Some(if value.flag_or_list()? { Detect::Everybody } else { Detect::Nobody });
    }
    let (mut nets, mut names) = (Vec::new(), Vec::new());
    for element in value.list()? {
        let text = element.text()?;
        if let Some(net) = net(text) {
            if !is_public(net.network()) && !is_public(net.broadcast()) && net.prefix_len() > 0 {
                let remedy = "list public addresses; for hosts in a private network, join a relay there (braid join)";
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
