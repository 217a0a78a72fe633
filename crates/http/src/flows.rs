//! The active flows, for answers and listeners; serialized on the API's thread instead of in the core.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use braid_api::{Flow, FlowChanges, List, Versioned};
use braid_control::core::FlowsView;
use bytes::Bytes;
use serde::{Serialize, Serializer};

/// Every active flow; serialized as a list of [`Flow`]s.
#[derive(Debug, Clone, Default)]
pub struct FlowList {
    /// Flows over one link.
    pub direct: FlowsView,
    /// Flows forwarded by peers.
    pub bonded: Vec<Flow>,
    text: OnceLock<Bytes>,
}

impl FlowList {
    /// Creates a list of these flows.
    pub fn new(direct: FlowsView, bonded: Vec<Flow>) -> Self {
        Self { direct, bonded, text: OnceLock::new() }
    }

    /// The answer of `GET /v1/flows`. The first call serializes it, which takes milliseconds for thousands of flows; later calls return
    /// the same bytes.
    pub fn text(&self) -> Bytes {
        self.text.get_or_init(|| serde_json::to_vec(&Versioned::of(List::<Flow, _>::of(self))).unwrap_or_default().into()).clone()
    }

    /// The serialized answer, if [`Self::text`] was called before.
    pub fn written(&self) -> Option<Bytes> {
        self.text.get().cloned()
    }

    /// The changes since `before`; without it, all flows, marked as full.
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
    fn changed_bonded_flows_are_reported_and_those_that_only_aged_are_not() {
        let before = list(vec![bonded(1, 10, 0), bonded(2, 10, 0), bonded(3, 10, 0)]);
        let after = list(vec![bonded(1, 10, 1000), bonded(2, 20, 1000), bonded(4, 0, 0)]);
        let changes = after.changes(Some(&before));
        assert_eq!((changes.full, changes.put.iter().map(|flow| flow.id).collect::<Vec<_>>(), changes.gone), (false, vec![2, 4], vec![3]));
        let all = after.changes(None);
        assert_eq!((all.full, all.put.len(), all.gone.len()), (true, 3, 0));
        assert_eq!(serde_json::to_value(&after).unwrap(), serde_json::to_value(&after.bonded).unwrap());
    }

    #[test]
    fn all_clients_share_the_bytes_serialized_once() {
        let flows = list(vec![bonded(1, 10, 0)]);
        assert_eq!(flows.written(), None);
        let text = flows.text();
        assert_eq!(serde_json::from_slice::<Versioned<List<Flow>>>(&text).unwrap().content.items, flows.bonded);
        assert_eq!((flows.written().unwrap().as_ptr(), flows.text().as_ptr()), (text.as_ptr(), text.as_ptr()));
    }
}
