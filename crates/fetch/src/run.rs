//! A run: executes the engine's decisions, and reports the results to the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use braid_model::{ByteCount, LinkSet, Rate};
use braid_range::{Cause, Config, Failure, FileId, FileSetup, Head, LinkId, LinkSetup, RequestId, ServerId};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use url::Url;

use crate::connection::Origin;
use crate::connections::{ConnectionEvent, Shared};
use crate::credentials::shown;
use crate::driver::{ActiveRequest, Driver, FileAction, FileEvent};
use crate::error::FetchError;
use crate::events::{Event, LinkProgress, Outcome, Progress};
use crate::files::Download;
use crate::job::{Job, Sink, Source, WINDOW, finish};
use crate::network::Network;
use crate::options::{Options, Output};
use crate::throttle::Throttle;
use crate::tls::Tls;

/// Number of pieces that connections may read before the run writes them.
const QUEUE_LENGTH: usize = 64;
/// Interval of progress events.
const PROGRESS: Duration = Duration::from_millis(200);

/// Downloads all files concurrently, and returns the result of each, in order. Ends early, keeping partial data, when `stop` completes.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread of the network namespace to use.
///
/// # Errors
/// Errors before the first download: no link, or unreadable root certificates.
pub async fn fetch(
    network: Arc<dyn Network>,
    downloads: Vec<Download>,
    options: Options,
    stop: impl Future<Output = ()>,
    emit: impl FnMut(Event),
) -> Result<Vec<Result<Outcome, FetchError>>, FetchError> {
    if network.links().is_empty() {
        return Err(FetchError::NoLink(String::new()));
    }
    let tls = Tls::new(options.cacert.as_deref(), options.http1)?;
    let (event_sender, events) = mpsc::channel(QUEUE_LENGTH);
    let shared = Shared {
        network,
        tls: Some(tls),
        throttle: Throttle::new(options.limit_rate),
        connect_timeout: options.connect_timeout,
        events: event_sender,
    };
    let mut run = Run::new(Arc::new(shared), options, emit)?;
    let order: Vec<usize> = downloads.into_iter().map(|download| run.add(download)).collect();
    run.work(events, stop).await;
    Ok(order.into_iter().map(|index| run.outcome(index)).collect())
}

struct Run<T> {
    shared: Arc<Shared>,
    options: Options,
    driver: Driver,
    jobs: Vec<Job>,
    by_file: BTreeMap<FileId, usize>,
    /// Servers whose names do not exist, by link.
    nameless: BTreeSet<(ServerId, LinkId)>,
    /// Servers that have answered. If their name is not found later, the failure is temporary.
    answered: BTreeSet<ServerId>,
    finishing: JoinSet<(usize, ByteCount, Result<(), FetchError>)>,
    emit: T,
}

impl<T: FnMut(Event)> Run<T> {
    fn new(shared: Arc<Shared>, options: Options, emit: T) -> Result<Self, FetchError> {
        let config = Config {
            connections_first: Config::default().connections_first.min(options.connections.max(1)),
            connections_most: options.connections.max(1),
            timeout: options.timeout,
            tries: options.tries,
            budget: options.max_cost,
            ..Config::default()
        };
        let mut driver = Driver::new(config);
        for link in shared.network.links() {
            let setup = LinkSetup { rate: link.rate, allowance: link.allowance, price_per_gb: link.price_per_gb };
            driver.engine.add_link(setup).map_err(|error| FetchError::NoLink(format!(" ({error})")))?;
        }
        Ok(Self {
            shared,
            options,
            driver,
            jobs: Vec::new(),
            by_file: BTreeMap::new(),
            nameless: BTreeSet::new(),
            answered: BTreeSet::new(),
            finishing: JoinSet::new(),
            emit,
        })
    }

    /// Adds a file; returns its index in `jobs`.
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
                    last_error: None,
                    restarted: false,
                    began: Instant::now(),
                    by_link: Vec::new(),
                    outcome: None,
                };
                job.outcome = Some(Err(error));
                self.jobs.push(job);
                self.report_failure(index);
            }
        }
        index
    }

    /// Adds a job's file to the engine.
    fn enter(&mut self, index: usize) {
        let job = &self.jobs[index];
        if job.outcome.is_some() {
            return self.report_failure(index);
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
        match self.driver.engine.add_file(self.driver.now(), setup) {
            Ok(file) => drop(self.by_file.insert(file, index)),
            Err(error) => self.fail(index, FetchError::Option(error.to_string())),
        }
    }

    /// The server of a URL.
    fn server(&mut self, url: &Url) -> ServerId {
        let origin = Origin {
            tls: url.scheme() == "https",
            host: url.host_str().unwrap_or("").to_owned(),
            port: url.port_or_known_default().unwrap_or(80),
            proxy: self.options.proxy.of(url).cloned(),
        };
        match self.driver.server_of(&origin) {
            Some(known) => known,
            None => self.driver.add_server(self.shared.clone(), origin),
        }
    }

    async fn work(&mut self, mut events: mpsc::Receiver<ConnectionEvent>, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let mut progress = tokio::time::interval(PROGRESS);
        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.pump();
            if self.jobs.iter().all(|job| job.outcome.is_some()) && self.finishing.is_empty() {
                break;
            }
            let due = self.driver.due();
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
                _ = progress.tick() => self.report_progress(),
                Some(first) = events.recv() => {
                    self.on_event(first);
                    while let Ok(next) = events.try_recv() {
                        // The effects of a response's head must precede its body.
                        self.pump();
                        self.on_event(next);
                    }
                }
                () = tokio::time::sleep(due) => {}
            }
        }
        self.report_progress();
        self.driver.close();
    }

    /// Executes all pending actions of the engine.
    fn pump(&mut self) {
        while let Some(action) = self.driver.poll() {
            self.act(action);
        }
    }

    fn act(&mut self, action: FileAction) {
        match action {
            FileAction::Ask(question) => {
                let Some(job) = self.by_file.get(&question.file) else { return };
                let (asked, headers) = self.jobs[*job].asked(question.source.0, question.span, &self.options);
                self.driver.send(&question, asked, headers);
            }
            FileAction::Restart(file) => {
                let Some(job) = self.by_file.get(&file).copied() else { return };
                if let Err(error) = self.jobs[job].restart() {
                    self.drop_file(file, error);
                }
            }
            FileAction::Done { file, size } => self.on_done(file, size),
            FileAction::GiveUp { file, cause } => self.on_given_up(file, cause),
        }
    }

    fn on_event(&mut self, event: ConnectionEvent) {
        match self.driver.on_event(event) {
            Some(FileEvent::Lost { server, link, error }) => self.on_lost(server, link, error),
            Some(FileEvent::Head { request, active, head, validator }) => self.on_head(request, active, head, validator),
            Some(FileEvent::Data { active, pieces }) => self.on_data(active, pieces),
            Some(FileEvent::Cookies { url, lines }) => {
                let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
                lines.iter().for_each(|line| self.options.cookies.store(&url, line, unix));
            }
            Some(FileEvent::Redirect { request, active, from, to }) => self.on_redirect(request, active, &from, to),
            Some(FileEvent::Failed { active, error }) => self.note_error(active.file, error),
            None => {}
        }
    }

    fn note_error(&mut self, file: FileId, error: FetchError) {
        if let Some(index) = self.by_file.get(&file) {
            self.jobs[*index].last_error = Some(error);
        }
    }

    fn on_lost(&mut self, server: ServerId, link: LinkId, error: FetchError) {
        for job in self.jobs.iter_mut().filter(|job| job.outcome.is_none()) {
            if job.sources.iter().any(|source| source.server == server) {
                job.last_error = Some(error.clone());
            }
        }
        if matches!(error, FetchError::Resolve { absent: true, .. }) {
            self.nameless.insert((server, link));
            self.drop_nameless(&error);
        }
    }

    /// Fails the files that have no data and whose sources' names do not exist according to the resolvers of every link: another query would give
    /// the same answer.
    fn drop_nameless(&mut self, error: &FetchError) {
        let links = self.shared.network.links().len();
        let absent =
            |server: ServerId| !self.answered.contains(&server) && (0..links).all(|link| self.nameless.contains(&(server, LinkId(link))));
        let lost = self.by_file.iter().filter(|(_, index)| self.jobs[**index].sources.iter().all(|source| absent(source.server)));
        let begun = |file: FileId| self.driver.engine.file(file).is_some_and(|file| file.got > ByteCount::ZERO);
        let lost: Vec<FileId> = lost.map(|(file, _)| *file).filter(|file| !begun(*file)).collect();
        lost.into_iter().for_each(|file| self.drop_file(file, error.clone()));
    }

    fn on_head(&mut self, request: RequestId, active: ActiveRequest, head: Head, validator: Option<crate::answer::Validator>) {
        let (file, source) = (active.file, active.source);
        let Some(index) = self.by_file.get(&file).copied() else { return };
        let job = &mut self.jobs[index];
        self.answered.extend(job.sources.get(source.0).map(|source| source.server));
        if let (Some(most), Some(size)) = (self.options.max_size, head.size)
            && size > most
        {
            let error = FetchError::TooLarge { url: job.url(), size };
            return self.drop_file(file, error);
        }
        let view = self.driver.engine.file(file);
        let first = view.is_some_and(|file| file.ranged.is_none() || file.got == ByteCount::ZERO && file.size.is_none());
        let resumed = job.left.is_some();
        if let Err(error) = job.on_validator(source.0, head.size, validator) {
            if matches!(error, FetchError::Write { .. }) {
                return self.drop_file(file, error);
            }
            job.last_error = Some(error);
            return self.driver.fail(request, Failure::Changed);
        }
        let there = job.left.take().map_or(ByteCount::ZERO, |left| left.got.count());
        self.driver.engine.on_head(self.driver.now(), request, head);
        if first || resumed {
            let name = self.jobs[index].name();
            let ranged = self.driver.engine.file(file).and_then(|file| file.ranged).unwrap_or(true);
            (self.emit)(Event::Started { file: name.clone(), size: head.size, there, ranged });
            if !ranged && self.shared.network.links().len() > 1 {
                let text =
                    format!("{name}: the server supports no ranges that Braid can join safely; downloading the whole file over one link");
                (self.emit)(Event::Note { text });
            }
        }
    }

    fn on_data(&mut self, active: ActiveRequest, pieces: Vec<(ByteCount, bytes::Bytes)>) {
        let (file, link) = (active.file, active.link);
        let Some(index) = self.by_file.get(&file).copied() else { return };
        if let (Some(most), Some(got)) = (self.options.max_size, self.driver.engine.file(file).map(|file| file.got))
            && got > most
        {
            let error = FetchError::TooLarge { url: self.jobs[index].url(), size: got };
            return self.drop_file(file, error);
        }
        for (at, piece) in pieces {
            self.jobs[index].by_link[link.0] += ByteCount::new(piece.len() as u64);
            match self.jobs[index].write(at, piece) {
                Ok(None) => {}
                Ok(Some(out)) => self.driver.engine.on_taken(self.driver.now(), file, out),
                Err(error) => return self.drop_file(file, error),
            }
        }
    }

    fn on_redirect(&mut self, request: RequestId, active: ActiveRequest, from: &Url, to: Url) {
        let Some(index) = self.by_file.get(&active.file).copied() else { return };
        let most = self.options.redirects;
        let source = &mut self.jobs[index].sources[active.source.0];
        // Another request may already have updated the URL.
        if source.url == *from {
            source.redirects += 1;
            if source.redirects > most {
                let error = FetchError::Redirects { url: shown(from), most };
                self.jobs[index].last_error = Some(error);
                return self.driver.fail(request, Failure::Source);
            }
            let server = self.server(&to);
            self.jobs[index].sources[active.source.0].follow(to, server);
            self.driver.engine.move_source(active.file, active.source, server);
        }
        self.driver.fail(request, Failure::Moved);
    }

    fn on_done(&mut self, file: FileId, size: ByteCount) {
        let Some(index) = self.by_file.remove(&file) else { return };
        self.driver.remove_file(file);
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
                (self.emit)(Event::Finished(outcome));
            }
            Err(_) => self.report_failure(index),
        }
    }

    fn on_given_up(&mut self, file: FileId, cause: Cause) {
        let Some(index) = self.by_file.remove(&file) else { return };
        self.driver.remove_file(file);
        let job = &mut self.jobs[index];
        if cause == Cause::Changed && !job.restarted && matches!(job.sink, Sink::File(_)) {
            job.restarted = true;
            let text = format!("{}: the file changed; downloading it again", job.name());
            match job.restart() {
                Ok(()) => {
                    (self.emit)(Event::Note { text });
                    return self.enter(index);
                }
                Err(error) => return self.fail(index, error),
            }
        }
        let url = job.url();
        let last_error = job.last_error.take();
        let error = match cause {
            Cause::Budget => FetchError::Budget { url },
            Cause::Silent => last_error.unwrap_or(FetchError::Silent { url, timeout: self.options.timeout }),
            Cause::Unjoinable => {
                FetchError::Protocol { url, reason: "the transfer broke off, and the server supports no ranges to resume it".to_owned() }
            }
            Cause::Changed => last_error.unwrap_or(FetchError::Changed { url, reason: "it changed more than once".to_owned() }),
            Cause::Tries => last_error.unwrap_or(FetchError::Silent { url, timeout: self.driver.elapsed() }),
            Cause::Source => last_error.unwrap_or(FetchError::Protocol {
                url,
                reason: "its sources have different sizes, so they are different files".to_owned(),
            }),
        };
        self.fail(index, error);
    }

    /// Fails a file because of a local error.
    fn drop_file(&mut self, file: FileId, error: FetchError) {
        self.driver.remove_file(file);
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
        self.report_failure(index);
    }

    fn report_failure(&mut self, index: usize) {
        let job = &self.jobs[index];
        if let Some(Err(error)) = &job.outcome {
            (self.emit)(Event::Failed { file: job.name(), error: error.to_string(), code: error.exit_code() });
        }
    }

    fn report_progress(&mut self) {
        let now = self.driver.now();
        let links = self.shared.network.links().iter().enumerate().filter_map(|(place, link)| {
            let view = self.driver.engine.link(now, LinkId(place))?;
            let rate_bps = if view.requests > 0 { view.rate.unwrap_or(Rate::ZERO) } else { Rate::ZERO };
            Some(LinkProgress { name: link.name.clone(), moved: view.moved, twice: view.twice, rate_bps, requests: view.requests })
        });
        let links: Vec<LinkProgress> = links.collect();
        let ended = self.jobs.iter().filter(|job| job.outcome.is_some()).count();
        let views: Vec<_> = self.by_file.keys().filter_map(|file| self.driver.engine.file(*file)).collect();
        let got = views.iter().fold(ByteCount::ZERO, |sum, view| sum + view.got);
        let size = views.iter().try_fold(ByteCount::ZERO, |sum, view| Some(sum + view.size?));
        let rate_bps = links.iter().fold(Rate::ZERO, |sum, link| sum + link.rate_bps);
        let seconds = self.driver.elapsed().as_secs_f64();
        (self.emit)(Event::Progress(Progress { seconds, got, size, rate_bps, files: (ended, self.jobs.len()), links }));
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
