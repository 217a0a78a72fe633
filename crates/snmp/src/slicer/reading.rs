//! A request to read: rounds of requests to the agent until every variable has what the manager asked for.

use std::collections::VecDeque;

use crate::oid::Oid;
use crate::pdu::{ErrorStatus, Pdu, PduKind, Value, VarBind};
use crate::view::{Access, View};

/// Most rounds of a request. A view of rows that the device does not have takes many.
const MOST_ROUNDS: u32 = 256;
/// Most names and repetitions of one request to an agent.
const MOST_NAMES: usize = 32;
const MOST_REPETITIONS: usize = 25;
/// The least size of a variable in an answer, in bytes: more repetitions than so many cannot fit.
const LEAST_BINDING: usize = 12;

/// What a slice sees of a device, and what it reads instead of the device's values.
pub(super) trait Sight {
    fn view(&self) -> &View;
    fn overlay(&self, name: &Oid) -> Option<Value>;
}

/// A request to read.
#[derive(Debug)]
pub(super) struct Reading {
    kind: PduKind,
    chains: Vec<Chain>,
    /// Variables of a GetBulk that are asked for once.
    single: usize,
    names: usize,
    repetitions: usize,
    rounds: u32,
    /// The variables of the last request to the agent.
    asked: Vec<usize>,
}

/// A variable of the request, and what follows it.
#[derive(Debug)]
struct Chain {
    origin: Oid,
    cursor: Oid,
    found: Vec<VarBind>,
    wanted: usize,
    ended: bool,
}

impl Chain {
    fn is_done(&self) -> bool {
        self.ended || self.found.len() >= self.wanted
    }

    /// Moves on to what the slice sees.
    fn seek(&mut self, name: Oid, view: &View) {
        match view.walk_from(&name) {
            Some(from) => self.cursor = from,
            None => self.ended = true,
        }
    }

    fn end(&self) -> VarBind {
        let name = self.found.last().map_or(&self.origin, |binding| &binding.name);
        VarBind::new(name.clone(), Value::EndOfMibView)
    }
}

/// Why a request cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The agent's error, and the place of the variable in the request, from 1.
    Error(ErrorStatus, usize),
    /// The agent's answer is wrong.
    Faulty(&'static str),
}

impl Reading {
    /// A Get, GetNext or GetBulk. `room` is the size of the largest answer in bytes, and `most` the largest number of repetitions.
    pub(super) fn new(request: &Pdu, room: usize, most: u32, sight: &impl Sight) -> Self {
        let count = request.bindings.len();
        let (single, repeated) = match request.kind {
            PduKind::GetBulk => {
                let single = usize::try_from(request.status).unwrap_or(0).min(count);
                let fits = (room / LEAST_BINDING).saturating_sub(single) / (count - single).max(1);
                (single, usize::try_from(request.index).unwrap_or(0).min(most as usize).min(fits.max(1)))
            }
            _ => (count, 1),
        };
        let chain = |(place, binding): (usize, &VarBind)| {
            let wanted = if place < single { 1 } else { repeated };
            let mut chain = Chain { origin: binding.name.clone(), cursor: binding.name.clone(), found: Vec::new(), wanted, ended: false };
            if request.kind == PduKind::Get {
                chain.found.extend(without_agent(&binding.name, sight).map(|value| VarBind::new(binding.name.clone(), value)));
            } else {
                chain.seek(binding.name.clone(), sight.view());
            }
            chain
        };
        let chains = request.bindings.iter().enumerate().map(chain).collect();
        Self { kind: request.kind, chains, single, names: MOST_NAMES, repetitions: MOST_REPETITIONS, rounds: 0, asked: Vec::new() }
    }

    /// The next request to the agent; `None`: all is there.
    pub(super) fn next(&mut self) -> Option<Pdu> {
        let open = self.chains.iter().enumerate().filter(|(_, chain)| !chain.is_done()).map(|(place, _)| place);
        self.asked = open.take(self.names).collect();
        let wanted = self.asked.iter().map(|place| self.chains[*place].wanted - self.chains[*place].found.len()).max()?;
        let names = self.asked.iter().map(|place| self.chains[*place].cursor.clone());
        let bulk = wanted.min(self.repetitions);
        Some(match self.kind {
            PduKind::Get => Pdu::asking(PduKind::Get, names),
            _ if bulk > 1 => Pdu { index: bulk as i32, ..Pdu::asking(PduKind::GetBulk, names) },
            _ => Pdu::asking(PduKind::GetNext, names),
        })
    }

    /// What is asked of the agent first.
    pub(super) fn first_name(&self) -> Option<&Oid> {
        self.asked.first().map(|place| &self.chains[*place].cursor)
    }

    /// Takes the agent's answer to the last request.
    pub(super) fn answer(&mut self, answer: Pdu, sight: &impl Sight) -> Result<(), Failure> {
        self.rounds += 1;
        if self.rounds > MOST_ROUNDS {
            return Err(Failure::Faulty(
                "the device has too much between the rows that the slice sees: give the slice the rows that exist, and fewer columns",
            ));
        }
        if answer.status != 0 {
            return self.error(&answer);
        }
        let fewer = Failure::Faulty("the answer does not have the variables that were asked for");
        if self.kind == PduKind::Get {
            let names = self.asked.iter().map(|place| &self.chains[*place].cursor);
            if answer.bindings.len() != self.asked.len() || !names.eq(answer.bindings.iter().map(|binding| &binding.name)) {
                return Err(fewer);
            }
            for (place, binding) in self.asked.iter().zip(answer.bindings) {
                self.chains[*place].found.push(binding);
            }
            return Ok(());
        }
        if answer.bindings.is_empty() || answer.bindings.len() > self.asked.len() * self.repetitions.max(1) {
            return Err(fewer);
        }
        let mut columns: Vec<VecDeque<VarBind>> = self.asked.iter().map(|_| VecDeque::new()).collect();
        for (place, binding) in answer.bindings.into_iter().enumerate() {
            columns[place % self.asked.len()].push_back(binding);
        }
        for (place, column) in self.asked.iter().zip(columns) {
            follow(&mut self.chains[*place], column, sight)?;
        }
        Ok(())
    }

    fn error(&mut self, answer: &Pdu) -> Result<(), Failure> {
        let status = ErrorStatus::of(answer.status).unwrap_or(ErrorStatus::GenErr);
        if status == ErrorStatus::TooBig && (self.repetitions > 1 || self.names > 1) {
            // It is asked for less.
            if self.repetitions > 1 {
                self.repetitions /= 2;
            } else {
                self.names /= 2;
            }
            return Ok(());
        }
        let place = usize::try_from(answer.index).ok().and_then(|index| self.asked.get(index.checked_sub(1)?));
        Err(Failure::Error(status, place.map_or(0, |place| place + 1)))
    }

    /// The variables of the answer, in the order of RFC 3416 section 4.2.3.
    pub(super) fn finish(self) -> Vec<VarBind> {
        let (single, repeated) = self.chains.split_at(self.single);
        let mut bindings: Vec<VarBind> = single.iter().map(|chain| chain.found.first().cloned().unwrap_or_else(|| chain.end())).collect();
        let rows = repeated.iter().map(|chain| chain.wanted).max().unwrap_or(0);
        for row in 0..rows {
            let all_ended = repeated.iter().all(|chain| chain.found.len() <= row);
            bindings.extend(repeated.iter().map(|chain| chain.found.get(row).cloned().unwrap_or_else(|| chain.end())));
            if all_ended {
                break;
            }
        }
        bindings
    }
}

/// The value that a slice gets without a question to the agent.
fn without_agent(name: &Oid, sight: &impl Sight) -> Option<Value> {
    match sight.view().access(name) {
        Access::None if sight.view().has_object(name) => Some(Value::NoSuchInstance),
        Access::None => Some(Value::NoSuchObject),
        Access::Read | Access::Write => sight.overlay(name),
    }
}

/// Takes what the agent has behind the cursor of a variable.
fn follow(chain: &mut Chain, column: VecDeque<VarBind>, sight: &impl Sight) -> Result<(), Failure> {
    let mut last = chain.cursor.clone();
    for VarBind { name, value } in column {
        if value == Value::EndOfMibView {
            chain.ended = true;
        }
        if chain.is_done() {
            break;
        }
        if name <= last {
            return Err(Failure::Faulty(
                "its walk does not go forward, and would never end: repair the agent, or leave this part out of the view",
            ));
        }
        if !value.is_real() {
            return Err(Failure::Faulty("a walk finds no value"));
        }
        last = name.clone();
        if name <= chain.cursor {
            // The cursor has jumped over it.
            continue;
        }
        if sight.view().access(&name) > Access::None {
            let value = sight.overlay(&name).unwrap_or(value);
            chain.found.push(VarBind::new(name.clone(), value));
        }
        chain.seek(name, sight.view());
    }
    Ok(())
}
