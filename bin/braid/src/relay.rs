//! `braid relay invite`, `clients`, `revoke` and `limit`: manage a relay's clients in its state directory. A running relay applies the changes.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use braid_daemon::watchdog::Watchdog;
use braid_peer::destination::Ports;
use braid_peer::invite::Invite;
use braid_peer::keys::{KeyPair, RELAY_KEY};
use braid_peer::limits::Limits;
use braid_peer::packet::PacketNets;
use braid_peer::registry::{Month, RegisteredClient, Registry};
use braid_peer::state::StateDir;
use braid_platform::linux::owner;
use braid_platform::linux::sys::process::{raise_open_files, raise_trim_threshold};
use braid_transport::relay::{self, MemoryLimits, Mover, Options, PacketPort, Reach, TunnelPort};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{PortRange, RelayAction, RelayClients, RelayInvite, RelayLimit, RelayLimits, RelayRevoke, RelayServer};
use crate::print;
use crate::table::{Page, Tone, age, bytes, cell, numbers, rate, toned, words};

mod mover;

use mover::DaemonMover;

/// Runs the subcommand.
pub(crate) fn run(action: RelayAction) -> anyhow::Result<()> {
    match action {
        RelayAction::Invite(invite) => as_owner_of(&invite.state.state_dir, || make_invite(&invite))?,
        RelayAction::Clients(clients) => as_owner_of(&clients.state.state_dir, || list(&clients))?,
        RelayAction::Revoke(options) => as_owner_of(&options.state.state_dir, || revoke(&options))?,
        RelayAction::Limit(limit) => as_owner_of(&limit.state.state_dir, || set_limits(&limit))?,
    }
}

/// If root calls, runs `work` with the file access rights of the directory's owner.
fn as_owner_of<T: Send>(dir: &Path, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
    owner::as_owner_of(dir, work).with_context(|| format!("cannot act as the owner of {}; run braid as that user", dir.display()))
}

/// `braid relay`: runs the relay until a signal ends it.
pub(crate) fn serve(options: RelayServer, verbose: u8) -> anyhow::Result<()> {
    crate::start::log("info", verbose);
    let dir = options.state.state_dir.clone();
    as_owner_of(&dir, || serve_in(options))?
}

fn serve_in(options: RelayServer) -> anyhow::Result<()> {
    check_readable(&options.state.state_dir)?;
    let dir = StateDir::open(&options.state.state_dir)?;
    let keys = KeyPair::load_or_generate(&dir, RELAY_KEY)?;
    let key = keys.public();
    let reach = if options.local {
        let ports = opened(options.port);
        Reach::Itself { own: options.own, ports, rate: options.rate }
    } else {
        Reach::Internet { registry: Box::new(Registry::open(&dir)?), allow: options.allow, own: options.own }
    };
    raise_trim_threshold();
    if let Err(error) = raise_open_files() {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Reverts what the relay changes in the system, if the relay is killed. It is dropped after the changes.
    let watchdog = options.packets.then(|| Watchdog::start(&["watchdog", "--relay"])).transpose().context("cannot start the watchdog")?;
    let packets = if options.packets {
        let nets = PacketNets::new(&options.packets_net)?;
        let _inside = runtime.enter();
        Some(PacketPort::open(nets).context("--packets")?)
    } else {
        None
    };
    let mover = (options.moves || options.waypoint).then(|| Arc::new(DaemonMover(options.daemon.socket)) as Arc<dyn Mover>);
    let tunnels = (options.local && options.moves).then(|| open_tunnels(&runtime)).flatten();
    let ready = |address| {
        tracing::info!(%address, key = key.short(), "the relay is up");
        braid_daemon::notify("READY=1");
    };
    let ran = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let stop = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            braid_daemon::notify("STOPPING=1");
        };
        let memory = MemoryLimits { client: options.client_memory, total: options.max_memory };
        Ok(relay::run(
            Options {
                listen: options.listen,
                keys,
                reach,
                flows: options.max_flows,
                client_flows: options.client_flows,
                memory,
                packets,
                mover,
                tunnels,
                waypoints: options.through,
                passes: options.waypoint,
            },
            ready,
            stop,
        )
        .await?)
    });
    drop(runtime);
    watchdog.into_iter().for_each(Watchdog::dismiss);
    ran
}

/// The device for flows that go on inside bonds. Without it they stay where they are, as they do for a client that cannot.
fn open_tunnels(runtime: &tokio::runtime::Runtime) -> Option<TunnelPort> {
    let _inside = runtime.enter();
    TunnelPort::open().map_err(|error| tracing::warn!("moved flows cannot go on in UDP where a firewall or NAT drops them: {error}")).ok()
}

/// Ports that `--port` names, or the default ports.
fn opened(named: Vec<PortRange>) -> Ports {
    let all = named.iter().any(|range| matches!(range, PortRange::All));
    let ranges: Vec<_> = named.into_iter().filter_map(PortRange::range).collect();
    match (all, ranges.is_empty()) {
        (true, _) => Ports::All,
        (false, true) => Ports::default(),
        (false, false) => Ports::Only(ranges),
    }
}

/// Output of `braid relay invite --json`.
#[derive(Debug, Serialize)]
struct InviteView {
    line: String,
    relay_key: String,
    addresses: Vec<String>,
    name: Option<String>,
    expires_unix: u64,
    limits: LimitsView,
}

fn make_invite(options: &RelayInvite) -> anyhow::Result<()> {
    check_readable(&options.state.state_dir)?;
    let dir = StateDir::open(&options.state.state_dir)?;
    if !dir.path().join(RELAY_KEY).exists() {
        let dir = dir.path().display();
        writeln!(io::stderr(), "no relay has used {dir} yet: the invitation is valid only for a relay started with --state-dir {dir}")?;
    }
    let relay = KeyPair::load_or_generate(&dir, RELAY_KEY)?.public();
    let now = SystemTime::now();
    // Validate before the token is stored: an invitation that was never printed would stay valid until it expires.
    let invite = |token| Invite::new(relay, token, options.addresses.clone(), options.name.clone());
    invite([0; 16].into())?;
    let limits = changed(Limits::default(), &options.limits);
    let token = Registry::open(&dir)?.invite_limited(options.name.as_ref(), limits, options.expires, now)?;
    let invite = invite(token)?;
    if options.json {
        let view = InviteView {
            line: invite.to_line(),
            relay_key: relay.to_string(),
            addresses: options.addresses.iter().map(ToString::to_string).collect(),
            name: options.name.as_ref().map(ToString::to_string),
            expires_unix: unix(now + options.expires),
            limits: LimitsView::of(limits),
        };
        return Ok(print(true, &view, |_, _| Ok(()))?);
    }
    let mut out = io::stdout();
    writeln!(out, "{}", invite.to_line())?;
    if out.is_terminal() {
        let span = age(Some(u64::try_from(options.expires.as_millis()).unwrap_or(u64::MAX))).unwrap_or_default();
        show_qr(&mut out, &invite)?;
        writeln!(
            out,
            "Valid for one device and {span}, with {}. On the device, run `braid join`; it asks for this line",
            describe(limits)
        )?;
    }
    Ok(())
}

/// Prints the code black on white, whatever the terminal's colours: some cameras cannot read an inverted code.
fn show_qr(out: &mut dyn Write, invite: &Invite) -> io::Result<()> {
    for line in invite.to_qr().unwrap_or_default().lines() {
        writeln!(out, "\x1b[38;5;16;48;5;231m{line}\x1b[0m")?;
    }
    Ok(())
}

/// Output of `braid relay clients --json`.
#[derive(Debug, Serialize)]
struct ClientsView {
    clients: Vec<ClientView>,
}

/// A client in the output of `braid relay clients --json`. Times are seconds of Unix time.
#[derive(Debug, Serialize)]
struct ClientView {
    name: String,
    key: String,
    state: &'static str,
    joined_unix: u64,
    seen_unix: Option<u64>,
    revoked_unix: Option<u64>,
    limits: LimitsView,
    month: MonthView,
}

/// Limits of a client; `null` means no limit.
#[derive(Debug, Serialize)]
struct LimitsView {
    rate_down_bps: Option<u64>,
    rate_up_bps: Option<u64>,
    flows: Option<u32>,
    monthly_bytes: Option<u64>,
}

/// Usage of a client since the first of the month (UTC).
#[derive(Debug, Serialize)]
struct MonthView {
    down_bytes: u64,
    up_bytes: u64,
}

impl LimitsView {
    fn of(Limits { rate_down, rate_up, flows, monthly }: Limits) -> Self {
        Self {
            rate_down_bps: rate_down.map(|rate| rate.bps()),
            rate_up_bps: rate_up.map(|rate| rate.bps()),
            flows,
            monthly_bytes: monthly.map(|bytes| bytes.get()),
        }
    }
}

impl ClientView {
    fn of(client: &RegisteredClient, month: Month) -> Self {
        Self {
            name: client.name.to_string(),
            key: client.key.to_string(),
            state: if client.revoked.is_some() { "revoked" } else { "admitted" },
            joined_unix: unix(client.joined),
            seen_unix: client.seen.map(unix),
            revoked_unix: client.revoked.map(unix),
            limits: LimitsView::of(client.limits),
            month: MonthView { down_bytes: month.down.get(), up_bytes: month.up.get() },
        }
    }
}

fn list(options: &RelayClients) -> anyhow::Result<()> {
    let registry = open(&options.state.state_dir)?;
    let now = SystemTime::now();
    let view = |client: RegisteredClient| -> anyhow::Result<ClientView> {
        let month = registry.used(client.id, now)?;
        Ok(ClientView::of(&client, month))
    };
    let clients = registry.clients()?.into_iter().map(view).collect::<anyhow::Result<_>>()?;
    Ok(print(options.json, &ClientsView { clients }, |page, views| show(page, &views.clients, unix(now)))?)
}

fn show(page: &mut Page<'_>, views: &[ClientView], now: u64) -> io::Result<()> {
    let columns = [
        words("CLIENT"),
        words("KEY"),
        words("STATE"),
        numbers("SEEN"),
        numbers("DOWN"),
        numbers("UP"),
        numbers("MAX MONTH"),
        numbers("MAX DOWN"),
        numbers("MAX UP"),
        numbers("MAX FLOWS"),
    ];
    let row = |view: &ClientView| {
        let ago = |unix: u64| now.saturating_sub(unix).saturating_mul(1000);
        let tone = if view.revoked_unix.is_some() { Tone::Bad } else { Tone::Good };
        vec![
            cell(Some(&view.name)),
            cell(view.key.get(..8)),
            toned(Some(view.state), tone),
            cell(view.seen_unix.map(ago).and_then(seen)),
            cell(bytes(Some(view.month.down_bytes))),
            cell(bytes(Some(view.month.up_bytes))),
            cell(bytes(view.limits.monthly_bytes)),
            cell(rate(view.limits.rate_down_bps)),
            cell(rate(view.limits.rate_up_bps)),
            cell(view.limits.flows),
        ]
    };
    page.table(&columns, &views.iter().map(row).collect::<Vec<_>>(), "no clients yet; \"braid relay invite\" invites one")
}

/// When a client was last connected; the relay records it once a minute.
fn seen(ago: u64) -> Option<String> {
    if ago < 75_000 { Some("just now".to_owned()) } else { age(Some(ago)).map(|age| format!("{age} ago")) }
}

fn revoke(options: &RelayRevoke) -> anyhow::Result<()> {
    let mut registry = open(&options.state.state_dir)?;
    let client = registry.find(&options.client)?;
    let was_in = registry.revoke(client.id, SystemTime::now())?;
    let (name, key) = (&client.name, client.key.short());
    let said = if was_in { "is revoked" } else { "was already revoked" };
    Ok(writeln!(io::stdout(), "{name} ({key}) {said}; a new invitation readmits it")?)
}

fn set_limits(options: &RelayLimit) -> anyhow::Result<()> {
    let mut registry = open(&options.state.state_dir)?;
    let client = registry.find(&options.client)?;
    let limits = changed(client.limits, &options.limits);
    registry.set_limits(client.id, limits)?;
    Ok(writeln!(io::stdout(), "{} ({}): {}", client.name, client.key.short(), describe(limits))?)
}

/// Returns `limits` with the named limits replaced.
fn changed(mut limits: Limits, named: &RelayLimits) -> Limits {
    if let Some(limit) = named.rate.or(named.rate_down) {
        limits.rate_down = limit.0;
    }
    if let Some(limit) = named.rate.or(named.rate_up) {
        limits.rate_up = limit.0;
    }
    if let Some(limit) = named.flows {
        limits.flows = limit.0;
    }
    if let Some(limit) = named.monthly {
        limits.monthly = limit.0;
    }
    limits
}

fn describe(limits: Limits) -> String {
    let parts = [
        limits.rate_down.map(|rate| format!("{rate} down")),
        limits.rate_up.map(|rate| format!("{rate} up")),
        limits.flows.map(|flows| format!("{flows} flows")),
        limits.monthly.map(|bytes| format!("{bytes} a month")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "no limits".to_owned() } else { parts.join(", ") }
}

/// Opens the registry of an existing relay; never creates one.
fn open(dir: &Path) -> anyhow::Result<Registry> {
    check_readable(dir)?;
    if !Registry::exists(dir) {
        bail!(
            "there is no relay registry in {}; name the relay's directory with --state-dir, and run the command as the relay's user",
            dir.display()
        );
    }
    Ok(Registry::open(&StateDir::open(dir)?)?)
}

/// Checks that this user may read the state directory: a directory that is not readable must not be reported as missing.
fn check_readable(dir: &Path) -> anyhow::Result<()> {
    check_access(dir, std::fs::read_dir(dir).map(drop))
}

fn check_access(dir: &Path, looked: io::Result<()>) -> anyhow::Result<()> {
    match looked {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => bail!(
            "this user may not read {}: use sudo for the relay of the service, or name the directory of your own relay, as in \
             --state-dir ~/relay",
            dir.display()
        ),
        // The caller reports other errors when it uses the directory.
        _ => Ok(()),
    }
}

fn unix(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |span| span.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_an_unreadable_directory_is_not_reported_as_missing() {
        let dir = Path::new("/var/lib/braid-relay");
        let said = check_access(dir, Err(io::ErrorKind::PermissionDenied.into())).unwrap_err().to_string();
        assert!(said.contains("may not read") && said.contains("sudo") && said.contains("--state-dir ~/relay"), "{said}");
        assert!(check_access(dir, Err(io::ErrorKind::NotFound.into())).is_ok() && check_access(dir, Ok(())).is_ok());
    }

    #[test]
    fn a_client_seen_since_the_last_record_is_shown_as_just_now() {
        assert_eq!([0, 70_000, 150_000].map(|ago| seen(ago).unwrap()), ["just now", "just now", "2 min 30 s ago"]);
    }
}
