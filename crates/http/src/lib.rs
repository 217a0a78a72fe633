//! The HTTP API, on a Unix socket and, where asked for, over TCP.
//!
//! [`braid_api::openapi::OPERATIONS`] says what there is and who may call it; [`access`] holds everybody to it. The server lives on a thread
//! of its own and knows nothing of the daemon: it sends each [`Request`] over a channel and waits for the answer, so that all state
//! stays in the one task that receives them, and turning answers into text costs that task nothing. What may take long, since there may be
//! thousands of flows, is done on a thread of its own: it holds up no other answer either.

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
    Accepted, AppHistory, ConfigChange, ConfigChanged, ConfigView, ExplainRequest, Explanation, Gains, History, JoinRequest, LeaveRequest,
    LinkStatus, MoveRequest, Note, Peer as PeerView, PolicyView, Problem, Resolution, Status, TradeoffPoint,
};
use braid_config::settings;
use braid_control::core::AppsView;
use braid_control::{Cause, RequestError};
use braid_peer::quota::Quota;
use braid_platform::linux::sys::process::own_user;
use tokio::sync::{mpsc, oneshot};

mod access;
pub mod api_handler;
mod connections;
mod flows;
mod live;
mod metrics;
mod pages;
pub mod profile_service;
mod routes;
mod tcp;

use access::{ApiClient, Keys, Origin};
use connections::Connections;
pub use flows::FlowList;
pub use live::{Feed, First, Spreader, Update};
use tcp::Door;
pub use tcp::{UiError, UiOptions};

/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/braid/braid.sock";

/// How long the core may take to answer before the client is told that it hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests under way at a time of those who may only read, and of one user or address of them. The core's queue holds more.
const READING: usize = 48;
const READING_OF_ONE: usize = 16;

/// Where the core sends its answer: what was asked for, or why it cannot be done.
pub type ReplySender<T> = oneshot::Sender<Result<T, RequestError>>;

/// What clients ask of the core; each carries where to answer. A dropped sender tells the client that the daemon is ending.
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
    /// `POST /v1/join`: bond with a relay from now on.
    Join(JoinRequest, ReplySender<Accepted>),
    /// `POST /v1/leave`: no more.
    Leave(LeaveRequest, ReplySender<Accepted>),
    /// `POST /v1/move`: carry flows over another link from now on.
    Move(MoveRequest, ReplySender<Accepted>),
    /// `GET /v1/events`: what a listener is told first; the notes after the one of this id, else the last few.
    Subscribe(Option<u64>, ReplySender<Box<First>>),
    /// `GET /v1/notes`: those after the one of this id.
    Notes(u64, ReplySender<Vec<Note>>),
    /// `GET /v1/history`: the samples after a moment (milliseconds of Unix time).
    History(Resolution, u64, ReplySender<History>),
    /// `GET /v1/history/apps`: the samples after a moment, of one application or all.
    AppHistory(Resolution, u64, Option<String>, ReplySender<AppHistory>),
    /// `GET /v1/gains`: over so many days.
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
    /// `POST /v1/reload`: read the configuration again; a refused one leaves the running one in force (a problem, status 422).
    Reload(ReplySender<Accepted>),
    /// `POST /v1/down`: take everything down and end. The answer is sent before.
    Down(ReplySender<Accepted>),
}

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another daemon answers there.
    #[error("another braid answers on {0}: stop it with `braid down`, or name another --socket")]
    InUse(PathBuf),
    /// Something else stands there.
    #[error("{0} exists and is not a socket: remove it, or name another --socket")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}: {error}; run as root, or name a --socket in a directory you may write")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
}

/// A socket that listens; its file is removed when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Listens on `path` with mode 0666, since everybody may read; makes its directory (0755) if there is none, and takes the place of a
    /// dead daemon's socket.
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

    /// Answers clients until `end` comes to pass; answers under way are finished. Call within a tokio runtime.
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

/// What the server answers out of.
#[derive(Debug, Clone)]
pub struct Api {
    core: mpsc::Sender<Request>,
    live: live::Live,
    keys: Option<Arc<Keys>>,
    /// Requests under way of those who may only read.
    reading: Quota<Origin>,
    /// The web page's address.
    page: Option<String>,
}

impl Api {
    /// An API that asks `core`; what happens comes by the [`Feed`], for as long as the [`Spreader`] is run.
    pub fn new(core: mpsc::Sender<Request>) -> (Self, Feed, Spreader) {
        let (live, feed, spreader) = live::live();
        (Self { core, live, keys: None, reading: Quota::new(READING, READING_OF_ONE), page: None }, feed, spreader)
    }
}

/// The API over TCP, not served yet.
#[derive(Debug)]
pub struct Ui {
    door: Door,
    keys: Arc<Keys>,
}

impl Ui {
    /// Listens; tokens and the own certificate are kept in `folder`, which is made if there is none.
    ///
    /// # Errors
    /// Where the address, the certificate or the directory will not do.
    pub fn open(options: &UiOptions, folder: &Path) -> Result<Self, UiError> {
        let failed = |error| UiError::State { path: folder.to_owned(), error };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let keys = Keys::open(folder, options.names.clone(), options.tls()).map_err(failed)?;
        Ok(Self { door: Door::open(options, folder)?, keys: keys.into() })
    }

    /// The page's address.
    pub fn address(&self) -> String {
        self.keys.address(self.door.address)
    }

    /// The SHA-256 of Braid's own certificate, where that is used.
    pub fn fingerprint(&self) -> Option<&str> {
        self.door.fingerprint.as_deref()
    }

    /// The token that allows everything, or reading only.
    pub fn token(&self, may_change: bool) -> &str {
        self.keys.token(if may_change { Needs::Changing } else { Needs::Reading })
    }

    /// Answers clients until `end` comes to pass. Call within a tokio runtime.
    pub async fn serve(self, api: Api, end: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let api = api.with(&self);
        let service = routes::router(api).into_make_service_with_connect_info::<ApiClient>();
        axum::serve(self.door.enter()?, service).with_graceful_shutdown(end).await
    }
}

impl Api {
    /// The same, with what TCP clients must show.
    fn with(self, ui: &Ui) -> Self {
        Self { keys: Some(ui.keys.clone()), page: Some(ui.address()), ..self }
    }
}

/// Serves everything on a thread of its own; dropped, it is told to end.
#[derive(Debug)]
pub struct Serving {
    end: Option<oneshot::Sender<()>>,
    ended: oneshot::Receiver<()>,
}

impl Serving {
    /// Begins to.
    ///
    /// # Errors
    /// Where the system gives no thread or no runtime.
    pub fn start(server: Server, ui: Option<Ui>, api: Api, spreader: Spreader) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ((end, told), (done, ended)) = (oneshot::channel(), oneshot::channel());
        let all = async move {
            tokio::spawn(spreader.run());
            let api = ui.as_ref().map_or(api.clone(), |ui| api.with(ui));
            if let Some(ui) = ui {
                // Ends with the runtime.
                tokio::spawn(ui.serve(api.clone(), std::future::pending()));
            }
            if let Err(error) = server.serve(api, async move { drop(told.await) }).await {
                tracing::warn!("the API is not served any more: {error}");
            }
        };
        std::thread::Builder::new().name("api".to_owned()).spawn(move || {
            runtime.block_on(all);
            // Whoever still listens is not waited for.
            runtime.shutdown_background();
            let _ = done.send(());
        })?;
        Ok(Self { end: Some(end), ended })
    }

    /// Ends it; answers under way are finished within `patience`.
    pub async fn end(mut self, patience: Duration) {
        drop(self.end.take());
        let _ = tokio::time::timeout(patience, self.ended).await;
    }
}

/// Binds in a directory that is nobody else's to enter and moves the socket into place, so that nobody finds it before its mode is set, and
/// nobody can put another file in its place meanwhile. The directory is spoken of by its descriptor, not by its path.
fn bind_beside(path: &Path) -> io::Result<UnixListener> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Another may have been left by a process of the same number.
    let folder = |number: u32| parent.join(format!(".braid-{}-{number}", std::process::id()));
    let taken = |folder: &PathBuf| folder.symlink_metadata().is_ok();
    let folder = (0..8).map(folder).find(|folder| !taken(folder)).ok_or(io::ErrorKind::AlreadyExists)?;
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let bound = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(&folder).and_then(|open| {
        let (found, own) = (open.metadata()?, own_user());
        if found.uid() != own || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(format!("{} was exchanged by somebody else", folder.display())));
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

/// Removes the socket's file when the server ends, unless another one has taken the place.
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

/// A problem as a response.
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

    /// A core that knows a status, takes commands and refuses to explain.
    async fn core(mut requests: mpsc::Receiver<Request>) {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Status(reply) => drop(reply.send(Ok(status()))),
                Request::Reload(reply) => drop(reply.send(Ok(Accepted { message: "done".into(), warnings: Vec::new() }))),
                Request::Explain(request, reply) => {
                    drop(reply.send(Err(RequestError::not_found("Not found", format!("no flow {:?}", request.flow)))));
                }
                // Dropped without an answer, as by a core that ends.
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
    async fn requests_reach_the_core_and_problems_the_client() {
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
        assert!(!path.exists(), "the socket's file must go with the server");
    }

    #[tokio::test]
    async fn a_dead_daemons_socket_is_taken_over_and_other_files_are_not() {
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
        assert!(path.exists(), "the file is another server's now");
        drop(second);
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Server::bind(&path), Err(ServeError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
