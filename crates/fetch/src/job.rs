//! One file of a run: its sources, where its bytes go, what went wrong last.

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
use crate::partial::{Left, Partial};

/// How far ahead of standard output is fetched.
pub(crate) const WINDOW: ByteCount = ByteCount::new(16 * 1024 * 1024);

/// One of a file's addresses.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// As it was given.
    first: Url,
    /// Where it led.
    pub(crate) url: Url,
    pub(crate) server: ServerId,
    pub(crate) validator: Option<Validator>,
    pub(crate) redirects: u32,
    /// A redirection led from https to http.
    lowered: bool,
}

impl Source {
    pub(crate) fn new(url: Url, server: ServerId) -> Self {
        Self { first: url.clone(), url, server, validator: None, redirects: 0, lowered: false }
    }

    /// Names its address in the journal, which others may read: the address may hold secrets.
    fn fingerprint(&self) -> String {
        data_encoding::HEXLOWER.encode(digest(&SHA256, shown(&self.first).as_bytes()).as_ref())
    }

    /// Follows a redirection.
    pub(crate) fn follow(&mut self, to: Url, server: ServerId) {
        self.lowered |= self.url.scheme() == "https" && to.scheme() == "http";
        (self.url, self.server) = (to, server);
    }

    /// Whether what the user gave for the address may be sent to where it led: to the same server, and not by http after https.
    fn same_origin(&self) -> bool {
        self.first.origin() == self.url.origin() && !(self.lowered && self.url.scheme() == "http")
    }
}

/// Where a file's bytes go.
#[derive(Debug)]
pub(crate) enum Sink {
    File(Partial),
    /// Bytes that came before their turn, by place, and how much is out.
    Ordered {
        waiting: BTreeMap<u64, bytes::Bytes>,
        out: u64,
    },
    /// Ended.
    Closed,
}

/// One file of a run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) download: Download,
    pub(crate) sources: Vec<Source>,
    pub(crate) sink: Sink,
    /// What an earlier run left, until the first answer shows that it is of the same file.
    pub(crate) left: Option<Left>,
    pub(crate) trouble: Option<FetchError>,
    /// It was begun anew once, since the file had changed.
    pub(crate) anew: bool,
    pub(crate) began: Instant,
    /// Fresh bytes by link.
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
            trouble: None,
            anew: false,
            began: Instant::now(),
            by_link: vec![ByteCount::ZERO; links],
            outcome: None,
        };
        job.recall();
        Ok(job)
    }

    /// The sources take over the validators that an earlier run saw of them.
    fn recall(&mut self) {
        let Some(left) = &self.left else { return };
        for source in &mut self.sources {
            source.validator = left.knowledge.validators.get(&source.fingerprint()).cloned();
        }
        // Nothing shows that what is there is of the file that these addresses name.
        if self.sources.iter().all(|source| source.validator.is_none()) {
            self.left = None;
            if let Sink::File(partial) = &mut self.sink
                && let Err(error) = partial.restart()
            {
                self.outcome = Some(Err(error));
            }
        }
    }

    /// What is there already.
    pub(crate) fn got(&self) -> (Option<ByteCount>, Spans) {
        match &self.left {
            Some(left) => (Some(ByteCount::new(left.knowledge.size)), left.got.clone()),
            None => (None, Spans::default()),
        }
    }

    /// The name to show.
    pub(crate) fn name(&self) -> String {
        match &self.download.output {
            Output::File(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            Output::Standard => "-".to_owned(),
        }
    }

    pub(crate) fn url(&self) -> String {
        self.sources.first().map(|source| shown(&source.url)).unwrap_or_default()
    }

    /// What is asked of a source.
    pub(crate) fn asked(&self, source: usize, span: Option<braid_range::Span>, options: &Options) -> (Asked, HeaderMap) {
        let there = &self.sources[source];
        let headers = headers(there, options);
        let encoded = options.headers.iter().any(|(name, _)| *name == header::ACCEPT_ENCODING);
        (Asked { url: there.url.clone(), target: None, span, expected: there.validator.clone(), encoded }, headers)
    }

    /// An answer of a source is of the state that `validator` names.
    pub(crate) fn on_validator(&mut self, source: usize, size: Option<ByteCount>, validator: Option<Validator>) -> Result<(), FetchError> {
        let there = &mut self.sources[source];
        // A source that is new to a file that was begun must prove that it has the same one.
        let known =
            |left: &Left| validator.as_ref().is_some_and(|validator| left.knowledge.validators.values().any(|known| known == validator));
        if there.validator.is_none() && self.left.as_ref().is_some_and(|left| !known(left)) {
            return Err(FetchError::Changed { url: shown(&there.url), reason: "it is not the one that was begun".to_owned() });
        }
        match &there.validator {
            None => there.validator = validator,
            // Asked for before the first answer told one.
            known if *known != validator => {
                return Err(FetchError::Changed { url: shown(&there.url), reason: "two answers name different states of it".to_owned() });
            }
            _ => {}
        }
        let (Sink::File(partial), Some(size)) = (&mut self.sink, size) else { return Ok(()) };
        partial.learn(size, &self.sources[source].fingerprint(), self.sources[source].validator.as_ref())
    }

    /// Takes bytes at their place; gives how much of the file went out in order, where that counts.
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

    /// What came so far counts for nothing.
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

/// What a user's header says of no secret. Others, as an API key's, may be one.
const HARMLESS: [HeaderName; 5] = [header::USER_AGENT, header::ACCEPT, header::ACCEPT_ENCODING, header::ACCEPT_LANGUAGE, header::REFERER];

/// The header of a request to a source: what the user gave, but to where a redirection led only what is harmless. A redirection leads no
/// password to a server that is asked by http: whoever is on the way could have sent it.
fn headers(source: &Source, options: &Options) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::USER_AGENT, HeaderValue::from_static(concat!("braid/", env!("CARGO_PKG_VERSION"))));
    headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let own = source.same_origin();
    for (name, value) in options.headers.iter().filter(|(name, _)| own || HARMLESS.contains(name)) {
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

/// Ends a file's way to the disk, on a thread that may wait.
pub(crate) async fn finish(partial: Partial, size: ByteCount, sha256: Option<[u8; 32]>, path: Arc<Path>) -> Result<(), FetchError> {
    let ended = tokio::task::spawn_blocking(move || partial.finish(size, sha256)).await;
    ended.unwrap_or_else(|error| Err(FetchError::Write { path: path.to_path_buf(), reason: error.to_string() }))
}
