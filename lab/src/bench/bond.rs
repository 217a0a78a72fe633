//! Flows through a relay, over all links at once.

pub(super) mod churn;
pub(super) mod crowd;
pub(super) mod cut;
pub(super) mod fair;
pub(super) mod few;
pub(super) mod late;
pub(super) mod matrix;
pub(super) mod messages;
pub(super) mod moves;
mod origin;
pub(super) mod relay;
pub(super) mod simult;
pub(super) mod speed;
mod stream;
pub(super) mod sums;

use anyhow::{Context, Result, ensure};

use super::Settings;
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::relay::Relay;

/// Ports of the servers whose flows bond.
const PORTS: [u16; 2] = [80, 8080];

/// A relay, and a daemon that has joined it over every link and bonds flows to [`PORTS`].
pub(super) struct Bonded {
    relay: Relay,
    pub(super) daemon: Daemon,
}

impl Bonded {
    fn start(settings: &Settings, lab: &Lab) -> Result<Self> {
        let rules = PORTS.map(|port| format!("[[app]]\nmatch = {{ port = {port} }}\ncarry = \"bond\"\n")).concat();
        Self::with_rules(settings, lab, &rules)
    }

    /// Like the above, with other rules for bonded flows.
    pub(super) fn with_rules(settings: &Settings, lab: &Lab, rules: &str) -> Result<Self> {
        let relay = Relay::start(lab, &settings.braid)?;
        let daemon = Daemon::start(lab, &settings.braid, "max-throughput", rules)?;
        relay.admit(lab, &daemon)?;
        Ok(Self { relay, daemon })
    }
}

/// Makes the kernel's multipath TCP use every link, up to the kernel's limit of eight further subflows.
fn allow_multipath(lab: &Lab) -> Result<()> {
    let ip = |namespace: &crate::namespace::Namespace, arguments: &str| -> Result<()> {
        let mut command = namespace.command("ip")?;
        let output = command.args(arguments.split(' ')).output().context("cannot run ip: install iproute2")?;
        ensure!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    };
    for namespace in [lab.client(), lab.host()] {
        ip(namespace, "mptcp limits set subflow 8 add_addr_accepted 8")?;
    }
    for (number, link) in lab.links().iter().enumerate().take(8) {
        ip(lab.client(), &format!("mptcp endpoint add 10.77.{number}.2 dev {} subflow", link.name()))?;
    }
    Ok(())
}
