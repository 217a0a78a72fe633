//! Reads probe targets and measurement servers.

use std::net::{IpAddr, SocketAddr};

use braid_decide::policy::{HttpTarget, ProbeTarget};

use super::reader::Value;

const WANTED: &str =
    "\"tcp:192.0.2.1:443\", \"icmp:192.0.2.1\" or { url = \"http://192.0.2.1/generate_204\", host = \"name\", status = 204 }";

/// Reads `probe_targets`.
pub(super) fn probe_targets(value: Value<'_>) -> Vec<ProbeTarget> {
    value.list().unwrap_or_default().iter().filter_map(probe_target).collect()
}

/// Reads `servers` of `[measure]`.
pub(super) fn servers(value: Value<'_>) -> Vec<HttpTarget> {
    value.list().unwrap_or_default().iter().filter_map(|value| page(value, "a measurement server", 200)).collect()
}

fn probe_target(value: &Value<'_>) -> Option<ProbeTarget> {
    if !value.is_text() {
        return page(value, "a probe target", 204).map(ProbeTarget::Http);
    }
    let text = value.text()?;
    let target = match text.split_once(':') {
        Some(("tcp", rest)) => rest.parse().ok().map(ProbeTarget::Tcp),
        Some(("icmp", rest)) => rest.parse().ok().map(ProbeTarget::Icmp),
        _ => None,
    };
    target.or_else(|| value.refuse(format!("{text:?} is not a probe target"), format!("write {WANTED}; names are not resolved")))
}

fn page(value: &Value<'_>, what: &'static str, status: u64) -> Option<HttpTarget> {
    let mut section = value.section(what)?;
    let url = section.take("url");
    let host = section.take("host").and_then(|value| value.text());
    let status = section.take("status").and_then(|value| value.whole(100..=599)).unwrap_or(status);
    let body = section.take("body").and_then(|value| value.text()).unwrap_or_default().to_owned();
    section.finish();
    let Some(url) = url else { return value.refuse(format!("{what} needs a url"), format!("write {WANTED}")) };
    let text = url.text()?;
    let Some((address, path)) = split_url(text) else {
        let remedy = "write http://ADDRESS/PATH, with an address (names are not resolved: put the name into host = \"...\")";
        return url.refuse(format!("{text:?} is not an http URL with an IP address"), remedy.into());
    };
    let host = host.map_or_else(|| text["http://".len()..].split('/').next().unwrap_or_default().to_owned(), str::to_owned);
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return value.refuse(format!("{host:?} is not a host name"), "write only the name, as in host = \"www.example.org\"".into());
    }
    Some(HttpTarget { address, host, path, status: status as u16, body })
}

/// The address and the path of `http://ADDRESS[:PORT]/PATH`.
fn split_url(url: &str) -> Option<(SocketAddr, String)> {
    let rest = url.strip_prefix("http://")?;
    if rest.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return None;
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let bare = authority.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(authority);
    let address = authority.parse().ok().or_else(|| Some(SocketAddr::new(bare.parse::<IpAddr>().ok()?, 80)))?;
    Some((address, if path.is_empty() { "/".to_owned() } else { path.to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split_into_address_and_path() {
        let at = |address: &str, path: &str| Some((address.parse().unwrap(), path.to_owned()));
        assert_eq!(split_url("http://192.0.2.1/a/b"), at("192.0.2.1:80", "/a/b"));
        assert_eq!(split_url("http://192.0.2.1:8080"), at("192.0.2.1:8080", "/"));
        assert_eq!(split_url("http://[2001:db8::1]/"), at("[2001:db8::1]:80", "/"));
        assert_eq!(split_url("http://[2001:db8::1]:81/x"), at("[2001:db8::1]:81", "/x"));
        for bad in ["https://192.0.2.1/", "http://example.org/", "192.0.2.1", "http://192.0.2.1/a b", "http://192.0.2.1/\r\nX: y"] {
            assert_eq!(split_url(bad), None, "{bad}");
        }
    }
}
