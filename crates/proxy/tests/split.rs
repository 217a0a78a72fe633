//! Downloads through the proxy that are divided among links: the client sees the server's first answer and never a wrong byte, whatever
//! servers do to those who ask for ranges.

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

/// Links that are addresses of the loopback device: link i is 127.0.0.(2 + i). Clients' connections go over the first.
struct Links {
    count: usize,
    /// Over this one nothing connects: `Some(true)`: it is refused, `Some(false)`: it is not even that.
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

/// Starts a proxy; it ends with the test's process.
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

/// What a client was answered.
struct Got {
    head: String,
    body: Vec<u8>,
    /// As much came as was announced.
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

    /// Reads what an answer's head announces.
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

/// Bytes that come as from a link of some 4 MB/s.
fn slowly(bytes: Vec<u8>) -> Vec<Act> {
    bytes.chunks(20_000).flat_map(|piece| [Act::Send(piece.to_vec()), Act::Wait(5)]).collect()
}

/// What comes of a download over two links from a server that answers whole as it should, and ranges so.
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

/// The download is divided, and comes true. On a machine too busy to look in time the first answer may bring all of it: then again.
fn comes_divided(ranges: impl Fn(&Asked, &[u8]) -> Vec<Act> + Clone + Send + Sync + 'static) -> Server {
    for _ in 0..10 {
        let (server, got) = download(ranges.clone());
        assert!(got.whole && got.body == content(SIZE), "a wrong byte");
        let links: BTreeSet<usize> = parts(&server).iter().map(|asked| asked.link).collect();
        if links == [0, 1].into() {
            return server;
        }
    }
    panic!("both links are to be asked for ranges");
}

/// Nothing can be had but by the first answer: it comes true by it, and whoever asked more has noticed that soon.
fn comes_undivided(ranges: impl Fn(&Asked, &[u8]) -> Vec<Act> + Send + Sync + 'static) {
    let (server, got) = download(ranges);
    assert!(got.whole && got.body == content(SIZE), "a wrong byte");
    assert_eq!(server.requests().iter().filter(|asked| asked.range.is_none()).count(), 1, "never asked twice");
    assert!(parts(&server).len() <= 14, "{} questions", parts(&server).len());
}

/// The answer as it came is all there is: no other question is asked.
fn goes_as_it_is(headers: &str, serve: impl Fn(&Asked, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Got {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(serve(asked, &bytes)));
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, headers);
    assert!(got.whole);
    assert_eq!(server.requests().len(), 1);
    got
}

#[test]
fn a_good_server_is_asked_for_ranges_over_both_links() {
    let server = comes_divided(|asked, bytes| slowly(good(asked, bytes)));
    assert!(parts(&server).iter().all(|asked| asked.headers.get("if-range").map(String::as_str) == Some("\"one\"")));
    assert_eq!(server.requests().iter().filter(|asked| asked.range.is_none()).count(), 1);
}

#[test]
fn what_the_client_said_is_said_again_but_for_conditions() {
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
fn the_first_answer_s_head_is_the_client_s() {
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
fn ranges_ignored() {
    comes_undivided(|asked, bytes| slowly(good(&Asked { range: None, ..asked.clone() }, bytes)));
}

#[test]
fn another_state_of_the_file() {
    comes_undivided(|asked, bytes| slowly(good_with(asked, &content_of(2, bytes.len()), "ETag: \"two\"\r\n")));
}

#[test]
fn another_state_where_if_range_is_known() {
    comes_undivided(|_, bytes| slowly(answer("200 OK", "ETag: \"two\"\r\n", &content_of(2, bytes.len()))));
}

#[test]
fn ranges_without_a_validator() {
    comes_undivided(|asked, bytes| slowly(good_with(asked, bytes, "")));
}

#[test]
fn a_range_of_a_file_of_another_size() {
    comes_undivided(|asked, bytes| slowly(good(asked, &bytes[..SIZE - 1])));
}

#[test]
fn another_range_than_asked_for() {
    comes_undivided(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start + 1, end + 1));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn a_range_of_unknown_size() {
    comes_undivided(|asked, bytes| {
        let (start, end) = asked.range.unwrap();
        let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/*\r\n", end - 1);
        slowly(answer("206 Partial Content", &headers, &bytes[start as usize..end as usize]))
    });
}

#[test]
fn a_range_and_a_length_that_do_not_fit() {
    comes_undivided(|asked, bytes| {
        let (start, end) = asked.range.unwrap();
        let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/{SIZE}\r\n", end - 1);
        slowly(answer("206 Partial Content", &headers, &bytes[start as usize..end as usize - 5]))
    });
}

#[test]
fn a_part_that_is_not_said_to_be_one() {
    comes_undivided(|_, bytes| slowly(answer("206 Partial Content", "ETag: \"one\"\r\n", &bytes[..1000])));
}

#[test]
fn several_ranges_at_once() {
    let kind = "Content-Type: multipart/byteranges; boundary=x\r\nETag: \"one\"\r\n";
    comes_undivided(move |_, _| slowly(answer("206 Partial Content", kind, b"--x\r\n\r\n--x--")));
}

#[test]
fn compressed_ranges() {
    comes_undivided(|asked, bytes| slowly(good_with(asked, bytes, "ETag: \"one\"\r\nContent-Encoding: gzip\r\n")));
}

#[test]
fn ranges_refused_in_every_way() {
    for status in ["403 Forbidden", "404 Not Found", "416 Range Not Satisfiable", "429 Too Many Requests", "500 Oh", "503 Busy"] {
        comes_undivided(move |_, _| slowly(answer(status, "", b"no")));
    }
}

#[test]
fn ranges_elsewhere() {
    comes_undivided(|_, _| slowly(answer("302 Found", "Location: http://127.0.0.1:1/\r\n", b"")));
}

#[test]
fn connections_that_close_without_an_answer() {
    comes_undivided(|_, _| vec![Act::Close]);
}

#[test]
fn an_answer_that_is_none() {
    comes_undivided(|_, _| vec![Act::Send(b"what do you want?\r\n\r\n".to_vec()), Act::Close]);
}

#[test]
fn a_head_that_never_ends() {
    comes_undivided(|_, _| vec![Act::Send([b"HTTP/1.1 206 Partial Content\r\nX: ".as_slice(), &vec![b'x'; 1 << 20]].concat()), Act::Hang]);
}

#[test]
fn silence() {
    comes_undivided(|_, _| vec![Act::Hang]);
}

#[test]
fn ranges_shorter_than_asked_for() {
    comes_divided(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start, end.min(start + 40_000)));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn ranges_longer_than_asked_for() {
    comes_divided(|asked, bytes| {
        let range = asked.range.map(|(start, end)| (start, end + 10_000));
        slowly(good(&Asked { range, ..asked.clone() }, bytes))
    });
}

#[test]
fn ranges_that_break_off() {
    comes_divided(|asked, bytes| {
        let mut all = good(asked, bytes);
        let short = asked.number % 3 == 0 && all.len() > 2000;
        all.truncate(if short { all.len() / 2 } else { all.len() });
        slowly(all).into_iter().chain(short.then_some(Act::Close)).collect()
    });
}

#[test]
fn every_other_server_behind_the_address_has_another_tag() {
    comes_divided(|asked, bytes| {
        let tag = if asked.number % 2 == 0 { "ETag: \"other\"\r\n" } else { "ETag: \"one\"\r\n" };
        slowly(good_with(asked, bytes, tag))
    });
}

#[test]
fn some_servers_behind_the_address_know_no_ranges() {
    comes_divided(|asked, bytes| match asked.number % 3 {
        2 => slowly(good(&Asked { range: None, ..asked.clone() }, bytes)),
        _ => slowly(good(asked, bytes)),
    });
}

#[test]
fn a_first_answer_that_breaks_off_is_gone_on_with_by_ranges() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good(asked, &bytes)[..100_000].to_vec()).into_iter().chain([Act::Close]).collect(),
        Some(_) => slowly(good(asked, &bytes)),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(got.whole && got.body == content(SIZE));
}

#[test]
fn a_first_answer_that_breaks_off_where_there_are_no_ranges_is_seen_to() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| match asked.range {
        None => slowly(good(asked, &bytes)[..2_000_000].to_vec()).into_iter().chain([Act::Close]).collect(),
        Some(_) => slowly(answer("404 Not Found", "", b"no")),
    });
    let got = TestClient::new(proxy(two(), SplitBounds::default())).get(&server, "");
    assert!(!got.whole && content(SIZE).starts_with(&got.body), "what came is true, and the end is missed");
}

#[test]
fn a_file_that_changes_under_way_is_never_mixed() {
    for _ in 0..10 {
        let (_, got) = download(|asked, bytes| match asked.number {
            0..4 => slowly(good(asked, bytes)),
            _ => slowly(good_with(asked, &content_of(2, bytes.len()), "ETag: \"two\"\r\n")),
        });
        assert!(content(SIZE).starts_with(&got.body), "what came is of the first state");
        if !got.whole {
            return;
        }
    }
    panic!("it is never divided");
}

#[test]
fn a_second_link_that_refuses_costs_nothing() {
    for second in [true, false] {
        let bytes = content(SIZE);
        let server = Server::start(move |asked| slowly(good(asked, &bytes)));
        let got = TestClient::new(proxy(Links { count: 2, second: Some(second) }, SplitBounds::default())).get(&server, "");
        assert!(got.whole && got.body == content(SIZE));
        assert!(server.requests().iter().all(|asked| asked.link == 0));
    }
}

#[test]
fn what_is_not_worth_it_or_not_safe_goes_as_it_is() {
    goes_as_it_is("", |asked, bytes| good_with(asked, bytes, ""));
    goes_as_it_is("", |asked, bytes| good_with(asked, bytes, "ETag: W/\"one\"\r\n"));
    goes_as_it_is("", |asked, bytes| good_with(asked, bytes, "ETag: \"one\"\r\nAccept-Ranges: none\r\n"));
    goes_as_it_is("", |asked, bytes| good_with(asked, bytes, "ETag: \"one\"\r\nContent-Encoding: gzip\r\n"));
    for size in [0, 1, 400_000] {
        let got = goes_as_it_is("", move |asked, bytes| good(asked, &bytes[..size]));
        assert!(got.body == content(SIZE)[..size]);
    }
    goes_as_it_is("Authorization: Negotiate abc\r\n", good);
    goes_as_it_is("Connection: Upgrade\r\nUpgrade: websocket\r\n", good);
}

#[test]
fn a_client_s_own_ranges_are_its_own() {
    let got = goes_as_it_is("Range: bytes=5-2000004\r\nIf-Range: \"one\"\r\n", good);
    assert!(got.head.starts_with("http/1.1 206") && got.head.contains("content-range: bytes 5-2000004/3000000"), "{}", got.head);
    assert!(got.body == content(SIZE)[5..2_000_005]);
}

#[test]
fn a_head_and_a_form_are_no_downloads() {
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
fn a_client_s_connection_is_kept_from_download_to_download() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    for _ in 0..3 {
        let got = client.get(&server, "");
        assert!(got.whole && got.body == content(SIZE));
    }
}

#[test]
fn an_old_client_is_answered_too() {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    client.ask(&format!("GET {} HTTP/1.0", server.url("/file")), "");
    let head = client.head();
    assert!(client.body(head).body == content(SIZE));
}

/// Waits until the server has sent nothing more for a second; gives what it sent.
fn sent_at_rest(server: &Server) -> usize {
    let begin = Instant::now();
    let (mut last, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(1) {
        assert!(begin.elapsed() < LIMIT, "it never comes to rest");
        let now = server.sent.load(Ordering::SeqCst);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(20));
    }
    last
}

#[test]
fn a_client_that_reads_nothing_is_waited_for_in_bounded_memory() {
    const LARGE: usize = 60_000_000;
    let bytes = content(LARGE);
    let served = bytes.clone();
    let server = Server::start(move |asked| vec![Act::Send(good(asked, &served))]);
    let mut client = TestClient::new(proxy(two(), SplitBounds { one: ByteCount::new(2 << 20), all: ByteCount::new(8 << 20) }));
    client.ask(&format!("GET {} HTTP/1.1", server.url("/file")), "");
    let head = client.head();
    // The window, and what the system keeps of three connections.
    let sent = sent_at_rest(&server);
    assert!(sent < LARGE / 2, "{sent}");
    let got = client.body(head);
    assert!(got.whole && got.body == bytes);
}

#[test]
fn no_connection_outlives_its_client() {
    let bytes = content(SIZE * 10);
    let server = Server::start(move |asked| slowly(good(asked, &bytes)));
    let mut client = TestClient::new(proxy(two(), SplitBounds::default()));
    client.ask(&format!("GET {} HTTP/1.1", server.url("/file")), "");
    client.head();
    let begin = Instant::now();
    while parts(&server).len() < 4 {
        assert!(begin.elapsed() < LIMIT, "it is not divided");
        let mut some = [0; 10_000];
        let _ = client.0.read(&mut some).unwrap();
    }
    drop(client);
    let rest = sent_at_rest(&server);
    assert!(rest < SIZE * 10, "{rest} bytes");
}

#[test]
fn downloads_that_find_no_memory_go_on_undivided() {
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
fn many_downloads_side_by_side_come_true() {
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
