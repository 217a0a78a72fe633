//! What went wrong lately, for the log and the API.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::Time;
use braid_openflow::ids::DatapathId;

use super::types::Trouble;

/// Most that are remembered for the API, and that wait for the log.
const MAX: usize = 256;
/// Time between two refusals of the same kind in the same slice at the same switch.
const AGAIN: Duration = Duration::from_secs(5);
/// Most kinds of refusals of which the time is remembered.
const MAX_KINDS: usize = 4096;

/// What is said about a refusal but its text.
type Kind = (Option<String>, Option<DatapathId>, Option<&'static str>);

/// The last troubles, and those for the log.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    last: VecDeque<Trouble>,
    log: VecDeque<Trouble>,
    logged: BTreeMap<Kind, Time>,
}

impl Troubles {
    pub(super) fn add(&mut self, trouble: Trouble) {
        if self.last.len() >= MAX {
            self.last.pop_back();
        }
        self.last.push_front(trouble.clone());
        let kind = (trouble.slice.clone(), trouble.switch, trouble.message);
        if kind.2.is_some() {
            if self.logged.len() >= MAX_KINDS {
                self.logged.retain(|_, last| trouble.at.since(*last) < AGAIN);
            }
            let is_new = self.logged.get(&kind).is_none_or(|last| trouble.at.since(*last) >= AGAIN);
            if !is_new || self.logged.len() >= MAX_KINDS {
                return;
            }
            self.logged.insert(kind, trouble.at);
        }
        if self.log.len() < MAX {
            self.log.push_back(trouble);
        }
    }

    pub(super) fn poll(&mut self) -> Option<Trouble> {
        self.log.pop_front()
    }

    pub(super) fn last(&self) -> impl Iterator<Item = &Trouble> {
        self.last.iter()
    }
}
