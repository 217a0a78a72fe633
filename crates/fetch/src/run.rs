//! A run: the engine's decisions carried out, and what comes of them told to it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_range::{
    Action, Cause, Config, ConnectionId, Engine, Failure, FileId, FileSetup, Head, LinkId, LinkSetup, RequestId, ServerId, SourceId,
};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use url::Url;

use crate::connection::{self, Origin};
use crate::connections::{ConnectionCommand, ConnectionEvent, Shared};
use crate::credentials::shown;
use crate::error::FetchError;
use crate::events::{Event, LinkProgress, Outcome, Progress};
use crate::files::Download;
use crate::job::{Job, Sink, Source, WINDOW, finish};
use crate::network::Network;
use crate::options::{Options, Output};
use crate::throttle::Throttle;
use crate::tls::Tls;

/// Pieces that connections may have read and the run not yet written.
const AHEAD: usize = 64;
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);

/// Fetches all files side by side; gives what came of each, in their order. Ends early, keeping what came, when `stop` does.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread of the network namespace meant.
///
/// # Errors
/// Before anything is fetched: no link, or roots that cannot be read.
pub async fn fetch(
    network: Arc<dyn Network>,
    downloads: Vec<Download>,
    options: Options,
    stop: impl Future<Output = ()>,
    tell: impl FnMut(Event),
) -> Result<Vec<Result<Outcome, FetchError>>, FetchError> {
    if network.links().is_empty() {
        return Err(FetchError::NoLink(String::new()));
    }
    let tls = Tls::new(options.cacert.as_deref(), options.http1)?;
    let (event_sender, events) = mpsc::channel(AHEAD);
    let shared = Shared {
        network,
        tls: Some(tls),
        throttle: Throttle::new(options.limit_rate),
        connect_timeout: options.connect_timeout,
        events: event_sender,
    };
    let mut run = Run::new(Arc::new(shared), options, tell)?;
    let order: Vec<usize> = downloads.into_iter().map(|download| run.add(download)).collect();
    run.work(events, stop).await;
    Ok(order.into_iter().map(|index| run.outcome(index)).collect())
}

/// A connection's task.
struct Handle {
    commands: mpsc::UnboundedSender<ConnectionCommand>,
    task: JoinHandle<()>,
    link: LinkId,
    server: ServerId,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A request that was sent and is not over.
struct ActiveRequest {
    job: usize,
    file: FileId,
    source: SourceId,
    connection: ConnectionId,
    link: LinkId,
}

struct Run<T> {
    shared: Arc<Shared>,
    options: Options,
    engine: Engine,
    origins: Vec<Origin>,
    jobs: Vec<Job>,
    by_file: BTreeMap<FileId, usize>,
    connections: BTreeMap<ConnectionId, Handle>,
    requests: BTreeMap<RequestId, ActiveRequest>,
    /// The servers whose names do not exist, by link.
    nameless: BTreeSet<(ServerId, LinkId)>,
    /// The servers that have answered: a name that is not found any more is a trouble that passes.
    answered: BTreeSet<ServerId>,
    finishing: JoinSet<(usize, ByteCount, Result<(), FetchError>)>,
    begin: Instant,
    tell: T,
}

impl<T: FnMut(Event)> Run<T> {
    fn new(shared: Arc<Shared>, options: Options, tell: T) -> Result<Self, FetchError> {
        let config = Config {
            connections_first: Config::default().connections_first.min(options.connections.max(1)),
            connections_most: options.connections.max(1),
            patience: options.patience,
            tries: options.tries,
            budget: options.max_cost,
            ..Config::default()
        };
        let mut engine = Engine::new(config);
        for link in shared.network.links() {
            let setup = LinkSetup { rate: link.rate, allowance: link.allowance, price_per_gb: link.price_per_gb };
            engine.add_link(setup).map_err(|error| FetchError::NoLink(format!(" ({error})")))?;
        }
        Ok(Self {
            shared,
            options,
            engine,
            origins: Vec::new(),
            jobs: Vec::new(),
            by_file: BTreeMap::new(),
            connections: BTreeMap::new(),
            requests: BTreeMap::new(),
            nameless: BTreeSet::new(),
            answered: BTreeSet::new(),
            finishing: JoinSet::new(),
            begin: Instant::now(),
            tell,
        })
    }

    fn now(&self) -> Time {
        Time::ZERO + self.begin.elapsed()
    }

    /// Takes a file on; its place among the jobs.
    fn add(&mut self, download: Download) -> usize {
        let sources: Vec<Source> = download.urls.iter().map(|url| Source::new(url.clone(), self.server(url))).collect();
        let index = self.jobs.len();
        let links = self.shared.network.links().len();
        match Job::new(download.clone(), sources.clone(), links, self.options.resume) {
            Ok(job) => {
                self.jobs.push(job);
                self.enter(index);
            }
            Err(error) => {
                let mut job = Job {
                    download,
                    sources,
                    sink: Sink::Closed,
                    left: None,
                    trouble: None,
                    anew: false,
                    began: Instant::now(),
                    by_link: Vec::new(),
                    outcome: None,
                };
                job.outcome = Some(Err(error));
                self.jobs.push(job);
                self.tell_failure(index);
            }
        }
        index
    }

    /// Hands a job's file to the engine.
    fn enter(&mut self, index: usize) {
        let job = &self.jobs[index];
        if job.outcome.is_some() {
            return self.tell_failure(index);
        }
        let (size, got) = job.got();
        let setup = FileSetup {
            sources: job.sources.iter().map(|source| source.server).collect(),
            weight: job.download.weight,
            links: LinkSet(u64::MAX),
            size,
            got,
            window: matches!(job.download.output, Output::Standard).then_some(WINDOW),
        };
        match self.engine.add_file(self.now(), setup) {
            Ok(file) => drop(self.by_file.insert(file, index)),
            Err(error) => self.fail(index, FetchError::Option(error.to_string())),
        }
    }

    /// The server of an address.
    fn server(&mut self, url: &Url) -> ServerId {
        let origin = Origin {
            tls: url.scheme() == "https",
            host: url.host_str().unwrap_or("").to_owned(),
            port: url.port_or_known_default().unwrap_or(80),
            proxy: self.options.proxy.of(url).cloned(),
        };
        match self.origins.iter().position(|known| *known == origin) {
            Some(place) => ServerId(place),
            None => {
                self.origins.push(origin);
                self.engine.add_server()
            }
        }
    }

    async fn work(&mut self, mut events: mpsc::Receiver<ConnectionEvent>, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let mut progress = tokio::time::interval(PROGRESS);
        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.pump();
            let now = self.now();
            if self.jobs.iter().all(|job| job.outcome.is_some()) && self.finishing.is_empty() {
                break;
            }
            let due = self.engine.poll_timeout().map_or(Duration::from_secs(3600), |due| due.since(now));
            tokio::select! {
                biased;
                () = &mut stop => {
                    let open: Vec<usize> = (0..self.jobs.len()).filter(|index| self.jobs[*index].outcome.is_none()).collect();
                    open.into_iter().for_each(|index| self.fail(index, FetchError::Interrupted));
                    break;
                }
                Some(ended) = self.finishing.join_next(), if !self.finishing.is_empty() => if let Ok((index, size, result)) = ended {
                    self.on_finished(index, size, result);
                },
                _ = progress.tick() => self.tell_progress(),
                Some(first) = events.recv() => {
                    self.on_event(first);
                    while let Ok(next) = events.try_recv() {
                        // What an answer's head changes is done before its body is written.
                        self.pump();
                        self.on_event(next);
                    }
                }
                () = tokio::time::sleep(due) => {}
            }
        }
        self.tell_progress();
        self.connections.clear();
    }

    /// Does all that the engine wants done now.
    fn pump(&mut self) {
        let now = self.now();
        while let Some(action) = self.engine.poll(now) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect { connection, link, server } => {
                let (commands, receiver) = mpsc::unbounded_channel();
                let origin = self.origins[server.0].clone();
                let task = tokio::spawn(connection::run(self.shared.clone(), connection, link.0, origin, receiver));
                self.connections.insert(connection, Handle { commands, task, link, server });
            }
            Action::Ask { request, connection, file, source, span } => {
                let (Some(handle), Some(job)) = (self.connections.get(&connection), self.by_file.get(&file)) else { return };
                let (asked, headers) = self.jobs[*job].asked(source.0, span, &self.options);
                self.requests.insert(request, ActiveRequest { job: *job, file, source, connection, link: handle.link });
                let _ = handle.commands.send(ConnectionCommand::Ask { request, asked: Box::new(asked), headers });
            }
            Action::Stop { request } => {
                if let Some(handle) = self.requests.remove(&request).and_then(|active| self.connections.get(&active.connection)) {
                    let _ = handle.commands.send(ConnectionCommand::Stop(request));
                }
            }
            Action::Close { connection } => {
                self.connections.remove(&connection);
                self.requests.retain(|_, active| active.connection != connection);
            }
            Action::Restart { file } => {
                let Some(job) = self.by_file.get(&file).copied() else { return };
                if let Err(error) = self.jobs[job].restart() {
                    self.drop_file(file, error);
                }
            }
            Action::Done { file, size } => self.on_done(file, size),
            Action::GiveUp { file, cause } => self.on_given_up(file, cause),
        }
    }

    fn on_event(&mut self, event: ConnectionEvent) {
        let now = self.now();
        match event {
            ConnectionEvent::Connected { connection, depth } => self.engine.on_connected(now, connection, depth),
            ConnectionEvent::Lost { connection, error } => self.on_lost(now, connection, error),
            ConnectionEvent::Head { request, head, validator } => self.on_head(now, request, head, validator),
            ConnectionEvent::Data { request, bytes } => self.on_data(now, request, bytes),
            ConnectionEvent::End { request } => {
                self.requests.remove(&request);
                self.engine.on_end(now, request);
            }
            ConnectionEvent::Cookies { url, lines } => {
                let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
                lines.iter().for_each(|line| self.options.cookies.learn(&url, line, unix));
            }
            ConnectionEvent::Elsewhere { request, from, to } => self.on_elsewhere(now, request, &from, to),
            ConnectionEvent::Failed { request, failure, error } => {
                if let Some(active) = self.requests.remove(&request) {
                    self.jobs[active.job].trouble = Some(error);
                }
                self.engine.on_failed(now, request, failure);
            }
        }
    }

    fn on_lost(&mut self, now: Time, connection: ConnectionId, error: FetchError) {
        let Some(handle) = self.connections.remove(&connection) else { return };
        self.requests.retain(|_, active| active.connection != connection);
        for job in self.jobs.iter_mut().filter(|job| job.outcome.is_none()) {
            if job.sources.iter().any(|source| source.server == handle.server) {
                job.trouble = Some(error.clone());
            }
        }
        self.engine.on_connection_lost(now, connection);
        if matches!(error, FetchError::Resolve { absent: true, .. }) {
            self.nameless.insert((handle.server, handle.link));
            self.drop_nameless(&error);
        }
    }

    /// Gives up the files of which nothing came and none of whose sources has a name that any link's resolvers know: they would say the same
    /// again.
    fn drop_nameless(&mut self, error: &FetchError) {
        let links = self.shared.network.links().len();
        let absent =
            |server: ServerId| !self.answered.contains(&server) && (0..links).all(|link| self.nameless.contains(&(server, LinkId(link))));
        let lost = self.by_file.iter().filter(|(_, index)| self.jobs[**index].sources.iter().all(|source| absent(source.server)));
        let begun = |file: FileId| self.engine.file(file).is_some_and(|file| file.got > ByteCount::ZERO);
        let lost: Vec<FileId> = lost.map(|(file, _)| *file).filter(|file| !begun(*file)).collect();
        lost.into_iter().for_each(|file| self.drop_file(file, error.clone()));
    }

    fn on_head(&mut self, now: Time, request: RequestId, head: Head, validator: Option<crate::answer::Validator>) {
        let Some(active) = self.requests.get(&request) else { return };
        let (index, file, source) = (active.job, active.file, active.source);
        let job = &mut self.jobs[index];
        self.answered.extend(job.sources.get(source.0).map(|source| source.server));
        if let (Some(most), Some(size)) = (self.options.max_size, head.size)
            && size > most
        {
            let error = FetchError::TooLarge { url: job.url(), size };
            return self.drop_file(file, error);
        }
        let first = self.engine.file(file).is_some_and(|file| file.ranged.is_none() || file.got == ByteCount::ZERO && file.size.is_none());
        let resumed = job.left.is_some();
        if let Err(error) = job.on_validator(source.0, head.size, validator) {
            let failure = if matches!(error, FetchError::Write { .. }) { None } else { Some(Failure::Changed) };
            self.requests.remove(&request);
            match failure {
                Some(failure) => {
                    job.trouble = Some(error);
                    self.engine.on_failed(now, request, failure);
                }
                None => self.drop_file(file, error),
            }
            return;
        }
        let there = job.left.take().map_or(ByteCount::ZERO, |left| left.got.count());
        self.engine.on_head(now, request, head);
        if first || resumed {
            let name = self.jobs[index].name();
            let ranged = self.engine.file(file).and_then(|file| file.ranged).unwrap_or(true);
            (self.tell)(Event::Started { file: name.clone(), size: head.size, there, ranged });
            if !ranged && self.shared.network.links().len() > 1 {
                let text = format!("{name}: the server gives no ranges that could be joined safely: it comes whole, over one link");
                (self.tell)(Event::Note { text });
            }
        }
    }

    fn on_data(&mut self, now: Time, request: RequestId, bytes: bytes::Bytes) {
        let Some(active) = self.requests.get(&request) else { return };
        let (index, file, link) = (active.job, active.file, active.link);
        let Some(at) = self.engine.place(request) else { return };
        let fresh = self.engine.on_data(now, request, ByteCount::new(bytes.len() as u64));
        if let (Some(most), Some(got)) = (self.options.max_size, self.engine.file(file).map(|file| file.got))
            && got > most
        {
            let error = FetchError::TooLarge { url: self.jobs[index].url(), size: got };
            return self.drop_file(file, error);
        }
        for span in fresh {
            let from = (span.start().get() - at.get()) as usize;
            let piece = bytes.slice(from..from + span.len().get() as usize);
            self.jobs[index].by_link[link.0] += span.len();
            match self.jobs[index].write(span.start(), piece) {
                Ok(None) => {}
                Ok(Some(out)) => self.engine.on_taken(now, file, out),
                Err(error) => return self.drop_file(file, error),
            }
        }
    }

    fn on_elsewhere(&mut self, now: Time, request: RequestId, from: &Url, to: Url) {
        let Some(active) = self.requests.remove(&request) else { return };
        let most = self.options.redirects;
        let source = &mut self.jobs[active.job].sources[active.source.0];
        // Another request was sent there already.
        if source.url == *from {
            source.redirects += 1;
            if source.redirects > most {
                let error = FetchError::Redirects { url: shown(from), most };
                self.jobs[active.job].trouble = Some(error);
                return self.engine.on_failed(now, request, Failure::Source);
            }
            let server = self.server(&to);
            self.jobs[active.job].sources[active.source.0].follow(to, server);
            self.engine.move_source(active.file, active.source, server);
        }
        self.engine.on_failed(now, request, Failure::Moved);
    }

    fn on_done(&mut self, file: FileId, size: ByteCount) {
        let Some(index) = self.by_file.remove(&file) else { return };
        let now = self.now();
        self.engine.remove_file(now, file);
        self.requests.retain(|_, active| active.file != file);
        let job = &mut self.jobs[index];
        match std::mem::replace(&mut job.sink, Sink::Closed) {
            Sink::File(partial) => {
                let sha256 = job.download.checksum.as_ref().map(|checksum| checksum.sha256);
                let path: Arc<std::path::Path> = job.path().unwrap_or(std::path::Path::new("")).into();
                self.finishing.spawn(async move { (index, size, finish(partial, size, sha256, path).await) });
            }
            Sink::Ordered { .. } | Sink::Closed => self.on_finished(index, size, Ok(())),
        }
    }

    fn on_finished(&mut self, index: usize, size: ByteCount, result: Result<(), FetchError>) {
        self.jobs[index].outcome = Some(result.clone());
        match result {
            Ok(()) => {
                let outcome = self.describe(index, size);
                (self.tell)(Event::Finished(outcome));
            }
            Err(_) => self.tell_failure(index),
        }
    }

    fn on_given_up(&mut self, file: FileId, cause: Cause) {
        let Some(index) = self.by_file.remove(&file) else { return };
        let now = self.now();
        self.engine.remove_file(now, file);
        self.requests.retain(|_, active| active.file != file);
        let job = &mut self.jobs[index];
        if cause == Cause::Changed && !job.anew && matches!(job.sink, Sink::File(_)) {
            job.anew = true;
            let text = format!("{}: the file is another one than before: it is fetched anew", job.name());
            match job.restart() {
                Ok(()) => {
                    (self.tell)(Event::Note { text });
                    return self.enter(index);
                }
                Err(error) => return self.fail(index, error),
            }
        }
        let url = job.url();
        let trouble = job.trouble.take();
        let error = match cause {
            Cause::Budget => FetchError::Budget { url },
            Cause::Silent => trouble.unwrap_or(FetchError::Silent { url, patience: self.options.patience }),
            Cause::Unjoinable => {
                FetchError::Protocol { url, reason: "the transfer broke, and the server gives no ranges to go on with".to_owned() }
            }
            Cause::Changed => trouble.unwrap_or(FetchError::Changed { url, reason: "again".to_owned() }),
            Cause::Tries => trouble.unwrap_or(FetchError::Silent { url, patience: self.begin.elapsed() }),
            Cause::Source => {
                trouble.unwrap_or(FetchError::Protocol { url, reason: "its sources are not of one file: their sizes differ".to_owned() })
            }
        };
        self.fail(index, error);
    }

    /// Gives a file up for a reason of this end's.
    fn drop_file(&mut self, file: FileId, error: FetchError) {
        let now = self.now();
        self.engine.remove_file(now, file);
        self.requests.retain(|_, active| active.file != file);
        if let Some(index) = self.by_file.remove(&file) {
            self.fail(index, error);
        }
    }

    fn fail(&mut self, index: usize, error: FetchError) {
        let job = &mut self.jobs[index];
        job.outcome = Some(Err(error));
        if let Sink::File(partial) = std::mem::replace(&mut job.sink, Sink::Closed) {
            partial.abandon();
        }
        self.tell_failure(index);
    }

    fn tell_failure(&mut self, index: usize) {
        let job = &self.jobs[index];
        if let Some(Err(error)) = &job.outcome {
            (self.tell)(Event::Failed { file: job.name(), error: error.to_string(), code: error.exit_code() });
        }
    }

    fn tell_progress(&mut self) {
        let now = self.now();
        let links = self.shared.network.links().iter().enumerate().filter_map(|(place, link)| {
            let view = self.engine.link(now, LinkId(place))?;
            let rate_bps = if view.requests > 0 { view.rate.unwrap_or(Rate::ZERO) } else { Rate::ZERO };
            Some(LinkProgress { name: link.name.clone(), moved: view.moved, twice: view.twice, rate_bps, requests: view.requests })
        });
        let links: Vec<LinkProgress> = links.collect();
        let ended = self.jobs.iter().filter(|job| job.outcome.is_some()).count();
        let views: Vec<_> = self.by_file.keys().filter_map(|file| self.engine.file(*file)).collect();
        let got = views.iter().fold(ByteCount::ZERO, |sum, view| sum + view.got);
        let size = views.iter().try_fold(ByteCount::ZERO, |sum, view| Some(sum + view.size?));
        let rate_bps = links.iter().fold(Rate::ZERO, |sum, link| sum + link.rate_bps);
        let seconds = self.begin.elapsed().as_secs_f64();
        (self.tell)(Event::Progress(Progress { seconds, got, size, rate_bps, files: (ended, self.jobs.len()), links }));
    }

    fn describe(&self, index: usize, size: ByteCount) -> Outcome {
        let job = &self.jobs[index];
        let names = self.shared.network.links().iter().map(|link| link.name.clone());
        Outcome {
            file: job.name(),
            path: job.path().map(Into::into),
            size,
            seconds: job.began.elapsed().as_secs_f64(),
            links: names.zip(job.by_link.iter().copied()).collect(),
        }
    }

    fn outcome(&self, index: usize) -> Result<Outcome, FetchError> {
        match &self.jobs[index].outcome {
            Some(Ok(())) => Ok(self.describe(index, self.jobs[index].by_link.iter().fold(ByteCount::ZERO, |sum, bytes| sum + *bytes))),
            Some(Err(error)) => Err(error.clone()),
            None => Err(FetchError::Interrupted),
        }
    }
}
