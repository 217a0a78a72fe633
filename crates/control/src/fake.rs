//! A steering backend without a kernel: applies the same rule to flows in memory. For fast and exact tests.
//!
//! [`FakeSteering::chaos`] makes calls fail, to simulate a system in trouble.

pub mod network;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::connection::{LoadTable, Request};
use braid_decide::policy::{Admission, admit};
use braid_decide::steer::Prefixes;
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{
    ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, PerDirection, PerFamily, Protocol, Rate, SequenceNumbers, Time,
};
use ipnet::IpNet;

use crate::steering::{
    AppId, BondedLoads, ClientRow, DemandEstimate, Dump, Ends, FastFlow, FlowRow, Hasten, Keepalive, LatePlan, LateState, MovedSocket,
    PeerDirect, Port, RedirectPolicy, Rewrite, Segment, Shape, ShapeStep, ShapedFlow, Signs, SteerParams, SteerRule, Steering,
    SteeringCounters, SteeringError, SteeringEvent,
};

/// Result of a connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steered {
    /// It got the link in this slot.
    To(usize, FlowId),
    /// It was redirected to the daemon.
    Redirected,
    /// It follows the system's routes.
    LeftAlone,
    /// It was refused.
    Denied,
}

/// Steering backend in memory.
#[derive(Debug, Default)]
pub struct FakeSteering {
    params: Option<SteerParams>,
    load_table: LoadTable,
    prefixes: PerFamily<Prefixes>,
    resolvers: Vec<(IpAddr, LinkSet)>,
    servers: Vec<IpAddr>,
    hold: Prefixes,
    openers: Prefixes,
    closed: Vec<(IpAddr, u16)>,
    refused: Vec<IpAddr>,
    /// Applications whose cgroup has a foreign filter program.
    filtered: BTreeSet<AppId>,
    flows: BTreeMap<FlowId, FlowRow>,
    learnt: BTreeMap<(AppId, u16), DemandEstimate>,
    classes: BTreeMap<AppId, (Class, Class)>,
    /// Applications that the daemon has been notified of.
    introduced: BTreeSet<AppId>,
    events: Vec<SteeringEvent>,
    signs: BTreeMap<(usize, Family), Signs>,
    counters: SteeringCounters,
    heartbeat: Option<Time>,
    /// Number of successful updates.
    changes: u64,
    redirect_ready: bool,
    next_id: u64,
    /// Makes every n-th call fail, if set.
    chaos: Option<u64>,
    calls: u64,
    moves_connects: bool,
    bonded_loads: BondedLoads,
    shapes: BTreeMap<FlowId, Shape>,
    /// Flows in the fast path.
    pub fast: BTreeMap<FlowId, FastFlow>,
    /// The rewritten flows.
    pub rewrites: BTreeMap<Ends, Rewrite>,
    /// Flows of datagrams that keep their source address.
    pub kept: BTreeMap<(FlowId, SocketAddr), IpAddr>,
    /// Links whose packets are bound late.
    pub late: Option<LatePlan>,
    /// Flows whose sockets do not follow.
    pub stubborn: BTreeSet<Ends>,
    /// Flows of datagrams whose sockets have a source address.
    pub sourced: BTreeSet<Ends>,
    /// Moved flows that the other host does not know by their addresses on the way.
    pub disowned: BTreeSet<Ends>,
    /// When the last packets of moved flows arrived with the addresses of their sockets.
    pub home: BTreeMap<Ends, Time>,
    /// When the last packets of moved flows arrived with the addresses on the way, if that is not long ago.
    pub arrived: BTreeMap<Ends, Time>,
    /// Addresses on the way of moved flows with which somebody begins another connection.
    pub claimed: BTreeMap<Ends, Ends>,
    /// The sequence numbers with which flows began.
    pub numbers: BTreeMap<Ends, SequenceNumbers>,
    /// Addresses of this machine at which packets of connections that began elsewhere do not arrive.
    pub firewalled: BTreeSet<IpAddr>,
    /// The segments that were sent.
    pub keepalives: Vec<Keepalive>,
    /// Sockets that were told that their host was unreachable.
    pub hastened: Vec<Hasten>,
    ports: Vec<Port>,
    serves_clients_only: bool,
}

impl FakeSteering {
    /// Creates a fake whose every `n`-th call fails.
    pub fn chaos(n: u64) -> Self {
        Self { chaos: Some(n.max(1)), ..Self::default() }
    }

    /// Makes every `n`-th call fail from now on; `None`: no call fails.
    pub fn set_chaos(&mut self, n: Option<u64>) {
        self.chaos = n.map(|n| n.max(1));
    }

    /// Sets whether unanswered connects are moved on request. Initially they are not, as on a kernel that cannot move them.
    pub fn set_moves_connects(&mut self, moves: bool) {
        self.moves_connects = moves;
    }

    /// Creates a fake that serves only the gateway's clients.
    pub fn clients_only() -> Self {
        Self { serves_clients_only: true, ..Self::default() }
    }

    /// The devices at which it acts.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// The limits in force.
    pub fn shapes(&self) -> &BTreeMap<FlowId, Shape> {
        &self.shapes
    }

    fn call(&mut self, action: &'static str) -> Result<(), SteeringError> {
        self.calls += 1;
        match self.chaos {
            Some(n) if self.calls.is_multiple_of(n) => Err(SteeringError { action, reason: "the fake fails on request".to_owned() }),
            _ => Ok(()),
        }
    }

    /// Number of successful updates of parameters, prefixes, resolvers, servers, refusals and limits of flows.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Destinations that all relays refuse.
    pub fn refused(&self) -> &[IpAddr] {
        &self.refused
    }

    /// The living flows.
    pub fn living(&self) -> impl Iterator<Item = &FlowRow> {
        self.flows.values()
    }

    /// The parameters in force.
    pub fn params(&self) -> Option<&SteerParams> {
        self.params.as_ref()
    }

    /// The resolvers in force.
    pub fn resolvers(&self) -> &[(IpAddr, LinkSet)] {
        &self.resolvers
    }

    /// Hosts that run Braid themselves.
    pub fn servers(&self) -> &[IpAddr] {
        &self.servers
    }

    /// Class that was set for an application; it determines the affinity of its flows.
    pub fn class_set(&self, app: &AppId) -> Option<Class> {
        self.classes.get(app).map(|(class, _)| *class)
    }

    /// Class by the pattern of its traffic that was set for an application; it counts only for rules.
    pub fn learnt_class(&self, app: &AppId) -> Option<Class> {
        self.classes.get(app).map(|(_, learnt)| *learnt)
    }

    /// Time of the last heartbeat.
    pub fn last_heartbeat(&self) -> Option<Time> {
        self.heartbeat
    }

    /// Sets whether the daemon accepts redirected connections. Initially it does not.
    pub fn set_redirect_ready(&mut self, ready: bool) {
        self.redirect_ready = ready;
    }

    /// Installs a foreign filter program on the application's cgroup.
    pub fn filter(&mut self, app: &AppId) {
        self.filtered.insert(app.clone());
    }

    /// Simulates the first packet of a TCP flow of a client, and the answer to it. Rules see no address of the client.
    pub fn forward(&mut self, now: Time, client: IpAddr, to: (IpAddr, u16)) -> Steered {
        let steered = self.connect(now, &AppId::client(client), 0, to);
        if let Steered::To(_, id) = steered
            && let Some(row) = self.flows.get_mut(&id)
        {
            (row.forwarded, row.local, row.process, row.connecting) = (true, (client, row.local.1), 0, false);
        }
        steered
    }

    /// Makes the flow one that its program sends from this address of the virtual interface.
    pub fn pass_virtual_device(&mut self, id: FlowId, address: IpAddr) {
        if let Some(row) = self.flows.get_mut(&id) {
            (row.forwarded, row.local, row.connecting) = (true, (address, row.local.1), false);
        }
    }

    /// Makes this the LAN device of a client's flow.
    pub fn set_lan(&mut self, id: FlowId, lan: LinkIndex) {
        if let Some(row) = self.flows.get_mut(&id) {
            row.lan = Some(lan);
        }
    }

    /// Makes this the rule that a flow matched at its start.
    pub fn set_rule(&mut self, id: FlowId, rule: u8) {
        if let Some(row) = self.flows.get_mut(&id) {
            row.rule = Some(rule);
        }
    }

    /// Simulates a connect of a program.
    pub fn connect(&mut self, now: Time, app: &AppId, user: u32, to: (IpAddr, u16)) -> Steered {
        let Some(params) = self.params.clone() else { return Steered::LeftAlone };
        let family = Family::of(to.0);
        if !self.prefixes.get(family).contains(to.0) {
            return Steered::LeftAlone;
        }
        let class = self.class_set(app).or_else(|| braid_decide::class::by_name(&app.name)).unwrap_or_default();
        let by_rules = if class == Class::Unclassified { self.learnt_class(app).unwrap_or_default() } else { class };
        let rule = params.rules.iter().position(|rule| rule_matches(rule, app, by_rules, user, to));
        let found = rule.map(|rule| &params.rules[rule]);
        if found.is_some_and(|rule| rule.exclude) {
            return Steered::LeftAlone;
        }
        let mask =
            match admit(*params.usable.get(family), params.backup, found.and_then(|rule| rule.links), found.and_then(|rule| rule.prefer)) {
                Admission::Use(mask) => mask,
                Admission::Deny => {
                    self.counters.denied += 1;
                    return Steered::Denied;
                }
                Admission::LeaveAlone => return Steered::LeftAlone,
            };
        let redirect = match found.and_then(|rule| rule.redirect) {
            Some(policy) => policy == RedirectPolicy::Redirect,
            None => params.redirected.contains(&found.and_then(|rule| rule.class).unwrap_or_default()),
        };
        let redirect = redirect && !self.refused.contains(&to.0);
        let never = found.is_some_and(|rule| rule.redirect == Some(RedirectPolicy::Direct) || rule.peer_direct == PeerDirect::Nothing);
        let wanted = params.peer_direct || found.is_some_and(|rule| rule.peer_direct == PeerDirect::All);
        let held = self.hold.contains(to.0) && ![53, 853].contains(&to.1);
        let known = self.servers.contains(&to.0) || held;
        let peer_direct = wanted && !never && mask.iter().count() > 1 && known && !self.closed.contains(&to);
        let filtered = peer_direct && self.filtered.contains(app);
        if (redirect || peer_direct && !filtered) && self.redirect_ready {
            self.counters.redirected += 1;
            return Steered::Redirected;
        }
        let known = self.learnt.get(&(app.clone(), to.1));
        let demand = known.map_or(params.default_demand, |known| known.down + known.up);
        let direction = if known.is_some_and(|known| known.up > known.down) { Direction::Up } else { Direction::Down };
        self.sync_link_loads(&params);
        let Some(slot) = self.load_table.choose(params.mode_for(direction), &Request { allowed: mask, direction, demand }) else {
            return Steered::LeftAlone;
        };
        let Some(link) = &params.links[slot] else { return Steered::LeftAlone };
        self.next_id += 1;
        let id = FlowId(self.next_id);
        let local = (link.source4.map_or(IpAddr::from([0; 4]), IpAddr::V4), 40_000 + (self.next_id % 20_000) as u16);
        let row = FlowRow {
            family,
            direction,
            scheduler: params.scheduler,
            rule: rule.map(|rule| rule as u8),
            demand,
            reserved: demand,
            connecting: true,
            unanswered_since: (family == Family::V4 && mask.iter().count() > 1).then_some(now),
            filtered,
            ..row(now, id, (app, user), (local, to), (slot, link.index))
        };
        self.flows.insert(id, row);
        self.counters.steered += 1;
        if self.introduced.insert(app.clone()) {
            self.events.push(SteeringEvent::NewApp { app: app.clone(), process: 1, cgroup: 1, class: Class::Unclassified });
        }
        Steered::To(slot, id)
    }

    /// Makes a flow one of datagrams, of a socket that is not connected.
    pub fn make_datagrams(&mut self, id: FlowId) {
        if let Some(row) = self.flows.get_mut(&id) {
            (row.protocol, row.connecting, row.unanswered_since) = (Protocol::Udp, false, None);
            (row.retransmissions, row.segments_out, row.local.0) = (None, None, IpAddr::from([0; 4]));
        }
    }

    /// Simulates that a program accepts a connection of another host. `None`: no link has this local IPv4 address.
    pub fn accept(&mut self, now: Time, app: &AppId, user: u32, local: (IpAddr, u16), from: (IpAddr, u16)) -> Option<FlowId> {
        let links = self.params.as_ref()?.links.iter().enumerate();
        let mut own =
            links.filter_map(|(slot, link)| Some((slot, link.as_ref()?))).filter(|(_, link)| link.source4.map(IpAddr::V4) == Some(local.0));
        let (slot, link) = own.next().map(|(slot, link)| (slot, link.index))?;
        self.next_id += 1;
        let id = FlowId(self.next_id);
        let row = FlowRow { accepted: true, limitable: false, ..row(now, id, (app, user), (local, from), (slot, link)) };
        self.flows.insert(id, row);
        Some(id)
    }

    fn sync_link_loads(&mut self, params: &SteerParams) {
        for (slot, link) in params.links.iter().enumerate() {
            if let Some(link) = link {
                let link_load = &mut self.load_table.loads[slot];
                link_load.rate = link.rate.map(Rate::bytes_per_second);
                (link_load.price, link_load.step, link_load.rank) = (link.price, link.step, link.rank);
            }
        }
    }

    /// Simulates the answer to a flow's handshake.
    pub fn answer(&mut self, now: Time, id: FlowId) {
        if let Some(row) = self.flows.get_mut(&id) {
            (row.connecting, row.unanswered_since) = (false, None);
            let signs =
                self.signs.entry((row.slot, row.family)).or_insert(Signs { answered: 0, answered_at: now, remote: None, timeouts: 0 });
            signs.answered += 1;
            signs.answered_at = now;
            signs.remote = Some(row.remote);
        }
    }

    /// Simulates transferred bytes of a flow.
    pub fn transfer(&mut self, id: FlowId, rx: ByteCount, tx: ByteCount) {
        if let Some(row) = self.flows.get_mut(&id) {
            row.rx += rx;
            row.tx += tx;
            (row.connecting, row.unanswered_since) = (false, None);
        }
    }

    /// Lets a flow send so many segments again.
    pub fn lose(&mut self, id: FlowId, segments: u32) {
        if let Some(row) = self.flows.get_mut(&id) {
            row.retransmissions = row.retransmissions.map(|count| count + segments);
        }
    }

    /// Sets the kernel's last delivery rate sample of a flow; `None`: the program had no more data to send.
    pub fn sample(&mut self, id: FlowId, rate: Option<Rate>) {
        if let Some(row) = self.flows.get_mut(&id) {
            row.delivery_rate = rate;
        }
    }

    /// Simulates a retransmission timeout of a flow.
    pub fn time_out(&mut self, id: FlowId) {
        if let Some(row) = self.flows.get(&id) {
            self.events.push(SteeringEvent::Symptom {
                link: row.link,
                family: row.family,
                connecting: row.connecting,
                retries: 1,
                remote: row.remote,
            });
        }
    }

    /// Simulates the close of a flow by its program.
    pub fn close(&mut self, now: Time, id: FlowId) {
        let Some(mut row) = self.flows.remove(&id) else { return };
        row.read_at = now;
        let link_load = &mut self.load_table.loads[row.slot];
        let load = &mut link_load.load[row.direction];
        *load = load.saturating_sub(row.reserved.get());
        link_load.flows = link_load.flows.saturating_sub(1);
        self.learn_step(&row.app, row.service(), row.rx, row.tx, now);
        self.counters.ended += 1;
        self.events.push(SteeringEvent::Ended(Box::new(row)));
    }

    fn learn_step(&mut self, app: &AppId, port: u16, down: ByteCount, up: ByteCount, now: Time) {
        if down + up == ByteCount::ZERO {
            return;
        }
        let fresh = || DemandEstimate { app: app.clone(), port, down: ByteCount::ZERO, up: ByteCount::ZERO, count: 0, updated: now };
        let known = self.learnt.entry((app.clone(), port)).or_insert_with(fresh);
        let mut demand = braid_decide::demand::Demand { down: known.down, up: known.up, count: known.count, updated: known.updated };
        demand.learn(down, up, now);
        (known.down, known.up, known.count, known.updated) = (demand.down, demand.up, demand.count, demand.updated);
    }
}

/// A TCP flow that has moved nothing.
fn row(
    now: Time,
    id: FlowId,
    (app, user): (&AppId, u32),
    (local, remote): ((IpAddr, u16), (IpAddr, u16)),
    (slot, link): (usize, LinkIndex),
) -> FlowRow {
    FlowRow {
        id,
        protocol: Protocol::Tcp,
        family: Family::V4,
        app: app.clone(),
        process: 1,
        user,
        cgroup: 1,
        local,
        accepted: false,
        timeouts: 0,
        forwarded: false,
        lan: None,
        remote,
        slot,
        link,
        direction: Direction::Down,
        class: Class::Unclassified,
        scheduler: 0,
        rule: None,
        started: now,
        read_at: now,
        demand: ByteCount::ZERO,
        reserved: ByteCount::ZERO,
        rx: ByteCount::ZERO,
        tx: ByteCount::ZERO,
        rtt_us: None,
        receive_rtt_us: None,
        retransmissions: Some(0),
        segments_out: Some(1),
        delivery_rate: None,
        connecting: false,
        unanswered_since: None,
        moves: 0,
        moving: false,
        filtered: false,
        limitable: true,
        fast: false,
    }
}

/// Whether a rule matches a connect of an application with this class.
fn rule_matches(rule: &SteerRule, app: &AppId, class: Class, user: u32, to: (IpAddr, u16)) -> bool {
    let wanted = &rule.matching;
    wanted.class.is_none_or(|wanted| wanted == class)
        && wanted.exe.as_ref().is_none_or(|files| files.contains(&app.exe))
        && wanted.name.as_ref().is_none_or(|name| *name == app.name)
        && wanted.port.is_none_or(|port| port == to.1)
        // All flows begin as TCP.
        && wanted.protocol.is_none_or(|protocol| protocol == Protocol::Tcp)
        && wanted.destination.is_none_or(|net| net.contains(&to.0))
        && wanted.cgroup.is_none()
        && wanted.client.is_none()
        && wanted.mac.is_none()
        && wanted.user.is_none_or(|wanted| wanted == user)
}

impl Steering for FakeSteering {
    type Dumped = Vec<FlowRow>;

    fn heartbeat(&mut self, now: Time) -> Result<(), SteeringError> {
        self.call("send a heartbeat")?;
        self.heartbeat = Some(now);
        Ok(())
    }

    fn set_params(&mut self, params: &SteerParams) -> Result<(), SteeringError> {
        self.call("apply a new policy")?;
        self.params = Some(params.clone());
        self.changes += 1;
        self.sync_link_loads(params);
        Ok(())
    }

    fn set_prefixes(&mut self, family: Family, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        self.call("write the prefixes that may be steered")?;
        *self.prefixes.get_mut(family) = Prefixes::new(map.to_vec());
        self.changes += 1;
        Ok(())
    }

    fn set_resolvers(&mut self, resolvers: &[(IpAddr, LinkSet)]) -> Result<(), SteeringError> {
        self.call("write the links' resolvers")?;
        self.resolvers = resolvers.to_vec();
        self.changes += 1;
        Ok(())
    }

    fn set_servers(&mut self, servers: &[IpAddr], closed: &[(IpAddr, u16)]) -> Result<(), SteeringError> {
        self.call("write the hosts that run Braid")?;
        (self.servers, self.closed) = (servers.to_vec(), closed.to_vec());
        self.changes += 1;
        Ok(())
    }

    fn set_hold(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        self.call("write the destinations of held connections")?;
        self.hold = Prefixes::new(map.to_vec());
        self.changes += 1;
        Ok(())
    }

    fn set_openers(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        self.call("write the hosts whose connections may move")?;
        self.openers = Prefixes::new(map.to_vec());
        self.changes += 1;
        Ok(())
    }

    fn set_refused(&mut self, refused: &[IpAddr]) -> Result<(), SteeringError> {
        self.call("write the destinations that relays refuse")?;
        self.refused = refused.to_vec();
        self.changes += 1;
        Ok(())
    }

    fn set_names(&mut self, _names: &[(&str, Class)]) -> Result<(), SteeringError> {
        self.call("write the programs' classes")
    }

    fn set_class(&mut self, app: &AppId, class: Class, learnt: Class) -> Result<(), SteeringError> {
        self.call("set an application's class")?;
        self.classes.insert(app.clone(), (class, learnt));
        Ok(())
    }

    fn seed(&mut self, learnt: &DemandEstimate) -> Result<(), SteeringError> {
        self.call("seed an application's demand")?;
        self.learnt.insert((learnt.app.clone(), learnt.port), learnt.clone());
        Ok(())
    }

    fn learn(&mut self, app: &AppId, port: u16, down: ByteCount, up: ByteCount, now: Time) -> Result<(), SteeringError> {
        self.call("learn from a flow")?;
        self.learn_step(app, port, down, up, now);
        Ok(())
    }

    fn estimates(&mut self) -> Result<Vec<DemandEstimate>, SteeringError> {
        self.call("read the learned demand")?;
        Ok(self.learnt.values().cloned().collect())
    }

    fn begin_dump(&mut self, now: Time) -> Result<Dump<Vec<FlowRow>>, SteeringError> {
        self.call("list the flows")?;
        for row in self.flows.values_mut() {
            row.read_at = now;
            let left = braid_decide::demand::remaining(row.demand, row.rx + row.tx);
            let load = &mut self.load_table.loads[row.slot].load[row.direction];
            *load = load.saturating_sub(row.reserved.get()).saturating_add(left.get());
            row.reserved = left;
        }
        let listed = |row: &&FlowRow| !row.accepted || self.openers.contains(row.remote.0);
        let rows = self.flows.values().filter(listed).cloned().collect();
        Ok(Box::new(move || Ok(rows)))
    }

    fn end_dump(&mut self, _now: Time, dumped: Vec<FlowRow>) -> Result<Vec<FlowRow>, SteeringError> {
        Ok(dumped)
    }

    fn move_connects(&mut self) -> Result<(), SteeringError> {
        self.call("move unanswered connects")?;
        let Some(params) = self.params.as_ref().filter(|_| self.moves_connects) else { return Ok(()) };
        for row in self.flows.values_mut().filter(|row| row.unanswered_since.is_some()) {
            let to = params.usable.v4.iter().find(|slot| *slot != row.slot);
            let to = to.and_then(|slot| Some((slot, params.links[slot].as_ref()?.index)));
            row.unanswered_since = None;
            if let Some((slot, link)) = to {
                (row.slot, row.link, row.moves) = (slot, link, row.moves + 1);
                self.counters.moved += 1;
            }
        }
        Ok(())
    }

    fn set_packets(&mut self, packets: PerDirection<ByteCount>) -> Result<(), SteeringError> {
        self.call("weigh bonded flows")?;
        self.load_table.packets = packets.map(ByteCount::get);
        Ok(())
    }

    fn set_bonded_loads(&mut self, loads: &BondedLoads) -> Result<(), SteeringError> {
        self.call("weigh bonded flows")?;
        for (link_load, (before, after)) in self.load_table.loads.iter_mut().zip(self.bonded_loads.iter().zip(loads)) {
            for direction in Direction::ALL {
                let rest = link_load.load[direction].saturating_sub(before.load[direction].get());
                link_load.load[direction] = rest.saturating_add(after.load[direction].get());
            }
            link_load.flows = link_load.flows.saturating_sub(before.flows).saturating_add(after.flows);
        }
        self.bonded_loads = *loads;
        Ok(())
    }

    fn shape(&mut self, now: Time, shapes: &BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError> {
        self.call("set the rates of flows")?;
        self.shapes = shapes.clone();
        self.changes += 1;
        let rows = shapes.keys().filter_map(|id| self.flows.get(id)).filter(|row| !row.connecting);
        let flow =
            |row: &FlowRow| ShapedFlow { id: row.id, rx: row.rx, tx: row.tx, read_at: now, rtt_us: row.rtt_us, receive_rtt_us: row.rtt_us };
        Ok(ShapeStep { flows: rows.map(flow).collect(), took: Duration::ZERO, complete: true })
    }

    fn set_ports(&mut self, ports: &[Port], _own: Option<&VirtualDevice>) -> Result<(), SteeringError> {
        self.call("forward for clients")?;
        self.ports = ports.to_vec();
        self.changes += 1;
        Ok(())
    }

    fn set_fast_path(&mut self, flows: &BTreeMap<FlowId, FastFlow>) -> Result<(), SteeringError> {
        self.call("set the fast path of clients' flows")?;
        self.fast = flows.clone();
        self.changes += 1;
        Ok(())
    }

    fn set_rewrites(&mut self, rewrites: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError> {
        self.call("rewrite moved flows")?;
        self.rewrites = rewrites.clone();
        self.changes += 1;
        Ok(())
    }

    fn set_late(&mut self, plan: Option<&LatePlan>) -> Result<(), SteeringError> {
        self.call("bind packets late")?;
        self.late = plan.cloned();
        self.changes += 1;
        Ok(())
    }

    fn late_state(&self) -> Option<LateState> {
        self.late.as_ref().map(|_| LateState::default())
    }

    fn moved_sockets(&mut self, _fresh: bool) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError> {
        self.call("read the moved flows")?;
        let moved = |ends: &Ends| MovedSocket {
            follows: !self.stubborn.contains(ends),
            has_source: self.sourced.contains(ends),
            refused: self.disowned.contains(ends),
            numbers: self.numbers.get(ends).copied(),
            segment: Some(Segment { unacknowledged: 1, expected: 1, window: 1 }),
            home: self.home.get(ends).copied(),
            moved: Some(self.arrived.get(ends).copied().unwrap_or(Time::ZERO)),
            claimed: self.claimed.get(ends).copied(),
            doublings: 2,
        };
        let own = |(ends, rewrite): (&Ends, &Rewrite)| match (rewrite.arrives, ends.protocol) {
            (false, _) => Some(*ends),
            // A flow of datagrams of which only arrivals are watched.
            (true, Protocol::Udp) if rewrite.device.is_none() => Some(ends.reversed()),
            _ => None,
        };
        Ok(self.rewrites.iter().filter_map(own).map(|ends| (ends, moved(&ends))).collect())
    }

    fn arrivals(&mut self, of: &[Ends]) -> Result<BTreeMap<Ends, Time>, SteeringError> {
        self.call("read the moved flows")?;
        let arrives = |ends: &&Ends| self.rewrites.contains_key(ends) && !self.firewalled.contains(&ends.destination.ip());
        Ok(of.iter().filter(arrives).map(|ends| (*ends, Time::from_nanos(u64::MAX))).collect())
    }

    fn hasten(&mut self, sockets: &[Hasten]) {
        self.hastened.extend(sockets);
    }

    fn send_keepalives(&mut self, keepalives: &[Keepalive]) {
        self.keepalives.extend(keepalives.iter().cloned());
    }

    fn keep_sources(&mut self, flows: &BTreeMap<(FlowId, SocketAddr), IpAddr>) -> Result<(), SteeringError> {
        self.call("keep the addresses of datagrams")?;
        self.kept = flows.clone();
        self.changes += 1;
        Ok(())
    }

    fn unmoved(&self) -> Option<String> {
        self.serves_clients_only.then(|| "this backend serves clients only".to_owned())
    }

    fn forget_forwarded(&mut self, protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> Result<(), SteeringError> {
        self.call("forget a forwarded flow")?;
        let ends = ((client.ip(), client.port()), (remote.ip(), remote.port()));
        self.flows.retain(|_, row| !row.forwarded || (row.protocol, row.local, row.remote) != (protocol, ends.0, ends.1));
        Ok(())
    }

    fn clients(&mut self) -> Result<Vec<ClientRow>, SteeringError> {
        self.call("list the clients")?;
        let mut clients: BTreeMap<IpAddr, ClientRow> = BTreeMap::new();
        let lan = self.ports.first().map_or(LinkIndex(0), |port| port.index);
        for row in self.flows.values().filter(|row| row.forwarded) {
            let address = row.local.0;
            clients.insert(address, ClientRow { address, mac: None, lan, seen: row.started });
        }
        Ok(clients.into_values().collect())
    }

    fn load_table(&mut self) -> Result<LoadTable, SteeringError> {
        self.call("read the loads")?;
        Ok(self.load_table.clone())
    }

    fn signs(&mut self, slot: usize, family: Family) -> Result<Signs, SteeringError> {
        self.call("read a link's connection counters")?;
        let none = Signs { answered: 0, answered_at: Time::ZERO, remote: None, timeouts: 0 };
        Ok(self.signs.get(&(slot, family)).copied().unwrap_or(none))
    }

    fn counters(&mut self) -> Result<SteeringCounters, SteeringError> {
        self.call("read the counters")?;
        Ok(self.counters)
    }

    fn steers_host(&self) -> bool {
        !self.serves_clients_only
    }

    fn events(&mut self, limit: usize) -> Vec<SteeringEvent> {
        let end = self.events.len().min(limit);
        self.events.drain(..end).collect()
    }
}
