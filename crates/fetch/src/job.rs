//! One file of a run: its sources, its destination, and its last error.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use braid_model::ByteCount;
use braid_range::{ServerId, Spans};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use ring::digest::{SHA256, digest};
use tokio::time::Instant;
use url::Url;

use crate::answer::{Asked, Validator};
use crate::credentials::shown;
use crate::error::FetchError;
use crate::files::Download;
use crate::options::{Options, Output};
use crate::partial::{Partial, Resumable};

/// Download window ahead of standard output.
pub(crate) const WINDOW: ByteCount = ByteCount::new(16 * 1024 * 1024);

/// One URL of a file.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The URL as given.
    first: Url,
    /// The URL after redirects.
    pub(crate) url: Url,
    pub(crate) server: ServerId,
    pub(crate) validator: Option<Validator>,
    pub(crate) redirects: u32,
    /// A redirect led from https to http.
    downgraded: bool,
}

impl Source {
    pub(crate) fn new(url: Url, server: ServerId) -> Self {
        Self { first: url.clone(), url, server, validator: None, redirects: 0, downgraded: false }
    }

    /// Hash of the URL for the journal. Other users may read the journal, and the URL may contain secrets.
    fn fingerprint(&self) -> String {
        data_encoding::HEXLOWER.encode(digest(&SHA256, shown(&self.first).as_bytes()).as_ref())
    }

    /// Follows a redirect.
    pub(crate) fn follow(&mut self, to: Url, server: ServerId) {
        self.downgraded |= self.url.scheme() == "https" && to.scheme() == "http";
        (self.url, self.server) = (to, server);
    }

    /// Whether data that the user gave for the URL may be sent to the current URL: same server, and no http after https.
    fn same_origin(&self) -> bool {
        self.first.origin() == self.url.origin() && !(self.downgraded && self.url.scheme() == "http")
    }
}

/// Destination of a file's bytes.
#[derive(Debug)]
pub(crate) enum Sink {
    File(Partial),
    /// Standard output: bytes that wait for earlier ones, by offset, and the number of bytes written.
    Ordered {
        waiting: BTreeMap<u64, bytes::Bytes>,
        out: u64,
    },
    /// Finished.
    Closed,
}

/// One file of a run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) download: Download,
    pub(crate) sources: Vec<Source>,
    pub(crate) sink: Sink,
    /// Data of an earlier run, until the first response proves that it belongs to the same version.
    pub(crate) left: Option<Resumable>,
    pub(crate) last_error: Option<FetchError>,
    /// The file changed, and the download was restarted once.
    pub(crate) restarted: bool,
    pub(crate) began: Instant,
    /// New bytes by link.
    pub(crate) by_link: Vec<ByteCount>,
    pub(crate) outcome: Option<Result<(), FetchError>>,
}

impl Job {
    pub(crate) fn new(download: Download, sources: Vec<Source>, links: usize, resume: bool) -> Result<Self, FetchError> {
        let (sink, left) = match &download.output {
            Output::File(path) => {
                let (partial, left) = Partial::open(path, resume)?;
                (Sink::File(partial), left)
            }
            Output::Standard => (Sink::Ordered { waiting: BTreeMap::new(), out: 0 }, None),
        };
        let mut job = Self {
            download,
            sources,
            sink,
            left,
            last_error: None,
            restarted: false,
            began: Instant::now(),
            by_link: vec![ByteCount::ZERO; links],
            outcome: None,
        };
        job.recall();
        Ok(job)
    }

    /// Copies the validators of an earlier run to the sources.
    fn recall(&mut self) {
        let Some(left) = &self.left else { return };
        for source in &mut self.sources {
            source.validator = left.header.validators.get(&source.fingerprint()).cloned();
        }
        // Nothing proves that the present data belongs to the file at these URLs.
        if self.sources.iter().all(|source| source.validator.is_none()) {
            self.left = None;
            if let Sink::File(partial) = &mut self.sink
                && let Err(error) = partial.restart()
            {
                self.outcome = Some(Err(error));
            }
        }
    }

    /// Size and ranges that are already present.
    pub(crate) fn got(&self) -> (Option<ByteCount>, Spans) {
        match &self.left {
            Some(left) => (Some(ByteCount::new(left.header.size)), left.got.clone()),
            None => (None, Spans::default()),
        }
    }

    /// Name to show.
    pub(crate) fn name(&self) -> String {
        match &self.download.output {
            Output::File(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            Output::Standard => "-".to_owned(),
        }
    }

    pub(crate) fn url(&self) -> String {
        self.sources.first().map(|source| shown(&source.url)).unwrap_or_default()
    }

    /// The request for a source.
    pub(crate) fn asked(&self, source: usize, span: Option<braid_range::Span>, options: &Options) -> (Asked, HeaderMap) {
        let there = &self.sources[source];
        let headers = headers(there, options);
        let encoded = options.headers.iter().any(|(name, _)| *name == header::ACCEPT_ENCODING);
        (Asked { url: there.url.clone(), target: None, span, expected: there.validator.clone(), encoded }, headers)
    }

    /// Stores the validator of a source's response, and checks it.
    pub(crate) fn on_validator(&mut self, source: usize, size: Option<ByteCount>, validator: Option<Validator>) -> Result<(), FetchError> {
        let there = &mut self.sources[source];
        // A new source of a partly downloaded file must prove that it has the same version.
        let known =
            |left: &Resumable| validator.as_ref().is_some_and(|validator| left.header.validators.values().any(|known| known == validator));
        if there.validator.is_none() && self.left.as_ref().is_some_and(|left| !known(left)) {
            return Err(FetchError::Changed {
                url: shown(&there.url),
                reason: "it is not the version that the download began with".to_owned(),
            });
        }
        match &there.validator {
            None => there.validator = validator,
            // This request was sent before the first response named a validator.
            known if *known != validator => {
                return Err(FetchError::Changed { url: shown(&there.url), reason: "two responses have different validators".to_owned() });
            }
            _ => {}
        }
        let (Sink::File(partial), Some(size)) = (&mut self.sink, size) else { return Ok(()) };
        partial.learn(size, &self.sources[source].fingerprint(), self.sources[source].validator.as_ref())
    }

    /// Writes bytes at their offset. Returns the total written in order, for standard output.
    pub(crate) fn write(&mut self, at: ByteCount, bytes: bytes::Bytes) -> Result<Option<ByteCount>, FetchError> {
        match &mut self.sink {
            Sink::File(partial) => partial.write(at, &bytes).map(|()| None),
            Sink::Ordered { waiting, out } => {
                waiting.insert(at.get(), bytes);
                let mut to = io::stdout().lock();
                while let Some(next) = waiting.remove(out) {
                    let written = to.write_all(&next).and_then(|()| to.flush());
                    written.map_err(|error| FetchError::Write { path: "standard output".into(), reason: error.to_string() })?;
                    *out += next.len() as u64;
                }
                Ok(Some(ByteCount::new(*out)))
            }
            Sink::Closed => Ok(None),
        }
    }

    /// Discards all data so far.
    pub(crate) fn restart(&mut self) -> Result<(), FetchError> {
        self.left = None;
        self.sources.iter_mut().for_each(|source| source.validator = None);
        match &mut self.sink {
            Sink::File(partial) => partial.restart(),
            Sink::Ordered { waiting, .. } => {
                waiting.clear();
                Ok(())
            }
            Sink::Closed => Ok(()),
        }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.download.output {
            Output::File(path) => Some(path),
            Output::Standard => None,
        }
    }
}

/// Header fields that reveal nothing secret. Other fields, such as an API key's, may.
const PUBLIC_FIELDS: [HeaderName; 5] =
    [header::USER_AGENT, header::ACCEPT, header::ACCEPT_ENCODING, header::ACCEPT_LANGUAGE, header::REFERER];

/// Header of a request to a source: the fields that the user gave; after a redirect to another origin only those that reveal nothing secret. After a
/// redirect to http no password is sent, because anybody on the way could have forged the redirect.
fn headers(source: &Source, options: &Options) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::USER_AGENT, HeaderValue::from_static(concat!("braid/", env!("CARGO_PKG_VERSION"))));
    headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let own = source.same_origin();
    for (name, value) in options.headers.iter().filter(|(name, _)| own || PUBLIC_FIELDS.contains(name)) {
        headers.insert(name, value.clone());
    }
    let host = source.url.host_str().unwrap_or("");
    let in_url = (!source.url.username().is_empty()).then(|| crate::credentials::Credentials {
        user: crate::credentials::decode(source.url.username()),
        password: crate::credentials::decode(source.url.password().unwrap_or("")),
    });
    let who = in_url.or_else(|| options.credentials.clone().filter(|_| own)).or_else(|| options.netrc.of(host).cloned());
    if let Some(value) = who.filter(|_| own || source.url.scheme() == "https").and_then(|who| who.basic()) {
        headers.entry(header::AUTHORIZATION).or_insert(value);
    }
    if let Some(value) = options.cookies.of(&source.url).and_then(|value| HeaderValue::from_str(&value).ok()) {
        headers.entry(header::COOKIE).or_insert(value);
    }
    if source.url.scheme() == "http"
        && let Some(value) = options.proxy.of(&source.url).and_then(crate::proxy::authorization)
    {
        headers.insert(header::PROXY_AUTHORIZATION, value);
    }
    headers
}

/// Finishes a file on a thread that may block on the disk.
pub(crate) async fn finish(partial: Partial, size: ByteCount, sha256: Option<[u8; 32]>, path: Arc<Path>) -> Result<(), FetchError> {
    let ended = tokio::task::spawn_blocking(move || partial.finish(size, sha256)).await;
    ended.unwrap_or_else(|error| Err(FetchError::Write { path: path.to_path_buf(), reason: error.to_string() }))
}
