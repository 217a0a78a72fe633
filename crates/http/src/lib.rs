//! The HTTP API, on a Unix socket and optionally over TCP.
//!
//! [`braid_api::openapi::OPERATIONS`] declares the operations and their access rights; [`access`] enforces them. The server runs on its own
//! thread and has no access to the daemon's state: it sends each [`Request`] over a channel and waits for the answer, so all state stays
//! in the one task that receives requests, and serialization costs that task nothing. Slow serialization, for example of thousands of flows,
//! runs on a blocking thread, so it does not delay other answers.

#![forbid(unsafe_code)]

use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use braid_api::openapi::Needs;
use braid_api::{
    Accepted, AdhocChange, AdhocStatus, AdhocUp, AppHistory, ClientStatus, ConfigChange, ConfigChanged, ConfigView, ExplainRequest,
    Explanation, Fact, FactChange, Gains, History, JoinRequest, LeaveRequest, LinkStatus, MoveRequest, MovedFlow, NetworkChange,
    NetworkStatus, Note, Peer as PeerView, PolicyView, Problem, ProgramRule, Resolution, RewriteRequest, Rewritten, RuleChange,
    SliceChange, SlicerStatus, Status, TradeoffPoint,
};
use braid_config::settings;
use braid_control::core::{AppsView, Program};
use braid_control::{Cause, RequestError};
use braid_peer::quota::Quota;
use braid_peer::state::StateDir;
use braid_platform::linux::sys::process::own_user;
use tokio::sync::{mpsc, oneshot};

mod access;
pub mod api_handler;
mod connections;
mod flows;
mod live;
mod metrics;
mod pages;
pub mod profile_client;
pub mod profile_service;
mod programs;
mod routes;
mod site;
mod tcp;

use access::{ApiClient, Keys, Origin};
use connections::Connections;
pub use flows::FlowList;
pub use live::{EventBroadcaster, Feed, InitialState, Update};
use site::Site;
use tcp::BoundPort;
pub use tcp::{UiError, UiOptions};

/// Default path of the daemon's Unix socket.
pub const DEFAULT_SOCKET: &str = "/run/braid/braid.sock";

/// Time that the core may take to answer before the client receives an error.
const CORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of concurrent requests of all read-only clients, and of one user or address among them. The core's queue holds more.
const MAX_READ_REQUESTS: usize = 48;
const MAX_READ_REQUESTS_PER_CLIENT: usize = 16;

/// Channel for the core's answer: the result, or the reason of a failure.
pub type ReplySender<T> = oneshot::Sender<Result<T, RequestError>>;

/// A client's request to the core, with the channel for its answer. If the sender is dropped, the client receives the error that the daemon is ending.
#[derive(Debug)]
pub enum Request {
    /// `GET /v1/status`; also behind `/v1/metrics`.
    Status(ReplySender<Status>),
    /// `GET /v1/links`.
    Links(ReplySender<Vec<LinkStatus>>),
    /// `GET /v1/flows`.
    Flows(ReplySender<Arc<FlowList>>),
    /// `GET /v1/apps`.
    Apps(ReplySender<AppsView>),
    /// `GET /v1/policy`.
    Policy(ReplySender<PolicyView>),
    /// `POST /v1/explain`: reads only.
    Explain(ExplainRequest, ReplySender<Explanation>),
    /// `GET /v1/peers`.
    Peers(ReplySender<Vec<PeerView>>),
    /// `POST /v1/join`: start to bond with a relay.
    Join(JoinRequest, ReplySender<Accepted>),
    /// `POST /v1/leave`: stop to bond with a relay.
    Leave(LeaveRequest, ReplySender<Accepted>),
    /// `POST /v1/move`: move flows to another link.
    Move(MoveRequest, ReplySender<Accepted>),
    /// `GET /v1/context`.
    Facts(ReplySender<Vec<Fact>>),
    /// `GET /v1/clients`.
    Clients(ReplySender<Vec<ClientStatus>>),
    /// `POST /v1/context`: set or clear a fact.
    SetFact(FactChange, ReplySender<Accepted>),
    /// `GET /v1/rewrites`.
    Rewrites(ReplySender<Vec<MovedFlow>>),
    /// `POST /v1/rewrites`: move flows, or let them come back.
    Rewrite(RewriteRequest, ReplySender<Rewritten>),
    /// `GET /v1/rules`.
    ProgramRules(ReplySender<Vec<ProgramRule>>),
    /// `POST /v1/rules`: add, renew or remove a rule. With the program, the rule ends.
    ChangeRule(RuleChange, Option<Program>, ReplySender<Accepted>),
    /// A program whose rules were asked for has ended.
    ProgramEnded(Program),
    /// `GET /v1/events`: the initial state for a listener, with the notes after this id, or the last few notes.
    Subscribe(Option<u64>, ReplySender<Box<InitialState>>),
    /// `GET /v1/notes`: the notes after this id.
    Notes(u64, ReplySender<Vec<Note>>),
    /// `GET /v1/history`: the samples after a time (milliseconds of Unix time).
    History(Resolution, u64, ReplySender<History>),
    /// `GET /v1/history/apps`: the samples after a time, of one application or of all.
    AppHistory(Resolution, u64, Option<String>, ReplySender<AppHistory>),
    /// `GET /v1/gains`: over this number of days.
    Gains(u32, ReplySender<Gains>),
    /// `GET /v1/tradeoff`.
    Tradeoff(ReplySender<Vec<TradeoffPoint>>),
    /// `GET /v1/config`.
    Config(ReplySender<settings::Look>),
    /// `POST /v1/config/preview`: changes nothing.
    Preview(ConfigChange, ReplySender<ConfigChanged>),
    /// `POST /v1/config`.
    Apply(ConfigChange, ReplySender<ConfigChanged>),
    /// `POST /v1/config/undo`.
    Undo(ReplySender<ConfigView>),
    /// `GET /v1/adhoc`; also behind `/v1/metrics`.
    Adhoc(ReplySender<AdhocStatus>),
    /// `POST /v1/adhoc`: change the ad-hoc device.
    ChangeAdhoc(AdhocChange, ReplySender<Accepted>),
    /// `POST /v1/adhoc/up`: make it.
    AdhocUp(AdhocUp, ReplySender<Accepted>),
    /// `POST /v1/adhoc/down`: remove it.
    AdhocDown(ReplySender<Accepted>),
    /// `GET /v1/network`: a controller answers, not the daemon.
    Network(ReplySender<NetworkStatus>),
    /// `POST /v1/network`.
    ChangeNetwork(NetworkChange, ReplySender<Accepted>),
    /// `GET /v1/slices`: a slicer answers, not the daemon.
    Slices(ReplySender<SlicerStatus>),
    /// `POST /v1/slices`.
    ChangeSlices(Box<SliceChange>, ReplySender<Accepted>),
    /// `POST /v1/reload`: read the configuration again; if it is rejected (a problem, status 422), the running one stays in force.
    Reload(ReplySender<Accepted>),
    /// `POST /v1/down`: take everything down and exit. The answer is sent before.
    Down(ReplySender<Accepted>),
}

impl Request {
    /// Answers with an error.
    pub fn refuse(self, error: RequestError) {
        fn answer<T>(reply: ReplySender<T>, error: RequestError) {
            let _ = reply.send(Err(error));
        }
        match self {
            Self::Status(reply) => answer(reply, error),
            Self::Links(reply) => answer(reply, error),
            Self::Flows(reply) => answer(reply, error),
            Self::Apps(reply) => answer(reply, error),
            Self::Policy(reply) => answer(reply, error),
            Self::Explain(_, reply) => answer(reply, error),
            Self::Peers(reply) => answer(reply, error),
            Self::Facts(reply) => answer(reply, error),
            Self::Clients(reply) => answer(reply, error),
            Self::Rewrites(reply) => answer(reply, error),
            Self::Rewrite(_, reply) => answer(reply, error),
            Self::ProgramRules(reply) => answer(reply, error),
            Self::Subscribe(_, reply) => answer(reply, error),
            Self::Notes(_, reply) => answer(reply, error),
            Self::History(_, _, reply) => answer(reply, error),
            Self::AppHistory(_, _, _, reply) => answer(reply, error),
            Self::Gains(_, reply) => answer(reply, error),
            Self::Tradeoff(reply) => answer(reply, error),
            Self::Config(reply) => answer(reply, error),
            Self::Preview(_, reply) | Self::Apply(_, reply) => answer(reply, error),
            Self::Undo(reply) => answer(reply, error),
            Self::Adhoc(reply) => answer(reply, error),
            Self::Network(reply) => answer(reply, error),
            Self::Slices(reply) => answer(reply, error),
            Self::Join(_, reply)
            | Self::Leave(_, reply)
            | Self::Move(_, reply)
            | Self::SetFact(_, reply)
            | Self::ChangeRule(_, _, reply)
            | Self::ChangeAdhoc(_, reply)
            | Self::AdhocUp(_, reply)
            | Self::AdhocDown(reply)
            | Self::ChangeNetwork(_, reply)
            | Self::ChangeSlices(_, reply)
            | Self::Reload(reply)
            | Self::Down(reply) => answer(reply, error),
            Self::ProgramEnded(_) => {}
        }
    }
}

/// Reason why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another daemon uses the socket.
    #[error("another Braid daemon is running on {0}: stop it with `braid down`, or specify another --socket")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is not a socket: remove it, or specify another --socket")]
    NotASocket(PathBuf),
    /// The socket cannot be created.
    #[error("cannot listen on {path}: {error}; run as root, or specify a --socket in a writable directory")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
}

/// A listening Unix socket; dropping it removes its file.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Listens on `path` with mode 0666, because every user may read. Creates its directory (0755) if there is none, and replaces the socket
    /// of a dead daemon.
    pub fn bind(path: &Path) -> Result<Self, ServeError> {
        let failed = |error| ServeError::Listen { path: path.to_owned(), error };
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(failed)?;
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(ServeError::NotASocket(path.to_owned())),
            Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => return Err(ServeError::InUse(path.to_owned())),
            Ok(_) => std::fs::remove_file(path).map_err(failed)?,
            Err(_) => {}
        }
        let listener = bind_beside(path).map_err(failed)?;
        Ok(Self { listener, file: SocketFile::of(path) })
    }

    /// Serves clients until `end` resolves, and finishes pending answers. Call within a tokio runtime.
    pub async fn serve(self, api: Api, end: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let Self { listener, file } = self;
        listener.set_nonblocking(true)?;
        let connections = Connections::of(tokio::net::UnixListener::from_std(listener)?, own_user());
        let service = routes::router(api).into_make_service_with_connect_info::<ApiClient>();
        let served = axum::serve(connections, service).with_graceful_shutdown(end).await;
        drop(file);
        served
    }
}

/// State shared by all request handlers.
#[derive(Debug, Clone)]
pub struct Api {
    core: mpsc::Sender<Request>,
    live: live::Live,
    keys: Option<Arc<Keys>>,
    /// Concurrent requests of read-only clients.
    reading: Quota<Origin>,
    /// Programs whose ends are awaited.
    programs: programs::Watched,
    /// Address of the web page.
    page: Option<String>,
    site: Site,
}

impl Api {
    /// Creates an API that sends its requests to `core`. Events arrive by the [`Feed`] while the [`EventBroadcaster`] runs.
    pub fn new(core: mpsc::Sender<Request>) -> (Self, Feed, EventBroadcaster) {
        let (live, feed, spreader) = live::live();
        let reading = Quota::new(MAX_READ_REQUESTS, MAX_READ_REQUESTS_PER_CLIENT);
        (Self { core, live, keys: None, reading, programs: programs::Watched::default(), page: None, site: Site::Daemon }, feed, spreader)
    }

    /// The same for a network's controller, which has a page of its own.
    pub fn for_controller(self) -> Self {
        Self { site: Site::Controller, ..self }
    }

    /// The same for a slicer.
    pub fn for_slicer(self) -> Self {
        Self { site: Site::Slicer, ..self }
    }
}

/// The API over TCP, bound but not served yet.
#[derive(Debug)]
pub struct Ui {
    port: BoundPort,
    keys: Arc<Keys>,
}

impl Ui {
    /// Binds the address. Stores tokens and Braid's own certificate in `folder`, which is created if there is none.
    ///
    /// # Errors
    /// The address, the certificate or the directory is not usable.
    pub fn open(options: &UiOptions, folder: &Path) -> Result<Self, UiError> {
        let failed = |error| UiError::State { path: folder.to_owned(), error };
        // Who may write there could choose the tokens.
        StateDir::open(folder)?;
        let keys = Keys::open(folder, options.names.clone(), options.tls()).map_err(failed)?;
        Ok(Self { port: BoundPort::open(options, folder)?, keys: keys.into() })
    }

    /// Address of the page.
    pub fn address(&self) -> String {
        self.keys.address(self.port.address)
    }

    /// SHA-256 of Braid's own certificate, if that is in use.
    pub fn fingerprint(&self) -> Option<&str> {
        self.port.fingerprint.as_deref()
    }

    /// The token for full access, or for read-only access.
    pub fn token(&self, may_change: bool) -> &str {
        self.keys.token(if may_change { Needs::Changing } else { Needs::Reading })
    }

    /// Serves clients until `end` resolves. Call within a tokio runtime.
    pub async fn serve(self, api: Api, end: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let api = api.with(&self);
        let service = routes::router(api).into_make_service_with_connect_info::<ApiClient>();
        axum::serve(self.port.accept_clients()?, service).with_graceful_shutdown(end).await
    }
}

impl Api {
    /// The API with the TCP clients' tokens and the page's address.
    fn with(self, ui: &Ui) -> Self {
        Self { keys: Some(ui.keys.clone()), page: Some(ui.address()), ..self }
    }
}

/// Serves everything on its own thread; dropping it stops the server.
#[derive(Debug)]
pub struct Serving {
    end: Option<oneshot::Sender<()>>,
    ended: oneshot::Receiver<()>,
}

impl Serving {
    /// Starts the server thread.
    ///
    /// # Errors
    /// The system cannot create a thread or a runtime.
    pub fn start(server: Server, ui: Option<Ui>, api: Api, spreader: EventBroadcaster) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ((end, told), (done, ended)) = (oneshot::channel(), oneshot::channel());
        let all = async move {
            tokio::spawn(spreader.run());
            let api = ui.as_ref().map_or(api.clone(), |ui| api.with(ui));
            if let Some(ui) = ui {
                // This task ends with the runtime.
                tokio::spawn(ui.serve(api.clone(), std::future::pending()));
            }
            if let Err(error) = server.serve(api, async move { drop(told.await) }).await {
                tracing::warn!("the API server has stopped: {error}");
            }
        };
        std::thread::Builder::new().name("api".to_owned()).spawn(move || {
            runtime.block_on(all);
            // Does not wait for clients that still listen to events.
            runtime.shutdown_background();
            let _ = done.send(());
        })?;
        Ok(Self { end: Some(end), ended })
    }

    /// Stops the server; waits at most `patience` for pending answers.
    pub async fn end(mut self, patience: Duration) {
        drop(self.end.take());
        let _ = tokio::time::timeout(patience, self.ended).await;
    }
}

/// Binds inside a private directory and then moves the socket into place, so that no client finds it before its mode is set, and no other
/// user can replace it meanwhile. Refers to the directory by its descriptor instead of its path.
fn bind_beside(path: &Path) -> io::Result<UnixListener> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // An earlier process with the same ID may have left such a directory.
    let folder = |number: u32| parent.join(format!(".braid-{}-{number}", std::process::id()));
    let taken = |folder: &PathBuf| folder.symlink_metadata().is_ok();
    let folder = (0..8).map(folder).find(|folder| !taken(folder)).ok_or(io::ErrorKind::AlreadyExists)?;
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let bound = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(&folder).and_then(|open| {
        let (found, own) = (open.metadata()?, own_user());
        if found.uid() != own || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(format!("another user replaced {}", folder.display())));
        }
        let inside = PathBuf::from(format!("/proc/self/fd/{}/socket", open.as_raw_fd()));
        let listener = UnixListener::bind(&inside)?;
        let placed =
            std::fs::set_permissions(&inside, std::fs::Permissions::from_mode(0o666)).and_then(|()| std::fs::rename(&inside, path));
        if placed.is_err() {
            let _ = std::fs::remove_file(&inside);
        }
        placed.map(|()| listener)
    });
    let _ = std::fs::remove_dir(&folder);
    bound
}

/// Removes the socket's file when the server ends, unless another file has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), identity: identity(path) }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity == identity(&self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

/// A problem that is sent as a response.
pub(crate) struct Refusal(pub(crate) Problem);

impl From<RequestError> for Refusal {
    fn from(error: RequestError) -> Self {
        let status = match error.cause {
            Cause::Unclear => 400,
            Cause::NotFound => 404,
            Cause::Conflict => 409,
            Cause::Invalid => 422,
            Cause::Failed => 500,
        };
        Self(Problem { findings: error.findings, ..Problem::new(status, error.title, error.detail) })
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, [(header::CONTENT_TYPE, Problem::MEDIA_TYPE)], serde_json::to_string(&self.0).unwrap_or_default()).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    fn status() -> Status {
        serde_json::from_value(serde_json::json!({"schema_version": 1, "version": "v", "scheduler": "only-one", "links": [], "flows": 3}))
            .unwrap()
    }

    /// A core that has a status, accepts commands and refuses to explain.
    async fn core(mut requests: mpsc::Receiver<Request>) {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Status(reply) => drop(reply.send(Ok(status()))),
                Request::Reload(reply) => drop(reply.send(Ok(Accepted { message: "done".into(), warnings: Vec::new() }))),
                Request::Explain(request, reply) => {
                    drop(reply.send(Err(RequestError::not_found("Not found", format!("no flow {:?}", request.flow)))));
                }
                other @ Request::Links(_) => other.refuse(RequestError::conflict("Not here", "ask elsewhere")),
                // Dropped without an answer, like in a core that is ending.
                _ => {}
            }
        }
    }

    async fn exchange(path: &Path, head: &str, body: &str) -> String {
        let mut stream = UnixStream::connect(path).await.unwrap();
        let request = format!(
            "{head} HTTP/1.1\r\nhost: braid\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn requests_reach_the_core_and_problems_reach_the_client() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/braid.sock");
        let server = Server::bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        assert!(matches!(Server::bind(&path), Err(ServeError::InUse(_))));

        let (send, receive) = mpsc::channel(4);
        let (stop, stopped) = oneshot::channel::<()>();
        let core = tokio::spawn(core(receive));
        let (api, _feed, _spreader) = Api::new(send);
        let served = tokio::spawn(server.serve(api, async move { drop(stopped.await) }));
        for (head, body, code, content) in [
            ("GET /v1/status", "", "200", "\"flows\":3"),
            ("POST /v1/reload", "", "200", "done"),
            ("POST /v1/explain", "{\"flow\":9}", "404", "no flow Some(9)"),
            ("POST /v1/explain", "{\"flw\":9}", "400", "flw"),
            ("GET /v1/flows", "", "503", "braid up"),
            ("GET /v1/links", "", "409", "ask elsewhere"),
            ("GET /v1/nonsense", "", "404", "/v1/status"),
            ("GET /v1/down", "", "405", "POST"),
            ("GET /v1/metrics", "", "200", "braid_flows 3"),
        ] {
            let answer = exchange(&path, head, body).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {code}")) && answer.contains(content), "{head}: {answer}");
            assert!(code == "200" || answer.contains(Problem::MEDIA_TYPE), "{head}: {answer}");
        }
        drop(stop);
        served.await.unwrap().unwrap();
        core.await.unwrap();
        assert!(!path.exists(), "the server removes the socket's file");
    }

    #[tokio::test]
    async fn a_dead_daemons_socket_is_replaced_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("braid.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Server::bind(&path).unwrap());
        assert!(!path.exists());
        let first = Server::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Server::bind(&path).unwrap();
        drop(first);
        assert!(path.exists(), "the file belongs to another server now");
        drop(second);
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Server::bind(&path), Err(ServeError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
