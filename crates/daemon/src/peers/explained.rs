//! Explains why a flow is bonded and how its bytes are spread over the links.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use braid_api::{Explanation, Outcome, Share};
use braid_bond::{BondScheduler, PathState};
use braid_control::core::BondReason;
use braid_model::{Direction, Time};
use braid_transport::client::State;

use super::{BondedFlow, Peers, path_state, why_no_path};

impl Peers {
    /// Stores why a flow is bonded, until the flow ends.
    pub(crate) fn set_bond_reason(&self, id: u64, bond_reason: BondReason) {
        if let Some(bonded) = self.flows.lock().unwrap_or_else(PoisonError::into_inner).living.get_mut(&id) {
            bonded.bond_reason = Some(bond_reason);
        }
    }

    /// `POST /v1/explain` for a bonded flow; `None` if no bonded flow has this id.
    pub(crate) fn explain(&self, id: u64, now: Time) -> Option<Explanation> {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let bonded = flows.living.get(&id)?;
        let paths = self.shares(bonded);
        let bond_reason = bonded.bond_reason.as_ref();
        let age = now.since(bonded.started).as_secs_f64();
        let why = bond_reason.map_or("", |bond_reason| bond_reason.reason.as_str());
        let copies = match bonded.policy.copies {
            0 | 1 => String::new(),
            copies => format!(", each packet over {copies} of them"),
        };
        let used: Vec<String> = paths.iter().filter(|share| share.share > Some(0.0)).map(share_text).collect();
        let used =
            if used.is_empty() { "no bytes have arrived yet".to_owned() } else { format!("its bytes went over: {}", used.join(", ")) };
        let over = match bonded.policy.links != bonded.ruled {
            true => {
                let ordered = self.links.iter().filter(|link| bonded.policy.links.contains(link.slot));
                let ordered: Vec<&str> = ordered.map(|link| link.device.as_str()).collect();
                let gone = "a link that is gone";
                format!(
                    "only over {}, where \"braid move\" put it",
                    if ordered.is_empty() { gone.to_owned() } else { ordered.join(" and ") }
                )
            }
            false => "over every link that its rule allows".to_owned(),
        };
        Some(Explanation {
            subject: format!("{} to {}", bonded.application, bonded.remote),
            outcome: Outcome::Bonded,
            confined: false,
            exceptions: Vec::new(),
            link: None,
            runner_up: None,
            reason: format!(
                "{why}: {} has carried it for {age:.1} s, {over}{copies}; {}; {used}",
                bonded.peer,
                self.scheduler().explanation()
            ),
            rule: bond_reason.and_then(|bond_reason| bond_reason.rule),
            program_rule: bond_reason.and_then(|bond_reason| bond_reason.program_rule.clone()),
            rule_text: bond_reason.and_then(|bond_reason| bond_reason.rule_text.clone()),
            scheduler: self.scheduler_name().to_owned(),
            when: bond_reason.and_then(|bond_reason| bond_reason.when.clone()),
            skipped: Vec::new(),
            class: bond_reason.map(|bond_reason| bond_reason.class.to_string()),
            affinity: None,
            demand_bytes: bond_reason.map(|bond_reason| bond_reason.demand.get()),
            direction: bond_reason.map(|bond_reason| if bond_reason.direction == Direction::Up { "up" } else { "down" }.to_owned()),
            candidates: Vec::new(),
            peer: Some(bonded.peer.clone()),
            paths,
            program_known: None,
            optimum: None,
            share: None,
        })
    }

    /// Name of the rule by which bonds distribute flows.
    pub(crate) fn scheduler_name(&self) -> &'static str {
        self.scheduler().name()
    }

    fn scheduler(&self) -> BondScheduler {
        self.scheduling.as_ref().map_or(BondScheduler::default(), |scheduling| scheduling.scheduler)
    }

    /// Shares of all current links, and of former links that carried part of the flow.
    fn shares(&self, bonded: &BondedFlow) -> Vec<Share> {
        let client = self.relays.get(&bonded.peer).map(|known| &known.client).or_else(|| self.servers.client(&bonded.peer));
        let up = client.is_some_and(|client| *client.state().borrow() == State::Up);
        let moved = bonded.flow.view().map(|view| view.by_link).unwrap_or_default();
        let whole: u64 = moved.iter().map(|(_, moved)| moved.sum().get()).sum();
        let mut links: BTreeMap<u8, Share> = BTreeMap::new();
        let empty = |link: u8| Share { link: self.device(link), ..Share::default() };
        for (link, moved) in moved {
            let share = links.entry(link).or_insert_with(|| empty(link));
            (share.rx_bytes, share.tx_bytes) = (moved.rx.get(), moved.tx.get());
        }
        // A link may have one path per address family. Show the better one.
        let mut best: BTreeMap<u8, braid_bond::PathView> = BTreeMap::new();
        for (_, path) in client.map(|client| client.paths()).unwrap_or_default() {
            let better = |known: &braid_bond::PathView| rank(path.state) > rank(known.state);
            if best.get(&path.link).is_none_or(better) {
                best.insert(path.link, path);
            }
        }
        for link in &self.links {
            links.entry(link.slot as u8).or_insert_with(|| empty(link.slot as u8));
        }
        for (link, path) in &best {
            let share = links.entry(*link).or_insert_with(|| empty(*link));
            share.state = Some(path_state(path));
            share.rtt_us = Some(path.srtt.as_micros() as u64);
            share.rate_bps = Some(path.rate.bps()).filter(|rate| *rate > 0);
        }
        for (link, share) in &mut links {
            share.share = (whole > 0).then(|| (share.rx_bytes + share.tx_bytes) as f64 / whole as f64);
            let path = best.get(link);
            let capped = self.links.iter().any(|known| known.capped && known.slot == usize::from(*link));
            share.allowed = bonded.policy.links.contains(usize::from(*link));
            share.reason = match path {
                _ if !share.allowed && bonded.ruled.contains(usize::from(*link)) => {
                    Some("\"braid move\" moved the flow to another link".to_owned())
                }
                _ if !share.allowed => Some("the flow's rule does not name this link".to_owned()),
                _ if !up => Some("the peer is unreachable now: data in transit waits".to_owned()),
                Some(_) if capped => Some("its allowance is used up".to_owned()),
                None => {
                    let known = self.links.iter().find(|known| known.slot == usize::from(*link));
                    let why = known.and_then(|known| why_no_path(known, &bonded.peer, &[]));
                    Some(format!("no path over it: {}", why.as_deref().unwrap_or("the link is gone")))
                }
                Some(path) if path.backup => Some("used only while no other path is good".to_owned()),
                Some(path) if path.state != PathState::Good => Some(format!("the path over it is {}", path_state(path))),
                Some(_) => None,
            };
        }
        links.into_values().collect()
    }
}

fn rank(state: PathState) -> u8 {
    match state {
        PathState::Dead => 0,
        PathState::Probing => 1,
        PathState::Suspect => 2,
        PathState::Good => 3,
    }
}

fn share_text(share: &Share) -> String {
    format!("{} ({:.0} %)", share.link, share.share.unwrap_or(0.0) * 100.0)
}
