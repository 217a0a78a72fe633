//! The HTTP API on a Unix socket.
//!
//! Anyone who can connect may read; only root and the daemon's own user may command, by the kernel's word on who connected.
//! The server knows nothing of the daemon: it sends each [`Request`] over a channel and waits for the answer, so that all state
//! stays in the one task that receives them.

use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request as HttpRequest, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use braid_api::{
    Accepted, App, ExplainRequest, Explanation, Flow, JoinRequest, LeaveRequest, Link, MoveRequest, Peer as PeerView, PolicyView, Problem,
    Status,
};
use braid_platform::linux::sys::process::own_user;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

mod connections;
mod metrics;

use connections::Connections;

/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/braid/braid.sock";

/// How long the core may take to answer before the client is told that it hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the core answers: what was asked for, or the problem the client is told.
pub type Answer<T> = oneshot::Sender<Result<T, Problem>>;

/// What clients ask of the core; each carries where to answer. A dropped sender tells the client that the daemon is ending.
#[derive(Debug)]
pub enum Request {
    /// `GET /v1/status`; also behind `/v1/metrics`.
    Status(Answer<Status>),
    /// `GET /v1/links`.
    Links(Answer<Vec<Link>>),
    /// `GET /v1/flows`.
    Flows(Answer<Vec<Flow>>),
    /// `GET /v1/apps`.
    Apps(Answer<Vec<App>>),
    /// `GET /v1/policy`.
    Policy(Answer<PolicyView>),
    /// `POST /v1/explain`: reads only.
    Explain(ExplainRequest, Answer<Explanation>),
    /// `GET /v1/peers`.
    Peers(Answer<Vec<PeerView>>),
    /// `POST /v1/join`: bond with a relay from now on.
    Join(JoinRequest, Answer<Accepted>),
    /// `POST /v1/leave`: no more.
    Leave(LeaveRequest, Answer<Accepted>),
    /// `POST /v1/move`: carry flows over another link from now on.
    Move(MoveRequest, Answer<Accepted>),
    /// `POST /v1/reload`: read the configuration again; a refused one leaves the running one in force (a problem, status 422).
    Reload(Answer<Accepted>),
    /// `POST /v1/down`: take everything down and end. The answer is sent before.
    Down(Answer<Accepted>),
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
    /// Listens on `path` with mode 0660; makes its directory (0755) if there is none, and takes the place of a dead daemon's socket.
    /// Call within a tokio runtime.
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

    /// Answers clients out of `core` until `end` comes to pass; answers under way are finished.
    pub async fn serve(self, core: mpsc::Sender<Request>, end: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let Self { listener, file } = self;
        let service = router(core).into_make_service_with_connect_info::<Peer>();
        let served = axum::serve(Connections::of(listener), service).with_graceful_shutdown(end).await;
        drop(file);
        served
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
            std::fs::set_permissions(&inside, std::fs::Permissions::from_mode(0o660)).and_then(|()| std::fs::rename(&inside, path));
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

/// Who connected, as the kernel tells.
#[derive(Debug, Clone, Copy)]
struct Peer {
    user: Option<u32>,
    own: u32,
}

impl Peer {
    fn of(stream: &UnixStream, own: u32) -> Self {
        Self { user: stream.peer_cred().ok().map(|cred| cred.uid()), own }
    }

    fn may_command(self) -> bool {
        self.user.is_some_and(|user| user == 0 || user == self.own)
    }
}

impl Connected<IncomingStream<'_, Connections>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Connections>) -> Self {
        Self::of(stream.io().stream(), own_user())
    }
}

type Core = State<mpsc::Sender<Request>>;

/// A problem as a response.
pub(crate) struct Refusal(pub(crate) Problem);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, [(header::CONTENT_TYPE, Problem::MEDIA_TYPE)], serde_json::to_string(&self.0).unwrap_or_default()).into_response()
    }
}

type Reply<T> = Result<Json<T>, Refusal>;

fn router(core: mpsc::Sender<Request>) -> Router {
    Router::new()
        .route("/v1/status", get(async |core: Core| ask(core, Request::Status).await))
        .route("/v1/links", get(async |core: Core| ask(core, Request::Links).await))
        .route("/v1/flows", get(async |core: Core| ask(core, Request::Flows).await))
        .route("/v1/apps", get(async |core: Core| ask(core, Request::Apps).await))
        .route("/v1/policy", get(async |core: Core| ask(core, Request::Policy).await))
        .route("/v1/peers", get(async |core: Core| ask(core, Request::Peers).await))
        .route("/v1/explain", post(explain))
        .route("/v1/join", post(async |core: Core, peer: ConnectInfo<Peer>, body| order(core, peer, body, Request::Join).await))
        .route("/v1/leave", post(async |core: Core, peer: ConnectInfo<Peer>, body| order(core, peer, body, Request::Leave).await))
        .route("/v1/move", post(async |core: Core, peer: ConnectInfo<Peer>, body| order(core, peer, body, Request::Move).await))
        .route("/v1/reload", post(async |core: Core, peer: ConnectInfo<Peer>| command(core, peer, Request::Reload).await))
        .route("/v1/down", post(async |core: Core, peer: ConnectInfo<Peer>| command(core, peer, Request::Down).await))
        .route("/v1/metrics", get(prometheus))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(core)
}

async fn ask<T>(State(core): Core, request: impl FnOnce(Answer<T>) -> Request) -> Reply<T> {
    let (answer, wait) = oneshot::channel();
    let ending = || Refusal(Problem::new(503, "Ending", "the daemon is ending: start it again with `braid up`"));
    let exchange = async {
        core.send(request(answer)).await.map_err(|_| ending())?;
        wait.await.map_err(|_| ending())?.map_err(Refusal)
    };
    let detail = "the daemon does not answer: see its log, and restart it if that lasts (traffic goes on without it)";
    tokio::time::timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(Refusal(Problem::new(504, "No answer", detail)))).map(Json)
}

async fn command<T>(core: Core, ConnectInfo(peer): ConnectInfo<Peer>, request: impl FnOnce(Answer<T>) -> Request) -> Reply<T> {
    if !peer.may_command() {
        let detail = "only root and the daemon's own user may do this: run the command with sudo";
        return Err(Refusal(Problem::new(403, "Not allowed", detail)));
    }
    ask(core, request).await
}

async fn explain(core: Core, body: Result<Json<ExplainRequest>, axum::extract::rejection::JsonRejection>) -> Reply<Explanation> {
    let Json(request) = body.map_err(|error| Refusal(Problem::new(400, "Not understood", error.body_text())))?;
    ask(core, |answer| Request::Explain(request, answer)).await
}

/// A command that says something.
async fn order<B>(
    core: Core,
    peer: ConnectInfo<Peer>,
    body: Result<Json<B>, axum::extract::rejection::JsonRejection>,
    request: impl FnOnce(B, Answer<Accepted>) -> Request,
) -> Reply<Accepted> {
    let Json(body) = body.map_err(|error| Refusal(Problem::new(400, "Not understood", error.body_text())))?;
    command(core, peer, |answer| request(body, answer)).await
}

async fn prometheus(core: Core) -> Result<Response, Refusal> {
    let Json(status) = ask(core, Request::Status).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::text(&status)).into_response())
}

async fn unknown(request: HttpRequest) -> Refusal {
    let detail = format!(
        "there is no {}: see /v1/status, links, flows, apps, peers, policy, explain, join, leave, move, reload, down, metrics",
        request.uri().path()
    );
    Refusal(Problem::new(404, "Not found", detail))
}

async fn wrong_method(request: HttpRequest) -> Refusal {
    let detail = format!("{} does not take {}: read with GET, command and explain with POST", request.uri().path(), request.method());
    Refusal(Problem::new(405, "Wrong method", detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn status() -> Status {
        serde_json::from_value(serde_json::json!({"schema_version": 1, "version": "v", "scheduler": "only-one", "links": [], "flows": 3}))
            .unwrap()
    }

    /// A core that knows a status, takes commands and refuses to explain.
    async fn core(mut requests: mpsc::Receiver<Request>) {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Status(answer) => drop(answer.send(Ok(status()))),
                Request::Reload(answer) => drop(answer.send(Ok(Accepted { message: "done".into(), warnings: Vec::new() }))),
                Request::Explain(request, answer) => {
                    drop(answer.send(Err(Problem::new(404, "Not found", format!("no flow {:?}", request.flow)))));
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
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(matches!(Server::bind(&path), Err(ServeError::InUse(_))));

        let (send, receive) = mpsc::channel(4);
        let (stop, stopped) = oneshot::channel::<()>();
        let core = tokio::spawn(core(receive));
        let served = tokio::spawn(server.serve(send, async move { drop(stopped.await) }));
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

    #[test]
    fn only_root_and_the_daemons_user_may_command() {
        let peer = |user| Peer { user, own: 1000 };
        assert!(peer(Some(0)).may_command() && peer(Some(1000)).may_command());
        assert!(!peer(Some(1001)).may_command() && !peer(None).may_command());
    }
}
