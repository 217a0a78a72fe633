//! `braid doctor`.

use std::process::ExitCode;

use braid_api::{Check, DoctorReport, SCHEMA_VERSION, Verdict};
use braid_platform::linux::doctor::{self, Standing};

use crate::{cli, print, show};

/// Looks at the system and prints what it can do; fails when it can do neither `up` nor `run`.
pub(crate) fn run(asked: &cli::Doctor) -> anyhow::Result<ExitCode> {
    let report = report(doctor::examine(&asked.state_dir));
    print(asked.json, &report, show::doctor)?;
    Ok(if report.whole_machine || report.one_command { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
}
