//! Downloads through the proxy that are split among links. The client sees the head of the server's first answer and never a wrong byte,
//! however servers answer range requests.

#[path = "../../fetch/tests/support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::io;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use braid_model::ByteCount;
use braid_model::address::Address;
use braid_peer::destination::{DialError, Policy, resolve};
use braid_proxy::{Access, Bounds, Connection, ConnectionRoute, Datagrams, Opened, Origin, Outbound, Pending, Proxy, Share, SplitBounds};
use support::{Act, Asked, Server, answer, content, content_of, good, good_with};
use tokio::net::{TcpListener, TcpSocket};

const SIZE: usize = 3_000_000;
const LIMIT: Duration = Duration::from_secs(60);

/// Links that are addresses of the loopback device: link i is 127.0.0.(2 + i). Clients' connections use the first.
struct Links {
    count: usize,
    /// Makes connects over the second link fail: `Some(true)`: they are refused, `Some(false)`: they never complete.
    second: Option<bool>,
}

impl Links {
    async fn open(&self, route: ConnectionRoute) -> io::Result<Box<dyn Connection>> {
        match self.second.filter(|_| route.link == 1) {
            Some(true) => return Err(io::ErrorKind::ConnectionRefused.into()),
            Some(false) => std::future::pending::<()>().await,
            None => {}
        }
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from(([127, 0, 0, 2 + route.link as u8], 0)))?;
        Ok(Box::new(socket.connect(route.remote).await?))
    }
}

impl Outbound for Links {
    fn connect<'a>(&'a self, _: &'a Origin, target: &'a Address) -> Pending<'a, Result<Opened, DialError>> {
        Box::pin(async {
            let policy = Policy::relay(vec!["127.0.0.0/8".parse().unwrap()], Vec::new());
            let route = ConnectionRoute { link: 0, remote: resolve(target, &policy).await?[0] };
            Ok(Opened { stream: self.open(route).await.unwrap(), route: Some(route) })
        })
    }

    fn share(&self, _: &Origin, _: ConnectionRoute) -> Option<Share> {
        Some(Share { links: (0..self.count).map(|link| (link, format!("link{link}"))).collect(), weight: 1.0 })
    }

    fn connect_by<'a>(&'a self, _: &'a Origin, route: ConnectionRoute) -> Pending<'a, io::Result<Box<dyn Connection>>> {
        Box::pin(self.open(route))
    }

    fn datagrams<'a>(&'a self, _: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
}

/// Starts a proxy, which ends with the test's process.
fn proxy(links: Links, split: SplitBounds) -> SocketAddr {
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            let bounds = Bounds { split, ..Bounds::default() };
            Proxy::new(listener, Access::default(), Arc::new(links), bounds).run().await;
        });
    });
    told.recv().unwrap()
}

fn two() -> Links {
    Links { count: 2, second: None }
}

/// The answer that a client received.
struct Got {
    head: String,
    body: Vec<u8>,
    /// The body has the announced length.
    whole: bool,
}

/// A client's connection.
struct TestClient(TcpStream);

impl TestClient {
    fn new(proxy: SocketAddr) -> Self {
        let stream = TcpStream::connect(proxy).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self(stream)
    }

    fn ask(&mut self, line: &str, headers: &str) {
        self.0.write_all(format!("{line}\r\nHost: elsewhere\r\n{headers}\r\n").as_bytes()).unwrap();
    }

    fn head(&mut self) -> String {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            self.0.read_exact(&mut byte).expect("an answer's head");
            head.push(byte[0]);
        }
        String::from_utf8(head).unwrap().to_ascii_lowercase()
    }

    /// Reads the body that a head announces.
    fn body(&mut self, head: String) -> Got {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map(|length| length.parse().unwrap());
        let mut body = Vec::new();
        let read = (&self.0).take(length.unwrap_or(u64::MAX)).read_to_end(&mut body);
        assert!(!read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock), "nothing for {LIMIT:?} after {} bytes", body.len());
        let whole = length.is_none_or(|length| body.len() as u64 == length);
        Got { head, body, whole }
    }

    fn get(&mut self, server: &Server, headers: &str) -> Got {
        self.ask(&format!("GET {} HTTP/1.1", server.url("/file")), headers);
        let head = self.head();
        self.body(head)
    }
}

/// Bytes at the rate of a link with about 4 MB/s.
fn slowly(bytes: Vec<u8>) -> Vec<Act> {
    bytes.chunks(20_000).flat_map(|piece| [Act::Send(piece.to_vec()), Act::Wait(5)]).collect()
}

/// Downloads over two links from a server that answers whole requests correctly, and range requests with `ranges`.
fn download(ranges: impl Fn(&Asked, &[u8]) -> Vec<Act> + Send + Sync + 'static) -> (Server, Got) {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good(asked, &bytes)),
        Some(_) => ranges(asked, &bytes),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(got.head.starts_with("http/1.1 200 ok\r\n") && got.head.contains("etag: \"one\""), "{}", got.head);
    (server, got)
}

fn parts(server: &Server) -> Vec<Asked> {
    server.requests().into_iter().filter(|asked| asked.range.is_some()).collect()
}

/// Asserts that the download is split and correct. On a machine too busy to check in time, the first answer may deliver all of it; then retries.
fn assert_split(ranges: impl Fn(&Asked, &[u8]) -> Vec<Act> + Clone + Send + Sync + 'static) -> Server {
    for _ in 0..10 {
        let (server, got) = download(ranges.clone());
        assert!(got.whole && got.body == content(SIZE), "a wrong byte");
        let links: BTreeSet<usize> = parts(&server).iter().map(|asked| asked.link).collect();
        if links == [0, 1].into() {
            return server;
        }
    }
    panic!("range requests must use both links");
}

/// Asserts that the first answer alone delivers the file, correctly, and that the proxy soon stops to request ranges.
fn assert_not_split(ranges: impl Fn(&Asked, &[u8]) -> Vec<Act> + Send + Sync + 'static) {
    let (server, got) = download(ranges);
    assert!(got.whole && got.body == content(SIZE), "a wrong byte");
    assert_eq!(server.requests().iter().filter(|asked| asked.range.is_none()).count(), 1, "the whole file is requested once");
    assert!(parts(&server).len() <= 14, "{} range requests", parts(&server).len());
}

/// Asserts that the proxy sends only the client's request.
fn assert_unchanged(headers: &str, serve: impl Fn(&Asked, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Got {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(serve(asked, &bytes)));
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, headers);
    assert!(got.whole);
    assert_eq!(server.requests().len(), 1);
    got
}

#[test]
fn ranges_are_requested_from_a_correct_server_over_both_links() {
    let server = assert_split(|asked, bytes| slowly(good(asked, bytes)));
    assert!(parts(&server).iter().all(|asked| asked.headers.get("if-range").map(String::as_str) == Some("\"one\"")));
    assert_eq!(server.requests().iter().filter(|asked| asked.range.is_none()).count(), 1);
}

#[test]
fn range_requests_repeat_the_clients_headers_except_conditions() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let asks = "Cookie: a=b\r\nX-Own: 1\r\nAccept-Encoding: gzip\r\nIf-None-Match: \"zero\"\r\nProxy-Connection: keep-alive\r\n";
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, asks);
    assert!(got.whole && got.body == content(SIZE));
    assert!(server.requests()[0].headers.contains_key("if-none-match"));
    for asked in parts(&server) {
        let said = |name: &str| asked.headers.get(name).map(String::as_str);
        assert_eq!((said("cookie"), said("x-own"), said("accept-encoding")), (Some("a=b"), Some("1"), Some("gzip")));
        assert_eq!((said("if-none-match"), said("proxy-connection")), (None, None));
        assert_eq!((asked.path.as_str(), said("host")), ("/file", Some(server.address.to_string().as_str())));
    }
}

#[test]
fn the_client_gets_the_head_of_the_first_answer() {
    let bytes = content(SIZE);
    let first = "ETag: \"one\"\r\nAge: 7\r\nVary: Accept\r\nCache-Control: max-age=60\r\nSet-Cookie: s=1\r\n";
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good_with(asked, &bytes, first)),
        Some(_) => slowly(good_with(asked, &bytes, "ETag: \"one\"\r\nAge: 9\r\nSet-Cookie: s=2\r\n")),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(got.body == content(SIZE));
    for line in ["age: 7", "vary: accept", "cache-control: max-age=60", "set-cookie: s=1", "via: 1.1 braid", "content-length: 3000000"] {
        assert!(got.head.lines().any(|found| found == line), "{line}: {}", got.head);
    }
    assert!(!got.head.contains("s=2") && !got.head.contains("content-range"));
}

#[test]
fn ignored_ranges_are_not_split() {
    assert_not_split(|asked, bytes| slowly(good(&Asked { range: None, ..asked.clone() }, bytes)));
}

#[test]
fn a_changed_file_is_not_split() {
    assert_not_split(|asked, bytes| slowly(good_with(asked, &content_of(2, bytes.len()), "ETag: \"two\"\r\n")));
}

#[test]
fn a_changed_file_with_if_range_support_is_not_split() {
    assert_not_split(|_, bytes| slowly(answer("200 OK", "ETag: \"two\"\r\n", &content_of(2, bytes.len()))));
}

#[test]
fn ranges_without_a_validator_are_not_split() {
    assert_not_split(|asked, bytes| slowly(good_with(asked, bytes, "")));
}

#[test]
fn a_range_of_a_file_with_another_size_is_not_used() {
    assert_not_split(|asked, bytes| slowly(good(asked, &bytes[..SIZE - 1])));
}

#[test]
fn a_range_other_than_the_requested_one_is_not_used() {
    assert_not_split(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start + 1, end + 1));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn a_range_of_unknown_total_size_is_not_used() {
    assert_not_split(|asked, bytes| {
        let (start, end) = asked.range.unwrap();
        let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/*\r\n", end - 1);
        slowly(answer("206 Partial Content", &headers, &bytes[start as usize..end as usize]))
    });
}

#[test]
fn a_range_with_a_wrong_length_is_not_used() {
    assert_not_split(|asked, bytes| {
        let (start, end) = asked.range.unwrap();
        let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/{SIZE}\r\n", end - 1);
        slowly(answer("206 Partial Content", &headers, &bytes[start as usize..end as usize - 5]))
    });
}

#[test]
fn a_partial_answer_without_content_range_is_not_used() {
    assert_not_split(|_, bytes| slowly(answer("206 Partial Content", "ETag: \"one\"\r\n", &bytes[..1000])));
}

#[test]
fn a_multipart_answer_is_not_used() {
    let kind = "Content-Type: multipart/byteranges; boundary=x\r\nETag: \"one\"\r\n";
    assert_not_split(move |_, _| slowly(answer("206 Partial Content", kind, b"--x\r\n\r\n--x--")));
}

#[test]
fn compressed_ranges_are_not_used() {
    assert_not_split(|asked, bytes| slowly(good_with(asked, bytes, "ETag: \"one\"\r\nContent-Encoding: gzip\r\n")));
}

#[test]
fn ranges_rejected_with_any_status_are_not_split() {
    for status in ["403 Forbidden", "404 Not Found", "416 Range Not Satisfiable", "429 Too Many Requests", "500 Oh", "503 Busy"] {
        assert_not_split(move |_, _| slowly(answer(status, "", b"no")));
    }
}

#[test]
fn redirected_ranges_are_not_split() {
    assert_not_split(|_, _| slowly(answer("302 Found", "Location: http://127.0.0.1:1/\r\n", b"")));
}

#[test]
fn connections_closed_without_an_answer_are_not_split() {
    assert_not_split(|_, _| vec![Act::Close]);
}

#[test]
fn an_invalid_answer_is_not_used() {
    assert_not_split(|_, _| vec![Act::Send(b"what do you want?\r\n\r\n".to_vec()), Act::Close]);
}

#[test]
fn an_endless_head_is_not_used() {
    assert_not_split(|_, _| vec![Act::Send([b"HTTP/1.1 206 Partial Content\r\nX: ".as_slice(), &vec![b'x'; 1 << 20]].concat()), Act::Hang]);
}

#[test]
fn silent_range_requests_are_not_split() {
    assert_not_split(|_, _| vec![Act::Hang]);
}

#[test]
fn ranges_shorter_than_requested_are_split() {
    assert_split(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start, end.min(start + 40_000)));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn ranges_longer_than_requested_are_split() {
    assert_split(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start, end + 10_000));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn truncated_ranges_are_split() {
    assert_split(|asked, bytes| {
        let mut all = good(asked, bytes);
        let short = asked.number % 3 == 0 && all.len() > 2000;
        all.truncate(if short { all.len() / 2 } else { all.len() });
        slowly(all).into_iter().chain(short.then_some(Act::Close)).collect()
    });
}

#[test]
fn alternating_servers_with_another_tag_are_split() {
    assert_split(|asked, bytes| {
        let tag = if asked.number % 2 == 0 { "ETag: \"other\"\r\n" } else { "ETag: \"one\"\r\n" };
        slowly(good_with(asked, bytes, tag))
    });
}

#[test]
fn servers_of_which_some_ignore_ranges_are_split() {
    assert_split(|asked, bytes| match asked.number % 3 {
        2 => slowly(good(&Asked { range: None, ..asked.clone() }, bytes)),
        _ => slowly(good(asked, bytes)),
    });
}

#[test]
fn a_truncated_first_answer_is_completed_with_ranges() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good(asked, &bytes)[..100_000].to_vec()).into_iter().chain([Act::Close]).collect(),
        Some(_) => slowly(good(asked, &bytes)),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(got.whole && got.body == content(SIZE));
}

#[test]
fn a_truncated_first_answer_without_range_support_is_truncated_for_the_client() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good(asked, &bytes)[..2_000_000].to_vec()).into_iter().chain([Act::Close]).collect(),
        Some(_) => slowly(answer("404 Not Found", "", b"no")),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(!got.whole && content(SIZE).starts_with(&got.body), "the received bytes are correct, and the end is missing");
}

#[test]
fn two_states_of_a_changing_file_are_never_mixed() {
    for _ in 0..10 {
        let (_, got) = download(|asked, bytes| match asked.number {
            0..4 => slowly(good(asked, bytes)),
            _ => slowly(good_with(asked, &content_of(2, bytes.len()), "ETag: \"two\"\r\n")),
        });
        assert!(content(SIZE).starts_with(&got.body), "the received bytes belong to the first state");
        if !got.whole {
            return;
        }
    }
    panic!("it is never split");
}

#[test]
fn a_second_link_without_connections_does_no_harm() {
    for second in [true, false] {
        let bytes = content(SIZE);
        let server = Server::start(move |asked| slowly(good(asked, &bytes)));
        let got = TestClient::new(proxy(Links { count: 2, second: Some(second) }, SplitBounds::default())).get(&server, "");
        assert!(got.whole && got.body == content(SIZE));
        assert!(server.requests().iter().all(|asked| asked.link == 0));
    }
}

#[test]
fn small_or_unsafe_downloads_are_not_split() {
    assert_unchanged("", |asked, bytes| good_with(asked, bytes, ""));
    assert_unchanged("", |asked, bytes| good_with(asked, bytes, "ETag: W/\"one\"\r\n"));
    assert_unchanged("", |asked, bytes| good_with(asked, bytes, "ETag: \"one\"\r\nAccept-Ranges: none\r\n"));
    assert_unchanged("", |asked, bytes| good_with(asked, bytes, "ETag: \"one\"\r\nContent-Encoding: gzip\r\n"));
    for size in [0, 1, 400_000] {
        let got = assert_unchanged("", move |asked, bytes| good(asked, &bytes[..size]));
        assert!(got.body == content(SIZE)[..size]);
    }
    assert_unchanged("Authorization: Negotiate abc\r\n", good);
    assert_unchanged("Connection: Upgrade\r\nUpgrade: websocket\r\n", good);
}

#[test]
fn a_clients_own_range_request_is_not_split() {
    let got = assert_unchanged("Range: bytes=5-2000004\r\nIf-Range: \"one\"\r\n", good);
    assert!(got.head.starts_with("http/1.1 206") && got.head.contains("content-range: bytes 5-2000004/3000000"), "{}", got.head);
    assert!(got.body == content(SIZE)[5..2_000_005]);
}

#[test]
fn head_and_post_requests_are_not_split() {
    for (line, body) in [("HEAD", false), ("POST", true)] {
        let bytes = content(SIZE);
        let server = Server::start(move |asked| {
            let mut all = good(asked, &bytes);
            all.truncate(if body { all.len() } else { all.len() - SIZE });
            slowly(all)
        });
        let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
        client.ask(&format!("{line} {} HTTP/1.1", server.url("/file")), "Content-Length: 0\r\n");
        let head = client.head();
        assert!(head.contains("content-length: 3000000"), "{head}");
        if body {
            assert!(client.body(head).body == content(SIZE));
        }
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn a_clients_connection_is_reused_for_further_downloads() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    for _ in 0..3 {
        let got = client.get(&server, "");
        assert!(got.whole && got.body == content(SIZE));
    }
}

#[test]
fn an_http_1_0_client_is_answered() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    client.ask(&format!("GET {} HTTP/1.0", server.url("/file")), "");
    let head = client.head();
    assert!(client.body(head).body == content(SIZE));
}

/// Waits until the server has sent nothing for a second; returns the number of bytes that it sent.
fn sent_at_rest(server: &Server) -> usize {
    let begin = Instant::now();
    let (mut last, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(1) {
        assert!(begin.elapsed() < LIMIT, "the server never stops sending");
        let now = server.sent.load(Ordering::SeqCst);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(20));
    }
    last
}

#[test]
fn a_client_that_reads_nothing_uses_bounded_memory() {
    const LARGE: usize = 60_000_000;
    let bytes = content(LARGE);
    let served = bytes.clone();
    let server = Server::start(move |asked| vec![Act::Send(good(asked, &served))]);
    let mut client = TestClient::new(proxy(two(), SplitBounds { one: ByteCount::new(2 << 20), all: ByteCount::new(8 << 20) }));
    client.ask(&format!("GET {} HTTP/1.1", server.url("/file")), "");
    let head = client.head();
    // The window, and the system's buffers of three connections.
    let sent = sent_at_rest(&server);
    assert!(sent < LARGE / 2, "{sent}");
    let got = client.body(head);
    assert!(got.whole && got.body == bytes);
}

#[test]
fn server_connections_end_with_their_client() {
    let bytes = content(SIZE * 10);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    client.ask(&format!("GET {} HTTP/1.1", server.url("/file")), "");
    client.head();
    let begin = Instant::now();
    while parts(&server).len() < 4 {
        assert!(begin.elapsed() < LIMIT, "it is not split");
        let mut some = [0; 10_000];
        let _ = client.0.read(&mut some).unwrap();
    }
    drop(client);
    let rest = sent_at_rest(&server);
    assert!(rest < SIZE * 10, "{rest} bytes");
}

#[test]
fn downloads_without_free_memory_continue_unsplit() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let small = SplitBounds { one: ByteCount::new(1 << 20), all: ByteCount::new(1_200_000) };
    let proxy = proxy(two(), small);
    let clients: Vec<TestClient> = (0..3)
        .map(|_| {
            let mut client = TestClient::new(proxy);
            client.ask(&format!("GET {} HTTP/1.1", server.url("/file")), "");
            client
        })
        .collect();
    for mut client in clients {
        let head = client.head();
        assert!(client.body(head).body == content(SIZE));
    }
}

#[test]
fn many_concurrent_downloads_are_correct() {
    let server = Server::start(|asked| {
        let which: u64 = asked.path.trim_start_matches('/').parse().unwrap();
        slowly(good_with(asked, &content_of(which, SIZE / 2), &format!("ETag: \"{which}\"\r\n")))
    });
    let proxy = proxy(two(), SplitBounds::default());
    let clients: Vec<_> = (0..8)
        .map(|which| {
            let url = server.url(&format!("/{which}"));
            thread::spawn(move || {
                let mut client = TestClient::new(proxy);
                client.ask(&format!("GET {url} HTTP/1.1"), "");
                let head = client.head();
                assert!(client.body(head).body == content_of(which, SIZE / 2), "{which}");
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
}
