//! `braid net join` and `braid net key`.

use std::net::SocketAddr;
use std::path::PathBuf;

use braid_control::config::NETWORK_DEVICE;
use braid_daemon::joined::SUPPLICANTS;
use braid_model::key::PublicKey;
use braid_model::{Mac, Rate};
use clap::Args;

use super::{DEFAULT_STATE_DIR, rate};

/// Options to join a network.
#[derive(Debug, Args)]
pub(crate) struct NetJoin {
    /// A device below: wireless, cellular or wired (repeat for several). With `=ADDRESS`: it is at this access point always, as a cable is.
    #[arg(long = "radio", value_name = "DEVICE[=ADDRESS]", required = true, value_parser = radio)]
    pub(crate) radios: Vec<(String, Option<Mac>)>,
    /// Address and port where the controller takes clients.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) controller: SocketAddr,
    /// Key of the controller, as it prints it at its start. Without it, whoever answers there may direct the radios.
    #[arg(long, value_name = "KEY")]
    pub(crate) controller_key: Option<PublicKey>,
    /// Name of the device.
    #[arg(long, default_value = NETWORK_DEVICE)]
    pub(crate) name: String,
    /// Ethernet address of the device and of all radios. Default: that which the radios have.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) mac: Option<String>,
    /// Directory with the sockets of wpa_supplicant, by which wireless radios enter and leave access points.
    #[arg(long, value_name = "DIR", default_value = SUPPLICANTS)]
    pub(crate) supplicant: PathBuf,
    /// Ask the network to keep this rate towards this host free at the access point in use, such as "2 Mbit/s".
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) reserve_down: Option<Rate>,
    /// Ask the network to keep this rate away from this host free.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) reserve_up: Option<Rate>,
    #[command(flatten)]
    pub(crate) identity: Identity,
    /// Socket of this process, for `braid adhoc --socket`. Default: the device's own.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

/// Where the own key is.
#[derive(Debug, Args)]
pub(crate) struct Identity {
    /// Directory with the own key, which is made if there is none.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
}

fn radio(text: &str) -> Result<(String, Option<Mac>), String> {
    let Some((name, access)) = text.split_once('=') else { return Ok((text.to_owned(), None)) };
    let access = access.parse().map_err(|_| format!("{access:?} is no Ethernet address of an access point, such as 02:00:00:00:0a:01"))?;
    Ok((name.to_owned(), Some(access)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_radio_may_name_its_access_point() {
        assert_eq!(radio("wlan0"), Ok(("wlan0".to_owned(), None)));
        assert_eq!(radio("eth0=02:00:00:00:0a:01"), Ok(("eth0".to_owned(), Some(Mac([2, 0, 0, 0, 10, 1])))));
        assert!(radio("eth0=x").unwrap_err().contains("\"x\" is no Ethernet address"));
    }
}
