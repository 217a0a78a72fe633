//! The running kernel's verifier results for BPF objects, per program.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use braid_platform::linux::bpf::load::{Needed, ProgramTrial, Refusal, survey_object};
use serde::Serialize;

use crate::sys;

/// One program of one object on this kernel.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ProgramReport {
    /// The object's file name without its extensions.
    object: String,
    program: String,
    /// `always`, or the way of counting datagrams that needs it: `calls`, `packets`.
    needed: &'static str,
    /// Number of instructions that the verifier processed; absent if the kernel does not report it, or refused the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions: Option<u32>,
    /// Why the kernel refused the program, with the last lines of the verifier's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
}

/// Loads each program of the objects separately without attaching it, and prints a line of JSON for each.
///
/// As the first process of a machine, it mounts the file systems that it needs, and powers the machine off at the end.
pub fn run(objects: &[PathBuf]) -> Result<()> {
    let is_first = std::process::id() == 1;
    if is_first {
        prepare()?;
    }
    // An object that cannot be read does not prevent the test of the others.
    let outcomes: Vec<Result<()>> = objects.iter().map(|object| survey(object)).collect();
    if is_first {
        outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).for_each(|error| println!("{error:#}"));
        std::fs::write("/proc/sysrq-trigger", "o").context("cannot power this machine off")?;
        std::thread::park();
    }
    outcomes.into_iter().collect()
}

fn survey(path: &Path) -> Result<()> {
    let object = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.split_once('.').map_or(name.as_str(), |(stem, _)| stem);
    for trial in survey_object(&object).with_context(|| format!("cannot load {}", path.display()))? {
        println!("{}", serde_json::to_string(&report(name, trial))?);
    }
    Ok(())
}

fn report(object: &str, trial: ProgramTrial) -> ProgramReport {
    let (instructions, refusal) = match trial.outcome {
        Ok(instructions) => (instructions, None),
        Err(refusal) => (None, Some(Refusal::to_string(&refusal))),
    };
    let needed = match trial.needed {
        Needed::Always => "always",
        Needed::CountCalls => "calls",
        Needed::CountPackets => "packets",
        Needed::MoveConnects => "move",
        Needed::MoveFlows => "move flows",
        Needed::MoveAccepted => "move accepted",
        Needed::ShapeFlows => "shape",
        Needed::Forward => "forward",
        Needed::ForwardAlone => "forward-alone",
    };
    ProgramReport { object: object.to_owned(), program: trial.name, needed, instructions, refusal }
}

/// Prepares a bare initrd for loading BPF objects.
fn prepare() -> Result<()> {
    for (kind, place) in [("proc", "/proc"), ("sysfs", "/sys"), ("bpf", "/sys/fs/bpf")] {
        std::fs::create_dir_all(place).with_context(|| format!("cannot make {place}"))?;
        sys::mount(kind, place, Some(kind), 0).with_context(|| format!("cannot mount {place}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_shows_the_reason_and_the_end_of_the_log() {
        let log = (0..20).map(|line| format!("line {line}\n")).collect();
        let refusal = Refusal { reason: "Permission denied".to_owned(), log };
        let trial = ProgramTrial { name: "braid_connect4".to_owned(), needed: Needed::Always, outcome: Err(refusal) };
        let report = report("clang-14", trial);
        assert_eq!(report.instructions, None);
        let refusal = report.refusal.unwrap();
        assert!(refusal.starts_with("Permission denied"), "{refusal}");
        assert!(refusal.ends_with("line 19"), "{refusal}");
    }

    #[test]
    fn an_accepted_program_shows_its_instructions() {
        let trial = ProgramTrial { name: "braid_sent".to_owned(), needed: Needed::CountCalls, outcome: Ok(Some(77)) };
        let line = serde_json::to_string(&report("clang-19", trial)).unwrap();
        assert_eq!(line, r#"{"object":"clang-19","program":"braid_sent","needed":"calls","instructions":77}"#);
    }
}
