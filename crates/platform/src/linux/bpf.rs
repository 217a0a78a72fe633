//! Steering by BPF: loads the programs of `ebpf/`, attaches them to the root of the cgroup hierarchy and speaks with them.
//!
//! Programs and maps are held by file descriptors only: when the process ends, however it ends, they are gone.

mod convert;
mod counting;
mod heal;
pub mod load;
mod prefixes;
pub mod redirect;
pub mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray, RingBuf};
use braid_decide::connection::LoadTable;
use braid_model::{ByteCount, Class, Family, LinkSet, MAX_LINKS, Time};
use ipnet::IpNet;

use super::sys::{abi, bpf as sys};
use braid_control::steering::{
    AppId, BondedLoads, DemandEstimate, Dump, FlowRow, Signs, SteerParams, Steering, SteeringCounters, SteeringError, SteeringEvent,
};
use convert::{app_key, flow_row, mapped, process_name};
use counting::{Counting, Step};

/// `BPF_F_LOCK`: look an element up, or change it, under its spin lock.
const LOCKED: u64 = 4;
/// Unconnected datagrams end a flow when none has been seen for this long.
const DATAGRAM_IDLE: std::time::Duration = std::time::Duration::from_secs(30);
/// The most flows of unconnected datagrams there are.
const DATAGRAMS: usize = 16_384;
/// No program runs for longer than this, not even one that is preempted on a busy machine.
const LONGEST_RUN: std::time::Duration = std::time::Duration::from_secs(5);
const VERDICT_LEAVE: u8 = 0;
const VERDICT_STEER: u8 = 1;

/// The loaded and attached programs.
pub struct BpfSteering {
    /// Owns programs and the maps that are not taken out below.
    ebpf: aya::Ebpf,
    /// They dump the TCP flows, those in `overflow`, and those of connected UDP sockets.
    iterators: Arc<[OwnedFd]>,
    /// Moves connects that nobody answers; or why it cannot.
    mover: Result<OwnedFd, String>,
    events: RingBuf<MapData>,
    params: SteerParams,
    bank: u32,
    /// When Braid last said that it is alive, in nanoseconds of the kernel's clock; 0: never.
    heartbeat: u64,
    /// Another number whenever an application's class changes; never 0.
    classes: u32,
    netns: u64,
    /// The process whose sockets are left alone.
    exempt: convert::Daemon,
    /// The attached programs; dropping one detaches it.
    attached: Vec<load::Attached>,
    /// The root of the cgroup hierarchy; none if the programs are attached to nothing.
    cgroup: Option<OwnedFd>,
    counting: counting::Counting,
    counters: load::Counters,
    /// Why datagrams are not counted, if they should be and are not.
    uncounted: Option<String>,
    /// What the prefix maps hold now, by family.
    prefixes: [Vec<(IpNet, bool)>; 2],
    /// How many prefixes found no room there, by family.
    missing_prefixes: [usize; 2],
    /// When the banks were switched last.
    switched: Option<Time>,
    /// What redirected sockets need is attached, or there are none, since nothing is attached.
    serves_redirected: bool,
    heal: heal::Heal,
    /// What bonded flows weigh.
    bonded_loads: BondedLoads,
    dumps: heal::Dumps,
}

/// What a dump through the sockets' flows found.
pub struct Dumped {
    loads: heal::Loads,
    rows: Vec<FlowRow>,
    /// It met UDP sockets, and counting was in this state when it began.
    datagrams: bool,
    counting: counting::Counting,
    /// Flows begun and flows ended when it began.
    began: u64,
    turn: heal::Turn,
}

/// Dumps the sockets' flows; the programs bring their reservations up to date as they go.
fn dump_sockets(iterators: &[OwnedFd], began: u64, turn: heal::Turn, counting: counting::Counting) -> Result<Dumped, SteeringError> {
    let fail = |error: std::io::Error| SteeringError { action: "list the flows", reason: error.to_string() };
    let mut bytes = Vec::new();
    for iterator in iterators {
        sys::start_iterator(iterator.as_fd()).map_err(fail)?.read_to_end(&mut bytes).map_err(fail)?;
    }
    let mut rows: Vec<abi::FlowRow> = bytes.chunks_exact(size_of::<abi::FlowRow>()).filter_map(abi::read).collect();
    let datagrams = rows.iter().any(|row| i32::from(row.flow.protocol) != libc::IPPROTO_TCP);
    rows.retain(|row| row.flow.flags & (abi::flow::PENDING | abi::flow::MARKER) == 0);
    let mut loads = heal::Loads::default();
    loads.add(&rows);
    Ok(Dumped { loads, rows: rows.iter().filter_map(flow_row).collect(), datagrams, counting, began, turn })
}

fn failed(action: &'static str) -> impl Fn(aya::maps::MapError) -> SteeringError {
    move |error| SteeringError { action, reason: detail(&error) }
}

/// An error with its causes, since aya keeps the system's word there.
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

/// Finds a map by name and gives it its type.
macro_rules! typed_map {
    ($self:ident, $kind:ident, $name:literal, $action:literal) => {
        $self
            .ebpf
            .map_mut($name)
            .ok_or(SteeringError { action: $action, reason: concat!("the programs have no map ", $name).to_owned() })
            .and_then(|map| $kind::try_from(map).map_err(failed($action)))?
    };
}

impl BpfSteering {
    /// Counts datagrams from now on, as if a UDP socket had asked.
    pub fn count_datagrams(&mut self) {
        self.count_if_possible(self.counting.wanted());
    }

    /// What cannot be done is shown as a warning, and tried again at the next dump: a flow whose bytes are not known is steered all the same.
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

    /// Tells when events have come. Must be called inside a tokio runtime.
    pub fn ready(&self) -> std::io::Result<sys::Ready> {
        sys::Ready::watch(self.events.as_fd())
    }

    fn raw_load_table(&mut self) -> Result<abi::LoadTable, SteeringError> {
        typed_map!(self, Array, "load_table", "read the loads").get(&0, LOCKED).map_err(failed("read the loads"))
    }

    /// Flows begun and flows ended so far.
    fn churn(&mut self) -> Result<u64, SteeringError> {
        Ok(self.raw_load_table()?.commits.wrapping_add(self.counters()?.ended))
    }

    /// The flows of unconnected datagrams; those that fell idle end here, and are returned apart.
    fn dump_datagrams(&mut self, now: Time) -> Result<(Vec<abi::FlowRow>, Vec<abi::FlowRow>), SteeringError> {
        let mut map: HashMap<_, abi::DatagramKey, abi::Flow> = typed_map!(self, HashMap, "datagrams", "list the datagram flows");
        // Where entries are pushed out meanwhile, the kernel begins anew: no more are read than there may be, and each counts once.
        let entries: BTreeMap<_, _> = map
            .iter()
            .take(DATAGRAMS)
            .filter_map(Result::ok)
            .filter(|(_, flow)| flow.started != 0)
            .map(|(key, flow)| ((key.socket, key.remote, key.port), (key, flow)))
            .collect();
        let (mut living, mut idle) = (Vec::new(), Vec::new());
        for (key, flow) in entries.into_values() {
            let row = abi::FlowRow { flow, rx: flow.rx, tx: flow.tx, read_at: now.as_nanos(), ..Default::default() };
            if now.since(Time::from_nanos(flow.last)) < DATAGRAM_IDLE {
                living.push(row);
            } else if map.remove(&key).is_ok() {
                idle.push(row);
            }
        }
        Ok((living, idle))
    }

    /// Tells the programs whether Braid is alive, and what is in force.
    fn switch(&mut self) -> Result<(), SteeringError> {
        let (bank, classes, counting) = (self.bank, self.classes, self.counting.flag());
        let control = abi::Control { heartbeat: self.heartbeat, bank, classes, counting, ..Default::default() };
        typed_map!(self, Array, "control", "say that Braid is alive").set(0, control, 0).map_err(failed("say that Braid is alive"))
    }

    /// What the kernel does when a socket is closed, for flows that it does not see end: bytes received and sent.
    fn learn_step(&mut self, key: abi::DemandKey, [rx, tx]: [u64; 2], updated: u64) -> Result<(), SteeringError> {
        if rx + tx == 0 {
            return Ok(());
        }
        let mut map: HashMap<_, abi::DemandKey, abi::Demand> = typed_map!(self, HashMap, "demands", "learn from a flow");
        let step = |estimate: u64, sample: u64| estimate - (estimate >> 3) + (sample >> 3);
        let next = match map.get(&key, 0) {
            Ok(known) => {
                abi::Demand { down: step(known.down, rx), up: step(known.up, tx), updated, count: known.count.saturating_add(1), ..known }
            }
            Err(_) => abi::Demand { down: rx, up: tx, updated, count: 1, ..Default::default() },
        };
        map.insert(key, next, 0).map_err(failed("learn from a flow"))
    }
}

/// Makes a map hold these hosts and no others; what stays is not touched meanwhile.
fn keep_hosts<'a>(
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
        const ACTION: &str = "put a new policy in force";
        if params.rules.len() > abi::MAX_RULES {
            let reason = format!("{} rules; the kernel's side looks at {} at most", params.rules.len(), abi::MAX_RULES);
            return Err(SteeringError { action: ACTION, reason });
        }
        let noted = if params.redirects() { self.serve_redirected() } else { Ok(()) };
        // All else counts all the same.
        let undirected = noted.is_err().then(|| params.without_redirection());
        let params = undirected.as_ref().unwrap_or(params);
        let bank = self.bank ^ 1;
        if self.switched.is_some_and(|switched| sys::now().since(switched) < LONGEST_RUN) {
            // A program that began before the last turn may still read the bank that is written now.
            sys::wait_for_programs();
        }
        let mut executables = convert::ExeIds::default();
        let rules: Vec<_> = params.rules.iter().map(|rule| convert::rule(rule, &mut executables)).collect();
        self.reset_new_slots(params)?;
        self.set_executables(bank, &executables)?;
        let mut places = typed_map!(self, Array, "rules", "put a new policy in force");
        for (index, rule) in rules.into_iter().enumerate() {
            places.set(bank * abi::MAX_RULES as u32 + index as u32, rule, 0).map_err(failed(ACTION))?;
        }
        let raw = convert::params(params, self.netns, self.exempt);
        typed_map!(self, Array, "params", "put a new policy in force").set(bank, raw, 0).map_err(failed(ACTION))?;
        self.bank = bank;
        self.switched = Some(sys::now());
        self.params = params.clone();
        self.heartbeat(sys::now())?;
        noted
    }

    fn set_prefixes(&mut self, family: Family, map: &[(IpNet, bool)]) -> Result<(), SteeringError> {
        let (wanted, missing) = prefixes::fit(map, prefixes::ROOM);
        self.missing_prefixes[family as usize] = missing;
        let had = std::mem::take(&mut self.prefixes[family as usize]);
        let installed = self.install_prefixes(family, &prefixes::changes(&had, &wanted, prefixes::ROOM));
        if installed.is_ok() {
            self.prefixes[family as usize] = wanted;
        } else {
            // Who knows what it holds now: nothing is steered by it until the next try puts everything in place.
            self.clear_prefixes(family)?;
        }
        installed
    }

    fn set_resolvers(&mut self, resolvers: &[(IpAddr, LinkSet)]) -> Result<(), SteeringError> {
        const ACTION: &str = "tell the kernel the links' resolvers";
        let mut map: HashMap<_, abi::Address, u32> = typed_map!(self, HashMap, "resolvers", "tell the kernel the links' resolvers");
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
        const ACTION: &str = "tell the kernel which hosts run Braid";
        if !servers.is_empty() {
            self.serve_redirected()?;
        }
        let mut map: HashMap<_, abi::DatagramKey, u32> = typed_map!(self, HashMap, "closed", "tell the kernel which hosts run Braid");
        let wanted: BTreeSet<_> = closed.iter().take(abi::MAX_SERVERS).map(|(host, port)| (mapped(*host), u32::from(*port))).collect();
        let had: BTreeSet<_> = map.keys().filter_map(Result::ok).map(|key| (key.remote, key.port)).collect();
        let key = |(remote, port): &([u32; 4], u32)| abi::DatagramKey { remote: *remote, port: *port, ..Default::default() };
        for gone in had.difference(&wanted) {
            map.remove(&key(gone)).map_err(failed(ACTION))?;
        }
        for new in wanted.difference(&had) {
            map.insert(key(new), 1, 0).map_err(failed(ACTION))?;
        }
        let mut map: HashMap<_, abi::Address, u32> = typed_map!(self, HashMap, "servers", "tell the kernel which hosts run Braid");
        keep_hosts(&mut map, servers.iter().take(abi::MAX_SERVERS), ACTION)
    }

    fn set_refused(&mut self, refused: &[IpAddr]) -> Result<(), SteeringError> {
        const ACTION: &str = "tell the kernel what relays do not open";
        let mut map: HashMap<_, abi::Address, u32> = typed_map!(self, HashMap, "bypass", "tell the kernel what relays do not open");
        keep_hosts(&mut map, refused.iter().take(abi::MAX_REFUSED), ACTION)
    }

    fn set_names(&mut self, names: &[(&str, Class)]) -> Result<(), SteeringError> {
        let mut map: HashMap<_, abi::ProcessName, abi::App> = typed_map!(self, HashMap, "names", "tell the kernel the programs' classes");
        for (name, class) in names {
            let key = abi::ProcessName { text: process_name(name) };
            let app = abi::App { class: *class as u8, ..Default::default() };
            map.insert(key, app, 0).map_err(failed("tell the kernel the programs' classes"))?;
        }
        Ok(())
    }

    fn set_class(&mut self, app: &AppId, class: Class) -> Result<(), SteeringError> {
        let mut map: HashMap<_, abi::AppKey, abi::App> = typed_map!(self, HashMap, "apps", "set an application's class");
        let value = abi::App { class: class as u8, ..Default::default() };
        map.insert(app_key(app), value, 0).map_err(failed("set an application's class"))?;
        // What the programs keep beside what was learnt is out of date.
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
        let map: HashMap<_, abi::DemandKey, abi::Demand> = typed_map!(self, HashMap, "demands", "read what was learnt");
        Ok(map.iter().filter_map(Result::ok).map(|(key, demand)| convert::estimate(&key, &demand)).collect())
    }

    fn begin_dump(&mut self, _now: Time) -> Result<Dump<Dumped>, SteeringError> {
        let (iterators, began, turn, counting) = (self.iterators.clone(), self.churn()?, self.dumps.begin(), self.counting);
        Ok(Box::new(move || dump_sockets(&iterators, began, turn, counting)))
    }

    fn end_dump(&mut self, now: Time, dumped: Dumped) -> Result<Vec<FlowRow>, SteeringError> {
        let Dumped { mut loads, mut rows, datagrams, counting, began, turn } = dumped;
        self.count_if_possible(self.counting.dumped(counting, datagrams, now));
        let (datagrams, idle) = self.dump_datagrams(now)?;
        loads.add(&datagrams);
        loads.add_bonded(&self.bonded_loads);
        rows.extend(datagrams.iter().filter_map(flow_row));
        for row in &idle {
            let key = abi::DemandKey { app: row.flow.app, port: row.flow.port, ..Default::default() };
            self.learn_step(key, [row.rx, row.tx], row.read_at)?;
        }
        let churn = self.churn()?.wrapping_sub(began);
        let after = self.raw_load_table()?;
        let corrections = if self.dumps.undisturbed(&turn) { self.heal.corrections(&loads, &after, churn) } else { Vec::new() };
        if !corrections.is_empty() {
            let mut map: Array<_, abi::LinkLoad> = typed_map!(self, Array, "corrections", "heal the loads");
            for (slot, link_load) in corrections {
                map.set(slot, link_load, 0).map_err(failed("heal the loads"))?;
            }
        }
        self.heal.ended.extend(idle.iter().filter_map(flow_row));
        Ok(rows)
    }

    fn move_connects(&mut self) -> Result<(), SteeringError> {
        let Ok(mover) = &self.mover else { return Ok(()) };
        let fail = |error: std::io::Error| SteeringError { action: "move connects that nobody answers", reason: error.to_string() };
        // Reading runs the program; it writes nothing.
        sys::start_iterator(mover.as_fd()).map_err(fail)?.read_to_end(&mut Vec::new()).map_err(fail)?;
        Ok(())
    }

    fn set_bonded_loads(&mut self, loads: &BondedLoads) -> Result<(), SteeringError> {
        self.bonded_loads = *loads;
        Ok(())
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
        let [steered, left_alone, denied, failed, untracked, lost_events, ended, redirected, not_redirected, moved] = sums;
        Ok(SteeringCounters { steered, left_alone, denied, failed, untracked, lost_events, ended, redirected, not_redirected, moved })
    }

    fn warnings(&self) -> Vec<String> {
        let missing = Family::ALL.map(|family| (family, self.missing_prefixes[family as usize]));
        let missing = missing.into_iter().filter(|(_, count)| *count > 0);
        let unmoved = self.mover.as_ref().err().map(|reason| format!("connects that nobody answers stay on their link: {reason}"));
        let uncounted = self.uncounted.iter().map(|reason| format!("UDP traffic is steered but not counted: {reason}"));
        missing
            .map(|(family, count)| {
                let room = prefixes::ROOM;
                format!("{count} {family} prefixes more than the {room} the kernel's side holds: what they cover is left alone")
            })
            .chain(uncounted)
            .chain(unmoved)
            .collect()
    }

    fn events(&mut self, limit: usize) -> Vec<SteeringEvent> {
        let mut events: Vec<_> = self.heal.ended.drain(..limit.min(self.heal.ended.len())).map(SteeringEvent::Ended).collect();
        let mut is_asked_to_count = false;
        while events.len() < limit {
            let Some(item) = self.events.next() else { break };
            let Some(event) = abi::read::<abi::Event>(&item) else { continue };
            drop(item);
            is_asked_to_count |= event.kind == abi::event::COUNT;
            events.extend(convert::event(&event));
        }
        // Once for all that ask, since attaching takes a while and may fail each time.
        if is_asked_to_count {
            self.count_datagrams();
        }
        events
    }
}

impl BpfSteering {
    fn install_prefixes(&mut self, family: Family, changes: &[(IpNet, Option<bool>)]) -> Result<(), SteeringError> {
        const ACTION: &str = "tell the kernel what may be steered";
        match family {
            Family::V4 => {
                let mut trie: LpmTrie<_, u32, u8> = typed_map!(self, LpmTrie, "prefixes4", "tell the kernel what may be steered");
                for (net, change) in changes {
                    let IpNet::V4(net) = net else { continue };
                    let key = Key::new(u32::from(net.prefix_len()), u32::from(net.network()).to_be());
                    change_prefix(&mut trie, &key, *change).map_err(failed(ACTION))?;
                }
            }
            Family::V6 => {
                let mut trie: LpmTrie<_, [u32; 4], u8> = typed_map!(self, LpmTrie, "prefixes6", "tell the kernel what may be steered");
                for (net, change) in changes {
                    let IpNet::V6(net) = net else { continue };
                    let key = Key::new(u32::from(net.prefix_len()), mapped(IpAddr::V6(net.network())));
                    change_prefix(&mut trie, &key, *change).map_err(failed(ACTION))?;
                }
            }
        }
        Ok(())
    }

    /// Takes everything out of a prefix map, whatever it holds: what steers by default first.
    fn clear_prefixes(&mut self, family: Family) -> Result<(), SteeringError> {
        const ACTION: &str = "leave everything alone";
        match family {
            Family::V4 => {
                let mut trie: LpmTrie<_, u32, u8> = typed_map!(self, LpmTrie, "prefixes4", "leave everything alone");
                clear(&mut trie).map_err(failed(ACTION))
            }
            Family::V6 => {
                let mut trie: LpmTrie<_, [u32; 4], u8> = typed_map!(self, LpmTrie, "prefixes6", "leave everything alone");
                clear(&mut trie).map_err(failed(ACTION))
            }
        }
    }

    /// A slot that another link takes over starts with nothing on it.
    fn reset_new_slots(&mut self, params: &SteerParams) -> Result<(), SteeringError> {
        const ACTION: &str = "give a link its slot";
        for slot in 0..MAX_LINKS {
            let (old, new) = (&self.params.links[slot], &params.links[slot]);
            let taken = new.as_ref().is_some_and(|new| old.as_ref().is_none_or(|old| old.index != new.index));
            if taken {
                typed_map!(self, Array, "signs", "give a link its slot")
                    .set(slot as u32, abi::Signs::default(), 0)
                    .map_err(failed(ACTION))?;
            }
        }
        Ok(())
    }

    /// Numbers the rules' executables for `bank`; the numbers of the other bank, which is in force, stay as they are.
    fn set_executables(&mut self, bank: u32, ids: &convert::ExeIds) -> Result<(), SteeringError> {
        const ACTION: &str = "tell the kernel the programs of the rules";
        let (mine, other) = (bank as usize & 1, (bank as usize & 1) ^ 1);
        let mut map: HashMap<_, abi::ExeKey, abi::Exe> =
            typed_map!(self, HashMap, "executables", "tell the kernel the programs of the rules");
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

fn change_prefix<K: aya::Pod>(
    trie: &mut LpmTrie<&mut MapData, K, u8>,
    key: &Key<K>,
    change: Option<bool>,
) -> Result<(), aya::maps::MapError> {
    match change {
        Some(steer) => trie.insert(key, if steer { VERDICT_STEER } else { VERDICT_LEAVE }, 0),
        None => trie.remove(key),
    }
}

fn clear<K: aya::Pod>(trie: &mut LpmTrie<&mut MapData, K, u8>) -> Result<(), aya::maps::MapError> {
    let mut keys: Vec<_> = trie.keys().filter_map(Result::ok).collect();
    keys.sort_by_key(Key::prefix_len);
    keys.iter().try_for_each(|key| trie.remove(key))
}

/// Takes a map out of the loaded object.
fn take_map(ebpf: &mut aya::Ebpf, name: &'static str) -> Result<Map, load::LoadError> {
    ebpf.take_map(name).ok_or(load::LoadError::Object { reason: format!("the programs have no map {name}") })
}
