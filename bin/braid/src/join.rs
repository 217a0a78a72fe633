//! `braid join`: joins a relay, and waits for its first answer.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use braid_api::{Accepted, JoinRequest, Peer, PeerKind, PeerState};
use braid_peer::invite::Invite;

use crate::cli::Join;
use crate::{client, print_accepted, printable_lines, secret};

/// Name of the invitation in the prompt.
pub(crate) const INVITATION: &str = "invitation";
/// Maximum wait for the relay's answer, which takes several round trips.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Interval at which the daemon is polled meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Makes the daemon join the relay, and reports whether the relay answers. A relay that does not answer yet is not an error: the daemon keeps
/// dialling it.
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
        // The relay may have been left in the meantime, or have another name.
        let Some(peer) = peers.into_iter().find(|peer| peer.kind == PeerKind::Relay && ours(peer)) else { return Ok(()) };
        if let Some(text) = outcome(&peer, begin.elapsed() >= TIMEOUT) {
            return Ok(writeln!(io::stdout(), "{}", printable_lines(&text))?);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Result of the join; `None` if it is not known yet.
fn outcome(peer: &Peer, late: bool) -> Option<String> {
    let because = peer.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let good: Vec<&str> = peer.paths.iter().filter(|path| path.state.delivers()).map(|path| path.link.as_str()).collect();
    match peer.state {
        // The paths of the other links come up one round trip later.
        PeerState::Up if late || good.len() == peer.paths.len() => Some(match &good[..] {
            [] => format!("{} is reached", peer.name),
            links => format!("{} is reached over {}", peer.name, links.join(", ")),
        }),
        PeerState::Refused => Some(format!("{} refuses{because}", peer.name)),
        _ if late => Some(format!(
            "{} has not answered yet{because}; the daemon keeps dialling it. Check that {} is its address and that UDP reaches it; until then flows \
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
    fn the_result_shows_whether_the_relay_answers() {
        assert_eq!(outcome(&peer("connecting", None, &[]), false), None);
        let late = outcome(&peer("unreachable", Some("nothing comes back"), &[]), true).unwrap();
        assert!(late.starts_with("home has not answered yet: nothing comes back; ") && late.contains("r.example:5757"), "{late}");
        let partly = peer("up", None, &[("wlan0", "good"), ("lte0", "probing")]);
        assert_eq!((outcome(&partly, false), outcome(&partly, true).as_deref()), (None, Some("home is reached over wlan0")));
        let whole = outcome(&peer("up", None, &[("wlan0", "good"), ("lte0", "backup")]), false);
        assert_eq!(whole.as_deref(), Some("home is reached over wlan0, lte0"));
        assert_eq!(outcome(&peer("refused", Some("revoked"), &[]), false).as_deref(), Some("home refuses: revoked"));
    }
}
