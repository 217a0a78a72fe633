//! The API as the daemon serves it, with a core on a fake system.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use braid_api::{Accepted, AdhocStatus, NetworkStatus, Note, SlicerStatus, Status};
use braid_config::settings::Settings;
use braid_control::RequestError;
use braid_control::config::Config;
use braid_control::core::{Core, Names};
use braid_control::fake::FakeSteering;
use braid_control::history::{HistoryStore, Power};
use braid_control::steering::{AppId, ExeId, SteeringEvent};
use braid_decide::health::Outcome;
use braid_http::api_handler::{ApiHandler, Moment, StatusInput};
use braid_http::{Api, FlowList, Request, Server, Ui, UiOptions};
use braid_model::{Application, Family, LinkFacts, LinkIndex, NetworkSnapshot, Time};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;

use braid_control::fake::network;

pub(crate) const FILE: &str = "# Mine.\nscheduler = \"round-robin\" # steady\n\n[[link]]\nname = \"wlan0\"\n";
pub(crate) const NOW: Time = Time::from_nanos(1_000_000_000_000);
const UNIX_MS: u64 = 1_795_219_200_000;

struct NoNames;

impl Names for NoNames {
    fn executable(&mut self, _: &Path) -> Option<ExeId> {
        None
    }
    fn cgroup(&mut self, _: &str) -> Option<(u64, u32)> {
        None
    }
    fn application(&mut self, app: &AppId, _: u32, _: u64) -> (Application, Option<String>) {
        (Application { exe: None, name: app.name.clone() }, None)
    }
}

/// A served API. All its tasks end with the [`tokio::task::LocalSet`] in which it was created.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
    pub(crate) mind: Rc<RefCell<Mind>>,
    pub(crate) address: SocketAddr,
    pub(crate) tokens: [String; 2],
}

/// Stands in for the daemon.
pub(crate) struct Mind {
    pub(crate) core: Core<FakeSteering>,
    pub(crate) handler: ApiHandler,
    /// Number of commands for the daemon itself.
    pub(crate) commands: u32,
    /// The ad-hoc device.
    pub(crate) adhoc: Option<AdhocStatus>,
    seconds: u64,
}

impl Fixture {
    /// Creates two links, and one flow of a program with a hostile name.
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("braid.toml");
        std::fs::write(&config, FILE).unwrap();
        let (requests, inbox) = mpsc::channel(64);
        let (api, feed, spreader) = Api::new(requests);
        let mut core = Core::new(FakeSteering::default(), Box::new(NoNames), Config::default(), NOW).unwrap();
        core.on_network(NOW, links(&["wlan0", "lte0"])).unwrap();
        for link in [1, 2] {
            let alive = Outcome::Alive { rtt: Duration::from_millis(20) };
            core.on_probe(NOW, LinkIndex(link), Family::V4, alive).unwrap();
        }
        let app = AppId { exe: ExeId { device: 1, inode: 2 }, name: "<script>".to_owned() };
        let met = SteeringEvent::NewApp { app: app.clone(), process: 1, cgroup: 0, class: Default::default() };
        core.on_events(NOW, vec![met]).unwrap();
        core.steering().connect(NOW, &app, 0, ("203.0.113.10".parse().unwrap(), 443));
        core.poll(NOW).unwrap();
        let handler = ApiHandler::new(HistoryStore::default(), Settings::new(Some(config), PathBuf::from("/nowhere")), feed);
        let mind = Rc::new(RefCell::new(Mind { core, handler, commands: 0, adhoc: Some(ad_hoc()), seconds: 0 }));
        let server = Server::bind(&folder.path().join("socket")).unwrap();
        let options = UiOptions { listen: "127.0.0.1:0".parse().unwrap(), names: vec![], certificate: None };
        let ui = Ui::open(&options, folder.path()).unwrap();
        let address = ui.address().trim_start_matches("http://").trim_end_matches('/').parse().unwrap();
        let tokens = [true, false].map(|may_change| ui.token(may_change).to_owned());
        tokio::spawn(spreader.run());
        tokio::spawn(server.serve(api.clone(), std::future::pending()));
        tokio::spawn(ui.serve(api, std::future::pending()));
        tokio::task::spawn_local(answer(mind.clone(), inbox));
        Self { folder, mind, address, tokens }
    }

    pub(crate) fn text(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("braid.toml")).unwrap()
    }

    pub(crate) async fn local(&self) -> Connection {
        Connection::over(UnixStream::connect(self.folder.path().join("socket")).await.unwrap()).await
    }

    pub(crate) async fn remote(&self) -> Connection {
        Connection::over(TcpStream::connect(self.address).await.unwrap()).await
    }
}

impl Mind {
    /// Simulates one second.
    pub(crate) fn second(&mut self) {
        self.seconds += 1;
        let pulses = self.core.pulses(NOW, |_| 0);
        self.handler.on_second(UNIX_MS + self.seconds * 1000, pulses, Power::default(), &self.core.take_moved());
        if self.handler.has_listeners() {
            let rest = self.rest();
            self.handler.send_changes(&self.core, NOW, rest);
        }
    }

    /// Removes a link.
    pub(crate) fn lose_link(&mut self) {
        self.core.on_network(NOW, links(&["wlan0"])).unwrap();
    }

    pub(crate) fn notes(&self) -> Vec<Note> {
        self.handler.history.notes_after(0)
    }

    fn rest(&mut self) -> StatusInput {
        StatusInput {
            status: self.core.status(NOW),
            bonded: vec![],
            apps: Some(self.core.applications(NOW, BTreeMap::new())),
            peers: vec![],
        }
    }
}

async fn answer(mind: Rc<RefCell<Mind>>, mut inbox: mpsc::Receiver<Request>) {
    while let Some(request) = inbox.recv().await {
        let mut mind = mind.borrow_mut();
        let Mind { core, handler, .. } = &mut *mind;
        let moment = Moment { now: NOW, unix_ms: UNIX_MS };
        let mut enforce = |core: &mut Core<FakeSteering>, config: Config| {
            core.reconfigure(NOW, config).map_err(|error| RequestError::failed("Not applied", error.to_string()))
        };
        let Some(rest) = handler.answer(core, moment, &Vec::new, &mut enforce, request) else { continue };
        let done = || Ok(Accepted { message: "done".to_owned(), warnings: vec![] });
        match rest {
            Request::Status(reply) => {
                let adhoc = mind.adhoc.as_ref().map(|device| device.name.clone());
                drop(reply.send(Ok(Status { adhoc, ..mind.core.status(NOW) })));
            }
            Request::Clients(reply) => drop(reply.send(core.clients(NOW, &BTreeMap::new()))),
            Request::Apps(reply) => drop(reply.send(Ok(core.apps_view(NOW, BTreeMap::new())))),
            Request::Flows(reply) => drop(reply.send(Ok(FlowList::new(core.flows_view(NOW), Vec::new()).into()))),
            Request::Explain(request, reply) => drop(reply.send(core.explain(NOW, &request))),
            Request::Adhoc(reply) => {
                let none = || RequestError::not_found("No ad-hoc device", "the fixture has none");
                drop(reply.send(mind.adhoc.clone().ok_or_else(none)));
            }
            Request::Network(reply) => drop(reply.send(Ok(no_network()))),
            Request::Slices(reply) => {
                let (listens, slices, switches, troubles) = Default::default();
                drop(reply.send(Ok(SlicerStatus { listens, slices, switches, troubles })));
            }
            Request::Peers(reply) => drop(reply.send(Ok(vec![]))),
            Request::Subscribe(after, reply) => {
                let rest = mind.rest();
                drop(reply.send(Ok(Box::new(mind.handler.first(&mind.core, NOW, after, rest)))));
            }
            Request::Join(_, reply)
            | Request::Leave(_, reply)
            | Request::Move(_, reply)
            | Request::Reload(reply)
            | Request::ChangeAdhoc(_, reply)
            | Request::AdhocUp(_, reply)
            | Request::AdhocDown(reply)
            | Request::ChangeNetwork(_, reply)
            | Request::ChangeSlices(_, reply)
            | Request::Down(reply) => {
                mind.commands += 1;
                let _ = reply.send(done());
            }
            other => panic!("unexpected request: {other:?}"),
        }
    }
}

/// A network without switches.
fn no_network() -> NetworkStatus {
    let (listens, switches, links, accesses, hosts, managers) = Default::default();
    NetworkStatus { listens, switches, links, accesses, hosts, managers, converged: true }
}

/// An ad-hoc device without radios.
fn ad_hoc() -> AdhocStatus {
    AdhocStatus {
        name: "vi0".to_owned(),
        mac: "02:00:00:00:00:01".to_owned(),
        mtu: None,
        authenticated: false,
        by_frame: false,
        hysteresis_ms: 1000,
        expiry_ms: 10_000,
        power_saving: true,
        saving_power: false,
        radios: Vec::new(),
        neighbours: Vec::new(),
        counts: Default::default(),
        warnings: Vec::new(),
        reservation: None,
    }
}

fn links(names: &[&str]) -> NetworkSnapshot {
    let devices: Vec<LinkFacts> = (1..).zip(names).map(|(index, name)| network::facts(index, name)).collect();
    network::network(&devices)
}

/// A connection to the API.
pub(crate) struct Connection(SendRequest<Full<Bytes>>);

/// A complete response.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Bytes,
}

impl TestResponse {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

impl Connection {
    async fn over(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends a request and returns the response's head; its body is still to be read.
    pub(crate) async fn begin(&mut self, request: hyper::Request<Full<Bytes>>) -> Result<hyper::Response<Incoming>, hyper::Error> {
        self.0.ready().await?;
        self.0.send_request(request).await
    }

    pub(crate) async fn send(&mut self, request: hyper::Request<Full<Bytes>>) -> Result<TestResponse, hyper::Error> {
        let (head, body) = self.begin(request).await?.into_parts();
        Ok(TestResponse { status: head.status.as_u16(), headers: head.headers, body: body.collect().await?.to_bytes() })
    }

    /// Sends `METHOD /path` with headers and a body.
    pub(crate) async fn ask(&mut self, what: &str, headers: &[(&str, &str)], body: &str) -> TestResponse {
        self.send(request(what, headers, body)).await.unwrap()
    }
}

pub(crate) fn request(what: &str, headers: &[(&str, &str)], body: &str) -> hyper::Request<Full<Bytes>> {
    let (method, path) = what.split_once(' ').unwrap();
    let mut builder = hyper::Request::builder().method(method).uri(path);
    for (name, value) in [("host", "localhost"), ("content-type", "application/json")] {
        if !headers.iter().any(|(given, _)| *given == name) {
            builder = builder.header(name, value);
        }
    }
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap()
}
