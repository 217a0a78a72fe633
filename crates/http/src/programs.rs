//! Awaits the ends of programs that have added rules.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use braid_control::core::Program;
use braid_platform::linux::sys::access::PeerProcess;
use tokio::sync::mpsc;

use super::Request;

/// Programs whose ends are awaited.
#[derive(Debug, Clone, Default)]
pub(super) struct Watched(Arc<Mutex<BTreeSet<Program>>>);

impl Watched {
    /// Sends [`Request::ProgramEnded`] once the process has ended. Call it after the core has answered the process's request, so that the core removes what
    /// that request has added.
    pub(super) fn watch(&self, process: Arc<PeerProcess>, core: mpsc::Sender<Request>) {
        let program = program(&process);
        let programs = self.0.clone();
        if !lock(&programs).insert(program.clone()) {
            return;
        }
        tokio::spawn(async move {
            let ended = process.ended().await;
            // First, so that a request that comes now is watched again.
            lock(&programs).remove(&program);
            match ended {
                Ok(()) => drop(core.send(Request::ProgramEnded(program)).await),
                Err(error) => tracing::warn!("the end of {program} cannot be awaited ({error}): its rules end with their leases"),
            }
        });
    }
}

fn lock(programs: &Mutex<BTreeSet<Program>>) -> MutexGuard<'_, BTreeSet<Program>> {
    programs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process as the core knows it.
pub(super) fn program(process: &PeerProcess) -> Program {
    Program { process: process.id, started: process.started, name: process.name.clone() }
}
