//! Checks of what a gateway needs: the switch's programs, nftables, and a system that lets forwarded packets pass.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use braid_decide::gateway::GatewayPlan;
use braid_decide::policy::Policy;
use braid_decide::tables::{self, CARRIER_MARK};
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
/// Name of the check for firewalls that drop what clients send.
pub const FORWARDING: &str = "other firewalls";

/// Programs that assign addresses by DHCP.
const DHCP_SERVERS: [&str; 5] = ["dnsmasq", "kea-dhcp4", "dhcpd", "odhcpd", "udhcpd"];
/// Numbers of `hook input` (`NF_INET_LOCAL_IN`), `hook forward` (`NF_INET_FORWARD`) and of `policy drop` (`NF_DROP`).
const INPUT: u32 = 1;
const FORWARD: u32 = 2;
const DROP: u32 = 0;

/// Stands for the name of a LAN device in a remedy.
const DEVICE: &str = "LAN-DEVICE";

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
    checks.push(if survey.is_some() { firewalls(policy) } else { untested(FORWARDING) });
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
    let plan = GatewayPlan { lan, links: name("link0"), bridges: ["br0".to_owned()].into(), ipv6: true, closed, ..GatewayPlan::default() };
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

/// A firewall that drops or rejects packets of clients, unless a rule accepts them.
#[derive(Debug, PartialEq, Eq)]
struct Closed {
    /// Which packets: forwarded ones, or bonded flows, which the daemon receives.
    hook: u32,
    /// The chain or the program.
    place: String,
    /// Its rules, as text.
    rules: String,
    /// What to do, with [`DEVICE`] for the name of a LAN device.
    remedy: String,
}

impl Closed {
    fn packets(&self) -> &'static str {
        if self.hook == INPUT { "incoming packets, and with them bonded flows of clients," } else { "forwarded packets" }
    }
}

fn firewalls(policy: &Policy) -> Check {
    let lan = &policy.lan;
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
    let hooks: &[u32] = if bonds(policy) { &[FORWARD, INPUT] } else { &[FORWARD] };
    let both = hooks.iter().flat_map(|hook| chains.iter().map(move |chain| (*hook, chain)));
    let closed =
        both.filter_map(|(hook, chain)| closed(chain, hook).map(|remedy| (hook, chain, remedy))).map(|(hook, chain, remedy)| Closed {
            hook,
            place: format!("chain {} of table {} {}", chain.name, chain.family, chain.table),
            rules: output("nft", &["list", "table", chain.family, &chain.table]),
            remedy,
        });
    let legacy =
        [("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")].into_iter().flat_map(|(file, program)| {
            let is_used = read(root(), &format!("proc/self/net/{file}")).lines().any(|table| table == "filter");
            let rules = if is_used { output(program, &["-S"]) } else { String::new() };
            let is_closed = |hook: &u32| rules.lines().any(|line| line == format!("-P {} DROP", built_in(*hook)));
            let shut = |hook: u32| Closed {
                hook,
                place: format!("{program} -S {}", built_in(hook)),
                rules: rules.clone(),
                remedy: if hook == INPUT { accept_mark(program) } else { accept_by(program, "FORWARD") },
            };
            hooks.iter().copied().filter(is_closed).map(shut).collect::<Vec<_>>()
        });
    judge(closed.chain(legacy).collect(), lan)
}

/// Whether flows of clients may be bonded. Their packets are not forwarded: the daemon receives them.
fn bonds(policy: &Policy) -> bool {
    policy.bonds_all || policy.apps.iter().any(|rule| rule.carry.needs_peer())
}

/// iptables' name for the chain of a hook.
fn built_in(hook: u32) -> &'static str {
    if hook == INPUT { "INPUT" } else { "FORWARD" }
}

/// How to make the chain accept what the LAN devices send, if it drops or rejects it at this hook.
fn closed(chain: &BaseChain, hook: u32) -> Option<String> {
    if chain.hook != hook || !matches!(chain.family, "ip" | "ip6" | "inet") || chain.table.starts_with("braid_gateway") {
        return None;
    }
    // Its chains end with a rule that rejects. The remedy for forwarded packets lets bonded flows in, too.
    if chain.table == "firewalld" && hook == FORWARD {
        return Some(format!("firewall-cmd --permanent --zone=trusted --change-interface={DEVICE} && firewall-cmd --reload"));
    }
    if chain.policy != DROP {
        return None;
    }
    let program = if chain.family == "ip6" { "ip6tables" } else { "iptables" };
    let has = |name: &str| has_chain(chain, name);
    Some(match chain.name.as_str() {
        "INPUT" if has("ufw-before-input") => ufw_accept_mark("ufw-before-input", "before.rules"),
        "INPUT" if has("ufw6-before-input") => ufw_accept_mark("ufw6-before-input", "before6.rules"),
        "INPUT" => accept_mark(program),
        "FORWARD" if has("DOCKER-USER") => format!("Docker sets this policy: {}", accept_by(program, "DOCKER-USER")),
        "FORWARD" if has("ufw-user-forward") || has("ufw6-user-forward") => {
            format!("ufw route allow in on {DEVICE}")
        }
        "FORWARD" => accept_by(program, "FORWARD"),
        _ if chain.table == "fw4" && hook == INPUT => {
            format!("in /etc/config/firewall, let the zone of {DEVICE} accept input, then run `fw4 reload`")
        }
        _ if chain.table == "fw4" => {
            format!("in /etc/config/firewall, let the zone of {DEVICE} forward to the zone of the links, then run `fw4 reload`")
        }
        name if hook == INPUT => {
            format!("nft insert rule {} {} {name} meta mark {CARRIER_MARK:#x} accept", chain.family, chain.table)
        }
        name => format!(
            "nft insert rule {family} {table} {name} iifname {DEVICE} accept; nft insert rule {family} {table} {name} oifname {DEVICE} ct state \
             established,related accept",
            family = chain.family,
            table = chain.table
        ),
    })
}

fn has_chain(chain: &BaseChain, name: &str) -> bool {
    netfilter::chain_names(chain).is_ok_and(|names| names.iter().any(|other| other == name))
}

fn accept_by(program: &str, chain: &str) -> String {
    format!(
        "{program} -I {chain} -i {DEVICE} -j ACCEPT; {program} -I {chain} -o {DEVICE} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
    )
}

fn accept_mark(program: &str) -> String {
    format!("{program} -I INPUT -m mark --mark {CARRIER_MARK:#x} -j ACCEPT")
}

/// ufw keeps no rules by mark but those in its files.
fn ufw_accept_mark(chain: &str, file: &str) -> String {
    format!(
        "add `-A {chain} -m mark --mark {CARRIER_MARK:#x} -j ACCEPT` to /etc/ufw/{file} after the line `# End required lines`, then run `ufw reload`"
    )
}

/// The lines of the chains that may serve this hook, in the form of nft or iptables: chains named after the other hook are left out.
fn lines_of(rules: &str, hook: u32) -> impl Iterator<Item = &str> {
    let other = if hook == INPUT { "forward" } else { "input" };
    let mut is_other = false;
    rules.lines().filter(move |line| {
        let mut words = line.split_whitespace();
        if let (Some("chain" | "-A"), Some(name)) = (words.next(), words.next()) {
            is_other = name.to_ascii_lowercase().contains(other);
        }
        !is_other
    })
}

/// A closed firewall is no problem if it has a rule for every LAN device, or for the mark of bonded flows. The rules are not evaluated: only those that
/// name the device or the mark count.
fn judge(closed: Vec<Closed>, lan: &[String]) -> Check {
    let accepts = |line: &str, device: &str| {
        let words: Vec<&str> = line.split(|c: char| c.is_whitespace() || matches!(c, '"' | ',')).collect();
        let is_in = words.iter().any(|word| matches!(*word, "iifname" | "iif" | "-i"));
        // The last two are of the zones of firewalld and OpenWrt.
        let verdicts = ["accept", "ACCEPT", "filter_FWD_trusted", "jump forward_"];
        is_in && words.contains(&device) && verdicts.iter().any(|verdict| line.contains(verdict))
    };
    let mark = format!("{CARRIER_MARK:#x}");
    let takes = |one: &Closed, device: &str| match one.hook {
        // A rule for a single port accepts not all.
        INPUT => lines_of(&one.rules, INPUT).any(|line| !line.contains("dport") && accepts(line, device)),
        hook => lines_of(&one.rules, hook).any(|line| accepts(line, device)),
    };
    let takes_mark = |one: &Closed| {
        one.hook == INPUT && lines_of(&one.rules, INPUT).any(|line| line.contains(&mark) && line.to_ascii_lowercase().contains("accept"))
    };
    // The devices whose packets it drops; `None`: it lets those of all pass.
    let refused = |one: &Closed| -> Option<Vec<&str>> {
        let refused: Vec<&str> = lan.iter().map(String::as_str).filter(|device| !takes(one, device)).collect();
        (!takes_mark(one) && (lan.is_empty() || !refused.is_empty())).then_some(refused)
    };
    let shut: Vec<(&Closed, Vec<&str>)> = closed.iter().filter_map(|one| Some((one, refused(one)?))).collect();
    let Some((one, devices)) = shut.first() else {
        let found = match &closed[..] {
            [] => "no other firewall drops packets of clients by policy".to_owned(),
            [one, ..] => format!("{} drops {}, but has a rule that accepts those of the LAN", one.place, one.packets()),
        };
        return check(FORWARDING, GATEWAY, Standing::Ok, found, None);
    };
    let alike = shut.iter().filter(|(other, refused)| other.hook == one.hook && refused == devices);
    let places: Vec<&str> = alike.map(|(one, _)| one.place.as_str()).collect();
    let whose = if devices.is_empty() { "the LAN".to_owned() } else { devices.join(", ") };
    let found = format!("{} drops {} and has no rule that accepts those of {whose}", places.join("; "), one.packets());
    let remedy = one.remedy.replace(DEVICE, devices.first().unwrap_or(&DEVICE));
    check(FORWARDING, GATEWAY, Standing::Warning, found, Some(&format!("let them pass: {remedy}; and keep such rules across a reboot")))
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
        let remedy = |chain: &BaseChain| closed(chain, FORWARD);
        assert_eq!(remedy(&chain("inet", "mine", "f", 1)), None);
        assert_eq!(remedy(&chain("inet", "braid_gateway", "forward", DROP)), None);
        assert_eq!(remedy(&BaseChain { hook: 1, ..chain("ip", "filter", "INPUT", DROP) }), None);
        assert!(remedy(&chain("inet", "mine", "f", DROP)).unwrap().starts_with("nft insert rule inet mine f iifname LAN-DEVICE accept"));
        assert!(remedy(&chain("ip6", "filter", "FORWARD", DROP)).unwrap().starts_with("ip6tables -I FORWARD -i LAN-DEVICE"));
        assert!(remedy(&chain("inet", "fw4", "forward", DROP)).unwrap().contains("/etc/config/firewall"));
        assert!(remedy(&chain("inet", "firewalld", "filter_FORWARD", 1)).unwrap().contains("--change-interface=LAN-DEVICE"));
        let incoming = |chain: BaseChain| closed(&BaseChain { hook: INPUT, ..chain }, INPUT);
        assert_eq!(incoming(chain("inet", "firewalld", "filter_INPUT", 1)), None);
        assert_eq!(incoming(chain("ip6", "filter", "INPUT", DROP)).unwrap(), "ip6tables -I INPUT -m mark --mark 0xb1d000fe -j ACCEPT");
        assert_eq!(incoming(chain("inet", "mine", "in", DROP)).unwrap(), "nft insert rule inet mine in meta mark 0xb1d000fe accept");
        assert_eq!(closed(&chain("inet", "mine", "f", DROP), INPUT), None);
    }

    #[test]
    fn a_rule_for_every_lan_device_opens_a_firewall() {
        let lan = ["lan0", "lan1"].map(str::to_owned);
        let judged = |rules: &str, lan: &[String]| {
            judge(vec![Closed { hook: FORWARD, place: "x".into(), rules: rules.into(), remedy: "open it".into() }], lan).standing
        };
        let one = "\t\tiifname \"lan0\" counter packets 0 bytes 0 accept\n";
        assert_eq!(judged(one, &lan), Standing::Warning);
        assert_eq!(judged(one, &lan[..1]), Standing::Ok);
        assert_eq!(judged("iifname { \"lan0\", \"lan1\" } accept", &lan), Standing::Ok);
        assert_eq!(judged("-A FORWARD -i lan0 -j ACCEPT\n-A FORWARD -i lan1 -j ACCEPT\n", &lan), Standing::Ok);
        assert_eq!(judged("iifname \"lan0\" jump forward_lan comment \"!fw4: lan\"", &lan[..1]), Standing::Ok);
        assert_eq!(judged("oifname \"lan0\" accept\niifname \"lan00\" accept\n", &lan[..1]), Standing::Warning);
        assert_eq!(judged(one, &[]), Standing::Warning);
        assert_eq!(judged("-A ufw-user-input -i lan0 -p udp -m udp --dport 53 -j ACCEPT", &lan[..1]), Standing::Warning);
        assert_eq!(judged("\tchain ufw-user-input {\n\t\tiifname \"lan0\" accept\n\t}\n", &lan[..1]), Standing::Warning);
        assert_eq!(judge(Vec::new(), &lan).standing, Standing::Ok);
    }

    #[test]
    fn regression_the_remedy_is_for_the_device_that_is_refused() {
        let lan = ["docker0", "lan1"].map(str::to_owned);
        let rules = "\t\tiifname \"docker0\" oifname != \"docker0\" counter packets 0 bytes 0 accept\n".to_owned();
        let found = judge(vec![Closed { hook: FORWARD, place: "x".into(), rules, remedy: accept_by("iptables", "DOCKER-USER") }], &lan);
        let remedy = found.remedy.unwrap();
        assert!(found.found.ends_with("those of lan1"), "{}", found.found);
        assert!(remedy.contains("-i lan1 ") && !remedy.contains("docker0"), "{remedy}");
    }

    #[test]
    fn a_rule_for_the_mark_or_the_lan_lets_bonded_flows_in() {
        let lan = ["lan0".to_owned()];
        let judged = |rules: &str| {
            let found = judge(vec![Closed { hook: INPUT, place: "x".into(), rules: rules.into(), remedy: "let them in".into() }], &lan);
            assert!(found.standing == Standing::Ok || found.found.contains("bonded"), "{found:?}");
            found.standing
        };
        assert_eq!(judged(""), Standing::Warning);
        assert_eq!(judged("\tchain ufw-before-input {\n\t\tmeta mark 0xb1d000fe counter packets 0 bytes 0 accept\n\t}\n"), Standing::Ok);
        assert_eq!(judged("-A INPUT -m mark --mark 0xb1d000fe -j ACCEPT"), Standing::Ok);
        assert_eq!(judged("-A INPUT -m mark --mark 0xb1d000fe -j DROP"), Standing::Warning);
        assert_eq!(judged("-A ufw-user-input -i lan0 -j ACCEPT"), Standing::Ok);
        assert_eq!(judged("-A ufw-user-input -i lan0 -p udp -m udp --dport 53 -j ACCEPT"), Standing::Warning);
        assert_eq!(judged("-A ufw-user-forward -i lan0 -j ACCEPT"), Standing::Warning);
    }

    #[test]
    fn only_a_policy_that_bonds_needs_incoming_packets() {
        assert!(!bonds(&Policy::default()) && bonds(&Policy { bonds_all: true, ..Policy::default() }));
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
