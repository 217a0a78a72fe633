//! A client of a network with a controller (`braid net join`): one Ethernet device over several radios, which enter and leave access points as the controller
//! says (thesis chapter 5).
//!
//! The device is that of `braid adhoc`; the controller chooses its radios instead of the neighbours. [`Station`] decides; this is the I/O around it. Without a
//! controller, the device uses a radio that is attached.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use braid_api::AdhocUp;
use braid_control::adhoc::AdhocSettings;
use braid_http::{Api, Server, Serving};
use braid_model::key::PublicKey;
use braid_model::{Mac, NetworkSnapshot};
use braid_network::mobility::Report;
use braid_network::station::{Order, RadioState, Served, Station};
use braid_network::wire::{ALPN, Message, decode_message, encode_report};
use braid_network::{AccessId, Signal};
use braid_peer::keys::{CLIENT_KEY, KeyPair};
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
use tokio::sync::{mpsc, watch};
use tokio::time::{interval, sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::adhoc::AdhocThread;
use crate::lines::{HANDSHAKE, read_line, set_up};
use crate::system::notify;

/// Default name of the device.
pub const DEFAULT_NAME: &str = "net0";
/// Time between two readings of a Wi-Fi radio's signals.
const SIGNALS: Duration = Duration::from_secs(2);
/// Time after which wpa_supplicant is looked for again.
const RETRIED: Duration = Duration::from_secs(5);
/// Delay before the next connection to the controller.
const CONNECTED_AGAIN: Duration = Duration::from_secs(1);
/// Time to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval at which this process looks whether the device is still there.
const LOOKED: Duration = Duration::from_millis(500);

/// How a client joins a network.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// The device and its radios.
    pub up: AdhocUp,
    /// The access points of radios that are at one always, such as cables, in the order of the radios.
    pub accesses: Vec<Option<Mac>>,
    /// Where the controller takes clients.
    pub controller: SocketAddr,
    /// Its key; `None`: any.
    pub controller_key: Option<PublicKey>,
    /// Directory with this client's key.
    pub state_dir: PathBuf,
    /// Directory with the sockets of wpa_supplicant.
    pub supplicants: PathBuf,
}

/// The public key of the client with this state directory. A new pair is made if there is none.
///
/// # Errors
/// The directory or the key cannot be used.
pub fn client_key(state_dir: &Path) -> anyhow::Result<PublicKey> {
    Ok(KeyPair::load_or_generate(&StateDir::open(state_dir)?, CLIENT_KEY)?.public())
}

/// Serves the device until a signal, or `braid adhoc down`, ends it. `ready` is called once the device exists.
///
/// # Errors
/// The options name no device that can be made, the key cannot be read, or the socket not be served.
pub fn run(options: JoinOptions, socket: &Path, ready: impl FnOnce(&str)) -> anyhow::Result<()> {
    crate::privilege::check_adhoc()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(serve(options, socket, ready));
    runtime.shutdown_background();
    result
}

async fn serve(options: JoinOptions, socket: &Path, ready: impl FnOnce(&str)) -> anyhow::Result<()> {
    let settings = AdhocSettings::of(&options.up).map_err(|error| anyhow::anyhow!("{}", error.detail))?;
    let keys = KeyPair::load_or_generate(&StateDir::open(&options.state_dir)?, CLIENT_KEY)?;
    let expect = options.controller_key.map_or(Expect::Any, Expect::Pinned);
    let connector = TlsConnector::from(Arc::new(stream_client(Some(&keys), expect, ALPN)?));
    let server = Server::bind(socket)?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut programs = Some(AdhocPrograms::load()?);
    // Before any other thread starts, which keeps the privileges that it starts with.
    crate::privilege::narrow(false).context("cannot drop the privileges that are no longer needed")?;
    let (_follower, network) = Follower::start()?;
    let mac = common_address(&settings, &network.borrow())?;
    let settings = AdhocSettings { mac: Some(mac), ..settings };
    let radios: Vec<String> = settings.radios.iter().map(|radio| radio.name.clone()).collect();
    let device = AdhocThread::start(settings, &mut programs, network.clone()).map_err(|error| anyhow::anyhow!("{}", error.detail))?;
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, None, api, spreader).context("cannot serve the API")?;

    let (news, mut from_radios) = mpsc::channel(64);
    let mut client = Client { station: Station::new(radios.len()), device, served: None, radios: Vec::new(), session: None };
    for (place, name) in radios.into_iter().enumerate() {
        let (orders, given) = mpsc::channel(8);
        client.radios.push(orders);
        let access = options.accesses.get(place).copied().flatten();
        let radio = Radio { place, name, access, directory: options.supplicants.clone(), network: network.clone(), news: news.clone() };
        tokio::spawn(radio.follow(given));
    }
    let (talk, mut from_controller) = mpsc::channel(64);
    tokio::spawn(keep_talking(options.controller, connector, talk));
    client.update().await;
    ready(client.device.name());
    notify("READY=1");
    let mut look = interval(LOOKED);
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = look.tick() => if client.device.has_ended() {
                anyhow::bail!("{} is gone: somebody has removed it", client.device.name());
            },
            Some(news) = from_radios.recv() => match news {
                News::State(place, state) => client.station.on_radio(place, state),
                News::Signals(signals) => client.station.on_signals(now(), signals),
            },
            Some(talk) = from_controller.recv() => client.on_talk(talk, mac),
            request = inbox.recv() => if request.is_none_or(|request| !client.device.answer(request)) {
                break;
            },
        }
        client.update().await;
    }
    drop(client);
    serving.end(Duration::from_secs(2)).await;
    Ok(())
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

/// The client, and what belongs to it.
struct Client {
    station: Station,
    device: AdhocThread,
    /// What the device was told last.
    served: Option<Served>,
    radios: Vec<mpsc::Sender<Order>>,
    /// Lines to the controller, while there is a connection.
    session: Option<mpsc::Sender<String>>,
}

impl Client {
    fn on_talk(&mut self, talk: Talk, own: Mac) {
        match talk {
            Talk::Begins(session) => {
                self.session = Some(session);
                self.station.connected();
            }
            Talk::Message(Message::Notice(notice)) => {
                tracing::debug!("the controller: {notice:?}");
                self.station.on_notice(notice);
            }
            Talk::Message(Message::Welcome(host)) if host != own => tracing::warn!(
                "the controller knows this client as host {host}, and its device has the address {own}: give the radios that address, or change the \
                 controller's configuration"
            ),
            Talk::Message(Message::Refused(reason)) => tracing::warn!("the controller refused something: {reason}"),
            Talk::Message(Message::Welcome(_) | Message::Loads(_)) => {}
            Talk::Ends => {
                self.session = None;
                self.station.disconnected();
            }
        }
    }

    /// Does what follows from the last event: first the device, so that it drops copies before the network may send some.
    async fn update(&mut self) {
        let served = self.station.served();
        if self.served != Some(served) {
            self.served = Some(served);
            self.device.serve(served.over, served.merges);
        }
        while let Some(order) = self.station.poll_order() {
            let (Order::Enter { radio, .. } | Order::Leave { radio }) = order;
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
    Signals(Vec<(AccessId, Signal)>),
}

/// A radio.
struct Radio {
    place: usize,
    name: String,
    /// The access point at the other end of a cable.
    access: Option<Mac>,
    directory: PathBuf,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    news: mpsc::Sender<News>,
}

impl Radio {
    async fn follow(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut trouble = None;
        loop {
            if self.access.is_none()
                && let Ok(supplicant) = Supplicant::open(&self.directory, &self.name).await
            {
                let error = match self.by_supplicant(supplicant, &mut orders).await {
                    Ok(()) => return,
                    Err(error) => error.to_string(),
                };
                if trouble.as_ref() != Some(&error) {
                    tracing::warn!("{}: {error}; its carrier says whether it has a link", self.name);
                    trouble = Some(error);
                }
            }
            if timeout(RETRIED, self.by_carrier(&mut orders)).await.is_ok() {
                return;
            }
        }
    }

    /// Follows the carrier until this process ends.
    async fn by_carrier(&mut self, orders: &mut mpsc::Receiver<Order>) {
        loop {
            let has_carrier = self.network.borrow_and_update().interfaces.iter().any(|facts| facts.name == self.name && facts.carrier);
            let state = if has_carrier { RadioState::Attached(self.access.map(AccessId)) } else { RadioState::Idle };
            if self.news.send(News::State(self.place, state)).await.is_err() {
                return;
            }
            tokio::select! {
                changed = self.network.changed() => if changed.is_err() { return },
                Some(order) = orders.recv() => tracing::warn!(
                    "{} cannot do what the controller asks ({order:?}): no wpa_supplicant answers in {}; name its directory with --supplicant",
                    self.name, self.directory.display()
                ),
            }
        }
    }

    /// Follows wpa_supplicant until that or this process ends.
    async fn by_supplicant(&mut self, mut supplicant: Supplicant, orders: &mut mpsc::Receiver<Order>) -> std::io::Result<()> {
        let mut state = supplicant.state().await?;
        let mut read = interval(SIGNALS);
        loop {
            if self.news.send(News::State(self.place, radio_state(state))).await.is_err() {
                return Ok(());
            }
            tokio::select! {
                changed = supplicant.changed() => state = changed?,
                order = orders.recv() => {
                    let outcome = match order {
                        None => return Ok(()),
                        Some(Order::Enter { access, channel, .. }) => supplicant.enter(access.0, channel.0).await,
                        Some(Order::Leave { .. }) => supplicant.leave().await,
                    };
                    if let Err(error) = outcome {
                        tracing::warn!("{}: {error}", self.name);
                    }
                    supplicant.ping().await?;
                },
                _ = read.tick() => {
                    let signals = supplicant.signals().await?.into_iter().map(|(bssid, dbm)| (AccessId(bssid), Signal(dbm)));
                    if self.news.send(News::Signals(signals.collect())).await.is_err() {
                        return Ok(());
                    }
                },
            }
        }
    }
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
    Ends,
}

/// Connects to the controller again and again, as long as somebody listens.
async fn keep_talking(controller: SocketAddr, connector: TlsConnector, talk: mpsc::Sender<Talk>) {
    let mut trouble = None;
    while !talk.is_closed() {
        let error = match converse(controller, &connector, &talk).await {
            Ok(()) => "it has closed the connection".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        if trouble.as_ref() != Some(&error) {
            tracing::warn!("no controller at {controller}: {error}; trying again. The device uses a radio that has a link");
            trouble = Some(error);
        }
        if talk.send(Talk::Ends).await.is_err() {
            return;
        }
        sleep(CONNECTED_AGAIN).await;
    }
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
    use braid_api::AdhocChange;
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
