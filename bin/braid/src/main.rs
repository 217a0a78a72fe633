//! The `braid` binary: command line and dispatch.

#![forbid(unsafe_code)]

mod adhoc;
mod bond;
mod cli;
mod client;
mod doctor;
mod energy;
mod explain;
mod gateway;
mod get;
mod join;
mod net;
mod net_join;
mod net_sfnet;
mod net_slice;
mod past;
mod proxy;
mod relay;
mod secret;
mod show;
mod sim;
mod start;
mod switch;
mod table;
mod top;
mod ui;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use braid_api::{
    Accepted, App, ClientStatus, Fact, FactChange, Flow, LeaveRequest, LinkStatus, List, MoveRequest, Peer, PolicyView, ProgramRule,
    Reserve, RuleChange, Status, Versioned,
};
use braid_config::{self as config, ConfigErrors, World};
use braid_control::config::{Finding, Severity};
use braid_daemon::{DEFAULT_CONFIG, DEFAULT_STATE};
use braid_model::{Rate, printable, steers};
use braid_run::relays;
use clap::{CommandFactory, Parser};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::{Check, Cli, Command, ContextAction, Daemon, Gateway, GatewayAction, Query, RulesAction, Switch, SwitchAction};
use crate::table::Page;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli) {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed as well; the message is then lost.
            let _ = writeln!(io::stderr(), "braid: {}", printable_lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Up(up) => switch::up(up, cli.verbose)?,
        Command::Daemon(daemon) => start::foreground(daemon, cli.verbose)?,
        Command::Run(run) => return start::run(run),
        Command::Get(get) => return get::run(*get),
        Command::Proxy(proxy) => proxy::run(*proxy, cli.verbose)?,
        Command::Watchdog { relay } => start::watchdog(relay, cli.verbose)?,
        Command::Down(order) => switch::down(&order)?,
        Command::Reload(daemon) => print_accepted(&client::send(&daemon.socket, "/v1/reload", &())?)?,
        Command::Status(query) => show_facts(&query, "/v1/status", show::status as Show<Status>)?,
        Command::Links(query) => show_facts(&query, "/v1/links", |page, links: &List<LinkStatus>| show::links(page, &links.items))?,
        Command::Flows(query) => show_facts(&query, "/v1/flows", |page, flows: &List<Flow>| show::flows(page, &flows.items))?,
        Command::Apps(query) => show_facts(&query, "/v1/apps", |page, apps: &List<App>| show::apps(page, &apps.items))?,
        Command::Bond(command) => {
            let changed = bond::run(&command)?;
            let message = if changed.changes.is_empty() { "nothing to change".to_owned() } else { changed.changes.join("; ") };
            print_accepted(&Accepted { message, warnings: changed.warnings })?;
        }
        Command::Clients(query) => {
            show_facts(&query, "/v1/clients", |page, clients: &List<ClientStatus>| show::clients(page, &clients.items))?;
            let status = client::read::<Status>(&query.daemon.socket, "/v1/status");
            if !query.json && status.is_ok_and(|status| status.interception.as_deref() == Some("gateway")) {
                let _ = writeln!(io::stderr(), "braid: this machine's own programs are not steered: `braid status` says why");
            }
        }
        Command::Switch(Switch { action: SwitchAction::Flows(query) }) => {
            let mut flows: List<Flow> = client::read(&query.daemon.socket, "/v1/flows")?;
            flows.items.retain(|flow| flow.client.is_some());
            print(query.json, &flows, |page, flows: &List<Flow>| show::flows(page, &flows.items))?;
        }
        Command::Gateway(Gateway { action: GatewayAction::Setup(setup) }) => return gateway::setup(&setup),
        Command::Adhoc(command) => adhoc::run(&command, cli.verbose)?,
        Command::Net(command) => net::run(command, cli.verbose)?,
        Command::Top(daemon) => top::run(&daemon.socket)?,
        Command::Log(log) => past::log(&log)?,
        Command::History(history) => past::history(&history)?,
        Command::Gains(gains) => past::gains(&gains)?,
        Command::Ui(command) => ui::open(&command.daemon.socket, command.print)?,
        Command::Policy(query) => {
            // How a rule carries flows depends on the relays that are joined.
            let relays = client::list::<Peer>(&query.daemon.socket, "/v1/peers").ok().map(relays_of);
            show_facts(&query, "/v1/policy", |page, view: &PolicyView| show::policy(page, view, relays.as_deref()))?;
        }
        Command::Check(check) => return check_file(&check),
        Command::Explain(explain) => {
            let request = explain::request(&explain)?;
            let answer = client::send(&explain.query.daemon.socket, "/v1/explain", &request)?;
            print(explain.query.json, &answer, |page, answer| {
                if let Some(warning) = explain::warning(&request, answer) {
                    page.toned(table::Tone::Doubtful, &format!("warning: {warning}"))?;
                }
                show::explanation(page, answer)
            })?;
        }
        Command::Energy(command) => energy::run(command)?,
        Command::Sim(command) => return sim::run(&command),
        Command::Peers(query) => show_facts(&query, "/v1/peers", |page, peers: &List<Peer>| show::peers(page, &peers.items))?,
        Command::Join(join) if join.user => {
            let message = relays::join(&secret::line(join.line, join::INVITATION)?, join.name.as_deref())?;
            print_accepted(&Accepted { message, warnings: Vec::new() })?;
        }
        Command::Join(join) => join::run(join)?,
        Command::Leave(leave) if leave.user => {
            print_accepted(&Accepted { message: relays::leave(&leave.name)?, warnings: Vec::new() })?;
        }
        Command::Leave(leave) => {
            print_accepted(&client::send(&leave.daemon.socket, "/v1/leave", &LeaveRequest { name: leave.name })?)?;
        }
        Command::Move(order) => {
            let request = MoveRequest { what: order.what, to: order.to, through: order.through };
            print_accepted(&client::send(&order.daemon.socket, "/v1/move", &request)?)?;
        }
        Command::Context(command) => match command.action {
            None => show_facts(&command.query, "/v1/context", |page, facts: &List<Fact>| show::facts(page, &facts.items))?,
            Some(ContextAction::Set { fact: (name, value), span, daemon }) => {
                let for_ms = span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
                let change = FactChange { name, value: Some(value), for_ms };
                print_accepted(&client::send(&daemon.socket, "/v1/context", &change)?)?;
            }
            Some(ContextAction::Clear { name, daemon }) => {
                print_accepted(&client::send(&daemon.socket, "/v1/context", &FactChange { name, value: None, for_ms: None })?)?;
            }
        },
        Command::Rules(command) => match command.action {
            None => show_facts(&command.query, "/v1/rules", |page, rules: &List<ProgramRule>| show::program_rules(page, &rules.items))?,
            Some(RulesAction::Add { name, rule, span, reserve_down, reserve_up, reserve_on, daemon }) => {
                let [down_bps, up_bps] = [reserve_down, reserve_up].map(|rate| rate.map(Rate::bps));
                let reserve = Reserve { down_bps, up_bps, link: reserve_on };
                let change = RuleChange {
                    name,
                    rule: Some(config::settings::rule_of(&rule).map_err(anyhow::Error::msg)?),
                    reserve: (reserve != Reserve::default()).then_some(reserve),
                    lease_ms: Some(u64::try_from(span.as_millis()).unwrap_or(u64::MAX)),
                    // This process ends at once.
                    stays: true,
                };
                print_accepted(&client::send(&daemon.socket, "/v1/rules", &change)?)?;
            }
            Some(RulesAction::Remove { name, daemon }) => {
                let change = RuleChange { name, rule: None, reserve: None, lease_ms: None, stays: false };
                print_accepted(&client::send(&daemon.socket, "/v1/rules", &change)?)?;
            }
        },
        Command::Relay(command) => match command.action {
            Some(action) => relay::run(action)?,
            None => relay::serve(command.server, cli.verbose)?,
        },
        Command::Doctor(doctor) => return doctor::run(&doctor),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "braid", &mut script);
            io::stdout().write_all(&script)?;
        }
        Command::Man { dir } => manual(dir.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

type Show<T> = fn(&mut Page<'_>, &T) -> io::Result<()>;

fn show_facts<T>(query: &Query, path: &str, show: impl FnOnce(&mut Page<'_>, &T) -> io::Result<()>) -> anyhow::Result<()>
where
    T: DeserializeOwned + Serialize,
{
    let facts: T = client::read(&query.daemon.socket, path)?;
    Ok(print(query.json, &facts, show)?)
}

/// Writes `facts` to standard output: as text, or as a JSON object with `schema_version`.
fn print<T: Serialize>(json: bool, facts: &T, show: impl FnOnce(&mut Page<'_>, &T) -> io::Result<()>) -> io::Result<()> {
    // Collected first, so that an error on the way does not leave half a table.
    let mut text = Vec::new();
    if json {
        let json = serde_json::to_string_pretty(&Versioned::of(facts))?;
        writeln!(text, "{}", escaped(&json))?;
    } else {
        show(&mut Page::new(&mut text, table::colour_wanted()), facts)?;
    }
    io::stdout().write_all(&text)
}

fn print_accepted(accepted: &Accepted) -> io::Result<()> {
    let mut out = io::stdout();
    for warning in &accepted.warnings {
        writeln!(out, "{}", printable_lines(warning))?;
    }
    writeln!(out, "{}", printable_lines(&accepted.message))
}

/// Names of the joined relays: from the daemon, or from its stored state if no daemon runs. `None` if neither is readable, as on another machine or
/// for another user.
fn relays(daemon: &Daemon) -> Option<Vec<String>> {
    match client::list::<Peer>(&daemon.socket, "/v1/peers") {
        Ok(peers) => Some(relays_of(peers)),
        Err(error) if error.is_not_running() => braid_daemon::peers::joined(Path::new(DEFAULT_STATE)),
        Err(_) => None,
    }
}

fn relays_of(peers: Vec<Peer>) -> Vec<String> {
    peers.into_iter().filter(|peer| peer.kind != braid_api::PeerKind::Server).map(|peer| peer.name).collect()
}

fn check_file(check: &Check) -> anyhow::Result<ExitCode> {
    let world = World { relays: relays(&check.daemon), ..World::here(!check.portable) };
    let result = config::read(&check.file, &world);
    let (findings, taken) = match &result {
        Ok(config) => (config.warnings.as_slice(), true),
        Err(ConfigErrors::Refused(findings)) => (findings.as_slice(), false),
        Err(ConfigErrors::Unreadable { error, .. }) if error.kind() == io::ErrorKind::NotFound => anyhow::bail!(
            "there is no file {}: give the path of the file to check, or create it; without {DEFAULT_CONFIG} Braid uses its defaults",
            check.file.display()
        ),
        Err(error @ ConfigErrors::Unreadable { .. }) => anyhow::bail!("{error}"),
    };
    let facts = serde_json::json!({ "ok": taken, "findings": findings.iter().map(finding_json).collect::<Vec<_>>() });
    print(check.json, &facts, |page, _| {
        // Line by line, because a page replaces control characters.
        for line in findings.iter().flat_map(|finding| finding.to_string().lines().map(str::to_owned).collect::<Vec<_>>()) {
            page.line(line.replace('\t', " "))?;
        }
        page.line(format!("{}: {}", check.file.display(), verdict(findings, taken)))
    })?;
    Ok(if taken { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(findings: &[Finding], taken: bool) -> String {
    let count = |severity, word: &str| match findings.iter().filter(|finding| finding.severity == severity).count() {
        0 => None,
        1 => Some(format!("1 {word}")),
        n => Some(format!("{n} {word}s")),
    };
    let counts: Vec<String> = [count(Severity::Error, "error"), count(Severity::Warning, "warning")].into_iter().flatten().collect();
    let judged = if taken { "valid" } else { "invalid" };
    if counts.is_empty() { judged.to_owned() } else { format!("{judged} ({})", counts.join(", ")) }
}

fn finding_json(finding: &Finding) -> serde_json::Value {
    serde_json::json!({
        "severity": if finding.severity == Severity::Error { "error" } else { "warning" },
        "file": finding.file, "line": finding.line, "column": finding.column, "excerpt": finding.excerpt,
        "reason": finding.reason, "nearest": finding.nearest, "remedy": finding.remedy,
    })
}

fn manual(dir: Option<&Path>) -> anyhow::Result<()> {
    let Some(dir) = dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return Ok(io::stdout().write_all(&page)?);
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("cannot write manual pages to {}; name a directory that can be written", dir.display()))
}

/// Text from elsewhere, line by line, without control characters that could steer the terminal.
pub(crate) fn printable_lines(text: &str) -> String {
    text.lines().map(|line| printable(&line.replace('\t', " "))).collect::<Vec<_>>().join("\n")
}

/// Escapes characters in JSON text that could steer a terminal. The library escapes only what JSON requires.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            // All of these characters lie below U+10000.
            c if c != '\n' && steers(c) => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => text.push(c),
        }
    }
    text
}

/// A reader that closes the pipe (`braid flows | head`) is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_names_in_json_and_in_errors_cannot_steer_the_terminal() {
        let name = "a\x1b[2J\u{9b}2J\u{7f}\u{202e}ü";
        let json = escaped(&serde_json::to_string_pretty(&serde_json::json!({ "name": name })).unwrap());
        assert!(!json.chars().any(|c| c != '\n' && steers(c)), "{json:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["name"], name);
        assert_eq!(printable_lines("one\x1b[2J\n;\ttwo"), "one\u{fffd}[2J\n; two");
    }
}
