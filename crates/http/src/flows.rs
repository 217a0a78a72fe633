//! The living flows as answers and listeners get them: put into words where they are written, not where they are known.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use braid_api::{Flow, FlowChanges, List, Versioned};
use braid_control::core::FlowsView;
use bytes::Bytes;
use serde::{Serialize, Serializer};

/// Every living flow; written as a list of [`Flow`]s.
#[derive(Debug, Clone, Default)]
pub struct FlowList {
    /// Those that go over one link.
    pub direct: FlowsView,
    /// Those that peers carry.
    pub bonded: Vec<Flow>,
    text: OnceLock<Bytes>,
}

impl FlowList {
    /// Of these.
    pub fn new(direct: FlowsView, bonded: Vec<Flow>) -> Self {
        Self { direct, bonded, text: OnceLock::new() }
    }

    /// As `GET /v1/flows` answers; written at the first call, which takes milliseconds where there are thousands, and the same bytes for everybody after it.
    pub fn text(&self) -> Bytes {
        self.text.get_or_init(|| serde_json::to_vec(&Versioned::of(List::<Flow, _>::of(self))).unwrap_or_default().into()).clone()
    }

    /// The same, if it has been written.
    pub fn written(&self) -> Option<Bytes> {
        self.text.get().cloned()
    }

    /// What has changed since `before`; without one, everything is told and the answer is full.
    pub fn changes(&self, before: Option<&Self>) -> FlowChanges {
        let mut changes = self.direct.changes(before.map(|before| &before.direct));
        let mark = |flow: &Flow| Flow { age_ms: None, ..flow.clone() };
        let mut known: BTreeMap<u64, Flow> =
            before.into_iter().flat_map(|before| &before.bonded).map(|flow| (flow.id, mark(flow))).collect();
        for flow in &self.bonded {
            if known.remove(&flow.id).as_ref() != Some(&mark(flow)) {
                changes.put.push(flow.clone());
            }
        }
        changes.gone.extend(known.into_keys());
        changes
    }
}

impl Serialize for FlowList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.direct.iter().chain(self.bonded.iter().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bonded(id: u64, rx_bytes: u64, age_ms: u64) -> Flow {
        let flow = serde_json::json!({"id": id, "application": "curl", "protocol": "tcp", "remote": "192.0.2.1:443", "link": "wlan0+lte0",
            "carry": "bond", "scheduler": "midrr", "rx_bytes": rx_bytes, "age_ms": age_ms});
        serde_json::from_value(flow).unwrap()
    }

    fn list(bonded: Vec<Flow>) -> FlowList {
        FlowList::new(FlowsView::default(), bonded)
    }

    #[test]
    fn bonded_flows_that_changed_are_told_and_those_that_grew_older_are_not() {
        let before = list(vec![bonded(1, 10, 0), bonded(2, 10, 0), bonded(3, 10, 0)]);
        let after = list(vec![bonded(1, 10, 1000), bonded(2, 20, 1000), bonded(4, 0, 0)]);
        let changes = after.changes(Some(&before));
        assert_eq!((changes.full, changes.put.iter().map(|flow| flow.id).collect::<Vec<_>>(), changes.gone), (false, vec![2, 4], vec![3]));
        let all = after.changes(None);
        assert_eq!((all.full, all.put.len(), all.gone.len()), (true, 3, 0));
        assert_eq!(serde_json::to_value(&after).unwrap(), serde_json::to_value(&after.bonded).unwrap());
    }

    #[test]
    fn everybody_gets_the_bytes_that_were_written_once() {
        let flows = list(vec![bonded(1, 10, 0)]);
        assert_eq!(flows.written(), None);
        let text = flows.text();
        assert_eq!(serde_json::from_slice::<Versioned<List<Flow>>>(&text).unwrap().content.items, flows.bonded);
        assert_eq!((flows.written().unwrap().as_ptr(), flows.text().as_ptr()), (text.as_ptr(), text.as_ptr()));
    }
}
