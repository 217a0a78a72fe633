//! `braid adhoc`.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use braid_api::{AdhocChange, AdhocRadioChange, AdhocUp};
use braid_http::DEFAULT_SOCKET;
use clap::{Args, Subcommand, ValueEnum};

/// One Ethernet device over several radios, for networks without infrastructure.
///
/// The device has one address, and reaches a neighbour over whichever of the radios reach it. Routing daemons, IPv4, IPv6, DHCP and bridges run on it
/// unchanged. Without an action: show the device.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Adhoc {
    #[command(subcommand)]
    pub(crate) action: Option<AdhocAction>,
    #[command(flatten)]
    pub(crate) query: AdhocQuery,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AdhocAction {
    /// Make the device. Without the daemon, stay in the foreground; the device goes with this process.
    Up(Box<Up>),
    /// Make a new key for a group: a file for `--key-file` and `key_file`, to be copied to each host of the group.
    Key {
        /// File to create. Only its owner can read it.
        file: PathBuf,
    },
    /// Remove the device. Its radios are as before.
    Down(Device),
    /// Add a radio to the running device.
    Add {
        /// Device to add.
        radio: String,
        #[command(flatten)]
        device: Device,
    },
    /// Remove a radio from the running device.
    Remove {
        /// Radio to remove.
        radio: String,
        #[command(flatten)]
        device: Device,
    },
    /// Change settings of the running device.
    Set {
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        device: Device,
    },
    /// Show the neighbours, once for each radio that reaches them.
    Neighbours(AdhocQuery),
}

/// Options to reach the device.
#[derive(Debug, Clone, Args)]
pub(crate) struct Device {
    /// Name of the device.
    #[arg(long, default_value = braid_control::adhoc::DEFAULT_NAME)]
    pub(crate) name: String,
    /// Socket of the process that owns the device. Default: the device's own, else the daemon's.
    #[arg(long, value_name = "PATH", env = "BRAID_SOCKET")]
    pub(crate) socket: Option<PathBuf>,
}

impl Device {
    /// The socket of a device without the daemon.
    pub(crate) fn own_socket(&self) -> PathBuf {
        let daemon = PathBuf::from(DEFAULT_SOCKET);
        self.socket.clone().unwrap_or_else(|| daemon.with_file_name(format!("adhoc-{}.sock", self.name.replace('/', "_"))))
    }

    /// The socket of the device, with the daemon or without.
    pub(crate) fn socket(&self) -> PathBuf {
        match &self.socket {
            Some(socket) => socket.clone(),
            // A process that was killed leaves its socket.
            None => Some(self.own_socket()).filter(|own| UnixStream::connect(own).is_ok()).unwrap_or_else(|| DEFAULT_SOCKET.into()),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct AdhocQuery {
    #[command(flatten)]
    pub(crate) device: Device,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Up {
    /// A device below the ad-hoc device: wireless, wired or Bluetooth (repeat for several).
    #[arg(long = "radio", value_name = "DEVICE", required = true)]
    pub(crate) radios: Vec<String>,
    /// Ethernet address of the device. Default: one that its name and the first radio determine.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) mac: Option<String>,
    /// File with the key of the group (`braid adhoc key` makes one): its hosts authenticate and encrypt what they send each other (MACsec).
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: Settings,
    #[command(flatten)]
    pub(crate) device: Device,
    /// Read batteries from this directory instead of /sys.
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) sys: Option<PathBuf>,
}

/// How frames get their radio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Spread {
    /// A flow keeps its radio while that works
    Flow,
    /// Each frame gets a radio anew, which may reorder a flow
    Frame,
}

/// A setting that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Settings {
    /// Priority of a radio: 0 is the highest and the default (repeat for several).
    #[arg(long = "priority", value_name = "RADIO=NUMBER", value_parser = pair::<u32>)]
    priorities: Vec<(String, u32)>,
    /// Technology of a radio, by which its power is known: wifi, bluetooth, gprs, 3g, lte, 5g or ethernet.
    #[arg(long = "technology", value_name = "RADIO=NAME", value_parser = pair::<String>)]
    technologies: Vec<(String, String)>,
    /// Whether a radio carries only its own address, so that addresses are translated. Default: wireless and Bluetooth devices.
    #[arg(long = "translate", value_name = "RADIO=on|off", value_parser = pair::<String>)]
    translates: Vec<(String, String)>,
    /// A radio of better priority is not used for a neighbour that another radio heard later by more than this (the paper's maxdiff), such as 100ms.
    #[arg(long, value_name = "TIME", value_parser = time)]
    hysteresis: Option<Duration>,
    /// Forget a neighbour that was not heard for this time.
    #[arg(long, value_name = "TIME", value_parser = time)]
    expiry: Option<Duration>,
    /// Use only the radio with the least energy while the battery is low.
    #[arg(long, value_name = "on|off")]
    power_saving: Option<OnOff>,
    /// What gets a radio.
    #[arg(long)]
    spread: Option<Spread>,
}

impl Settings {
    /// The change of a running device.
    pub(crate) fn change(&self) -> Result<AdhocChange, String> {
        let radio = |radio: &String| AdhocRadioChange { radio: radio.clone(), ..AdhocRadioChange::default() };
        let mut radios = Vec::new();
        radios.extend(self.priorities.iter().map(|(name, priority)| AdhocRadioChange { priority: Some(*priority), ..radio(name) }));
        radios.extend(self.technologies.iter().map(|(name, it)| AdhocRadioChange { technology: Some(it.clone()), ..radio(name) }));
        for (name, text) in &self.translates {
            let translates = match text.as_str() {
                "on" => true,
                "off" => false,
                _ => return Err(format!("--translate {name}={text}: write {name}=on or {name}=off")),
            };
            radios.push(AdhocRadioChange { translates: Some(translates), ..radio(name) });
        }
        let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Ok(AdhocChange {
            radios,
            hysteresis_ms: self.hysteresis.map(ms),
            expiry_ms: self.expiry.map(ms),
            power_saving: self.power_saving.map(|value| value == OnOff::On),
            by_frame: self.spread.map(|spread| spread == Spread::Frame),
            ..AdhocChange::default()
        })
    }
}

impl Up {
    /// The request to make the device.
    pub(crate) fn request(&self) -> Result<AdhocUp, String> {
        let settings = AdhocChange { add: self.radios.clone(), ..self.settings.change()? };
        Ok(AdhocUp { name: Some(self.device.name.clone()), mac: self.mac.clone(), settings })
    }
}

fn pair<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<(String, T), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} has no \"=\": write RADIO=VALUE"))?;
    Ok((name.to_owned(), value.parse().map_err(|error| format!("{value:?}: {error}"))?))
}

fn time(text: &str) -> Result<Duration, String> {
    let wanted = || format!("{text:?} is not a time: write a whole number followed by ms or s, as in 100ms");
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..end].parse().map_err(|_| wanted())?;
    match text[end..].trim() {
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        _ => Err(wanted()),
    }
}
