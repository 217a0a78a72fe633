//! The control interface of wpa_supplicant: which access point a radio is at, and orders to enter one or to leave it.
//!
//! It takes commands as datagrams at a socket with the radio's name, and sends events to whoever has attached itself. Source: `wpa_supplicant/ctrl_iface_unix.c`
//! and `src/common/wpa_ctrl.h` of hostap.

use std::collections::VecDeque;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram as Unbound};
use std::path::Path;
use std::time::Duration;

use braid_model::Mac;
use tokio::net::UnixDatagram;
use tokio::time::timeout;

/// Where wpa_supplicant has its sockets on most systems.
pub const DIRECTORY: &str = "/run/wpa_supplicant";
/// Time for an answer.
const ANSWERED: Duration = Duration::from_secs(2);
/// Time for a scan of one channel. What is known from before is used afterwards.
const SCANNED: Duration = Duration::from_secs(1);
/// Longest answer or event in bytes (a list of scanned access points).
const LONGEST: usize = 65_536;
/// Events that wait.
const MAX_EVENTS: usize = 256;

/// What a Wi-Fi radio does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WifiState {
    /// It has no link.
    Idle,
    /// It enters the access point with this BSSID.
    Entering(Mac),
    /// Its link to this one stands.
    Attached(Mac),
}

/// A connection to the control interface of one radio.
pub struct Supplicant {
    socket: UnixDatagram,
    events: VecDeque<String>,
    /// The network that is bound to one access point until its link stands.
    bound: Option<String>,
    buffer: Vec<u8>,
}

impl Supplicant {
    /// Connects, and asks for events. `own` is a number that nobody else can foresee. Must be called inside a tokio runtime. If the radio's network is bound to
    /// one access point, [`unbind`](Self::unbind) ends that.
    ///
    /// # Errors
    /// There is no such socket, the rights are missing, or nobody answers at it.
    pub async fn open(directory: &Path, device: &str, own: u64) -> io::Result<Self> {
        // A name without a file, so that nothing stays behind.
        let name = format!("braid-wpa-{own:016x}");
        let socket = Unbound::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        socket.connect(directory.join(device))?;
        socket.set_nonblocking(true)?;
        let mut supplicant =
            Self { socket: UnixDatagram::from_std(socket)?, events: VecDeque::new(), bound: None, buffer: vec![0; LONGEST] };
        supplicant.done("ATTACH").await?;
        // One that ended in the middle of an order may have left it bound.
        supplicant.bound = supplicant.network().await?.filter(|(_, bssid)| bssid != "any").map(|(id, _)| id);
        Ok(supplicant)
    }

    /// What the radio does now.
    ///
    /// # Errors
    /// No answer.
    pub async fn state(&mut self) -> io::Result<WifiState> {
        Ok(state_of_status(&self.command("STATUS").await?))
    }

    /// Waits until the radio does something else. Cancel safe.
    ///
    /// # Errors
    /// wpa_supplicant ends.
    pub async fn changed(&mut self) -> io::Result<WifiState> {
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.receive().await?,
            };
            if event.starts_with("CTRL-EVENT-TERMINATING") {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "wpa_supplicant has ended"));
            }
            if let Some(state) = state_of_event(&event) {
                return Ok(state);
            }
        }
    }

    /// Fails unless it answers.
    ///
    /// # Errors
    /// No answer.
    pub async fn ping(&mut self) -> io::Result<()> {
        self.command("PING").await.map(drop)
    }

    /// Lets the radio enter an access point of the network that it is in, or of the first one that is configured. The channel saves a scan of all.
    ///
    /// # Errors
    /// wpa_supplicant refuses: no network is configured, or it does not receive the access point.
    pub async fn enter(&mut self, bssid: Mac, channel: u16) -> io::Result<()> {
        let is_in = matches!(self.state().await?, WifiState::Attached(_));
        if let Some(frequency) = frequency(channel)
            && self.command(&format!("SCAN freq={frequency}")).await?.starts_with("OK")
        {
            let _ = timeout(SCANNED, self.scanned()).await;
        }
        if is_in {
            return self.done(&format!("ROAM {bssid}")).await;
        }
        let network = self.network().await?.map(|(id, _)| id);
        let id = network.ok_or_else(|| io::Error::other("wpa_supplicant has no network: configure one for the radio"))?;
        self.done(&format!("BSSID {id} {bssid}")).await?;
        self.bound = Some(id);
        self.done("REASSOCIATE").await
    }

    /// Lets the radio use any access point of its network from now on: it has entered the one that it was told, or will not.
    ///
    /// # Errors
    /// No answer.
    pub async fn unbind(&mut self) -> io::Result<()> {
        match self.bound.take() {
            Some(id) => self.done(&format!("BSSID {id} 00:00:00:00:00:00")).await,
            None => Ok(()),
        }
    }

    /// Lets the radio look for an access point by itself.
    ///
    /// # Errors
    /// No answer.
    pub async fn free(&mut self) -> io::Result<()> {
        self.unbind().await?;
        self.done("REASSOCIATE").await
    }

    /// Leaves the radio to itself: one without a link looks for an access point again.
    ///
    /// # Errors
    /// No answer.
    pub async fn free_if_idle(&mut self, state: WifiState) -> io::Result<()> {
        match state {
            WifiState::Attached(_) => self.unbind().await,
            WifiState::Idle | WifiState::Entering(_) => self.free().await,
        }
    }

    /// Lets the radio look which access points it receives, unless it does already.
    ///
    /// # Errors
    /// No answer.
    pub async fn scan(&mut self) -> io::Result<()> {
        self.command("SCAN").await.map(drop)
    }

    /// Lets the radio leave its access point.
    ///
    /// # Errors
    /// No answer.
    pub async fn leave(&mut self) -> io::Result<()> {
        self.done("DISCONNECT").await
    }

    /// What the radio does now, and the signals in dBm of its network's access points: of its own one now, of others when they were scanned last.
    ///
    /// # Errors
    /// No answer.
    pub async fn look(&mut self) -> io::Result<(WifiState, Vec<(Mac, i16)>)> {
        let status = self.command("STATUS").await?;
        let state = state_of_status(&status);
        let Some(ssid) = field(&status, "ssid").map(str::to_owned) else { return Ok((state, Vec::new())) };
        let mut signals = signals_of(&self.command("SCAN_RESULTS").await?, &ssid);
        if let WifiState::Attached(own) = state
            && let Some(dbm) = field(&self.command("SIGNAL_POLL").await?, "RSSI").and_then(|text| text.parse().ok())
        {
            signals.retain(|(bssid, _)| *bssid != own);
            signals.push((own, dbm));
        }
        Ok((state, signals))
    }

    /// The number of the first network, and the access point to which it is bound, or `any`.
    async fn network(&mut self) -> io::Result<Option<(String, String)>> {
        let networks = self.command("LIST_NETWORKS").await?;
        // network id, ssid, bssid, flags
        let mut fields = networks.lines().nth(1).unwrap_or_default().split('\t');
        let (id, bssid) = (fields.next().filter(|id| id.parse::<u32>().is_ok()), fields.nth(1));
        Ok(id.zip(bssid).map(|(id, bssid)| (id.to_owned(), bssid.to_owned())))
    }

    async fn done(&mut self, command: &str) -> io::Result<()> {
        let answer = self.command(command).await?;
        if answer.trim() == "OK" {
            return Ok(());
        }
        let command = command.split(' ').next().unwrap_or_default();
        Err(io::Error::other(format!("wpa_supplicant refused {command}: {}", answer.trim())))
    }

    async fn command(&mut self, command: &str) -> io::Result<String> {
        self.socket.send(command.as_bytes()).await?;
        let answer = async {
            loop {
                let size = self.socket.recv(&mut self.buffer).await?;
                let text = String::from_utf8_lossy(&self.buffer[..size]).into_owned();
                match event_of(&text) {
                    Some(event) => self.keep(event.to_owned()),
                    None => return Ok(text),
                }
            }
        };
        timeout(ANSWERED, answer).await.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "wpa_supplicant does not answer")))
    }

    async fn receive(&mut self) -> io::Result<String> {
        loop {
            let size = self.socket.recv(&mut self.buffer).await?;
            let text = String::from_utf8_lossy(&self.buffer[..size]).into_owned();
            // An answer here is one that came too late.
            if let Some(event) = event_of(&text) {
                return Ok(event.to_owned());
            }
        }
    }

    /// Waits for the end of a scan, and keeps other events.
    async fn scanned(&mut self) -> io::Result<()> {
        loop {
            let event = self.receive().await?;
            if event.starts_with("CTRL-EVENT-SCAN-RESULTS") {
                return Ok(());
            }
            self.keep(event);
        }
    }

    fn keep(&mut self, event: String) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// The text of an event, which begins with its priority: `<3>CTRL-EVENT-...`.
fn event_of(text: &str) -> Option<&str> {
    text.strip_prefix('<')?.split_once('>').map(|(_, event)| event)
}

fn state_of_event(event: &str) -> Option<WifiState> {
    let address = |prefix: &str| event.strip_prefix(prefix)?.split(' ').next()?.parse().ok();
    if event.starts_with("CTRL-EVENT-DISCONNECTED") {
        return Some(WifiState::Idle);
    }
    let attached = address("CTRL-EVENT-CONNECTED - Connection to ").map(WifiState::Attached);
    let entering = ["Trying to associate with ", "SME: Trying to authenticate with "].into_iter().find_map(address);
    attached.or(entering.map(WifiState::Entering))
}

/// The value of a line `name=value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.split_once('=').filter(|(key, _)| *key == name)).map(|(_, value)| value)
}

fn state_of_status(status: &str) -> WifiState {
    let bssid = field(status, "bssid").and_then(|text| text.parse().ok());
    match (field(status, "wpa_state"), bssid) {
        (Some("COMPLETED"), Some(bssid)) => WifiState::Attached(bssid),
        (Some("AUTHENTICATING" | "ASSOCIATING" | "ASSOCIATED" | "4WAY_HANDSHAKE" | "GROUP_HANDSHAKE"), Some(bssid)) => {
            WifiState::Entering(bssid)
        }
        _ => WifiState::Idle,
    }
}

/// The lines `bssid TAB frequency TAB signal TAB flags TAB ssid` of this network.
fn signals_of(results: &str, ssid: &str) -> Vec<(Mac, i16)> {
    let signal = |line: &str| {
        let mut parts = line.split('\t');
        let (bssid, dbm) = (parts.next()?.parse().ok()?, parts.nth(1)?.parse().ok()?);
        (parts.nth(1)? == ssid).then_some((bssid, dbm))
    };
    results.lines().filter_map(signal).collect()
}

/// The frequency in MHz of a Wi-Fi channel of 2.4 or 5 GHz (IEEE 802.11, annex E).
fn frequency(channel: u16) -> Option<u16> {
    match channel {
        1..=13 => Some(2407 + 5 * channel),
        14 => Some(2484),
        32..=177 => Some(5000 + 5 * channel),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BSSID: Mac = Mac([2, 0, 0, 0, 1, 2]);

    #[test]
    fn events_and_status_say_where_the_radio_is() {
        for (text, expected) in [
            ("<3>CTRL-EVENT-CONNECTED - Connection to 02:00:00:00:01:02 completed [id=0 id_str=]", Some(WifiState::Attached(BSSID))),
            ("<3>CTRL-EVENT-DISCONNECTED bssid=02:00:00:00:01:02 reason=3", Some(WifiState::Idle)),
            ("<3>SME: Trying to authenticate with 02:00:00:00:01:02 (SSID='a b' freq=2412 MHz)", Some(WifiState::Entering(BSSID))),
            ("<3>Trying to associate with 02:00:00:00:01:02 (SSID='a b' freq=2412 MHz)", Some(WifiState::Entering(BSSID))),
            ("<3>CTRL-EVENT-CONNECTED - Connection to nowhere completed", None),
            ("<3>CTRL-EVENT-SCAN-STARTED ", None),
        ] {
            assert_eq!(event_of(text).and_then(state_of_event), expected, "{text}");
        }
        assert_eq!(event_of("bssid=02:00:00:00:01:02"), None);
        let status = |state: &str| format!("bssid=02:00:00:00:01:02\nfreq=2412\nssid=a b\nid=0\nwpa_state={state}\n");
        assert_eq!(state_of_status(&status("COMPLETED")), WifiState::Attached(BSSID));
        assert_eq!(state_of_status(&status("ASSOCIATING")), WifiState::Entering(BSSID));
        assert_eq!(state_of_status(&status("SCANNING")), WifiState::Idle);
        assert_eq!(state_of_status("wpa_state=COMPLETED\n"), WifiState::Idle);
    }

    #[test]
    fn signals_are_those_of_the_own_network() {
        let results = "bssid / frequency / signal level / flags / ssid\n02:00:00:00:01:02\t2412\t-61\t[WPA2]\ta b\n\
                       02:00:00:00:01:03\t2437\t-50\t[WPA2]\tother\nnonsense\n02:00:00:00:01:04\t5180\tloud\t\ta b\n";
        assert_eq!(signals_of(results, "a b"), [(BSSID, -61)]);
        assert_eq!([1, 14, 36, 0, 20].map(frequency), [Some(2412), Some(2484), Some(5180), None, None]);
    }

    #[tokio::test]
    async fn orders_are_commands_and_refusals_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wlan0");
        let fake = Unbound::bind(&path).unwrap();
        let served = std::thread::spawn(move || {
            let mut buffer = [0; 1000];
            let mut commands = Vec::new();
            loop {
                let (size, from) = fake.recv_from(&mut buffer).unwrap();
                let command = String::from_utf8_lossy(&buffer[..size]).into_owned();
                let answer = |text: &str| assert_eq!(fake.send_to_addr(text.as_bytes(), &from).unwrap(), text.len());
                match command.as_str() {
                    "ATTACH" | "REASSOCIATE" => answer("OK\n"),
                    "STATUS" => answer("wpa_state=DISCONNECTED\n"),
                    // An event comes between a command and its answer.
                    "LIST_NETWORKS" => {
                        answer("<3>CTRL-EVENT-CONNECTED - Connection to 02:00:00:00:01:02 completed");
                        answer("network id / ssid / bssid / flags\n3\ta b\t02:00:00:00:01:09\t[CURRENT]\n");
                    }
                    "SCAN freq=2462" => answer("FAIL-BUSY\n"),
                    "BSSID 3 02:00:00:00:01:02" | "BSSID 3 00:00:00:00:00:00" => answer("OK\n"),
                    _ => answer("FAIL\n"),
                }
                let is_last = command == "DISCONNECT";
                commands.push(command);
                if is_last {
                    return commands;
                }
            }
        });
        let mut supplicant = Supplicant::open(directory.path(), "wlan0", 7).await.unwrap();
        supplicant.unbind().await.unwrap();
        supplicant.enter(BSSID, 11).await.unwrap();
        assert_eq!(supplicant.changed().await.unwrap(), WifiState::Attached(BSSID));
        supplicant.free().await.unwrap();
        let error = supplicant.leave().await.unwrap_err().to_string();
        assert_eq!(error, "wpa_supplicant refused DISCONNECT: FAIL");
        let expected = [
            "ATTACH",
            "LIST_NETWORKS",
            "BSSID 3 00:00:00:00:00:00",
            "STATUS",
            "SCAN freq=2462",
            "LIST_NETWORKS",
            "BSSID 3 02:00:00:00:01:02",
            "REASSOCIATE",
            "BSSID 3 00:00:00:00:00:00",
            "REASSOCIATE",
            "DISCONNECT",
        ];
        assert_eq!(served.join().unwrap(), expected);
        assert!(Supplicant::open(directory.path(), "wlan9", 8).await.is_err());
    }
}
