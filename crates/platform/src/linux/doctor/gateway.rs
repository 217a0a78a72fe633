//! Checks of what a gateway needs: the switch's programs, nftables, and a system that lets forwarded packets pass.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use braid_decide::gateway::GatewayPlan;
use braid_decide::policy::Policy;
use braid_decide::tables;
use braid_model::{LinkFacts, NetworkSnapshot, PerFamily};

use super::{Check, GATEWAY, Standing, check, processes, read, root};
use crate::linux::bpf::BpfSteering;
use crate::linux::bpf::load::{LoadError, Needed, ProgramTrial};
use crate::linux::gateway::{self, GatewayError, SEARCH};
use crate::linux::netlink::netfilter::{self, BaseChain};
use crate::linux::netlink::{Files, snapshot};

/// Name of the check that loads the programs of the switch.
pub const SWITCH: &str = "switch programs";
/// Name of the check that tries the firewall rules.
pub const RULES: &str = "nftables";
/// Name of the check for firewalls that drop forwarded packets.
pub const FORWARDING: &str = "other firewalls";

/// Programs that assign addresses by DHCP.
const DHCP_SERVERS: [&str; 5] = ["dnsmasq", "kea-dhcp4", "dhcpd", "odhcpd", "udhcpd"];
/// Numbers of `hook forward` (`NF_INET_FORWARD`) and of `policy drop` (`NF_DROP`).
const FORWARD: u32 = 2;
const DROP: u32 = 0;

/// Name of the check for what the daemon serves.
pub const MODE: &str = "gateway mode";

/// All checks of a gateway. `survey` is `None` if this process must not load programs. `lost` names what is missing only for this machine's own programs.
pub(super) fn examine(policy: &Policy, survey: Option<&Result<Vec<ProgramTrial>, LoadError>>, lost: &[&str]) -> Vec<Check> {
    let mut checks = match survey {
        Some(_) if !lost.is_empty() => vec![mode(lost), switch_alone(&BpfSteering::gateway_only(lost.join(", ")))],
        Some(survey) => vec![mode(lost), switch(survey)],
        None => vec![untested(SWITCH)],
    };
    checks.push(rules(policy, survey.is_some()));
    checks.push(if survey.is_some() { firewalls(&policy.lan) } else { untested(FORWARDING) });
    match snapshot(&Files::default()) {
        Ok(network) => checks.extend([devices(&network, &policy.lan), subnets(&network, policy)]),
        Err(error) => checks.push(check("LAN devices", GATEWAY, Standing::Unknown, error.to_string(), None)),
    }
    checks.push(addresses(&processes(root())));
    checks
}

/// Whether the daemon serves clients only.
fn mode(lost: &[&str]) -> Check {
    if lost.is_empty() {
        return check(MODE, GATEWAY, Standing::Ok, "the daemon serves clients and this machine's own programs", None);
    }
    let found = format!(
        "the daemon serves clients only; flows of this machine's own programs follow the system's routes, because these checks fail: {}",
        lost.join(", ")
    );
    let remedy =
        "for clients nothing is lost but room: 32768 flows in all, 8192 for each; `braid doctor --for up` says what the rest needs";
    check(MODE, GATEWAY, Standing::Warning, found, Some(remedy))
}

/// Whether the kernel accepts the programs that forward, without BTF and control groups.
fn switch_alone(loaded: &Result<BpfSteering, LoadError>) -> Check {
    match loaded {
        Ok(_) => check(SWITCH, GATEWAY, Standing::Ok, "the kernel accepts those that need neither BTF nor control groups", None),
        Err(error) => {
            let remedy = "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_NET_CLS_BPF (OpenWrt: kmod-sched-bpf)";
            check(SWITCH, GATEWAY, Standing::Missing, format!("[gateway] has no effect: {error}"), Some(remedy))
        }
    }
}

fn untested(name: &'static str) -> Check {
    check(
        name,
        GATEWAY,
        Standing::Unknown,
        "not tested: this needs CAP_NET_ADMIN",
        Some("run `sudo braid doctor --for gateway` to test it"),
    )
}

/// Whether the kernel accepts the programs that forward.
fn switch(survey: &Result<Vec<ProgramTrial>, LoadError>) -> Check {
    let trials = match survey {
        Ok(trials) => trials,
        Err(error) => return check(SWITCH, GATEWAY, Standing::Missing, error.to_string(), Some("see BPF programs, above")),
    };
    let ours = || trials.iter().filter(|trial| trial.needed == Needed::Forward);
    match ours().find_map(|trial| Some((trial, trial.outcome.as_ref().err()?))) {
        Some((trial, refusal)) => {
            let found = format!("[gateway] has no effect: the kernel refuses {}: {refusal}", trial.name);
            check(SWITCH, GATEWAY, Standing::Missing, found, Some("use a newer kernel; please report this error"))
        }
        None => check(SWITCH, GATEWAY, Standing::Ok, format!("the kernel accepts all {}", ours().count()), None),
    }
}

/// Lets `nft` and the kernel check the gateway's rules, without setting them.
fn rules(policy: &Policy, is_privileged: bool) -> Check {
    let name = |name: &str| vec![name.to_owned()];
    let lan = if policy.lan.is_empty() { name("lan0") } else { policy.lan.clone() };
    let closed = PerFamily { v4: true, v6: true };
    let plan = GatewayPlan { lan, links: name("link0"), ipv6: true, closed, ..GatewayPlan::default() };
    match if is_privileged { gateway::trial(&plan) } else { gateway::find_nft() } {
        Ok(()) if is_privileged => check(RULES, GATEWAY, Standing::Ok, "nft and the kernel accept the gateway's rules", None),
        Ok(()) => untested(RULES),
        Err(error @ GatewayError::NoNft) => {
            let remedy = "install nftables (Debian: apt install nftables; OpenWrt: opkg install nftables-json)";
            check(RULES, GATEWAY, Standing::Missing, error.to_string(), Some(remedy))
        }
        Err(error) => {
            let remedy = "load or build these modules; `nft list ruleset` shows whether nftables works at all";
            check(RULES, GATEWAY, Standing::Missing, error.to_string(), Some(remedy))
        }
    }
}

/// A firewall that drops or rejects forwarded packets, unless a rule accepts them.
#[derive(Debug, PartialEq, Eq)]
struct Closed {
    /// The chain or the program.
    place: String,
    /// Its rules, as text.
    rules: String,
    remedy: String,
}

fn firewalls(lan: &[String]) -> Check {
    let chains = match netfilter::base_chains() {
        Ok(chains) => chains,
        Err(error) => {
            let found = format!("cannot list the firewall's chains (nfnetlink): {error}");
            return check(
                FORWARDING,
                GATEWAY,
                Standing::Unknown,
                found,
                Some("compare `nft list chains`: a chain of hook forward with policy drop"),
            );
        }
    };
    let closed = chains.iter().filter_map(|chain| closed(chain, lan)).map(|(chain, remedy)| Closed {
        place: format!("chain {} of table {} {}", chain.name, chain.family, chain.table),
        rules: output("nft", &["list", "table", chain.family, &chain.table]),
        remedy,
    });
    let legacy =
        [("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")].into_iter().filter_map(|(file, program)| {
            read(root(), &format!("proc/self/net/{file}")).lines().any(|table| table == "filter").then_some(())?;
            let rules = output(program, &["-S"]);
            rules.lines().any(|line| line == "-P FORWARD DROP").then(|| Closed {
                place: format!("{program} -S FORWARD"),
                rules,
                remedy: accept_by(program, "FORWARD", lan),
            })
        });
    judge(closed.chain(legacy).collect(), lan)
}

/// The chain, and how to make it accept what the LAN devices send, if it drops or rejects forwarded packets.
fn closed<'a>(chain: &'a BaseChain, lan: &[String]) -> Option<(&'a BaseChain, String)> {
    if chain.hook != FORWARD || !matches!(chain.family, "ip" | "ip6" | "inet") || chain.table.starts_with("braid_gateway") {
        return None;
    }
    let device = first(lan);
    // Its chain ends with a rule that rejects.
    if chain.table == "firewalld" {
        return Some((chain, format!("firewall-cmd --permanent --zone=trusted --change-interface={device} && firewall-cmd --reload")));
    }
    if chain.policy != DROP {
        return None;
    }
    let program = if chain.family == "ip6" { "ip6tables" } else { "iptables" };
    let remedy = match chain.name.as_str() {
        "FORWARD" if has_chain(chain, "DOCKER-USER") => format!("Docker sets this policy: {}", accept_by(program, "DOCKER-USER", lan)),
        "FORWARD" if has_chain(chain, "ufw-user-forward") || has_chain(chain, "ufw6-user-forward") => {
            format!("ufw route allow in on {device}")
        }
        "FORWARD" => accept_by(program, "FORWARD", lan),
        _ if chain.table == "fw4" => {
            format!("in /etc/config/firewall, let the zone of {device} forward to the zone of the links, then run `fw4 reload`")
        }
        name => format!(
            "nft insert rule {family} {table} {name} iifname {device} accept; nft insert rule {family} {table} {name} oifname {device} ct state \
             established,related accept",
            family = chain.family,
            table = chain.table
        ),
    };
    Some((chain, remedy))
}

fn has_chain(chain: &BaseChain, name: &str) -> bool {
    netfilter::chain_names(chain).is_ok_and(|names| names.iter().any(|other| other == name))
}

fn first(lan: &[String]) -> &str {
    lan.first().map_or("LAN-DEVICE", String::as_str)
}

fn accept_by(program: &str, chain: &str, lan: &[String]) -> String {
    let device = first(lan);
    format!(
        "{program} -I {chain} -i {device} -j ACCEPT; {program} -I {chain} -o {device} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
    )
}

/// A closed firewall is no problem if it has a rule for every LAN device. The rules are not evaluated: only those that name the device count.
fn judge(closed: Vec<Closed>, lan: &[String]) -> Check {
    let accepts = |line: &str, device: &str| {
        let words: Vec<&str> = line.split(|c: char| c.is_whitespace() || matches!(c, '"' | ',')).collect();
        let is_in = words.iter().any(|word| matches!(*word, "iifname" | "iif" | "-i"));
        // The last two are of the zones of firewalld and OpenWrt.
        let verdicts = ["accept", "ACCEPT", "filter_FWD_trusted", "jump forward_"];
        is_in && words.contains(&device) && verdicts.iter().any(|verdict| line.contains(verdict))
    };
    let shut = |one: &&Closed| lan.is_empty() || !lan.iter().all(|device| one.rules.lines().any(|line| accepts(line, device)));
    let shut: Vec<&Closed> = closed.iter().filter(shut).collect();
    let Some(one) = shut.first() else {
        let found = match &closed[..] {
            [] => "no other firewall drops forwarded packets by policy".to_owned(),
            [one, ..] => format!("{} drops forwarded packets, but has a rule that accepts those of the LAN", one.place),
        };
        return check(FORWARDING, GATEWAY, Standing::Ok, found, None);
    };
    let places: Vec<&str> = shut.iter().map(|one| one.place.as_str()).collect();
    let found = format!("{} drops forwarded packets and has no rule that accepts those of the LAN", places.join("; "));
    check(
        FORWARDING,
        GATEWAY,
        Standing::Warning,
        found,
        Some(&format!("let them pass: {}; and keep such rules across a reboot", one.remedy)),
    )
}

/// Whether the LAN devices exist and have addresses.
fn devices(network: &NetworkSnapshot, lan: &[String]) -> Check {
    const NAME: &str = "LAN devices";
    if lan.is_empty() {
        let remedy = "`braid gateway setup --lan DEVICE` shows the section to add, and prepares addresses for the clients";
        return check(NAME, GATEWAY, Standing::Warning, "the configuration has no [gateway] section", Some(remedy));
    }
    let facts = |name: &String| network.interfaces.iter().find(|facts| facts.name == *name);
    let names = |wanted: &dyn Fn(&String) -> bool| lan.iter().filter(|name| wanted(name)).cloned().collect::<Vec<_>>().join(", ");
    let absent = names(&|name| facts(name).is_none());
    let bare = names(&|name| facts(name).is_some_and(|facts| facts.addresses.is_empty()));
    if !absent.is_empty() {
        let remedy = "plug it in, or compare its name in [gateway] with `ip link`";
        return check(NAME, GATEWAY, Standing::Warning, format!("there is no device {absent}"), Some(remedy));
    }
    if !bare.is_empty() {
        let remedy = "`braid gateway setup` sets one, and lets dnsmasq assign addresses to the clients";
        return check(NAME, GATEWAY, Standing::Warning, format!("{bare} has no address"), Some(remedy));
    }
    check(NAME, GATEWAY, Standing::Ok, lan.join(", "), None)
}

/// Whether a link is in a subnet of the LAN.
fn subnets(network: &NetworkSnapshot, policy: &Policy) -> Check {
    const NAME: &str = "LAN subnets";
    let links = network.interfaces.iter().filter(|facts: &&LinkFacts| policy.is_link(facts)).map(|facts| facts.index);
    let reasons: Vec<String> = tables::lan_conflicts(network, links, &policy.lan).into_values().collect();
    if reasons.is_empty() {
        return check(NAME, GATEWAY, Standing::Ok, "no link is in a subnet of the LAN", None);
    }
    let remedy = "give the LAN another subnet: `braid gateway setup --lan DEVICE --address CIDR`; until then Braid does not use the link";
    check(NAME, GATEWAY, Standing::Warning, reasons.join("; "), Some(remedy))
}

/// Whether a program runs that can assign addresses to clients.
fn addresses(processes: &[String]) -> Check {
    const NAME: &str = "addresses of clients";
    match processes.iter().find(|name| DHCP_SERVERS.contains(&name.as_str())) {
        Some(name) => check(NAME, GATEWAY, Standing::Ok, format!("{name} runs; it was not asked whether it serves the LAN"), None),
        None => {
            let remedy = "`braid gateway setup` prepares dnsmasq; clients with addresses set by hand need none";
            check(NAME, GATEWAY, Standing::Warning, "no DHCP server runs here", Some(remedy))
        }
    }
}

/// What a program of the system writes; empty if it fails.
fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).env_clear().env("PATH", SEARCH).stdin(Stdio::null()).stderr(Stdio::null()).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(family: &'static str, table: &str, name: &str, policy: u32) -> BaseChain {
        BaseChain { family, table: table.into(), name: name.into(), hook: FORWARD, policy }
    }

    #[test]
    fn firewalls_that_drop_are_found_with_their_remedy() {
        let lan = ["lan0".to_owned()];
        let remedy = |chain: &BaseChain| closed(chain, &lan).map(|(_, remedy)| remedy);
        assert_eq!(remedy(&chain("inet", "mine", "f", 1)), None);
        assert_eq!(remedy(&chain("inet", "braid_gateway", "forward", DROP)), None);
        assert_eq!(remedy(&BaseChain { hook: 1, ..chain("ip", "filter", "INPUT", DROP) }), None);
        assert!(remedy(&chain("inet", "mine", "f", DROP)).unwrap().starts_with("nft insert rule inet mine f iifname lan0 accept"));
        assert!(remedy(&chain("ip6", "filter", "FORWARD", DROP)).unwrap().starts_with("ip6tables -I FORWARD -i lan0"));
        assert!(remedy(&chain("inet", "fw4", "forward", DROP)).unwrap().contains("/etc/config/firewall"));
        assert!(remedy(&chain("inet", "firewalld", "filter_FORWARD", 1)).unwrap().contains("--change-interface=lan0"));
    }

    #[test]
    fn a_rule_for_every_lan_device_opens_a_firewall() {
        let lan = ["lan0", "lan1"].map(str::to_owned);
        let judged = |rules: &str, lan: &[String]| {
            judge(vec![Closed { place: "x".into(), rules: rules.into(), remedy: "open it".into() }], lan).standing
        };
        let one = "\t\tiifname \"lan0\" counter packets 0 bytes 0 accept\n";
        assert_eq!(judged(one, &lan), Standing::Warning);
        assert_eq!(judged(one, &lan[..1]), Standing::Ok);
        assert_eq!(judged("iifname { \"lan0\", \"lan1\" } accept", &lan), Standing::Ok);
        assert_eq!(judged("-A FORWARD -i lan0 -j ACCEPT\n-A FORWARD -i lan1 -j ACCEPT\n", &lan), Standing::Ok);
        assert_eq!(judged("iifname \"lan0\" jump forward_lan comment \"!fw4: lan\"", &lan[..1]), Standing::Ok);
        assert_eq!(judged("oifname \"lan0\" accept\niifname \"lan00\" accept\n", &lan[..1]), Standing::Warning);
        assert_eq!(judged(one, &[]), Standing::Warning);
        assert_eq!(judge(Vec::new(), &lan).standing, Standing::Ok);
    }

    #[test]
    fn a_missing_device_address_or_server_has_a_remedy() {
        let none = NetworkSnapshot::default();
        for found in [devices(&none, &[]), devices(&none, &["lan0".to_owned()]), addresses(&[])] {
            assert!(found.standing == Standing::Warning && found.remedy.is_some() && found.needed_by_gateway, "{found:?}");
        }
        assert_eq!(addresses(&["dnsmasq".to_owned()]).standing, Standing::Ok);
        assert_eq!(subnets(&none, &Policy::default()).standing, Standing::Ok);
    }

    #[test]
    fn all_checks_of_a_gateway_run_here() {
        let found = examine(&Policy::default(), None, &[]);
        assert!(found.len() >= 6 && found.iter().all(|check| check.standing != Standing::Missing || check.remedy.is_some()), "{found:?}");
    }
}
