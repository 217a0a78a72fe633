//! `braid net slicer` and `braid net slice`.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;

use braid_api::{Accepted, SliceChange, SliceDescription, SlicePart, SliceUser, SliceView, SlicerStatus};
use braid_daemon::slicer::{self, SlicerListens, SlicerOptions, UserAnswer, UserRequest};

use crate::cli::net_slice::{SliceAction, SliceOptions, Slicer};
use crate::client::{self, ClientError};
use crate::table::{Page, Tone, cell, numbers, toned, words};
use crate::{print, print_accepted, start};

/// Troubles that `list` shows.
const SHOWN: usize = 10;

/// Runs the slicer.
pub(crate) fn serve(options: Slicer, verbose: u8) -> anyhow::Result<()> {
    start::log("info", verbose);
    let wanted = SlicerOptions { config: options.config, listen: options.listen, state_dir: options.state_dir };
    slicer::run(&wanted, &options.at.socket, ready)
}

/// Runs the command.
pub(crate) fn run(action: SliceAction) -> anyhow::Result<()> {
    match action {
        SliceAction::List { at, json } => print(json, &read(&at.socket)?, show)?,
        SliceAction::Add(options) => {
            let slice = described(&options, SliceDescription { name: options.name.clone(), ..SliceDescription::default() });
            change(&options.at.socket, &SliceChange { add: Some(slice), ..SliceChange::default() })?;
        }
        SliceAction::Change(options) => {
            let view = find(&options.at.socket, &options.name)?;
            let slice = described(&options, view.slice);
            change(&options.at.socket, &SliceChange { change: Some(slice), ..SliceChange::default() })?;
        }
        SliceAction::Remove { name, at } => change(&at.socket, &SliceChange { remove: Some(name), ..SliceChange::default() })?,
        SliceAction::Stage { name, of, controller, host, percent, at } => {
            let slice = SliceDescription {
                name,
                controllers: vec![controller],
                stage_of: Some(of),
                stage_hosts: host,
                stage_percent: percent,
                ..SliceDescription::default()
            };
            let is_there = read(&at.socket)?.slices.iter().any(|view| view.slice.name == slice.name);
            let (add, change_to) = if is_there { (None, Some(slice)) } else { (Some(slice), None) };
            change(&at.socket, &SliceChange { add, change: change_to, ..SliceChange::default() })?;
        }
        SliceAction::Rollback { name, at } => {
            let view = find(&at.socket, &name)?;
            anyhow::ensure!(
                view.slice.stage_of.is_some(),
                "slice {name} is no new version of another one: `braid net slice remove` removes it"
            );
            change(&at.socket, &SliceChange { remove: Some(name), ..SliceChange::default() })?;
        }
        SliceAction::OptIn { name, user, slicer, at } => match (slicer, user) {
            (Some(slicer), _) => ask(slicer, &UserRequest::Join(name))?,
            (None, user) => {
                let join = Some(SliceUser { slice: name, user: user.unwrap_or_default() });
                change(&at.socket, &SliceChange { join, ..SliceChange::default() })?;
            }
        },
        SliceAction::OptOut { user, slicer, at } => match slicer {
            Some(slicer) => ask(slicer, &UserRequest::Leave)?,
            None => change(&at.socket, &SliceChange { leave: user, ..SliceChange::default() })?,
        },
    }
    Ok(())
}

fn ready(listens: &SlicerListens) {
    for address in listens.switches.iter().filter(|address| !listens.tls && !address.ip().is_loopback()) {
        let _ = writeln!(
            io::stderr(),
            "braid: connections to {address} are neither authenticated nor encrypted: whoever reaches it can pose as a switch; [tls] in the configuration \
             changes that"
        );
    }
    let list = |addresses: &[SocketAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let _ = writeln!(io::stdout(), "the slicer takes switches on {} until this process ends (Ctrl-C)", list(&listens.switches));
    if !listens.users.is_empty() {
        let _ = writeln!(io::stdout(), "users opt in by `braid net slice opt-in SLICE --at {}`", list(&listens.users));
    }
}

fn read(socket: &Path) -> anyhow::Result<SlicerStatus> {
    client::read(socket, "/v1/slices").map_err(no_slicer)
}

fn find(socket: &Path, name: &str) -> anyhow::Result<SliceView> {
    let found = read(socket)?.slices.into_iter().find(|view| view.slice.name == name);
    found.ok_or_else(|| anyhow::anyhow!("there is no slice {name}: `braid net slice list` shows the names"))
}

fn change(socket: &Path, change: &SliceChange) -> anyhow::Result<()> {
    print_accepted(&client::send::<Accepted>(socket, "/v1/slices", change).map_err(no_slicer)?)?;
    Ok(())
}

fn ask(slicer: SocketAddr, request: &UserRequest) -> anyhow::Result<()> {
    match slicer::ask_as_user(slicer, request)? {
        UserAnswer::Done(text) => writeln!(io::stdout(), "{text}")?,
        UserAnswer::Refused(text) => anyhow::bail!("{text}"),
        UserAnswer::Slices(names) => writeln!(io::stdout(), "{}", names.join("\n"))?,
    }
    Ok(())
}

fn no_slicer(error: ClientError) -> anyhow::Error {
    match error {
        ClientError::NotRunning(socket) => anyhow::anyhow!(
            "no slicer answers on {}: start one with `braid net slicer`, or name its socket with --socket or BRAID_SLICER_SOCKET",
            socket.display()
        ),
        error => error.into(),
    }
}

/// The slice with what the options say.
fn described(options: &SliceOptions, before: SliceDescription) -> SliceDescription {
    let mut slice = before;
    if !options.controller.is_empty() {
        slice.controllers.clone_from(&options.controller);
    }
    slice.priority = options.priority.unwrap_or(slice.priority);
    let has_space = !options.matches.is_empty() || !options.port.is_empty() || options.switch.is_some();
    if has_space || options.read_only || options.delegate {
        let matches = if options.matches.is_empty() && has_space { vec![String::new()] } else { options.matches.clone() };
        let part = |matching: String| SlicePart {
            switch: options.switch.clone(),
            ports: options.port.clone(),
            matching,
            read: true,
            write: !options.read_only,
            delegate: options.delegate,
        };
        if has_space {
            slice.space = matches.into_iter().map(part).collect();
        } else {
            slice.space.iter_mut().for_each(|part| (part.write, part.delegate) = (!options.read_only, options.delegate));
        }
    }
    slice.within = options.within.clone().or(slice.within);
    slice.opt_in |= options.opt_in;
    slice.rate_bps = options.rate.map(|rate| rate.bps()).or(slice.rate_bps);
    if !options.queue.is_empty() {
        slice.queues.clone_from(&options.queue);
    }
    slice.max_entries = options.max_entries.or(slice.max_entries);
    slice.max_messages = options.max_messages.or(slice.max_messages);
    slice.max_packets = options.max_packets.or(slice.max_packets);
    slice
}

/// A datapath id without leading zeros.
fn short(datapath: &str) -> &str {
    let rest = datapath.trim_start_matches('0');
    if rest.is_empty() { "0" } else { rest }
}

fn space(view: &SliceView) -> String {
    let part = |part: &SlicePart| {
        let ports: Vec<String> = part.ports.iter().map(ToString::to_string).collect();
        let at = if ports.is_empty() { String::new() } else { format!(" at port {}", ports.join(" ")) };
        let of = part.switch.as_ref().map(|switch| format!(" of switch {}", short(switch))).unwrap_or_default();
        let only = if part.write { "" } else { " (reads)" };
        format!("{}{at}{of}{only}", if part.matching.is_empty() { "all" } else { &part.matching })
    };
    let mut parts: Vec<String> = view.slice.space.iter().map(part).collect();
    if let Some(base) = &view.slice.stage_of {
        parts.push(format!("{} hosts of {base}", view.staged.len()));
    }
    if !view.users.is_empty() {
        parts.push(format!("{} users", view.users.len()));
    }
    if view.slice.name == "production" {
        parts.push("what nobody claims".to_owned());
    }
    parts.join("; ")
}

fn show(page: &mut Page<'_>, status: &SlicerStatus) -> io::Result<()> {
    page.line(format!("switches connect to {}", status.listens.join(", ")))?;
    let columns = [
        words("SLICE"),
        numbers("PRIORITY"),
        words("CONTROLLERS"),
        numbers("CONNECTED"),
        numbers("ENTRIES"),
        numbers("MESSAGES"),
        numbers("REFUSED"),
        numbers("PACKETS"),
        numbers("DROPPED"),
        words("SPACE"),
    ];
    let rows = status.slices.iter().map(|view| {
        let connected = view.links.iter().filter(|link| link.version.is_some()).count();
        let all = format!("{connected}/{}", view.links.len());
        vec![
            cell(Some(&view.slice.name)),
            cell(Some(view.slice.priority)),
            cell(Some(view.slice.controllers.join(" ")).filter(|text| !text.is_empty())),
            if connected == view.links.len() { toned(Some(all), Tone::Good) } else { toned(Some(all), Tone::Bad) },
            cell(Some(view.entries)),
            cell(Some(view.messages)),
            cell(Some(view.refused)),
            cell(Some(view.packets)),
            cell(Some(view.dropped)),
            cell(Some(space(view))),
        ]
    });
    page.table(&columns, &rows.collect::<Vec<_>>(), "no slice")?;
    page.line("")?;
    let columns = [words("SWITCH"), words("STATE"), words("VERSION"), words("FROM"), numbers("PORTS"), numbers("ENTRIES")];
    let rows = status.switches.iter().map(|switch| {
        let tone = match switch.state.as_str() {
            "live" => Tone::Good,
            "away" => Tone::Bad,
            _ => Tone::Doubtful,
        };
        vec![
            cell(Some(short(&switch.datapath))),
            toned(Some(&switch.state), tone),
            cell(Some(&switch.version)),
            cell(Some(&switch.peer)),
            cell(Some(switch.ports.len())),
            cell(Some(switch.rows)),
        ]
    });
    let none = "no switch has connected: `ovs-vsctl set-controller BRIDGE tcp:ADDRESS:PORT` connects one";
    page.table(&columns, &rows.collect::<Vec<_>>(), none)?;
    for trouble in status.troubles.iter().take(SHOWN) {
        let slice = trouble.slice.as_ref().map(|slice| format!("slice {slice}: ")).unwrap_or_default();
        let message = trouble.message.as_ref().map(|message| format!("{message} refused: ")).unwrap_or_default();
        let switch = trouble.datapath.as_ref().map(|datapath| format!("switch {}: ", short(datapath))).unwrap_or_default();
        page.toned(Tone::Doubtful, &format!("{} s ago: {slice}{switch}{message}{}", trouble.age_ms / 1000, trouble.text))?;
    }
    Ok(())
}
