//! Steering by BPF: loads the programs of `ebpf/`, attaches them to the root of the cgroup hierarchy and exchanges data with them.
//!
//! Only file descriptors hold the programs and maps, so the kernel removes them when the process ends, even if it crashes.
//!

/// Finds a map by name and converts it to its type.
macro_rules! typed_map {
    ($self:ident, $kind:ident, $name:literal, $action:literal) => {
        $self
            .ebpf
            .map_mut($name)
            .ok_or(SteeringError { action: $action, reason: concat!("the programs have no map ", $name).to_owned() })
            .and_then(|map| $kind::try_from(map).map_err(failed($action)))?
    };
}

mod accepted;
pub mod adhoc;
mod convert;
mod counting;
mod dump;
mod fast;
mod forward;
mod heal;
mod iterate;
mod lan;
mod late;
pub mod load;
mod prefixes;
pub mod redirect;
mod rewrites;
mod shape;
pub mod trial;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use braid_decide::connection::LoadTable;
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{ByteCount, Class, Family, FlowId, LinkSet, MAX_LINKS, PerDirection, Protocol, Time};
use ipnet::IpNet;

use super::keepalive;
use super::sys::{abi, bpf as sys};
use braid_control::steering::{
    AppId, BondedLoads, ClientRow, DemandEstimate, Dump, Ends, FastFlow, FlowRow, Hasten, Keepalive, LatePlan, LateState, MovedSocket,
    Port, Rewrite, Shape, ShapeStep, Signs, SteerParams, Steering, SteeringCounters, SteeringError, SteeringEvent,
};
use convert::{app_key, flow_row, mapped, process_name};
use counting::{Counting, Step};
pub use forward::sweep_filters;
pub use shape::Unshape;

/// `BPF_F_LOCK`: read or write an element under its spin lock.
const LOCKED: u64 = 4;
/// A flow of unconnected datagrams ends after this time without a datagram.
const DATAGRAM_IDLE: std::time::Duration = std::time::Duration::from_secs(30);
/// Capacity of the map of unconnected datagram flows.
const MAX_DATAGRAM_FLOWS: usize = 16_384;
/// Upper bound for the run time of a program, even if it is preempted on a busy machine.
const MAX_RUN_TIME: std::time::Duration = std::time::Duration::from_secs(5);
const VERDICT_LEAVE: u8 = 0;
const VERDICT_STEER: u8 = 1;

/// The loaded and attached programs.
pub struct BpfSteering {
    /// Owns the programs and the maps that are not taken out below.
    ebpf: aya::Ebpf,
    /// Dumps the flows of sockets, if programs of this machine are steered.
    dumper: Option<Arc<Mutex<dump::SocketDumper>>>,
    /// Moves connects that receive no answer, or the reason why it could not be loaded.
    mover: Result<iterate::SocketIterator, String>,
    /// Makes the sockets of moved flows send through Braid's device, or the reason why it could not be loaded.
    departer: Result<iterate::SocketIterator, String>,
    /// Whether the sockets do not know yet what the moved flows are.
    departs: bool,
    /// Where moved flows are rewritten, each with what keeps its programs attached.
    move_ports: BTreeMap<Port, Vec<Box<dyn Send + Sync>>>,
    /// Sets the rates of running flows, or the reason why its programs could not be loaded.
    shaper: Result<shape::Shaper, String>,
    /// The forwarded flows whose windows the switch lowers or measures.
    windows: windows::Windows,
    /// The forwarded flows in the fast path.
    fast: fast::FastPath,
    /// Late binding.
    late: late::Late,
    /// The moved flows.
    rewrites: BTreeMap<Ends, Rewrite>,
    /// The sockets of those that are flows of datagrams.
    datagram_sockets: rewrites::DatagramSockets,
    /// Flows of datagrams that keep their source address.
    kept: BTreeMap<(FlowId, SocketAddr), IpAddr>,
    events: RingBuf<MapData>,
    params: SteerParams,
    bank: u32,
    /// Time of the last heartbeat, in nanoseconds of the kernel's clock; 0 before the first.
    heartbeat: u64,
    /// Generation number that changes whenever an application's class changes; never 0.
    classes: u32,
    netns: u64,
    /// The process whose sockets the programs do not steer.
    exempt: convert::Daemon,
    /// The attached programs; dropping one detaches it.
    attached: Vec<load::Attached>,
    /// Root of the cgroup hierarchy. `None` if the programs are not attached.
    cgroup: Option<OwnedFd>,
    counting: counting::Counting,
    counters: load::Counters,
    /// Why datagrams are not counted although they should be.
    uncounted: Option<String>,
    /// Current contents of the prefix maps, by family.
    prefixes: [Vec<(IpNet, bool)>; 2],
    /// Current contents of the map of held destinations.
    hold: Vec<(IpNet, bool)>,
    /// Current contents of the map of hosts whose connections to this machine are listed.
    openers: Vec<(IpNet, bool)>,
    accepted: accepted::Accepted,
    /// Number of prefixes that did not fit into the map, by family.
    missing_prefixes: [usize; 2],
    /// Time of the last switch between the banks.
    switched: Option<Time>,
    /// Whether the programs for redirected sockets are attached. Also true if no programs are attached at all, because no socket is redirected then.
    serves_redirected: bool,
    heal: heal::Heal,
    /// What bonded flows weigh.
    bonded_loads: BondedLoads,
    dumps: heal::Dumps,
    lan: lan::Lan,
    /// Why the flows of this machine's own programs get no links; `None` if they do.
    unsteered: Option<String>,
}

/// Result of a dump of the sockets' flows.
pub struct Dumped {
    loads: heal::Loads,
    rows: Vec<FlowRow>,
    /// Whether the dump contains UDP sockets. `counting` is the state of counting when the dump began.
    datagrams: bool,
    /// Whether it has all flows.
    is_whole: bool,
    counting: counting::Counting,
    /// The load table when the dump began.
    began: abi::LoadTable,
    token: heal::DumpToken,
    forwarded: Option<forward::Forwarded>,
}

impl Dumped {
    /// Flows of the gateway's clients whose packets go through a bond; they are not among the other rows.
    pub fn packet_flows(&self) -> Vec<FlowRow> {
        self.forwarded.iter().flat_map(forward::packet_rows).collect()
    }
}

/// Dumps the sockets' flows and the forwarded ones. The programs update the flows' reservations during the dump.
fn dump_flows(
    (sockets, forwarded): (Option<&Mutex<dump::SocketDumper>>, Option<&lan::Dumper>),
    began: abi::LoadTable,
    token: heal::DumpToken,
    counting: counting::Counting,
) -> Result<Dumped, SteeringError> {
    let fail = |error: std::io::Error| SteeringError { action: "list the flows", reason: error.to_string() };
    let dumped = sockets.map(|dumper| dumper.lock().unwrap_or_else(PoisonError::into_inner).dump()).transpose().map_err(fail)?;
    let dump::SocketFlows { mut rows, is_whole } = dumped.unwrap_or(dump::SocketFlows { rows: Vec::new(), is_whole: true });
    let datagrams = rows.iter().any(|row| i32::from(row.flow.protocol) != libc::IPPROTO_TCP);
    rows.retain(|row| row.flow.flags & (abi::flow::PENDING | abi::flow::MARKER) == 0);
    let mut loads = heal::Loads::default();
    loads.add(&rows);
    let forwarded = forwarded.map(forward::dump).transpose().map_err(fail)?;
    loads.add(forwarded.as_ref().map_or(&[], |forwarded| &forwarded.living));
    let rows = rows.iter().filter_map(flow_row).chain(forwarded.iter().flat_map(forward::rows)).collect();
    Ok(Dumped { loads, rows, datagrams, is_whole, counting, began, token, forwarded })
}

fn failed(action: &'static str) -> impl Fn(MapError) -> SteeringError {
    move |error| SteeringError { action, reason: detail(&error) }
}

/// Takes the removal of an entry that is not there as done.
fn ignore_missing(done: Result<(), MapError>) -> Result<(), MapError> {
    match done {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done,
    }
}

/// Text of an error with its causes. aya keeps the system's error message in the cause.
fn detail(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

impl BpfSteering {
    /// Starts to count datagrams, as if a UDP socket had requested it.
    pub fn count_datagrams(&mut self) {
        self.count_if_possible(self.counting.wanted());
    }

    /// Reports a failure as a warning and retries at the next dump, because flows are steered even if their bytes are not counted.
    fn count_if_possible(&mut self, (next, step): (Counting, Step)) {
        self.uncounted = match self.count(next, step) {
            Ok(()) if step == Step::Stay => self.uncounted.take().filter(|_| next == Counting::Off),
            done => done.err().map(|error| error.to_string()),
        };
    }

    fn count(&mut self, next: Counting, step: Step) -> Result<(), SteeringError> {
        match step {
            Step::Stay => {
                self.counting = next;
                return Ok(());
            }
            Step::Attach => self.attach_counters()?,
            Step::Detach => self.detach_counters(),
            Step::Resume | Step::Announce => {}
        }
        self.counting = next;
        self.switch()
    }

    /// Returns a handle that becomes ready when events arrive. Must be called inside a tokio runtime.
    pub fn ready(&self) -> std::io::Result<sys::Ready> {
        sys::Ready::watch(self.events.as_fd())
    }

    fn raw_load_table(&mut self) -> Result<abi::LoadTable, SteeringError> {
        typed_map!(self, Array, "load_table", "read the loads").get(&0, LOCKED).map_err(failed("read the loads"))
    }

    /// Flows of unconnected datagrams, as (active, idle). The idle ones are removed from the map.
    fn dump_datagrams(&mut self, now: Time) -> Result<(Vec<abi::FlowRow>, Vec<abi::FlowRow>), SteeringError> {
        let mut map: HashMap<_, abi::DatagramKey, abi::Flow> = typed_map!(self, HashMap, "datagrams", "list the datagram flows");
        // If entries are evicted during the iteration, the kernel restarts it. Limit the number of reads to the map's capacity, and count each key
        // once.
        let entries: BTreeMap<_, _> = map
            .iter()
            .take(MAX_DATAGRAM_FLOWS)
            .filter_map(Result::ok)
            .filter(|(_, flow)| flow.started != 0)
            .map(|(key, flow)| ((key.socket, key.remote, key.port), (key, flow)))
            .collect();
        let (mut living, mut idle) = (Vec::new(), Vec::new());
        for (key, flow) in entries.into_values() {
            let local_port = u16::from_ne_bytes(flow.scale_or_local_port).into();
            let row = abi::FlowRow { flow, rx: flow.rx, tx: flow.tx, read_at: now.as_nanos(), local_port, ..Default::default() };
            if now.since(Time::from_nanos(flow.last)) < DATAGRAM_IDLE {
                living.push(row);
            } else if map.remove(&key).is_ok() {
                idle.push(row);
            }
        }
        Ok((living, idle))
    }

    /// Writes the heartbeat, the bank in force, the classes' generation and the flags to the control map.
    fn switch(&mut self) -> Result<(), SteeringError> {
        let (bank, classes, counting) = (self.bank, self.classes, self.counting.flag());
        let windows = u32::from(self.windows.is_needed());
        let fast = u32::from(self.fast.is_used());
        let rewrites = u32::from(!self.rewrites.is_empty());
        let pressure = u32::from(self.lan.is_under_pressure());
        let control = abi::Control { heartbeat: self.heartbeat, bank, classes, counting, windows, fast, rewrites, pressure, pad: 0 };
        typed_map!(self, Array, "control", "write the heartbeat").set(0, control, 0).map_err(failed("write the heartbeat"))
    }

    /// Updates the demand estimate as the kernel does when a socket closes, for flows whose end the kernel does not see. Takes bytes received and
    /// sent.
    fn learn_step(&mut self, key: abi::DemandKey, [rx, tx]: [u64; 2], updated: u64) -> Result<(), SteeringError> {
        if rx + tx == 0 {
            return Ok(());
        }
        let mut map: HashMap<_, abi::DemandKey, abi::Demand> = typed_map!(self, HashMap, "demands", "update a demand estimate");
        let step = |estimate: u64, sample: u64| estimate - (estimate >> 3) + (sample >> 3);
        let next = match map.get(&key, 0) {
            Ok(known) => {
                abi::Demand { down: step(known.down, rx), up: step(known.up, tx), updated, count: known.count.saturating_add(1), ..known }
            }
            Err(_) => abi::Demand { down: rx, up: tx, updated, count: 1, ..Default::default() },
        };
        map.insert(key, next, 0).map_err(failed("update a demand estimate"))
    }
}

/// Makes a map of prefixes, which contains `had`, contain these, as far as they fit.
fn replace_hosts(
    trie: &mut LpmTrie<&mut MapData, [u32; 4], u8>,
    had: &mut Vec<(IpNet, bool)>,
    map: &[(IpNet, bool)],
) -> Result<(), aya::maps::MapError> {
    let (wanted, _) = prefixes::fit(map, abi::MAX_HOLD - 1);
    let changed = prefixes::changes(&std::mem::take(had), &wanted, abi::MAX_HOLD - 1).into_iter().try_for_each(|(net, change)| {
        // IPv4 prefixes are the part ::ffff:0:0/96 of the map.
        let length = u32::from(net.prefix_len()) + if net.addr().is_ipv4() { 96 } else { 0 };
        change_prefix(trie, &Key::new(length, mapped(net.network())), change)
    });
    match changed {
        Ok(()) => *had = wanted,
        // The contents are now unknown. Nothing is in force until the next attempt succeeds.
        Err(_) => clear(trie)?,
    }
    changed
}

/// Makes a map contain exactly these hosts. Existing entries that stay are not rewritten.
fn set_hosts<'a>(
    map: &mut HashMap<&mut MapData, abi::Address, u32>,
    hosts: impl Iterator<Item = &'a IpAddr>,
    action: &'static str,
) -> Result<(), SteeringError> {
    let wanted: BTreeSet<_> = hosts.map(|host| mapped(*host)).collect();
    let had: BTreeSet<_> = map.keys().filter_map(Result::ok).map(|key| key.word).collect();
    for word in had.difference(&wanted) {
        map.remove(&abi::Address { word: *word }).map_err(failed(action))?;
    }
    for word in wanted.difference(&had) {
        map.insert(abi::Address { word: *word }, 1, 0).map_err(failed(action))?;
    }
    Ok(())
}

impl Steering for BpfSteering {
    type Dumped = Dumped;

    fn heartbeat(&mut self, now: Time) -> Result<(), SteeringError> {
        self.heartbeat = now.as_nanos();
        self.switch()
    }

    fn set_params(&mut self, params: &SteerParams) -> Result<(), SteeringError> {
        const ACTION: &str = "apply a new policy";
        if params.rules.len() > abi::MAX_RULES {
            let reason = format!("{} rules exceed the limit of {}", params.rules.len(), abi::MAX_RULES);
            return Err(SteeringError { action: ACTION, reason });
        }
        let noted = if params.redirects() { self.serve_redirected() } else { Ok(()) };
        // If redirection is not available, apply the policy without it.
        let undirected = noted.is_err().then(|| params.without_redirection());
        let params = undirected.as_ref().unwrap_or(params);
        let bank = self.bank ^ 1;
        if self.switched.is_some_and(|switched| sys::now().since(switched) < MAX_RUN_TIME) {
            // A program that started before the last switch may still read the bank that is written now.
            sys::wait_for_programs();
        }
        let mut executables = convert::ExeIds::default();
        let rules: Vec<_> = params.rules.iter().map(|rule| convert::rule(rule, &mut executables)).collect();
        self.reset_new_slots(params)?;
        self.set_executables(bank, &executables)?;
        let mut rule_map = typed_map!(self, Array, "rules", "apply a new policy");
        for (index, rule) in rules.into_iter().enumerate() {
            rule_map.set(bank * abi::MAX_RULES as u32 + index as u32, rule, 0).map_err(failed(ACTION))?;
        }
        let raw = convert::params(params, self.netns, self.exempt);
        typed_map!(self, Array, "params", "apply a new policy").set(bank, raw, 0).map_err(failed(ACTION))?;
        self.bank = bank;
        self.switched = Some(sys::now());
        self.params = params.clone();
        self.heartbeat(sys::now())?;
        noted
    }

    fn set_prefixes(&mut self, family: Family, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        let (wanted, missing) = prefixes::fit(map, prefixes::MAX_PREFIXES);
        self.missing_prefixes[family as usize] = missing;
        let had = std::mem::take(&mut self.prefixes[family as usize]);
        let installed = self.install_prefixes(family, &prefixes::changes(&had, &wanted, prefixes::MAX_PREFIXES));
        if installed.is_ok() {
            self.prefixes[family as usize] = wanted;
        } else {
            // The contents are now unknown. Clear the map, so that nothing is steered by it until the next attempt succeeds.
            self.clear_prefixes(family)?;
        }
        installed
    }

    fn set_resolvers(&mut self, resolvers: &[(IpAddr, LinkSet)]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the links' resolvers in the kernel";
        let mut map: HashMap<_, abi::Address, u32> = typed_map!(self, HashMap, "resolvers", "update the links' resolvers in the kernel");
        let wanted: Vec<_> =
            resolvers.iter().take(256).map(|(addr, mask)| (abi::Address { word: mapped(*addr) }, convert::mask(*mask))).collect();
        let stale: Vec<_> = map.keys().filter_map(Result::ok).filter(|key| !wanted.iter().any(|(want, _)| want == key)).collect();
        for key in stale {
            map.remove(&key).map_err(failed(ACTION))?;
        }
        for (key, mask) in wanted {
            map.insert(key, mask, 0).map_err(failed(ACTION))?;
        }
        Ok(())
    }

    fn set_servers(&mut self, servers: &[IpAddr], closed: &[(IpAddr, u16)]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the hosts that run Braid in the kernel";
        if !servers.is_empty() {
            self.serve_redirected()?;
        }
        let mut map: HashMap<_, abi::DatagramKey, u32> =
            typed_map!(self, HashMap, "closed", "update the hosts that run Braid in the kernel");
        let wanted: BTreeSet<_> = closed.iter().take(abi::MAX_SERVERS).map(|(host, port)| (mapped(*host), u32::from(*port))).collect();
        let had: BTreeSet<_> = map.keys().filter_map(Result::ok).map(|key| (key.remote, key.port)).collect();
        let key = |(remote, port): &([u32; 4], u32)| abi::DatagramKey { remote: *remote, port: *port, ..Default::default() };
        for gone in had.difference(&wanted) {
            map.remove(&key(gone)).map_err(failed(ACTION))?;
        }
        for new in wanted.difference(&had) {
            map.insert(key(new), 1, 0).map_err(failed(ACTION))?;
        }
        let mut map: HashMap<_, abi::Address, u32> = typed_map!(self, HashMap, "servers", "update the hosts that run Braid in the kernel");
        set_hosts(&mut map, servers.iter().take(abi::MAX_SERVERS), ACTION)
    }

    fn set_hold(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the destinations of held connections in the kernel";
        if !map.is_empty() {
            self.serve_redirected()?;
        }
        let mut trie = typed_map!(self, LpmTrie, "hold", "update the destinations of held connections in the kernel");
        replace_hosts(&mut trie, &mut self.hold, map).map_err(failed(ACTION))
    }

    fn set_openers(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the hosts whose connections to this machine may move in the kernel";
        let mut trie = typed_map!(self, LpmTrie, "openers", "update the hosts whose connections to this machine may move in the kernel");
        replace_hosts(&mut trie, &mut self.openers, map).map_err(failed(ACTION))
    }

    fn set_refused(&mut self, refused: &[IpAddr]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the destinations that relays refuse in the kernel";
        let mut map: HashMap<_, abi::Address, u32> =
            typed_map!(self, HashMap, "bypass", "update the destinations that relays refuse in the kernel");
        set_hosts(&mut map, refused.iter().take(abi::MAX_REFUSED), ACTION)
    }

    fn set_names(&mut self, names: &[(&str, Class)]) -> Result<(), SteeringError> {
        let mut map: HashMap<_, abi::ProcessName, abi::App> =
            typed_map!(self, HashMap, "names", "update the programs' classes in the kernel");
        for (name, class) in names {
            let key = abi::ProcessName { text: process_name(name) };
            let app = abi::App { class: *class as u8, ..Default::default() };
            map.insert(key, app, 0).map_err(failed("update the programs' classes in the kernel"))?;
        }
        Ok(())
    }

    fn set_class(&mut self, app: &AppId, class: Class, learnt: Class) -> Result<(), SteeringError> {
        let mut map: HashMap<_, abi::AppKey, abi::App> = typed_map!(self, HashMap, "apps", "set an application's class");
        let value = abi::App { class: class as u8, learnt: learnt as u8, ..Default::default() };
        map.insert(app_key(app), value, 0).map_err(failed("set an application's class"))?;
        // The programs cache classes per socket; a new generation number invalidates the cache.
        self.classes = self.classes.checked_add(1).unwrap_or(1);
        self.switch()
    }

    fn seed(&mut self, learnt: &DemandEstimate) -> Result<(), SteeringError> {
        let mut map: HashMap<_, abi::DemandKey, abi::Demand> = typed_map!(self, HashMap, "demands", "seed an application's demand");
        let key = abi::DemandKey { app: app_key(&learnt.app), port: learnt.port, ..Default::default() };
        let (down, up, updated) = (learnt.down.get(), learnt.up.get(), learnt.updated.as_nanos());
        let value = abi::Demand { down, up, updated, count: learnt.count, ..Default::default() };
        map.insert(key, value, 0).map_err(failed("seed an application's demand"))
    }

    fn learn(&mut self, app: &AppId, port: u16, down: ByteCount, up: ByteCount, now: Time) -> Result<(), SteeringError> {
        let key = abi::DemandKey { app: app_key(app), port, ..Default::default() };
        self.learn_step(key, [down.get(), up.get()], now.as_nanos())
    }

    fn estimates(&mut self) -> Result<Vec<DemandEstimate>, SteeringError> {
        let map: HashMap<_, abi::DemandKey, abi::Demand> = typed_map!(self, HashMap, "demands", "read the demand estimates");
        Ok(map.iter().filter_map(Result::ok).map(|(key, demand)| convert::estimate(&key, &demand)).collect())
    }

    fn begin_dump(&mut self, _now: Time) -> Result<Dump<Dumped>, SteeringError> {
        let (dumper, began, token, counting) = (self.dumper.clone(), self.raw_load_table()?, self.dumps.begin(), self.counting);
        let forwarded = self.lan.dump();
        Ok(Box::new(move || dump_flows((dumper.as_deref(), forwarded.as_deref()), began, token, counting)))
    }

    fn is_under_pressure(&self) -> bool {
        self.lan.is_under_pressure()
    }

    fn end_dump(&mut self, now: Time, dumped: Dumped) -> Result<Vec<FlowRow>, SteeringError> {
        let Dumped { mut loads, mut rows, datagrams, is_whole, counting, began, token, forwarded } = dumped;
        if let Some(forwarded) = &forwarded {
            self.end_forwarded_dump(now, forwarded)?;
        }
        self.count_if_possible(self.counting.dumped(counting, datagrams, now));
        let (datagrams, idle) = self.dump_datagrams(now)?;
        loads.add(&datagrams);
        loads.add_bonded(&self.bonded_loads);
        rows.extend(datagrams.iter().filter_map(flow_row));
        rows.extend(self.accepted.rows(now, !self.openers.is_empty()));
        for row in &idle {
            let key = abi::DemandKey { app: row.flow.app, port: row.flow.port, ..Default::default() };
            self.learn_step(key, [row.rx, row.tx], row.read_at)?;
        }
        // Loads and their changes from one reading: a flow that ended between two readings would look like an end that was missed.
        let after = self.raw_load_table()?;
        let changes = heal::Changes::between(&began, &after);
        let corrections =
            if is_whole && self.dumps.had_no_overlap(&token) { self.heal.corrections(&loads, &after, changes) } else { Vec::new() };
        if !corrections.is_empty() {
            let mut map: Array<_, abi::LinkLoad> = typed_map!(self, Array, "corrections", "correct the loads");
            for (slot, link_load) in corrections {
                map.set(slot, link_load, 0).map_err(failed("correct the loads"))?;
            }
        }
        self.heal.ended.extend(idle.iter().filter_map(flow_row));
        if let Err(error) = self.depart() {
            tracing::warn!(%error, "sockets of moved flows keep their marks");
        }
        let fast = self.tend_fast_path().unwrap_or_else(|error| {
            tracing::warn!(%error, "clients' flows leave the fast path");
            Vec::new()
        });
        rows.iter_mut().filter(|row| row.forwarded).for_each(|row| row.fast = fast.binary_search(&row.id).is_ok());
        Ok(rows)
    }

    fn move_connects(&mut self) -> Result<(), SteeringError> {
        let Ok(mover) = &mut self.mover else { return Ok(()) };
        let fail = |error: std::io::Error| SteeringError { action: "move connects that receive no answer", reason: error.to_string() };
        // The program produces no output.
        mover.run(iterate::WAIT).map_err(fail)?;
        Ok(())
    }

    fn set_packets(&mut self, packets: PerDirection<ByteCount>) -> Result<(), SteeringError> {
        let mut map: Array<_, [u64; 2]> = typed_map!(self, Array, "packets", "weigh bonded flows");
        map.set(0, packets.map(ByteCount::get).to_array(), 0).map_err(failed("weigh bonded flows"))
    }

    fn set_bonded_loads(&mut self, loads: &BondedLoads) -> Result<(), SteeringError> {
        self.bonded_loads = *loads;
        Ok(())
    }

    fn shape(&mut self, _now: Time, shapes: &BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError> {
        self.set_shapes(shapes.clone())
    }

    fn set_ports(&mut self, ports: &[Port], own: Option<&VirtualDevice>) -> Result<(), SteeringError> {
        self.serve_ports(ports, own)
    }

    fn set_rewrites(&mut self, rewrites: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError> {
        self.rewrite(rewrites)
    }

    fn moved_sockets(&mut self, fresh: bool) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError> {
        self.read_moved(fresh)
    }

    fn arrivals(&mut self, of: &[Ends]) -> Result<BTreeMap<Ends, Time>, SteeringError> {
        self.read_arrivals(of)
    }

    fn hasten(&mut self, sockets: &[Hasten]) {
        for socket in sockets {
            if let Err(error) = keepalive::hasten(socket) {
                tracing::debug!(source = %socket.own.source, "a socket was not told that its host was unreachable: {error}");
            }
        }
    }

    fn send_keepalives(&mut self, keepalives: &[Keepalive]) {
        keepalive::send(keepalives);
    }

    fn keep_sources(&mut self, flows: &BTreeMap<(FlowId, SocketAddr), IpAddr>) -> Result<(), SteeringError> {
        self.keep(flows)
    }

    fn release_rewrites(&mut self) -> Result<(), SteeringError> {
        self.release()
    }

    fn set_late(&mut self, plan: Option<&LatePlan>) -> Result<(), SteeringError> {
        self.bind_late(plan)
    }

    fn late_state(&self) -> Option<LateState> {
        self.late.state()
    }

    fn unmoved(&self) -> Option<String> {
        // The verifier's log follows, which helps no user.
        self.departer.as_ref().err().map(|reason| reason.lines().next().unwrap_or_default().to_owned())
    }

    fn set_fast_path(&mut self, flows: &BTreeMap<FlowId, FastFlow>) -> Result<(), SteeringError> {
        self.enter_fast_path(flows)
    }

    fn forget_forwarded(&mut self, protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> Result<(), SteeringError> {
        self.remove_forwarded(protocol, client, remote)
    }

    fn clients(&mut self) -> Result<Vec<ClientRow>, SteeringError> {
        self.list_clients()
    }

    fn load_table(&mut self) -> Result<LoadTable, SteeringError> {
        let raw = self.raw_load_table()?;
        Ok(convert::load_table(&raw, &self.params))
    }

    fn signs(&mut self, slot: usize, family: Family) -> Result<Signs, SteeringError> {
        let signs: abi::Signs =
            typed_map!(self, Array, "signs", "read a link's signs").get(&(slot as u32), 0).map_err(failed("read a link's signs"))?;
        Ok(convert::signs(&signs, family))
    }

    fn counters(&mut self) -> Result<SteeringCounters, SteeringError> {
        let map: PerCpuArray<_, u64> = typed_map!(self, PerCpuArray, "counters", "read the counters");
        let mut sums = [0u64; abi::COUNTERS];
        for (index, sum) in sums.iter_mut().enumerate() {
            let values = map.get(&(index as u32), 0).map_err(failed("read the counters"))?;
            *sum = values.iter().sum();
        }
        let [
            steered,
            left_alone,
            denied,
            failed,
            untracked,
            lost_events,
            ended,
            redirected,
            not_redirected,
            moved,
            forwarded,
            overflowed,
            fast_packets,
        ] = sums;
        Ok(SteeringCounters {
            steered,
            left_alone,
            denied,
            failed,
            untracked,
            lost_events,
            ended,
            redirected,
            not_redirected,
            moved,
            forwarded,
            overflowed,
            fast_packets,
        })
    }

    fn steers_host(&self) -> bool {
        self.unsteered.is_none()
    }

    fn warnings(&self) -> Vec<String> {
        let missing = Family::ALL.map(|family| (family, self.missing_prefixes[family as usize]));
        let missing = missing.into_iter().filter(|(_, count)| *count > 0);
        let unsteered = self.unsteered.iter().map(|reason| {
            format!(
                "Braid serves only the clients of the gateway; flows of this machine's own programs follow the system's routes: {reason}"
            )
        });
        let steers = self.unsteered.is_none();
        let unmoved = self
            .mover
            .as_ref()
            .err()
            .filter(|_| steers)
            .map(|reason| format!("connects that receive no answer stay on their link: {reason}"));
        let uncounted = self.uncounted.iter().map(|reason| format!("UDP traffic is steered but not counted: {reason}"));
        let unshaped =
            self.shaper.as_ref().err().filter(|_| steers).map(|reason| format!("weight, rate and guarantee need a relay here: {reason}"));
        let untracked = self.accepted.refused().filter(|_| !self.openers.is_empty()).map(|reason| {
            format!("connections that other hosts open to this machine stay on their link: {}", reason.lines().next().unwrap_or_default())
        });
        let stuck = [
            (self.accepted.is_stuck(), "list connections that other hosts opened"),
            (self.mover.as_ref().is_ok_and(iterate::SocketIterator::is_stuck), "move connects that receive no answer"),
            (self.shaper.as_ref().is_ok_and(shape::Shaper::is_stuck), "set the rates of flows"),
            (self.departer.as_ref().is_ok_and(iterate::SocketIterator::is_stuck), "move running flows"),
        ];
        let stuck = stuck.into_iter().filter(|(stuck, _)| *stuck).map(|(_, action)| {
            format!("cannot {action}: a program keeps a TCP socket locked (its system call does not return); Braid continues when it ends")
        });
        missing
            .map(|(family, count)| {
                let room = prefixes::MAX_PREFIXES;
                format!("{count} {family} prefixes exceed the limit of {room}: Braid does not steer their destinations")
            })
            .chain(unsteered)
            .chain(uncounted)
            .chain(unmoved)
            .chain(untracked)
            .chain(unshaped)
            .chain(stuck)
            .collect()
    }

    fn events(&mut self, limit: usize) -> Vec<SteeringEvent> {
        let mut events: Vec<_> =
            self.heal.ended.drain(..limit.min(self.heal.ended.len())).map(|row| SteeringEvent::Ended(Box::new(row))).collect();
        let mut is_asked_to_count = false;
        while events.len() < limit {
            let Some(item) = self.events.next() else { break };
            let Some(event) = abi::read::<abi::Event>(&item) else { continue };
            drop(item);
            is_asked_to_count |= event.kind == abi::event::COUNT;
            events.extend(convert::event(&event));
        }
        // Attach once for all requests, because attaching takes a while and may fail each time.
        if is_asked_to_count {
            self.count_datagrams();
        }
        events
    }
}

impl BpfSteering {
    fn install_prefixes(&mut self, family: Family, changes: &[(IpNet, Option<bool>)]) -> Result<(), SteeringError> {
        const ACTION: &str = "update the steerable prefixes in the kernel";
        match family {
            Family::V4 => {
                let mut trie: LpmTrie<_, u32, u8> = typed_map!(self, LpmTrie, "prefixes4", "update the steerable prefixes in the kernel");
                for (net, change) in changes {
                    let IpNet::V4(net) = net else { continue };
                    let key = Key::new(u32::from(net.prefix_len()), u32::from(net.network()).to_be());
                    change_prefix(&mut trie, &key, *change).map_err(failed(ACTION))?;
                }
            }
            Family::V6 => {
                let mut trie: LpmTrie<_, [u32; 4], u8> =
                    typed_map!(self, LpmTrie, "prefixes6", "update the steerable prefixes in the kernel");
                for (net, change) in changes {
                    let IpNet::V6(net) = net else { continue };
                    let key = Key::new(u32::from(net.prefix_len()), mapped(IpAddr::V6(net.network())));
                    change_prefix(&mut trie, &key, *change).map_err(failed(ACTION))?;
                }
            }
        }
        Ok(())
    }

    /// Clears a prefix map whose contents are unknown. Removes the shortest prefixes first, so that a default prefix that steers goes first.
    fn clear_prefixes(&mut self, family: Family) -> Result<(), SteeringError> {
        const ACTION: &str = "clear a prefix map";
        match family {
            Family::V4 => {
                let mut trie: LpmTrie<_, u32, u8> = typed_map!(self, LpmTrie, "prefixes4", "clear a prefix map");
                clear(&mut trie).map_err(failed(ACTION))
            }
            Family::V6 => {
                let mut trie: LpmTrie<_, [u32; 4], u8> = typed_map!(self, LpmTrie, "prefixes6", "clear a prefix map");
                clear(&mut trie).map_err(failed(ACTION))
            }
        }
    }

    /// Resets the signs of a slot that another link takes over.
    fn reset_new_slots(&mut self, params: &SteerParams) -> Result<(), SteeringError> {
        const ACTION: &str = "assign a slot to a link";
        for slot in 0..MAX_LINKS {
            let (old, new) = (&self.params.links[slot], &params.links[slot]);
            let taken = new.as_ref().is_some_and(|new| old.as_ref().is_none_or(|old| old.index != new.index));
            if taken {
                typed_map!(self, Array, "signs", "assign a slot to a link")
                    .set(slot as u32, abi::Signs::default(), 0)
                    .map_err(failed(ACTION))?;
            }
        }
        Ok(())
    }

    /// Assigns numbers to the rules' executables for `bank`. The numbers of the other bank, which is in force, do not change.
    fn set_executables(&mut self, bank: u32, ids: &convert::ExeIds) -> Result<(), SteeringError> {
        const ACTION: &str = "update the rules' executables in the kernel";
        let (mine, other) = (bank as usize & 1, (bank as usize & 1) ^ 1);
        let mut map: HashMap<_, abi::ExeKey, abi::Exe> =
            typed_map!(self, HashMap, "executables", "update the rules' executables in the kernel");
        let mut known: BTreeMap<_, _> = map.iter().filter_map(Result::ok).map(|(key, exe)| ((key.device, key.inode), exe)).collect();
        for (key, id) in ids.entries() {
            let mut exe = known.remove(&(key.device, key.inode)).unwrap_or_default();
            exe.id[mine] = id;
            map.insert(key, exe, 0).map_err(failed(ACTION))?;
        }
        for ((device, inode), mut exe) in known {
            let key = abi::ExeKey { inode, device, pad: 0 };
            exe.id[mine] = 0;
            if exe.id[other] == 0 { map.remove(&key) } else { map.insert(key, exe, 0) }.map_err(failed(ACTION))?;
        }
        Ok(())
    }
}

fn change_prefix<K: aya::Pod>(trie: &mut LpmTrie<&mut MapData, K, u8>, key: &Key<K>, change: Option<bool>) -> Result<(), MapError> {
    match change {
        Some(steer) => trie.insert(key, if steer { VERDICT_STEER } else { VERDICT_LEAVE }, 0),
        None => trie.remove(key),
    }
}

fn clear<K: aya::Pod>(trie: &mut LpmTrie<&mut MapData, K, u8>) -> Result<(), MapError> {
    let mut keys: Vec<_> = trie.keys().filter_map(Result::ok).collect();
    keys.sort_by_key(Key::prefix_len);
    keys.iter().try_for_each(|key| trie.remove(key))
}

/// Takes a map out of the loaded object.
fn take_map(ebpf: &mut aya::Ebpf, name: &'static str) -> Result<Map, load::LoadError> {
    ebpf.take_map(name).ok_or(load::LoadError::Object { reason: format!("the programs have no map {name}") })
}
