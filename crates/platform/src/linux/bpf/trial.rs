//! Kernel parts for tests and benchmarks: the connection rule alone, the switch without a device, and a filter that does not belong to Braid. Braid
//! itself never uses them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use aya::maps::{Array, HashMap};
use aya::programs::{CgroupAttachMode, CgroupSkbAttachType, Program};
use aya::{Ebpf, EbpfLoader};
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{Family, FlowId, LinkIndex, LinkSet, PerFamily, Protocol};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::load::LoadError;
use super::{BpfSteering, convert, detail, failed};
use crate::linux::sys::{abi, bpf as sys};
use braid_control::steering::{ClientRow, Ends, FastFlow, Rewrite, Shape, ShapedFlow, SteerParams, Steering, SteeringError};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/trial.bpf.o"));
const ACTION: &str = "run a trial of the connection rule";

/// The loaded test program `braid_trial`.
#[derive(Debug)]
pub struct KernelRule(Ebpf);

/// An egress filter of a cgroup that does not belong to Braid and lets all packets pass. Dropping it removes it.
#[derive(Debug)]
pub struct ForeignFilter {
    _ebpf: Ebpf,
}

impl ForeignFilter {
    /// Attaches the filter to the cgroup with this directory. Needs CAP_BPF and CAP_NET_ADMIN.
    pub fn attach(cgroup: impl AsFd) -> Result<Self, LoadError> {
        let refused = |error: &dyn std::error::Error| LoadError::Object { reason: detail(error) };
        let mut ebpf = EbpfLoader::new().load(OBJECT).map_err(|error| refused(&error))?;
        let Some(Program::CgroupSkb(program)) = ebpf.program_mut("foreign_filter") else {
            return Err(LoadError::Object { reason: "the test object has no program foreign_filter".to_owned() });
        };
        program.load().map_err(|error| refused(&error))?;
        program.attach(cgroup, CgroupSkbAttachType::Egress, CgroupAttachMode::default()).map_err(|error| refused(&error))?;
        Ok(Self { _ebpf: ebpf })
    }
}

impl KernelRule {
    /// Loads the program. Needs CAP_BPF and CAP_PERFMON.
    pub fn load() -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Object { reason };
        let mut ebpf = EbpfLoader::new().load(OBJECT).map_err(|error| refused(detail(&error)))?;
        let program = match ebpf.program_mut("braid_trial") {
            Some(Program::SchedClassifier(program)) => program,
            _ => return Err(refused("the test object has no program braid_trial".to_owned())),
        };
        program.load().map_err(|error| refused(detail(&error)))?;
        Ok(Self(ebpf))
    }

    /// Makes one decision on `trial` with these parameters, and returns the trial with its result.
    pub fn decide(&mut self, params: abi::Params, trial: abi::Trial) -> Result<abi::Trial, SteeringError> {
        self.array("params")?.set(0, params, 0).map_err(failed(ACTION))?;
        self.array("trials")?.set(0, trial, 0).map_err(failed(ACTION))?;
        self.run(1)?;
        self.array("trials")?.get(&0, 0).map_err(failed(ACTION))
    }

    /// Mean time of one decision among `allowed` with the parameters of the last [`decide`](Self::decide), over `repeat` runs, in nanoseconds.
    pub fn time(&mut self, repeat: u32, allowed: LinkSet) -> Result<u32, SteeringError> {
        let trial = abi::Trial { allowed: convert::mask(allowed), demand: 1_000_000, ..Default::default() };
        self.array("trials")?.set(0, trial, 0).map_err(failed(ACTION))?;
        self.run(repeat)
    }

    fn run(&mut self, repeat: u32) -> Result<u32, SteeringError> {
        let program = self.0.program("braid_trial").and_then(|program| program.fd().ok());
        let program = program.ok_or_else(|| SteeringError { action: ACTION, reason: "the program is not loaded".to_owned() })?;
        sys::test_run(program.as_fd(), repeat).map_err(|error| SteeringError { action: ACTION, reason: error.to_string() })
    }

    fn array<V: aya::Pod>(&mut self, name: &'static str) -> Result<Array<&mut aya::maps::MapData, V>, SteeringError> {
        let map = self.0.map_mut(name).ok_or(SteeringError { action: ACTION, reason: format!("the test object has no map {name}") })?;
        Array::try_from(map).map_err(failed(ACTION))
    }
}

/// The programs of the switch (`ebpf/switch.bpf.c`), which act at no device: each run gives one of them a packet. A daemon seems to live, and all
/// destinations are steered.
pub struct KernelSwitch {
    steering: BpfSteering,
    /// Whether this kernel can keep the sum of a test packet's bytes.
    can_sum: bool,
}

/// What a program of the switch made of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    /// What the program returned, for tc.
    pub verdict: i32,
    /// The packet's firewall mark.
    pub mark: u32,
    /// The Ethernet frame.
    pub frame: Vec<u8>,
}

/// A forwarded flow in the switch's table, as the tests need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableEntry {
    /// The flow's number, as the daemon knows it.
    pub id: FlowId,
    /// Number of the transport protocol.
    pub protocol: u8,
    /// The client, and its port; for an echo request its identifier. IPv4-mapped addresses are IPv4.
    pub client: (IpAddr, u16),
    /// The other end.
    pub remote: (IpAddr, u16),
    /// Family of its packets; `None`: the entry is not complete.
    pub family: Option<Family>,
    /// Bytes from the client, with all headers.
    pub tx: u64,
    /// Bytes to the client.
    pub rx: u64,
}

/// A flow in the fast path, whose devices are both the loopback device.
#[derive(Debug, Clone)]
pub struct FastEntry {
    /// The flow's number, as in the table of forwarded flows.
    pub id: FlowId,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The client's address and port on the LAN.
    pub client: SocketAddr,
    /// The client's address and port on the link.
    pub outer: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// Hop limit and traffic class of the packets that the kernel has forwarded; `None`: no packet has confirmed the flow.
    pub seen: Option<(u8, u8)>,
    /// Ethernet addresses of packets that leave.
    pub hardware: [u8; 12],
}

const SWITCH: &str = "run the switch on a packet";

impl KernelSwitch {
    /// Loads the programs and applies these parameters. Needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN.
    pub fn load(params: &SteerParams) -> Result<Self, LoadError> {
        let refused = |error: SteeringError| LoadError::Object { reason: error.to_string() };
        let mut steering = BpfSteering::switch_alone()?;
        steering.set_params(params).map_err(refused)?;
        let everything = PerFamily { v4: IpNet::V4(Ipv4Net::default()), v6: IpNet::V6(Ipv6Net::default()) };
        steering.set_prefixes(Family::V4, &[(everything.v4, true)]).map_err(refused)?;
        steering.set_prefixes(Family::V6, &[(everything.v6, true)]).map_err(refused)?;
        // So that it does not expire on a busy machine.
        steering.heartbeat(sys::now() + Duration::from_secs(3600)).map_err(refused)?;
        let mut switch = Self { steering, can_sum: true };
        switch.can_sum = switch.pass("braid_inside", &[0; 64], 0, 0).is_ok();
        Ok(switch)
    }

    /// Sets the virtual interface.
    pub fn set_own(&mut self, own: Option<&VirtualDevice>) -> Result<(), SteeringError> {
        self.steering.set_own_addresses(own)
    }

    /// Runs this program on an Ethernet frame with this firewall mark; `segment` is as in [`sys::TestPacket`]. Where the kernel can, it also checks that
    /// the sum of all bytes, which network cards supply, is still right.
    ///
    /// # Errors
    /// The kernel refuses the packet, or the sum is wrong ("Bad message").
    pub fn pass(&mut self, program: &str, frame: &[u8], mark: u32, segment: u16) -> Result<Passed, SteeringError> {
        let loaded = self.steering.ebpf.program(program).and_then(|program| program.fd().ok());
        let loaded = loaded.ok_or_else(|| SteeringError { action: SWITCH, reason: format!("the program {program} is not loaded") })?;
        let packet = sys::TestPacket { frame, mark, segment, summed: self.can_sum };
        let (verdict, mark, frame) = sys::test_packet(loaded.as_fd(), &packet)
            .map_err(|error| SteeringError { action: SWITCH, reason: format!("{program}: {error}") })?;
        Ok(Passed { verdict, mark, frame })
    }

    /// The table of forwarded flows.
    pub fn table(&mut self) -> Result<Vec<TableEntry>, SteeringError> {
        let map = self.forwarded()?;
        let entries = map.iter().map(|entry| entry.map(|(key, flow)| entry_of(&key, &flow)));
        entries.collect::<Result<_, _>>().map_err(failed(SWITCH))
    }

    /// The clients.
    pub fn clients(&mut self) -> Result<Vec<ClientRow>, SteeringError> {
        self.steering.clients()
    }

    /// Adds a flow to the table, as if a client had begun it.
    pub fn add(&mut self, entry: &TableEntry) -> Result<(), SteeringError> {
        let key = abi::ForwardKey {
            client: convert::mapped(entry.client.0),
            remote: convert::mapped(entry.remote.0),
            client_port: entry.client.1,
            remote_port: entry.remote.1,
            protocol: entry.protocol,
            pad: [0; 3],
        };
        let family = if entry.family == Some(Family::V6) { 6 } else { 4 };
        let flow = abi::Flow { id: entry.id.0, protocol: entry.protocol, family, tx: entry.tx, rx: entry.rx, ..Default::default() };
        self.forwarded()?.insert(key, flow, 0).map_err(failed(SWITCH))
    }

    /// Adds a flow to the fast path.
    pub fn enter(&mut self, entry: &FastEntry) -> Result<(), SteeringError> {
        let loopback = LinkIndex(1);
        let flow = FastFlow {
            protocol: entry.protocol,
            client: entry.client,
            tracked: entry.client,
            remote: entry.remote,
            lan: loopback,
            own: false,
            slot: 0,
            link: loopback,
            device: "lo".to_owned(),
            mtu: 65_536,
            source: entry.outer.ip(),
        };
        self.steering.put_fast(entry.id, flow, entry.outer, |fast| {
            for leg in &mut fast.legs {
                let now = sys::now().as_nanos();
                if let Some((hops, traffic_class)) = entry.seen {
                    (leg.hops, leg.traffic_class, leg.sampled, leg.confirmed) = (hops, traffic_class, now, now);
                }
                leg.hardware = entry.hardware;
            }
        })
    }

    /// Makes these the moved flows.
    pub fn set_rewrites(&mut self, rewrites: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError> {
        self.steering.set_rewrites(rewrites)
    }

    /// Removes all flows and clients.
    pub fn clear(&mut self) -> Result<(), SteeringError> {
        self.steering.enter_fast_path(&BTreeMap::new())?;
        let mut flows = self.forwarded()?;
        let keys: Vec<_> = flows.keys().filter_map(Result::ok).collect();
        keys.iter().try_for_each(|key| flows.remove(key)).map_err(failed(SWITCH))?;
        let mut clients: HashMap<_, abi::Address, abi::Client> = self.map("clients")?;
        let keys: Vec<_> = clients.keys().filter_map(Result::ok).collect();
        keys.iter().try_for_each(|key| clients.remove(key)).map_err(failed(SWITCH))
    }

    /// Makes these the limits of flows, and returns the flows' progress.
    pub fn set_windows(&mut self, shapes: &BTreeMap<FlowId, Shape>) -> Result<Vec<ShapedFlow>, SteeringError> {
        self.steering.set_windows(shapes).map(|step| step.flows)
    }

    fn forwarded(&mut self) -> Result<HashMap<&mut aya::maps::MapData, abi::ForwardKey, abi::Flow>, SteeringError> {
        self.map("forwarded")
    }

    fn map<K: aya::Pod, V: aya::Pod>(&mut self, name: &'static str) -> Result<HashMap<&mut aya::maps::MapData, K, V>, SteeringError> {
        let map = self.steering.ebpf.map_mut(name);
        let map = map.ok_or_else(|| SteeringError { action: SWITCH, reason: format!("the programs have no map {name}") })?;
        HashMap::try_from(map).map_err(failed(SWITCH))
    }
}

fn entry_of(key: &abi::ForwardKey, flow: &abi::Flow) -> TableEntry {
    TableEntry {
        id: FlowId(flow.id),
        protocol: key.protocol,
        client: (convert::unmapped(key.client), key.client_port),
        remote: (convert::unmapped(key.remote), key.remote_port),
        family: [(4, Family::V4), (6, Family::V6)].into_iter().find(|(number, _)| *number == flow.family).map(|(_, family)| family),
        tx: flow.tx,
        rx: flow.rx,
    }
}
