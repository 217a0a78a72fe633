//! Hop-by-hop headers, which a proxy must not forward (RFC 9110, section 7.6.1).

use hyper::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE, VIA};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes hop-by-hop headers and adds `Via`. Returns whether the message asks to switch protocols; its upgrade headers then stay.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap, may_upgrade: bool) -> bool {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let upgrade = if may_upgrade && named.contains(&UPGRADE) { headers.get(UPGRADE).cloned() } else { None };
    let trailers =
        headers.get_all(TE).iter().any(|value| value.to_str().is_ok_and(|value| value.to_ascii_lowercase().contains("trailers")));
    // Any named header is removed, except those that delimit the body or name the host.
    let named = named.into_iter().filter(|name| *name != hyper::header::CONTENT_LENGTH && *name != hyper::header::HOST);
    for name in named.chain([CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE]) {
        headers.remove(name);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    headers.append(VIA, HeaderValue::from_static("1.1 braid"));
    let upgrades = upgrade.is_some();
    if let Some(upgrade) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, upgrade);
    }
    upgrades
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut all = headers(&[
            ("connection", "close, X-Own"),
            ("x-own", "1"),
            ("proxy-authorization", "Basic eA=="),
            ("proxy-connection", "keep-alive"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, trailers"),
            ("cache-control", "no-store"),
            ("range", "bytes=1-2"),
        ]);
        assert!(!remove_hop_by_hop(&mut all, true));
        assert_eq!(all, headers(&[("te", "trailers"), ("cache-control", "no-store"), ("range", "bytes=1-2"), ("via", "1.1 braid")]));
    }

    #[test]
    fn an_upgrade_is_kept_only_if_allowed() {
        let asked = [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")];
        let (mut yes, mut no) = (headers(&asked), headers(&asked));
        assert!(remove_hop_by_hop(&mut yes, true) && !remove_hop_by_hop(&mut no, false));
        assert_eq!(yes, headers(&[("via", "1.1 braid"), ("connection", "upgrade"), ("upgrade", "websocket")]));
        assert_eq!(no, headers(&[("via", "1.1 braid")]));
    }

    #[test]
    fn content_length_and_host_cannot_be_removed_by_naming_them() {
        let mut all = headers(&[("connection", "content-length, host"), ("content-length", "5"), ("host", "a")]);
        remove_hop_by_hop(&mut all, false);
        assert!(all.contains_key("content-length") && all.contains_key("host"));
    }
}
