//! `braid doctor`.

use std::process::ExitCode;

use braid_api::{Check, DoctorReport, SCHEMA_VERSION, Status, Verdict};
use braid_platform::linux::doctor::{self, Standing};

use crate::client::{self, ClientError};
use crate::{cli, print, show};

/// Looks at the system and prints what it can do; fails when it can do neither `up` nor `run`.
pub(crate) fn run(asked: &cli::Doctor) -> anyhow::Result<ExitCode> {
    let mut checks = doctor::examine(&asked.state_dir);
    beside_daemon(&mut checks, client::read(&asked.daemon.socket, "/v1/status"));
    let report = report(checks);
    print(asked.json, &report, show::doctor)?;
    Ok(if report.whole_machine || report.one_command { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tells of the daemon, where one answers. What this user may not do is then nothing that is missing: the daemon may.
fn beside_daemon(checks: &mut Vec<doctor::Check>, status: Result<Status, ClientError>) {
    let (standing, found, remedy) = match status {
        Ok(status) => {
            for check in checks.iter_mut().filter(|check| ["privilege", "state"].contains(&check.name) && check.standing != Standing::Ok) {
                (check.standing, check.found, check.remedy) = (Standing::Ok, "not this user's, but the daemon has it".into(), None);
            }
            let names: Vec<&str> = status.links.iter().map(|link| link.name.as_str()).collect();
            // It knows its configuration, which may name virtual devices.
            for check in checks.iter_mut().filter(|check| check.name == "links" && names.len() > 1) {
                (check.standing, check.found, check.remedy) = (Standing::Ok, names.join(", "), None);
            }
            (Standing::Ok, format!("runs, version {}, {} links", status.version, names.len()), None)
        }
        Err(error) if error.is_nobody() => {
            (Standing::Ok, format!("none runs: {}", client::start(client::is_packaged())), None)
        }
        Err(error) => (Standing::Warning, error.to_string(), Some("see its log: `journalctl -u braid`".to_owned())),
    };
    checks.push(doctor::Check { name: "daemon", standing, found, remedy, needed_by_up: false, needed_by_run: false });
}

fn report(checks: Vec<doctor::Check>) -> DoctorReport {
    let able = |needed: fn(&doctor::Check) -> bool| !checks.iter().any(|check| needed(check) && check.standing == Standing::Missing);
    DoctorReport {
        schema_version: SCHEMA_VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        whole_machine: able(|check| check.needed_by_up),
        one_command: able(|check| check.needed_by_run),
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(standing: Standing, needed_by_up: bool) -> doctor::Check {
        doctor::Check { name: "x", standing, found: "y".into(), remedy: None, needed_by_up, needed_by_run: false }
    }

    #[test]
    fn only_what_is_needed_and_missing_prevents() {
        let able = |standing, needed| report(vec![finding(standing, needed)]).whole_machine;
        assert!(able(Standing::Missing, false) && able(Standing::Unknown, true) && able(Standing::Warning, true));
        assert!(!able(Standing::Missing, true));
        assert!(report(vec![finding(Standing::Missing, true)]).one_command);
    }

    #[test]
    fn what_the_daemon_has_is_not_missing() {
        let seen = |status| {
            let mut checks = vec![doctor::Check { name: "privilege", ..finding(Standing::Missing, true) }];
            beside_daemon(&mut checks, status);
            (report(checks.clone()).whole_machine, checks.pop().unwrap())
        };
        let (able, nobody) = seen(Err(ClientError::NobodyThere("/run/x".into())));
        assert!(!able && nobody.standing == Standing::Ok && nobody.found.contains("none runs"), "{nobody:?}");
        let (able, silent) = seen(Err(ClientError::Silent("/run/x".into())));
        assert!(!able && silent.standing == Standing::Warning && silent.remedy.is_some(), "{silent:?}");
        let status = serde_json::from_str(r#"{"schema_version":1,"version":"9.9","scheduler":"operetta","links":[],"flows":0}"#).unwrap();
        let (able, there) = seen(Ok(status));
        assert!(able && there.found.contains("9.9"), "{there:?}");
    }
}
