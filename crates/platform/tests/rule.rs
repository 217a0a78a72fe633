//! The connection rule has two implementations. Both get the same inputs here: the native build many, the kernel fewer.

use braid_decide::connection::{LinkLoad, LoadTable, Mode, Request};
use braid_decide::policy::{Admission, admit};
use braid_model::{ByteCount, Direction, LinkSet, MAX_LINKS, PerDirection, Rate};
use braid_platform::linux::bpf::trial::KernelRule;
use braid_platform::linux::sys::abi;
use proptest::prelude::*;

unsafe extern "C" {
    fn braid_native_choose(
        load_table: *mut u64,
        params: *const abi::Params,
        usable: u32,
        actions: u32,
        links: u32,
        prefer: u32,
        direction: u32,
        demand: u64,
        denied: *mut u32,
    ) -> u32;
}

/// All inputs of one decision.
#[derive(Debug, Clone)]
struct Case {
    load_table: LoadTable,
    mode: Mode,
    /// The request. `allowed` contains the usable links; policy narrows it.
    request: Request,
    backup: LinkSet,
    links: Option<LinkSet>,
    prefer: Option<LinkSet>,
    /// The target of the other direction, which must have no effect.
    other_target: u64,
}

impl Case {
    fn params(&self) -> abi::Params {
        let (mode, target) = match self.mode {
            Mode::OnlyOne => (0, 0),
            Mode::VirtualStart => (1, 0),
            Mode::CheapestInTime { target } => (2, target.map_or(0, Rate::bytes_per_second)),
            Mode::LeastFinish => (3, 0),
            Mode::LeastMakespan => (4, 0),
            Mode::Random => (5, 0),
        };
        let mut targets = [self.other_target; 2];
        targets[self.request.direction as usize] = target;
        let mut params = abi::Params { mode, target: targets, backup: mask(self.backup), ..Default::default() };
        for (slot, link_load) in params.slots.iter_mut().zip(&self.load_table.loads) {
            (slot.rate, slot.price, slot.step, slot.rank) = (link_load.rate.to_array(), link_load.price, link_load.step, link_load.rank);
        }
        params
    }

    fn raw_load_table(&self) -> abi::LoadTable {
        let LoadTable { virtual_time, decisions: commits, packets, .. } = self.load_table;
        let mut raw = abi::LoadTable { virtual_time, commits, packets: packets.to_array(), ..Default::default() };
        for (raw, link_load) in raw.loads.iter_mut().zip(&self.load_table.loads) {
            (raw.load, raw.tag, raw.flows) = (link_load.load.to_array(), link_load.tag, link_load.flows);
        }
        raw
    }

    /// The rule's actions and masks as the BPF programs use them.
    fn actions(&self) -> (u32, u32, u32) {
        let actions =
            if self.links.is_some() { abi::rule::DO_LINKS } else { 0 } | if self.prefer.is_some() { abi::rule::DO_PREFER } else { 0 };
        (actions, mask(self.links.unwrap_or_default()), mask(self.prefer.unwrap_or_default()))
    }

    /// The reference's choice, whether it denies the request, and the load table after it.
    fn expected(&self) -> (Option<usize>, bool, LoadTable) {
        let mut load_table = self.load_table.clone();
        match admit(self.request.allowed, self.backup, self.links, self.prefer) {
            Admission::Use(allowed) => (load_table.choose(self.mode, &Request { allowed, ..self.request }), false, load_table),
            Admission::Deny => (None, true, load_table),
            Admission::LeaveAlone => (None, false, load_table),
        }
    }

    fn check(&self, slot: u32, denied: u32, raw: &abi::LoadTable) -> Result<(), TestCaseError> {
        let (expected, refused, load_table) = self.expected();
        prop_assert_eq!((slot != abi::NO_SLOT).then_some(slot as usize), expected);
        prop_assert_eq!(denied != 0, refused);
        prop_assert_eq!((raw.virtual_time, raw.commits), (load_table.virtual_time, load_table.decisions));
        for (raw, link_load) in raw.loads.iter().zip(&load_table.loads) {
            prop_assert_eq!((raw.load, raw.tag, raw.flows), (link_load.load.to_array(), link_load.tag, link_load.flows));
        }
        Ok(())
    }
}

/// Ordinary numbers, ties and extremes: 1 EB, 400 Gbit/s, and all 64-bit values.
fn number(usual: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..=usual,
        2 => 0..4u64,
        1 => Just(1 << 60),
        1 => Just(50_000_000_000),
        1 => any::<u64>(),
    ]
}

fn link_load() -> impl Strategy<Value = LinkLoad> {
    let pair = |usual| [number(usual), number(usual)];
    let flows = prop_oneof![3 => 0..9u32, 1 => any::<u32>()];
    (pair(100_000_000), pair(5_000_000), number(10), number(1 << 30), number(1 << 21), 0..6u32, flows).prop_map(
        |(load, rate, price, tag, step, rank, flows)| LinkLoad { load: load.into(), rate: rate.into(), price, tag, step, rank, flows },
    )
}

/// A number of at most this many bits, of any length, sometimes a power of two.
fn length(bits: u32) -> impl Strategy<Value = u64> {
    let any = (any::<u64>(), 0..bits).prop_map(move |(number, less)| number >> (64 - bits + less));
    prop_oneof![2 => any, 1 => (0..bits).prop_map(|bit| 1 << bit)]
}

/// Links of the same rate and similar load, and a demand. The decision then depends on how much of each load precedes the flow, with products of
/// flows and demand above 64 bits.
fn loads() -> impl Strategy<Value = (Vec<LinkLoad>, u64)> {
    (1..62u32).prop_flat_map(|bits| {
        let load = move || (1 << (bits - 1))..=1u64 << bits;
        let link_load = (load(), load(), length(32)).prop_map(|(down, up, flows)| LinkLoad {
            load: PerDirection { down, up },
            rate: PerDirection::both(1 << 30),
            flows: flows as u32,
            ..LinkLoad::default()
        });
        (prop::collection::vec(link_load, MAX_LINKS), length(62))
    })
}

fn case() -> impl Strategy<Value = Case> {
    let mode = prop_oneof![
        Just(Mode::OnlyOne),
        Just(Mode::VirtualStart),
        Just(Mode::CheapestInTime { target: None }),
        Just(Mode::LeastFinish),
        Just(Mode::LeastMakespan),
        Just(Mode::Random),
        // Whole bytes per second, at least one, because 0 means "none" to the kernel.
        (1..100_000_000u64).prop_map(|rate| Mode::CheapestInTime { target: Some(Rate::from_bps(rate * 8)) }),
    ];
    let mask = || prop_oneof![3 => 0..16u32, 1 => any::<u32>()].prop_map(|links| LinkSet(links.into()));
    let policy = (mask(), prop::option::of(mask()), prop::option::of(mask()));
    let ways = (any::<bool>(), prop_oneof![Just(0), 1..100_000_000u64]);
    let loads = prop_oneof![2 => (prop::collection::vec(link_load(), MAX_LINKS), number(10_000_000)), 1 => loads()];
    (loads, (number(1 << 30), any::<u64>(), [number(100_000_000), number(100_000_000)]), mode, mask(), ways, policy).prop_map(
        |((loads, demand), (virtual_time, decisions, packets), mode, allowed, (up, other_target), (backup, links, prefer))| Case {
            load_table: LoadTable {
                virtual_time,
                decisions,
                packets: packets.into(),
                loads: loads.try_into().expect("exactly MAX_LINKS elements"),
            },
            mode,
            request: Request { allowed, direction: if up { Direction::Up } else { Direction::Down }, demand: ByteCount::new(demand) },
            backup,
            links,
            prefer,
            other_target,
        },
    )
}

/// A set of slots as the BPF programs use it.
fn mask(links: LinkSet) -> u32 {
    links.0 as u32
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]
    #[test]
    fn the_native_build_matches_the_reference(case in case()) {
        let params = case.params();
        let mut raw = case.raw_load_table();
        let mut denied = 0;
        // SAFETY: without its first 16 bytes, the lock and two counters, the load table is a `struct braid_load_table`. Both structures have the C layout (a test
        // checks the sizes) and outlive the call.
        let slot = unsafe {
            let state = std::ptr::from_mut(&mut raw).cast::<u64>().add(2);
            let (actions, links, prefer) = case.actions();
            let usable = mask(case.request.allowed);
            let (direction, demand) = (case.request.direction as u32, case.request.demand.get());
            braid_native_choose(state, &params, usable, actions, links, prefer, direction, demand, &mut denied)
        };
        case.check(slot, denied, &raw)?;
    }
}

#[test]
fn the_kernel_matches_the_reference() {
    let mut kernel = match KernelRule::load() {
        Ok(kernel) => kernel,
        Err(error) if std::env::var_os("CI").is_none() => return eprintln!("skipped, because the kernel's rule cannot be loaded: {error}"),
        Err(error) => panic!("{error}"),
    };
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1_000));
    let kernel = std::cell::RefCell::new(&mut kernel);
    runner
        .run(&case(), |case| {
            let (actions, links, prefer) = case.actions();
            let trial = abi::Trial {
                actions,
                links,
                prefer,
                load_table: case.raw_load_table(),
                allowed: mask(case.request.allowed),
                direction: case.request.direction as u32,
                demand: case.request.demand.get(),
                ..Default::default()
            };
            let answer = kernel.borrow_mut().decide(case.params(), trial).map_err(|error| TestCaseError::fail(error.to_string()))?;
            case.check(answer.winner, answer.denied, &answer.load_table)
        })
        .unwrap();
}
