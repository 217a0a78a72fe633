//! Reads probe targets and measurement servers.

use std::net::{IpAddr, SocketAddr};

use braid_decide::policy::{HttpTarget, MeasureServer, ProbeTarget};

use super::reader::{Section, Value};

/// Maximum number of measurement servers.
const MAX_SERVERS: usize = 8;

const WANTED: &str =
    "\"tcp:192.0.2.1:443\", \"icmp:192.0.2.1\" or { url = \"http://192.0.2.1/generate_204\", host = \"name\", status = 204 }";

/// Reads `probe_targets`.
pub(super) fn probe_targets(value: Value<'_>) -> Vec<ProbeTarget> {
    value.list().unwrap_or_default().iter().filter_map(probe_target).collect()
}

/// Reads `servers` of `[measure]`.
pub(super) fn servers(value: Value<'_>) -> Vec<MeasureServer> {
    let servers = value.list().unwrap_or_default();
    if servers.len() > MAX_SERVERS {
        value.refuse::<()>(format!("there are {} servers", servers.len()), format!("list at most {MAX_SERVERS}: all are used at once"));
    }
    servers.iter().filter_map(server).collect()
}

fn server(value: &Value<'_>) -> Option<MeasureServer> {
    let mut section = value.section("a measurement server")?;
    let upload = section.take("upload").and_then(|value| {
        let path = value.text()?;
        if !path.starts_with('/') || path.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return value.refuse(format!("{path:?} is not a path"), "write the path at the same server, as in upload = \"/upload\"".into());
        }
        Some(path.to_owned())
    });
    let (page, tls) = page(value, section, "a measurement server", 200, true)?;
    Some(MeasureServer { page, tls, upload })
}

fn probe_target(value: &Value<'_>) -> Option<ProbeTarget> {
    if !value.is_text() {
        let section = value.section("a probe target")?;
        return page(value, section, "a probe target", 204, false).map(|(page, _)| ProbeTarget::Http(page));
    }
    let text = value.text()?;
    let target = match text.split_once(':') {
        Some(("tcp", rest)) => rest.parse().ok().map(ProbeTarget::Tcp),
        Some(("icmp", rest)) => rest.parse().ok().map(ProbeTarget::Icmp),
        _ => None,
    };
    target.or_else(|| value.refuse(format!("{text:?} is not a probe target"), format!("write {WANTED}; names are not resolved")))
}

/// A page, and whether it is encrypted, which only `may_encrypt` allows.
fn page(value: &Value<'_>, mut section: Section<'_>, what: &'static str, status: u64, may_encrypt: bool) -> Option<(HttpTarget, bool)> {
    let url = section.take("url");
    let host = section.take("host").and_then(|value| value.text());
    let status = section.take("status").and_then(|value| value.whole(100..=599)).unwrap_or(status);
    let body = section.take("body").and_then(|value| value.text()).unwrap_or_default().to_owned();
    section.finish();
    let Some(url) = url else { return value.refuse(format!("{what} needs a url"), format!("write {WANTED}")) };
    let text = url.text()?;
    let Some((address, path, tls)) = split_url(text).filter(|(_, _, tls)| may_encrypt || !tls) else {
        let schemes = if may_encrypt { "http:// or https://" } else { "http://" };
        let remedy = format!("write {schemes}ADDRESS/PATH, with an address (names are not resolved: put the name into host = \"...\")");
        return url.refuse(format!("{text:?} is not {schemes} with an IP address"), remedy);
    };
    let authority = || text.split('/').nth(2).unwrap_or_default().to_owned();
    let host = host.map_or_else(authority, str::to_owned);
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return value.refuse(format!("{host:?} is not a host name"), "write only the name, as in host = \"www.example.org\"".into());
    }
    Some((HttpTarget { address, host, path, status: status as u16, body }, tls))
}

/// The address and the path of `http://ADDRESS[:PORT]/PATH`, or of the same with `https`, and whether it is that.
fn split_url(url: &str) -> Option<(SocketAddr, String, bool)> {
    let (rest, tls) = match url.strip_prefix("https://") {
        Some(rest) => (rest, true),
        None => (url.strip_prefix("http://")?, false),
    };
    let port = if tls { 443 } else { 80 };
    if rest.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return None;
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let bare = authority.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(authority);
    let address = authority.parse().ok().or_else(|| Some(SocketAddr::new(bare.parse::<IpAddr>().ok()?, port)))?;
    Some((address, if path.is_empty() { "/".to_owned() } else { path.to_owned() }, tls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split_into_address_and_path() {
        let at = |address: &str, path: &str| Some((address.parse().unwrap(), path.to_owned(), false));
        assert_eq!(split_url("https://192.0.2.1/a"), Some(("192.0.2.1:443".parse().unwrap(), "/a".to_owned(), true)));
        assert_eq!(split_url("http://192.0.2.1/a/b"), at("192.0.2.1:80", "/a/b"));
        assert_eq!(split_url("http://192.0.2.1:8080"), at("192.0.2.1:8080", "/"));
        assert_eq!(split_url("http://[2001:db8::1]/"), at("[2001:db8::1]:80", "/"));
        assert_eq!(split_url("http://[2001:db8::1]:81/x"), at("[2001:db8::1]:81", "/x"));
        for bad in [
            "ftp://192.0.2.1/",
            "https://example.org/",
            "http://example.org/",
            "192.0.2.1",
            "http://192.0.2.1/a b",
            "http://192.0.2.1/\r\nX: y",
        ] {
            assert_eq!(split_url(bad), None, "{bad}");
        }
    }
}
