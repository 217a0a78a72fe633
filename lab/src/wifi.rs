//! Access points at the lab's network of switches, and hosts that enter them by radio.
//!
//! An access point is a bridge with a cable to a switch, and knows its hosts by what they send, as by their association. The other end of a radio is a port of the bridge whose access point it has entered, or of none. Each radio
//! has the control interface of wpa_supplicant, as far as Braid uses it.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::{SocketAddr as Address, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::network::{Controller, Host, Switches, eventually, printed};
use crate::sys;

/// Port for clients of the controller.
const CLIENTS: u16 = 2209;
/// Where the controller takes clients, in the hosts' network.
pub const CLIENTS_AT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 9, 0, 254)), CLIENTS);
/// What takes longer to enter than this is cellular.
const SLOW: Duration = Duration::from_secs(1);
/// Interval at which a radio's thread looks whether it is to end.
const LOOKED: Duration = Duration::from_millis(100);

/// An access point.
#[derive(Debug, Clone)]
pub struct AccessPoint {
    /// Its address.
    pub bssid: String,
    /// Its channel.
    pub channel: u16,
    /// Time to enter it, once its channel is known.
    pub entry: Duration,
    /// Number of the switch's port.
    pub port: u32,
    /// The switch's datapath id.
    pub datapath: u64,
    /// What it carries in each direction, as the controller is told.
    pub capacity_mbps: u32,
    bridge: String,
}

impl AccessPoint {
    /// Makes access point `number`, at a switch.
    ///
    /// # Errors
    /// There is no such switch.
    pub fn start(lab: &Lab, switches: &Switches<'_>, number: u8, (switch, datapath): (&str, u64), entry: Duration) -> Result<Self> {
        let (bridge, port, peer) = (format!("air{number}"), format!("ap{number}"), format!("ap{number}-air"));
        // The air is in the client's namespace, wherever the switch is.
        let at = switches.namespace().path();
        lab.client().ip(&format!(
            "link add name {bridge} up type bridge forward_delay 0 mcast_snooping 0\n\
             link add name {peer} type veth peer name {port} netns {at}\nlink set dev {peer} master {bridge} up\n\
             link set dev {peer} type bridge_slave learning off\n"
        ))?;
        switches.namespace().ip(&format!("link set dev {port} up\n"))?;
        let port = switches.port(switch, &port)?;
        Ok(Self {
            bssid: format!("02:00:00:00:0a:{number:02x}"),
            channel: u16::from(number),
            entry,
            port,
            datapath,
            capacity_mbps: 54,
            bridge,
        })
    }

    /// Limits what it sends to its hosts, in Mbit/s.
    ///
    /// # Errors
    /// `tc` fails.
    pub fn limit(&self, lab: &Lab, mbps: u32) -> Result<()> {
        // The switch's end of its cable, with a queue of some 40 packets.
        let arguments = format!("qdisc replace dev ap{} root tbf rate {mbps}mbit burst 16kb limit 60kb", self.channel);
        printed(lab.client().command("tc")?.args(arguments.split(' '))).map(drop)
    }

    /// Its entry in the controller's configuration.
    fn config(&self) -> String {
        let kind = if self.entry > SLOW { "cellular" } else { "wifi" };
        format!(
            "[[access]]\nid = \"{}\"\nswitch = \"{:x}\"\nport = {}\nkind = \"{kind}\"\nchannel = {}\nentry = \"{}ms\"\ncapacity = \"{} Mbit/s\"\n",
            self.bssid,
            self.datapath,
            self.port,
            self.channel,
            self.entry.as_millis(),
            self.capacity_mbps
        )
    }
}

/// A configuration of the controller for these access points and hosts with their keys.
pub fn configuration(accesses: &[AccessPoint], hosts: &[(&str, &str)], more: &str) -> String {
    let accesses: String = accesses.iter().map(AccessPoint::config).collect();
    let hosts: String = hosts.iter().map(|(mac, key)| format!("[[host]]\nmac = \"{mac}\"\nkey = \"{key}\"\n")).collect();
    format!("{more}\n[clients]\nlisten = [\"{CLIENTS_AT}\"]\n{accesses}{hosts}")
}

/// Gives the controller's namespace an address in the hosts' network.
///
/// # Errors
/// There is no such switch.
pub fn serve_clients(lab: &Lab, switches: &Switches<'_>, switch: &str) -> Result<()> {
    lab.client().ip(&format!(
        "link add name ctl up type veth peer name ctl-port\nlink set dev ctl-port up\naddress add {}/24 dev ctl\n",
        CLIENTS_AT.ip()
    ))?;
    lab.client().run(|| sys::plain_frames("ctl"))?.context("cannot switch off offloads")?;
    switches.port(switch, "ctl-port").map(drop)
}

/// A host with radios, in a namespace of its own.
#[derive(Debug)]
pub struct Roamer {
    namespace: Namespace,
    /// Its Ethernet address.
    pub mac: String,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    directory: PathBuf,
    radios: Vec<Radio>,
}

impl Roamer {
    /// A host with radios `wlan0`, `wlan1` and so on, which have entered nothing. `hunt` is the time to find an access point whose channel is not known.
    ///
    /// # Errors
    /// A device or thread cannot be made.
    pub fn start(lab: &Lab, number: u8, radios: usize, accesses: &[AccessPoint], hunt: Duration) -> Result<Self> {
        let namespace = lab.namespace("host's")?;
        let (mac, address) = (format!("02:00:00:00:09:{number:02x}"), Ipv4Addr::new(10, 9, 0, number));
        let directory = lab.directory().join(format!("h{number}"));
        fs::create_dir_all(directory.join("wpa"))?;
        let mut host = Self { namespace, mac, address, directory, radios: Vec::new() };
        let path = host.namespace.path();
        host.namespace.ip("link set dev lo up\n")?;
        for radio in 0..radios {
            let (name, end) = (format!("wlan{radio}"), format!("h{number}-wlan{radio}"));
            lab.client().ip(&format!("link add name {end} type veth peer name {name} address {} netns {path}\n", host.mac))?;
            host.namespace.ip(&format!("link set dev {name} up\n"))?;
            // The switches take no frames whose checksums a network card would add.
            host.namespace.run(|| sys::plain_frames(&name))?.context("cannot switch off offloads")?;
            host.radios.push(Radio::start(lab, &host.namespace, &host.directory.join("wpa"), (&name, end), accesses, hunt)?);
        }
        Ok(host)
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Limits what each of its radios receives, in Mbit/s.
    ///
    /// # Errors
    /// `tc` fails.
    pub fn limit(&self, lab: &Lab, mbps: u32) -> Result<()> {
        for radio in &self.radios {
            // Some 200 packets wait. Not every kernel has netem.
            let arguments = format!("qdisc replace dev {} root tbf rate {mbps}mbit burst 16kb limit 300kb", radio.end);
            printed(lab.client().command("tc")?.args(arguments.split(' ')))?;
        }
        Ok(())
    }

    /// Loses so many percent of the packets that each of its radios receives, each by its own chance.
    ///
    /// # Errors
    /// `nft` fails.
    pub fn lose(&self, lab: &Lab, percent: u32) -> Result<()> {
        for radio in &self.radios {
            let end = &radio.end;
            let rules = format!(
                "add table netdev {end}; add chain netdev {end} lost {{ type filter hook egress device \"{end}\" priority 0; }}; \
                 add rule netdev {end} lost numgen random mod 100 < {percent} drop"
            );
            printed(lab.client().command("nft")?.arg(rules))?;
        }
        Ok(())
    }

    /// Its radios.
    pub fn radios(&self) -> &[Radio] {
        &self.radios
    }

    /// The public key by which the controller knows it.
    ///
    /// # Errors
    /// `braid net key` fails.
    pub fn key(&self, braid: &Path) -> Result<String> {
        let text = printed(self.namespace.command(braid)?.args(["net", "key", "--state-dir"]).arg(self.directory.join("state")))?;
        Ok(text.trim().to_owned())
    }

    /// Joins the network with all radios, of the controller with this key if one is named. Dropping the result ends it.
    ///
    /// # Errors
    /// The device does not come up within a minute.
    pub fn join(&self, braid: &Path, key: Option<&str>) -> Result<Joined> {
        self.join_with(braid, key, &[])
    }

    /// The same, with more options.
    ///
    /// # Errors
    /// The device does not come up within a minute.
    pub fn join_with(&self, braid: &Path, key: Option<&str>, more: &[&str]) -> Result<Joined> {
        let log = self.directory.join("join.log");
        let mut command = self.namespace.command(braid)?;
        command.args(["net", "join", "--controller", &CLIENTS_AT.to_string(), "--name", "net0"]);
        command.args(key.iter().flat_map(|key| ["--controller-key", key]));
        for (radio, _) in self.radios.iter().enumerate() {
            command.args(["--radio", &format!("wlan{radio}")]);
        }
        command.arg("--supplicant").arg(self.directory.join("wpa")).arg("--state-dir").arg(self.directory.join("state"));
        command.arg("--socket").arg(self.socket()).args(more);
        self.joined(command, log)
    }

    /// Joins the network as [`Self::join`], by the daemon.
    ///
    /// # Errors
    /// The device does not come up within a minute.
    pub fn join_by_daemon(&self, braid: &Path) -> Result<Joined> {
        self.join_by_daemon_with(braid, "")
    }

    /// The same, with more in the daemon's configuration.
    ///
    /// # Errors
    /// The device does not come up within a minute.
    pub fn join_by_daemon_with(&self, braid: &Path, more: &str) -> Result<Joined> {
        let (log, config) = (self.directory.join("daemon.log"), self.directory.join("braid.toml"));
        let radios: Vec<String> = (0..self.radios.len()).map(|radio| format!("\"wlan{radio}\"")).collect();
        let supplicants = self.directory.join("wpa");
        let text = format!(
            "[network]\nradios = [{}]\ncontroller = \"{CLIENTS_AT}\"\nsupplicants = \"{}\"\n[[link]]\nname = \"net0\"\n{more}",
            radios.join(", "),
            supplicants.display()
        );
        fs::write(&config, text)?;
        let mut command = self.namespace.command(braid)?;
        command.arg("daemon").arg("--config").arg(config).arg("--state-dir").arg(self.directory.join("state"));
        command.arg("--socket").arg(self.socket());
        self.joined(command, log)
    }

    /// Socket of the process that has joined.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("join.sock")
    }

    fn joined(&self, mut command: Command, log: PathBuf) -> Result<Joined> {
        let file = fs::File::options().create(true).append(true).open(&log)?;
        let process = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn()?;
        let joined = Joined { process, log };
        eventually("the device is up", || {
            let done = self.namespace.command("ip")?.args(["address", "add", &format!("{}/24", self.address), "dev", "net0"]).output()?;
            Ok(done.status.success())
        })
        .with_context(|| joined.log())?;
        Ok(joined)
    }
}

/// `braid net join`. Dropping it kills it.
#[derive(Debug)]
pub struct Joined {
    process: Child,
    log: PathBuf,
}

impl Joined {
    /// What it wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the log of a client\n{}---", self.log());
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A radio, with a thread that answers as wpa_supplicant.
#[derive(Debug)]
pub struct Radio {
    /// The radio's other end.
    end: String,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// The access point that it has entered.
    at: Option<usize>,
    /// The one that it enters, and when it has.
    enters: Option<(usize, Instant)>,
    /// Whether it leaves the one that it has entered by itself.
    leaves: bool,
    /// The one to which it went by itself last: the nearest, if nothing else is known.
    nearest: usize,
    /// What is received of each access point, in dBm.
    signals: BTreeMap<usize, i16>,
    /// Time to find an access point.
    hunt: Duration,
    is_over: bool,
}

impl Radio {
    fn start(
        lab: &Lab,
        host: &Namespace,
        directory: &Path,
        (name, end): (&str, String),
        accesses: &[AccessPoint],
        hunt: Duration,
    ) -> Result<Self> {
        // A socket belongs to the namespace in which it is made, and answers go to one there.
        let socket = host.run(|| UnixDatagram::bind(directory.join(name)))??;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let state = Arc::new(Mutex::new(State {
            at: None,
            enters: None,
            leaves: false,
            nearest: 0,
            signals: BTreeMap::new(),
            hunt,
            is_over: false,
        }));
        let supplicant = Supplicant {
            socket,
            end: end.clone(),
            accesses: accesses.to_vec(),
            state: state.clone(),
            listeners: Vec::new(),
            scanned: None,
            wanted: None,
        };
        lab.client().spawn_thread("lab-wpa", move || supplicant.serve())?;
        Ok(Self { end, state })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters an access point by itself, as a radio does that is turned on, or that has lost its own: after it has left that, and `hunted` for so long.
    pub fn enter(&self, access: usize, hunted: Duration) {
        let mut state = self.lock();
        (state.leaves, state.nearest) = (state.at.is_some(), access);
        state.enters = Some((access, Instant::now() + hunted));
    }

    /// The access point that it has entered.
    pub fn at(&self) -> Option<usize> {
        self.lock().at
    }

    /// What it receives of access points, in dBm.
    pub fn set_signals(&self, signals: &[(usize, i16)]) {
        self.lock().signals = signals.iter().copied().collect();
    }
}

impl Drop for Radio {
    fn drop(&mut self) {
        self.lock().is_over = true;
    }
}

struct Supplicant {
    socket: UnixDatagram,
    /// The radio's other end.
    end: String,
    accesses: Vec<AccessPoint>,
    state: Arc<Mutex<State>>,
    listeners: Vec<Address>,
    /// The frequency that was scanned, and when that ends.
    scanned: Option<(u16, Instant)>,
    /// The access point that a network names.
    wanted: Option<usize>,
}

impl Supplicant {
    fn serve(mut self) {
        let mut buffer = [0; 4096];
        loop {
            self.act();
            match self.socket.recv_from(&mut buffer) {
                Ok((size, from)) => {
                    let command = String::from_utf8_lossy(&buffer[..size]).into_owned();
                    let answer = self.answer(&command, &from);
                    let _ = self.socket.send_to_addr(answer.as_bytes(), &from);
                }
                // It is time to look.
                Err(_) if self.lock().is_over => return,
                Err(_) => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what is due.
    fn act(&mut self) {
        if self.scanned.is_some_and(|(_, end)| end <= Instant::now()) && self.lock().enters.is_none() {
            let ended = self.scanned.take();
            self.say("CTRL-EVENT-SCAN-RESULTS ");
            // It stays known.
            self.scanned = ended.map(|(frequency, _)| (frequency, Instant::now() + LOOKED * 600));
        }
        if std::mem::take(&mut self.lock().leaves) {
            self.plug(None);
            self.lock().at = None;
            self.say("CTRL-EVENT-DISCONNECTED bssid=00:00:00:00:00:00 reason=4 locally_generated=1");
        }
        let due = self.lock().enters.filter(|(_, due)| *due <= Instant::now());
        if let Some((access, _)) = due {
            self.plug(Some(access));
            {
                let mut state = self.lock();
                (state.at, state.enters) = (Some(access), None);
            }
            self.say(&format!("CTRL-EVENT-CONNECTED - Connection to {} completed [id=0 id_str=]", self.accesses[access].bssid));
        }
    }

    fn answer(&mut self, command: &str, from: &Address) -> String {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match name {
            "PING" => "PONG\n".to_owned(),
            "ATTACH" => {
                self.listeners.push(from.clone());
                "OK\n".to_owned()
            }
            "STATUS" => self.status(),
            "LIST_NETWORKS" => {
                let bssid = self.wanted.map_or("any", |wanted| &self.accesses[wanted].bssid);
                format!("network id / ssid / bssid / flags\n0\tlab\t{bssid}\t[CURRENT]\n")
            }
            "SCAN" => {
                let frequency = rest.strip_prefix("freq=").and_then(|text| text.parse().ok());
                self.scanned = frequency.map(|frequency| (frequency, Instant::now() + Duration::from_millis(20)));
                "OK\n".to_owned()
            }
            "SCAN_RESULTS" => self.results(),
            "BSSID" => {
                let bssid = rest.split_once(' ').map_or("", |(_, bssid)| bssid);
                self.wanted = self.access(bssid);
                if self.wanted.is_some() || bssid == "00:00:00:00:00:00" { "OK\n" } else { "FAIL\n" }.to_owned()
            }
            // Without a wish, the strongest one.
            "REASSOCIATE" => {
                let (strongest, nearest) = {
                    let state = self.lock();
                    (state.signals.iter().max_by_key(|(_, dbm)| **dbm).map(|(access, _)| *access), state.nearest)
                };
                self.enter(self.wanted.or(strongest).or(Some(nearest)))
            }
            "SIGNAL_POLL" => {
                let state = self.lock();
                let dbm = state.at.and_then(|at| state.signals.get(&at)).copied().unwrap_or(-50);
                format!("RSSI={dbm}\nLINKSPEED=54\n")
            }
            "ROAM" => self.enter(self.access(rest)),
            "DISCONNECT" => {
                self.leave();
                self.say("CTRL-EVENT-DISCONNECTED bssid=00:00:00:00:00:00 reason=3 locally_generated=1");
                "OK\n".to_owned()
            }
            _ => "UNKNOWN COMMAND\n".to_owned(),
        }
    }

    fn access(&self, bssid: &str) -> Option<usize> {
        self.accesses.iter().position(|access| access.bssid == bssid)
    }

    /// Leaves an access point, and enters another after the time that takes.
    fn enter(&mut self, access: Option<usize>) -> String {
        let Some(access) = access else { return "FAIL\n".to_owned() };
        self.leave();
        let AccessPoint { bssid, channel, entry, .. } = self.accesses[access].clone();
        let frequency = 2407 + 5 * channel;
        let hunt = if self.scanned.take().is_some_and(|(scanned, _)| scanned == frequency) { Duration::ZERO } else { self.lock().hunt };
        self.lock().enters = Some((access, Instant::now() + hunt + entry));
        self.say(&format!("SME: Trying to authenticate with {bssid} (SSID='lab' freq={frequency} MHz)"));
        "OK\n".to_owned()
    }

    fn leave(&mut self) {
        self.plug(None);
        let mut state = self.lock();
        (state.at, state.enters) = (None, None);
    }

    /// Connects the radio to an access point, or to none.
    fn plug(&self, access: Option<usize>) {
        let words = match access {
            Some(access) => vec!["link", "set", "dev", &self.end, "master", &self.accesses[access].bridge, "up"],
            None => vec!["link", "set", "dev", &self.end, "nomaster", "down"],
        };
        // The lab may be ending.
        let _ = Command::new("ip").args(words).stdin(Stdio::null()).stderr(Stdio::null()).status();
    }

    fn say(&self, event: &str) {
        for listener in &self.listeners {
            // One that has ended takes nothing.
            let _ = self.socket.send_to_addr(format!("<3>{event}").as_bytes(), listener);
        }
    }

    fn status(&self) -> String {
        let state = self.lock();
        let of = |access: usize, name: &str| format!("bssid={}\nssid=lab\nid=0\nwpa_state={name}\n", self.accesses[access].bssid);
        match (state.at, state.enters) {
            (_, Some((access, _))) => of(access, "ASSOCIATING"),
            (Some(access), None) => of(access, "COMPLETED"),
            (None, None) => "wpa_state=DISCONNECTED\n".to_owned(),
        }
    }

    fn results(&self) -> String {
        let state = self.lock();
        let line = |(access, dbm): (&usize, &i16)| {
            let AccessPoint { bssid, channel, .. } = &self.accesses[*access];
            format!("{bssid}\t{}\t{dbm}\t[WPA2]\tlab\n", 2407 + 5 * channel)
        };
        "bssid / frequency / signal level / flags / ssid\n".to_owned() + &state.signals.iter().map(line).collect::<String>()
    }
}

/// A stream of numbered datagrams to a host, as a video: lost, late and repeated ones are counted.
#[derive(Debug)]
pub struct Stream {
    received: Arc<Mutex<Vec<u32>>>,
    sent: Arc<Mutex<u32>>,
    is_over: Arc<Mutex<bool>>,
}

/// What became of the datagrams of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// How many were sent.
    pub sent: u32,
    /// How many did not arrive.
    pub lost: usize,
    /// The first of them.
    pub missing: Vec<u32>,
    /// How many arrived once more.
    pub repeated: u32,
    /// How many arrived after a later one.
    pub late: u32,
}

impl Stream {
    /// Sends datagrams of `size` bytes from one host to another at this interval until it is counted.
    ///
    /// # Errors
    /// The sockets cannot be made.
    pub fn start(from: &Namespace, to: (&Namespace, Ipv4Addr), interval: Duration, size: usize) -> Result<Self> {
        use std::net::UdpSocket;
        let receiver = to.0.run(|| UdpSocket::bind("0.0.0.0:0"))??;
        receiver.set_read_timeout(Some(LOOKED))?;
        let sender = from.run(|| UdpSocket::bind("0.0.0.0:0"))??;
        sender.connect((to.1, receiver.local_addr()?.port()))?;
        let stream = Self { received: Arc::default(), sent: Arc::default(), is_over: Arc::default() };
        let (received, is_over) = (stream.received.clone(), stream.is_over.clone());
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            loop {
                match receiver.recv(&mut buffer) {
                    Ok(4..) => lock(&received).push(u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]])),
                    Ok(_) => {}
                    Err(_) if *lock(&is_over) => return,
                    Err(_) => {}
                }
            }
        });
        let (sent, is_over) = (stream.sent.clone(), stream.is_over.clone());
        thread::spawn(move || {
            let (mut buffer, mut due) = (vec![0; size.max(4)], Instant::now());
            while !*lock(&is_over) {
                let number = {
                    let mut sent = lock(&sent);
                    *sent += 1;
                    *sent
                };
                buffer[..4].copy_from_slice(&number.to_be_bytes());
                // A host without a link refuses it: it is lost.
                let _ = sender.send(&buffer);
                due += interval;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        });
        Ok(stream)
    }

    /// How many have arrived.
    pub fn arrived(&self) -> usize {
        lock(&self.received).len()
    }

    /// How many were sent.
    pub fn sent(&self) -> u32 {
        *lock(&self.sent)
    }

    /// Ends the stream, and counts up to the last datagram that arrived.
    pub fn end(self) -> Received {
        Received::of(&self.numbers())
    }

    /// Ends the stream. Returns the numbers of the datagrams, from 1, as they arrived.
    pub fn numbers(self) -> Vec<u32> {
        *lock(&self.is_over) = true;
        thread::sleep(LOOKED * 3);
        lock(&self.received).clone()
    }
}

impl Received {
    /// Counts these numbers, which arrived in this order, up to the last one.
    pub fn of(received: &[u32]) -> Self {
        let last = received.iter().copied().max().unwrap_or(0);
        let (mut seen, mut highest, mut late) = (vec![0u32; last as usize + 1], 0, 0);
        for number in received.iter().copied() {
            seen[number as usize] += 1;
            late += u32::from(number < highest && seen[number as usize] == 1);
            highest = highest.max(number);
        }
        let mut missing: Vec<u32> = (1..=last).filter(|number| seen[*number as usize] == 0).collect();
        let lost = missing.len();
        missing.truncate(20);
        Self { sent: last, lost, missing, repeated: seen.iter().map(|times| times.saturating_sub(1)).sum(), late }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        *lock(&self.is_over) = true;
    }
}

/// A transfer by TCP to a host (iperf3).
#[derive(Debug)]
pub struct Transfer {
    server: Child,
    client: Option<Child>,
}

impl Transfer {
    /// Starts one of this many seconds.
    ///
    /// # Errors
    /// iperf3 is missing.
    pub fn start(from: &Namespace, to: (&Namespace, Ipv4Addr), seconds: u64) -> Result<Self> {
        let mut server = to.0.command("iperf3")?;
        let server = server.args(["-s", "-1", "-J"]).stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("cannot run iperf3")?;
        let mut transfer = Self { server, client: None };
        thread::sleep(Duration::from_millis(300));
        let mut client = from.command("iperf3")?;
        client.args(["-c", &to.1.to_string(), "-t", &seconds.to_string(), "-J", "--get-server-output"]);
        transfer.client = Some(client.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run iperf3")?);
        Ok(transfer)
    }

    /// Waits for its end. Returns what arrived in each second, in Mbit/s.
    ///
    /// # Errors
    /// It failed.
    pub fn end(mut self) -> Result<Vec<f64>> {
        let output = self.client.take().context("the transfer has no client")?.wait_with_output()?;
        let said: Value = serde_json::from_slice(&output.stdout).context("iperf3 printed no JSON")?;
        // What has arrived, not what was sent.
        let intervals = said["server_output_json"]["intervals"].as_array().or_else(|| said["intervals"].as_array());
        let intervals = intervals.with_context(|| format!("iperf3: {}", said["error"]))?;
        // The last one may be the rest of a second.
        let sums = intervals.iter().map(|interval| &interval["sum"]).filter(|sum| sum["seconds"].as_f64().is_some_and(|span| span > 0.5));
        Ok(sums.filter_map(|sum| Some(sum["bits_per_second"].as_f64()? / 1e6)).collect())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        for child in self.client.iter_mut().chain([&mut self.server]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a walk needs.
#[derive(Debug, Clone, Copy)]
pub struct WalkPlan<'a> {
    /// Options at the beginning of the controller's configuration, such as `manager = "hoolock"`.
    pub options: &'a str,
    /// Access points, at the switches of a ring in turn.
    pub accesses: u8,
    /// Radios of the host that walks.
    pub radios: usize,
    /// Time to enter an access point, once its channel is known, and to enter the last one.
    pub entry: [Duration; 2],
    /// Time to find its channel.
    pub hunt: Duration,
}

/// Where a walk takes place.
#[derive(Debug)]
pub struct Site<'a> {
    /// The switches at the controller's site.
    pub switches: Switches<'a>,
    /// The access points.
    pub accesses: Vec<AccessPoint>,
    /// How many switches and links there are, with those of other sites.
    pub size: (usize, usize),
}

/// A ring of three switches with access points, a host at the third switch, and one with radios that has joined and entered the first access point.
#[derive(Debug)]
pub struct Walk<'a> {
    /// The client of the host that walks.
    pub joined: Joined,
    /// The controller.
    pub controller: Controller<'a>,
    /// The host that walks.
    pub roamer: Roamer,
    /// The host that it talks to.
    pub other: Host,
    /// The access points.
    pub accesses: Vec<AccessPoint>,
    /// The switches.
    pub switches: Switches<'a>,
}

impl<'a> Walk<'a> {
    /// Starts all of it, and waits until the hosts reach each other.
    ///
    /// # Errors
    /// Something does not start within a minute.
    pub fn start(lab: &'a Lab, braid: &Path, plan: WalkPlan<'_>) -> Result<Self> {
        let switches = Switches::ring(lab, "OpenFlow13")?;
        let ring = [("s1", 1), ("s2", 2), ("s3", 3)];
        let access = |number: u8| {
            let entry = plan.entry[usize::from(number == plan.accesses)];
            AccessPoint::start(lab, &switches, number, ring[usize::from(number - 1) % ring.len()], entry)
        };
        let accesses = (1..=plan.accesses).map(access).collect::<Result<Vec<_>>>()?;
        let controller = |configuration: &str| Controller::start_with(lab, braid, configuration);
        Self::at(lab, braid, plan, Site { switches, accesses, size: (3, 3) }, controller)
    }

    /// The same at these switches and access points, with a controller that `controller` starts with a configuration. There is a switch `s2` for the controller's
    /// clients, and a switch `s3` for the other host.
    ///
    /// # Errors
    /// Something does not start within a minute.
    pub fn at(
        lab: &'a Lab,
        braid: &Path,
        plan: WalkPlan<'_>,
        site: Site<'a>,
        controller: impl FnOnce(&str) -> Result<Controller<'a>>,
    ) -> Result<Self> {
        let Site { switches, accesses, size } = site;
        serve_clients(lab, &switches, "s2")?;
        let roamer = Roamer::start(lab, 1, plan.radios, &accesses, plan.hunt)?;
        let key = roamer.key(braid)?;
        let controller = controller(&configuration(&accesses, &[(&roamer.mac, &key)], plan.options))?;
        let other = Host::start(&switches, 2, &["s3"])?;
        controller.converges(size.0, size.1)?;
        roamer.radios()[0].enter(0, Duration::ZERO);
        let joined = roamer.join(braid, None)?;
        let walk = Self { joined, controller, roamer, other, accesses, switches };
        eventually("the client has joined and the hosts reach each other", || {
            Ok(walk.is_client()? && walk.active()? == [walk.place(0)] && walk.other.reaches(walk.roamer.address)?)
        })
        .with_context(|| format!("the client's log:\n{}the controller's:\n{}", walk.joined.log(), walk.controller.log()))?;
        walk.controller.converges(size.0, size.1)?;
        Ok(walk)
    }

    /// The port of an access point, as a status shows it.
    pub fn place(&self, access: usize) -> (String, u32) {
        let AccessPoint { datapath, port, .. } = &self.accesses[access];
        (format!("{datapath:016x}"), *port)
    }

    fn host(&self) -> Result<Value> {
        let status = self.controller.status()?;
        let hosts = status["hosts"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(hosts.iter().find(|host| host["mac"] == self.roamer.mac).cloned().unwrap_or_default())
    }

    /// Whether the walking host has joined.
    ///
    /// # Errors
    /// The program is missing.
    pub fn is_client(&self) -> Result<bool> {
        Ok(self.host()?["client"] == true)
    }

    /// At how many places the walking host is attached.
    ///
    /// # Errors
    /// The program is missing.
    pub fn attachments(&self) -> Result<usize> {
        Ok(self.host()?["attachments"].as_array().map_or(0, Vec::len))
    }

    /// The places to which the packets of the walking host go.
    ///
    /// # Errors
    /// The program is missing.
    pub fn active(&self) -> Result<Vec<(String, u32)>> {
        let host = self.host()?;
        let place =
            |place: &Value| (place["datapath"].as_str().unwrap_or_default().to_owned(), place["port"].as_u64().unwrap_or_default() as u32);
        Ok(host["active"].as_array().map(Vec::as_slice).unwrap_or_default().iter().map(place).collect())
    }

    /// Tells the client to go to an access point.
    ///
    /// # Errors
    /// The controller refuses it.
    pub fn go_to(&self, access: usize) -> Result<()> {
        let output = self.controller.net(&["move", &self.roamer.mac, &self.accesses[access].bssid])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Tells the client to go to an access point, and waits until its packets go there only and no other radio is attached.
    ///
    /// # Errors
    /// That takes more than a minute.
    pub fn walk_to(&self, access: usize) -> Result<()> {
        self.go_to(access)?;
        self.arrives(access)
    }

    /// Waits until the client's packets go to an access point only, and no other radio is attached.
    ///
    /// # Errors
    /// That takes more than a minute.
    pub fn arrives(&self, access: usize) -> Result<()> {
        eventually(&format!("the host is at access point {access} only"), || {
            let at: Vec<usize> = self.roamer.radios().iter().filter_map(Radio::at).collect();
            // An order to go where a radio has just left would come too early for the controller.
            Ok(at == [access] && self.active()? == [self.place(access)] && self.attachments()? == 1)
        })
        .with_context(|| format!("the client's log:\n{}the controller's:\n{}", self.joined.log(), self.controller.log()))
    }
}
