//! `braid net`.

use std::io::{self, Write};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use braid_api::{Accepted, NetworkAccess, NetworkChange, NetworkLink, NetworkPlace, NetworkStatus};
use braid_daemon::controller::{self, ControllerOptions, Listens};
use braid_daemon::snmp_slicer::{self, Front};

use braid_model::Rate;

use crate::cli::{Net, NetAction};
use crate::client::{self, ClientError};
use crate::table::{Cell, Page, Tone, cell, numbers, percent, rate, toned, words};
use crate::{net_join, net_sfnet, net_slice, print, print_accepted, start, ui};

/// Runs the command.
pub(crate) fn run(command: Net, verbose: u8) -> anyhow::Result<()> {
    match command.action {
        NetAction::Controller(options) => {
            start::log("info", verbose);
            let wanted = ControllerOptions {
                config: options.config,
                listen: options.listen,
                manager: options.manager,
                hold: options.hold,
                state_dir: options.identity.state_dir,
                ui: options.page.wanted(),
            };
            controller::run(&wanted, &options.at.socket, ready)?;
        }
        NetAction::Slicer(options) => net_slice::serve(options, verbose)?,
        NetAction::Slice(action) => net_slice::run(action)?,
        NetAction::Join(join) => net_join::join(*join, verbose)?,
        NetAction::Sfnet(command) => net_sfnet::run(*command)?,
        NetAction::Key(identity) => net_join::key(&identity)?,
        NetAction::Demo { out } => demo(&out)?,
        NetAction::Ui { print, at } => {
            ui::open(&at.socket, print).map_err(|error| error.downcast().map_or_else(|error| error, no_controller))?;
        }
        NetAction::Status(query) => {
            let status: NetworkStatus = client::read(&query.at.socket, "/v1/network").map_err(no_controller)?;
            print(query.json, &status, show)?;
        }
        NetAction::Manager { host, manager, at } => {
            change(&at.socket, &NetworkChange { host, manager: Some(manager), to: None })?;
        }
        NetAction::SnmpSlicer(options) if options.check => {
            snmp_slicer::check(&options.config)?;
            writeln!(io::stdout(), "{} is usable", options.config.display())?;
        }
        NetAction::SnmpSlicer(options) => {
            start::log("info", verbose);
            snmp_slicer::run(&options.config, &options.state_dir, slicing)?;
        }
        NetAction::Move { host, access, at } => change(&at.socket, &NetworkChange { host, manager: None, to: Some(access) })?,
    }
    Ok(())
}

/// Becomes `braid-lab net-demo`. It is not looked for on the path, because this process may be root's.
fn demo(out: &Path) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program's directory")?.with_file_name("braid-lab");
    let error = Command::new(&program).arg("net-demo").arg("--out").arg(out).exec();
    Err(error).with_context(|| {
        format!("cannot run {}: the demonstration comes with Braid's source; run `make net-demo` there, which builds it", program.display())
    })
}

fn ready(listens: &Listens) {
    for address in listens.switches.iter().filter(|address| !listens.tls && !address.ip().is_loopback()) {
        let _ = writeln!(
            io::stderr(),
            "braid: connections to {address} are neither authenticated nor encrypted: whoever reaches it can pose as a switch; [tls] in the configuration \
             changes that"
        );
    }
    let switches: Vec<String> = listens.switches.iter().map(ToString::to_string).collect();
    let _ = writeln!(io::stdout(), "the controller takes switches on {} until this process ends (Ctrl-C)", switches.join(", "));
    if let Some((clients, key)) = &listens.clients {
        let clients: Vec<String> = clients.iter().map(ToString::to_string).collect();
        let _ = writeln!(io::stdout(), "it takes clients on {}: `braid net join --controller-key {key}`", clients.join(", "));
    }
    if !listens.programs.is_empty() {
        let programs: Vec<String> = listens.programs.iter().map(ToString::to_string).collect();
        let _ = writeln!(io::stdout(), "it takes programs on {}: `braid net sfnet`", programs.join(", "));
    }
    if let Some((programs, key)) = &listens.programs_tls {
        let programs: Vec<String> = programs.iter().map(ToString::to_string).collect();
        let _ = writeln!(io::stdout(), "it takes programs with TLS on {}: `braid net sfnet --controller-key {key}`", programs.join(", "));
    }
}

fn slicing(fronts: &[Front]) {
    for front in fronts {
        let _ = writeln!(io::stdout(), "managers ask for {} at {}", front.device, front.listen);
    }
    let _ = writeln!(io::stdout(), "the slicer runs until this process ends (Ctrl-C)");
}

fn change(socket: &Path, change: &NetworkChange) -> anyhow::Result<()> {
    print_accepted(&client::send::<Accepted>(socket, "/v1/network", change).map_err(no_controller)?)?;
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

fn access(access: &NetworkAccess) -> Vec<Cell> {
    let used = access.rate_up_bps.max(access.rate_down_bps).map(|most| most as f64 / access.capacity_bps.max(1) as f64);
    vec![
        cell(Some(&access.id)),
        cell(Some(place(&access.place))),
        cell(Some(&access.kind)),
        cell(access.channel),
        if access.serves { toned(Some("up"), Tone::Good) } else { toned(Some("down"), Tone::Bad) },
        cell(rate(access.rate_up_bps)),
        cell(rate(access.rate_down_bps)),
        cell(percent(used)),
        reserved(access.reserved_up_bps, access.enforces_up),
        reserved(access.reserved_down_bps, access.enforces_down),
    ]
}

/// What is reserved in a direction, and whether that is enforced.
fn reserved(bps: u64, enforces: bool) -> Cell {
    match (bps, enforces) {
        (0, _) => cell(rate(None)),
        (_, true) => cell(rate(Some(bps))),
        (_, false) => toned(Some(format!("{} (only counted)", Rate::from_bps(bps))), Tone::Doubtful),
    }
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
            "silent" | "away" | "cut-off" => Tone::Bad,
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
    let frames = |link: &NetworkLink| match link.full_frames {
        Some(true) => cell(Some("all")),
        Some(false) => toned(Some("small"), Tone::Bad),
        None => cell(None::<&str>),
    };
    let rows: Vec<_> =
        status.links.iter().map(|link| vec![cell(Some(place(&link.one))), cell(Some(place(&link.other))), frames(link)]).collect();
    page.table(&[words("LINK"), words("AND"), words("FRAMES")], &rows, "no link between switches")?;
    if status.links.iter().any(|link| link.full_frames == Some(false)) {
        page.toned(
            Tone::Bad,
            "links with small frames drop packets of 1500 bytes: let the network below carry 1550 bytes (Geneve; GRE: 1542), or lower the MTU of the hosts",
        )?;
    }
    page.line("")?;
    if !status.accesses.is_empty() {
        let columns = [
            words("ACCESS"),
            words("AT"),
            words("KIND"),
            numbers("CHANNEL"),
            words("STATE"),
            numbers("FROM HOSTS"),
            numbers("TO HOSTS"),
            numbers("USED"),
            numbers("RESERVED FROM"),
            numbers("RESERVED TO"),
        ];
        page.table(&columns, &status.accesses.iter().map(access).collect::<Vec<_>>(), "")?;
        for host in &status.hosts {
            if let Some((reservation, reason)) = host.reservation.as_ref().and_then(|one| Some((one, one.reason.as_ref()?))) {
                let asked = [reservation.asked_down_bps, reservation.asked_up_bps].map(Rate::from_bps);
                let text = format!("{} asks to reserve {} down and {} up, which is not kept: {reason}", host.mac, asked[0], asked[1]);
                page.toned(Tone::Doubtful, &text)?;
            }
        }
        page.line("")?;
    }
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
