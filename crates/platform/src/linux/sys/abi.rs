//! The Rust side of the structures and limits in `ebpf/braid.h`, `adhoc.h`, `maps.h` and `trial.bpf.c`, which the daemon and its BPF programs exchange. A test
//! compares the sizes of those in `braid.h` and `adhoc.h` with C.

use braid_decide::adhoc::MAX_RADIOS;
use braid_model::MAX_LINKS;

/// Maximum number of redirected connections that wait for the daemon.
pub const MAX_ARRIVALS: usize = 4096;
/// Maximum number of hosts that run Braid, and of their services whose ports are closed.
pub const MAX_SERVERS: usize = 1024;
/// Maximum number of destinations that no relay accepts.
pub const MAX_REFUSED: usize = 512;
/// Maximum number of prefixes in the map of held destinations.
pub const MAX_HOLD: usize = 16_384;
/// Maximum number of flows whose rates are set at once.
pub const MAX_SHAPES: usize = 4096;
/// Maximum number of forwarded flows, where there is memory for so many.
pub const MAX_FORWARDED: usize = 131_072;
/// Number of places of TCP flows.
pub const CONNECTION_PLACES: usize = 4096;
/// Number of places that a run of their dump takes.
pub const DUMPED: usize = 512;
/// Maximum number of ids that it takes instead.
pub const DUMPED_IDS: usize = 256;
/// How long a direction of a flow in the fast path is confirmed, in nanoseconds.
pub const CONFIRMED_NS: u64 = 2_500_000_000;
/// Maximum number of policy rules.
pub const MAX_RULES: usize = 64;
/// `device` of an [`ExeKey`] that names a client of a LAN device instead of an executable.
pub const CLIENT_DEVICE: u32 = u32::MAX;
/// Value that means no link.
pub const NO_SLOT: u32 = u32::MAX;
/// Value that means "not set" in the one-byte class and affinity fields, and "no rule" in [`Flow::rule`].
pub const UNSET: u8 = 255;
/// `BRAID_RESET`.
pub const RESET: u32 = 1;
/// `BRAID_SYN`.
pub const SYN: u32 = 2;

macro_rules! abi {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct $name { $(pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: every field is an integer or an array or structure of integers, for which all zeroes is a value.
                unsafe { std::mem::zeroed() }
            }
        }

        // SAFETY: `repr(C)`, integers only, and no padding (the C side has explicit padding fields; a test compares the sizes of all that have some).
        unsafe impl aya::Pod for $name {}
    )*};
}

abi! {
    /// `struct braid_link_load`.
    LinkLoad { load: [u64; 2], tag: u64, flows: u32, pad: u32, }
    /// `struct braid_load_table` with its lock.
    LoadTable {
        lock: u32, removals: u32, added: u64,
        virtual_time: u64, winner: u32, pad2: u32, commits: u64, packets: [u64; 2], loads: [LinkLoad; MAX_LINKS],
    }
    /// `struct braid_slot`.
    Slot {
        ifindex: u32, rank: u32, name: [u8; 16], source4: u32, mark: u32, source6: [u32; 4],
        rate: [u64; 2], price: u64, step: u64,
    }
    /// `struct braid_params`.
    Params {
        netns: u64, target: [u64; 2], default_demand: u64, mode: u32, scheduler: u32, rules: u32, daemon: u32,
        usable: [u32; 2], backup: u32, affinity: u32, local4: u32, redirected_classes: u32, local6: [u32; 4], peer_direct: u32, processes: u32,
        confined: u32, cgroups: u32,
        slots: [Slot; MAX_LINKS],
    }
    /// `struct braid_shape`.
    Shape { pacing: u32, window: u32, client_window: u32, }
    /// `struct braid_echo`.
    Echo { at: u64, kind: u32, expected: u32, seen: u32, took: u32, }
    /// `struct braid_window`.
    Window { rx: u64, tx: u64, echo: [Echo; 2], handshake: u32, pad: u32, }
    /// `struct braid_control`.
    Control { heartbeat: u64, bank: u32, classes: u32, counting: u32, windows: u32, fast: u32, rewrites: u32, pressure: u32, pad: u32, }
    /// `struct braid_exe_key`.
    ExeKey { inode: u64, device: u32, pad: u32, }
    /// `struct braid_exe`.
    Exe { id: [u32; 2], }
    /// `struct braid_app_key`.
    AppKey { exe: ExeKey, name: [u8; 16], }
    /// `struct braid_demand_key`.
    DemandKey { app: AppKey, port: u16, pad: [u16; 3], }
    /// `struct braid_demand`.
    Demand { down: u64, up: u64, updated: u64, count: u64, classes: u32, class: u8, pad: [u8; 3], }
    /// `struct braid_app`.
    App { class: u8, learnt: u8, pad: [u8; 6], }
    /// `struct braid_rule`.
    Rule {
        conditions: u32, actions: u32, exe: u32, user: u32, cgroup: u64, cgroup_level: u32, port: u16, prefix_len: u8, class: u8,
        destination: [u32; 4], name: [u8; 16], links: u32, prefer: u32, affinity: u8, of_class: u8, mac: [u8; 6],
        client: [u32; 4], client_len: u8, protocol: u8, pad: [u8; 6],
    }
    /// `struct braid_flow`.
    Flow {
        id: u64, started: u64, demand: u64, reserved: u64, rx: u64, tx: u64, cgroup: u64, last: u64, app: AppKey,
        remote: [u32; 4], port: u16, protocol: u8, family: u8, slot: u32, ifindex: u32, process: u32, user: u32, flags: u32,
        direction: u8, class: u8, scheduler: u8, rule: u8, answered_or_tick: u32, allowed: u32, untried: u32, moves: u8, resent: u8,
        scale_or_local_port: [u8; 2], handshake_or_inode: u32,
    }
    /// `struct braid_flow_row`.
    FlowRow {
        flow: Flow, rx: u64, tx: u64, delivery_rate: u64, srtt_us: u32, rcv_rtt_us: u32, retransmissions: u32, segments_out: u32,
        state: u32, local_port: u32, local: [u32; 4], read_at: u64,
    }
    /// `struct connection` in `ebpf/maps.h`.
    Connection { flow: Flow, socket: u64, }
    /// `struct braid_redirection`.
    Redirection { port4: u16, port6: u16, datagrams4: u16, datagrams6: u16, packets: u16, pad: u16, clients: [u16; 2], client_datagrams: [u16; 2], }
    /// `struct braid_arrival`.
    Arrival {
        socket: u64, started: u64, released: u64, demand: u64, cgroup: u64, app: AppKey, remote: [u32; 4], process: u32, user: u32,
        source: u32, source_port: u16, port: u16, family: u8, class: u8, rule: u8, direction: u8, flags: u32,
    }
    /// `struct braid_share`.
    Share { arrivals: u32, exchanges: u32, }
    /// `struct braid_datagram_key`.
    DatagramKey { socket: u64, remote: [u32; 4], port: u32, pad: u32, }
    /// `struct braid_kept`.
    Kept { source: [u32; 4], }
    /// `struct braid_forward_key`.
    ForwardKey { client: [u32; 4], remote: [u32; 4], client_port: u16, remote_port: u16, protocol: u8, pad: [u8; 3], }
    /// `struct braid_rewrite`.
    Rewrite { to: ForwardKey, device: u32, mark: u32, arrives: u32, from: u32, follows: u32, refused: u32, sent: u32, received: u32, unacknowledged: u32,
        expected: u32, window: u32, doublings: u32, passes: u32, bare: u32, seen: u64, }
    /// `struct braid_late`.
    Late { heartbeat: u64, device: u32, pad: u32, }
    /// `struct braid_client`.
    Client { last: u64, flows: u32, device: u32, mac: [u8; 6], pad: [u8; 2], }
    /// `struct braid_own_address`.
    OwnAddress { inside: [u32; 4], outside: [u32; 4], }
    /// `struct braid_leg`.
    Leg {
        address: [u32; 4], from: u32, to: u32, mark: u32, port: u16, hops: u8, traffic_class: u8, sampled: u64, confirmed: u64, priority: u32,
        hardware: [u8; 12],
    }
    /// `struct braid_fast`.
    Fast { id: u64, over: u32, own: u32, legs: [Leg; 2], }
    /// `struct braid_mac`.
    MacKey { byte: [u8; 6], pad: [u8; 2], }
    /// `struct braid_adhoc`.
    Adhoc { until: u64, device: u32, radios: u32, mac: MacKey, served: u32, merges: u32, newer: u32, pad: u32, }
    /// `struct braid_arrivals`.
    Arrivals { passed: u64, behind: u32, pad: u32, }
    /// `struct braid_radio`.
    Radio { device: u32, flags: u32, mac: MacKey, }
    /// `struct braid_plan`.
    Plan { share: [u32; MAX_RADIOS], at: [MacKey; MAX_RADIOS], by_frame: u32, numbered: u32, }
    /// `struct numbers` of `ebpf/adhoc.bpf.c`.
    Numbers { lock: u32, salt: u16, next: [[u16; 32]; 8], pad: u16, }
    /// `struct braid_pair_key`.
    PairKey { mac: [u8; 6], radio: u16, }
    /// `struct braid_pair`.
    Pair { heard: u64, sent: u64, rtt: u64, samples: u32, pad: u32, }
    /// `struct braid_event`.
    Event { kind: u32, detail: u32, row: FlowRow, }
    /// `struct braid_signs`.
    Signs {
        answered: [u64; 2], answered_at: [u64; 2], remote4: u32, port4: u16, port6: u16, remote6: [u32; 4], timeouts: [u64; 2],
    }
    /// `struct trial` of the test program.
    Trial {
        load_table: LoadTable, allowed: u32, direction: u32, demand: u64, winner: u32, denied: u32, actions: u32, links: u32, prefer: u32, pad: u32,
    }
    /// An IPv6 or IPv4-mapped address in network order.
    Address { word: [u32; 4], }
    /// A process name, padded with zeroes.
    ProcessName { text: [u8; 16], }
}

/// Conditions and actions of a [`Rule`].
#[allow(missing_docs)]
pub mod rule {
    pub const IF_EXE: u32 = 1;
    pub const IF_NAME: u32 = 2;
    pub const IF_PORT: u32 = 4;
    pub const IF_DESTINATION: u32 = 8;
    pub const IF_CGROUP: u32 = 16;
    pub const IF_USER: u32 = 32;
    pub const IF_CLASS: u32 = 128;
    pub const IF_CLIENT: u32 = 256;
    pub const IF_MAC: u32 = 512;
    pub const IF_PROTOCOL: u32 = 1024;
    pub const NEVER: u32 = 64;

    pub const DO_EXCLUDE: u32 = 1;
    pub const DO_LINKS: u32 = 2;
    pub const DO_PREFER: u32 = 4;
    pub const DO_REDIRECT: u32 = 8;
    pub const DO_DIRECT: u32 = 16;
    pub const DO_PEER_DIRECT_ALL: u32 = 32;
    pub const DO_PEER_DIRECT_NEVER: u32 = 64;
    pub const DO_NO_PACKETS: u32 = 128;
    pub const DO_CONFINE: u32 = 256;
}

/// Bits of [`Params::confined`].
#[allow(missing_docs)]
pub mod confined {
    pub const UNRULED: u32 = 1;
    pub const SOME: u32 = 2;
}

/// Flags of a [`Flow`].
#[allow(missing_docs)]
pub mod flow {
    pub const PENDING: u32 = 1;
    pub const MARKER: u32 = 2;
    pub const FILTERED: u32 = 4;
    pub const MOVING: u32 = 8;
    pub const CARRIED: u32 = 128;
    pub const ACCEPTED: u32 = 256;
}

/// Flags of an [`Arrival`].
#[allow(missing_docs)]
pub mod arrival {
    pub const UNCONNECTED: u32 = 1;
    pub const FILTERED: u32 = 2;
    pub const HELD: u32 = 4;
}

/// Kinds of [`Event`].
#[allow(missing_docs)]
pub mod event {
    pub const END: u32 = 0;
    pub const APP: u32 = 1;
    pub const SYMPTOM: u32 = 2;
    pub const COUNT: u32 = 3;
}

/// `BRAID_RADIO_TRANSLATES`.
pub const RADIO_TRANSLATES: u32 = 1;
/// `BRAID_RADIO_SEALED`.
pub const RADIO_SEALED: u32 = 2;
/// Number of counts of the ad-hoc device (`BRAID_ADHOC_COUNTS`).
pub const ADHOC_COUNTS: usize = 6;

/// Number of counters.
pub const COUNTERS: usize = 13;

/// Reads a structure from the bytes of a dump or a ring buffer; `None` if there are too few bytes.
pub fn read<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: there are enough bytes, every bit pattern is a `Pod` value, and no alignment is assumed.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        static braid_native_sizes: [usize; 36];
    }

    #[test]
    fn rust_and_c_agree_on_every_size() {
        // SAFETY: the array is a constant of the native test library, linked by the build script, with exactly these elements.
        let c = unsafe { braid_native_sizes };
        let rust = [
            size_of::<Params>(),
            size_of::<Slot>(),
            size_of::<LinkLoad>(),
            size_of::<Rule>(),
            size_of::<Flow>(),
            size_of::<FlowRow>(),
            size_of::<Event>(),
            size_of::<Signs>(),
            size_of::<DemandKey>(),
            size_of::<Demand>(),
            size_of::<AppKey>(),
            size_of::<DatagramKey>(),
            size_of::<LoadTable>() - 16,
            size_of::<Control>(),
            size_of::<ExeKey>(),
            size_of::<App>(),
            size_of::<Shape>(),
            size_of::<Redirection>(),
            size_of::<Arrival>(),
            std::mem::offset_of!(Params, slots),
            std::mem::offset_of!(Flow, remote),
            std::mem::offset_of!(FlowRow, local),
            std::mem::offset_of!(Arrival, remote),
            size_of::<ForwardKey>(),
            size_of::<Client>(),
            size_of::<OwnAddress>(),
            size_of::<Window>(),
            size_of::<Leg>(),
            size_of::<Fast>(),
            size_of::<Rewrite>(),
            size_of::<Adhoc>(),
            size_of::<Arrivals>(),
            size_of::<Radio>(),
            size_of::<Plan>(),
            size_of::<PairKey>(),
            size_of::<Pair>(),
        ];
        assert_eq!(rust, c);
    }

    #[test]
    fn a_short_record_is_rejected() {
        let whole = [1; size_of::<Control>()];
        assert_eq!(read::<Control>(&whole[1..]), None);
        assert_eq!(read::<Control>(&whole).map(|c| c.bank), Some(0x0101_0101));
    }
}
