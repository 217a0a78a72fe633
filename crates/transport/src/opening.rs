//! Opening a flow at a peer, or falling back to direct: the one wait for a peer, and the one judgement of what its answer means.

use std::pin::pin;
use std::time::{Duration, Instant};

use braid_bond::codes;

use crate::client::{Client, State};
use crate::host_driver::{BondFlow, FlowEnd};

/// A flow waits this long for a peer that has sent nothing.
const SILENCE: Duration = Duration::from_secs(1);
/// It waits this long for a peer that has begun to answer: over a slow link, or beside a busy processor, a handshake takes longer.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// A peer that lives has this long to open a flow. A relay gives a destination 30 s, and its name 10.
const LONGEST: Duration = Duration::from_secs(60);

/// Codes that are no error numbers of Linux begin here.
const FIRST_CODE: u64 = 0x1000;

/// What became of opening a flow.
#[derive(Debug)]
pub enum Opening {
    /// The peer has opened it.
    Bonded(BondFlow),
    /// It goes direct: the links may reach its destination.
    Direct(Unopened),
    /// The destination says this, a Linux error number. The program is to see it.
    Refused(i32),
}

/// Why a peer does not carry a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unopened {
    /// It cannot be reached, or fell silent before it answered.
    Silent,
    /// The peer refused, or has no route; what it said (see [`codes`]).
    Declined(u64),
}

impl Opening {
    /// What the peer's refusal means. The peer's own refusals fall back to direct; only the destination's errors reach the program.
    fn refused(FlowEnd(code): FlowEnd) -> Self {
        let own = [codes::NOT_OPENED, codes::NOT_ITS_OWN, libc::ENETUNREACH as u64];
        match i32::try_from(code) {
            Ok(errno) if (1..FIRST_CODE).contains(&code) && !own.contains(&code) => Self::Refused(errno),
            _ => Self::Direct(Unopened::Declined(code)),
        }
    }
}

impl Client {
    /// How long a flow waits for its bond: longer once the peer has sent anything.
    pub fn patience(&self) -> Duration {
        if self.is_answered() { HANDSHAKE } else { SILENCE }
    }

    /// Waits until the bond is up or its state is `settled`, at most until `end`, which may move meanwhile. Whether it is up.
    pub async fn comes(&self, end: impl Fn() -> Instant, settled: impl Fn(&State) -> bool) -> bool {
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
            // After a time in which this process did not run, what has come in is read first.
            tokio::task::yield_now().await;
            if end() <= until {
                break;
            }
        }
        self.is_up()
    }

    /// Waits for the peer's word on a flow of this bond, which is up. A flow that was not opened is reset.
    pub async fn opening(&self, flow: BondFlow) -> Opening {
        let mut state = self.state();
        let opening = tokio::select! {
            // As long as connect() would wait. Where the peer is lost meanwhile, the branches below see it.
            opened = tokio::time::timeout(LONGEST, flow.opened()) => match opened {
                Ok(Ok(())) => return Opening::Bonded(flow),
                Ok(Err(end)) => Opening::refused(end),
                Err(_) => Opening::Refused(libc::ETIMEDOUT),
            },
            _ = state.wait_for(|state| *state != State::Up) => Opening::Direct(Unopened::Silent),
            () = self.unanswered() => Opening::Direct(Unopened::Silent),
        };
        flow.reset(0);
        opening
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destinations_word_is_the_programs_and_the_peers_is_not() {
        for errno in [libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ECONNRESET] {
            assert!(matches!(Opening::refused(FlowEnd(errno as u64)), Opening::Refused(told) if told == errno));
        }
        let no_way = [libc::EACCES, libc::EADDRNOTAVAIL, libc::ENETUNREACH].map(|errno| errno as u64);
        // Codes that this version does not know are the peer's too.
        for code in [0, codes::BUSY, codes::QUOTA, 0x1003, u64::MAX].into_iter().chain(no_way) {
            assert!(matches!(Opening::refused(FlowEnd(code)), Opening::Direct(Unopened::Declined(told)) if told == code));
        }
    }
}
