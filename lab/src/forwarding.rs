//! Forwarding by the kernel's own means, without Braid: what a gateway is compared with.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::lab::Lab;
use crate::namespace::Namespace;

/// Bits of a packet's mark that hold its link, 1 for the first. The same as mwan3's.
const MASK: u32 = 0x3f00;
/// Preference of the first routing rule, and number of the first routing table.
const FIRST: usize = 2001;

/// How the lab's client forwards what the devices of its LAN send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way<'a> {
    /// The system's default route, and one masquerade.
    Plain,
    /// mwan3's rules written by hand: new flows take turns on the links with these weights, connection marks keep them there, and a routing rule
    /// for each mark leads to the link's own table, which has a copy of the LAN's route for the answers.
    Balanced(&'a [u32]),
}

/// Forwarding that was set up in the client. Dropping it removes it.
#[derive(Debug)]
pub struct Forwarding<'a> {
    client: &'a Namespace,
    links: usize,
}

impl<'a> Forwarding<'a> {
    /// Sets it up. The client must not forward yet.
    pub fn start(lab: &'a Lab, way: Way<'_>) -> Result<Self> {
        let client = lab.client();
        let this = Self { client, links: if way == Way::Plain { 0 } else { lab.links().len() } };
        nft(client, &ruleset(lab, way)?)?;
        for number in 0..this.links {
            let (table, mark, device) = (FIRST + number, mark(number), lab.links()[number].name());
            client.ip(&format!(
                "route add default via 10.77.{number}.1 dev {device} table {table}\n\
                 route add ::/0 via fd77:0:0:{number:x}::1 dev {device} table {table}\n\
                 route add 192.168.7.0/24 dev lan0 table {table}\n\
                 route add fd07::/64 dev lan0 table {table}\n\
                 rule add pref {table} fwmark {mark:#x}/{MASK:#x} lookup {table}\n"
            ))?;
            client.ip6(&format!("rule add pref {table} fwmark {mark:#x}/{MASK:#x} lookup {table}\n"))?;
        }
        // The reverse path filter must look the answers up by their connection's mark.
        client.sysctl("ipv4/conf/all/src_valid_mark", if this.links > 0 { "1" } else { "0" })?;
        client.sysctl("ipv4/ip_forward", "1")?;
        client.sysctl("ipv6/conf/all/forwarding", "1")?;
        Ok(this)
    }

    fn undo(&self) -> Result<()> {
        self.client.sysctl("ipv6/conf/all/forwarding", "0")?;
        self.client.sysctl("ipv4/ip_forward", "0")?;
        self.client.sysctl("ipv4/conf/all/src_valid_mark", "0")?;
        for table in FIRST..FIRST + self.links {
            self.client.ip(&format!("rule delete pref {table}\nroute flush table {table}\n"))?;
            self.client.ip6(&format!("rule delete pref {table}\nroute flush table {table}\n"))?;
        }
        nft(self.client, "delete table inet lab\n")
    }
}

impl Drop for Forwarding<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            eprintln!("lab: cannot remove the forwarding: {error:#}");
        }
    }
}

/// Runs `nft` in a namespace with this script.
pub fn nft(namespace: &Namespace, script: &str) -> Result<()> {
    let mut command: Command = namespace.command("nft")?;
    let child = command.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.context("cannot run nft: run lab/install-deps.sh")?;
    child.stdin.take().context("nft has no input")?.write_all(script.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("nft: {}\n{script}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn mark(link: usize) -> u32 {
    (link as u32 + 1) << 8
}

fn ruleset(lab: &Lab, way: Way<'_>) -> Result<String> {
    let mut text = String::from(
        "table inet lab {\nchain leaving {\ntype nat hook postrouting priority srcnat\n\
         ip saddr 192.168.7.0/24 oifname != lan0 masquerade\nip6 saddr fd07::/64 oifname != lan0 masquerade\n}\n",
    );
    if let Way::Balanced(weights) = way {
        let (mut turns, mut all) = (String::new(), 0);
        for (number, weight) in weights.iter().enumerate() {
            let last = all + weight - 1;
            let range = if last == all { all.to_string() } else { format!("{all}-{last}") };
            write!(turns, "{}{range} : {:#x}", if all > 0 { ", " } else { "" }, mark(number))?;
            all += weight;
        }
        writeln!(text, "chain arriving {{\ntype filter hook prerouting priority mangle")?;
        writeln!(text, "meta mark set ct mark")?;
        writeln!(text, "iifname lan0 meta mark 0 fib daddr type unicast ct mark set numgen inc mod {all} map {{ {turns} }}")?;
        for (number, link) in lab.links().iter().enumerate() {
            writeln!(text, "iifname {} meta mark 0 ct mark set {:#x}", link.name(), mark(number))?;
        }
        writeln!(text, "meta mark set ct mark\n}}")?;
    }
    text += "}\n";
    Ok(text)
}
