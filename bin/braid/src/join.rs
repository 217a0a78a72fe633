//! `braid join`: joins, and waits a moment for the relay's first answer.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use braid_api::{Accepted, JoinRequest, Peer, PeerKind, PeerState};
use braid_peer::invite::Invite;

use crate::cli::Join;
use crate::{client, print_accepted, printable_lines, secret};

/// What the line is called where it is asked for.
pub(crate) const INVITATION: &str = "invitation";
/// An answer takes some round trips; one that takes longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// The daemon is asked so often meanwhile.
const PAUSE: Duration = Duration::from_millis(100);

/// Has the daemon join, and tells whether the relay answers. That it does not yet is no failure: it is joined, and dialled again and again.
pub(crate) fn run(join: Join) -> anyhow::Result<()> {
    let line = secret::line(join.line, INVITATION)?;
    let address = Invite::parse(&line).ok().and_then(|invite| invite.addresses().first().map(ToString::to_string));
    let socket = &join.daemon.socket;
    let accepted: Accepted = client::send(socket, "/v1/join", &JoinRequest { line, name: join.name.clone() })?;
    print_accepted(&accepted)?;
    let ours = |peer: &Peer| match &join.name {
        Some(name) => peer.name == *name,
        None => Some(&peer.address) == address.as_ref(),
    };
    let begin = Instant::now();
    loop {
        let peers: Vec<Peer> = client::list(socket, "/v1/peers")?;
        // It may have been left meanwhile, or be known by another name.
        let Some(peer) = peers.into_iter().find(|peer| peer.kind == PeerKind::Relay && ours(peer)) else { return Ok(()) };
        if let Some(text) = outcome(&peer, begin.elapsed() >= PATIENCE) {
            return Ok(writeln!(io::stdout(), "{}", printable_lines(&text))?);
        }
        std::thread::sleep(PAUSE);
    }
}

/// What came of it; `None`: that cannot be told yet.
fn outcome(peer: &Peer, late: bool) -> Option<String> {
    let because = peer.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let good: Vec<&str> = peer.paths.iter().filter(|path| path.state.delivers()).map(|path| path.link.as_str()).collect();
    match peer.state {
        // The other links' paths come a round trip later.
        PeerState::Up if late || good.len() == peer.paths.len() => Some(match &good[..] {
            [] => format!("{} is reached", peer.name),
            links => format!("{} is reached over {}", peer.name, links.join(", ")),
        }),
        PeerState::Refused => Some(format!("{} refuses{because}", peer.name)),
        _ if late => Some(format!(
            "{} gave no answer yet{because}; it is dialled again and again: see that {} is its address, and that UDP gets there; until then flows \
             go direct",
            peer.name, peer.address
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn peer(state: &str, reason: Option<&str>, paths: &[(&str, &str)]) -> Peer {
        let path = |(link, state): &(&str, &str)| json!({"link": link, "state": state});
        let paths: Vec<_> = paths.iter().map(path).collect();
        let peer = json!({"name": "home", "kind": "relay", "address": "r.example:5757", "state": state, "reason": reason, "paths": paths});
        serde_json::from_value(peer).unwrap()
    }

    #[test]
    fn a_relay_that_answers_is_told_from_one_that_does_not() {
        assert_eq!(outcome(&peer("connecting", None, &[]), false), None);
        let late = outcome(&peer("unreachable", Some("nothing comes back"), &[]), true).unwrap();
        assert!(late.starts_with("home gave no answer yet: nothing comes back; ") && late.contains("r.example:5757"), "{late}");
        let partly = peer("up", None, &[("wlan0", "good"), ("lte0", "probing")]);
        assert_eq!((outcome(&partly, false), outcome(&partly, true).as_deref()), (None, Some("home is reached over wlan0")));
        let whole = outcome(&peer("up", None, &[("wlan0", "good"), ("lte0", "backup")]), false);
        assert_eq!(whole.as_deref(), Some("home is reached over wlan0, lte0"));
        assert_eq!(outcome(&peer("refused", Some("revoked"), &[]), false).as_deref(), Some("home refuses: revoked"));
    }
}
