//! The slicer of SNMP (`braid net snmp-slicer`): sockets, the clock and files around [`braid_snmp::Slicer`].
//!
//! One task owns the slicer. Every socket has a task that reads, and waits its turn to hand over a datagram, so that a flood on one does not hold up the
//! others. Texts to store are written by a task of their own, one after another.

mod files;
mod secrets;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use braid_config::snmp_slicer::SlicerConfig;
use braid_peer::shared;
use braid_peer::state::StateDir;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::sys::process::raise_open_files;
use braid_snmp::{Identity, MAX_MESSAGE, Output, Slicer};
use tokio::net::UdpSocket;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::limited_log::LimitedLog;
use crate::system::notify;
use files::Files;

/// Datagrams that may wait. Readers then wait, in turn.
const MAX_WAITING: usize = 64;
/// Delay after an error of a socket.
const READ_AGAIN: Duration = Duration::from_millis(20);

/// Where a slicer answers for a device.
#[derive(Debug, Clone)]
pub struct Front {
    /// The device.
    pub device: String,
    /// Where managers ask for it.
    pub listen: SocketAddr,
}

/// Reads the configuration and its secrets, and uses nothing of it.
///
/// # Errors
/// The configuration is refused, or a file of a secret is not usable.
pub fn check(config: &Path) -> anyhow::Result<()> {
    read(config).map(drop)
}

/// Runs a slicer until a signal ends it. `ready` is called once managers can ask.
///
/// # Errors
/// The configuration is refused, an address cannot be listened on, or the state directory cannot be used.
pub fn run(config: &Path, state_dir: &Path, ready: impl FnOnce(&[Front])) -> anyhow::Result<()> {
    let _ = raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(serve(config, state_dir, ready));
    runtime.shutdown_background();
    result
}

fn read(path: &Path) -> anyhow::Result<(SlicerConfig, braid_snmp::Setup)> {
    let config = braid_config::snmp_slicer::load(path)?;
    config.warnings.iter().for_each(|finding| tracing::warn!("{finding}"));
    let setup = secrets::setup(&config)?;
    Ok((config, setup))
}

async fn serve(path: &Path, state_dir: &Path, ready: impl FnOnce(&[Front])) -> anyhow::Result<()> {
    let (config, setup) = read(path)?;
    let directory = StateDir::open(state_dir)?;
    let files = Files::open(directory.path())?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot handle SIGHUP")?;
    let (arrivals, mut arrived) = mpsc::channel(MAX_WAITING);
    let sockets = Sockets::open(&config, BTreeMap::new(), &arrivals).await?;
    let fronts: Vec<Front> = config.devices.iter().map(|one| Front { device: one.name.clone(), listen: one.listen }).collect();
    let mut slicer = Slicer::new(now(), &identity(&files)?, setup);
    files.restore(&mut slicer);
    let texts = write_texts(files.clone(), arrivals.clone());
    let mut running =
        Running { path: path.to_owned(), files, slicer, sockets, generation: 0, texts, log: LimitedLog::new(now()), arrivals };
    ready(&fronts);
    notify("READY=1");
    loop {
        let due = running.slicer.poll_timeout().map_or(Duration::from_secs(3600), |due| due.since(now()));
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = hangup.recv() => running.reload().await,
            Some(arrival) = arrived.recv() => running.on_arrival(arrival),
            () = sleep_until(Instant::now() + due) => {}
        }
        // What has arrived counts before what is due: an answer that waits is no silence.
        for _ in 0..MAX_WAITING {
            let Ok(arrival) = arrived.try_recv() else { break };
            running.on_arrival(arrival);
        }
        if running.slicer.poll_timeout().is_some_and(|due| due <= now()) {
            running.slicer.handle_timeout(now());
        }
        running.pump();
    }
    Ok(())
}

fn identity(files: &Files) -> anyhow::Result<Identity> {
    let (engine, boots) = files.start()?;
    let mut seed = [0; 32];
    for part in seed.chunks_exact_mut(8) {
        part.copy_from_slice(&shared::random()?.to_ne_bytes());
    }
    Ok(Identity { engine, boots, seed })
}

/// What a socket is for. Devices are meant by their places in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Managers,
    Agent,
    Notifications,
}

/// Something happened.
enum Arrival {
    Datagram { generation: u64, purpose: Purpose, device: usize, from: SocketAddr, bytes: Vec<u8> },
    Stored { generation: u64, job: Option<u64>, is_stored: bool },
}

/// A text to store.
struct Text {
    generation: u64,
    job: Option<u64>,
    text: String,
}

struct Running {
    path: PathBuf,
    files: Files,
    slicer: Slicer,
    sockets: Sockets,
    /// Increases with the configuration.
    generation: u64,
    texts: mpsc::UnboundedSender<Text>,
    log: LimitedLog,
    arrivals: mpsc::Sender<Arrival>,
}

impl Running {
    fn on_arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Datagram { generation, purpose, device, from, bytes } if generation == self.generation => match purpose {
                Purpose::Managers => self.slicer.receive_request(now(), device, from, &bytes),
                Purpose::Agent => self.slicer.receive_answer(now(), device, &bytes),
                // Only the device's agent notifies for it.
                Purpose::Notifications if from.ip().to_canonical() == self.sockets.agent_address(device) => {
                    self.slicer.receive_notification(now(), device, from, &bytes);
                }
                Purpose::Notifications => {
                    self.log.write(&format!("a notification of {from} was dropped: the agent of this device has another address"), true);
                }
            },
            Arrival::Stored { generation, job, is_stored } if generation == self.generation => {
                self.slicer.stored(now(), job, is_stored);
            }
            Arrival::Datagram { .. } | Arrival::Stored { .. } => {}
        }
        self.pump();
    }

    /// Sends and stores what the slicer gives out, and logs what it reports.
    fn pump(&mut self) {
        while let Some(output) = self.slicer.poll_output() {
            match output {
                Output::ToManager { device, to, bytes } => self.sockets.send(Purpose::Managers, device, Some(to), &bytes),
                Output::ToAgent { device, bytes } => self.sockets.send(Purpose::Agent, device, None, &bytes),
                Output::ToNotifier { device, to, bytes } => self.sockets.send(Purpose::Notifications, device, Some(to), &bytes),
                Output::Store { job, text } => drop(self.texts.send(Text { generation: self.generation, job, text })),
            }
        }
        while let Some(event) = self.slicer.poll_event() {
            self.log.write(&event.to_string(), event.is_trouble());
        }
    }

    /// Reads the configuration again. All of it comes into force, or nothing. It counts as a start of the engine, since requests to set are forgotten that
    /// must not be carried out twice.
    async fn reload(&mut self) {
        match self.renewed().await {
            Ok(()) => tracing::info!("the configuration has been read again"),
            Err(error) => tracing::error!("the configuration was not read again, and the former one stays in force: {error:#}"),
        }
    }

    async fn renewed(&mut self) -> anyhow::Result<()> {
        let (config, setup) = read(&self.path)?;
        let kept = self.sockets.listeners();
        let sockets = Sockets::bind(&config, kept).await?;
        let identity = identity(&self.files)?;
        let mut slicer = Slicer::new(now(), &identity, setup);
        let text = self.slicer.to_store();
        slicer.restore(now(), &text).context("cannot keep what slices have asked for")?;
        self.generation += 1;
        self.slicer = slicer;
        self.sockets = Sockets::read(sockets, self.generation, &self.arrivals);
        // The former slicer may have given out what never counted.
        let _ = self.texts.send(Text { generation: self.generation, job: None, text: self.slicer.to_store() });
        Ok(())
    }
}

/// Writes texts one after another.
fn write_texts(files: Files, arrivals: mpsc::Sender<Arrival>) -> mpsc::UnboundedSender<Text> {
    // Each device has one request to set under way, so few texts wait.
    let (sender, mut texts) = mpsc::unbounded_channel::<Text>();
    tokio::spawn(async move {
        while let Some(Text { generation, job, text }) = texts.recv().await {
            let files = files.clone();
            let written = tokio::task::spawn_blocking(move || files.store(&text)).await;
            let is_stored = matches!(written, Ok(Ok(())));
            if let Ok(Err(error)) = written {
                tracing::error!("{error:#}");
            }
            if arrivals.send(Arrival::Stored { generation, job, is_stored }).await.is_err() {
                break;
            }
        }
    });
    sender
}

/// The sockets of the devices.
struct Sockets {
    devices: Vec<DeviceSockets>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Clone)]
struct DeviceSockets {
    managers: Arc<UdpSocket>,
    agent: Arc<UdpSocket>,
    agent_address: SocketAddr,
    notifications: Option<Arc<UdpSocket>>,
}

impl Drop for Sockets {
    fn drop(&mut self) {
        self.readers.iter().for_each(JoinHandle::abort);
    }
}

impl Sockets {
    async fn open(
        config: &SlicerConfig,
        kept: BTreeMap<SocketAddr, Arc<UdpSocket>>,
        arrivals: &mpsc::Sender<Arrival>,
    ) -> anyhow::Result<Self> {
        Ok(Self::read(Self::bind(config, kept).await?, 0, arrivals))
    }

    /// Opens the sockets that are not open yet.
    async fn bind(config: &SlicerConfig, kept: BTreeMap<SocketAddr, Arc<UdpSocket>>) -> anyhow::Result<Vec<DeviceSockets>> {
        let listen = async |address: SocketAddr, device: &str| -> anyhow::Result<Arc<UdpSocket>> {
            if let Some(socket) = kept.get(&address) {
                return Ok(socket.clone());
            }
            let remedy =
                || format!("cannot listen on {address} for the device {device}: end what uses it, or choose another address in [[device]]");
            Ok(Arc::new(UdpSocket::bind(address).await.with_context(remedy)?))
        };
        let mut devices = Vec::new();
        for device in &config.devices {
            let any = if device.agent.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
            let remedy =
                || format!("cannot send to {}, the agent of the device {}: check `agent` in [[device]]", device.agent, device.name);
            let agent = UdpSocket::bind((any, 0)).await.with_context(remedy)?;
            agent.connect(device.agent).await.with_context(remedy)?;
            let notifications = match device.notifications {
                Some(address) => Some(listen(address, &device.name).await?),
                None => None,
            };
            let managers = listen(device.listen, &device.name).await?;
            devices.push(DeviceSockets { managers, agent: Arc::new(agent), agent_address: device.agent, notifications });
        }
        Ok(devices)
    }

    /// Reads from all.
    fn read(devices: Vec<DeviceSockets>, generation: u64, arrivals: &mpsc::Sender<Arrival>) -> Self {
        let mut readers = Vec::new();
        for (place, device) in devices.iter().enumerate() {
            let all = [
                (Purpose::Managers, Some(&device.managers)),
                (Purpose::Agent, Some(&device.agent)),
                (Purpose::Notifications, device.notifications.as_ref()),
            ];
            for (purpose, socket) in all {
                let Some(socket) = socket else { continue };
                readers.push(tokio::spawn(receive(socket.clone(), generation, purpose, place, arrivals.clone())));
            }
        }
        Self { devices, readers }
    }

    /// The sockets that listen, by their addresses.
    fn listeners(&self) -> BTreeMap<SocketAddr, Arc<UdpSocket>> {
        let all = self.devices.iter().flat_map(|one| [Some(&one.managers), one.notifications.as_ref()]).flatten();
        all.filter_map(|socket| Some((socket.local_addr().ok()?, socket.clone()))).collect()
    }

    fn agent_address(&self, device: usize) -> IpAddr {
        self.devices[device].agent_address.ip().to_canonical()
    }

    /// Sends a datagram. One that the system does not take now is lost, as on the way: the other side asks again.
    fn send(&self, purpose: Purpose, device: usize, to: Option<SocketAddr>, bytes: &[u8]) {
        let Some(one) = self.devices.get(device) else { return };
        let socket = match purpose {
            Purpose::Managers => Some(&one.managers),
            Purpose::Agent => Some(&one.agent),
            Purpose::Notifications => one.notifications.as_ref(),
        };
        let Some(socket) = socket else { return };
        let sent = match to {
            Some(to) => socket.try_send_to(bytes, to),
            None => socket.try_send(bytes),
        };
        if let Err(error) = sent.map(drop)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!("a datagram of {} bytes was not sent: {error}", bytes.len());
        }
    }
}

async fn receive(socket: Arc<UdpSocket>, generation: u64, purpose: Purpose, device: usize, arrivals: mpsc::Sender<Arrival>) {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((length, from)) => {
                let bytes = buffer[..length].to_vec();
                if arrivals.send(Arrival::Datagram { generation, purpose, device, from, bytes }).await.is_err() {
                    return;
                }
            }
            // Such as that nobody listens at the agent's address; the time-out reports it.
            Err(_) => tokio::time::sleep(READ_AGAIN).await,
        }
    }
}
