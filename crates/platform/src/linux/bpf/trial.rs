//! Kernel parts for tests and benchmarks: the connection rule alone, and a filter that does not belong to Braid. Braid itself never loads them.

use aya::maps::Array;
use aya::programs::{CgroupAttachMode, CgroupSkbAttachType, Program};
use aya::{Ebpf, EbpfLoader};
use braid_model::LinkSet;
use std::os::fd::AsFd;

use super::load::LoadError;
use super::{convert, detail, failed};
use crate::linux::sys::{abi, bpf as sys};
use braid_control::steering::SteeringError;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/trial.bpf.o"));
const ACTION: &str = "run a trial of the connection rule";

/// The loaded test program `braid_trial`.
#[derive(Debug)]
pub struct KernelRule(Ebpf);

/// An egress filter of a cgroup that does not belong to Braid and lets all packets pass. Dropping it removes it.
#[derive(Debug)]
pub struct ForeignFilter {
    _ebpf: Ebpf,
}

impl ForeignFilter {
    /// Attaches the filter to the cgroup with this directory. Needs CAP_BPF and CAP_NET_ADMIN.
    pub fn attach(cgroup: impl AsFd) -> Result<Self, LoadError> {
        let refused = |error: &dyn std::error::Error| LoadError::Object { reason: detail(error) };
        let mut ebpf = EbpfLoader::new().load(OBJECT).map_err(|error| refused(&error))?;
        let Some(Program::CgroupSkb(program)) = ebpf.program_mut("foreign_filter") else {
            return Err(LoadError::Object { reason: "the test object has no program foreign_filter".to_owned() });
        };
        program.load().map_err(|error| refused(&error))?;
        program.attach(cgroup, CgroupSkbAttachType::Egress, CgroupAttachMode::default()).map_err(|error| refused(&error))?;
        Ok(Self { _ebpf: ebpf })
    }
}

impl KernelRule {
    /// Loads the program. Needs CAP_BPF and CAP_PERFMON.
    pub fn load() -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Object { reason };
        let mut ebpf = EbpfLoader::new().load(OBJECT).map_err(|error| refused(detail(&error)))?;
        let program = match ebpf.program_mut("braid_trial") {
            Some(Program::SchedClassifier(program)) => program,
            _ => return Err(refused("the test object has no program braid_trial".to_owned())),
        };
        program.load().map_err(|error| refused(detail(&error)))?;
        Ok(Self(ebpf))
    }

    /// Makes one decision on `trial` with these parameters, and returns the trial with its result.
    pub fn decide(&mut self, params: abi::Params, trial: abi::Trial) -> Result<abi::Trial, SteeringError> {
        self.array("params")?.set(0, params, 0).map_err(failed(ACTION))?;
        self.array("trials")?.set(0, trial, 0).map_err(failed(ACTION))?;
        self.run(1)?;
        self.array("trials")?.get(&0, 0).map_err(failed(ACTION))
    }

    /// Mean time of one decision among `allowed` with the parameters of the last [`decide`](Self::decide), over `repeat` runs, in nanoseconds.
    pub fn time(&mut self, repeat: u32, allowed: LinkSet) -> Result<u32, SteeringError> {
        let trial = abi::Trial { allowed: convert::mask(allowed), demand: 1_000_000, ..Default::default() };
        self.array("trials")?.set(0, trial, 0).map_err(failed(ACTION))?;
        self.run(repeat)
    }

    fn run(&mut self, repeat: u32) -> Result<u32, SteeringError> {
        let program = self.0.program("braid_trial").and_then(|program| program.fd().ok());
        let program = program.ok_or_else(|| SteeringError { action: ACTION, reason: "the program is not loaded".to_owned() })?;
        sys::test_run(program.as_fd(), repeat).map_err(|error| SteeringError { action: ACTION, reason: error.to_string() })
    }

    fn array<V: aya::Pod>(&mut self, name: &'static str) -> Result<Array<&mut aya::maps::MapData, V>, SteeringError> {
        let map = self.0.map_mut(name).ok_or(SteeringError { action: ACTION, reason: format!("the test object has no map {name}") })?;
        Array::try_from(map).map_err(failed(ACTION))
    }
}
