//! `braid adhoc`.

use std::io::{self, Write};

use braid_api::{Accepted, AdhocChange, AdhocNeighbour, AdhocRadio, AdhocStatus, Status};
use braid_daemon::adhoc::{AUTHENTICATED, NO_PRIVILEGE, UNAUTHENTICATED, run_alone};
use braid_peer::shared;
use serde::Serialize;

use crate::cli::{Adhoc, AdhocAction, AdhocQuery, AdhocUpOptions, Device};
use crate::client::ClientError;
use crate::table::{Page, Tone, cell, numbers, percent, toned, words};
use crate::{client, print, print_accepted, start};

/// Runs the command.
pub(crate) fn run(command: &Adhoc, verbose: u8) -> anyhow::Result<()> {
    let change = |device: &Device, change: AdhocChange| -> anyhow::Result<()> {
        check_name(device)?;
        Ok(print_accepted(&client::send::<Accepted>(&device.socket(), "/v1/adhoc", &change)?)?)
    };
    match &command.action {
        None => {
            let status = read(&command.query)?;
            print(command.query.json, &status, show)?;
        }
        Some(AdhocAction::Up(options)) => up(options, verbose)?,
        Some(AdhocAction::Key { file }) => {
            shared::create(file)?;
            writeln!(
                io::stdout(),
                "{} holds a new key: copy it to each host of the group over a channel that nobody else reads",
                file.display()
            )?;
        }
        Some(AdhocAction::Down(device)) => {
            check_name(device)?;
            print_accepted(&client::send(&device.socket(), "/v1/adhoc/down", &())?)?;
        }
        Some(AdhocAction::Add { radio, device }) => change(device, AdhocChange { add: vec![radio.clone()], ..AdhocChange::default() })?,
        Some(AdhocAction::Remove { radio, device }) => {
            change(device, AdhocChange { remove: vec![radio.clone()], ..AdhocChange::default() })?;
        }
        Some(AdhocAction::Set { settings, device }) => change(device, settings.change().map_err(anyhow::Error::msg)?)?,
        Some(AdhocAction::Neighbours(query)) => {
            let neighbours = Neighbours { neighbours: read(query)?.neighbours };
            print(query.json, &neighbours, |page, it: &Neighbours| show_neighbours(page, &it.neighbours))?;
        }
    }
    Ok(())
}

/// An order is for the device that it names. A socket that was named has one device.
fn check_name(device: &Device) -> anyhow::Result<()> {
    if device.socket.is_none() {
        let status: AdhocStatus = client::read(&device.socket(), "/v1/adhoc")?;
        anyhow::ensure!(
            status.name == device.name,
            "there is no device {}; the daemon has {}: name it with --name",
            device.name,
            status.name
        );
    }
    Ok(())
}

/// The answer of `neighbours --json`.
#[derive(Serialize)]
struct Neighbours {
    neighbours: Vec<AdhocNeighbour>,
}

fn read(query: &AdhocQuery) -> anyhow::Result<AdhocStatus> {
    Ok(client::read(&query.device.socket(), "/v1/adhoc")?)
}

/// Lets a daemon that runs make the device, or makes it here.
fn up(options: &AdhocUpOptions, verbose: u8) -> anyhow::Result<()> {
    let request = options.request().map_err(anyhow::Error::msg)?;
    // No client of the daemon makes it open a file, so this process owns a device whose group has a key.
    let daemon = options.device.socket.clone().unwrap_or_else(|| braid_http::DEFAULT_SOCKET.into());
    if options.key_file.is_none() && client::read::<Status>(&daemon, "/v1/status").is_ok() {
        match client::send(&daemon, "/v1/adhoc/up", &request) {
            // The daemon would have to be restarted. This process can do it.
            Err(ClientError::Problem(problem)) if problem.title == NO_PRIVILEGE && options.device.socket.is_none() => {}
            done => return Ok(print_accepted(&done?)?),
        }
    }
    start::log("info", verbose);
    run_alone(&request, options.key_file.clone(), &options.device.own_socket(), options.sys.as_deref(), |name| {
        let text = if options.key_file.is_some() { AUTHENTICATED } else { UNAUTHENTICATED };
        let _ = writeln!(io::stderr(), "braid: {text}");
        let _ = writeln!(io::stdout(), "{name} is up until this process ends (Ctrl-C, or `braid adhoc down`)");
    })
}

fn show(page: &mut Page<'_>, status: &AdhocStatus) -> io::Result<()> {
    let mtu = status.mtu.map_or_else(|| "unknown".to_owned(), |mtu| mtu.to_string());
    let spread = if status.by_frame { "each frame gets a radio" } else { "each flow gets a radio" };
    page.line(format!("{}  {}  MTU {mtu}  {spread}", status.name, status.mac))?;
    if status.authenticated {
        page.line(AUTHENTICATED)?;
    } else {
        page.toned(Tone::Doubtful, &format!("warning: {UNAUTHENTICATED}"))?;
    }
    for warning in &status.warnings {
        page.toned(Tone::Doubtful, &format!("warning: {warning}"))?;
    }
    if let Some(reservation) = &status.reservation {
        let tone = if reservation.reason.is_some() { Tone::Doubtful } else { Tone::Good };
        page.toned(tone, &format!("the network is {}", crate::show::reservation(reservation)))?;
    }
    if status.saving_power {
        page.line("the battery is low: only the radio with the least energy is used")?;
    }
    let columns = [words("RADIO"), words("STATE"), words("ADDRESS"), numbers("PRIORITY"), words("TECHNOLOGY"), numbers("NEIGHBOURS")];
    let row = |radio: &AdhocRadio| {
        let state = if radio.up { "up".to_owned() } else { radio.reason.clone().unwrap_or_else(|| "down".to_owned()) };
        let address = radio.mac.as_ref().map(|mac| if radio.translates { format!("{mac} (translated)") } else { mac.clone() });
        vec![
            cell(Some(&radio.name)),
            toned(Some(state), if radio.up { Tone::Good } else { Tone::Bad }),
            cell(address),
            cell(Some(radio.priority)),
            cell(radio.technology.as_ref()),
            cell(Some(radio.neighbours)),
        ]
    };
    page.table(&columns, &status.radios.iter().map(row).collect::<Vec<_>>(), "no radio")?;
    page.line("")?;
    show_neighbours(page, &status.neighbours)
}

fn show_neighbours(page: &mut Page<'_>, neighbours: &[AdhocNeighbour]) -> io::Result<()> {
    let columns = [
        words("NEIGHBOUR"),
        words("RADIO"),
        words("STATE"),
        numbers("SHARE"),
        numbers("RTT"),
        numbers("LOSS"),
        numbers("HEARD"),
        words("BRAID"),
    ];
    let row = |one: &AdhocNeighbour| {
        let tone = match one.state.as_str() {
            "up" => Tone::Good,
            "dead" => Tone::Bad,
            _ => Tone::Faint,
        };
        vec![
            cell(Some(&one.mac)),
            cell(Some(&one.radio)),
            toned(Some(&one.state), tone),
            cell(percent(Some(one.share))),
            cell(one.rtt_us.map(|us| format!("{:.2} ms", us as f64 / 1000.0))),
            cell(percent(one.loss)),
            cell(Some(format!("{:.1} s ago", one.last_heard_ms as f64 / 1000.0))),
            cell(Some(if one.braid { "yes" } else { "no" })),
        ]
    };
    page.table(&columns, &neighbours.iter().map(row).collect::<Vec<_>>(), "no neighbour")
}
