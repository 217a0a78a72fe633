//! The policy in the kernel's terms: executables as inodes, control groups as ids, links as slots.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use braid_decide::policy::{AppMatcher, AppRule, Carry, LinkSelector, Policy};
use braid_model::{Application, LinkFacts};

use super::clients::Clients;
use crate::steering::{AppId, ExeId, PeerDirect, RedirectPolicy, SteerMatch, SteerRule};

/// Looks up programs and control groups in the running system.
pub trait Names {
    /// Identity of the executable that the kernel runs for `path` now.
    fn executable(&mut self, path: &Path) -> Option<ExeId>;
    /// Id and depth of a control group.
    fn cgroup(&mut self, path: &str) -> Option<(u64, u32)>;
    /// The program of a new application, given one of its processes, and the control group of that process.
    fn application(&mut self, app: &AppId, process: u32, cgroup: u64) -> (Application, Option<String>);
}

/// Maximum number of versions of a program that are recognised while they still run.
const MAX_VERSIONS: usize = 4;

/// Inodes of the policy's executables. An upgrade creates a new inode, while processes of the old one may still run.
#[derive(Debug, Default)]
pub(super) struct Executables {
    versions: BTreeMap<PathBuf, Vec<ExeId>>,
}

impl Executables {
    /// Rereads every executable that the policy names. Returns whether anything changed.
    pub(super) fn refresh(&mut self, policy: &Policy, names: &mut dyn Names) -> bool {
        let before = self.versions.clone();
        let running = policy.conditions().filter_map(|when| when.running.as_deref()).filter(|program| program.contains('/'));
        let paths: BTreeSet<PathBuf> =
            matchers(policy).into_iter().filter_map(|matcher| matcher.exe).chain(running.map(PathBuf::from)).collect();
        self.versions.retain(|path, _| paths.contains(path));
        for path in paths {
            let current = names.executable(&path);
            let versions = self.versions.entry(path).or_default();
            if let Some(current) = current {
                versions.retain(|known| *known != current);
                versions.insert(0, current);
                versions.truncate(MAX_VERSIONS);
            }
        }
        before != self.versions
    }

    /// Paths of the executables.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.versions.keys()
    }

    /// Every known version of the executable at `path`; none if the policy does not name it.
    pub(super) fn of(&self, path: &Path) -> Vec<ExeId> {
        self.versions.get(path).cloned().unwrap_or_default()
    }
}

/// All matchers in the order in which they are tried: exclusions, then `[[app]]` entries.
fn matchers(policy: &Policy) -> Vec<AppMatcher> {
    policy.exclude.matchers().into_iter().chain(policy.apps.iter().map(|rule| rule.matcher.clone())).collect()
}

/// Number of exclusions, which come first in [`steer_rules`].
pub(super) fn exclusions(policy: &Policy) -> usize {
    policy.exclude.matchers().len()
}

/// Whether a rule's connections are redirected to the daemon: only while a peer that may forward them is reachable, or if nobody else may.
fn redirect_policy(policy: &Policy, rule: &AppRule, peers: &BTreeSet<String>) -> Option<RedirectPolicy> {
    if policy.confines(Some(rule)) {
        return Some(RedirectPolicy::Redirect);
    }
    let reached = rule.relay.as_ref().map_or(!peers.is_empty(), |relay| peers.contains(relay));
    match rule.carry {
        Carry::Auto => None,
        Carry::Bond | Carry::Duplicate if reached => Some(RedirectPolicy::Redirect),
        // The destination may run Braid itself.
        Carry::Bond | Carry::Duplicate if rule.relay.is_none() => None,
        Carry::Direct | Carry::Bond | Carry::Duplicate => Some(RedirectPolicy::Direct),
    }
}

/// Which of a rule's flows are bonded directly to a host that runs Braid. If the rule names a relay, that relay is the only peer.
pub(super) fn peer_direct(policy: &Policy, rule: Option<&AppRule>) -> PeerDirect {
    if policy.confines(rule) {
        return PeerDirect::Nothing;
    }
    let Some(rule) = rule else { return PeerDirect::Usual };
    match rule.carry {
        _ if rule.relay.is_some() => PeerDirect::Nothing,
        Carry::Direct => PeerDirect::Nothing,
        Carry::Auto => PeerDirect::Usual,
        Carry::Bond | Carry::Duplicate => PeerDirect::All,
    }
}

/// Rules for the kernel. `peers` are the reachable ones, `clients` those of the gateway.
pub(super) fn steer_rules(
    policy: &Policy,
    links: &[(usize, &LinkFacts)],
    executables: &Executables,
    (peers, clients): (&BTreeSet<String>, &Clients),
    names: &mut dyn Names,
) -> Vec<SteerRule> {
    let mut condition = |matcher: &AppMatcher| {
        let client = matcher.client.as_ref().map_or(Some((None, None)), |client| clients.find(client));
        // Users of the proxy never pass the kernel's rules, and an entry whose condition does not hold has an empty matcher: an empty list matches no
        // executable.
        let never = client.is_none() || matcher.is_empty();
        let (client, mac) = client.unwrap_or_default();
        SteerMatch {
            exe: if never { Some(Vec::new()) } else { matcher.exe.as_ref().map(|path| executables.of(path)) },
            name: matcher.name.clone(),
            port: matcher.port,
            protocol: matcher.protocol,
            destination: matcher.destination,
            cgroup: matcher.cgroup.as_ref().map(|path| names.cgroup(path)),
            user: matcher.user,
            class: matcher.class,
            client,
            mac,
        }
    };
    let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, links.iter().copied());
    let excluded = policy.exclude.matchers();
    let mut rules: Vec<_> =
        excluded.iter().map(|matcher| SteerRule { matching: condition(matcher), exclude: true, ..Default::default() }).collect();
    rules.extend(policy.apps.iter().map(|rule: &AppRule| SteerRule {
        matching: condition(&rule.matcher),
        exclude: false,
        links: rule.links.as_deref().map(mask),
        prefer: (!rule.prefer.is_empty()).then(|| mask(&rule.prefer)),
        class: rule.class,
        affinity: rule.affinity,
        redirect: redirect_policy(policy, rule, peers),
        peer_direct: peer_direct(policy, Some(rule)),
        no_packets: false,
        confined: policy.confines(Some(rule)),
    }));
    rules
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::policy::{Exclusions, Fallback, Pattern};
    use braid_model::{LinkIndex, LinkKind};

    #[derive(Default)]
    struct FakeNames {
        files: BTreeMap<PathBuf, u64>,
    }

    impl Names for FakeNames {
        fn executable(&mut self, path: &Path) -> Option<ExeId> {
            self.files.get(path).map(|inode| ExeId { device: 1, inode: *inode })
        }
        fn cgroup(&mut self, path: &str) -> Option<(u64, u32)> {
            (path == "/known").then_some((77, 1))
        }
        fn application(&mut self, app: &AppId, _process: u32, _cgroup: u64) -> (Application, Option<String>) {
            (Application { exe: None, name: app.name.clone() }, None)
        }
    }

    fn device(name: &str) -> LinkFacts {
        LinkFacts::new(LinkIndex(1), name, LinkKind::Wired)
    }

    fn policy() -> Policy {
        let exe = |path: &str| AppMatcher { exe: Some(path.into()), ..AppMatcher::default() };
        Policy {
            exclude: Exclusions { users: vec![7], ..Exclusions::default() },
            apps: vec![
                AppRule { matcher: exe("/bin/a"), links: Some(vec![LinkSelector::Name(Pattern::new("wlan0"))]), ..AppRule::default() },
                AppRule { matcher: AppMatcher { cgroup: Some("/gone".into()), ..AppMatcher::default() }, ..AppRule::default() },
            ],
            ..Policy::default()
        }
    }

    #[test]
    fn exclusions_come_first_and_links_become_slots() {
        let (wlan, lte) = (device("wlan0"), device("lte0"));
        let mut names = FakeNames { files: [("/bin/a".into(), 5)].into() };
        let mut executables = Executables::default();
        assert!(executables.refresh(&policy(), &mut names));
        let rules = steer_rules(&policy(), &[(3, &wlan), (4, &lte)], &executables, (&BTreeSet::new(), &Clients::default()), &mut names);
        assert_eq!(exclusions(&policy()), 1);
        assert!(rules[0].exclude && rules[0].matching.user == Some(7));
        assert_eq!(rules[1].links, Some(braid_model::LinkSet(8)));
        assert_eq!(rules[1].matching.exe, Some(vec![ExeId { device: 1, inode: 5 }]));
        assert_eq!(rules[2].matching.cgroup, Some(None), "a missing group matches nothing");
    }

    #[test]
    fn rules_for_a_peer_go_direct_while_it_is_unreachable() {
        let peers = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let rule = |carry, relay: Option<&str>| AppRule { carry, relay: relay.map(str::to_owned), ..AppRule::default() };
        for (rule, peers, expected) in [
            (rule(Carry::Auto, None), peers(&["home"]), None),
            (rule(Carry::Direct, None), peers(&["home"]), Some(RedirectPolicy::Direct)),
            (rule(Carry::Bond, None), peers(&[]), None),
            (rule(Carry::Bond, Some("home")), peers(&[]), Some(RedirectPolicy::Direct)),
            (rule(Carry::Bond, None), peers(&["home"]), Some(RedirectPolicy::Redirect)),
            (rule(Carry::Duplicate, Some("home")), peers(&["work"]), Some(RedirectPolicy::Direct)),
            (rule(Carry::Duplicate, Some("home")), peers(&["home", "work"]), Some(RedirectPolicy::Redirect)),
        ] {
            assert_eq!(redirect_policy(&Policy::default(), &rule, &peers), expected, "{rule:?} {peers:?}");
        }
    }

    #[test]
    fn what_may_leave_through_a_relay_only_is_always_redirected() {
        let confined = AppRule { carry: Carry::Bond, relay: Some("home".into()), fallback: Some(Fallback::None), ..AppRule::default() };
        for peers in [BTreeSet::new(), ["home".to_owned()].into()] {
            assert_eq!(redirect_policy(&Policy::default(), &confined, &peers), Some(RedirectPolicy::Redirect));
        }
        assert_eq!(peer_direct(&Policy::default(), Some(&AppRule { relay: None, ..confined })), PeerDirect::Nothing);
        let all = Policy { bonds_all: true, fallback: Fallback::None, ..Policy::default() };
        assert_eq!(redirect_policy(&all, &AppRule::default(), &BTreeSet::new()), Some(RedirectPolicy::Redirect));
        assert_eq!([peer_direct(&all, None), peer_direct(&Policy::default(), None)], [PeerDirect::Nothing, PeerDirect::Usual]);
    }

    #[test]
    fn an_upgraded_program_is_recognised_in_both_versions() {
        let mut names = FakeNames { files: [("/bin/a".into(), 5)].into() };
        let mut executables = Executables::default();
        executables.refresh(&policy(), &mut names);
        names.files.insert("/bin/a".into(), 6);
        assert!(executables.refresh(&policy(), &mut names));
        assert!(!executables.refresh(&policy(), &mut names));
        assert_eq!(executables.of(Path::new("/bin/a")).iter().map(|exe| exe.inode).collect::<Vec<_>>(), [6, 5]);
    }
}
