//! HTTP client connections: tunnels, forwarded requests, and requests to the proxy itself.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use braid_model::address::{Address, Host};
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION};
use hyper::http::uri::{Authority, Scheme};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;

use crate::answer::{BUFFER, ProxyResponse, plain, unreachable, whole};
use crate::forward::Upstream;
use crate::outbound::Origin;
use crate::pac;
use crate::shared::{GREETING_TIMEOUT, Shared, join_upgraded};

pub(crate) async fn serve(stream: TcpStream, client: SocketAddr, shared: Arc<Shared>) -> io::Result<()> {
    let here = stream.local_addr()?;
    let session = Arc::new(Session { shared, client, here, upstream: Upstream::default() });
    let service = service_fn(move |request| {
        let session = session.clone();
        async move { Ok::<_, Infallible>(session.answer(request).await) }
    });
    let mut server = http1::Builder::new();
    // Copies pending output together: otherwise each small piece would keep the whole buffer alive that it was read into.
    server.timer(TokioTimer::new()).header_read_timeout(GREETING_TIMEOUT * 3).max_buf_size(BUFFER).writev(false);
    server.serve_connection(TokioIo::new(stream), service).with_upgrades().await.map_err(io::Error::other)
}

/// A client's connection.
struct Session {
    shared: Arc<Shared>,
    client: SocketAddr,
    here: SocketAddr,
    upstream: Upstream,
}

impl Session {
    async fn answer(&self, request: Request<Incoming>) -> ProxyResponse {
        let tunnel = request.method() == Method::CONNECT;
        if !tunnel && request.uri().authority().is_none() {
            return self.answer_own(&request);
        }
        let user = match self.user(&request) {
            Ok(user) => user,
            Err(answer) => return *answer,
        };
        let origin = Origin { client: self.client, user };
        let target = match target(request.uri(), tunnel) {
            Ok(target) => target,
            Err(reason) => return plain(StatusCode::BAD_REQUEST, reason),
        };
        if tunnel {
            return self.tunnel(request, &origin, &target).await;
        }
        match self.upstream.forward(request, &origin, &target, &self.shared).await {
            Ok(answer) => answer,
            Err(error) => error.answer(),
        }
    }

    /// The authenticated user, or the response that denies access.
    fn user(&self, request: &Request<Incoming>) -> Result<Option<String>, Box<ProxyResponse>> {
        let credentials = &self.shared.access.credentials;
        if credentials.is_empty() {
            return Ok(None);
        }
        let shown = request.headers().get(PROXY_AUTHORIZATION);
        if let Some(user) = shown.and_then(|header| credentials.basic(header.as_bytes())) {
            return Ok(Some(user));
        }
        if shown.is_some() {
            tracing::info!(client = %self.client.ip(), "denied: wrong name or password");
        }
        let mut answer = plain(StatusCode::PROXY_AUTHENTICATION_REQUIRED, "this proxy requires a name and a password");
        answer.headers_mut().insert(PROXY_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"braid\", charset=\"UTF-8\""));
        Err(Box::new(answer))
    }

    /// Answers a request to the proxy itself.
    fn answer_own(&self, request: &Request<Incoming>) -> ProxyResponse {
        if !pac::PATHS.contains(&request.uri().path()) {
            return plain(StatusCode::NOT_FOUND, "this is a proxy: configure it as one, or load /proxy.pac, which does that");
        }
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed here");
        }
        let mut answer = Response::new(whole(pac::file(self.here)));
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(pac::TYPE));
        answer
    }

    async fn tunnel(&self, request: Request<Incoming>, origin: &Origin, target: &Address) -> ProxyResponse {
        let onward = match self.shared.outbound.connect(origin, target).await {
            Ok(opened) => opened.stream,
            Err(error) => return unreachable(&error),
        };
        tokio::spawn(async move {
            match hyper::upgrade::on(request).await {
                Ok(client) => join_upgraded(client, onward).await,
                Err(error) => tracing::debug!(%error, "a client left before its tunnel was open"),
            }
        });
        Response::new(whole(Bytes::new()))
    }
}

/// The target of a request.
fn target(uri: &Uri, tunnel: bool) -> Result<Address, &'static str> {
    let authority = uri.authority().ok_or("the request has no target")?;
    if authority.as_str().contains('@') {
        return Err("a request's target must not contain a name and a password");
    }
    let port = match (authority.port_u16(), tunnel) {
        (Some(port), _) => port,
        (None, true) => return Err("the target has no port"),
        (None, false) if uri.scheme() == Some(&Scheme::HTTP) => 80,
        (None, false) => return Err("the proxy forwards only http; for https use CONNECT"),
    };
    if !tunnel && uri.scheme() != Some(&Scheme::HTTP) {
        return Err("the proxy forwards only http; for https use CONNECT");
    }
    host(authority).and_then(|host| Address::new(host, port)).ok_or("the target is not a valid address or name")
}

fn host(authority: &Authority) -> Option<Host> {
    let text = authority.host();
    if let Some(v6) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return v6.parse().ok().map(Host::Ip);
    }
    text.parse().map(Host::Ip).or_else(|_| text.parse().map(Host::Name)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_must_be_complete() {
        let of = |text: &str, tunnel| target(&text.parse().unwrap(), tunnel).map(|address| address.to_string());
        assert_eq!(of("http://Example.org/a?b", false).unwrap(), "example.org:80");
        assert_eq!(of("http://[2001:db8::1]:8080/", false).unwrap(), "[2001:db8::1]:8080");
        assert_eq!(of("example.org:443", true).unwrap(), "example.org:443");
        for (text, tunnel) in [
            ("https://example.org/", false),
            ("ftp://example.org:21/", false),
            ("http://ann:pw@example.org/", false),
            ("http://0x7f000001/", false),
            ("http://example.org:0/", false),
            ("example.org", true),
        ] {
            assert!(of(text, tunnel).is_err(), "{text}");
        }
    }
}
