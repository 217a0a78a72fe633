//! Instances as text: the input and output of `braid sim operetta --instance FILE --json`.

use braid_model::{LinkSet, MAX_LINKS};
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::instance::{InstanceError, parse};

use super::solver::{Instance, Solution};
use super::{NewKind, Utility};

/// Maximum load, rate and power. Real machines stay below it, and products of larger values could overflow.
const LIMIT: f64 = 1e18;

/// The result of an instance; the fields are in the order of the JSON output.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InstanceResult {
    /// Name of the link of a connection-oriented new stream; `null` for a packet-oriented one.
    pub assignment: Option<String>,
    /// Share of the packet load on each link, by name. The shares sum to 1, or are all 0 if there is no packet load.
    pub weights: BTreeMap<String, f64>,
    /// Eq. 2 over the remaining load of all streams, including connection-oriented ones, in joules.
    pub energy_j: f64,
    /// Throughput in bits per second; 0 if there is nothing to move.
    pub throughput_bps: f64,
    /// The requested target in bits per second.
    pub target_bps: f64,
    /// Whether the target is reached.
    pub feasible: bool,
}

/// Parses an instance from JSON and solves it.
///
/// All keys are required except `link`, which connection-oriented streams need and others must omit (or set to `null`). Unknown keys are rejected.
///
/// ```
/// let result = braid_decide::operetta::solve_instance(
///     r#"{"alpha": 1.0,
///         "links": [{"name": "wifi", "rate_bps": 1000000, "power_mw": 634}],
///         "streams": [{"load_bytes": 1000, "kind": "connection", "link": "wifi"}, {"load_bytes": 1000, "kind": "packet"}],
///         "new": {"load_bytes": 1000, "kind": "connection"}}"#,
/// )?;
/// assert_eq!(result.assignment.as_deref(), Some("wifi"));
/// assert_eq!(result.weights["wifi"], 1.0);
/// assert!(result.feasible);
/// # Ok::<(), braid_decide::instance::InstanceError>(())
/// ```
pub fn solve_instance(text: &str) -> Result<InstanceResult, InstanceError> {
    let file: File = parse(text)?;
    let instance = file.instance()?;
    let solution = instance.solve().map_err(|error| InstanceError::new("instance", error.to_string()))?;
    Ok(file.result(&instance, &solution))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an instance as an object")]
struct File {
    alpha: f64,
    links: Vec<InstanceLink>,
    streams: Vec<Stream>,
    new: New,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a link as an object")]
struct InstanceLink {
    name: String,
    rate_bps: f64,
    power_mw: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a stream as an object")]
struct Stream {
    load_bytes: f64,
    kind: Kind,
    link: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a stream as an object")]
struct New {
    load_bytes: f64,
    kind: Kind,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Connection,
    Packet,
}

impl File {
    fn instance(&self) -> Result<Instance, InstanceError> {
        let alpha = Utility::new(self.alpha).map_err(|error| InstanceError::new("alpha", error.to_string()))?;
        if self.links.is_empty() || self.links.len() > MAX_LINKS {
            return Err(InstanceError::new("links", format!("{} links: give from 1 to {MAX_LINKS}", self.links.len())));
        }
        let mut instance = Instance::new(LinkSet::ALL);
        let mut indices = BTreeMap::new();
        for (index, link) in self.links.iter().enumerate() {
            self.check_link(index)?;
            if let Some(first) = indices.insert(link.name.as_str(), index) {
                let reason = format!("{:?} is also the name of links[{first}]: give each link a unique name", link.name);
                return Err(InstanceError::new(format!("links[{index}].name"), reason));
            }
            let rate = link.rate_bps / 8.0;
            let energy = link.power_mw / 1e3 / rate;
            let field = |error: super::OperettaError| InstanceError::new(format!("links[{index}].power_mw"), error.to_string());
            instance.add_link(index, rate, energy, energy).map_err(field)?;
        }
        for (index, stream) in self.streams.iter().enumerate() {
            let field = |name: &str| format!("streams[{index}].{name}");
            let load = amount(stream.load_bytes, 0.0, || field("load_bytes"))?;
            match (stream.kind, &stream.link) {
                (Kind::Packet, None) => instance.add_packets(load),
                (Kind::Packet, Some(_)) => {
                    return Err(InstanceError::new(field("link"), "a packet-oriented stream must not name a link: remove it"));
                }
                (Kind::Connection, None) => {
                    return Err(InstanceError::new(field("link"), "a connection-oriented stream needs the name of its link"));
                }
                (Kind::Connection, Some(name)) => {
                    let link = indices.get(name.as_str()).ok_or_else(|| {
                        InstanceError::new(
                            field("link"),
                            format!("no link has the name {name:?}: use the name of one of the instance's links"),
                        )
                    })?;
                    instance.add_connection(*link, load).map_err(|error| InstanceError::new(field("load_bytes"), error.to_string()))?;
                }
            }
        }
        let load = amount(self.new.load_bytes, 0.0, || "new.load_bytes".to_owned())?;
        let kind = match self.new.kind {
            Kind::Connection => NewKind::Connection,
            Kind::Packet => NewKind::Packet,
        };
        instance.set_new(load, kind, LinkSet::ALL);
        instance.set_utility(alpha);
        Ok(instance)
    }

    fn check_link(&self, index: usize) -> Result<(), InstanceError> {
        let link = &self.links[index];
        if link.name.is_empty() {
            return Err(InstanceError::new(format!("links[{index}].name"), "the name is empty: give the link a name"));
        }
        amount(link.rate_bps, 1.0, || format!("links[{index}].rate_bps"))?;
        amount(link.power_mw, 0.0, || format!("links[{index}].power_mw"))?;
        Ok(())
    }

    fn result(&self, instance: &Instance, solution: &Solution) -> InstanceResult {
        InstanceResult {
            assignment: solution.assignment.map(|link| self.links[link].name.clone()),
            weights: self.links.iter().map(|link| link.name.clone()).zip(solution.weights).collect(),
            energy_j: solution.energy,
            throughput_bps: solution.throughput * 8.0,
            target_bps: instance.target * 8.0,
            feasible: solution.feasible,
        }
    }
}

fn amount(value: f64, least: f64, field: impl FnOnce() -> String) -> Result<f64, InstanceError> {
    if (least..=LIMIT).contains(&value) {
        return Ok(value);
    }
    Err(InstanceError::new(field(), format!("{value:?} is out of range: give a number from {least} to {LIMIT:e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"alpha":0.5,"links":[{"name":"wifi","rate_bps":1000000,"power_mw":634},{"name":"lte","rate_bps":2e6,"power_mw":1900.5}],
        "streams":[{"load_bytes":1000,"kind":"connection","link":"lte"},{"load_bytes":1000,"kind":"packet"}],
        "new":{"load_bytes":1000,"kind":"packet"}}"#;

    #[test]
    fn results_are_written_with_the_fixed_keys() {
        let text = serde_json::to_string(&solve_instance(GOOD).unwrap()).unwrap();
        assert!(text.starts_with(r#"{"assignment":null,"weights":{"lte":"#), "{text}");
        for key in ["\"wifi\":", "\"energy_j\":", "\"throughput_bps\":", "\"target_bps\":2000000.0", "\"feasible\":true}"] {
            assert!(text.contains(key), "{key} in {text}");
        }
    }

    #[test]
    fn invalid_instances_are_refused_with_field_and_reason() {
        for (good, bad, field, reason) in [
            ("\"alpha\":0.5", "\"alpha\":1.5", "alpha", "from 0 to 1"),
            ("\"alpha\":0.5", "\"alpha\":null", "alpha", "invalid type: null"),
            ("\"alpha\":0.5,", "", "instance", "missing field `alpha`"),
            ("\"alpha\":0.5", "\"beta\":1,\"alpha\":0.5", "beta", "unknown field `beta`"),
            ("\"rate_bps\":1000000", "\"rate_bps\":0", "links[0].rate_bps", "from 1"),
            ("\"rate_bps\":1000000", "\"rate_bps\":\"1 Mbit/s\"", "links[0].rate_bps", "invalid type: string"),
            ("\"rate_bps\":1000000,", "", "links[0]", "missing field `rate_bps`"),
            ("\"power_mw\":1900.5", "\"power_mw\":-1", "links[1].power_mw", "from 0"),
            ("\"name\":\"lte\"", "\"name\":\"wifi\"", "links[1].name", "links[0]"),
            ("\"name\":\"lte\"", "\"name\":\"\"", "links[1].name", "empty"),
            ("\"link\":\"lte\"", "\"link\":\"dsl\"", "streams[0].link", "no link has the name \"dsl\""),
            (",\"link\":\"lte\"", "", "streams[0].link", "needs the name"),
            ("\"kind\":\"packet\"}]", "\"kind\":\"packet\",\"link\":\"lte\"}]", "streams[1].link", "must not name a link"),
            ("\"kind\":\"packet\"}]", "\"kind\":\"bulk\"}]", "streams[1].kind", "unknown variant `bulk`"),
            ("\"load_bytes\":1000,\"kind\":\"packet\"}}", "\"load_bytes\":-5,\"kind\":\"packet\"}}", "new.load_bytes", "from 0"),
            ("\"kind\":\"packet\"}}", "\"kind\":\"packet\"}} x", "instance", "trailing characters"),
        ] {
            let text = GOOD.replacen(good, bad, 1);
            assert_ne!(text, GOOD, "{good}");
            let error = solve_instance(&text).unwrap_err();
            assert!(error.field == field && error.reason.contains(reason), "{bad}: {error}");
        }
        let error = solve_instance(r#"{"alpha":0,"links":[],"streams":[],"new":{"load_bytes":1,"kind":"packet"}}"#).unwrap_err();
        assert_eq!(error.field, "links");
    }

    #[test]
    fn a_null_link_counts_as_absent() {
        let text = GOOD.replace("\"kind\":\"packet\"}]", "\"kind\":\"packet\",\"link\":null}]");
        assert_eq!(solve_instance(&text), solve_instance(GOOD));
    }
}
