//! File formats of fair queueing instances and results.
//!
//! ```json
//! {"links": [{"name": "1", "capacity_bps": 3000000}],
//!  "flows": [{"name": "a", "weight": 1, "links": ["1"], "demand_bps": null, "packet_bytes": 1500}],
//!  "duration_s": 60, "seed": 1}
//! ```
//!
//! All fields are required except `demand_bps`, which may be omitted or null for an unlimited flow. Rates, packet sizes and the seed are integers;
//! weights and the duration may be fractions. Parsing validates everything: an existing [`Instance`] is valid.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{ByteCount, Rate};
use serde::{Deserialize, Serialize};

use super::{Allocation, Cluster, FairFlow, Problem};
use crate::instance::{InstanceError, parse};

/// Maximum number of links: a packet scheduler stores a set of links in one word.
pub const LINKS_LIMIT: usize = 64;
/// Maximum number of flows.
pub const FLOWS_LIMIT: usize = 10_000;
/// Maximum packet size, which is IP's.
pub const PACKET_LIMIT: ByteCount = ByteCount::new(65_535);
/// Maximum capacity of a link, 1 Pbit/s: integers up to this value are exact in every JSON parser.
pub const CAPACITY_LIMIT: Rate = Rate::from_bps(1_000_000_000_000_000);
/// Maximum duration of a run, one day.
pub const DURATION_LIMIT: Duration = Duration::from_secs(86_400);
/// Minimum and maximum weight.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// Named links and flows, and the duration for which to run a packet scheduler on them.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// The links; at least one, with unique names.
    pub links: Vec<NamedLink>,
    /// The flows; at least one, with unique names.
    pub flows: Vec<NamedFlow>,
    /// Duration of the packet scheduler's run, in virtual time.
    pub duration: Duration,
    /// Seed of everything random.
    pub seed: u64,
}

/// A link of an [`Instance`].
#[derive(Debug, Clone, PartialEq)]
pub struct NamedLink {
    /// Name of the link.
    pub name: String,
    /// Capacity C_j, more than zero.
    pub capacity: Rate,
}

/// A flow of an [`Instance`].
#[derive(Debug, Clone, PartialEq)]
pub struct NamedFlow {
    /// Name of the flow.
    pub name: String,
    /// Weight φ_i.
    pub weight: f64,
    /// Indices of the links it may use, in the file's order; at least one.
    pub links: Vec<usize>,
    /// Demand D_i, more than zero; `None` means unlimited.
    pub demand: Option<Rate>,
    /// Packet size.
    pub packet: ByteCount,
}

impl Instance {
    /// Parses an instance from JSON.
    ///
    /// # Errors
    ///
    /// [`InstanceError`] for invalid JSON, and for the first invalid field.
    pub fn read(text: &str) -> Result<Self, InstanceError> {
        let file: InstanceFile = parse(text)?;
        check_count("links", file.links.len(), LINKS_LIMIT)?;
        check_count("flows", file.flows.len(), FLOWS_LIMIT)?;
        let mut places = BTreeMap::new();
        let mut links = Vec::new();
        for (place, link) in file.links.into_iter().enumerate() {
            check_name("links", place, &link.name, &mut places)?;
            let capacity = parse_integer(&format!("links[{place}].capacity_bps"), link.capacity_bps, CAPACITY_LIMIT.bps())?;
            links.push(NamedLink { name: link.name, capacity: Rate::from_bps(capacity) });
        }
        let mut taken = BTreeMap::new();
        let mut flows = Vec::new();
        for (place, flow) in file.flows.into_iter().enumerate() {
            check_name("flows", place, &flow.name, &mut taken)?;
            flows.push(named_flow(place, flow, &places)?);
        }
        let span = file.duration_s;
        let duration = Duration::try_from_secs_f64(span).unwrap_or(Duration::MAX);
        if duration.is_zero() || duration > DURATION_LIMIT {
            let reason = format!("{span:?} is not a time to run for: give seconds, at least a nanosecond and at most 86400");
            return Err(InstanceError::new("duration_s", reason));
        }
        Ok(Self { links, flows, duration, seed: file.seed })
    }

    /// The problem without names.
    pub fn problem(&self) -> Problem {
        let flow = |flow: &NamedFlow| FairFlow { weight: flow.weight, links: flow.links.clone(), demand: flow.demand };
        Problem { links: self.links.iter().map(|link| link.capacity).collect(), flows: self.flows.iter().map(flow).collect() }
    }

    /// The report: exact rates and clusters, and the rates that miDRR reached for each flow, with service counters and with the thesis's service
    /// flags.
    pub fn report(&self, exact: &Allocation, clusters: &[Cluster], counted_bps: &[f64], flagged_bps: &[f64]) -> Report {
        let named = |rates: &[f64]| self.flows.iter().zip(rates).map(|(flow, rate)| (flow.name.clone(), *rate)).collect();
        let cluster = |cluster: &Cluster| ClusterReport {
            flows: cluster.flows.iter().map(|flow| self.flows[*flow].name.clone()).collect(),
            links: cluster.links.iter().map(|link| self.links[*link].name.clone()).collect(),
            rate_per_weight_bps: cluster.rate_per_weight_bps,
        };
        let midrr = |measured: &[f64]| MidrrReport {
            rates_bps: named(measured),
            max_relative_deviation: max_relative_deviation(&exact.rates_bps, measured),
        };
        Report {
            rates_bps: named(&exact.rates_bps),
            clusters: clusters.iter().map(cluster).collect(),
            midrr: midrr(counted_bps),
            midrr_flags: midrr(flagged_bps),
        }
    }
}

/// The result of an [`Instance`]; flows and links by name, rates in bits per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The exact weighted max-min rates.
    pub rates_bps: BTreeMap<String, f64>,
    /// The rate clusters.
    pub clusters: Vec<ClusterReport>,
    /// Rates of miDRR with service counters, the variant that Braid uses.
    pub midrr: MidrrReport,
    /// Rates of the thesis's variant with one service flag per flow and link, which is not always fair.
    pub midrr_flags: MidrrReport,
}

/// A rate cluster (Definition 2).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterReport {
    /// Names of its flows.
    pub flows: Vec<String>,
    /// Names of the links that serve them.
    pub links: Vec<String>,
    /// r_i/φ_i of its unsatisfied flows.
    pub rate_per_weight_bps: f64,
}

/// Rates that miDRR reached.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MidrrReport {
    /// Mean rates.
    pub rates_bps: BTreeMap<String, f64>,
    /// [`max_relative_deviation`] from the exact rates.
    pub max_relative_deviation: f64,
}

/// The maximum of |measured - exact| / exact over all flows; 0 without flows. For an exact rate of zero the deviation is zero or infinite.
pub fn max_relative_deviation(exact_bps: &[f64], measured_bps: &[f64]) -> f64 {
    let deviation = |(exact, measured): (&f64, &f64)| if exact == measured { 0.0 } else { (measured - exact).abs() / exact };
    exact_bps.iter().zip(measured_bps).map(deviation).fold(0.0, f64::max)
}

/// The file's structure before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an instance as an object")]
struct InstanceFile {
    links: Vec<LinkFields>,
    flows: Vec<FlowFields>,
    duration_s: f64,
    seed: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a link as an object")]
struct LinkFields {
    name: String,
    capacity_bps: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a flow as an object")]
struct FlowFields {
    name: String,
    weight: f64,
    links: Vec<String>,
    demand_bps: Option<f64>,
    packet_bytes: f64,
}

fn named_flow(place: usize, flow: FlowFields, places: &BTreeMap<String, usize>) -> Result<NamedFlow, InstanceError> {
    let field = |name: &str| format!("flows[{place}].{name}");
    if !WEIGHTS.contains(&flow.weight) {
        return Err(InstanceError::new(
            field("weight"),
            format!("{:?} is not a weight: give a number from 0.000001 to 1000000", flow.weight),
        ));
    }
    let mut links = Vec::new();
    for (entry, link) in flow.links.iter().enumerate() {
        let known = places.get(link).copied();
        let at = known.ok_or_else(|| {
            InstanceError::new(field(&format!("links[{entry}]")), format!("there is no link {link:?}: name one of `links`"))
        })?;
        if links.contains(&at) {
            return Err(InstanceError::new(field(&format!("links[{entry}]")), format!("link {link:?} is named twice: name it once")));
        }
        links.push(at);
    }
    if links.is_empty() {
        return Err(InstanceError::new(field("links"), "a flow without links gets nothing: name at least one".to_owned()));
    }
    let demand = flow.demand_bps.map(|demand| parse_integer(&field("demand_bps"), demand, CAPACITY_LIMIT.bps())).transpose()?;
    let packet = ByteCount::new(parse_integer(&field("packet_bytes"), flow.packet_bytes, PACKET_LIMIT.get())?);
    Ok(NamedFlow { name: flow.name, weight: flow.weight, links, demand: demand.map(Rate::from_bps), packet })
}

fn check_count(field: &str, count: usize, limit: usize) -> Result<(), InstanceError> {
    if count == 0 || count > limit {
        return Err(InstanceError::new(field, format!("there are {count}: give from 1 to {limit}")));
    }
    Ok(())
}

fn check_name(list: &str, place: usize, name: &str, taken: &mut BTreeMap<String, usize>) -> Result<(), InstanceError> {
    let field = format!("{list}[{place}].name");
    if name.is_empty() {
        return Err(InstanceError::new(field, "it is empty: give a name".to_owned()));
    }
    match taken.insert(name.to_owned(), place) {
        Some(first) => Err(InstanceError::new(field, format!("{name:?} is already the name of {list}[{first}]: give it another"))),
        None => Ok(()),
    }
}

fn parse_integer(field: &str, number: f64, limit: u64) -> Result<u64, InstanceError> {
    if number >= 1.0 && number <= limit as f64 && number % 1.0 == 0.0 {
        return Ok(number as u64);
    }
    Err(InstanceError::new(field, format!("{number:?} is not possible: give a whole number from 1 to {limit}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::{clusters, solve};

    const GOOD: &str = r#"{"links":[{"name":"1","capacity_bps":3000000},{"name":"2","capacity_bps":1e7}],
        "flows":[{"name":"a","weight":1,"links":["1"],"demand_bps":null,"packet_bytes":1500},
                 {"name":"b","weight":2,"links":["1","2"],"packet_bytes":1500},
                 {"name":"c","weight":1.0,"links":["2"],"demand_bps":9000000,"packet_bytes":100}],
        "duration_s":60,"seed":18446744073709551615}"#;

    fn read(text: &str) -> Result<Instance, String> {
        Instance::read(text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_instance_is_parsed_and_solved() {
        let instance = read(GOOD).expect("a good instance");
        assert_eq!((instance.seed, instance.duration), (u64::MAX, Duration::from_secs(60)));
        assert_eq!(instance.flows[1].links, [0, 1]);
        assert_eq!((instance.flows[0].demand, instance.flows[2].demand), (None, Some(Rate::from_mbps(9))));
        let problem = instance.problem();
        let exact = solve(&problem).expect("a valid problem");
        let found = clusters(&problem, &exact, 1e-9);
        let report = instance.report(&exact, &found, &[3e6, 6.6e6, 3.4e6], &[3e6, 5e6, 5e6]);
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!(json["rates_bps"]["a"], 3e6);
        assert_eq!(json["clusters"][1]["flows"], serde_json::json!(["b", "c"]));
        assert_eq!(json["clusters"][1]["links"], serde_json::json!(["2"]));
        let per_weight = json["clusters"][1]["rate_per_weight_bps"].as_f64().expect("a number");
        assert!((per_weight - 1e7 / 3.0).abs() < 1e-3);
        assert_eq!(json["midrr"]["rates_bps"]["b"], 6.6e6);
        assert!((json["midrr"]["max_relative_deviation"].as_f64().expect("a number") - 0.02).abs() < 1e-9);
        assert!((json["midrr_flags"]["max_relative_deviation"].as_f64().expect("a number") - 0.5).abs() < 1e-9);
    }

    #[test]
    fn deviations_are_relative_to_the_exact_rates() {
        assert_eq!(max_relative_deviation(&[2.0, 4.0, 0.0], &[2.0, 3.0, 0.0]), 0.25);
        assert_eq!(max_relative_deviation(&[0.0], &[1.0]), f64::INFINITY);
        assert_eq!(max_relative_deviation(&[], &[]), 0.0);
    }

    #[test]
    fn invalid_instances_are_refused_with_field_and_reason() {
        for (from, to, expected) in [
            ("3000000", "0", "links[0].capacity_bps: 0.0 is not possible: give a whole number from 1 to"),
            ("3000000", "-5", "links[0].capacity_bps: -5.0 is not possible"),
            ("3000000", "2.5", "links[0].capacity_bps: 2.5 is not possible"),
            ("3000000", "1e300", "links[0].capacity_bps: 1e300 is not possible"),
            ("3000000", "\"3 Mbit/s\"", "links[0].capacity_bps: invalid type: string"),
            ("\"weight\":2", "\"weight\":0", "flows[1].weight: 0.0 is not a weight"),
            ("\"weight\":2", "\"weight\":null", "flows[1].weight: invalid type: null"),
            ("\"weight\":2,", "", "flows[1]: missing field `weight`"),
            ("[\"1\",\"2\"]", "[\"1\",\"3\"]", "flows[1].links[1]: there is no link \"3\""),
            ("[\"1\",\"2\"]", "[\"1\",\"1\"]", "flows[1].links[1]: link \"1\" is named twice"),
            ("[\"1\",\"2\"]", "[]", "flows[1].links: a flow without links gets nothing"),
            ("[\"1\",\"2\"]", "\"1\"", "flows[1].links: invalid type: string"),
            ("9000000", "0", "flows[2].demand_bps: 0.0 is not possible"),
            ("9000000", "true", "flows[2].demand_bps: invalid type: boolean"),
            ("\"packet_bytes\":100", "\"packet_bytes\":65536", "flows[2].packet_bytes: 65536.0 is not possible"),
            ("\"name\":\"c\"", "\"name\":\"a\"", "flows[2].name: \"a\" is already the name of flows[0]"),
            ("\"name\":\"c\"", "\"name\":\"\"", "flows[2].name: it is empty"),
            ("\"name\":\"c\"", "\"name\":3", "flows[2].name: invalid type: integer"),
            ("\"name\":\"2\"", "\"name\":\"1\"", "links[1].name: \"1\" is already the name of links[0]"),
            ("\"duration_s\":60", "\"duration_s\":0", "duration_s: 0.0 is not a time to run for"),
            ("\"duration_s\":60", "\"duration_s\":1e-300", "duration_s: 1e-300 is not a time to run for"),
            ("\"duration_s\":60", "\"duration_s\":-1", "duration_s: -1.0 is not a time to run for"),
            ("\"duration_s\":60", "\"duration_s\":1e9", "duration_s: 1000000000.0 is not a time"),
            ("18446744073709551615", "-1", "seed: invalid value"),
            ("\"duration_s\":60", "\"duration\":60", "duration: unknown field `duration`"),
            ("\"weight\":2", "\"weigth\":2", "flows[1].weigth: unknown field `weigth`"),
            ("\"seed\":18446744073709551615}", "\"se", "instance: EOF while parsing"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = read(&GOOD.replacen(from, to, 1)).expect_err(to);
            assert!(error.contains(expected), "{to}: {error}");
        }
        let error = read(r#"{"links":[],"flows":[],"duration_s":1,"seed":1}"#).expect_err("no links");
        assert!(error.contains("links: there are 0: give from 1 to 64"), "{error}");
    }
}
