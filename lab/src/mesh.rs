//! Nodes with several radios each, of which not everybody reaches everybody: for routes over several hops.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::adhoc::{AdhocHost, Babel};
use crate::namespace::Namespace;
use crate::site::settle;
use crate::watchdog::{Home, Watchdog};

/// Pairs of nodes that reach each other over a channel, in both directions: node, node, channel.
pub type Reach = BTreeSet<(usize, usize, usize)>;

/// Nodes, each with a radio `r0`, `r1`, ... on every channel. Everything is removed when this value is dropped or the process ends.
///
/// A channel is a bridge in a namespace of its own, whose rules let frames pass only between nodes that reach each other. A frame is lost at random at each
/// receiver.
#[derive(Debug)]
pub struct Mesh {
    // Dropped in this order: the programs, then the namespaces.
    _watchdog: Watchdog,
    nodes: Vec<Namespace>,
    air: Namespace,
    channels: usize,
    home: Home,
}

impl Mesh {
    /// Creates nodes that do not reach each other yet. `loss`: frames of a thousand that a receiver loses.
    ///
    /// # Errors
    /// The kernel or `nft` refuses something; it needs root.
    pub fn start(nodes: usize, channels: usize, loss: u32) -> Result<Self> {
        ensure!(nodes <= 200 && channels <= 8, "a mesh has at most 200 nodes and 8 channels, not {nodes} and {channels}");
        let home = Home::new()?;
        let mark = home.mark();
        let air = Namespace::new("air's", &mark, None)?;
        let nodes = (0..nodes).map(|_| Namespace::new("node's", &mark, None)).collect::<Result<Vec<_>>>()?;
        let watchdog = Watchdog::start(&home, &[&air].into_iter().chain(&nodes).collect::<Vec<_>>())?;
        let mesh = Self { _watchdog: watchdog, nodes, air, channels, home };
        mesh.make_devices()?;
        mesh.nft(&format!(
            "table bridge air {{
                set reach {{ type ifname . ifname
                }}
                chain forward {{
                    type filter hook forward priority 0; policy drop;
                    numgen random mod 1000 < {loss} drop
                    iifname . oifname @reach accept
                }}
            }}"
        ))?;
        Ok(mesh)
    }

    fn make_devices(&self) -> Result<()> {
        self.air.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut lines = String::new();
        for channel in 0..self.channels {
            writeln!(lines, "link add name channel{channel} up type bridge forward_delay 0 mcast_snooping 0")?;
            for (number, node) in self.nodes.iter().enumerate() {
                let port = port(number, channel);
                writeln!(lines, "link add name {port} up master channel{channel} type veth peer name r{channel} netns {}", node.path())?;
            }
        }
        self.air.ip(&lines)?;
        for node in &self.nodes {
            settle(node, true)?;
            for (key, value) in [("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/default/rp_filter", "0")] {
                node.sysctl(&format!("ipv4/{key}"), value)?;
            }
            let radios: String = (0..self.channels).map(|channel| format!("link set dev r{channel} up\n")).collect();
            node.ip(&format!("link set dev lo up\n{radios}"))?;
        }
        Ok(())
    }

    /// A node, from 0.
    pub fn node(&self, number: usize) -> &Namespace {
        &self.nodes[number]
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// A directory that is removed with the mesh.
    pub fn directory(&self) -> &Path {
        self.home.path()
    }

    /// The address that a node's routing daemon announces.
    pub fn address(number: usize) -> String {
        format!("10.66.{number}.1")
    }

    /// The address of a node's ad-hoc device.
    pub fn device_address(number: usize) -> String {
        format!("10.55.0.{}", number + 1)
    }

    /// Makes these pairs, and no others, reach each other, all at once.
    ///
    /// # Errors
    /// `nft` rejects it.
    pub fn set_reach(&self, reach: &Reach) -> Result<()> {
        let element = |(one, other, channel): &(usize, usize, usize)| {
            let [one, other] = [port(*one, *channel), port(*other, *channel)];
            format!("{one} . {other}, {other} . {one}")
        };
        let elements: Vec<String> = reach.iter().map(element).collect();
        let mut script = "flush set bridge air reach\n".to_owned();
        if !elements.is_empty() {
            writeln!(script, "add element bridge air reach {{ {} }}", elements.join(", "))?;
        }
        self.nft(&script)
    }

    fn nft(&self, script: &str) -> Result<()> {
        let mut command = self.air.command("nft")?;
        let mut child =
            command.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot run nft: install nftables")?;
        child.stdin.take().context("nft has no input")?.write_all(script.as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Starts an ad-hoc device over all radios of a node, waits until it is up, and gives it its address.
    ///
    /// # Errors
    /// It does not come up.
    pub fn device(&self, braid: &Path, number: usize) -> Result<AdhocHost<'_>> {
        let radios: String = (0..self.channels).map(|channel| format!(" --radio r{channel}")).collect();
        let mut device = AdhocHost::begin_at(self.node(number), self.directory(), braid, number, &radios)?;
        device.wait_up()?;
        self.node(number).ip(&format!("address add {}/24 dev vi0\n", Self::device_address(number)))?;
        Ok(device)
    }

    /// Starts babeld on a node's ad-hoc device. A mesh is to babeld as a wireless network (`-w`): a node repeats to its neighbours what it has from a neighbour.
    ///
    /// # Errors
    /// babeld is missing.
    pub fn babel(&self, number: usize) -> Result<Babel> {
        let arguments = ["-w", "-h", "1", "vi0"].map(str::to_owned);
        Babel::start_at(self.node(number), self.directory(), number, &Self::address(number), &arguments)
    }
}

/// Name of a node's port at a channel.
fn port(node: usize, channel: usize) -> String {
    format!("n{node}c{channel}")
}
