//! Clients and servers on loopback, with the proxy between them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use braid_model::address::Address;
use braid_peer::destination::{DialError, Policy, dial_tcp, resolve};
use braid_proxy::{Access, Bounds, Credentials, Datagrams, Opened, Origin, Outbound, Pending, Proxy};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time limit for any expected event on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Opens everything directly, within `policy`.
struct Direct {
    policy: Policy,
    origins: mpsc::UnboundedSender<Origin>,
}

impl Outbound for Direct {
    fn connect<'a>(&'a self, origin: &'a Origin, target: &'a Address) -> Pending<'a, Result<Opened, DialError>> {
        let _ = self.origins.send(origin.clone());
        Box::pin(async { Ok(Opened { stream: Box::new(dial_tcp(target, &self.policy).await?), route: None }) })
    }

    fn datagrams<'a>(&'a self, _: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>> {
        let policy = self.policy.clone();
        Box::pin(async { Ok(Box::new(DirectDatagrams(UdpSocket::bind("127.0.0.1:0").await?, policy)) as Box<dyn Datagrams>) })
    }
}

struct DirectDatagrams(UdpSocket, Policy);

impl Datagrams for DirectDatagrams {
    fn send<'a>(&'a self, target: &'a Address, payload: Bytes) -> Pending<'a, ()> {
        Box::pin(async move {
            if let Ok(addresses) = resolve(target, &self.1).await {
                let _ = self.0.send_to(&payload, addresses[0]).await;
            }
        })
    }

    fn receive(&self) -> Pending<'_, io::Result<(SocketAddr, Bytes)>> {
        Box::pin(async {
            let mut buffer = vec![0; 2048];
            let (length, from) = self.0.recv_from(&mut buffer).await?;
            buffer.truncate(length);
            Ok((from, buffer.into()))
        })
    }
}

/// A running proxy, and the clients that requested connections.
struct Running {
    address: SocketAddr,
    origins: mpsc::UnboundedReceiver<Origin>,
}

async fn proxy(credentials: Credentials) -> Running {
    proxy_with(credentials, Bounds::default(), "127.0.0.1:0").await
}

async fn proxy_with(credentials: Credentials, bounds: Bounds, listen: &str) -> Running {
    let listener = TcpListener::bind(listen).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, origins) = mpsc::unbounded_channel();
    let allowed = vec!["127.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()];
    let outbound = Arc::new(Direct { policy: Policy::relay(allowed, Vec::new()), origins: sender });
    tokio::spawn(Proxy::new(listener, Access { credentials, ..Access::default() }, outbound, bounds).run());
    Running { address, origins }
}

fn passwords() -> Credentials {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "ann:secret\n").unwrap();
    Credentials::read(file.path()).unwrap()
}

/// A server that runs `serve` on each connection.
async fn server<F, S>(serve: F) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Fn(TcpStream) -> S + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, count) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let accepted = count.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            accepted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(stream));
        }
    });
    (address, count)
}

/// A server that reads request heads and sends the result of `answer` for each.
async fn answering(answer: fn(&str) -> String) -> (SocketAddr, Arc<AtomicUsize>) {
    server(move |mut stream| async move {
        while let Some(head) = head(&mut stream).await {
            let text = answer(&head);
            if stream.write_all(text.as_bytes()).await.is_err() || text.contains("Connection: close") {
                return;
            }
        }
    })
    .await
}

async fn echo(mut stream: TcpStream) {
    let (mut reader, mut writer) = stream.split();
    let _ = tokio::io::copy(&mut reader, &mut writer).await;
    let _ = writer.shutdown().await;
}

/// Reads up to the empty line; `None` at the end of the stream.
async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        match timeout(LIMIT, stream.read_u8()).await.expect("no head in time") {
            Ok(byte) => text.push(byte),
            Err(_) => return None,
        }
    }
    Some(String::from_utf8(text).unwrap().to_ascii_lowercase())
}

async fn exactly(stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    timeout(LIMIT, stream.read_exact(&mut bytes)).await.expect("nothing in time").unwrap();
    bytes
}

async fn to_the_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = timeout(LIMIT, stream.read_to_end(&mut bytes)).await.expect("no end in time");
    bytes
}

async fn client(running: &Running, say: &str) -> TcpStream {
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(say.as_bytes()).await.unwrap();
    stream
}

fn whole(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: \"e\"\r\nCache-Control: no-store\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn requests_reuse_one_connection_and_keep_their_end_to_end_headers() {
    let (to, count) = answering(|head| {
        assert!(head.starts_with("get /a?b=c http/1.1\r\n") && head.contains("range: bytes=1-4") && head.contains("host: 127.0.0.1:"));
        assert!(!head.contains("proxy-connection") && head.contains("via: 1.1 braid"));
        whole("hello")
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = format!("GET http://{to}/a?b=c HTTP/1.1\r\nHost: elsewhere\r\nRange: bytes=1-4\r\nProxy-Connection: keep-alive\r\n\r\n");
    let mut stream = client(&proxy, &ask).await;
    for _ in 0..2 {
        let head = head(&mut stream).await.unwrap();
        assert!(head.starts_with("http/1.1 200 ok") && head.contains("etag: \"e\"") && head.contains("cache-control: no-store"), "{head}");
        assert_eq!(exactly(&mut stream, 5).await, b"hello");
        stream.write_all(ask.as_bytes()).await.unwrap();
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_proxy_reconnects_to_a_server_that_closes_between_requests() {
    let (to, count) = server(|mut stream| async move {
        head(&mut stream).await;
        let _ = stream.write_all(whole("once").as_bytes()).await;
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = format!("POST http://{to}/ HTTP/1.1\r\nHost: {to}\r\nContent-Length: 0\r\n\r\n");
    let mut stream = client(&proxy, &ask).await;
    for turn in 1..=3 {
        assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 200"), "turn {turn}");
        assert_eq!(exactly(&mut stream, 4).await, b"once");
        // The server's close has arrived by now, or arrives while the next request is on its way.
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(ask.as_bytes()).await.unwrap();
    }
    assert!(count.load(Ordering::SeqCst) >= 3);
}

#[tokio::test]
async fn the_answer_to_head_has_a_length_and_no_body() {
    let (to, _) = answering(|head| {
        assert!(head.starts_with("head "));
        "HTTP/1.1 200 OK\r\nContent-Length: 1234567\r\n\r\n".to_owned()
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = format!("HEAD http://{to}/ HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    let answer = to_the_end(&mut client(&proxy, &ask).await).await;
    let answer = String::from_utf8(answer).unwrap().to_ascii_lowercase();
    assert!(answer.contains("content-length: 1234567\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn chunks_and_trailers_pass_both_ways() {
    let (to, _) = server(|mut stream| async move {
        let asked = head(&mut stream).await.unwrap();
        assert!(asked.contains("transfer-encoding: chunked") && asked.contains("te: trailers"), "{asked}");
        let mut body = Vec::new();
        while !body.ends_with(b"0\r\n\r\n") {
            body.push(stream.read_u8().await.unwrap());
        }
        assert!(body.windows(9).any(|part| part == b"uploaded!"), "{}", String::from_utf8_lossy(&body));
        let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 7\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = format!(
        "PUT http://{to}/ HTTP/1.1\r\nHost: {to}\r\nTE: trailers\r\nConnection: TE, close\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nuploaded!\r\n0\r\n\r\n"
    );
    let answer = String::from_utf8(to_the_end(&mut client(&proxy, &ask).await).await).unwrap().to_ascii_lowercase();
    assert!(answer.contains("\r\nabc\r\n") && answer.contains("x-sum: 7"), "{answer}");
}

#[tokio::test]
async fn a_body_is_sent_only_after_the_server_requests_it() {
    let (wanting, _) = server(|mut stream| async move {
        assert!(head(&mut stream).await.unwrap().contains("expect: 100-continue"));
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
        let body = exactly(&mut stream, 4).await;
        stream.write_all(whole(std::str::from_utf8(&body).unwrap()).as_bytes()).await.unwrap();
    })
    .await;
    let (refusing, _) = answering(|_| "HTTP/1.1 417 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned()).await;
    let proxy = proxy(Credentials::default()).await;
    let ask = |to| format!("POST http://{to}/ HTTP/1.1\r\nHost: {to}\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
    let mut stream = client(&proxy, &ask(wanting)).await;
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 100"));
    stream.write_all(b"body").await.unwrap();
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 200"));
    assert_eq!(exactly(&mut stream, 4).await, b"body");
    let mut stream = client(&proxy, &ask(refusing)).await;
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 417"), "the server's refusal comes first");
}

#[tokio::test]
async fn long_heads_pass_and_heads_over_the_limit_are_rejected() {
    let (to, _) = answering(|head| {
        let long = "x".repeat(if head.contains("get /longer") { 30_000 } else { 20_000 });
        format!("HTTP/1.1 200 OK\r\nX-Long: {long}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = |path: &str, long: usize| format!("GET http://{to}{path} HTTP/1.1\r\nHost: {to}\r\nX-Long: {}\r\n\r\n", "x".repeat(long));
    let answer = head(&mut client(&proxy, &ask("/long", 20_000)).await).await.unwrap();
    assert!(answer.starts_with("http/1.1 200") && answer.len() > 20_000, "{answer}");
    let answer = head(&mut client(&proxy, &ask("/longer", 10)).await).await.unwrap();
    assert!(answer.starts_with("http/1.1 502"), "{answer}");
}

#[tokio::test]
async fn a_tunnel_forwards_bytes_and_half_closes() {
    let (to, _) = server(echo).await;
    let proxy = proxy(Credentials::default()).await;
    let mut stream = client(&proxy, &format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n")).await;
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 200"));
    stream.write_all(b"through").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(to_the_end(&mut stream).await, b"through");
}

#[tokio::test]
async fn regression_a_server_that_resets_a_tunnel_resets_its_client() {
    let (to, _) = server(|mut stream| async move {
        let _ = stream.read_u8().await;
        let _ = stream.write_all(b"half of it").await;
        // The client receives it before the reset.
        let _ = stream.read_u8().await;
        let _ = socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO));
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    for socks in [false, true] {
        let mut stream = if socks {
            let mut stream = client(&proxy, "").await;
            // SOCKS5: no password, then CONNECT to an IPv4 address.
            stream.write_all(&[5, 1, 0]).await.unwrap();
            exactly(&mut stream, 2).await;
            let SocketAddr::V4(v4) = to else { panic!("the server listens on IPv4") };
            let connect = [&[5, 1, 0, 1][..], &v4.ip().octets(), &v4.port().to_be_bytes()].concat();
            stream.write_all(&connect).await.unwrap();
            exactly(&mut stream, 10).await;
            stream
        } else {
            let mut stream = client(&proxy, &format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n")).await;
            head(&mut stream).await.unwrap();
            stream
        };
        stream.write_all(b"?").await.unwrap();
        assert_eq!(exactly(&mut stream, 10).await, b"half of it");
        stream.write_all(b"!").await.unwrap();
        let end = timeout(LIMIT, stream.read(&mut [0; 1])).await.expect("no end in time");
        assert_eq!(end.map_err(|error| error.kind()).unwrap_err(), std::io::ErrorKind::ConnectionReset, "with SOCKS5: {socks}");
    }
}

#[tokio::test]
async fn an_upgrade_turns_a_request_into_a_tunnel() {
    let (to, _) = server(|mut stream| async move {
        let asked = head(&mut stream).await.unwrap();
        assert!(asked.contains("upgrade: websocket") && asked.contains("connection: upgrade"), "{asked}");
        stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").await.unwrap();
        echo(stream).await;
    })
    .await;
    let proxy = proxy(Credentials::default()).await;
    let ask = format!("GET http://{to}/ws HTTP/1.1\r\nHost: {to}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
    let mut stream = client(&proxy, &ask).await;
    let head = head(&mut stream).await.unwrap();
    assert!(head.starts_with("http/1.1 101") && head.contains("upgrade: websocket"), "{head}");
    stream.write_all(b"frames").await.unwrap();
    assert_eq!(exactly(&mut stream, 6).await, b"frames");
}

#[tokio::test]
async fn a_truncated_answer_is_truncated_for_the_client_too() {
    let (to, _) = answering(|_| "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nshort".to_owned()).await;
    let proxy = proxy(Credentials::default()).await;
    let mut stream = client(&proxy, &format!("GET http://{to}/ HTTP/1.1\r\nHost: {to}\r\n\r\n")).await;
    assert!(head(&mut stream).await.unwrap().contains("content-length: 100"));
    assert_eq!(to_the_end(&mut stream).await, b"short", "followed by the end, and not by 95 more bytes or silence");
}

#[tokio::test]
async fn an_unreachable_target_is_reported() {
    let proxy = proxy(Credentials::default()).await;
    // Bound, so that no other socket gets the port meanwhile, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let free = socket.local_addr().unwrap();
    for (ask, status, reason) in [
        (format!("GET http://{free}/ HTTP/1.1\r\nHost: x\r\n\r\n"), "502", "refused"),
        (format!("CONNECT {free} HTTP/1.1\r\nHost: x\r\n\r\n"), "502", "refused"),
        ("CONNECT 10.1.2.3:80 HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "403", "10.1.2.3"),
        ("GET https://example.org/ HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "400", "connect"),
        ("GET http://ann:pw@127.0.0.1/ HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "400", "must not contain"),
        ("GET /elsewhere HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "404", "proxy.pac"),
        ("POST /proxy.pac HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".to_owned(), "405", "only get"),
    ] {
        let mut stream = client(&proxy, &ask).await;
        let head = head(&mut stream).await.unwrap();
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{ask}: {head}");
        let length: usize = head.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap();
        let text = String::from_utf8(exactly(&mut stream, length).await).unwrap().to_lowercase();
        assert!(text.starts_with("braid proxy: ") && text.contains(reason), "{ask}: {text}");
    }
}

#[tokio::test]
async fn the_pac_file_names_the_proxy() {
    let proxy = proxy(Credentials::default()).await;
    let mut stream = client(&proxy, "GET /proxy.pac HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    let text = String::from_utf8(to_the_end(&mut stream).await).unwrap();
    assert!(text.contains("application/x-ns-proxy-autoconfig") && text.contains(&format!("PROXY {}; DIRECT", proxy.address)), "{text}");
}

#[tokio::test]
async fn names_and_passwords_are_required() {
    let (to, _) = answering(|head| {
        assert!(!head.contains("proxy-authorization"));
        whole("in")
    })
    .await;
    let mut proxy = proxy(passwords()).await;
    let ask = |with: &str| format!("GET http://{to}/ HTTP/1.1\r\nHost: x\r\n{with}\r\n");
    for with in ["", "Proxy-Authorization: Basic YW5uOndyb25n\r\n", "Proxy-Authorization: Bearer x\r\n"] {
        let head = head(&mut client(&proxy, &ask(with)).await).await.unwrap();
        assert!(head.starts_with("http/1.1 407") && head.contains("proxy-authenticate: basic"), "{head}");
    }
    // ann:secret
    let mut stream = client(&proxy, &ask("Proxy-Authorization: Basic YW5uOnNlY3JldA==\r\n")).await;
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 200"));
    assert_eq!(proxy.origins.recv().await.unwrap().user.as_deref(), Some("ann"));
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(&[5, 1, 0]).await.unwrap();
    assert_eq!(to_the_end(&mut stream).await, [5, 0xff]);
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(b"\x05\x02\x00\x02\x01\x03ann\x05wrong").await.unwrap();
    assert_eq!(to_the_end(&mut stream).await, [5, 2, 1, 1]);
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(b"\x05\x01\x02\x01\x03ann\x06secret").await.unwrap();
    stream.write_all(&socks_request(1, to)).await.unwrap();
    assert_eq!(exactly(&mut stream, 4).await, [5, 2, 1, 0]);
    assert_eq!(exactly(&mut stream, 10).await[..2], [5, 0]);
    assert_eq!(proxy.origins.recv().await.unwrap().user.as_deref(), Some("ann"));
}

fn socks_request(command: u8, to: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![5, command, 0];
    match to {
        SocketAddr::V4(to) => {
            bytes.push(1);
            bytes.extend(to.ip().octets());
        }
        SocketAddr::V6(to) => {
            bytes.push(4);
            bytes.extend(to.ip().octets());
        }
    }
    bytes.extend(to.port().to_be_bytes());
    bytes
}

#[tokio::test]
async fn socks_clients_connect_by_address_and_name() {
    let (to, _) = server(echo).await;
    let proxy = proxy(Credentials::default()).await;
    let mut by_name = b"\x05\x01\x00\x03\x09localhost".to_vec();
    by_name.extend(to.port().to_be_bytes());
    for request in [socks_request(1, to), by_name] {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        // Everything in one segment, including the first bytes of the connection.
        let all = [&[5, 1, 0][..], &request, b"early "].concat();
        stream.write_all(&all).await.unwrap();
        assert_eq!(exactly(&mut stream, 2).await, [5, 0]);
        assert_eq!(exactly(&mut stream, 10).await, [5, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        stream.write_all(b"and late").await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(to_the_end(&mut stream).await, b"early and late");
    }
}

#[tokio::test]
async fn socks_clients_receive_the_reason_of_a_refusal() {
    let proxy = proxy(Credentials::default()).await;
    // Bound, so that no other socket gets the port meanwhile, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let free = socket.local_addr().unwrap();
    for (request, code) in [
        (socks_request(1, free), 5),
        (socks_request(1, "10.1.2.3:80".parse().unwrap()), 2),
        (socks_request(2, free), 7),
        (vec![5, 1, 0, 9, 1, 2, 3, 4, 0, 80], 8),
        (b"\x05\x01\x00\x03\x03a b\x00\x50".to_vec(), 8),
    ] {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        stream.write_all(&[&[5, 1, 0][..], &request].concat()).await.unwrap();
        let answer = to_the_end(&mut stream).await;
        assert_eq!((&answer[..2], answer[3]), (&[5, 0][..], code), "{request:?}");
    }
}

#[tokio::test]
async fn datagrams_reach_several_targets_and_answers_name_their_senders() {
    let proxy = proxy(Credentials::default()).await;
    let mut control = TcpStream::connect(proxy.address).await.unwrap();
    control.write_all(&[&[5, 1, 0][..], &socks_request(3, "0.0.0.0:0".parse().unwrap())].concat()).await.unwrap();
    assert_eq!(exactly(&mut control, 2).await, [5, 0]);
    let answer = exactly(&mut control, 10).await;
    assert_eq!(answer[..4], [5, 0, 0, 1]);
    let relay = SocketAddr::from(([answer[4], answer[5], answer[6], answer[7]], u16::from_be_bytes([answer[8], answer[9]])));
    let mine = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut buffer = [0; 2048];
    for word in [&b"one"[..], b"two"] {
        let far = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let mut head = socks_request(0, far.local_addr().unwrap());
        head[0] = 0;
        mine.send_to(&[&head[..], word].concat(), relay).await.unwrap();
        let (length, from) = timeout(LIMIT, far.recv_from(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer[..length], word);
        // A stranger's datagrams reach neither the client nor any target.
        let stranger = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        stranger.send_to(&[&head[..], b"stranger"].concat(), relay).await.unwrap();
        far.send_to(&[word, b" back"].concat(), from).await.unwrap();
        let length = timeout(LIMIT, mine.recv(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(buffer[..length], [&head[..], word, b" back"].concat());
    }
    drop(control);
    // The association ends with its connection, which frees its port.
    let begin = std::time::Instant::now();
    while UdpSocket::bind(relay).await.is_err() {
        assert!(begin.elapsed() < LIMIT, "the association outlives its connection");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn ipv6_clients_and_servers_work() {
    let running = proxy_with(Credentials::default(), Bounds::default(), "[::1]:0").await;
    let listener = TcpListener::bind("[::1]:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    tokio::spawn(async move { echo(listener.accept().await.unwrap().0).await });
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(&[&[5, 1, 0][..], &socks_request(1, to)].concat()).await.unwrap();
    assert_eq!(exactly(&mut stream, 12).await[..4], [5, 0, 5, 0]);
    stream.write_all(b"six").await.unwrap();
    assert_eq!(exactly(&mut stream, 3).await, b"six");
}

#[tokio::test]
async fn the_number_of_connections_is_limited() {
    let bounds = Bounds { connections: 3, of_one: 2, ..Bounds::default() };
    let running = proxy_with(Credentials::default(), bounds, "127.0.0.1:0").await;
    let ask = "GET /proxy.pac HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut stream = client(&running, ask).await;
        assert!(head(&mut stream).await.is_some());
        kept.push(stream);
    }
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    assert_eq!(to_the_end(&mut stream).await, b"", "the third is denied");
    kept.pop();
    let begin = std::time::Instant::now();
    loop {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        if stream.write_all(ask.as_bytes()).await.is_ok() && head(&mut stream).await.is_some() {
            break;
        }
        assert!(begin.elapsed() < LIMIT, "a freed place is not reused");
    }
}

#[tokio::test]
async fn connections_with_an_unknown_protocol_are_closed() {
    let proxy = proxy(Credentials::default()).await;
    let long = format!("GET http://127.0.0.1/{} HTTP/1.1\r\n", "x".repeat(1 << 20));
    let both = "POST http://127.0.0.1:9/ HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n".to_owned();
    for junk in [
        b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00".to_vec(),
        vec![0; 64],
        b"\x16\x03\x01\x02\x00".to_vec(),
        b"\x05\x00".to_vec(),
        long.into(),
        both.into(),
    ] {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        let _ = stream.write_all(&junk).await;
        let answer = to_the_end(&mut stream).await;
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4") || answer == [5, 0xff], "{:?}", String::from_utf8_lossy(&answer));
    }
    // The proxy continues to serve.
    let mut stream = client(&proxy, "GET /proxy.pac HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(head(&mut stream).await.unwrap().starts_with("http/1.1 200"));
}
