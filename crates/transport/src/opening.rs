//! Opens a flow at a peer, or falls back to a direct connection. All waiting for a peer and all interpretation of its answers is here.

use std::pin::pin;
use std::time::{Duration, Instant};

use braid_bond::codes;

use crate::client::{Client, State};
use crate::host_driver::{BondFlow, ResetCode};

/// How long a flow waits for a peer that has sent nothing.
const SILENT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a flow waits for a peer that has begun to answer: a handshake takes longer over a slow link or on a busy CPU.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a reachable peer may take to open a flow; the program then gets `ETIMEDOUT`. A relay allows 30 s for the connection to the destination and
/// 10 s for name resolution, so a working relay answers earlier.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

/// Codes from this number on are not Linux error numbers.
const FIRST_CODE: u64 = 0x1000;

/// Result of opening a flow.
#[derive(Debug)]
pub enum Opening {
    /// The peer opened the flow.
    Bonded(BondFlow),
    /// Open the flow directly: the links may reach its destination.
    Direct(DirectReason),
    /// The destination refused with this Linux error number. The program receives the error.
    Refused(i32),
}

/// Why a peer does not carry a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectReason {
    /// The peer is unreachable, or stopped answering.
    Silent,
    /// The peer refused, or has no route; with its code (see [`codes`]).
    Declined(u64),
}

impl Opening {
    /// Interprets a refusal. The peer's own refusals lead to a direct connection; only errors of the destination reach the program.
    fn refused(ResetCode(code): ResetCode) -> Self {
        let own = [codes::NOT_OPENED, codes::NOT_ITS_OWN, libc::ENETUNREACH as u64];
        match i32::try_from(code) {
            Ok(errno) if (1..FIRST_CODE).contains(&code) && !own.contains(&code) => Self::Refused(errno),
            _ => Self::Direct(DirectReason::Declined(code)),
        }
    }
}

impl Client {
    /// How long a flow waits for its bond: longer once the peer has sent anything.
    pub fn open_timeout(&self) -> Duration {
        if self.is_answered() { HANDSHAKE_TIMEOUT } else { SILENT_TIMEOUT }
    }

    /// Waits until the bond is up or `settled` holds for its state, at most until `end`, which may change meanwhile. Returns whether the bond is up.
    pub async fn wait_until_up(&self, end: impl Fn() -> Instant, settled: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state();
        let settled = async {
            let _ = state.wait_for(|state| *state == State::Up || settled(state)).await;
        };
        let mut settled = pin!(settled);
        loop {
            let until = end();
            if tokio::time::timeout_at(until.into(), &mut settled).await.is_ok() {
                break;
            }
            // After this process was suspended, process received packets first.
            tokio::task::yield_now().await;
            if end() <= until {
                break;
            }
        }
        self.is_up()
    }

    /// Waits for the peer's answer to a flow of this bond, which is up. Resets a flow that was not opened.
    pub async fn opening(&self, flow: BondFlow) -> Opening {
        let mut state = self.state();
        let opening = tokio::select! {
            // The other branches handle a peer that is lost or silent meanwhile.
            opened = tokio::time::timeout(OPEN_TIMEOUT, flow.opened()) => match opened {
                Ok(Ok(())) => return Opening::Bonded(flow),
                Ok(Err(end)) => Opening::refused(end),
                Err(_) => Opening::Refused(libc::ETIMEDOUT),
            },
            _ = state.wait_for(|state| *state != State::Up) => Opening::Direct(DirectReason::Silent),
            () = self.wait_for_silence() => Opening::Direct(DirectReason::Silent),
        };
        flow.reset(0);
        opening
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_destination_reach_the_program() {
        for errno in [libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ECONNRESET] {
            assert!(matches!(Opening::refused(ResetCode(errno as u64)), Opening::Refused(told) if told == errno));
        }
        let no_way = [libc::EACCES, libc::EADDRNOTAVAIL, libc::ENETUNREACH].map(|errno| errno as u64);
        // Codes that this version does not define are the peer's too.
        for code in [0, codes::BUSY, codes::QUOTA, 0x1003, u64::MAX].into_iter().chain(no_way) {
            assert!(matches!(Opening::refused(ResetCode(code)), Opening::Direct(DirectReason::Declined(told)) if told == code));
        }
    }
}
