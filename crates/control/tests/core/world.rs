//! A core with a fake backend and a simulated clock.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use braid_control::config::Config;
use braid_control::core::{Core, Kept, MoveOrder, Names, Question};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId, Steering};
use braid_decide::health::Outcome;
use braid_decide::policy::{LinkMatcher, LinkRule, LinkSelector, Pattern, Policy, Scheduler};
use braid_decide::tables::TablePlan;
use braid_decide::tradeoff::Supply;
use braid_model::{Application, ByteCount, Family, FlowId, LinkFacts, LinkIndex, Mac, Power, Time};

pub(crate) use braid_control::fake::network::{facts, network};

pub(crate) const RTT: Duration = Duration::from_millis(20);
pub(crate) const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 10));
/// 21 November 2026.
pub(crate) const UNIX: i64 = 1_795_219_200;

pub(crate) struct FakeNames(pub(crate) BTreeMap<String, u64>);

impl Names for FakeNames {
    fn executable(&mut self, path: &Path) -> Option<ExeId> {
        self.0.get(path.to_str()?).map(|inode| ExeId { device: 1, inode: *inode })
    }
    fn cgroup(&mut self, _path: &str) -> Option<(u64, u32)> {
        None
    }
    fn application(&mut self, app: &AppId, process: u32, _cgroup: u64) -> (Application, Option<String>) {
        // Process 0 has ended.
        (Application { exe: (process > 0).then(|| format!("/usr/bin/{}", app.name).into()), name: app.name.clone() }, None)
    }
}

/// A core with two links and a simulated clock.
pub(crate) struct World {
    pub(crate) core: Core<FakeSteering>,
    pub(crate) now: Time,
    pub(crate) devices: Vec<LinkFacts>,
    /// Whether each link answers probes.
    pub(crate) answering: BTreeMap<LinkIndex, bool>,
    /// Pending probes: when they end, and how.
    pub(crate) probes: Vec<(Time, LinkIndex, Family, Outcome)>,
    pub(crate) beat: u64,
    /// Hosts that the core asked whether they run Braid.
    pub(crate) questions: Vec<Question>,
    /// Held connections that go on.
    pub(crate) released: Vec<FlowId>,
    /// Flows that the core ended because their link is dead.
    pub(crate) stuck: Vec<FlowId>,
    /// Requests to other hosts to move flows.
    pub(crate) moves: Vec<MoveOrder>,
    /// The last routing rules and routes.
    pub(crate) plan: Option<TablePlan>,
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        Self::with(FakeSteering::default(), config)
    }

    pub(crate) fn with(steering: FakeSteering, config: Config) -> Self {
        let names = FakeNames([("/usr/bin/curl".to_owned(), 7)].into());
        let now = Time::from_millis(1000);
        let devices = vec![facts(1, "wlan0"), facts(2, "lte0")];
        let mut core = Core::new(steering, Box::new(names), config, now).unwrap();
        core.set_owner_filter(now, None).unwrap();
        let mut world = Self {
            core,
            now,
            devices,
            answering: BTreeMap::new(),
            probes: Vec::new(),
            beat: 0,
            questions: Vec::new(),
            released: Vec::new(),
            stuck: Vec::new(),
            moves: Vec::new(),
            plan: None,
        };
        world.set_network();
        world
    }

    /// The same with links that have Ethernet headers.
    pub(crate) fn of_ethernet(steering: FakeSteering, config: Config) -> Self {
        let mut world = Self::with(steering, config);
        for (number, device) in (1..).zip(&mut world.devices) {
            device.mac = Some(Mac([2, 0, 0, 0, 0, number]));
        }
        world.set_network();
        world
    }

    pub(crate) fn set_network(&mut self) {
        let network = network(&self.devices);
        self.core.on_network(self.now, network).unwrap();
    }

    /// Advances the time as the daemon's event loop does.
    pub(crate) fn run(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end {
            self.now = self.now + Duration::from_millis(10);
            self.beat += 1;
            let done: Vec<_> = self.probes.iter().filter(|(at, ..)| *at <= self.now).copied().collect();
            self.probes.retain(|(at, ..)| *at > self.now);
            for (_, link, family, outcome) in done {
                self.core.on_probe(self.now, link, family, outcome).unwrap();
            }
            let events = self.core.steering().events(100);
            self.core.on_events(self.now, events).unwrap();
            if self.beat.is_multiple_of(25) {
                self.core.poll(self.now).unwrap();
            }
            self.core.tick(self.now).unwrap();
            let mut actions = self.core.take_actions();
            if actions.gateway.is_some() {
                self.core.on_set(self.now, Kept::Gateway);
            }
            self.questions.extend(actions.questions);
            self.released.extend(actions.released);
            self.moves.extend(actions.moves);
            self.stuck.extend(actions.stuck.iter().map(|stuck| stuck.id));
            self.plan = actions.plan.take().or(self.plan.take());
            for plan in actions.probes {
                let alive = self.answering.get(&plan.link).copied().unwrap_or(true);
                let (after, outcome) = if alive { (RTT, Outcome::Alive { rtt: RTT }) } else { (plan.timeout, Outcome::Silent) };
                self.probes.push((self.now + after, plan.link, plan.family, outcome));
            }
        }
    }

    pub(crate) fn connect(&mut self, name: &str, inode: u64) -> Steered {
        let app = AppId { exe: ExeId { device: 1, inode }, name: name.to_owned() };
        let now = self.now;
        self.core.steering().connect(now, &app, 1000, (SERVER, 443))
    }

    /// Names of the links that ten new flows of one program use.
    pub(crate) fn used(&mut self) -> Vec<String> {
        let mut slots: Vec<_> = (0..10)
            .filter_map(|_| match self.connect("test", 99) {
                Steered::To(slot, id) => {
                    let now = self.now;
                    self.core.steering().close(now, id);
                    Some(slot)
                }
                _ => None,
            })
            .collect();
        slots.sort_unstable();
        slots.dedup();
        let params = self.core.steering().params().unwrap().clone();
        slots.into_iter().filter_map(|slot| Some(params.links[slot].as_ref()?.name.clone())).collect()
    }

    pub(crate) fn state(&mut self, name: &str) -> String {
        let now = self.now;
        self.core.links(now).into_iter().find(|link| link.name == name).map_or("absent".to_owned(), |link| link.state.to_string())
    }
}

pub(crate) fn config(scheduler: Scheduler) -> Config {
    Config { policy: Policy { scheduler, ..Policy::default() }, ..Config::default() }
}

pub(crate) fn link_rule(name: &str) -> LinkRule {
    LinkRule { matcher: LinkMatcher { name: Some(Pattern::new(name)), ..LinkMatcher::default() }, reset_day: 1, ..LinkRule::default() }
}

pub(crate) fn only(names: &[&str]) -> Option<Vec<LinkSelector>> {
    Some(names.iter().map(|name| LinkSelector::Name(Pattern::new(*name))).collect())
}

impl World {
    /// Number of flows per slot for ten simultaneous flows of 1 MB.
    pub(crate) fn ten(&mut self) -> Vec<usize> {
        let flows: Vec<_> = (0..10).map(|_| self.connect("test", 99)).collect();
        let mut counts = vec![0; 2];
        for flow in flows {
            let Steered::To(slot, id) = flow else { panic!("{flow:?}") };
            counts[slot] += 1;
            let now = self.now;
            self.core.steering().transfer(id, ByteCount::new(1_000_000), ByteCount::ZERO);
            self.core.steering().close(now, id);
        }
        counts
    }

    pub(crate) fn supply(&mut self, level: f64, plugged: bool, watts: Option<f64>) {
        let now = self.now;
        self.core.on_supply(now, Some(Supply { level, plugged, power: watts.map(Power::from_watts) })).unwrap();
    }
}

impl World {
    /// Delivers answers to probes with this RTT.
    pub(crate) fn round_trip(&mut self, link: u32, milliseconds: u64) {
        let outcome = Outcome::Alive { rtt: Duration::from_millis(milliseconds) };
        for _ in 0..50 {
            let now = self.now;
            self.core.on_probe(now, LinkIndex(link), Family::V4, outcome).unwrap();
        }
        let now = self.now;
        self.core.tick(now).unwrap();
    }
}
