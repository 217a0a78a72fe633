//! The thread of the ad-hoc device, in the daemon or alone (`braid adhoc up` without a daemon).

use std::collections::BTreeSet;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc as sync;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use braid_api::{Accepted, AdhocChange, AdhocStatus, AdhocUp, NetworkReservation};
use braid_control::RequestError;
use braid_control::adhoc::group::GroupKey;
use braid_control::adhoc::{Adhoc, AdhocSettings};
use braid_decide::tradeoff::Supply;
use braid_decide::virtual_interface::saves_power;
use braid_http::{Api, ReplySender, Request, Server, Serving};
use braid_model::{LinkIndex, Mac, NetworkSnapshot, Time};
use braid_network::station::Served;
use braid_peer::shared;
use braid_platform::linux::bpf::adhoc::{AdhocDevice, AdhocError, AdhocPrograms, Membership, Received, Reservation, address_of};
use braid_platform::linux::model::SYS;
use braid_platform::linux::netlink::Follower;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::sys::process::set_nonblocking;
use braid_store::lock;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::system::{notify, watch_battery};

/// What the user should know about a group without a key.
pub const UNAUTHENTICATED: &str = "the group is not authenticated: whoever is in reach of a radio can send frames in the name of its hosts, as on any Ethernet without MACsec";
/// The same for a group with a key.
pub const AUTHENTICATED: &str =
    "the group has a key: its hosts authenticate and encrypt what they send each other (MACsec), and receive nothing else over the device";
/// Title of the error of a daemon that cannot make a device because it loaded no programs for one when it started.
pub const NO_PRIVILEGE: &str = "Not prepared";
const GIVEN_UP: &str = "the configuration had neither [adhoc] nor [network] when Braid started, and Braid has given up the privilege to load the programs since: restart Braid";
/// Delay before the thread tries again what the kernel refused.
const RETRY_AFTER: Duration = Duration::from_millis(500);

enum Command {
    View(ReplySender<AdhocStatus>),
    Change(AdhocChange, ReplySender<Accepted>),
    LowBattery(bool),
    Serve(Served),
    Reservation(Option<NetworkReservation>),
    End,
}

/// A running device. It is removed when this is dropped.
pub struct AdhocThread {
    name: String,
    commands: AdhocControls,
    thread: Option<JoinHandle<Box<AdhocPrograms>>>,
    low_battery: bool,
    radios: Arc<Mutex<BTreeSet<String>>>,
}

impl AdhocThread {
    /// Makes the device in this thread's network namespace with the programs in `programs`, and starts the thread. If it fails, the programs stay there.
    ///
    /// # Errors
    /// The key of the group cannot be read; none of the radios exists, so that the device has no address; there are no programs; those of [`AdhocDevice::make`]; the thread cannot be started.
    pub fn start(
        settings: AdhocSettings,
        programs: &mut Option<Box<AdhocPrograms>>,
        network: watch::Receiver<Arc<NetworkSnapshot>>,
    ) -> Result<Self, RequestError> {
        let mac = settings.mac.map_or_else(|| derived_address(&settings, &network.borrow()), Ok)?;
        let failed = |error: &dyn std::fmt::Display| RequestError::failed("Not made", error.to_string());
        let key = settings.key_file.as_deref().map(shared::read).transpose().map_err(|error| failed(&error))?;
        let key = key.map(|shared| GroupKey::new(&shared));
        // No key of MACsec may be used twice, and each depends on the first of these.
        let random = || shared::random().map_err(|error| failed(&error));
        let (instance, secret) = (random()?, random()?);
        let member = key.clone().map(|key| Membership { key, instance });
        let loaded = programs.take().ok_or_else(|| RequestError::conflict(NO_PRIVILEGE, GIVEN_UP))?;
        let device = AdhocDevice::make(loaded, &settings.name, mac, member, reserve).map_err(|(error, loaded)| {
            *programs = Some(loaded);
            match error {
                AdhocError::Taken(_) => RequestError::conflict("Not made", error.to_string()),
                _ => failed(&error),
            }
        })?;
        let (name, (sender, orders)) = (settings.name.clone(), sync::channel());
        let (woken, wake) = io::pipe().map_err(|error| failed(&error))?;
        set_nonblocking(woken.as_fd()).and_then(|()| set_nonblocking(wake.as_fd())).map_err(|error| failed(&error))?;
        let commands = AdhocControls { sender, wake: Arc::new(wake) };
        let radios = Arc::new(Mutex::new(names(&settings)));
        let adhoc = Adhoc::new(device, settings, mac, instance, secret);
        let adhoc = key.into_iter().fold(adhoc, Adhoc::with_key);
        let worker = Worker { adhoc, network, orders, woken, trouble: None, reservation: None, radios: radios.clone() };
        let thread = thread::Builder::new().name("braid-adhoc".to_owned()).spawn(move || worker.run());
        let thread = thread.map_err(|error| RequestError::failed("Not made", format!("cannot start its thread: {error}")))?;
        Ok(Self { name, commands, thread: Some(thread), low_battery: false, radios })
    }

    /// Removes the device, and gives back its programs for another one.
    pub fn end(mut self) -> Option<Box<AdhocPrograms>> {
        self.commands.send(Command::End);
        self.thread.take().and_then(|thread| thread.join().ok())
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is gone, because somebody has removed it.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Names of its radios.
    pub fn radios(&self) -> BTreeSet<String> {
        self.radios.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers with the state of the device.
    pub fn view(&self, reply: ReplySender<AdhocStatus>) {
        // If the thread has ended, the reply is dropped, and the client learns it.
        self.commands.send(Command::View(reply));
    }

    /// Changes the device, and answers.
    pub fn change(&self, change: AdhocChange, reply: ReplySender<Accepted>) {
        self.commands.send(Command::Change(change, reply));
    }

    /// What a controller directs.
    pub(crate) fn controls(&self) -> AdhocControls {
        self.commands.clone()
    }

    /// Answers a request of a process that has nothing but this device. `false`: it ends the device.
    pub fn answer(&self, request: Request) -> bool {
        match request {
            Request::Adhoc(reply) => self.view(reply),
            Request::ChangeAdhoc(change, reply) => self.change(change, reply),
            Request::AdhocUp(_, reply) => {
                let detail = format!("{} is up already, in a process of its own: `braid adhoc down --name {0}` ends it", self.name);
                let _ = reply.send(Err(RequestError::conflict("Not made", detail)));
            }
            Request::AdhocDown(reply) => {
                let message = format!("{} is removed; its radios are as before", self.name);
                let _ = reply.send(Ok(Accepted { message, warnings: Vec::new() }));
                return false;
            }
            // Everything else needs the daemon. The client gets the error of a process that ends.
            _ => {}
        }
        true
    }

    /// The battery's state has changed.
    pub fn set_supply(&mut self, supply: Option<&Supply>) {
        let low = supply.is_some_and(|supply| saves_power(Some((supply.level * 100.0) as u8), supply.plugged));
        if low != self.low_battery {
            self.low_battery = low;
            self.commands.send(Command::LowBattery(low));
        }
    }
}

/// Directs the radios of a device, as long as there is one.
#[derive(Clone)]
pub(crate) struct AdhocControls {
    sender: sync::Sender<Command>,
    wake: Arc<PipeWriter>,
}

impl AdhocControls {
    fn send(&self, command: Command) {
        let _ = self.sender.send(command);
        // A full pipe wakes the thread too.
        let _ = (&*self.wake).write(&[0]);
    }

    /// Lets frames leave and arrive as a controller chose ([`Adhoc::serve`]).
    pub(crate) fn serve(&self, served: Served) {
        self.send(Command::Serve(served));
    }

    /// Sets what clients of the API see of the reservation.
    pub(crate) fn show_reservation(&self, reservation: Option<NetworkReservation>) {
        self.send(Command::Reservation(reservation));
    }
}

impl Drop for AdhocThread {
    fn drop(&mut self) {
        self.commands.send(Command::End);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Keeps other ad-hoc devices of this network namespace from a radio.
fn reserve(radio: LinkIndex) -> Result<Option<Reservation>, String> {
    match lock::reserve(&format!("braid radio {}", radio.0)) {
        Ok(reservation) => Ok(reservation.map(|it| Box::new(it) as Reservation)),
        Err(holder) => {
            Err(format!("another ad-hoc device uses it{holder}: take the radio away from that one, or end it with `braid adhoc down`"))
        }
    }
}

fn derived_address(settings: &AdhocSettings, network: &NetworkSnapshot) -> Result<Mac, RequestError> {
    let mac_of = |name: &str| network.interfaces.iter().find(|facts| facts.name == name).and_then(|facts| facts.mac);
    let first = settings.radios.iter().find_map(|radio| mac_of(&radio.name));
    first.map(|radio| address_of(&settings.name, radio)).ok_or_else(|| {
        let names: Vec<&str> = settings.radios.iter().map(|radio| radio.name.as_str()).collect();
        let detail = format!(
            "{} gets its address from its first radio, and none of {} exists: `ip link` lists the devices; or give it an address with --mac",
            settings.name,
            names.join(", ")
        );
        RequestError::conflict("Not made", detail)
    })
}

fn names(settings: &AdhocSettings) -> BTreeSet<String> {
    settings.radios.iter().map(|radio| radio.name.clone()).collect()
}

struct Worker {
    radios: Arc<Mutex<BTreeSet<String>>>,
    adhoc: Adhoc<AdhocDevice>,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    orders: sync::Receiver<Command>,
    /// Has data when there are orders.
    woken: PipeReader,
    trouble: Option<String>,
    reservation: Option<NetworkReservation>,
}

impl Worker {
    fn run(mut self) -> Box<AdhocPrograms> {
        self.adhoc.on_devices(&self.network.borrow_and_update().interfaces);
        let (mut next, mut due) = (now(), None);
        loop {
            let wake = due.map_or(next, |due: Time| due.min(next));
            if !self.adhoc.backend().wait(self.woken.as_fd(), wake.since(now())) {
                tracing::warn!("the ad-hoc device {} was removed by somebody else", self.adhoc.settings().name);
                return self.adhoc.into_backend().into_programs();
            }
            for Received { place, sealed, frame } in self.adhoc.backend().receive() {
                if sealed {
                    self.adhoc.on_sealed(now(), place, &frame);
                } else {
                    self.adhoc.on_frame(now(), place, &frame);
                }
            }
            due = self.adhoc.release(now());
            if self.network.has_changed().unwrap_or(false) {
                let network = self.network.borrow_and_update().clone();
                self.adhoc.on_devices(&network.interfaces);
                next = now();
            }
            if now() >= next {
                next = now() + self.tick();
            }
            while self.woken.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
            loop {
                match self.orders.try_recv() {
                    Ok(Command::View(reply)) => {
                        let view = self.adhoc.view(now()).map(|view| AdhocStatus { reservation: self.reservation.clone(), ..view });
                        let view = view.map_err(|error| RequestError::failed("Not read", error.to_string()));
                        let _ = reply.send(view);
                    }
                    Ok(Command::Change(change, reply)) => {
                        let changed = self.adhoc.change(&change);
                        *self.radios.lock().unwrap_or_else(PoisonError::into_inner) = names(self.adhoc.settings());
                        let network = self.network.borrow().clone();
                        self.adhoc.on_devices(&network.interfaces);
                        let _ = reply.send(changed);
                    }
                    Ok(Command::LowBattery(low)) => self.adhoc.set_low_battery(low),
                    Ok(Command::Serve(served)) => {
                        self.adhoc.serve(served);
                        next = now();
                    }
                    Ok(Command::Reservation(reservation)) => self.reservation = reservation,
                    Ok(Command::End) | Err(sync::TryRecvError::Disconnected) => {
                        self.adhoc.say_goodbye(now());
                        return self.adhoc.into_backend().into_programs();
                    }
                    Err(sync::TryRecvError::Empty) => break,
                }
            }
        }
    }

    /// One step. Returns the time until the next one.
    fn tick(&mut self) -> Duration {
        let time = now();
        let beaten = self.adhoc.backend().heartbeat();
        match self.adhoc.tick(time).and_then(|next| beaten.map(|()| next)) {
            Ok(next) => {
                self.trouble = None;
                next.since(time)
            }
            Err(error) => {
                let text = error.to_string();
                if self.trouble.as_ref() != Some(&text) {
                    tracing::warn!("the ad-hoc device: {text}; trying again");
                    self.trouble = Some(text);
                }
                RETRY_AFTER
            }
        }
    }
}

/// Serves the device until a signal, or `braid adhoc down`, ends it. `key_file`: the file with the group's key. `ready` is called once the device exists.
///
/// # Errors
/// The socket cannot be served, or the device not be made.
pub fn run_alone(
    up: &AdhocUp,
    key_file: Option<PathBuf>,
    socket: &Path,
    sys: Option<&Path>,
    ready: impl FnOnce(&str),
) -> anyhow::Result<()> {
    crate::privilege::check_device("braid adhoc up")?;
    let settings = AdhocSettings::of(up).map_err(|error| anyhow::anyhow!("{}", error.detail))?;
    let settings = AdhocSettings { key_file, ..settings };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(serve(settings, socket, sys.unwrap_or(Path::new(SYS)), ready));
    runtime.shutdown_background();
    result
}

async fn serve(settings: AdhocSettings, socket: &Path, sys: &Path, ready: impl FnOnce(&str)) -> anyhow::Result<()> {
    let server = Server::bind(socket)?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut programs = Some(AdhocPrograms::load()?);
    // Before any other thread starts, which keeps the privileges that it starts with.
    crate::privilege::narrow(false).context("cannot drop the privileges that are no longer needed")?;
    let (_follower, network) = Follower::start()?;
    let mut device = AdhocThread::start(settings, &mut programs, network).map_err(|error| anyhow::anyhow!("{}", error.detail))?;
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, None, api, spreader).context("cannot serve the API")?;
    let mut supply = watch_battery(sys);
    let mut look = tokio::time::interval(RETRY_AFTER);
    ready(device.name());
    notify("READY=1");
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = look.tick() => if device.has_ended() {
                anyhow::bail!("{} is gone: somebody has removed it", device.name());
            },
            Some(supply) = supply.recv() => device.set_supply(supply.as_ref()),
            request = inbox.recv() => if request.is_none_or(|request| !device.answer(request)) {
                break;
            },
        }
    }
    drop(device);
    serving.end(Duration::from_secs(2)).await;
    Ok(())
}
