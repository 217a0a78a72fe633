//! A literal implementation of Algorithms 4.4.1 and 4.4.2 with lists and plain counters: the reference for every decision of the fast scheduler.

use braid_decide::midrr::Flags;

/// The scheduler. Flows are identified by slots, and the slot that was freed last is reused first.
pub(crate) struct Literal {
    quantum: u64,
    /// Maximum count: 1 for the service flag.
    most: u32,
    own_turns: bool,
    flows: Vec<Option<LiteralFlow>>,
    vacant: Vec<usize>,
    current: Vec<Option<usize>>,
    credit: Vec<u64>,
    place: Vec<usize>,
}

struct LiteralFlow {
    links: u64,
    quantum: u64,
    deficit: u64,
    head: Option<u64>,
    /// Service flag or counter SF_ij.
    served: Vec<u32>,
}

impl Literal {
    pub(crate) fn new(links: usize, quantum: u64, flags: Flags) -> Self {
        let (most, own_turns) = match flags {
            Flags::Bit => (1, false),
            Flags::Counter { bits } => ((1 << bits) - 1, true),
        };
        let (current, credit, place) = (vec![None; links], vec![0; links], vec![0; links]);
        Self { quantum, most, own_turns, flows: Vec::new(), vacant: Vec::new(), current, credit, place }
    }

    pub(crate) fn add(&mut self, weight: u64, links: u64) -> usize {
        let served = vec![0; self.current.len()];
        let flow = Some(LiteralFlow { links, quantum: weight * self.quantum, deficit: 0, head: None, served });
        match self.vacant.pop() {
            Some(slot) => {
                self.flows[slot] = flow;
                slot
            }
            None => {
                self.flows.push(flow);
                self.flows.len() - 1
            }
        }
    }

    pub(crate) fn remove(&mut self, slot: usize) {
        self.leave(slot, u64::MAX);
        self.flows[slot] = None;
        self.vacant.push(slot);
    }

    pub(crate) fn set_weight(&mut self, slot: usize, weight: u64) {
        self.flows[slot].as_mut().expect("added").quantum = weight * self.quantum;
    }

    pub(crate) fn set_links(&mut self, slot: usize, links: u64) {
        self.leave(slot, !links);
        let flow = self.flows[slot].as_mut().expect("added");
        flow.links = links;
        flow.served.fill(0);
    }

    pub(crate) fn set_head(&mut self, slot: usize, head: Option<u64>) {
        let flow = self.flows[slot].as_mut().expect("added");
        flow.head = head;
        if head.is_none() {
            flow.deficit = 0;
            self.leave(slot, u64::MAX);
        }
    }

    pub(crate) fn next(&mut self, link: usize) -> Option<usize> {
        loop {
            if let Some(slot) = self.current[link] {
                let flow = self.flows[slot].as_mut().expect("those that leave have no turn");
                let credit = if self.own_turns { &mut self.credit[link] } else { &mut flow.deficit };
                if let Some(head) = flow.head.filter(|head| *head <= *credit) {
                    *credit -= head;
                    return Some(slot);
                }
                if self.own_turns {
                    flow.deficit += std::mem::take(&mut self.credit[link]);
                }
                self.current[link] = None;
            }
            self.check_next(link)?;
        }
    }

    fn check_next(&mut self, link: usize) -> Option<()> {
        let ready = |flow: &Option<LiteralFlow>| flow.as_ref().is_some_and(|flow| flow.head.is_some() && flow.links >> link & 1 == 1);
        self.flows.iter().any(ready).then_some(())?;
        loop {
            let slot = self.place[link] % self.flows.len();
            self.place[link] = slot + 1;
            if !ready(&self.flows[slot]) {
                continue;
            }
            let flow = self.flows[slot].as_mut().expect("ready");
            if flow.served[link] > 0 {
                flow.served[link] -= 1;
                continue;
            }
            flow.deficit += flow.quantum;
            if self.own_turns {
                self.credit[link] = std::mem::take(&mut flow.deficit);
            }
            for (_, count) in flow.served.iter_mut().enumerate().filter(|(other, _)| *other != link) {
                *count = (*count + 1).min(self.most);
            }
            self.current[link] = Some(slot);
            return Some(());
        }
    }

    /// Ends the turns a flow has on `links`.
    fn leave(&mut self, slot: usize, links: u64) {
        for link in (0..self.current.len()).filter(|link| links >> link & 1 == 1) {
            if self.current[link] == Some(slot) {
                self.current[link] = None;
                self.credit[link] = 0;
            }
        }
    }
}
