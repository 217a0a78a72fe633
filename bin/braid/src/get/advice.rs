//! What the daemon knows of links, and what its policy lets `braid get` use.

use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use braid_api::{ExplainRequest, Explanation, LinkState, Outcome, PolicyView};
use braid_fetch::Download;
use braid_model::{ByteCount, Rate};

use crate::client;

/// How long the name of a server may take to resolve, only to ask for the rule that holds for it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Estimates that are trusted less are guesses.
const TRUSTED: f64 = 0.2;

/// What the daemon says; nothing at all where there is none.
#[derive(Debug, Default)]
pub(super) struct Advice {
    links: Vec<braid_api::LinkStatus>,
    permitted: Option<Permitted>,
}

/// The links that an `[[app]]` entry leaves.
#[derive(Debug)]
struct Permitted {
    links: Vec<String>,
    rule: String,
}

impl Advice {
    /// Asks the daemon on `socket`, if there is one.
    pub(super) fn ask(socket: &Path, downloads: &[Download]) -> Self {
        let links: Vec<braid_api::LinkStatus> = client::list(socket, "/v1/links").unwrap_or_default();
        if links.is_empty() {
            return Self::default();
        }
        let policy: PolicyView = client::read(socket, "/v1/policy").unwrap_or_default();
        let permitted = if policy.apps.is_empty() { None } else { permitted(socket, downloads) };
        Self { links, permitted }
    }

    /// The link's state and estimates.
    pub(super) fn link(&self, name: &str) -> Option<&braid_api::LinkStatus> {
        self.links.iter().find(|link| link.name == name)
    }

    /// Why nothing may go over it though it may work: it is excluded, or its allowance is used up.
    pub(super) fn withholds(&self, name: &str) -> Option<String> {
        let link = self.link(name).filter(|link| matches!(link.state, LinkState::Excluded | LinkState::Capped))?;
        Some(link.reason.clone().unwrap_or_else(|| format!("the daemon calls it {}", link.state)))
    }

    /// Whether the daemon would use it now: neither dead nor kept for later.
    pub(super) fn open(&self, name: &str) -> bool {
        self.link(name).is_none_or(|link| matches!(link.state, LinkState::Up | LinkState::Unknown))
    }

    /// The rule that forbids `braid get` this link.
    pub(super) fn forbids(&self, name: &str) -> Option<&str> {
        let permitted = self.permitted.as_ref()?;
        (self.link(name).is_some() && !permitted.links.iter().any(|link| link == name)).then_some(permitted.rule.as_str())
    }

    /// What it brings, where the daemon has seen it.
    pub(super) fn rate(&self, name: &str) -> Option<Rate> {
        let link = self.link(name)?;
        link.capacity_down_bps.filter(|_| link.capacity_confidence.is_none_or(|trust| trust >= TRUSTED)).map(Rate::from_bps)
    }

    /// What is left of its monthly allowance.
    pub(super) fn allowance(&self, name: &str) -> Option<ByteCount> {
        let link = self.link(name)?;
        Some(ByteCount::new(link.cap_bytes?).saturating_sub(ByteCount::new(link.used_bytes.unwrap_or(0))))
    }

    /// What 10^9 bytes over it cost.
    pub(super) fn price(&self, name: &str) -> Option<f64> {
        self.link(name)?.cost_per_gb
    }
}

/// Asks which links the policy gives this program towards the first file's server.
fn permitted(socket: &Path, downloads: &[Download]) -> Option<Permitted> {
    let url = downloads.first()?.urls.first()?;
    let port = url.port_or_known_default();
    let destination = address(url.host_str()?, port.unwrap_or(443))?;
    let exe = std::env::current_exe().ok()?;
    let request = ExplainRequest {
        name: exe.file_name().map(|name| name.to_string_lossy().chars().take(15).collect()),
        exe: Some(exe.display().to_string()),
        destination: Some(destination.to_string()),
        port,
        user: std::fs::metadata("/proc/self").ok().map(|own| own.uid()),
        cgroup: own_cgroup(),
        ..ExplainRequest::default()
    };
    let explanation: Explanation = client::send(socket, "/v1/explain", &request).ok()?;
    if explanation.rule.is_none() || explanation.outcome == Outcome::LeftAlone {
        return None;
    }
    let links = explanation.candidates.into_iter().filter(|candidate| candidate.allowed).map(|candidate| candidate.link).collect();
    Some(Permitted { links, rule: explanation.rule_text.unwrap_or_default() })
}

/// The control group that this program is in.
fn own_cgroup() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned())
}

/// An address of `host`; a name's by the system's resolver, if that is quick.
fn address(host: &str, port: u16) -> Option<IpAddr> {
    let host = host.trim_matches(['[', ']']).to_owned();
    if let Ok(address) = host.parse() {
        return Some(address);
    }
    let (tell, told) = mpsc::channel();
    // A thread of its own: resolvers cannot be interrupted.
    thread::spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().ok().and_then(|mut found| found.next());
        let _ = tell.send(found.map(|address| address.ip()));
    });
    told.recv_timeout(PATIENCE).ok().flatten()
}
