//! `braid net`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_daemon::controller::MANAGERS;
use clap::{Args, Subcommand};

use super::net_slice::{SliceAction, Slicer};
use super::{Identity, NetJoin, PageOptions, SfnetCommand};

/// The network's side: one OpenFlow controller over Wi-Fi, cellular and wire, for devices that use many networks at once.
#[derive(Debug, Args)]
pub(crate) struct Net {
    #[command(subcommand)]
    pub(crate) action: NetAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetAction {
    /// Run the controller in the foreground, for switches of OpenFlow 1.0 and 1.3 such as Open vSwitch.
    ///
    /// It finds switches, links and hosts, and routes; flows go on while it is away. It needs no privileges. Without TLS, which a configuration file turns on,
    /// connections are neither authenticated nor encrypted: listen on addresses that only switches reach.
    Controller(Controller),
    /// Run a slicer in the foreground: several controllers share one network of switches, and each sees and changes only its own part of it.
    ///
    /// Switches of OpenFlow 1.0 and 1.3 connect to it; it dials the controllers of each slice. Entries stay while it is away. It needs no privileges.
    Slicer(Slicer),
    /// Show, make, change and remove the slices of a slicer, and choose who is in which.
    #[command(subcommand)]
    Slice(SliceAction),
    /// Join a network with a controller as a client: one Ethernet device over several radios, which the controller directs.
    ///
    /// The device has the address of the radios, and goes with this process. While there is no controller, it uses a radio that has a link. Needs root.
    Join(Box<NetJoin>),
    /// Print this client's public key, by which the controller's configuration names it.
    Key(Identity),
    /// Show the switches, links, access points and hosts of the controller.
    Status(NetQuery),
    /// Choose the mobility manager of a host: how its packets move when it does.
    Manager {
        /// Ethernet address of the host, as `status` shows it.
        host: String,
        /// `hard`: its packets go where it was seen last. `hoolock`: the host keeps its old link for a while. `n-cast`: packets go to both places for a while,
        /// if the host removes duplicates. `predict` and `balance` add to `hoolock`: the one sends hosts to the access point where such hosts went before, the
        /// other one from busy access points to others.
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
        manager: String,
        #[command(flatten)]
        at: ControllerSocket,
    },
    /// Open the controller's web page, or print its address.
    ///
    /// The controller must run with --ui; the package's service does.
    Ui {
        /// Print the address instead of opening it.
        #[arg(long)]
        print: bool,
        #[command(flatten)]
        at: ControllerSocket,
    },
    /// Show handovers in two minutes, with pictures: a host walks over four access points while a video and a download run, under each mobility manager.
    ///
    /// Runs `braid-lab net-demo`, which must be beside this program: it is built from Braid's source (`make net-demo`), and makes all of the
    /// network in namespaces of its own.
    Demo {
        /// Directory for the pictures and the figures.
        #[arg(long, value_name = "DIR", default_value = ".")]
        out: PathBuf,
    },
    Sfnet(Box<SfnetCommand>),
    /// Slice the configuration of devices: several managers of SNMP, each of which sees and sets its own part only.
    ///
    /// It is an agent to managers and a manager to the devices' agents, by SNMPv2c and SNMPv3. What slices share, such as the channel of a radio, a policy
    /// decides. `snmp-slicer.example.toml` explains the configuration, which is read again after SIGHUP. It runs in the foreground, and needs no privileges.
    SnmpSlicer(SnmpSlicer),
    /// Ask a host that runs Braid to go to an access point.
    Move {
        /// Ethernet address of the host, as `status` shows it.
        host: String,
        /// Address of the access point, as `status` shows it.
        access: String,
        #[command(flatten)]
        at: ControllerSocket,
    },
}

/// Options of the controller.
#[derive(Debug, Args)]
#[command(mut_arg("ui", |ui| ui.default_missing_value(DEFAULT_PAGE).help(UI_HELP)))]
pub(crate) struct Controller {
    /// Configuration file; `controller.example.toml` explains it. Other options count more. It is read again after SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address and port where switches connect; may be repeated. Default: 127.0.0.1:6653.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Vec<SocketAddr>,
    /// Mobility manager of hosts for which none is chosen. Default: hard.
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
    pub(crate) manager: Option<String>,
    /// For how long `hoolock` holds the old link, and `n-cast` sends to both places. Default: 2s.
    #[arg(long, value_name = "SPAN", value_parser = super::span)]
    pub(crate) hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) page: PageOptions,
    #[command(flatten)]
    pub(crate) identity: Identity,
    #[command(flatten)]
    pub(crate) at: ControllerSocket,
}

/// Options of the slicer of SNMP.
#[derive(Debug, Args)]
pub(crate) struct SnmpSlicer {
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Directory with the id of its engine, and with what slices have asked for.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/braid-snmp")]
    pub(crate) state_dir: PathBuf,
    /// Only check the configuration and the files that it names.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Address of the page if none is given; the daemon's page has another port.
const DEFAULT_PAGE: &str = "127.0.0.1:5760";
const UI_HELP: &str = "Serve the web page on this address, with TLS except on loopback. Without an address: 127.0.0.1:5760";

/// How to reach the controller.
#[derive(Debug, Clone, Args)]
pub(crate) struct ControllerSocket {
    /// Socket of the controller.
    #[arg(long, value_name = "PATH", env = "BRAID_NET_SOCKET", default_value = "/run/braid-net/net.sock")]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct NetQuery {
    #[command(flatten)]
    pub(crate) at: ControllerSocket,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn controller(words: &[&str]) -> Result<Controller, clap::Error> {
        match Cli::try_parse_from([&["braid", "net", "controller"], words].concat())?.command {
            Command::Net(Net { action: NetAction::Controller(options) }) => Ok(options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_page_has_the_daemons_options_and_another_port() {
        assert_eq!(controller(&[]).unwrap().page.wanted(), None);
        let page = controller(&["--ui", "--ui-name", "net.lan"]).unwrap().page.wanted().unwrap();
        assert_eq!((page.listen.to_string().as_str(), page.names, page.certificate), (DEFAULT_PAGE, vec!["net.lan".to_owned()], None));
        assert_eq!(controller(&["--ui=[::1]:80"]).unwrap().page.wanted().unwrap().listen, "[::1]:80".parse().unwrap());
        assert!(UI_HELP.ends_with(DEFAULT_PAGE));
        for words in [&["--ui-name", "a"][..], &["--ui", "--ui-cert", "c"], &["--ui", "--ui-key", "k"]] {
            assert!(controller(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn the_packages_service_starts_a_controller_that_the_commands_find() {
        let packaging = |name: &str| std::fs::read_to_string(format!("{}/../../packaging/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (unit, defaults) = (packaging("braid-net-controller.service"), packaging("default-braid-net-controller"));
        let value = |text: &str, key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap().to_owned();
        let given = value(&defaults, "BRAID_NET_OPTIONS=");
        let line = value(&unit, "ExecStart=/usr/bin/braid net controller ").replace("$BRAID_NET_OPTIONS", given.trim_matches('"'));
        let options = controller(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert_eq!(options.config, Some(PathBuf::from("/etc/braid-net/controller.toml")));
        assert_eq!(options.identity.state_dir, PathBuf::from("/var/lib").join(value(&unit, "StateDirectory=")));
        assert_eq!(options.at.socket.parent(), Some(PathBuf::from("/run").join(value(&unit, "RuntimeDirectory=")).as_path()));
        assert!(options.page.wanted().is_some());
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/controller.toml");
        braid_config::controller::load(file.as_ref()).unwrap_or_else(|errors| panic!("{errors}"));
    }
}
