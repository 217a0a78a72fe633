//! Headers that concern one connection only, and so end at a proxy (RFC 9110, section 7.6.1).

use hyper::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE, VIA};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Takes off what is not to be passed on, and notes that it came through here. Whether it asks to change the protocol; then that stays.
pub(crate) fn pass_on(headers: &mut HeaderMap, may_upgrade: bool) -> bool {
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
    // A name is all it takes to have a header removed, but not those that say where the body ends.
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
    fn what_concerns_one_connection_ends_here() {
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
        assert!(!pass_on(&mut all, true));
        assert_eq!(all, headers(&[("te", "trailers"), ("cache-control", "no-store"), ("range", "bytes=1-2"), ("via", "1.1 braid")]));
    }

    #[test]
    fn an_upgrade_stays_where_it_may() {
        let asked = [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")];
        let (mut yes, mut no) = (headers(&asked), headers(&asked));
        assert!(pass_on(&mut yes, true) && !pass_on(&mut no, false));
        assert_eq!(yes, headers(&[("via", "1.1 braid"), ("connection", "upgrade"), ("upgrade", "websocket")]));
        assert_eq!(no, headers(&[("via", "1.1 braid")]));
    }

    #[test]
    fn the_body_s_length_cannot_be_named_away() {
        let mut all = headers(&[("connection", "content-length, host"), ("content-length", "5"), ("host", "a")]);
        pass_on(&mut all, false);
        assert!(all.contains_key("content-length") && all.contains_key("host"));
    }
}
