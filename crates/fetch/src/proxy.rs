//! HTTP and SOCKS proxies: selection, and tunnels through them.

use std::io;
use std::net::IpAddr;

use hyper::header::HeaderValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use url::Url;

use crate::credentials::Credentials;
use crate::error::FetchError;
use crate::network::BoxStream;

/// Maximum length of a proxy's response to CONNECT in bytes.
const MAX_RESPONSE: usize = 16 * 1024;

/// Proxies by scheme, and the hosts that need none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxy {
    http: Option<Url>,
    https: Option<Url>,
    /// Hosts that need no proxy. Each entry includes its subdomains; `*` matches all.
    not: Vec<String>,
}

impl Proxy {
    /// Uses the proxy that was named, otherwise those of the environment variables `http_proxy` (lower case only, as in curl), `https_proxy`,
    /// `all_proxy` and `no_proxy`.
    ///
    /// A proxy that is neither `http://HOST:PORT` nor `socks5://HOST:PORT`.
    /// A proxy that is neither `http://HOST:PORT` nor `socks5://HOST:PORT`.
    pub fn new(named: Option<&str>, environment: impl Fn(&str) -> Option<String>) -> Result<Self, FetchError> {
        let any = |names: &[&str]| names.iter().find_map(|name| environment(name)).filter(|value| !value.is_empty());
        let all = any(&["all_proxy", "ALL_PROXY"]);
        let (http, https) = match named {
            Some("") => (None, None),
            Some(named) => (Some(named.to_owned()), Some(named.to_owned())),
            None => (any(&["http_proxy"]).or_else(|| all.clone()), any(&["https_proxy", "HTTPS_PROXY"]).or(all)),
        };
        let not = any(&["no_proxy", "NO_PROXY"]).unwrap_or_default();
        let not = not.split(',').map(|name| name.trim().trim_start_matches('.').to_ascii_lowercase()).filter(|name| !name.is_empty());
        Ok(Self { http: http.as_deref().map(parse).transpose()?, https: https.as_deref().map(parse).transpose()?, not: not.collect() })
    }

    /// The proxy for a URL.
    pub(crate) fn of(&self, url: &Url) -> Option<&Url> {
        let host = url.host_str()?.to_ascii_lowercase();
        let spared =
            |name: &String| name == "*" || host == *name || host.strip_suffix(name.as_str()).is_some_and(|front| front.ends_with('.'));
        if self.not.iter().any(spared) {
            return None;
        }
        if url.scheme() == "https" { self.https.as_ref() } else { self.http.as_ref() }
    }
}

fn parse(text: &str) -> Result<Url, FetchError> {
    let refused = |reason: String| FetchError::Proxy { proxy: text.rsplit('@').next().unwrap_or_default().to_owned(), reason };
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url: Url = full.parse().map_err(|error: url::ParseError| refused(error.to_string()))?;
    match url.scheme() {
        "http" | "socks5" | "socks5h" if url.host_str().is_some_and(|host| !host.is_empty()) => Ok(url),
        other => Err(refused(format!("{other} proxies are not supported; name one as http://HOST:PORT or socks5://HOST:PORT"))),
    }
}

/// Whether it is a SOCKS proxy, which handles HTTP and TLS alike.
pub(crate) fn is_socks(proxy: &Url) -> bool {
    proxy.scheme() != "http"
}

/// Port of the proxy.
pub(crate) fn port(proxy: &Url) -> u16 {
    proxy.port_or_known_default().unwrap_or(1080)
}

/// Value of `Proxy-Authorization`, from the credentials in the proxy's URL.
pub(crate) fn authorization(proxy: &Url) -> Option<HeaderValue> {
    if is_socks(proxy) { None } else { credentials(proxy)?.basic() }
}

fn credentials(proxy: &Url) -> Option<Credentials> {
    let plain = |text: &str| crate::credentials::decode(text);
    let user = Some(proxy.username()).filter(|user| !user.is_empty())?;
    Some(Credentials { user: plain(user), password: plain(proxy.password().unwrap_or("")) })
}

/// Asks the SOCKS5 proxy at the other end of `stream` for a connection (RFC 1928, with user and password by RFC 1929). The proxy resolves names,
/// whether its URL says `socks5` or `socks5h`.
pub(crate) async fn socks(mut stream: BoxStream, proxy: &Url, host: &str, port: u16) -> Result<BoxStream, FetchError> {
    let result = socks_handshake(&mut stream, credentials(proxy), host.trim_matches(['[', ']']), port).await;
    let refused = |reason| FetchError::Proxy { proxy: proxy.host_str().unwrap_or("").to_owned(), reason };
    result.map_err(|error| refused(error.to_string()))?.map_err(refused)?;
    Ok(stream)
}

async fn socks_handshake(stream: &mut BoxStream, who: Option<Credentials>, host: &str, port: u16) -> io::Result<Result<(), String>> {
    stream.write_all(if who.is_some() { &[5, 2, 0, 2] } else { &[5, 1, 0] }).await?;
    let mut chosen = [0; 2];
    stream.read_exact(&mut chosen).await?;
    match (chosen, who) {
        ([5, 0], _) => {}
        ([5, 2], Some(who)) => {
            let (Ok(user), Ok(password)) = (u8::try_from(who.user.len()), u8::try_from(who.password.len())) else {
                return Ok(Err("SOCKS limits user and password to 255 bytes".to_owned()));
            };
            let secret = [&[1, user], who.user.as_bytes(), &[password], who.password.as_bytes()].concat();
            stream.write_all(&secret).await?;
            let mut answer = [0; 2];
            stream.read_exact(&mut answer).await?;
            if answer[1] != 0 {
                return Ok(Err("it rejects this user or password".to_owned()));
            }
        }
        ([5, _], _) => return Ok(Err("it requires a user and a password: name it as socks5://USER:PASSWORD@HOST:PORT".to_owned())),
        _ => return Ok(Err("it does not answer like a SOCKS5 proxy".to_owned())),
    }
    let target = match (host.parse(), u8::try_from(host.len())) {
        (Ok(IpAddr::V4(address)), _) => [&[1], &address.octets()[..]].concat(),
        (Ok(IpAddr::V6(address)), _) => [&[4], &address.octets()[..]].concat(),
        (Err(_), Ok(length)) => [&[3, length], host.as_bytes()].concat(),
        (Err(_), Err(_)) => return Ok(Err(format!("SOCKS limits names to 255 bytes, and {host} is longer"))),
    };
    stream.write_all(&[&[5, 1, 0], &target[..], &port.to_be_bytes()].concat()).await?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await?;
    if answer[1] != 0 {
        let reason = match answer[1] {
            2 => "its rules do not allow it",
            3 | 4 => "it cannot reach the host",
            5 => "the connection was refused",
            6 => "it timed out",
            8 => "it does not support this address type",
            _ => "it failed",
        };
        return Ok(Err(format!("no connection to {host}:{port}: {reason}")));
    }
    // The proxy's own address follows; only its length matters.
    let length = match answer[3] {
        1 => 4,
        4 => 16,
        3 => usize::from(stream.read_u8().await?),
        _ => return Ok(Err("it does not answer like a SOCKS5 proxy".to_owned())),
    };
    stream.read_exact(&mut vec![0; length + 2]).await?;
    Ok(Ok(()))
}

/// Asks the proxy at the other end of `stream` for a tunnel (RFC 9110 section 9.3.6).
pub(crate) async fn tunnel(mut stream: BoxStream, proxy: &Url, host: &str, port: u16) -> Result<BoxStream, FetchError> {
    let name = proxy.host_str().unwrap_or("").to_owned();
    let refused = |reason: String| FetchError::Proxy { proxy: name.clone(), reason };
    let who = authorization(proxy).and_then(|value| value.to_str().ok().map(|value| format!("Proxy-Authorization: {value}\r\n")));
    let request = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{}\r\n", who.unwrap_or_default());
    stream.write_all(request.as_bytes()).await.map_err(|error| refused(error.to_string()))?;
    let mut answer = Vec::new();
    // Read byte by byte: data after the head belongs to the tunnel.
    while !answer.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await.map_err(|error| refused(error.to_string()))?;
        answer.push(byte);
        if answer.len() > MAX_RESPONSE {
            return Err(refused("its answer to CONNECT is too long".to_owned()));
        }
    }
    let first = String::from_utf8_lossy(&answer).lines().next().unwrap_or("").to_owned();
    match first.split(' ').nth(1) {
        Some(status) if status.len() == 3 && status.starts_with('2') && first.starts_with("HTTP/1.") => Ok(stream),
        _ => Err(refused(format!("it answered {first:?} to CONNECT {host}:{port}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_variables_are_read_as_by_curl() {
        let set = |name: &str| match name {
            "http_proxy" => Some("p:3128".to_owned()),
            "no_proxy" => Some("localhost, .example.org".to_owned()),
            _ => None,
        };
        let proxy = Proxy::new(None, set).unwrap();
        let of = |url: &str| proxy.of(&url.parse().unwrap()).map(Url::as_str).map(str::to_owned);
        assert_eq!(of("http://a.net/").as_deref(), Some("http://p:3128/"));
        assert_eq!((of("https://a.net/"), of("http://www.example.org/"), of("http://localhost:80/")), (None, None, None));
        assert!(Proxy::new(Some(""), set).unwrap().of(&"http://a.net/".parse().unwrap()).is_none(), "an empty name means no proxy");
        assert!(Proxy::new(Some("socks4://x:1"), set).unwrap_err().to_string().contains("http://HOST:PORT"));
    }
}
