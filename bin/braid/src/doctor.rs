//! `braid doctor`.

use std::process::ExitCode;

use braid_api::{AdhocStatus, Check, DoctorReport, LinkEntry, LinkState, LinkStatus, Mode, PolicyView, Status, Verdict};
use braid_config as config;
use braid_control::config::Config;
use braid_daemon::adhoc::{AUTHENTICATED, UNAUTHENTICATED};
use braid_daemon::default_config;
use braid_platform::linux::doctor::{self, Standing};

use crate::client::{self, ClientError};
use crate::{cli, print, show};

/// Exit status if the checks this user can make do not decide. Not 2, which means wrong usage.
const NOT_KNOWN: u8 = 3;

/// Checks the system and prints what it supports. Without `--for`, fails if neither `up` nor `run` works.
pub(crate) fn run(asked: &cli::Doctor) -> anyhow::Result<ExitCode> {
    let config = configured();
    let is_gateway = asked.mode == Some(cli::Mode::Gateway) || !config.policy.lan.is_empty();
    let mut checks = doctor::examine(&asked.state_dir, &config.policy, is_gateway);
    checks.push(detection(&config));
    let policy = client::read(&asked.daemon.socket, "/v1/policy").ok();
    let status = client::read(&asked.daemon.socket, "/v1/status");
    let has_key = config.adhoc.as_ref().is_some_and(|adhoc| adhoc.key_file.is_some());
    let device = status.as_ref().ok().and_then(|status: &Status| status.adhoc.clone()).or(config.adhoc.map(|adhoc| adhoc.name));
    let running = client::read::<AdhocStatus>(&asked.daemon.socket, "/v1/adhoc").ok();
    let has_key = running.map_or(has_key, |device| device.authenticated);
    checks.extend(device.map(|name| ad_hoc(&name, has_key)));
    beside_daemon(&mut checks, status, policy);
    let mut report = report(checks, is_gateway);
    let Some(asked_for) = asked.mode else {
        print(asked.json, &report, show::doctor)?;
        return Ok(if report.whole_machine || report.one_command { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    narrow(&mut report, asked_for);
    print(asked.json, &report, show::doctor)?;
    Ok(match report.modes.first().map(|mode| mode.verdict) {
        Some(Verdict::Ok) => ExitCode::SUCCESS,
        Some(Verdict::Unknown) => ExitCode::from(NOT_KNOWN),
        _ => ExitCode::FAILURE,
    })
}

/// Keeps only the checks and the verdict of one way to use Braid.
fn narrow(report: &mut DoctorReport, mode: cli::Mode) {
    report.modes.retain(|judged| judged.name == name(mode));
    report.checks.retain(|check| match mode {
        cli::Mode::Up => check.needed_by_up,
        cli::Mode::Run => check.needed_by_run,
        cli::Mode::Gateway => check.needed_by_gateway,
    });
}

const fn name(mode: cli::Mode) -> &'static str {
    match mode {
        cli::Mode::Up => "up",
        cli::Mode::Run => "run",
        cli::Mode::Gateway => "gateway",
    }
}

const fn is_needed(check: &doctor::Check, mode: cli::Mode) -> bool {
    match mode {
        cli::Mode::Up => check.needed_by_up,
        cli::Mode::Run => check.needed_by_run,
        cli::Mode::Gateway => check.needed_by_gateway,
    }
}

/// Verdict for one way to use Braid, by the checks it needs. A privilege that only this user lacks makes it unknown, not missing.
fn judge(mode: cli::Mode, checks: &[doctor::Check]) -> Mode {
    let names = |wanted: &dyn Fn(&doctor::Check) -> bool| -> Vec<String> {
        checks.iter().filter(|check| is_needed(check, mode) && wanted(check)).map(|check| check.name.to_owned()).collect()
    };
    let missing = names(&|check| check.standing == Standing::Missing && check.name != doctor::PRIVILEGE);
    let open = names(&|check| check.standing == Standing::Unknown || check.standing == Standing::Missing);
    let (verdict, because) = if !missing.is_empty() {
        (Verdict::Missing, missing)
    } else if !open.is_empty() {
        (Verdict::Unknown, open)
    } else {
        (Verdict::Ok, Vec::new())
    };
    Mode { name: name(mode).to_owned(), verdict, because }
}

/// The configuration that the next start would read; the defaults if it cannot be read.
fn configured() -> Config {
    default_config().and_then(|path| config::load(&path, None).ok()).unwrap_or_default()
}

/// Reports which hosts are asked whether they run Braid, and so learn that Braid runs here.
fn detection(config: &Config) -> doctor::Check {
    let found = match config.detection_view() {
        Some(detection) => format!("Braid {}", show::detection_text(&detection)),
        None => "Braid asks no hosts whether they run Braid (detect = false)".to_owned(),
    };
    doctor::Check {
        name: "detection",
        standing: Standing::Ok,
        found,
        remedy: None,
        needed_by_up: false,
        needed_by_run: false,
        needed_by_gateway: false,
    }
}

/// Says whether the group of the ad-hoc device is authenticated.
fn ad_hoc(name: &str, has_key: bool) -> doctor::Check {
    let remedy =
        "give the group a key (`key_file` in [adhoc]), or encrypt what programs send (TLS, SSH, WireGuard), as in any open network";
    doctor::Check {
        name: "ad-hoc device",
        standing: if has_key { Standing::Ok } else { Standing::Warning },
        found: format!("{name}: {}", if has_key { AUTHENTICATED } else { UNAUTHENTICATED }),
        remedy: (!has_key).then(|| remedy.to_owned()),
        needed_by_up: false,
        needed_by_run: false,
        needed_by_gateway: false,
    }
}

/// Adds the state of the daemon. If one runs, privileges that only this user lacks do not count as missing: the daemon has them.
fn beside_daemon(checks: &mut Vec<doctor::Check>, status: Result<Status, ClientError>, policy: Option<PolicyView>) {
    let (standing, found, remedy) = match status {
        Ok(status) => {
            // Programs that the kernel rejected stay missing: a daemon started before an upgrade runs other programs.
            let tried = checks.iter().any(|check| check.name == doctor::PRIVILEGE && check.standing == Standing::Ok);
            let has = |check: &&mut doctor::Check| match check.name {
                doctor::PROGRAMS | doctor::SWITCH => !tried,
                doctor::PRIVILEGE | "state" => check.standing != Standing::Ok,
                _ => false,
            };
            for check in checks.iter_mut().filter(has) {
                (check.standing, check.found, check.remedy) = (Standing::Ok, "not available to this user, but to the daemon".into(), None);
            }
            if status.interception.as_deref() == Some("gateway") {
                serves_clients_only(checks);
            }
            // The daemon reports the state of each link, and its configuration, which may be in another file.
            for check in checks.iter_mut().filter(|check| check.name == "links") {
                *check = links(&status.links, policy.as_ref().map_or(&[], |policy| &policy.links));
            }
            (Standing::Ok, format!("runs, version {}, {} links", status.version, status.links.len()), None)
        }
        Err(error) if error.is_not_running() => (Standing::Ok, format!("not running: {}", client::START), None),
        Err(error) => (Standing::Warning, error.to_string(), Some("see its log: `journalctl -u braid`".to_owned())),
    };
    checks.push(doctor::Check {
        name: "daemon",
        standing,
        found,
        remedy,
        needed_by_up: false,
        needed_by_run: false,
        needed_by_gateway: false,
    });
}

/// Reports that the running daemon serves only the gateway's clients, whatever another start would do.
fn serves_clients_only(checks: &mut Vec<doctor::Check>) {
    let found =
        "the running daemon serves only the clients of the gateway; flows of this machine's own programs follow the system's routes";
    let remedy = "`braid status` says why; after a change restart Braid";
    for check in checks.iter_mut().filter(|check| check.name == doctor::PROGRAMS && check.standing != Standing::Missing) {
        (check.standing, check.found, check.remedy) = (Standing::Missing, found.to_owned(), Some(remedy.to_owned()));
    }
    checks.retain(|check| check.name != doctor::MODE);
    checks.push(doctor::Check {
        name: doctor::MODE,
        standing: Standing::Warning,
        found: found.to_owned(),
        remedy: Some(remedy.to_owned()),
        needed_by_up: false,
        needed_by_run: false,
        needed_by_gateway: true,
    });
}

/// The daemon's links, and the `[[link]]` entries that match no device.
fn links(links: &[LinkStatus], entries: &[LinkEntry]) -> doctor::Check {
    // A link whose state is still unknown is used like one that is up.
    let carries = |link: &&LinkStatus| matches!(link.state, LinkState::Up | LinkState::Unknown | LinkState::Backup);
    let stand = links.iter().map(|link| match &link.reason {
        Some(reason) if !carries(&link) => format!("{} is {}: {reason}", link.name, link.state),
        _ => format!("{} is {}", link.name, link.state),
    });
    // An entry with a kind or a pattern may match no device at times; only an entry with a full name is suspicious.
    let names_one = |entry: &&LinkEntry| entry.matches.starts_with("name = ") && !entry.matches.contains('*');
    let absent = entries.iter().filter(names_one).filter(|entry| entry.devices.is_empty());
    let absent: Vec<&str> = absent.map(|entry| entry.matches.as_str()).collect();
    let mut found: Vec<String> = stand.collect();
    found.extend(absent.iter().map(|matches| format!("no device matches the [[link]] entry {matches}")));
    let remedy = if !absent.is_empty() {
        Some("compare the entry with the names in `ip link`; after a change run `braid reload`")
    } else if links.iter().filter(carries).count() > 1 {
        None
    } else if !links.is_empty() && links.iter().all(|link| link.state == LinkState::Excluded) {
        Some("every link is excluded: remove role = \"excluded\" from a [[link]] entry, then run `braid reload`")
    } else {
        Some("with fewer than two working links Braid has no choice: see `braid links` for details")
    };
    let found = if found.is_empty() { "the daemon has none".to_owned() } else { found.join("; ") };
    doctor::Check {
        name: "links",
        standing: if remedy.is_none() { Standing::Ok } else { Standing::Warning },
        found,
        remedy: remedy.map(str::to_owned),
        needed_by_up: false,
        needed_by_run: false,
        needed_by_gateway: false,
    }
}

fn report(checks: Vec<doctor::Check>, is_gateway: bool) -> DoctorReport {
    let able = |needed: fn(&doctor::Check) -> bool| !checks.iter().any(|check| needed(check) && check.standing == Standing::Missing);
    let modes = [cli::Mode::Up, cli::Mode::Run].into_iter().chain(is_gateway.then_some(cli::Mode::Gateway));
    DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        whole_machine: able(|check| check.needed_by_up),
        one_command: able(|check| check.needed_by_run),
        modes: modes.map(|mode| judge(mode, &checks)).collect(),
        checks: checks.into_iter().map(check).collect(),
    }
}

fn check(found: doctor::Check) -> Check {
    let verdict = match found.standing {
        Standing::Ok => Verdict::Ok,
        Standing::Warning => Verdict::Warning,
        Standing::Missing => Verdict::Missing,
        Standing::Unknown => Verdict::Unknown,
    };
    Check {
        name: found.name.to_owned(),
        verdict,
        found: found.found,
        remedy: found.remedy,
        needed_by_up: found.needed_by_up,
        needed_by_run: found.needed_by_run,
        needed_by_gateway: found.needed_by_gateway,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(standing: Standing, needed_by_up: bool) -> doctor::Check {
        doctor::Check { name: "x", standing, found: "y".into(), remedy: None, needed_by_up, needed_by_run: false, needed_by_gateway: false }
    }

    #[test]
    fn only_missing_needed_checks_prevent_use() {
        let able = |standing, needed| report(vec![finding(standing, needed)], false).whole_machine;
        assert!(able(Standing::Missing, false) && able(Standing::Unknown, true) && able(Standing::Warning, true));
        assert!(!able(Standing::Missing, true));
        assert!(report(vec![finding(Standing::Missing, true)], false).one_command);
    }

    #[test]
    fn regression_a_report_for_run_does_not_promise_up() {
        let run = doctor::Check { needed_by_run: true, ..finding(Standing::Ok, false) };
        let mut report = report(vec![finding(Standing::Missing, true), run], false);
        narrow(&mut report, cli::Mode::Run);
        assert!(!report.whole_machine && report.one_command);
        assert_eq!((report.checks.len(), report.modes.len(), report.modes[0].name.as_str()), (1, 1, "run"));
    }

    #[test]
    fn a_mode_is_judged_by_its_checks_and_missing_privilege_makes_it_unknown() {
        let named = |name, standing| doctor::Check { name, ..finding(standing, true) };
        let verdict = |checks: &[doctor::Check]| judge(cli::Mode::Up, checks).verdict;
        let (lacking, untried) = (named(doctor::PRIVILEGE, Standing::Missing), named(doctor::PROGRAMS, Standing::Unknown));
        assert_eq!(verdict(&[finding(Standing::Warning, true), finding(Standing::Missing, false)]), Verdict::Ok);
        assert_eq!(verdict(&[lacking.clone(), untried.clone()]), Verdict::Unknown);
        assert_eq!(judge(cli::Mode::Up, &[lacking, untried, named("BTF", Standing::Missing)]).because, ["BTF"]);
        assert_eq!(judge(cli::Mode::Run, &[named("BTF", Standing::Missing)]).verdict, Verdict::Ok);
    }

    #[test]
    fn regression_links_are_reported_with_their_state_and_entries_without_a_device() {
        let link = |name: &str, state: &str| -> LinkStatus {
            serde_json::from_value(serde_json::json!({ "name": name, "state": state, "kind": "virtual", "addresses": [], "flows": 0 }))
                .unwrap()
        };
        let both = links(&[link("up0", "up"), link("up1", "backup")], &[]);
        assert!(both.standing == Standing::Ok && both.found == "up0 is up; up1 is backup", "{both:?}");
        let fresh = links(&[link("up0", "up"), link("up1", "unknown")], &[]);
        assert!(fresh.standing == Standing::Ok && fresh.found == "up0 is up; up1 is unknown", "{fresh:?}");
        let down = links(&[link("up0", "down"), link("up1", "up")], &[]);
        assert!(down.standing == Standing::Warning && down.found.starts_with("up0 is down"), "{down:?}");
        let entry = LinkEntry { matches: "name = \"up7\"".into(), ..LinkEntry::default() };
        let typo = links(&[link("up0", "up"), link("up1", "up")], &[entry]);
        assert!(typo.standing == Standing::Warning && typo.found.contains("entry name = \"up7\""), "{typo:?}");
        let none = links(&[link("up0", "excluded"), link("up1", "excluded")], &[]);
        assert!(none.remedy.unwrap().contains("every link is excluded"));
        assert_eq!(links(&[], &[]).standing, Standing::Warning);
    }

    #[test]
    fn a_daemon_that_serves_clients_only_does_not_serve_this_machine() {
        let named = |name, up| doctor::Check { name, needed_by_up: up, needed_by_gateway: !up, ..finding(Standing::Ok, false) };
        let mut checks = vec![named(doctor::PROGRAMS, true), named(doctor::MODE, false)];
        beside_daemon(&mut checks, Ok(Status { interception: Some("gateway".into()), ..running() }), None);
        assert_eq!(judge(cli::Mode::Up, &checks).verdict, Verdict::Missing);
        assert_eq!(judge(cli::Mode::Gateway, &checks).verdict, Verdict::Ok);
        assert!(checks[1].standing == Standing::Warning && checks[1].remedy.is_some(), "{checks:?}");
    }

    fn running() -> Status {
        serde_json::from_str(r#"{"schema_version":1,"version":"9.9","scheduler":"operetta","links":[],"flows":0}"#).unwrap()
    }

    #[test]
    fn privileges_of_the_daemon_are_not_missing() {
        let seen = |status| {
            let mut checks = vec![doctor::Check { name: "privilege", ..finding(Standing::Missing, true) }];
            beside_daemon(&mut checks, status, None);
            (report(checks.clone(), false).whole_machine, checks.pop().unwrap())
        };
        let refused_to = |privilege| {
            let named = |name, standing| doctor::Check { name, ..finding(standing, true) };
            let mut checks = vec![named(doctor::PRIVILEGE, privilege), named(doctor::PROGRAMS, Standing::Missing)];
            beside_daemon(&mut checks, Ok(running()), None);
            judge(cli::Mode::Up, &checks).verdict
        };
        assert_eq!(refused_to(Standing::Missing), Verdict::Ok, "not tried");
        assert_eq!(refused_to(Standing::Ok), Verdict::Missing, "a daemon from before an upgrade runs other programs");
        let (able, absent) = seen(Err(ClientError::NotRunning("/run/x".into())));
        assert!(!able && absent.standing == Standing::Ok && absent.found.contains("not running"), "{absent:?}");
        let (able, silent) = seen(Err(ClientError::Silent("/run/x".into())));
        assert!(!able && silent.standing == Standing::Warning && silent.remedy.is_some(), "{silent:?}");
        let (able, there) = seen(Ok(running()));
        assert!(able && there.found.contains("9.9"), "{there:?}");
    }
}
