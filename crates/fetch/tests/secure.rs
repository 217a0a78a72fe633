//! TLS, HTTP/2, and proxies in between.

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use braid_fetch::{Cookies, Netrc, Options, Proxy};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::header::{HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use support::{Act, Came, Loopback, Server, content, get_over, good, quick};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

const SIZE: usize = 3_000_000;

/// Content of the file.
fn file() -> &'static [u8] {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    FILE.get_or_init(|| content(SIZE))
}

/// Behaviour of a test server.
#[derive(Debug, Clone, Copy)]
struct Behaviour {
    /// Offers HTTP/2.
    two: bool,
    /// Maximum concurrent streams on an HTTP/2 connection.
    streams: u32,
    /// Every second response breaks off in the middle.
    breaks: bool,
    /// Each connection is closed (GOAWAY, or `Connection: close`) after this many responses.
    answers: usize,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self { two: true, streams: 100, breaks: false, answers: usize::MAX }
    }
}

/// What a server received: version and range of each request, and the number of connections.
#[derive(Debug, Default)]
struct Seen {
    requests: Mutex<Vec<(Version, String)>>,
    connections: AtomicUsize,
}

impl Seen {
    fn versions(&self) -> Vec<Version> {
        self.requests.lock().unwrap().iter().map(|(version, _)| *version).collect()
    }
}

/// An HTTPS server in its own thread, which ends with the test process.
struct Secure {
    address: SocketAddr,
    seen: Arc<Seen>,
    root: PathBuf,
    folder: tempfile::TempDir,
}

impl Secure {
    fn start(behaviour: Behaviour, names: &[&str]) -> Self {
        Self::serve_by(behaviour.two, names, move |stream, acceptor, seen| connection(stream, acceptor, seen, behaviour))
    }

    /// A server that redirects every request to `elsewhere`.
    fn redirecting(elsewhere: &str) -> Self {
        let answer = format!("HTTP/1.1 302 Found\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n");
        Self::serve_by(false, &["127.0.0.1"], move |stream, acceptor, _| {
            let answer = answer.clone();
            async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                while !head(&mut stream).await.is_empty() {
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        })
    }

    fn serve_by<F>(two: bool, names: &[&str], handler: impl Fn(TcpStream, TlsAcceptor, Arc<Seen>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let own = rcgen::generate_simple_self_signed(names).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root.pem");
        std::fs::write(&root, own.cert.pem()).unwrap();
        let chain = vec![CertificateDer::from(own.cert.der().to_vec())];
        let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_no_client_auth().with_single_cert(chain, key).unwrap();
        config.alpn_protocols = if two { vec![b"h2".to_vec(), b"http/1.1".to_vec()] } else { vec![b"http/1.1".to_vec()] };
        let (acceptor, seen) = (TlsAcceptor::from(Arc::new(config)), Arc::new(Seen::default()));
        let there = seen.clone();
        let address = serve(move |stream| handler(stream, acceptor.clone(), there.clone()));
        Self { address, seen, root, folder }
    }

    fn url(&self) -> String {
        format!("https://{}/file", self.address)
    }

    fn get(&self, options: Options) -> Came {
        let options = Options { cacert: Some(self.root.clone()), ..options };
        get_over(Loopback::new(3), &[self.url()], &self.out(), options, |_| ())
    }

    /// Downloads the file, which must be correct.
    fn succeeds(&self, options: Options) -> Came {
        let came = self.get(options);
        assert!(came.file("file") == file(), "a wrong byte");
        came
    }

    fn out(&self) -> PathBuf {
        let out = self.folder.path().join("out");
        std::fs::create_dir_all(&out).unwrap();
        out
    }
}

/// Serves connections on a free port of the loopback device, in its own thread.
fn serve<F>(handler: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(handler(stream));
            }
        });
    });
    address
}

async fn connection(stream: TcpStream, acceptor: TlsAcceptor, seen: Arc<Seen>, behaviour: Behaviour) {
    let Ok(stream) = acceptor.accept(stream).await else { return };
    seen.connections.fetch_add(1, Ordering::SeqCst);
    let two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let (count, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Notify::new()));
    let end = ended.clone();
    let service = service_fn(move |request| {
        let (seen, count, end) = (seen.clone(), count.clone(), end.clone());
        async move {
            if count.fetch_add(1, Ordering::SeqCst) + 1 == behaviour.answers {
                end.notify_one();
            }
            Ok::<_, Infallible>(answer(&request, &seen, behaviour))
        }
    });
    let io = TokioIo::new(stream);
    if two {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let connection = builder.max_concurrent_streams(behaviour.streams).serve_connection(io, service);
        tokio::pin!(connection);
        tokio::select! {
            _ = &mut connection => return,
            () = ended.notified() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    } else {
        let connection = hyper::server::conn::http1::Builder::new().serve_connection(io, service);
        tokio::pin!(connection);
        tokio::select! {
            _ = &mut connection => return,
            () = ended.notified() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

type Pieces = StreamBody<std::pin::Pin<Box<dyn futures_util::Stream<Item = Result<Frame<Bytes>, std::io::Error>> + Send>>>;

/// The requested range, in pieces with short delays, so that every link gets a share.
fn answer(request: &Request<Incoming>, seen: &Seen, behaviour: Behaviour) -> Response<Pieces> {
    let range = request.headers().get("range").and_then(|range| range.to_str().ok()).unwrap_or("bytes=0-").to_owned();
    let number = {
        let mut requests = seen.requests.lock().unwrap();
        requests.push((request.version(), range.clone()));
        requests.len()
    };
    let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap_or(SIZE - 1).min(SIZE - 1));
    let body = &file()[first..=last];
    let breaks = behaviour.breaks && number.is_multiple_of(2);
    let mut pieces: Vec<Option<Bytes>> = body.chunks(20_000).map(|piece| Some(Bytes::from_static(piece))).collect();
    if breaks {
        pieces.truncate(pieces.len() / 2);
        pieces.push(None);
    }
    let pieces = stream::unfold(pieces.into_iter(), |mut pieces| async move {
        let piece = pieces.next()?;
        tokio::time::sleep(Duration::from_millis(2)).await;
        Some((piece.map(Frame::data).ok_or_else(|| std::io::Error::other("broken off")), pieces))
    });
    let response = Response::builder().status(206).header("etag", "\"one\"").header("content-length", body.len());
    response.header("content-range", format!("bytes {first}-{last}/{SIZE}")).body(StreamBody::new(Box::pin(pieces) as _)).unwrap()
}

#[test]
fn http_2_is_used_if_offered() {
    let server = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    server.succeeds(quick());
    assert!(server.seen.versions().iter().all(|version| *version == Version::HTTP_2), "{:?}", server.seen);
}

#[test]
fn connections_are_reused() {
    for two in [true, false] {
        let server = Secure::start(Behaviour { two, ..Behaviour::default() }, &["127.0.0.1"]);
        let options = Options { cacert: Some(server.root.clone()), connections: 1, ..quick() };
        let came = get_over(Loopback::new(1), &[server.url()], &server.out(), options, |_| ());
        assert!(came.file("file") == file());
        assert!(server.seen.connections.load(Ordering::SeqCst) < server.seen.versions().len(), "{:?}", server.seen);
    }
}

#[test]
fn http_1_1_is_used_if_http_2_is_not_offered_or_not_wanted() {
    let old = Secure::start(Behaviour { two: false, ..Behaviour::default() }, &["127.0.0.1"]);
    old.succeeds(quick());
    let new = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    new.succeeds(Options { http1: true, ..quick() });
    for server in [old, new] {
        assert!(server.seen.versions().iter().all(|version| *version == Version::HTTP_11), "{:?}", server.seen);
    }
}

#[test]
fn regression_no_secret_follows_a_redirection_from_https_to_http() {
    let plain = Server::start(|asked| vec![Act::Send(good(asked, b"x"))]);
    let secure = Secure::redirecting(&plain.url("/file"));
    let cookies = Cookies::parse("127.0.0.1\tFALSE\t/\tTRUE\t0\tsecret\tcookie\n127.0.0.1\tFALSE\t/\tFALSE\t0\topen\t1\n", 0).unwrap();
    let header = |name: &'static str, value: &'static str| (HeaderName::from_static(name), HeaderValue::from_static(value));
    let headers = vec![header("authorization", "Bearer secret"), header("x-api-key", "secret"), header("user-agent", "mine")];
    let by_hand = Options { headers, credentials: Some("ann:secret".parse().unwrap()), cookies: cookies.clone(), ..quick() };
    let by_file = Options { netrc: Netrc::parse("machine 127.0.0.1 login bob password secret"), cookies, ..quick() };
    for (options, agent) in [(by_hand, "mine"), (by_file, concat!("braid/", env!("CARGO_PKG_VERSION")))] {
        assert_eq!(secure.get(options).file("file"), b"x");
        let asked = plain.requests().pop().unwrap().headers;
        assert_eq!((asked.get("authorization"), asked.get("x-api-key")), (None, None), "{asked:?}");
        assert_eq!((asked["cookie"].as_str(), asked["user-agent"].as_str()), ("open=1", agent));
    }
}

#[test]
fn regression_no_field_follows_to_another_origin_and_no_netrc_password_by_http() {
    let other = Server::start(|asked| vec![Act::Send(good(asked, b"x"))]);
    let far = other.url("/far");
    let first = Server::start(move |_| vec![Act::Send(support::answer("302 Found", &format!("Location: {far}\r\n"), b""))]);
    let header = |name: &'static str, value: &'static str| (HeaderName::from_static(name), HeaderValue::from_static(value));
    let headers = vec![header("x-api-key", "secret"), header("accept", "text/plain")];
    let options = Options { headers, netrc: Netrc::parse("machine 127.0.0.1 login bob password secret"), ..quick() };
    let folder = tempfile::tempdir().unwrap();
    let came = get_over(Loopback::new(1), &[first.url("/file")], folder.path(), options, |_| ());
    assert_eq!(came.file("file"), b"x");
    let (named, led) = (first.requests().pop().unwrap().headers, other.requests().pop().unwrap().headers);
    assert_eq!((named["x-api-key"].as_str(), named.contains_key("authorization")), ("secret", true));
    assert_eq!((led.get("x-api-key"), led.get("authorization"), led["accept"].as_str()), (None, None, "text/plain"), "{led:?}");
}

#[test]
fn one_stream_at_a_time_is_enough() {
    Secure::start(Behaviour { streams: 1, ..Behaviour::default() }, &["127.0.0.1"]).succeeds(quick());
}

#[test]
fn broken_streams_are_resumed() {
    for two in [true, false] {
        Secure::start(Behaviour { two, breaks: true, ..Behaviour::default() }, &["127.0.0.1"]).succeeds(Options { tries: 50, ..quick() });
    }
}

#[test]
fn connections_that_the_server_closes_are_reopened() {
    for two in [true, false] {
        let server = Secure::start(Behaviour { two, answers: 2, ..Behaviour::default() }, &["127.0.0.1"]);
        server.succeeds(Options { tries: 50, ..quick() });
        assert!(server.seen.connections.load(Ordering::SeqCst) > 1, "{:?}", server.seen);
    }
}

#[test]
fn a_certificate_of_another_host_or_an_unknown_issuer_is_rejected() {
    let other = Secure::start(Behaviour::default(), &["other.example"]);
    let came = other.get(Options { tries: 2, ..quick() });
    assert_eq!((came.error().exit_code(), came.error().to_string().contains("127.0.0.1")), (60, true), "{}", came.error());
    let own = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    let came = get_over(Loopback::new(1), &[own.url()], &own.out(), Options { tries: 2, ..quick() }, |_| ());
    assert_eq!(came.error().exit_code(), 60, "{}", came.error());
    assert!(own.seen.versions().is_empty() && other.seen.versions().is_empty(), "no request was sent");
}

/// Reads the head of a request, up to the empty line.
async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

fn through(proxy: &str) -> Options {
    Options { proxy: Proxy::new(Some(proxy), |_| None).unwrap(), tries: 3, ..quick() }
}

#[test]
fn tls_goes_through_an_http_proxy() {
    let server = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let all = asked.clone();
    let proxy = serve(move |mut stream| {
        let all = all.clone();
        async move {
            let head = head(&mut stream).await;
            let target = head.split(' ').nth(1).unwrap_or("").to_owned();
            all.lock().unwrap().push(head);
            if let Ok(mut to) = TcpStream::connect(target).await {
                let _ = stream.write_all(b"HTTP/1.1 200 Connection established\r\nX-Proxy: yes\r\n\r\n").await;
                let _ = copy_bidirectional(&mut stream, &mut to).await;
            }
        }
    });
    server.succeeds(through(&format!("http://who:pw@{proxy}")));
    let heads = asked.lock().unwrap().clone();
    let wanted = format!("CONNECT {} HTTP/1.1\r\n", server.address);
    assert!(!heads.is_empty() && heads.iter().all(|head| head.starts_with(&wanted)), "every connection has a tunnel: {heads:?}");
    assert!(heads.iter().all(|head| head.contains("Proxy-Authorization: Basic d2hvOnB3\r\n") && !head.contains("Range")), "{heads:?}");
    assert!(server.seen.versions().iter().all(|version| *version == Version::HTTP_2));
}

#[test]
fn a_proxy_without_a_tunnel_is_reported() {
    let server = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    for (answer, wanted) in [
        ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407"),
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n", "SSH-2.0"),
        ("HTTP/1.1 200 OK\r\n", "proxy"),
    ] {
        let proxy = serve(move |mut stream| async move {
            head(&mut stream).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        });
        let came = get_over(Loopback::new(2), &[server.url()], &server.out(), through(&proxy.to_string()), |_| ());
        assert!(came.error().to_string().to_lowercase().contains(&wanted.to_lowercase()), "{answer:?}: {}", came.error());
        assert!(!Path::new(&server.out()).join("file").exists());
    }
}

/// A SOCKS5 proxy for one user. It returns a name as its own address, and records requests in `asked`.
async fn socks(mut stream: TcpStream, asked: Arc<Mutex<Vec<String>>>, wanted: Option<&str>) -> std::io::Result<()> {
    let [_, count] = stream.read_u16().await?.to_be_bytes();
    let mut methods = vec![0; usize::from(count)];
    stream.read_exact(&mut methods).await?;
    let Some(wanted) = wanted.map(str::as_bytes) else { return stream.write_all(&[5, 0xff]).await };
    assert!(methods.contains(&2), "{methods:?}");
    stream.write_all(&[5, 2]).await?;
    let mut secret = vec![0; wanted.len()];
    stream.read_exact(&mut secret).await?;
    let good = secret == wanted;
    stream.write_all(&[1, u8::from(!good)]).await?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let host = if head[3] == 1 {
        stream.read_u32().await.map(std::net::Ipv4Addr::from)?.to_string()
    } else {
        let mut name = vec![0; usize::from(stream.read_u8().await?)];
        stream.read_exact(&mut name).await?;
        String::from_utf8_lossy(&name).into_owned()
    };
    let port = stream.read_u16().await?;
    asked.lock().unwrap().push(host.clone());
    let Ok(mut to) = TcpStream::connect((host.replace("far.example", "127.0.0.1"), port)).await else {
        return stream.write_all(&[5, 5, 0, 1, 0, 0, 0, 0, 0, 0]).await;
    };
    stream.write_all(b"\x05\x00\x00\x03\x02me\x00\x01").await?;
    copy_bidirectional(&mut stream, &mut to).await.map(drop)
}

#[test]
fn a_socks_proxy_carries_tls_and_plain_http_and_resolves_names() {
    let server = Secure::start(Behaviour::default(), &["127.0.0.1"]);
    let plain = Server::start(|asked| vec![Act::Send(good(asked, asked.path.as_bytes()))]);
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let all = asked.clone();
    let proxy = serve(move |stream| {
        let all = all.clone();
        async move { drop(socks(stream, all, Some("\x01\x03who\x02pw")).await) }
    });
    let named = format!("socks5h://who:pw@{proxy}");
    server.succeeds(through(&named));
    let url = format!("http://far.example:{}/plain", plain.address.port());
    let came = get_over(Loopback::new(1), &[url], &server.out(), through(&named), |_| ());
    assert_eq!(came.file("plain"), b"/plain", "the request is the same as to the server itself");
    assert!(!plain.requests()[0].headers.contains_key("proxy-authorization"));
    let asked = asked.lock().unwrap().clone();
    assert!(asked.contains(&"127.0.0.1".to_owned()) && asked.contains(&"far.example".to_owned()), "{asked:?}");
}

#[test]
fn a_socks_proxy_that_refuses_is_reported() {
    let closed = "http://127.0.0.1:9/file".to_owned();
    let folder = tempfile::tempdir().unwrap();
    for (user, answers, wanted) in [("who:pw@", true, "refused"), ("who:no@", true, "user or password"), ("", false, "requires a user")] {
        let proxy = serve(move |stream| async move {
            drop(socks(stream, Arc::default(), answers.then_some("\x01\x03who\x02pw")).await);
        });
        let came =
            get_over(Loopback::new(1), std::slice::from_ref(&closed), folder.path(), through(&format!("socks5://{user}{proxy}")), |_| ());
        assert!(came.error().to_string().contains(wanted), "{}", came.error());
    }
    let http = Server::start(|asked| vec![Act::Send(good(asked, b"x"))]);
    let came = get_over(Loopback::new(1), &[closed], folder.path(), through(&format!("socks5://{}", http.address)), |_| ());
    assert!(came.error().exit_code() > 0 && !folder.path().join("file").exists(), "{}", came.error());
}
