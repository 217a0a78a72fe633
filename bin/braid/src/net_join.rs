//! `braid net join` and `braid net key`.

use std::io::{self, Write};

use braid_api::{AdhocChange, AdhocUp};
use braid_control::adhoc::AdhocSettings;
use braid_control::config::NetworkSettings;
use braid_daemon::joined::{self, JoinOptions, client_key};
use braid_model::PerDirection;

use crate::cli::{Device, Identity, NetJoin};
use crate::start;

/// Joins a network until this process ends.
pub(crate) fn join(join: NetJoin, verbose: u8) -> anyhow::Result<()> {
    start::log("info", verbose);
    if join.controller_key.is_none() {
        let _ = writeln!(
            io::stderr(),
            "braid: the controller is not authenticated: whoever answers at {} may direct the radios; name its key with --controller-key",
            join.controller
        );
    }
    let (radios, accesses) = join.radios.into_iter().unzip();
    let settings = AdhocChange { add: radios, ..AdhocChange::default() };
    let up = AdhocUp { name: Some(join.name.clone()), mac: join.mac, settings };
    let network = NetworkSettings {
        device: AdhocSettings::of(&up).map_err(|error| anyhow::anyhow!("{}", error.detail))?,
        accesses,
        controller: join.controller,
        controller_key: join.controller_key,
        supplicants: Some(join.supplicant),
    };
    let device = Device { name: join.name, socket: join.socket };
    let reserve = PerDirection { down: join.reserve_down.unwrap_or_default(), up: join.reserve_up.unwrap_or_default() };
    let options = JoinOptions { network, state_dir: join.identity.state_dir, reserve };
    joined::run(options, &device.own_socket(), |name| {
        let _ = writeln!(io::stdout(), "{name} is up until this process ends (Ctrl-C, or `braid adhoc down --name {name}`)");
    })
}

/// Prints this client's public key.
pub(crate) fn key(identity: &Identity) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{}", client_key(&identity.state_dir)?)?;
    Ok(())
}
