//! A client of a network with a controller (`braid net join`): one Ethernet device over several radios, which enter and leave access points as the controller
//! says (thesis chapter 5).
//!
//! The device is that of `braid adhoc`; the controller chooses its radios instead of the neighbours. [`Station`] decides; this is the I/O around it. Without a
//! controller, the device uses a radio that is attached.

use std::io::ErrorKind;
use std::iter;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use braid_api::{NetworkKept, NetworkReservation};
use braid_control::RequestError;
use braid_control::adhoc::AdhocSettings;
use braid_control::config::NetworkSettings;
use braid_http::{Api, Request, Server, Serving};
use braid_model::key::PublicKey;
use braid_model::{Mac, NetworkSnapshot, PerDirection, Rate, Time};
use braid_network::mobility::Report;
use braid_network::station::{Order, RadioState, Served, Station};
use braid_network::wire::{ALPN, Message, decode_message, encode_report};
use braid_network::{AccessId, Signal};
use braid_peer::keys::{CLIENT_KEY, KeyPair};
use braid_peer::shared;
use braid_peer::state::StateDir;
use braid_peer::tls::{Expect, SERVER_NAME, stream_client, stream_key};
use braid_platform::linux::bpf::adhoc::AdhocPrograms;
use braid_platform::linux::netlink::Follower;
pub use braid_platform::linux::supplicant::DIRECTORY as SUPPLICANTS;
use braid_platform::linux::supplicant::{Supplicant, WifiState};
use braid_platform::linux::sys::bpf::now;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, interval, sleep, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use crate::adhoc::{AdhocControls, AdhocThread};
use crate::lines::{HANDSHAKE, read_line, set_up};
use crate::system::notify;

/// Time between two readings of a Wi-Fi radio's signals.
const SIGNALS: Duration = Duration::from_secs(2);
/// Time after which wpa_supplicant is looked for again.
const RETRIED: Duration = Duration::from_secs(5);
/// Delay before the next connection to the controller, and at most, if connections end soon.
const CONNECTED_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A connection that lasted for this time was one.
const LASTED: Duration = Duration::from_secs(10);
/// Time to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for the kernel to see the carrier of a radio that has entered an access point.
const CARRIER: Duration = Duration::from_millis(500);
/// Time for wpa_supplicant to take back a radio when this process ends.
const FREED: Duration = Duration::from_secs(1);
/// Readings of the signals between two scans of a radio that is not in use.
const SCANNED: u32 = 5;
/// Time between two lines of the log about what the controller said, and characters of such a reason.
const LOGGED: Duration = Duration::from_secs(10);
const MAX_REASON: usize = 400;
/// Time for the radios to be freed at the end.
const ENDED: Duration = Duration::from_secs(3);
/// Interval at which this process looks whether the device is still there.
const LOOKED: Duration = Duration::from_millis(500);

/// How a client joins a network.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// The network, and the device by which it is joined.
    pub network: NetworkSettings,
    /// Directory with this client's key.
    pub state_dir: PathBuf,
    /// What the network is asked to reserve, towards this host and away from it, from the start.
    pub reserve: PerDirection<Rate>,
}

/// The public key of the client with this state directory. A new pair is made if there is none.
///
/// # Errors
/// The directory or the key cannot be used.
pub fn client_key(state_dir: &Path) -> anyhow::Result<PublicKey> {
    Ok(own_keys(state_dir)?.public())
}

/// The keys of the client with this state directory. A new pair is made if there is none.
///
/// # Errors
/// The directory or the key cannot be used.
pub fn client_keys(state_dir: &Path) -> anyhow::Result<KeyPair> {
    own_keys(state_dir)
}

fn own_keys(state_dir: &Path) -> anyhow::Result<KeyPair> {
    Ok(KeyPair::load_or_generate(&StateDir::open(state_dir)?, CLIENT_KEY)?)
}

/// Serves the device until a signal, or `braid adhoc down`, ends it. `ready` is called once the device exists.
///
/// # Errors
/// The options name no device that can be made, the key cannot be read, or the socket not be served.
pub fn run(options: JoinOptions, socket: &Path, ready: impl FnOnce(&str)) -> anyhow::Result<()> {
    crate::privilege::check_device("braid net join")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(serve(options, socket, ready));
    runtime.shutdown_background();
    result
}

async fn serve(options: JoinOptions, socket: &Path, ready: impl FnOnce(&str)) -> anyhow::Result<()> {
    own_keys(&options.state_dir)?;
    let server = Server::bind(socket)?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut programs = Some(AdhocPrograms::load()?);
    // Before any other thread starts, which keeps the privileges that it starts with.
    crate::privilege::narrow(false).context("cannot drop the privileges that are no longer needed")?;
    let (_follower, network) = Follower::start()?;
    let exchange = Exchange::default();
    let turn = exchange.turn.clone();
    let (device, joined) =
        Joined::start(&options, &mut programs, network, &exchange).map_err(|error| anyhow::anyhow!("{}", error.detail))?;
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, None, api, spreader).context("cannot serve the API")?;
    ready(device.name());
    notify("READY=1");
    let mut look = interval(LOOKED);
    let result = loop {
        tokio::select! {
            _ = interrupt.recv() => break Ok(()),
            _ = terminate.recv() => break Ok(()),
            _ = look.tick() => if device.has_ended() {
                break Err(anyhow::anyhow!("{} is gone: somebody has removed it", device.name()));
            },
            request = inbox.recv() => match request {
                Some(Request::ChangeAdhoc(_, reply)) => {
                    let _ = reply.send(Err(fixed("end `braid net join`, and join with others")));
                }
                Some(request) => if !device.answer(request) {
                    break Ok(());
                },
                None => break Ok(()),
            },
        }
    };
    // The radios are freed while the device is still there.
    drop(joined);
    ended(&turn).await;
    drop(device);
    serving.end(Duration::from_secs(2)).await;
    result
}

/// The error of a request to change the radios of a client.
pub(crate) fn fixed(remedy: &str) -> RequestError {
    let detail = format!("the radios of a device that has joined a network are those of its start: {remedy}");
    RequestError::conflict("Not changed", detail)
}

/// Whether a rate to reserve is to replace another one. Guarantees in percent follow every estimate of the capacity: small changes wait.
pub(crate) fn differs(asked: Rate, wanted: Rate) -> bool {
    let far = asked.bps().abs_diff(wanted.bps()) > asked.max(wanted).bps() / 20;
    far || (asked == Rate::ZERO) != (wanted == Rate::ZERO)
}

/// What an access point in use can carry besides its traffic, as the controller said last.
pub(crate) type FreeCapacity = Option<PerDirection<Rate>>;

/// What a client and the process in which it works exchange. It outlives the client.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// What the access point in use can carry besides its traffic, as the controller said last.
    pub(crate) free: watch::Sender<FreeCapacity>,
    /// What the network is asked to reserve.
    pub(crate) reserve: watch::Sender<PerDirection<Rate>>,
    /// What became of that; `None`: nothing is asked for.
    pub(crate) reservation: watch::Sender<Option<NetworkReservation>>,
    pub(crate) turn: Turn,
}

impl Default for Exchange {
    fn default() -> Self {
        let (free, reserve, reservation) = (watch::channel(None).0, watch::channel(PerDirection::default()).0, watch::channel(None).0);
        Self { free, reserve, reservation, turn: Turn::default() }
    }
}

/// A client at work: it directs the radios of a device. It ends when this is dropped, and then frees the radios.
#[derive(Debug)]
pub(crate) struct Joined {
    _end: watch::Sender<()>,
}

/// What a client holds until it has freed its radios, so that the next one does not direct them, too.
pub(crate) type Turn = Arc<Mutex<()>>;

/// Waits until clients that were dropped have freed their radios, [`ENDED`] at most.
pub(crate) async fn ended(turn: &Turn) {
    let _ = timeout(ENDED, turn.lock()).await;
}

impl Joined {
    /// Makes the device, and joins with it. The client begins when it gets its turn.
    ///
    /// # Errors
    /// The radios have different addresses, or none exists; the key cannot be used; the device cannot be made.
    pub(crate) fn start(
        options: &JoinOptions,
        programs: &mut Option<Box<AdhocPrograms>>,
        network: watch::Receiver<Arc<NetworkSnapshot>>,
        exchange: &Exchange,
    ) -> Result<(AdhocThread, Self), RequestError> {
        let failed = |error: anyhow::Error| RequestError::failed("Not joined", format!("{error:#}"));
        let NetworkSettings { device, accesses, controller, controller_key, supplicants } = &options.network;
        let keys = own_keys(&options.state_dir).map_err(failed)?;
        let expect = controller_key.map_or(Expect::Any, Expect::Pinned);
        let connector = TlsConnector::from(Arc::new(stream_client(Some(&keys), expect, ALPN).map_err(|error| failed(error.into()))?));
        let mac = common_address(device, &network.borrow()).map_err(failed)?;
        let radios: Vec<String> = device.radios.iter().map(|radio| radio.name.clone()).collect();
        let device = AdhocThread::start(AdhocSettings { mac: Some(mac), ..device.clone() }, programs, network.clone())?;
        let client = Client {
            station: Station::new(radios.len()),
            device: device.controls(),
            own: mac,
            served: None,
            used: watch::channel(0).0,
            radios: Vec::new(),
            session: None,
            refusal: String::new(),
            logged: None,
            free: exchange.free.clone(),
            reserve: exchange.reserve.subscribe(),
            kept: Vec::new(),
            reason: None,
            reservation: exchange.reservation.clone(),
        };
        let directory = supplicants.clone().unwrap_or_else(|| PathBuf::from(SUPPLICANTS));
        let radios = radios.into_iter().zip(accesses.iter().copied().chain(iter::repeat(None))).collect();
        let (end, ended) = watch::channel(());
        let (controller, turn) = (*controller, exchange.turn.clone());
        exchange.reserve.send_replace(options.reserve);
        tokio::spawn(async move {
            let _turn = turn.lock_owned().await;
            if ended.has_changed().is_ok() {
                client.run(radios, &directory, network, (controller, connector), ended).await;
            }
        });
        Ok((device, Self { _end: end }))
    }
}

/// The address of all radios. The network knows a host by its address, so it must have the same over each.
fn common_address(settings: &AdhocSettings, network: &NetworkSnapshot) -> anyhow::Result<Mac> {
    let address = |name: &str| network.interfaces.iter().find(|facts| facts.name == name).and_then(|facts| facts.mac);
    let known: Vec<(&str, Mac)> = settings.radios.iter().filter_map(|radio| Some((radio.name.as_str(), address(&radio.name)?))).collect();
    let (first, mac) = match (settings.mac, known.first()) {
        (Some(mac), _) => (settings.name.as_str(), mac),
        (None, Some((name, mac))) => (*name, *mac),
        (None, None) => {
            let names: Vec<&str> = settings.radios.iter().map(|radio| radio.name.as_str()).collect();
            anyhow::bail!(
                "none of {} exists, so {} has no address: `ip link` lists the devices; or give it an address with --mac",
                names.join(", "),
                settings.name
            )
        }
    };
    match known.iter().find(|(_, other)| *other != mac) {
        None => Ok(mac),
        Some((name, other)) => anyhow::bail!(
            "{name} has the address {other} and {first} has {mac}: a host has one address in the network; set it with `ip link set {name} address {mac}` \
             (while {name} is off)"
        ),
    }
}

/// What directs a device.
struct Client {
    station: Station,
    device: AdhocControls,
    /// The device's address.
    own: Mac,
    /// What the device was told last.
    served: Option<Served>,
    /// The same radios, for their tasks.
    used: watch::Sender<u32>,
    radios: Vec<mpsc::Sender<Order>>,
    /// Lines to the controller, while there is a connection.
    session: Option<mpsc::Sender<String>>,
    /// What the controller refused last.
    refusal: String,
    /// When something that the controller said was logged last.
    logged: Option<Time>,
    free: watch::Sender<FreeCapacity>,
    reserve: watch::Receiver<PerDirection<Rate>>,
    /// What the network keeps, and why not more, as the controller said last on this connection.
    kept: Vec<(AccessId, PerDirection<Rate>)>,
    reason: Option<String>,
    reservation: watch::Sender<Option<NetworkReservation>>,
}

impl Client {
    /// Directs the radios until the other end of `ended` is dropped.
    async fn run(
        mut self,
        radios: Vec<(String, Option<Mac>)>,
        directory: &Path,
        network: watch::Receiver<Arc<NetworkSnapshot>>,
        (controller, connector): (SocketAddr, TlsConnector),
        mut ended: watch::Receiver<()>,
    ) {
        let (news, mut from_radios) = mpsc::channel(64);
        let mut following = Vec::new();
        for (place, (name, access)) in radios.into_iter().enumerate() {
            let (orders, given) = mpsc::channel(8);
            self.radios.push(orders);
            let radio = Radio {
                place,
                name,
                own: self.own,
                access,
                directory: directory.to_owned(),
                network: network.clone(),
                in_use: self.used.subscribe(),
                news: news.clone(),
                trouble: String::new(),
            };
            following.push(tokio::spawn(radio.follow(given)));
        }
        let (talk, mut from_controller) = mpsc::channel(64);
        let talking = tokio::spawn(keep_talking(controller, connector, talk));
        let mut reserve = self.reserve.clone();
        reserve.mark_changed();
        self.update();
        loop {
            tokio::select! {
                _ = ended.changed() => break,
                Some(news) = from_radios.recv() => match news {
                    News::State(place, state) => self.station.on_radio(place, state),
                    News::Enters(place, enters) => self.station.set_enters(place, enters),
                    News::Signals(signals) => self.station.on_signals(now(), signals),
                },
                Some(talk) = from_controller.recv() => self.on_talk(talk),
                Ok(()) = reserve.changed() => self.station.set_reserve(*reserve.borrow_and_update()),
            }
            self.update();
        }
        talking.abort();
        self.reservation.send_replace(None);
        self.radios.clear();
        let end = Instant::now() + FREED;
        for mut task in following {
            if timeout_at(end, &mut task).await.is_err() {
                task.abort();
            }
        }
    }

    fn on_talk(&mut self, talk: Talk) {
        match talk {
            Talk::Begins(session) => {
                self.session = Some(session);
                self.station.connected();
            }
            Talk::Message(Message::Notice(notice)) => {
                tracing::debug!("the controller: {notice:?}");
                self.station.on_notice(notice);
            }
            Talk::Message(Message::Welcome(host)) if host != self.own => {
                if self.may_log() {
                    tracing::warn!(
                        "the controller knows this client as host {host}, and its device has the address {}: give the radios that address, or change the \
                         controller's configuration",
                        self.own
                    );
                }
            }
            // The controller may be anybody.
            Talk::Message(Message::Refused(reason)) => {
                self.log_refusal(reason.chars().take(MAX_REASON).collect());
            }
            Talk::Message(Message::Reserved { kept, reason }) => {
                (self.kept, self.reason) = (kept, reason.map(|reason| reason.chars().take(MAX_REASON).collect()));
                if let Some(reason) = self.reason.clone() {
                    self.log_refusal(reason);
                }
            }
            Talk::Message(Message::Free(free)) => {
                let in_use = self.station.access_in_use();
                let free = free.into_iter().find(|(access, _)| Some(*access) == in_use);
                self.free.send_replace(free.map(|(_, free)| free));
            }
            Talk::Message(Message::Welcome(_) | Message::Loads(_)) => {}
            Talk::Ends { silent } => {
                if silent {
                    self.station.unanswered();
                }
                self.session = None;
                (self.kept, self.reason) = (Vec::new(), None);
                self.free.send_replace(None);
                self.station.disconnected();
            }
        }
    }

    fn log_refusal(&mut self, reason: String) {
        if reason != self.refusal && self.may_log() {
            tracing::warn!("the controller refused something: {reason:?}");
            self.refusal = reason;
        }
    }

    /// What became of what the network is asked to reserve.
    fn reservation(&self) -> Option<NetworkReservation> {
        let asked = *self.reserve.borrow();
        if asked == PerDirection::default() {
            return None;
        }
        let in_use = self.station.access_in_use();
        let stands = self.kept.iter().any(|(access, rates)| in_use.is_none_or(|in_use| in_use == *access) && *rates == asked);
        let silent =
            if self.session.is_some() { "the controller has not answered yet" } else { "there is no connection to the controller" };
        let kept = self.kept.iter().map(|(access, rates)| NetworkKept {
            access: access.to_string(),
            down_bps: rates.down.bps(),
            up_bps: rates.up.bps(),
        });
        Some(NetworkReservation {
            asked_down_bps: asked.down.bps(),
            asked_up_bps: asked.up.bps(),
            kept: kept.collect(),
            reason: self.reason.clone().or_else(|| (!stands).then(|| silent.to_owned())),
        })
    }

    /// Whether something that the controller said may be logged now: it may say as much as it likes.
    fn may_log(&mut self) -> bool {
        let may = self.logged.is_none_or(|logged| now().since(logged) >= LOGGED);
        if may {
            self.logged = Some(now());
        }
        may
    }

    /// Does what follows from the last event: first the device, so that it drops copies before the network may send some.
    fn update(&mut self) {
        let served = self.station.served();
        if self.served != Some(served) {
            self.served = Some(served);
            self.used.send_replace(served.over);
            self.device.serve(served);
        }
        let reservation = self.reservation();
        let changed = |shown: &mut Option<NetworkReservation>| {
            *shown != reservation && {
                shown.clone_from(&reservation);
                true
            }
        };
        if self.reservation.send_if_modified(changed) {
            self.device.show_reservation(reservation);
        }
        while let Some(order) = self.station.poll_order() {
            let (Order::Enter { radio, .. } | Order::Leave { radio } | Order::Free { radio }) = order;
            // A radio that does not follow has enough to do.
            let _ = self.radios[radio].try_send(order);
        }
        while let Some(report) = self.station.poll_report() {
            let Some(session) = &self.session else { continue };
            if !matches!(report, Report::Signals(_)) {
                tracing::debug!("to the controller: {report:?}");
            }
            if session.try_send(encode_report(&report)).is_err() {
                // It gets the whole state again with the next connection.
                self.session = None;
            }
        }
    }
}

/// What a radio's task reports.
enum News {
    State(usize, RadioState),
    /// Whether it can enter an access point that it is told.
    Enters(usize, bool),
    Signals(Vec<(AccessId, Signal)>),
}

/// A radio.
struct Radio {
    place: usize,
    name: String,
    /// The device's address, which it must have.
    own: Mac,
    /// The access point at the other end of a cable.
    access: Option<Mac>,
    directory: PathBuf,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    /// A bit for each radio over which frames leave.
    in_use: watch::Receiver<u32>,
    news: mpsc::Sender<News>,
    /// What was logged last.
    trouble: String,
}

impl Radio {
    async fn follow(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            let has_socket = self.access.is_none() && self.directory.join(&self.name).exists();
            if has_socket {
                let followed = match shared::random().map(|own| (self.directory.clone(), self.name.clone(), own)) {
                    Ok((directory, name, own)) => match Supplicant::open(&directory, &name, own).await {
                        Ok(supplicant) => self.by_supplicant(supplicant, &mut orders).await.map_err(|error| error.to_string()),
                        Err(error) => Err(error.to_string()),
                    },
                    Err(error) => Err(error.to_string()),
                };
                match followed {
                    Ok(()) => return,
                    Err(error) => self.complain(format!("wpa_supplicant cannot be used: {error}; the carrier says whether it has a link")),
                }
            }
            if timeout(RETRIED, self.by_carrier(&mut orders)).await.is_ok() {
                return;
            }
        }
    }

    fn complain(&mut self, trouble: String) {
        if self.trouble != trouble {
            tracing::warn!("{}: {trouble}", self.name);
            self.trouble = trouble;
        }
    }

    /// Reports a state. A radio with another address has no link to this network. `false`: nobody listens any more.
    async fn tell(&mut self, state: RadioState) -> bool {
        let other = self.network.borrow().interfaces.iter().find(|facts| facts.name == self.name).and_then(|facts| facts.mac);
        let state = match other.filter(|other| *other != self.own) {
            None => state,
            Some(other) => {
                self.complain(format!(
                    "it has the address {other} and the device has {}, so it is not used: set it with `ip link set {} address {1}`, and keep other \
                     programs from changing it (NetworkManager: wifi.cloned-mac-address)",
                    self.own, self.name
                ));
                RadioState::Idle
            }
        };
        self.news.send(News::State(self.place, state)).await.is_ok()
    }

    fn is_in_use(&self) -> bool {
        *self.in_use.borrow() & 1 << self.place != 0
    }

    /// Follows the carrier until this process ends.
    async fn by_carrier(&mut self, orders: &mut mpsc::Receiver<Order>) {
        let _ = self.news.send(News::Enters(self.place, false)).await;
        loop {
            let is_attached = has_carrier(&self.network.borrow_and_update(), &self.name);
            if !self.tell(if is_attached { RadioState::Attached(self.access.map(AccessId)) } else { RadioState::Idle }).await {
                return;
            }
            tokio::select! {
                changed = self.network.changed() => if changed.is_err() { return },
                order = orders.recv() => if order.is_none() { return },
            }
        }
    }

    /// Follows wpa_supplicant until that or this process ends.
    async fn by_supplicant(&mut self, mut supplicant: Supplicant, orders: &mut mpsc::Receiver<Order>) -> std::io::Result<()> {
        let _ = self.news.send(News::Enters(self.place, true)).await;
        let mut state = supplicant.state().await?;
        // One that was killed may have bound it to an access point.
        supplicant.unbind().await?;
        let mut read = interval(SIGNALS);
        let mut readings = 0u32;
        loop {
            if matches!(state, WifiState::Attached(_)) {
                supplicant.unbind().await?;
                // Until the kernel has seen it, frames to and from this radio are dropped.
                let name = self.name.clone();
                let _ = timeout(CARRIER, self.network.wait_for(|network| has_carrier(network, &name))).await;
            }
            if !self.tell(radio_state(state)).await {
                return supplicant.free_if_idle(state).await;
            }
            tokio::select! {
                changed = supplicant.changed() => state = changed?,
                order = orders.recv() => {
                    // What waits when this process ends is not carried out any more.
                    let outcome = match order.filter(|_| !orders.is_closed()) {
                        None => return supplicant.free_if_idle(state).await,
                        // They were given before this radio came into use.
                        Some(Order::Leave { .. } | Order::Enter { interrupts: false, .. }) if self.is_in_use() => Ok(()),
                        Some(Order::Leave { .. }) => supplicant.leave().await,
                        Some(Order::Enter { access, channel, .. }) => supplicant.enter(access.0, channel.0).await,
                        Some(Order::Free { .. }) => supplicant.free().await,
                    };
                    if let Err(error) = outcome {
                        self.complain(error.to_string());
                    }
                    supplicant.ping().await?;
                },
                _ = read.tick() => {
                    readings = readings.wrapping_add(1);
                    if readings.is_multiple_of(SCANNED) && !self.is_in_use() {
                        supplicant.scan().await?;
                    }
                    let (now, signals) = supplicant.look().await?;
                    state = now;
                    let signals = signals.into_iter().map(|(bssid, dbm)| (AccessId(bssid), Signal(dbm)));
                    if self.news.send(News::Signals(signals.collect())).await.is_err() {
                        return supplicant.free_if_idle(state).await;
                    }
                },
            }
        }
    }
}

fn has_carrier(network: &NetworkSnapshot, radio: &str) -> bool {
    network.interfaces.iter().any(|facts| facts.name == radio && facts.carrier)
}

fn radio_state(state: WifiState) -> RadioState {
    // The driver for cables names a group address.
    let access = |bssid: Mac| Some(AccessId(bssid)).filter(|_| bssid.0[0] & 1 == 0);
    match state {
        WifiState::Idle => RadioState::Idle,
        WifiState::Entering(bssid) => access(bssid).map_or(RadioState::Idle, RadioState::Entering),
        WifiState::Attached(bssid) => RadioState::Attached(access(bssid)),
    }
}

/// What the task of the connection to the controller reports.
enum Talk {
    /// A connection stands. It takes lines.
    Begins(mpsc::Sender<String>),
    Message(Message),
    /// There is none. `silent`: what was sent got no answer.
    Ends {
        silent: bool,
    },
}

/// Connects to the controller again and again, as long as somebody listens.
async fn keep_talking(controller: SocketAddr, connector: TlsConnector, talk: mpsc::Sender<Talk>) {
    let (mut trouble, mut delay) = (String::new(), CONNECTED_AGAIN.0);
    while !talk.is_closed() {
        let begin = now();
        let (error, silent) = match converse(controller, &connector, &talk).await {
            Ok(()) => ("it has closed the connection".to_owned(), false),
            Err(error) => (format!("{error:#}"), is_silence(&error)),
        };
        let lasted = now().since(begin) >= LASTED;
        if trouble != error || lasted {
            tracing::warn!("no controller at {controller}: {error:?}; trying again. The device uses a radio that has a link");
            trouble = error;
        }
        if talk.send(Talk::Ends { silent }).await.is_err() {
            return;
        }
        sleep(delay).await;
        delay = if lasted { CONNECTED_AGAIN.0 } else { CONNECTED_AGAIN.1.min(delay * 2) };
    }
}

/// Whether what was sent got no answer, in time or at all.
fn is_silence(error: &anyhow::Error) -> bool {
    let silent = [ErrorKind::TimedOut, ErrorKind::HostUnreachable];
    error
        .chain()
        .any(|cause| cause.is::<Elapsed>() || cause.downcast_ref().is_some_and(|error: &std::io::Error| silent.contains(&error.kind())))
}

async fn converse(controller: SocketAddr, connector: &TlsConnector, talk: &mpsc::Sender<Talk>) -> anyhow::Result<()> {
    let stream = timeout(CONNECT, TcpStream::connect(controller)).await.context("it does not answer")??;
    set_up(&stream);
    let name = ServerName::try_from(SERVER_NAME).context("the name of servers is none")?;
    let secured = timeout(HANDSHAKE, connector.connect(name, stream)).await.context("it does not answer in TLS")?;
    let secured = secured.context("it does not prove the key that --controller-key names, or takes no clients there")?;
    let key = stream_key(secured.get_ref().1.peer_certificates()).context("it has shown no key")?;
    let (reading, mut writing) = tokio::io::split(secured);
    let (session, mut lines) = mpsc::channel::<String>(64);
    tracing::info!("connected to the controller at {controller} with the key {key}");
    talk.send(Talk::Begins(session)).await?;
    let reader = async {
        let mut reader = BufReader::new(reading);
        while let Some(line) = read_line(&mut reader).await? {
            // What a later version says is no reason to end.
            if let Some(message) = decode_message(&line)? {
                talk.send(Talk::Message(message)).await?;
            }
        }
        anyhow::Ok(())
    };
    let writer = async {
        while let Some(line) = lines.recv().await {
            writing.write_all(line.as_bytes()).await?;
            writing.flush().await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        read = reader => read,
        written = writer => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_api::{AdhocChange, AdhocUp};
    use braid_model::{LinkFacts, LinkIndex, LinkKind};

    #[test]
    fn all_radios_have_one_address() {
        let settings = |mac: Option<&str>| {
            let change = AdhocChange { add: vec!["wlan0".into(), "wlan1".into(), "later".into()], ..AdhocChange::default() };
            AdhocSettings::of(&AdhocUp { mac: mac.map(str::to_owned), settings: change, ..AdhocUp::default() }).unwrap()
        };
        let network = |last: &[u8]| {
            let facts = |(place, last): (usize, &u8)| LinkFacts {
                mac: Some(Mac([2, 0, 0, 0, 0, *last])),
                ..LinkFacts::new(LinkIndex(place as u32 + 2), format!("wlan{place}"), LinkKind::Wireless)
            };
            NetworkSnapshot { interfaces: last.iter().enumerate().map(facts).collect(), ..NetworkSnapshot::default() }
        };
        let found = |mac, last: &[u8]| common_address(&settings(mac), &network(last)).map_err(|error| error.to_string());
        assert_eq!(found(None, &[7, 7]), Ok(Mac([2, 0, 0, 0, 0, 7])));
        assert_eq!(found(Some("02:00:00:00:00:08"), &[]), Ok(Mac([2, 0, 0, 0, 0, 8])));
        let error = found(None, &[7, 8]).unwrap_err();
        assert!(error.contains("wlan1 has the address 02:00:00:00:00:08 and wlan0 has 02:00:00:00:00:07"), "{error}");
        assert!(error.contains("`ip link set wlan1 address 02:00:00:00:00:07`"), "{error}");
        assert!(found(Some("02:00:00:00:00:08"), &[7]).unwrap_err().contains("vi0 has 02:00:00:00:00:08"));
        assert!(found(None, &[]).unwrap_err().contains("none of wlan0, wlan1, later exists"));
    }
}
