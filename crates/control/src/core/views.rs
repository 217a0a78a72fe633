//! API views of the daemon's state.

use braid_api::{AppEntry, Battery, Counters, ExcludeEntry, LinkEntry, LinkMeasured, LinkStatus, PolicyView, Status, VirtualInterfaceView};
use braid_decide::capacity::Estimate;
use braid_decide::policy::{AppMatcher, AppRule, BondScheduler, LinkMatcher, ProbeMode, Scheduler, When};
use braid_model::{Affinity, ByteCount, Direction, Family, Joules, NetworkSnapshot, PerFamily, Role, Time};

use super::energy::LinkEnergy;
use super::{Core, living};
use crate::history::{Power, Pulse};
use crate::links::Link;
use crate::steering::{FlowRow, Steering};

impl<S: Steering> Core<S> {
    /// `GET /v1/status`.
    pub fn status(&mut self, now: Time) -> Status {
        let counters = self.steering.counters().ok();
        let count = |get: fn(&crate::steering::SteeringCounters) -> u64| counters.as_ref().map(get);
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            scheduler: self.config.policy.scheduler.to_string(),
            links: self.links(now),
            flows: self.living_count() as u64,
            peers: Vec::new(),
            interception: Some(if self.steering.steers_host() { "ebpf" } else { "gateway" }.to_owned()),
            uptime_ms: Some(now.since(self.started).as_millis() as u64),
            config: None,
            counters: Counters {
                steered: count(|counters| counters.steered),
                left: count(|counters| counters.left_alone),
                denied: count(|counters| counters.denied),
                failed: count(|counters| counters.failed),
                untracked: count(|counters| counters.untracked),
                lost_events: count(|counters| counters.lost_events),
                redirected: count(|counters| counters.redirected),
                not_redirected: count(|counters| counters.not_redirected),
                moved: count(|counters| counters.moved),
                forwarded: count(|counters| counters.forwarded),
                overflowed: count(|counters| counters.overflowed),
                fast_packets: count(|counters| counters.fast_packets),
            },
            battery: self.supply.map(|supply| Battery {
                level: supply.level,
                plugged: supply.plugged,
                power_w: supply.power.map(|power| power.watts()),
            }),
            utility: self.utility_now(),
            saving_power: self.saves_power(),
            target_down_bps: self.target_now(Direction::Down).map(|rate| rate.bps()),
            target_up_bps: self.target_now(Direction::Up).map(|rate| rate.bps()),
            warnings: self.warnings(now),
            ui: None,
            virtual_interface: self.virtual_interface(),
            late: self.late_status(),
            adhoc: None,
        }
    }

    fn warnings(&self, now: Time) -> Vec<String> {
        let mut warnings = self.steering.warnings();
        for family in Family::ALL {
            let configured = self.links.values().filter(|link| link.configured(family) && !link.capped()).count();
            let alive = self.links.values().filter(|link| link.usable(family)).count();
            if configured > 0 && alive == 0 {
                warnings.push(format!("every link appears dead in {family}: Braid treats all as up until one answers"));
            }
        }
        if !self.links.is_empty() && self.links.values().all(|link| link.rule.role == Role::Excluded) {
            let names: Vec<&str> = self.links.values().map(|link| link.facts.name.as_str()).collect();
            warnings.push(format!(
                "every link is excluded by its [[link]] entry ({}), so nothing is steered: remove role = \"excluded\" from one",
                names.join(", ")
            ));
        }
        warnings.extend(self.server_warnings());
        warnings.extend(self.energy_service_warning());
        warnings.extend(self.share_warnings(now));
        warnings.extend(self.late_warnings());
        warnings.extend(self.upkeep_warnings(now));
        warnings
    }

    /// `GET /v1/links`.
    pub fn links(&mut self, now: Time) -> Vec<LinkStatus> {
        let load_table = self.steering.load_table().ok();
        let link_load = |link: &Link| load_table.as_ref().map(|load_table| &load_table.loads[link.slot]);
        let max_daily = self.config.measure.max_daily;
        let used = self.links.values().map(|link| link_view(link, now, link_load(link), self.link_energy(link, now), max_daily));
        let overflow = self.links.overflow().iter().map(|facts| {
            let rule = self.in_force.link_rule(facts).cloned().unwrap_or_default();
            let mut link = Link::new(facts.clone(), 0, rule, self.config.probe, now);
            link.refused = Some(crate::links::NO_SLOT.to_owned());
            link_view(&link, now, None, None, max_daily)
        });
        used.chain(overflow).collect()
    }

    pub(super) fn device_name(&self, row: &FlowRow) -> String {
        let device = self.network.interface(row.link);
        device.map_or_else(|| living::gone(row.link), |device| device.name.clone())
    }

    /// Current activity of every link, for the history. `bonded` returns the number of bonded flows on a device.
    pub fn pulses(&self, now: Time, bonded: impl Fn(&str) -> u64) -> Vec<Pulse> {
        let pulse = |link: &Link| Pulse {
            index: link.facts.index,
            name: link.facts.name.clone(),
            state: link.state(),
            reason: link.reason(),
            falls: link.falls,
            usable: Family::ALL.iter().any(|family| link.usable(*family)),
            rank: Family::ALL.iter().filter_map(|family| link.facts.gateways.get(*family).first()).map(|route| route.metric).min(),
            device: link.device.last().map(|(_, counters)| counters),
            read_at: link.device.last().map_or(Time::ZERO, |(at, _)| at),
            rtt_us: link.rtt.smoothed(now).map(|rtt| rtt.as_micros() as u64),
            loss: link.loss.rate(now),
            energy: link.energy.total(),
            cost: self.byte_cost(link, now),
            money_per_gb: link.rule.cost_per_gb,
            flows: self.flows.iter().filter(|living| living.row.link == link.facts.index).count() as u64,
            bonded: bonded(&link.facts.name),
        };
        self.links.values().map(pulse).collect()
    }

    /// Power supply of the machine and whether Braid saves power.
    pub fn power(&self) -> Power {
        Power { plugged: self.supply.map(|supply| supply.plugged), saving: self.saves_power() }
    }

    /// `GET /v1/policy`.
    pub fn policy(&self) -> PolicyView {
        let policy = &self.config.policy;
        PolicyView {
            scheduler: policy.scheduler.to_string(),
            affinity: policy.affinity.map(|affinity| affinity_name(affinity).to_owned()),
            utility: (policy.scheduler == Scheduler::Operetta).then(|| super::energy::utility_text(&policy.utility)),
            utility_setting: Some(super::energy::utility_view(&policy.utility)),
            carry: Some(if policy.bonds_all { "bond" } else { "direct" }.to_owned()),
            relay: policy.relay.clone(),
            fallback: Some(policy.fallback.name().to_owned()),
            lan: policy.lan.clone(),
            virtual_interface: policy.virtual_device.as_ref().map(|device| VirtualInterfaceView {
                name: device.name.clone(),
                addresses: device.addresses.iter().map(ToString::to_string).collect(),
            }),
            bond_scheduler: policy.bond_scheduler.map(|scheduler| scheduler.name().to_owned()),
            bond_copies: match policy.bond_scheduler {
                Some(BondScheduler::Redundant(copies)) => Some(copies),
                _ => None,
            },
            default_demand_bytes: policy.default_demand.get(),
            detection: self.config.detection_view(),
            measurement: self.config.measure.view(),
            links: policy
                .links
                .iter()
                .map(|rule| LinkEntry {
                    matches: link_matcher_text(&rule.matcher),
                    when: when_text(&rule.when),
                    unmet: self.unmet(&rule.when),
                    devices: self.links.values().filter(|link| link.rule == *rule).map(|link| link.facts.name.clone()).collect(),
                    role: role_name(rule.role).to_owned(),
                    priority: rule.priority,
                    metered: rule.metered,
                    cap_bytes: rule.cap.map(ByteCount::get),
                    reset_day: rule.metered.then_some(rule.reset_day),
                    probe: rule.probe.map(|mode| match mode {
                        ProbeMode::Continuous => "continuous".to_owned(),
                        ProbeMode::OnDemand => "on-demand".to_owned(),
                    }),
                    cost_per_gb: (rule.cost_per_gb > 0.0).then_some(rule.cost_per_gb),
                })
                .collect(),
            apps: policy.apps.iter().map(|rule| self.app_entry(rule)).collect(),
            exclude: policy.exclude.matchers().iter().map(|matcher| ExcludeEntry { matches: matcher_text(matcher) }).collect(),
        }
    }

    /// An `[[app]]` entry, or a rule of a program.
    pub(super) fn app_entry(&self, rule: &AppRule) -> AppEntry {
        AppEntry {
            matches: matcher_text(&rule.matcher),
            when: when_text(&rule.when),
            unmet: self.unmet(&rule.when),
            links: rule.links.as_ref().map(|links| links.iter().map(ToString::to_string).collect()),
            prefer: rule.prefer.iter().map(ToString::to_string).collect(),
            class: rule.class.map(|class| class.to_string()),
            affinity: rule.affinity.map(|affinity| affinity_name(affinity).to_owned()),
            carry: rule.carry.name().to_owned(),
            copies: rule.copies,
            relay: rule.relay.clone(),
            fallback: rule.fallback.map(|fallback| fallback.name().to_owned()),
            resolve: rule.resolve.name().to_owned(),
            weight: rule.weight,
            rate: rule.rate.map(|portion| portion.to_string()),
            guarantee: rule.guarantee.map(|portion| portion.to_string()),
        }
    }

    /// The network at the last update.
    pub fn network(&self) -> &NetworkSnapshot {
        &self.network
    }
}

fn api_state(state: braid_model::LinkState) -> braid_api::LinkState {
    match state {
        braid_model::LinkState::Up => braid_api::LinkState::Up,
        braid_model::LinkState::Dead => braid_api::LinkState::Dead,
        braid_model::LinkState::Down => braid_api::LinkState::Down,
        braid_model::LinkState::Backup => braid_api::LinkState::Backup,
        braid_model::LinkState::Capped => braid_api::LinkState::Capped,
        braid_model::LinkState::Excluded => braid_api::LinkState::Excluded,
        braid_model::LinkState::Unknown => braid_api::LinkState::Unknown,
    }
}

fn link_view(
    link: &Link,
    now: Time,
    link_load: Option<&braid_decide::connection::LinkLoad>,
    energy: Option<LinkEnergy>,
    max_daily: ByteCount,
) -> LinkStatus {
    let capacity = |direction| link.estimate(direction, now);
    let (down, up) = (capacity(Direction::Down), capacity(Direction::Up));
    // Assumed values are only for the rule, which needs a number; the API shows known ones.
    let known = |estimate: &Estimate| Some(estimate.rate.bps()).filter(|rate| *rate > 0 && estimate.is_known());
    let age = |estimate: &Estimate| estimate.age.map(|age| age.as_millis() as u64);
    let gateways = |routes: &PerFamily<Vec<braid_model::DefaultRoute>>| {
        let all = Family::ALL.iter().flat_map(|family| routes.get(*family).iter().filter_map(|route| route.gateway));
        all.map(|gateway| gateway.to_string()).collect()
    };
    let moved = link.moved();
    LinkStatus {
        name: link.facts.name.clone(),
        state: api_state(link.state()),
        kind: link.facts.kind.to_string(),
        addresses: link.facts.addresses.iter().map(ToString::to_string).collect(),
        capacity_down_bps: known(&down),
        capacity_up_bps: known(&up),
        rtt_us: link.rtt.smoothed(now).map(|rtt| rtt.as_micros() as u64),
        loss: link.loss.rate(now),
        buffer_down_bytes: link.buffer.down.size(now).map(ByteCount::get),
        buffer_up_bytes: link.buffer.up.size(now).map(ByteCount::get),
        measured: measured_view(link, now, max_daily),
        falls_per_day: link.stability.falls_per_day(),
        mean_life_s: link.stability.mean_life().map(|life| life.as_secs()),
        rx_bytes: Some(moved.rx.get()),
        tx_bytes: Some(moved.tx.get()),
        flows: link_load.map_or(0, |link_load| u64::from(link_load.flows)),
        index: Some(link.facts.index.0),
        reason: link.reason(),
        role: Some(role_name(link.rule.role).to_owned()),
        state_v4: Some(link.family_state(Family::V4).to_string()),
        state_v6: Some(link.family_state(Family::V6).to_string()),
        gateways: gateways(&link.facts.gateways),
        resolvers: link.facts.resolvers.iter().map(ToString::to_string).collect(),
        mtu: Some(link.facts.mtu),
        device_rx_bytes: link.device.last().map(|(_, device)| device.rx.get()),
        device_tx_bytes: link.device.last().map(|(_, device)| device.tx.get()),
        rate_down_bps: link.rate.down.map(|rate| rate.bps()),
        rate_up_bps: link.rate.up.map(|rate| rate.bps()),
        load_down_bytes: link_load.map(|link_load| link_load.load.down),
        load_up_bytes: link_load.map(|link_load| link_load.load.up),
        capacity_confidence: Some(down.confidence),
        capacity_age_ms: age(&down),
        capacity_up_confidence: Some(up.confidence),
        capacity_up_age_ms: age(&up),
        metered: link.rule.metered,
        cap_bytes: link.rule.cap.map(ByteCount::get),
        used_bytes: link.allowance.as_ref().filter(|_| link.rule.metered).map(|allowance| allowance.used().get()),
        energy_j: link.energy.total().map(Joules::get),
        energy_down_j_per_gb: energy.as_ref().map(|energy| energy.cost.down.get() * 1e9),
        energy_up_j_per_gb: energy.as_ref().map(|energy| energy.cost.up.get() * 1e9),
        energy_source: energy.as_ref().map(|energy| energy.source.clone()),
        energy_profile: energy.and_then(|energy| energy.profile),
        model: link.model.as_ref().and_then(|model| model.label()).map(str::to_owned),
        hardware_id: link.model.as_ref().and_then(|model| model.id.clone()),
        cost_per_gb: (link.rule.cost_per_gb > 0.0).then_some(link.rule.cost_per_gb),
    }
}

fn measured_view(link: &Link, now: Time, max_daily: ByteCount) -> Option<LinkMeasured> {
    let measurements = &link.measurements;
    let (at, last) = measurements.last.as_ref()?;
    Some(LinkMeasured {
        down_bps: last.down.map(|rate| rate.bps()),
        up_bps: last.up.map(|rate| rate.bps()),
        servers: u32::try_from(last.servers).unwrap_or(u32::MAX),
        age_ms: now.since(*at).as_millis() as u64,
        failure: last.failure.clone(),
        rx_bytes: measurements.moved.rx.get(),
        tx_bytes: measurements.moved.tx.get(),
        day_bytes: measurements.spent(now).get(),
        max_day_bytes: max_daily.get(),
    })
}

pub(super) fn affinity_name(affinity: Affinity) -> &'static str {
    match affinity {
        Affinity::None => "none",
        Affinity::Destination => "destination",
        Affinity::Application => "application",
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Normal => "normal",
        Role::Backup => "backup",
        Role::Excluded => "excluded",
    }
}

/// A condition on the context in the syntax of the configuration; `None` if there is none.
pub(super) fn when_text(when: &When) -> Option<String> {
    (!when.is_empty()).then(|| when.to_string())
}

/// A matcher in the syntax of the configuration.
pub(super) fn matcher_text(matcher: &AppMatcher) -> String {
    let parts = [
        matcher.exe.as_ref().map(|exe| format!("exe = {exe:?}")),
        matcher.name.as_ref().map(|name| format!("name = {name:?}")),
        matcher.port.map(|port| format!("port = {port}")),
        matcher.protocol.map(|protocol| format!("protocol = \"{protocol}\"")),
        matcher.destination.map(|net| format!("destination = \"{net}\"")),
        matcher.cgroup.as_ref().map(|group| format!("cgroup = {group:?}")),
        matcher.user.map(|user| format!("user = {user}")),
        matcher.client.as_ref().map(|client| format!("client = \"{client}\"")),
        matcher.class.map(|class| format!("class = \"{class}\"")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn link_matcher_text(matcher: &LinkMatcher) -> String {
    let parts = [
        matcher.name.as_ref().map(|name| format!("name = \"{}\"", name.as_str())),
        matcher.kind.map(|kind| format!("kind = \"{kind}\"")),
        matcher.mac.map(|mac| format!("mac = \"{mac}\"")),
        matcher.address.map(|net| format!("address = \"{net}\"")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
