//! Figure 3: varying share of participating servers.

use super::{
    BY_BOND, DEFAULT, ENERGY, ENGR, IF1, IF2, IF3, LOWER, MID, PAYLOAD, Setup, THROUGHPUT, WITHIN, XPUT, at_lower_loads, bound, charts,
    least, within,
};
use crate::experiment::{
    About, Axis, Claim, Comparison, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Summary,
};

/// γ in percent.
const MIXES: [f64; 6] = [0.0, 10.0, 25.0, 50.0, 75.0, 100.0];
/// The paper's "few" participating servers, its γ in all other figures.
const FEW: f64 = MIXES[2];

/// γ values at which the bond is measured. It carries nothing without participating servers.
const BOND_MIXES: [f64; 3] = [10.0, 25.0, 100.0];

/// The variants with the suffix [`BY_BOND`].
const BOND_XPUT: &str = "OPRTA-XPUT (α = 1), bond";
const BOND_MID: &str = "OPRTA-MID (α = 0.5), bond";
const BOND_ENGR: &str = "OPRTA-ENGR (α = 0), bond";

static ABOUT: About = About {
    name: "operetta-3",
    paper: Paper::Operetta,
    figure: "fig. 3",
    title: "OPERETTA over the share of participating servers",
    setting: concat!(
        table_three!(),
        "γ, the share of streams to participating servers, is varied. The current OS uses IF3. In addition to the model of packet-oriented \
         streams, Braid's own bond is measured (real QUIC with Braid's controller on each interface, OPERETTA's weights at both ends). It \
         carries these streams in competition with the connections of all other streams; its points are measured at most five times. The same at lower \
         loads, without the bond; the claims are judged at Table III's."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "α = 1 and no participating server: more throughput than the current OS", paper: "+150 %" },
        Claim { text: "... at the same energy per unit of data", paper: "equal" },
        Claim { text: "α = 1 reaches the throughput optimum because a few servers participate", paper: "at γ = 25 %, not at 0" },
        Claim { text: "α = 0.5 gives up throughput for less energy as γ rises", paper: "both fall" },
        Claim { text: "α = 0 uses the interface of least energy per bit, whatever its throughput", paper: "IF2 alone" },
        Claim {
            text: "The bond: α = 1 reaches the throughput optimum because a few servers participate", paper: "at γ = 25 %, not at 0"
        },
        Claim { text: "The bond: α = 0.5 gives up throughput for less energy as γ rises", paper: "both fall" },
        Claim { text: "The bond: α = 0 uses the interface of least energy per bit", paper: "IF2 alone" },
    ],
};

/// The experiment of figure 3.
pub(super) struct Mix;

impl Experiment for Mix {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        let mut points = Point::grid(&[XPUT, MID, ENGR], &MIXES);
        points.extend(Point::grid(&[DEFAULT], &[0.0]));
        points.extend(Point::grid(&[BOND_XPUT, BOND_MID, BOND_ENGR], &BOND_MIXES));
        for (suffix, _) in LOWER {
            let lower = [XPUT, MID, ENGR].map(|series| format!("{series}{suffix}"));
            points.extend(Point::grid(&lower.each_ref().map(String::as_str), &[0.0, FEW, 100.0]));
            points.push(Point { series: format!("{DEFAULT}{suffix}"), x: 0.0 });
        }
        points
    }

    fn max_runs(&self, point: &Point) -> u32 {
        if point.series.ends_with(BY_BOND) { 5 } else { u32::MAX }
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let setup = Setup { mix: point.x / 100.0, ..Setup::of(&point.series) };
        match (point.series.ends_with(BY_BOND), run.quic) {
            (false, _) => setup.measure(run.seed),
            (true, Some(quic)) => setup.measure_bonded(run.seed, quic),
            (true, None) => Sample::default(),
        }
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let mean = |name, at| samples.summary(name, at).mean;
        let x = Axis::new("streams to participating servers, γ", "%");
        let results = charts(samples, "over γ", &x, |_| IF1.0).into_iter().fold(Results::default(), Results::chart);
        let results = results.table(within(samples, "γ, %")).table(at_lower_loads(samples, "γ, %"));
        let gain = samples.gain(THROUGHPUT, (XPUT, 0.0), (DEFAULT, 0.0));
        let benefit = samples.gain(THROUGHPUT, (XPUT, FEW), (XPUT, 0.0));
        let lower = |of: &dyn Fn(&str) -> Summary| LOWER.map(|(suffix, _)| format!("{:+.1} %{suffix}", of(suffix))).join("; ");
        let most = (bound(IF1.0) / (IF3.0 * PAYLOAD) - 1.0) * 100.0;
        let energy = samples.gain(ENERGY, (XPUT, 0.0), (DEFAULT, 0.0));
        let part = |mix| 100.0 * mean(THROUGHPUT, (XPUT, mix)) / bound(IF1.0);
        let [slower, cheaper] = [THROUGHPUT, ENERGY].map(|name| samples.gain(name, (MID, 100.0), (MID, 0.0)));
        let cost = mean(ENERGY, (ENGR, 0.0)) / least(IF1.0);
        let [first, last] = [0.0, 100.0].map(|mix| 100.0 * mean("IF2", (ENGR, mix)));
        results
            .comparison(ABOUT.claims[0].judge(
                format!("{:+.0} ± {:.0} %", gain.mean, gain.half),
                Judgement::met_or_differs(gain.mean >= 145.0, gain),
                format!(
                    "Table III's interfaces carry {:.1} Mbit/s together, IF3 alone 2: while all are busy no scheduler can gain more than {most:.0} % over \
                     IF3, which the paper names as the interface of the current OS (VI.B.2). Within the 60 s it is {:+.0} %. More than that is due to \
                     streams that end late if IF3 carries all. At lower loads: {}.",
                    IF1.0 + IF2.0 + IF3.0,
                    samples.gain(WITHIN, (XPUT, 0.0), (DEFAULT, 0.0)).mean,
                    lower(&|suffix| samples.gain(THROUGHPUT, (&format!("{XPUT}{suffix}"), 0.0), (&format!("{DEFAULT}{suffix}"), 0.0))),
                ),
            ))
            .comparison(ABOUT.claims[1].judge(
                format!("{:+.1} ± {:.1} %", energy.mean, energy.half),
                Judgement::met_or_not(energy.mean.abs() < 5.0),
                "",
            ))
            .comparison(ABOUT.claims[2].judge(
                format!(
                    "{:.1} % of the optimum at γ = 0, {:.1} % at 25 %, {:.1} % at 100 %; 25 % against 0: {benefit:+.1} %",
                    part(0.0),
                    part(FEW),
                    part(100.0)
                ),
                Judgement::met_or_differs(part(FEW) >= 97.0, benefit),
                format!("Table III offers 4.6 Mbit/s to links of 3.7 Mbit/s. Within the 60 s streams wait for every link and keep it full, whether chunks or \
                 whole streams are assigned: γ = 0 has {:.1} % of the optimum then. Afterwards links are idle until the last stream has ended. With a larger γ, each packet-oriented stream opens a \
                 connection on every link, and hundreds of concurrent short connections lose and retransmit packets. Within the 60 s γ = 25 % has \
                 {:+.1} %. At lower loads γ = 25 % has over 0: {}.",
                    100.0 * mean(WITHIN, (XPUT, 0.0)) / bound(IF1.0),
                    samples.gain(WITHIN, (XPUT, FEW), (XPUT, 0.0)),
                    lower(&|suffix| samples.gain(THROUGHPUT, (&format!("{XPUT}{suffix}"), FEW), (&format!("{XPUT}{suffix}"), 0.0)))
                ),
            ))
            .comparison(ABOUT.claims[3].judge(
                format!("throughput {:+.1} %, energy {:+.1} % from γ = 0 to 100 %", slower.mean, cheaper.mean),
                Judgement::met_or_not(slower.mean < 0.0 && cheaper.mean < 0.0),
                format!(
                    "The energy optimum for the target of 2.2 Mbit/s leaves IF3 idle for a quarter of the time. With an offered load above the \
                     target IF3 is never idle, since its assigned load is queued. γ does not change that: it only adds connections on links \
                     that carry no data, and retransmissions: within the 60 s throughput changes by {:+.1} %. The rise by eq. 3 is what streams that end late \
                     lose at γ = 0. At lower loads throughput changes by {}, energy by {}.",
                    samples.gain(WITHIN, (MID, 100.0), (MID, 0.0)).mean,
                    lower(&|suffix| samples.gain(THROUGHPUT, (&format!("{MID}{suffix}"), 100.0), (&format!("{MID}{suffix}"), 0.0))),
                    lower(&|suffix| samples.gain(ENERGY, (&format!("{MID}{suffix}"), 100.0), (&format!("{MID}{suffix}"), 0.0)))
                ),
            ))
            .comparison(ABOUT.claims[4].judge(
                format!("IF2 carries {first:.1} % (γ = 0) and {last:.1} % (γ = 100 %); {cost:.2} times the least energy at γ = 0"),
                Judgement::met_or_not(first > 99.0 && last > 99.0),
                format!(
                    "Packet-oriented streams also open connections on the other links, although these carry no data: {:.2} times the least \
                     energy at γ = 100 %.",
                    mean(ENERGY, (ENGR, 100.0)) / least(IF1.0),
                ),
            ))
            .comparisons(judge_bond(samples))
            .note(
                "If a link is down, a packet-oriented stream sends its unacknowledged chunks over the other links (III.G). The simulator \
                 treats a link as down if it is dark or after four consecutive timeouts, provided that the weights leave the stream \
                 another link. The limit matters under such a high load: if chunks were sent over other links at every timeout, they would \
                 arrive twice and α = 1 would carry much less.",
            )
    }
}

fn judge_bond(samples: &Samples) -> [Comparison; 3] {
    let mean = |name, at| samples.summary(name, at).mean;
    let part = |mix| 100.0 * mean(THROUGHPUT, (BOND_XPUT, mix)) / bound(IF1.0);
    let [slower, cheaper] = [THROUGHPUT, ENERGY].map(|name| samples.gain(name, (BOND_MID, 100.0), (MID, 0.0)).mean);
    let benefit = samples.gain(THROUGHPUT, (BOND_XPUT, FEW), (XPUT, 0.0));
    let [first, last] = [10.0, 100.0].map(|mix| 100.0 * mean("IF2", (BOND_ENGR, mix)));
    let cost = |series| mean(ENERGY, (series, 100.0)) / least(IF1.0);
    [
        ABOUT.claims[5].judge(
            format!(
                "{:.1} % of the optimum at γ = 10 %, {:.1} % at 25 %, {:.1} % at 100 %; 25 % against the model's 0: {benefit:+.1} %",
                part(10.0),
                part(FEW),
                part(100.0)
            ),
            Judgement::met_or_differs(part(FEW) >= 97.0, benefit),
            "The optimum includes the headers of TCP segments, 3.5 %; the headers of a bond are about 5 %, and its acknowledgements are \
             larger. Within the 60 s links are full for any γ, as in the model; streams that are not bonded end late.",
        ),
        ABOUT.claims[6].judge(
            format!("throughput {slower:+.1} %, energy {cheaper:+.1} % from γ = 0 to 100 %"),
            Judgement::met_or_not(slower < 0.0 && cheaper < 0.0),
            "For the reason given above.",
        ),
        ABOUT.claims[7].judge(
            format!("IF2 carries {first:.1} % (γ = 10 %) and {last:.1} % (γ = 100 %)"),
            Judgement::met_or_not(first > 99.0 && last > 99.0),
            format!(
                "{:.2} times the least energy at γ = 100 % (the model {:.2}): IF1 and IF3 carry no payload except before the first \
                 weights, but both paths stay open, and carry acknowledgements and control messages about flows.",
                cost(BOND_ENGR),
                cost(ENGR)
            ),
        ),
    ]
}
