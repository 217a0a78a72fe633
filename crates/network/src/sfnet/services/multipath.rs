//! Flows between two hosts that go over paths of their own.

use braid_model::Mac;
use serde::Deserialize;
use serde_json::{Value, json};

use super::given;
use crate::controller::MAX_APART;
use crate::ids::FlowSpec;
use crate::sfnet::service::{Action, Context, Lease, Service};

const EXAMPLE: &str =
    "{\"from\":\"10.9.0.7\",\"protocol\":\"udp\",\"ports\":[5001,5002]}, with \"to\" in place of \"from\" if your host sends";

/// A lease is a set of flows, told apart by the receiver's ports, that go over paths which share as few links as possible. A program that sends its packets by turns to these
/// ports uses several paths at once. OpenFlow switches divide packets of one flow only by their headers, so a flow stays on one path.
#[derive(Debug, Clone, Copy, Default)]
pub struct Multipath;

#[derive(Deserialize)]
struct Flows {
    from: Option<String>,
    to: Option<String>,
    protocol: Protocol,
    ports: Vec<u16>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Protocol {
    Tcp = 6,
    Udp = 17,
}

impl Service for Multipath {
    fn name(&self) -> &'static str {
        "multipath"
    }

    fn start(&mut self, context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
        let Flows { from, to, protocol, ports } = given(with, EXAMPLE)?;
        let (from, to): (Mac, Mac) = match (from, to) {
            (Some(from), None) => (context.host(&from)?, lease.host),
            (None, Some(to)) => (lease.host, context.host(&to)?),
            _ => return Err(format!("one of from and to is your own host, and left out; write \"with\":{EXAMPLE}")),
        };
        if from == to {
            return Err("both ends are your own host: name another one".to_owned());
        }
        if ports.is_empty() || ports.len() > MAX_APART || ports.contains(&0) {
            return Err(format!("write 1 to {MAX_APART} ports from 1 to 65535"));
        }
        let paths = context.network.paths_apart(from, to, ports.len());
        let links: Vec<usize> = paths.iter().map(Vec::len).collect();
        let disjoint = {
            let mut all: Vec<_> = paths.iter().flatten().collect();
            all.sort();
            all.windows(2).all(|pair| pair[0] != pair[1])
        };
        let spec = |port: u16| FlowSpec { to, from: Some(from), protocol: Some(protocol as u8), port: Some(port) };
        actions.push(Action::Spread { lease: lease.id, flows: ports.into_iter().map(spec).collect() });
        Ok(json!({"links": links, "disjoint": disjoint && !links.is_empty()}))
    }

    fn end(&mut self, _context: &Context<'_>, lease: Lease, actions: &mut Vec<Action>) {
        actions.push(Action::Spread { lease: lease.id, flows: Vec::new() });
    }
}
