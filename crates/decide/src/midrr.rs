//! Multiple-interface deficit round robin (miDRR): which flow's head goes next on a link that can send now.

use braid_model::Bytes;
use thiserror::Error;

/// The most links a scheduler can have: one bit each in a [`LinkSet`].
pub const MAX_LINKS: usize = 64;
/// The widest service counter, in bits.
pub const MAX_COUNTER_BITS: u32 = 8;
/// The least a flow may be given in one turn; less would make a packet take too many turns.
pub const MIN_QUANTUM: Bytes = Bytes::new(64);
/// Heads and quanta beyond this count as this much.
pub const MAX_HEAD: Bytes = Bytes::new(1 << 24);

/// Deficits are counted in units of 2^-10 byte, so that weights are kept to a thousandth even with small quanta.
const FRACTION: u32 = 10;
/// Flows per block: one bit each in a word.
const BLOCK: usize = 64;
const NOBODY: u32 = u32::MAX;

/// A set of links by index, 0 to 63: a row of the interface preferences Π.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinkSet(pub u64);

impl LinkSet {
    /// Whether `link` is in the set.
    pub const fn contains(self, link: usize) -> bool {
        link < MAX_LINKS && self.0 >> link & 1 == 1
    }

    /// The links of the set in rising order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_LINKS).filter(move |link| self.contains(*link))
    }
}

impl FromIterator<usize> for LinkSet {
    /// The set of these links; indices from [`MAX_LINKS`] on are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(links: I) -> Self {
        Self(links.into_iter().filter(|link| *link < MAX_LINKS).fold(0, |set, link| set | 1 << link))
    }
}

/// What a link remembers of the turns a flow had on other links since it last considered the flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flags {
    /// Whether there was one: the thesis's service flag (Algorithm 4.4.2).
    #[default]
    Bit,
    /// How many there were, up to 2^bits - 1; each time the link passes the flow over, it takes one off.
    /// `bits` from 1 (the same as [`Flags::Bit`]) to [`MAX_COUNTER_BITS`].
    Counter {
        /// Width of the counter.
        bits: u32,
    },
}

/// A flow of one scheduler, until it is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey {
    slot: u32,
    generation: u32,
}

/// Leave for one packet or chunk: the head of `flow` goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The flow.
    pub flow: FlowKey,
    /// Its head's size, as it was last told.
    pub size: Bytes,
}

/// Why a scheduler or one of its flows cannot be as asked.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum MidrrError {
    /// Too many links.
    #[error("{0} links are more than a scheduler can have: give it at most {MAX_LINKS}")]
    Links(usize),
    /// No such counter.
    #[error("service counters of {0} bits do not exist: ask for 1 to {MAX_COUNTER_BITS} bits")]
    CounterBits(u32),
    /// A weight that is no positive number, or that leaves too little for a turn.
    #[error("weight {weight} with a quantum of {quantum} gives a flow no {MIN_QUANTUM} a turn: use positive weights, or a larger quantum")]
    Weight {
        /// The weight φ.
        weight: f64,
        /// The scheduler's quantum Q.
        quantum: Bytes,
    },
    /// The flow was removed, or is another scheduler's.
    #[error("flow {0:?} is not in this scheduler: it was removed, or belongs to another")]
    UnknownFlow(FlowKey),
}

/// The scheduler.
#[derive(Debug, Clone)]
pub struct Midrr {
    quantum: Bytes,
    links: usize,
    planes: usize,
    flows: Vec<Flow>,
    vacant: Vec<u32>,
    /// By block and link: which of the block's flows are backlogged and may use the link.
    ready: Vec<u64>,
    /// By block, plane and link: one bit of each flow's service counter.
    counters: Vec<u64>,
    rings: Vec<Ring>,
}

/// A link's place in its round.
#[derive(Debug, Clone)]
struct Ring {
    /// The flow that has its turn, 𝒞_j.
    current: u32,
    /// The slot to consider next.
    next: usize,
    /// Blocks in which a flow is ready, one bit each.
    busy: Vec<u64>,
}

#[derive(Debug, Clone, Default)]
struct Flow {
    generation: u32,
    present: bool,
    links: u64,
    quantum: u64,
    deficit: u64,
    /// Size of the head; `None` while nothing waits.
    head: Option<u64>,
}

impl Midrr {
    /// A scheduler for `links` links, none of which has flows yet; a flow of weight φ is given φ x `quantum` a turn.
    pub fn new(links: usize, quantum: Bytes, flags: Flags) -> Result<Self, MidrrError> {
        if links > MAX_LINKS {
            return Err(MidrrError::Links(links));
        }
        let planes = match flags {
            Flags::Bit => 1,
            Flags::Counter { bits } if (1..=MAX_COUNTER_BITS).contains(&bits) => bits as usize,
            Flags::Counter { bits } => return Err(MidrrError::CounterBits(bits)),
        };
        let ring = Ring { current: NOBODY, next: 0, busy: Vec::new() };
        Ok(Self {
            quantum,
            links,
            planes,
            flows: Vec::new(),
            vacant: Vec::new(),
            ready: Vec::new(),
            counters: Vec::new(),
            rings: vec![ring; links],
        })
    }

    /// Adds an idle flow of weight φ that may use `links`.
    pub fn add_flow(&mut self, weight: f64, links: LinkSet) -> Result<FlowKey, MidrrError> {
        let quantum = self.turn(weight)?;
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => self.grow(),
        };
        let flow = &mut self.flows[slot as usize];
        *flow = Flow { generation: flow.generation, present: true, links: links.0, quantum, deficit: 0, head: None };
        let generation = flow.generation;
        self.forget_turns(slot as usize, u64::MAX);
        Ok(FlowKey { slot, generation })
    }

    /// Takes a flow out.
    pub fn remove_flow(&mut self, key: FlowKey) -> Result<(), MidrrError> {
        self.set_head(key, None)?;
        let flow = &mut self.flows[key.slot as usize];
        flow.present = false;
        flow.generation = flow.generation.wrapping_add(1);
        self.vacant.push(key.slot);
        Ok(())
    }

    /// Gives a flow another weight φ, from its next turn on.
    pub fn set_weight(&mut self, key: FlowKey, weight: f64) -> Result<(), MidrrError> {
        let quantum = self.turn(weight)?;
        self.flow(key)?.quantum = quantum;
        Ok(())
    }

    /// Gives a flow other links, at once. On links it may use anew it starts unserved.
    pub fn set_links(&mut self, key: FlowKey, links: LinkSet) -> Result<(), MidrrError> {
        let flow = self.flow(key)?;
        let old = std::mem::replace(&mut flow.links, links.0);
        let backlogged = flow.head.is_some();
        self.forget_turns(key.slot as usize, links.0 & !old);
        self.enter(key.slot as usize, 0, old & !links.0);
        if backlogged {
            self.enter(key.slot as usize, links.0, 0);
        }
        Ok(())
    }

    /// Tells what now stands at the head of a flow: a packet or chunk of this size, or nothing. To be called when the first
    /// packet enters an empty queue and after each [`Grant`]. A flow that runs empty loses its deficit, as in DRR.
    pub fn set_head(&mut self, key: FlowKey, head: Option<Bytes>) -> Result<(), MidrrError> {
        let flow = self.flow(key)?;
        let was = flow.head.is_some();
        let links = flow.links;
        flow.head = head.map(fixed);
        match (was, head.is_some()) {
            (false, true) => self.enter(key.slot as usize, links, 0),
            (true, false) => {
                flow.deficit = 0;
                self.enter(key.slot as usize, 0, links);
            }
            _ => {}
        }
        Ok(())
    }

    /// `link` can send now: whose head goes? `None` if no flow that may use it has anything.
    pub fn next(&mut self, link: usize) -> Option<Grant> {
        if link >= self.links {
            return None;
        }
        let mut slot = self.rings[link].current;
        loop {
            if slot != NOBODY {
                let flow = &mut self.flows[slot as usize];
                if let Some(head) = flow.head.filter(|head| *head <= flow.deficit) {
                    flow.deficit -= head;
                    return Some(Grant { flow: FlowKey { slot, generation: flow.generation }, size: Bytes::new(head >> FRACTION) });
                }
            }
            let next = self.advance(link)?;
            self.take_turn(next, link);
            slot = next as u32;
        }
    }

    /// MIDRR-CHECK-NEXT: the next ready flow in `link`'s round that had no turn elsewhere since it was last considered.
    fn advance(&mut self, link: usize) -> Option<usize> {
        let (links, planes) = (self.links, self.planes);
        let ring = &mut self.rings[link];
        let mut block = ring.next / BLOCK;
        let mut mask = u64::MAX << (ring.next % BLOCK);
        loop {
            let ready = self.ready.get(block * links + link).map_or(0, |word| word & mask);
            if ready == 0 {
                block = ring.busy_from(block + 1)?;
                mask = u64::MAX;
                continue;
            }
            let counters = &mut self.counters[block * planes * links..(block + 1) * planes * links];
            let served = (0..planes).fold(0, |any, plane| any | counters[plane * links + link]);
            let free = ready & !served;
            let passed = if free == 0 { ready } else { ready & ((free & free.wrapping_neg()) - 1) };
            let mut borrow = passed & served;
            for plane in 0..planes {
                let word = &mut counters[plane * links + link];
                let old = *word;
                *word ^= borrow;
                borrow &= !old;
            }
            if free != 0 {
                let slot = block * BLOCK + free.trailing_zeros() as usize;
                ring.next = slot + 1;
                ring.current = slot as u32;
                return Some(slot);
            }
            block = ring.busy_from(block + 1)?;
            mask = u64::MAX;
        }
    }

    /// Gives a flow its quantum, and counts the turn on all links but the one that gives it.
    fn take_turn(&mut self, slot: usize, link: usize) {
        let flow = &mut self.flows[slot];
        flow.deficit += flow.quantum;
        let (block, links, planes) = (slot / BLOCK, self.links, self.planes);
        let bit = 1 << (slot % BLOCK);
        let counters = &mut self.counters[block * planes * links..(block + 1) * planes * links];
        if planes == 1 {
            let own = counters[link];
            counters.iter_mut().for_each(|word| *word |= bit);
            counters[link] = own;
            return;
        }
        for other in (0..links).filter(|other| *other != link) {
            if (0..planes).all(|plane| counters[plane * links + other] & bit != 0) {
                continue;
            }
            let mut carry = bit;
            for plane in 0..planes {
                let word = &mut counters[plane * links + other];
                let old = *word;
                *word ^= carry;
                carry &= old;
            }
        }
    }

    /// Makes a flow ready on the links `on` and not ready on the links `off`.
    fn enter(&mut self, slot: usize, on: u64, off: u64) {
        let (block, bit) = (slot / BLOCK, 1u64 << (slot % BLOCK));
        for (link, ring) in self.rings.iter_mut().enumerate() {
            let word = &mut self.ready[block * self.links + link];
            if on >> link & 1 == 1 {
                *word |= bit;
                ring.busy[block / BLOCK] |= 1 << (block % BLOCK);
            }
            if off >> link & 1 == 1 {
                *word &= !bit;
                if *word == 0 {
                    ring.busy[block / BLOCK] &= !(1 << (block % BLOCK));
                }
                if ring.current == slot as u32 {
                    ring.current = NOBODY;
                }
            }
        }
    }

    /// Zeroes a flow's service counters on `links`.
    fn forget_turns(&mut self, slot: usize, links: u64) {
        let (block, bit) = (slot / BLOCK, 1u64 << (slot % BLOCK));
        let counters = &mut self.counters[block * self.planes * self.links..(block + 1) * self.planes * self.links];
        for (index, word) in counters.iter_mut().enumerate() {
            if links >> (index % self.links) & 1 == 1 {
                *word &= !bit;
            }
        }
    }

    /// Makes room for another flow, and with it perhaps a block.
    fn grow(&mut self) -> u32 {
        let slot = self.flows.len();
        if slot.is_multiple_of(BLOCK) {
            self.ready.resize(self.ready.len() + self.links, 0);
            self.counters.resize(self.counters.len() + self.links * self.planes, 0);
            for ring in &mut self.rings {
                ring.busy.resize((slot / BLOCK) / BLOCK + 1, 0);
            }
        }
        self.flows.push(Flow::default());
        slot as u32
    }

    fn flow(&mut self, key: FlowKey) -> Result<&mut Flow, MidrrError> {
        let found = self.flows.get_mut(key.slot as usize);
        found.filter(|flow| flow.present && flow.generation == key.generation).ok_or(MidrrError::UnknownFlow(key))
    }

    /// What a flow of this weight is given in a turn, in units of a deficit.
    fn turn(&self, weight: f64) -> Result<u64, MidrrError> {
        let quantum = (weight * self.quantum.get() as f64 * f64::from(1u32 << FRACTION)) as u64;
        let refused = !weight.is_finite() || quantum < fixed(MIN_QUANTUM);
        if refused { Err(MidrrError::Weight { weight, quantum: self.quantum }) } else { Ok(quantum.min(fixed(MAX_HEAD))) }
    }
}

impl Ring {
    /// The first busy block from `block` on, round the ring; `None` if no block is busy.
    fn busy_from(&self, block: usize) -> Option<usize> {
        let words = self.busy.len();
        let start = block / BLOCK;
        let find = |word: usize, mask: u64| {
            let bits = self.busy.get(word)? & mask;
            (bits != 0).then(|| word * BLOCK + bits.trailing_zeros() as usize)
        };
        find(start, u64::MAX << (block % BLOCK))
            .or_else(|| (start + 1..words).find_map(|word| find(word, u64::MAX)))
            .or_else(|| (0..words.min(start + 1)).find_map(|word| find(word, u64::MAX)))
    }
}

fn fixed(amount: Bytes) -> u64 {
    amount.get().min(MAX_HEAD.get()) << FRACTION
}
