//! The namespaces of a lab while it is built.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::namespace::Namespace;

/// Timeout for the kernel to configure addresses.
const LIMIT: Duration = Duration::from_secs(60);

/// The namespaces of a lab between which devices are made.
pub(crate) struct Site<'a> {
    pub(crate) client: &'a Namespace,
    pub(crate) server: &'a Namespace,
    pub(crate) between: &'a Namespace,
    pub(crate) ipv6: bool,
}

/// Disables duplicate address detection and router advertisements, and lets every user ping.
pub(crate) fn settle(namespace: &Namespace, ipv6: bool) -> Result<()> {
    for key in ["all", "default"] {
        namespace.sysctl(&format!("ipv6/conf/{key}/accept_dad"), "0")?;
        namespace.sysctl(&format!("ipv6/conf/{key}/accept_ra"), "0")?;
        if !ipv6 {
            namespace.sysctl(&format!("ipv6/conf/{key}/disable_ipv6"), "1")?;
        }
    }
    let _ = namespace.sysctl("ipv4/ping_group_range", "0 65535");
    Ok(())
}

/// Waits until the kernel has finished its asynchronous IPv6 configuration, and there are `expected` own addresses with these beginnings.
pub(crate) fn await_addresses(namespace: &Namespace, beginnings: &[&str], expected: usize) -> Result<()> {
    let begin = Instant::now();
    loop {
        let output = namespace.command("ip")?.args(["-6", "route", "show", "table", "local"]).output().context("cannot run ip")?;
        let routes = String::from_utf8_lossy(&output.stdout).into_owned();
        let there = routes.lines().filter(|line| beginnings.iter().any(|start| line.starts_with(start))).count();
        if there >= expected {
            return Ok(());
        }
        ensure!(begin.elapsed() < LIMIT, "after {LIMIT:?} the kernel has {there} of {expected} own addresses of the links:\n{routes}");
        thread::sleep(Duration::from_millis(5));
    }
}
