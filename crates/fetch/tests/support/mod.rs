//! A scripted server that tests control byte by byte, and links that are addresses of the loopback device.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use braid_fetch::{BoxStream, Download, DownloadLink, Event, FetchError, Network, Options, Outcome, fetch, group};
use braid_model::PerFamily;
use tokio::net::TcpSocket;

/// Next action of a server on a connection.
pub(crate) enum Act {
    Send(Vec<u8>),
    Wait(u64),
    /// Closes the connection normally.
    Close,
    /// Sends nothing more and keeps the connection open.
    Hang,
}

/// A request of the client.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    /// `bytes=START-END`, end exclusive.
    pub(crate) range: Option<(u64, u64)>,
    /// Number of earlier requests to the server.
    pub(crate) number: usize,
    /// Number of open connections, including this one.
    pub(crate) open: usize,
    /// Link of the client.
    pub(crate) link: usize,
}

type Handler = dyn Fn(&Asked) -> Vec<Act> + Send + Sync;

/// A scripted server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    pub(crate) sent: Arc<AtomicUsize>,
    gone: Arc<AtomicBool>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Asked) -> Vec<Act> + Send + Sync + 'static) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST, handler)
    }

    /// Starts the server at another address of the loopback device.
    pub(crate) fn start_at(host: Ipv4Addr, handler: impl Fn(&Asked) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, sent, gone) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (handler, open): (Arc<Handler>, _) = (Arc::new(handler), Arc::new(AtomicUsize::new(0)));
        let (all, count, end) = (asked.clone(), sent.clone(), gone.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                if end.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (handler, open, all, count) = (handler.clone(), open.clone(), all.clone(), count.clone());
                thread::spawn(move || {
                    open.fetch_add(1, Ordering::SeqCst);
                    let _ = serve(stream, &handler, &open, &all, &count);
                    open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, asked, sent, gone }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn requests(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(
    mut stream: TcpStream,
    handler: &Arc<Handler>,
    open: &AtomicUsize,
    all: &Mutex<Vec<Asked>>,
    count: &AtomicUsize,
) -> std::io::Result<()> {
    let SocketAddr::V4(peer) = stream.peer_addr()? else { return Ok(()) };
    let link = usize::from(peer.ip().octets()[3]).saturating_sub(2);
    loop {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            if stream.read(&mut byte)? == 0 {
                return Ok(());
            }
            head.push(byte[0]);
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let mut lines = text.lines();
        let path = lines.next().unwrap_or("").split(' ').nth(1).unwrap_or("").to_owned();
        let headers: BTreeMap<String, String> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let range = headers.get("range").and_then(|range| {
            let (start, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((start.parse().ok()?, last.parse::<u64>().ok()? + 1))
        });
        let asked = {
            let mut all = all.lock().unwrap();
            let asked = Asked { path, headers, range, number: all.len(), open: open.load(Ordering::SeqCst), link };
            all.push(asked.clone());
            asked
        };
        for act in handler(&asked) {
            match act {
                Act::Send(bytes) => {
                    stream.write_all(&bytes)?;
                    count.fetch_add(bytes.len(), Ordering::SeqCst);
                }
                Act::Wait(millis) => thread::sleep(Duration::from_millis(millis)),
                Act::Close => return stream.shutdown(Shutdown::Both),
                Act::Hang => {
                    // Until the client closes.
                    while stream.read(&mut [0; 1024])? > 0 {}
                    return Ok(());
                }
            }
        }
    }
}

/// Bytes without repetition, so that misplaced data is detected.
pub(crate) fn content(size: usize) -> Vec<u8> {
    content_of(1, size)
}

/// A different file of the same size for each `which`.
pub(crate) fn content_of(which: u64, size: usize) -> Vec<u8> {
    (0..size as u64).map(|at| ((at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(which * 77)) >> 40) as u8).collect()
}

/// A response: status line, header lines and a body with its length.
pub(crate) fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Response of a well-behaved server.
pub(crate) fn good(asked: &Asked, content: &[u8]) -> Vec<u8> {
    good_with(asked, content, "ETag: \"one\"\r\n")
}

/// The same with these additional header lines.
pub(crate) fn good_with(asked: &Asked, content: &[u8], headers: &str) -> Vec<u8> {
    let size = content.len() as u64;
    match asked.range {
        Some((start, _)) if start >= size => answer("416 Range Not Satisfiable", &format!("Content-Range: bytes */{size}\r\n"), b""),
        Some((start, end)) => {
            let end = end.min(size);
            let headers = format!("{headers}Content-Range: bytes {start}-{}/{size}\r\n", end - 1);
            answer("206 Partial Content", &headers, &content[start as usize..end as usize])
        }
        None => answer("200 OK", headers, content),
    }
}

/// Links that are addresses of the loopback device: link i is 127.0.0.(2 + i).
pub(crate) struct Loopback {
    pub(crate) links: Vec<DownloadLink>,
    /// Links without any answer.
    pub(crate) dead: Vec<usize>,
}

impl Loopback {
    pub(crate) fn new(count: usize) -> Self {
        let link = |number: usize| DownloadLink {
            name: format!("link{number}"),
            families: PerFamily { v4: true, v6: false },
            ..DownloadLink::default()
        };
        Self { links: (0..count).map(link).collect(), dead: Vec::new() }
    }
}

impl Network for Loopback {
    fn links(&self) -> &[DownloadLink] {
        &self.links
    }

    fn connect<'a>(
        &'a self,
        link: usize,
        host: &'a str,
        port: u16,
    ) -> Pin<Box<dyn Future<Output = Result<BoxStream, FetchError>> + Send + 'a>> {
        Box::pin(async move {
            let name = self.links[link].name.clone();
            if self.dead.contains(&link) {
                std::future::pending::<()>().await;
            }
            let Ok(address) = host.parse::<Ipv4Addr>() else {
                return Err(FetchError::Resolve { host: host.to_owned(), link: name, reason: "no such name".to_owned(), absent: true });
            };
            let connect_error = |error: std::io::Error| FetchError::Connect {
                host: format!("{host}:{port}"),
                link: name.clone(),
                reason: error.to_string(),
            };
            let socket = TcpSocket::new_v4().map_err(connect_error)?;
            socket.bind(SocketAddr::from(([127, 0, 0, 2 + link as u8], 0))).map_err(connect_error)?;
            let stream = socket.connect(SocketAddr::from((address, port))).await.map_err(connect_error)?;
            Ok(Box::new(stream) as BoxStream)
        })
    }
}

/// Result of a download.
pub(crate) struct Came {
    pub(crate) results: Vec<Result<Outcome, FetchError>>,
    pub(crate) events: Vec<Event>,
    pub(crate) folder: PathBuf,
}

impl Came {
    /// Content of the file, which must be complete.
    pub(crate) fn file(&self, name: &str) -> Vec<u8> {
        assert!(self.results.iter().all(Result::is_ok), "{:?}", self.results);
        std::fs::read(self.folder.join(name)).unwrap()
    }

    /// Error of the only file.
    pub(crate) fn error(&self) -> &FetchError {
        self.results[0].as_ref().unwrap_err()
    }

    pub(crate) fn notes(&self) -> Vec<&str> {
        self.events.iter().filter_map(|event| if let Event::Note { text } = event { Some(text.as_str()) } else { None }).collect()
    }
}

/// Options with short timeouts, so that tests of timeouts end.
pub(crate) fn quick() -> Options {
    Options { timeout: Duration::from_secs(20), connect_timeout: Duration::from_secs(2), tries: 6, ..Options::default() }
}

/// Downloads these URLs into `folder` over `network`, for at most one minute.
pub(crate) fn get_over(
    network: Loopback,
    urls: &[String],
    folder: &Path,
    options: Options,
    change: impl FnOnce(&mut Vec<Download>),
) -> Came {
    let mut downloads = group(urls, None, folder).unwrap();
    change(&mut downloads);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut events = Vec::new();
    let results = runtime.block_on(async {
        let work = fetch(Arc::new(network), downloads, options, std::future::pending(), |event| events.push(event));
        tokio::time::timeout(Duration::from_secs(60), work).await.expect("the download hangs").unwrap()
    });
    runtime.shutdown_background();
    Came { results, events, folder: folder.to_owned() }
}

/// The same over three working links.
pub(crate) fn get(urls: &[String], folder: &Path) -> Came {
    get_over(Loopback::new(3), urls, folder, quick(), |_| ())
}
