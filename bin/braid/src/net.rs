//! `braid net`.

use std::io::{self, Write};

use braid_api::{Accepted, NetworkChange, NetworkPlace, NetworkStatus};
use braid_daemon::controller::{self, ControllerOptions};

use crate::cli::{Net, NetAction};
use crate::client::{self, ClientError};
use crate::table::{Page, Tone, cell, numbers, toned, words};
use crate::{print, print_accepted, start};

/// Runs the command.
pub(crate) fn run(command: Net, verbose: u8) -> anyhow::Result<()> {
    match command.action {
        NetAction::Controller(options) => {
            start::log("info", verbose);
            for address in options.listen.iter().filter(|address| !address.ip().is_loopback()) {
                let _ = writeln!(
                    io::stderr(),
                    "braid: connections to {address} are neither authenticated nor encrypted: whoever reaches it can pose as a switch"
                );
            }
            let wanted = ControllerOptions { listen: options.listen, manager: options.manager, hold: options.hold };
            controller::run(&wanted, &options.at.socket, |listens| {
                let listens: Vec<String> = listens.iter().map(ToString::to_string).collect();
                let _ = writeln!(io::stdout(), "the controller takes switches on {} until this process ends (Ctrl-C)", listens.join(", "));
            })?;
        }
        NetAction::Status(query) => {
            let status: NetworkStatus = client::read(&query.at.socket, "/v1/network").map_err(no_controller)?;
            print(query.json, &status, show)?;
        }
        NetAction::Manager { host, manager, at } => {
            let change = NetworkChange { host, manager };
            print_accepted(&client::send::<Accepted>(&at.socket, "/v1/network", &change).map_err(no_controller)?)?;
        }
    }
    Ok(())
}

fn no_controller(error: ClientError) -> anyhow::Error {
    match error {
        ClientError::NotRunning(socket) => anyhow::anyhow!(
            "no controller answers on {}: start one with `braid net controller`, or name its socket with --socket or BRAID_NET_SOCKET",
            socket.display()
        ),
        error => error.into(),
    }
}

fn place(place: &NetworkPlace) -> String {
    format!("{}:{}", short(&place.datapath), place.port)
}

fn places(places: &[NetworkPlace]) -> String {
    places.iter().map(place).collect::<Vec<_>>().join(" ")
}

/// A datapath id without leading zeros.
fn short(datapath: &str) -> &str {
    let rest = datapath.trim_start_matches('0');
    if rest.is_empty() { "0" } else { rest }
}

fn show(page: &mut Page<'_>, status: &NetworkStatus) -> io::Result<()> {
    page.line(format!("switches connect to {}", status.listens.join(", ")))?;
    if !status.converged {
        page.toned(Tone::Doubtful, "some switches do not have all entries yet")?;
    }
    let columns = [words("SWITCH"), words("STATE"), words("FROM"), numbers("PORTS"), numbers("UP"), numbers("ENTRIES")];
    let rows = status.switches.iter().map(|switch| {
        let tone = match switch.state.as_str() {
            "live" => Tone::Good,
            "silent" | "away" => Tone::Bad,
            _ => Tone::Doubtful,
        };
        vec![
            cell(Some(short(&switch.datapath))),
            toned(Some(&switch.state), tone),
            cell(Some(&switch.peer)),
            cell(Some(switch.ports.len())),
            cell(Some(switch.ports.iter().filter(|port| port.up).count())),
            cell(Some(switch.entries)),
        ]
    });
    page.table(
        &columns,
        &rows.collect::<Vec<_>>(),
        "no switch has connected: `ovs-vsctl set-controller BRIDGE tcp:ADDRESS:PORT` connects one",
    )?;
    page.line("")?;
    let rows: Vec<_> = status.links.iter().map(|link| vec![cell(Some(place(&link.one))), cell(Some(place(&link.other)))]).collect();
    page.table(&[words("LINK"), words("AND")], &rows, "no link between switches")?;
    page.line("")?;
    let columns = [words("HOST"), words("AT"), words("ACTIVE"), words("MANAGER"), words("BRAID"), words("ADDRESSES")];
    let rows = status.hosts.iter().map(|host| {
        vec![
            cell(Some(&host.mac)),
            cell(Some(places(&host.attachments))),
            cell(Some(places(&host.active))),
            cell(Some(&host.manager)),
            cell(Some(if host.client { "yes" } else { "no" })),
            cell(Some(host.addresses.join(" "))),
        ]
    });
    page.table(&columns, &rows.collect::<Vec<_>>(), "no host has sent a packet yet")
}
