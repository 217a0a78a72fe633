//! The device is handed to a remote controller, and taken back by its death (Yap's thesis, 2.3): real flows, the real daemon, and a controller over TLS.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Lines, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use braid_lab::Lab;
use braid_model::Time;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flow::FlowMod;
use braid_openflow::ids::PortNo;
use braid_openflow::matching::Match;
use braid_openflow::multipart::{MultipartReply, MultipartRequest, ReplyBody, RequestBody};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{Config, Connection, Event, Message, Side};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;

use crate::support::*;

const PORT: u16 = 9_300;
/// Where the controller is in the lab's Internet.
const HOST: u8 = 20;
const OPENFLOW: u16 = 6653;
/// Local control returns within this time after the controller's death.
const BACK: Duration = Duration::from_secs(1);

/// Certificates of both sides, signed by one root, in the lab's directory.
struct Certificates {
    folder: PathBuf,
    server: Arc<ServerConfig>,
}

impl Certificates {
    fn make(lab: &Lab) -> Self {
        let folder = lab.directory().join("certificates");
        fs::create_dir(&folder).unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let (device, controller) = (issued(&root, "device"), issued(&root, &Lab::internet(HOST).to_string()));
        for (file, text) in [("device.pem", &device.0), ("key.pem", &device.1), ("ca.pem", &root.pem())] {
            fs::write(folder.join(file), text).unwrap();
            fs::set_permissions(folder.join(file), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(root.pem().as_bytes()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
        let chain = vec![CertificateDer::from_pem_slice(controller.0.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(controller.1.as_bytes()).unwrap();
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        Self { folder, server: Arc::new(builder.with_client_cert_verifier(verifier).with_single_cert(chain, key).unwrap()) }
    }

    /// The device's configuration.
    fn config(&self) -> String {
        let path = |name: &str| self.folder.join(name).display().to_string();
        format!(
            "scheduler = \"only-one\"\n[datapath]\ncontroller = \"ssl:{}:{OPENFLOW}\"\ncertificate = \"{}\"\nkey = \"{}\"\nca = \"{}\"\n",
            Lab::internet(HOST),
            path("device.pem"),
            path("key.pem"),
            path("ca.pem")
        )
    }
}

/// A certificate and its key, in PEM format.
fn issued(by: &Issuer<'_, KeyPair>, name: &str) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    (CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, by).unwrap().pem(), key.serialize_pem())
}

/// A controller of one device. It ends at once when it is dropped, without a word.
struct Controller {
    orders: Sender<Message>,
    events: Receiver<Event>,
    stop: Arc<AtomicBool>,
    /// It neither reads nor writes.
    frozen: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Controller {
    fn start(lab: &Lab, certificates: &Certificates) -> Self {
        let listener = lab.server().run(|| TcpListener::bind(remote(HOST, OPENFLOW)).unwrap()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (orders, ordered) = channel();
        let (happened, events) = channel();
        let (stop, frozen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (server, stopped, is_frozen) = (certificates.server.clone(), stop.clone(), frozen.clone());
        let work = move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let session = ServerConnection::new(server.clone()).unwrap();
                        serve(stream, session, &ordered, &happened, &stopped, &is_frozen);
                    }
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        };
        Self { orders, events, stop, frozen, thread: Some(thread::spawn(work)) }
    }

    /// Waits for an event that `find` makes something of.
    #[track_caller]
    fn wait<T>(&self, what: &str, mut find: impl FnMut(Event) -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            let left = LIMIT.saturating_sub(begin.elapsed());
            let event = self.events.recv_timeout(left).unwrap_or_else(|error| panic!("{what}: {error}"));
            if let Some(found) = find(event) {
                return found;
            }
        }
    }

    fn wait_ready(&self) {
        self.wait("the device connects", |event| matches!(event, Event::Ready { .. }).then_some(()));
    }

    /// The number of the port with this name.
    fn port(&self, name: &str) -> PortNo {
        self.orders.send(Message::MultipartRequest(MultipartRequest::new(RequestBody::PortDescription))).unwrap();
        let ports = self.wait("the ports", |event| match event {
            Event::Reply { message, .. } => match *message {
                Message::MultipartReply(MultipartReply { body: ReplyBody::PortDescription(ports), .. }) => Some(ports),
                _ => None,
            },
            _ => None,
        });
        ports.iter().find(|port| port.name.to_string() == name).unwrap_or_else(|| panic!("{ports:?}")).number
    }

    /// Adds an entry and waits until the device has it.
    fn add(&self, flow: FlowMod) {
        self.orders.send(Message::FlowMod(flow)).unwrap();
        self.orders.send(Message::BarrierRequest).unwrap();
        self.wait("the entry", |event| match event {
            Event::Done { .. } => Some(()),
            Event::Failed { error, .. } => panic!("{error:?}"),
            _ => None,
        });
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn serve(
    mut stream: TcpStream,
    mut session: ServerConnection,
    ordered: &Receiver<Message>,
    happened: &Sender<Event>,
    stopped: &AtomicBool,
    frozen: &AtomicBool,
) {
    let begin = Instant::now();
    let now = || Time::from_millis(begin.elapsed().as_millis() as u64);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    // Half of a handshake waits for the rest, which a written message would not.
    let is_late = |error: &std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    while session.is_handshaking() && !stopped.load(Ordering::Relaxed) {
        if session.complete_io(&mut stream).is_err_and(|error| !is_late(&error)) {
            return;
        }
    }
    let mut stream = StreamOwned::new(session, stream);
    let mut connection = Connection::new(Config::new(Side::Controller), now());
    let mut piece = [0; 4096];
    while !stopped.load(Ordering::Relaxed) && !connection.is_closed() {
        if frozen.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
            continue;
        }
        while let Ok(message) = ordered.try_recv() {
            connection.request(now(), message).unwrap();
        }
        let mut bytes = Vec::new();
        connection.poll_output(&mut bytes);
        // A device that has gone is noticed below.
        let _ = stream.write_all(&bytes).and_then(|()| stream.flush());
        match stream.read(&mut piece) {
            Ok(0) => return,
            Ok(size) => connection.receive(now(), &piece[..size]),
            Err(error) if is_late(&error) => {}
            Err(_) => return,
        }
        connection.handle_timeout(now());
        while let Some(event) = connection.poll_event() {
            let _ = happened.send(event);
        }
    }
}

/// Leads TCP connections to this host over a link.
fn lead(to: SocketAddr, link: PortNo) -> FlowMod {
    let SocketAddr::V4(to) = to else { panic!("{to}") };
    let fields = [Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 6u8), Oxm::ipv4(Field::Ipv4Dst, *to.ip(), 32)];
    FlowMod { matching: Match::new(fields), instructions: output(link), ..FlowMod::default() }
}

fn output(port: PortNo) -> Vec<Instruction> {
    vec![Instruction::ApplyActions(vec![Action::output(port)])]
}

/// Whether bytes of the client arrive at the server.
#[track_caller]
fn check_alive(stream: &mut TcpStream, sink: &TcpListener) {
    let own = stream.local_addr().unwrap();
    stream.write_all(b"alive").unwrap();
    // Connections that were begun to find their link come first.
    let mut far = loop {
        let (far, from) = sink.accept().unwrap();
        if from == own {
            break far;
        }
    };
    far.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = [0; 5];
    far.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"alive");
}

#[test]
fn the_device_is_handed_to_a_controller_and_taken_back_by_its_death() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let certificates = Certificates::make(&lab);
    let (one, other) = (remote(11, PORT), remote(12, PORT));
    let [sink, _other_sink] = [one, other].map(|to| lab.server().run(|| TcpListener::bind(to).unwrap()).unwrap());
    let up = Up::start(&lab, &certificates.config());
    let usual = chosen(&lab, one).unwrap();
    let link = 1 - usual;
    eventually("the daemon says that nobody is there", || up.status().unwrap()["warnings"].to_string().contains("cannot be reached"));

    let controller = Controller::start(&lab, &certificates);
    controller.wait_ready();
    let port = controller.port(lab.links()[link].name());
    controller.add(lead(one, port));
    controller.add(FlowMod { priority: 0, instructions: output(PortNo::CONTROLLER), ..FlowMod::default() });
    assert_eq!((chosen(&lab, one).unwrap(), chosen(&lab, other).unwrap()), (link, usual), "only flows that the entry matches");
    let shown = controller.wait("a packet-in", |event| match event {
        Event::Message { message, .. } => match *message {
            Message::PacketIn(packet) => Some(packet.data),
            _ => None,
        },
        _ => None,
    });
    assert_eq!((&shown[30..34], &shown[36..38]), (&Lab::internet(12).octets()[..], &PORT.to_be_bytes()[..]));
    let rules = text(&up.braid(&["rules"]).stdout);
    assert!(rules.starts_with("controller:1 { ") && rules.contains("of the remote controller"), "{rules}");
    assert!(!up.status().unwrap()["warnings"].to_string().contains("remote controller"));
    let (mut stream, led) = open(&lab, one);
    assert_eq!(led, link);
    let local = stream.local_addr().unwrap().to_string();
    let id = || up.flows().into_iter().find(|flow| flow["local"] == local.as_str()).map(|flow| flow["id"].clone());
    eventually("the flow is listed", || id().is_some());
    let explained = up.api("POST /v1/explain", &serde_json::json!({"flow": id()})).1;
    assert_eq!(explained["program_rule"], "controller:1", "{explained}");

    drop(controller);
    let took = within(BACK, "the local policy decides", || chosen(&lab, one).unwrap() == usual);
    println!("local control after {took:?}");
    check_alive(&mut stream, &sink);
    assert_eq!(up.api("GET /v1/rules", &Value::Null).1["rules"], serde_json::json!([]));

    // It is dialled again. Then it hangs.
    let controller = Controller::start(&lab, &certificates);
    controller.wait_ready();
    controller.add(lead(one, controller.port(lab.links()[link].name())));
    assert_eq!(chosen(&lab, one).unwrap(), link);
    controller.frozen.store(true, Ordering::Relaxed);
    // It may have been heard just now: one second until it is asked, and one for its answer.
    let took = within(BACK * 4, "a silent controller is lost", || chosen(&lab, one).unwrap() == usual);
    println!("local control after a silence of {took:?}");
}

/// A controller on os-ken, in the client's namespace.
struct OsKen(Child);

impl OsKen {
    /// It leads TCP connections to host 11 over this link.
    fn start(lab: &Lab, python: &Path, link: usize) -> (Self, Lines<BufReader<ChildStdout>>) {
        let mut command = lab.client().command(python).unwrap();
        command.args(["-c", include_str!("support/os_ken_app.py"), lab.links()[link].name(), &Lab::internet(11).to_string()]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        (Self(child), said)
    }
}

impl Drop for OsKen {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `make test-outsourced` installs os-ken, and names the Python that has it in OSKEN.
#[test]
#[ignore = "needs os-ken: make test-outsourced"]
fn os_ken_gets_the_device_and_loses_it_by_its_death() {
    let python = PathBuf::from(std::env::var_os("OSKEN").expect("OSKEN names a Python that has os-ken"));
    let lab = lab(2);
    let (to, other) = (remote(11, PORT), remote(12, PORT));
    let [sink, _other_sink] = [to, other].map(|to| lab.server().run(|| TcpListener::bind(to).unwrap()).unwrap());
    let config = format!("scheduler = \"only-one\"\n[datapath]\ncontroller = \"tcp:127.0.0.1:{OPENFLOW}\"\nid = \"0000000000000002\"\n");
    let up = Up::start(&lab, &config);
    let usual = chosen(&lab, to).unwrap();
    let link = 1 - usual;
    let (os_ken, mut said) = OsKen::start(&lab, &python, link);
    assert_eq!(said.next().unwrap().unwrap(), "leads 2");
    let (mut stream, led) = open(&lab, to);
    assert_eq!((led, chosen(&lab, other).unwrap()), (link, usual));
    // Its learning switch is shown the flows that the entry does not match, and lets them go.
    assert_eq!(said.next().unwrap().unwrap(), "shown");
    drop(os_ken);
    let took = within(BACK, "the local policy decides", || chosen(&lab, to).unwrap() == usual);
    println!("local control after {took:?}");
    check_alive(&mut stream, &sink);
    assert_eq!(up.api("GET /v1/rules", &Value::Null).1["rules"], serde_json::json!([]));
    assert!(!said.any(|line| line.unwrap().starts_with("refused")));
}
