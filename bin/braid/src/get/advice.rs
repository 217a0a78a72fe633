//! The daemon's estimates and policy for the links of `braid get`.

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

/// Time limit to resolve the server's name, which is only needed to ask the daemon for the matching rule.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Estimates with a lower confidence are ignored.
const MIN_CONFIDENCE: f64 = 0.2;

/// State and policy of the daemon; empty if no daemon runs.
#[derive(Debug, Default)]
pub(super) struct Advice {
    links: Vec<braid_api::LinkStatus>,
    permitted: Option<Permitted>,
}

/// The links that an `[[app]]` entry permits.
#[derive(Debug)]
struct Permitted {
    links: Vec<String>,
    rule: String,
}

impl Advice {
    /// Asks the daemon on `socket`, if one runs.
    pub(super) fn ask(socket: &Path, downloads: &[Download]) -> Self {
        let links: Vec<braid_api::LinkStatus> = client::list(socket, "/v1/links").unwrap_or_default();
        if links.is_empty() {
            return Self::default();
        }
        let policy: PolicyView = client::read(socket, "/v1/policy").unwrap_or_default();
        let permitted = if policy.apps.is_empty() { None } else { permitted(socket, downloads) };
        Self { links, permitted }
    }

    /// State and estimates of the link.
    pub(super) fn link(&self, name: &str) -> Option<&braid_api::LinkStatus> {
        self.links.iter().find(|link| link.name == name)
    }

    /// Reason why the link must not be used although it may work: it is excluded, or its allowance is used up.
    pub(super) fn withholds(&self, name: &str) -> Option<String> {
        let link = self.link(name).filter(|link| matches!(link.state, LinkState::Excluded | LinkState::Capped))?;
        Some(link.reason.clone().unwrap_or_else(|| format!("the daemon reports it as {}", link.state)))
    }

    /// Whether the daemon would use the link now: it is neither dead nor held in reserve.
    pub(super) fn open(&self, name: &str) -> bool {
        self.link(name).is_none_or(|link| matches!(link.state, LinkState::Up | LinkState::Unknown))
    }

    /// The rule that forbids `braid get` to use the link.
    pub(super) fn forbids(&self, name: &str) -> Option<&str> {
        let permitted = self.permitted.as_ref()?;
        (self.link(name).is_some() && !permitted.links.iter().any(|link| link == name)).then_some(permitted.rule.as_str())
    }

    /// Capacity of the link towards this machine, if the daemon has measured it.
    pub(super) fn rate(&self, name: &str) -> Option<Rate> {
        let link = self.link(name)?;
        link.capacity_down_bps.filter(|_| link.capacity_confidence.is_none_or(|trust| trust >= MIN_CONFIDENCE)).map(Rate::from_bps)
    }

    /// Rest of the link's monthly allowance.
    pub(super) fn allowance(&self, name: &str) -> Option<ByteCount> {
        let link = self.link(name)?;
        Some(ByteCount::new(link.cap_bytes?).saturating_sub(ByteCount::new(link.used_bytes.unwrap_or(0))))
    }

    /// Price of 10^9 bytes over the link.
    pub(super) fn price(&self, name: &str) -> Option<f64> {
        self.link(name)?.cost_per_gb
    }
}

/// Asks the daemon which links its policy permits for this program and the server of the first file.
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

/// Control group of this process.
fn own_cgroup() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned())
}

/// Returns an address of `host`. A name is resolved by the system's resolver, unless that takes too long.
fn address(host: &str, port: u16) -> Option<IpAddr> {
    let host = host.trim_matches(['[', ']']).to_owned();
    if let Ok(address) = host.parse() {
        return Some(address);
    }
    let (sender, receiver) = mpsc::channel();
    // A resolver call cannot be interrupted, so it runs in its own thread.
    thread::spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().ok().and_then(|mut found| found.next());
        let _ = sender.send(found.map(|address| address.ip()));
    });
    receiver.recv_timeout(RESOLVE_TIMEOUT).ok().flatten()
}
