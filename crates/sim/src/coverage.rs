//! Every figure, table, theorem and lemma of the five papers, and every further claim of their texts, with the one place that shows it.
//!
//! `tests/coverage.rs` holds this list against the papers' numbering, the page, and `docs/benchmarks.md`.

use std::fmt::Write as _;

use crate::experiment::{Judgement, Paper, Report};

/// One item of a paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The paper.
    pub paper: Paper,
    /// Its number in the paper, for example "fig. 2.7" or "Theorem 5"; a section for a claim of the text.
    pub item: &'static str,
    /// What it shows or claims.
    pub shows: &'static str,
    /// The one place that shows it here.
    pub owner: Owner,
}

/// Where an item is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// An experiment of the simulator, and the indices of its claims that belong to the item; none for all of them.
    Experiment(&'static str, &'static [usize]),
    /// A benchmark of the lab, on real traffic.
    Benchmark(&'static str),
    /// Both.
    Both(&'static str, &'static [usize], &'static str),
    /// A test of the lab on real traffic: its file and its function. It shows that something works and has no figures.
    Test(&'static str, &'static str),
    /// A test without a network: its file and its function. It has no figures either.
    Unit(&'static str, &'static str),
    /// It was not tried, for this reason.
    NotTried(&'static str),
    /// It has nothing to measure: a diagram, a photograph, a definition.
    Nothing(&'static str),
}

/// The benchmarks that entries name, and their sections in `docs/benchmarks.md`.
pub const BENCHMARKS: [(&str, &str); 12] = [
    ("mixes", "Mixes of long and short downloads"),
    ("bond-few", "Few long flows"),
    ("bond-fair", "Weights and preferences: the thesis's figure 4.5 on real links"),
    ("schedulers", "The schedulers alone"),
    ("calls", "Cost of system calls"),
    ("proxy", "Plain downloads through the proxy"),
    ("virtual", "The virtual interface"),
    ("moves", "Running direct flows change their link"),
    ("late", "Late binding"),
    ("adhoc", "The ad-hoc device"),
    ("adhoc-access", "The ad-hoc device at access points"),
    ("handover", "Handovers between access points"),
];
/// The benchmark of figure 5.6.
pub const COPIES: (&str, &str) = ("net-copies", "A video in several copies");

const fn dnis(item: &'static str, shows: &'static str, owner: Owner) -> Entry {
    Entry { paper: Paper::Dnis, item, shows, owner }
}

const fn dbas(item: &'static str, shows: &'static str, owner: Owner) -> Entry {
    Entry { paper: Paper::Dbas, item, shows, owner }
}

const fn operetta(item: &'static str, shows: &'static str, owner: Owner) -> Entry {
    Entry { paper: Paper::Operetta, item, shows, owner }
}

const fn vi(item: &'static str, shows: &'static str, owner: Owner) -> Entry {
    Entry { paper: Paper::VirtualInterface, item, shows, owner }
}

const fn thesis(item: &'static str, shows: &'static str, owner: Owner) -> Entry {
    Entry { paper: Paper::Thesis, item, shows, owner }
}

use Owner::{Benchmark, Both, Experiment, NotTried, Nothing, Test, Unit};

const DIAGRAM: Owner = Nothing("a diagram");

/// The list, by paper, in the order of the papers' numbers.
pub static ENTRIES: &[Entry] = &[
    dnis("fig. 1", "layered service providers in Windows", DIAGRAM),
    dnis("fig. 2", "five schedulers over Wi-Fi and Ethernet; up to 54 % over one interface", Both("dnis-2", &[], "mixes")),
    dnis("section V.B", "little overhead on the protocol stack", Benchmark("calls")),
    dbas("fig. 1", "architecture", DIAGRAM),
    dbas("fig. 2", "the monitoring application", Nothing("a screenshot")),
    dbas("Table I", "parameters", Nothing("the parameters of figures 3 to 6, which the experiments use")),
    dbas("fig. 3", "schedulers as IF2 narrows, of connections (a)", Both("dbas-3a", &[], "mixes")),
    dbas("fig. 3b", "the same, of packets", Experiment("dbas-3b", &[])),
    dbas("fig. 4", "schedulers as IF2 loses packets, of connections (a)", Experiment("dbas-4a", &[])),
    dbas("fig. 4b", "the same, of packets", Experiment("dbas-4b", &[])),
    dbas("fig. 5", "the mix of applications; up to 130 % by the demands, 193 % over one interface", Experiment("dbas-5", &[])),
    dbas("fig. 6", "one long connection and a few short ones", Both("dbas-6", &[], "bond-few")),
    dbas("section IV.C", "packet-oriented schedulers are within 9 % of the optimum", Experiment("dbas-3b", &[1, 4])),
    dbas(
        "section IV.C, connections",
        "connection-oriented ones can generally be near it, and are never below one interface",
        Experiment("dbas-3a", &[4, 5]),
    ),
    dbas("section IV.C, clients", "many clients share a network", Experiment("dbas-clients", &[])),
    operetta("fig. 1", "architecture", DIAGRAM),
    operetta("fig. 2", "the user's view", Nothing("not in the text of the paper")),
    operetta("Table I", "power of network cards", Nothing("inputs, from another paper; vi-graph-1 uses them")),
    operetta("Table II", "notation", Nothing("symbols")),
    operetta("Table III", "parameters", Nothing("the parameters of figures 3 to 9, which the experiments use")),
    operetta("Algorithm 1", "the scheduler, at most quadratic in the interfaces", Benchmark("schedulers")),
    operetta(
        "section IV.C, special case",
        "with packets only and α = 1 it is weighted round robin",
        Unit("crates/decide/tests/operetta.rs", "packets_fill_the_cheap_links_first"),
    ),
    operetta("fig. 3", "the share of participating servers, γ", Experiment("operetta-3", &[])),
    operetta("fig. 4", "the bandwidth of IF1; up to 44 % less energy", Experiment("operetta-4", &[])),
    operetta("fig. 5", "the utility, α", Experiment("operetta-5", &[])),
    operetta("fig. 6", "two utility functions over time", Experiment("operetta-6", &[])),
    operetta("fig. 7", "streams of uneven size", Experiment("operetta-7", &[])),
    operetta("fig. 8", "errors of estimation", Experiment("operetta-8", &[])),
    operetta("fig. 9", "baseline schedulers", Experiment("operetta-9", &[])),
    operetta(
        "section VI.B.3",
        "the smoother the utility function, the better",
        NotTried("the paper does not say what is better; its figure 6 has one smooth function and one step"),
    ),
    operetta("section VI.B.5", "other models of errors give similar results", NotTried("the paper does not describe them")),
    vi("fig. 1", "blocks", DIAGRAM),
    vi("fig. 2", "the neighbour database", DIAGRAM),
    vi("fig. 3", "topology I", DIAGRAM),
    vi("table 1", "round trip with the virtual interface: +4.0 %, saving power +4.2 %", Benchmark("adhoc")),
    vi("table 2", "time of a handover by maxdiff", Both("vi-2", &[], "adhoc")),
    vi("table 3", "throughput over one interface, by the size of packets: 3.1 % and 3.5 % less", Benchmark("adhoc")),
    vi("table 4", "energy of the module: 0.427 % more", Benchmark("adhoc")),
    vi("table 5", "two interfaces, two access points", Both("vi-5", &[], "adhoc-access")),
    vi("table 6", "the same, one access point saturated", Both("vi-6", &[], "adhoc-access")),
    vi("table 7", "three interfaces, one saturated access point", Both("vi-7", &[], "adhoc-access")),
    vi("graph 1", "power saving below 10 % of the battery: 5.4 % less energy", Both("vi-graph-1", &[], "adhoc")),
    thesis("fig. 1.1", "fair queueing on each interface is unfair", Experiment("thesis-3-1", &[1, 2])),
    thesis("fig. 2.1", "architecture of Hercules", DIAGRAM),
    thesis("fig. 2.2", "devices", Nothing("photographs")),
    thesis("fig. 2.3", "cost on a phone: throughput, round trip, processor, power", Benchmark("virtual")),
    thesis("fig. 2.4", "routes of fig. 2.6", DIAGRAM),
    thesis("fig. 2.5", "addresses of fig. 2.6", DIAGRAM),
    thesis("fig. 2.6", "a running flow moves to another network, then to a waypoint", Benchmark("moves")),
    thesis(
        "fig. 2.7",
        "two networks together: 95 % of the sum on the laptop, 77 % on the phone, whose radios disturb each other",
        Benchmark("virtual"),
    ),
    thesis("fig. 2.8", "each of two networks fails for 20 s", Benchmark("virtual")),
    thesis("fig. 2.9", "ten networks: more than three times the fastest", Benchmark("virtual")),
    thesis("fig. 2.10", "a flow moves when the device stops moving", Test("moves.rs", "an_accelerometer_moves_a_running_flow_and_back")),
    thesis("fig. 2.11", "three network stacks", DIAGRAM),
    thesis("fig. 2.12", "setup for the buffer of a Wi-Fi card", NotTried("needs a Wi-Fi card, an oscilloscope and an antenna")),
    thesis("fig. 2.13", "signals of a Wi-Fi card", NotTried("needs the hardware of fig. 2.12")),
    thesis("fig. 2.14", "retransmissions after an interface is lost: 26.3 with a buffer of 50, 3.9 with 5", Benchmark("late")),
    thesis("fig. 2.15", "their distribution", Benchmark("late")),
    thesis(
        "fig. 2.16",
        "throughput after a burst of 50 losses, and after one; the buffer of one packet is an emulation in the paper, too",
        Benchmark("late"),
    ),
    thesis(
        "fig. 2.17",
        "window and threshold of TCP after a burst",
        NotTried("the window is not drawn; the time in recovery is measured (fig. 2.18)"),
    ),
    thesis("fig. 2.18", "time in recovery, and throughput in the second after", Benchmark("late")),
    thesis("fig. 2.19", "delay of an urgent packet: 135 ms with a buffer of 50, 7.4 ms with 2", Benchmark("late")),
    thesis("fig. 3.1", "packet scheduling with preferences", Experiment("thesis-3-1", &[])),
    thesis("fig. 3.2", "the model", DIAGRAM),
    thesis("fig. 3.3", "arrivals and service in the proof of Theorem 3", DIAGRAM),
    thesis("Definition 1", "max-min fairness", Nothing("a definition")),
    thesis("Definition 2", "rate clustering", Nothing("a definition; thesis-4-5 and thesis-4-8 show clusters")),
    thesis("Theorem 1", "the proportional fair allocation is max-min fair", Experiment("thesis-3-4", &[0, 1, 2])),
    thesis("Theorem 2", "a flow has at least its fair share", Experiment("thesis-3-4", &[3])),
    thesis("Theorem 3", "the delay is at most σ/ρ", Experiment("thesis-3-4", &[4])),
    thesis("Theorem 4", "rate clustering is necessary and sufficient", Experiment("thesis-3-4", &[5, 6])),
    thesis("Lemma 1", "no gain without a loss in a work-conserving system", Experiment("thesis-3-4", &[7])),
    thesis("Lemma 2", "rate clustering is sufficient", Experiment("thesis-3-4", &[5, 6])),
    thesis("Lemma 3", "rate clustering is necessary", Experiment("thesis-3-4", &[5])),
    thesis("fig. 4.1", "service of PGPS and its bound", Experiment("thesis-4-3", &[3])),
    thesis("Lemma 4", "delay due to mis-ordering", Experiment("thesis-4-3", &[2])),
    thesis("Lemma 5", "delay due to mis-serviced packets", Experiment("thesis-4-3", &[1])),
    thesis("Lemma 6", "delay due to another rate", Experiment("thesis-4-3", &[2])),
    thesis("Theorem 5", "PGPS is at most so late", Experiment("thesis-4-3", &[0])),
    thesis("Theorem 6", "PGPS is at most so far behind", Experiment("thesis-4-3", &[3])),
    thesis("Theorem 7", "no causal scheduler can tell which packet finishes first", Experiment("thesis-4-3", &[4, 5])),
    thesis("Table 4.1", "DRR and miDRR as pseudocode", Nothing("pseudocode; thesis-4-4 runs it as \"service flag\"")),
    thesis("Definition 3", "the directional fairness metric", Nothing("a definition; thesis-3-4 computes it for Lemmas 9 and 10")),
    thesis("Theorem 8", "miDRR is max-min fair", Experiment("thesis-4-4", &[0])),
    thesis("section 4.4.1", "one bit for each flow and interface is enough", Experiment("thesis-4-4", &[1])),
    thesis(
        "Lemma 7",
        "the deficit counter is less than a packet after a turn",
        NotTried("no experiment sees the counter; a unit test has it for deficit round robin on one link (`fair/guarantees.rs`)"),
    ),
    thesis(
        "Lemma 8",
        "service after m turns",
        NotTried("no experiment sees the turns; a unit test has it for deficit round robin on one link (`fair/guarantees.rs`)"),
    ),
    thesis("Lemma 9", "a slower flow is ahead by less than two packets", Experiment("thesis-3-4", &[8])),
    thesis("Lemma 10", "flows of one interface differ by less than Q' and two packets", Experiment("thesis-3-4", &[9])),
    thesis("Theorem 9", "named in section 4.4.3", Nothing("the thesis has none; it means Theorem 8, it seems")),
    thesis("Theorem 10", "named in section 4.4.3", Nothing("as Theorem 9")),
    thesis("fig. 4.2", "miDRR in the kernel", DIAGRAM),
    thesis("fig. 4.3", "miDRR in both directions", DIAGRAM),
    thesis("fig. 4.4", "miDRR in a proxy", DIAGRAM),
    thesis("fig. 4.5", "three flows over two interfaces", Both("thesis-4-5", &[], "bond-fair")),
    thesis("fig. 4.6", "time of a decision by flows", Both("thesis-4-6", &[], "schedulers")),
    thesis("fig. 4.7", "time of a decision by interfaces", Both("thesis-4-7", &[], "schedulers")),
    thesis("fig. 4.8", "three HTTP downloads over two interfaces", Both("thesis-4-8", &[0, 1], "proxy")),
    thesis("fig. 4.9", "their clusters", Experiment("thesis-4-8", &[2])),
    thesis("fig. 5.1", "a user moves between networks", DIAGRAM),
    thesis("fig. 5.2", "architecture of OpenFlow Wireless", DIAGRAM),
    thesis(
        "section 5.2, slices",
        "FlowVisor: several controllers share the switches",
        Test("slicer.rs", "two_controllers_share_a_switch_and_survive_the_slicer"),
    ),
    thesis(
        "section 5.2, configuration",
        "SNMPVisor: each slice configures its part",
        Test("snmp.rs", "two_managers_see_and_set_their_own_part_only"),
    ),
    thesis("fig. 5.3", "a software-friendly network", DIAGRAM),
    thesis("fig. 5.4", "an access point and a base station", Nothing("photographs")),
    thesis("fig. 5.5", "the access points of a building", Nothing("a map")),
    thesis("fig. 5.6", "a video in three copies over links that lose 3 %", Benchmark(COPIES.0)),
    thesis("Table 5.1", "packets lost in handovers", Benchmark("handover")),
    thesis("fig. 5.7", "packets lost in vertical handovers", Benchmark("handover")),
    thesis("fig. 5.8", "TCP with handovers", Benchmark("handover")),
    thesis("Table 5.2", "TCP's throughput with handovers", Benchmark("handover")),
    thesis(
        "fig. 5.9",
        "chat in a multicast group of the network",
        Test("sfnet.rs", "a_group_gets_each_datagram_once_and_no_link_carries_one_twice"),
    ),
    thesis("section 5.6", "chat takes 3 ms instead of 21 ms", NotTried("no XMPP server was measured beside the group")),
];

impl Owner {
    /// The experiment and its claims, if there is one.
    pub fn experiment(&self) -> Option<(&'static str, &'static [usize])> {
        match *self {
            Experiment(name, claims) | Both(name, claims, _) => Some((name, claims)),
            _ => None,
        }
    }

    /// The benchmark, if there is one.
    pub fn benchmark(&self) -> Option<&'static str> {
        match *self {
            Benchmark(name) | Both(_, _, name) => Some(name),
            _ => None,
        }
    }
}

/// The section of a benchmark in `docs/benchmarks.md`.
pub fn section(benchmark: &str) -> Option<&'static str> {
    BENCHMARKS.iter().chain([&COPIES]).find(|(name, _)| *name == benchmark).map(|(_, heading)| *heading)
}

impl Entry {
    /// The entry as a row of the page, with what was found.
    pub fn row(&self, reports: &[Report]) -> String {
        let mut places = Vec::new();
        if let Some((name, _)) = self.owner.experiment() {
            places.push(format!("[{name}](#{name})"));
        }
        if let Some(name) = self.owner.benchmark() {
            places.push(format!("live: [{name}](benchmarks.md#{})", anchor(section(name).unwrap_or(name))));
        }
        match self.owner {
            Test(file, test) => places.push(format!("live: a test without figures, `{test}` in `lab/tests/lab/{file}`")),
            Unit(file, test) => places.push(format!("a unit test, `{test}` in `{file}`")),
            NotTried(why) => places.push(format!("not tried: {why}")),
            Nothing(why) => places.push(format!("nothing to measure: {why}")),
            _ => {}
        }
        format!("| {} | {} | {} | {} |", self.item, self.shows, places.join("; "), self.found(reports))
    }

    /// The judgements of the entry's claims, in their order.
    fn found(&self, reports: &[Report]) -> String {
        let Some((name, claims)) = self.owner.experiment() else { return String::new() };
        let Some(report) = reports.iter().find(|report| report.about.name == name) else { return String::new() };
        let all = &report.results.comparisons;
        let chosen: Vec<Judgement> = match claims {
            [] => all.iter().map(|comparison| comparison.judgement).collect(),
            claims => claims.iter().filter_map(|claim| all.get(*claim)).map(|comparison| comparison.judgement).collect(),
        };
        Judgement::counts(&chosen)
    }
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || *letter == ' ' || *letter == '-');
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// The section of the page that lists all entries, by paper.
pub fn list(reports: &[Report]) -> String {
    let mut page = String::from(
        "\n## All figures, tables, theorems and claims\n\n\
         Each has one place: an experiment of the simulator (below on this page), a benchmark on real traffic in the lab (live), or both; or it was not\n\
         tried, with the reason. What has an experiment only was not run on real traffic. The sections of the benchmarks say where their parameters are\n\
         not the paper's. The last column has what the experiment found.\n",
    );
    let mut paper = None;
    for entry in ENTRIES {
        if paper != Some(entry.paper) {
            let _ = write!(
                page,
                "\n**{}**\n\n| item | what it shows | where it is shown | found |\n|---|---|---|---|\n",
                entry.paper.citation()
            );
            paper = Some(entry.paper);
        }
        let _ = writeln!(page, "{}", entry.row(reports));
    }
    let of = |has: fn(&Owner) -> bool| ENTRIES.iter().filter(|entry| has(&entry.owner)).count();
    let _ = writeln!(
        page,
        "\n{} entries: {} in the simulator, of which {} also live; {} live only; {} in a unit test; {} not tried; {} have nothing to measure.",
        ENTRIES.len(),
        of(|owner| owner.experiment().is_some()),
        of(|owner| matches!(owner, Both(..))),
        of(|owner| matches!(owner, Benchmark(_) | Test(..))),
        of(|owner| matches!(owner, Unit(..))),
        of(|owner| matches!(owner, NotTried(_))),
        of(|owner| matches!(owner, Nothing(_)))
    );
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_those_of_github() {
        assert_eq!(
            anchor("Weights and preferences: the thesis's figure 4.5 on real links"),
            "weights-and-preferences-the-thesiss-figure-45-on-real-links"
        );
    }
}
