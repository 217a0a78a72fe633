//! Figures 4 and 9: varying bandwidth of IF1.

use super::{
    BOUND, DEFAULT, ENERGY, ENGR, IF1, IF3, LOWER, MATCH, MID, ROTATION, Setup, THROUGHPUT, WEIGHTED, XPUT, at_lower_loads, bound, charts,
    per_bit, within,
};
use crate::experiment::{
    About, Axis, Chart, Claim, Dot, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Series, Summary,
};

/// IF1's bandwidth in Mbit/s, in ascending order.
const RATES: [f64; 8] = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0];
const LEAST: f64 = RATES[0];
const MOST: f64 = RATES[RATES.len() - 1];
/// The rate at which IF1 becomes cheaper than IF3 in the paper, and the rate before it.
const BREAK: f64 = 1.5;
const BEFORE: f64 = 1.25;

static DYNAMICS: About = About {
    name: "operetta-4",
    paper: Paper::Operetta,
    figure: "fig. 4",
    title: "OPERETTA over IF1's bandwidth",
    setting: concat!(
        table_three!(),
        "γ is 25 %; IF1's bandwidth is varied. OPRTA-CUR-OS aims at the throughput of the current OS, which uses IF3, with minimal energy."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "OPRTA-CUR-OS needs less energy than the current OS", paper: "up to -44 %" },
        Claim { text: "OPRTA-CUR-OS keeps the current OS's throughput", paper: "constant, IF3's" },
        Claim { text: "In OPRTA-CUR-OS IF1 replaces IF3 completely once its a/r is better", paper: "at 1.5 Mbit/s" },
        Claim { text: "The energy of OPRTA-MID and OPRTA-CUR-OS has a break there", paper: "at 1.5 Mbit/s" },
        Claim { text: "α = 1 and α = 0.5 turn IF1's bandwidth into throughput", paper: "both rise" },
        Claim { text: "α = 0 uses the interface of least energy per bit throughout", paper: "IF2 alone" },
    ],
};

/// Figure 4.
pub(super) struct Dynamics;

fn measure(point: &Point, run: &Run<'_>) -> Sample {
    Setup { if1: point.x, ..Setup::of(&point.series) }.measure(run.seed)
}

fn axis() -> Axis {
    Axis::new("IF1's bandwidth", "Mbit/s")
}

impl Experiment for Dynamics {
    fn about(&self) -> &'static About {
        &DYNAMICS
    }

    fn points(&self) -> Vec<Point> {
        let mut points = Point::grid(&[XPUT, MID, MATCH, ENGR], &RATES);
        points.extend(Point::grid(&[DEFAULT], &[LEAST]));
        points
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        measure(point, run)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let mean = |name, at| samples.summary(name, at).mean;
        let shares = Chart::lines("links", "Share of each interface in OPRTA-CUR-OS", axis(), Axis::new("share of the payload", "%"))
            .with(["IF1", "IF2", "IF3"].map(|link| share_of(samples, link)).to_vec());
        let mut results = charts(samples, "over IF1's bandwidth", &axis(), |x| x).into_iter().fold(Results::default(), Results::chart);
        results = results.chart(shares).table(within(samples, "IF1, Mbit/s"));

        let base = (DEFAULT, LEAST);
        let savings = RATES.map(|rate| samples.gain(ENERGY, (MATCH, rate), base).negated());
        let most = savings.into_iter().fold(savings[0], |most, one| if one.mean > most.mean { one } else { most });
        let saving = most.mean;
        let gains = RATES.map(|rate| samples.gain(THROUGHPUT, (MATCH, rate), base).mean);
        let (low, high) = range(&gains);
        let [before, after] = [BEFORE, BREAK].map(|rate| 100.0 * mean("IF3", (MATCH, rate)));
        let falls = samples.per_run(|value| value("IF3", (MATCH, BEFORE)) - value("IF3", (MATCH, BREAK)));
        let change = |series, from, to| samples.gain(ENERGY, (series, to), (series, from));
        let breaks = Summary::weakest([MID, MATCH].map(|series| change(series, BEFORE, BREAK).negated()));
        let [mid, matched] = [MID, MATCH].map(|series| change(series, BEFORE, BREAK).mean);
        let flat = [MID, MATCH].map(|series| change(series, LEAST, BEFORE).mean);
        let rise = |series| mean(THROUGHPUT, (series, MOST)) - mean(THROUGHPUT, (series, LEAST));
        let rises = Summary::weakest([XPUT, MID].map(|series| samples.gain(THROUGHPUT, (series, MOST), (series, LEAST))));
        let least_share = RATES.map(|rate| 100.0 * mean("IF2", (ENGR, rate))).into_iter().fold(f64::INFINITY, f64::min);
        results
            .comparison(DYNAMICS.claims[0].judge(
                format!("up to -{saving:.0} %"),
                Judgement::met_or_differs((saving - 44.0).abs() <= 3.0, most),
                format!(
                    "The energy optimum for 2 Mbit/s with IF1 at 2 Mbit/s is 0.7 Mbit/s on IF2 and 1.3 on IF1: {:.0} nJ/bit against IF3's \
                     {:.0}.",
                    optimum_for_default(MOST),
                    per_bit(IF3),
                ),
            ))
            .comparison(DYNAMICS.claims[1].judge(
                format!("{low:+.0} to {high:+.0} % over it"),
                Judgement::met_or_not(low > -5.0 && high < 5.0),
                "The offered load exceeds the target, and assigned load is queued. So the links in use, IF2 and one other, are always \
                 full.",
            ))
            .comparison(DYNAMICS.claims[2].judge(
                format!("IF3 carries {before:.0} % at {BEFORE} Mbit/s, {after:.0} % at {BREAK}"),
                Judgement::met_or_differs(before > 40.0 && after < 5.0, falls),
                "At 1.5 Mbit/s IF3 is used for streams that would end on IF1 after the deadline set by the target. This happens in the \
                 first seconds, when there is little load.",
            ))
            .comparison(DYNAMICS.claims[3].judge(
                format!(
                    "from {BEFORE} to {BREAK} Mbit/s OPRTA-MID {mid:+.1} %, OPRTA-CUR-OS {matched:+.1} %; from {LEAST} to {BEFORE} {:+.1} \
                     and {:+.1} %",
                    flat[0], flat[1],
                ),
                Judgement::met_or_differs(mid < -2.0 && matched < -2.0 && flat.iter().all(|change| change.abs() < 2.0), breaks),
                "OPRTA-MID has a break there, too, but upwards: IF1 and IF2, now the cheapest, carry 2.2 Mbit/s, less than its target \
                 of 2.45, so it uses all three interfaces, and each is full. At 2 Mbit/s IF1 and IF2 alone meet its target.",
            ))
            .comparison(DYNAMICS.claims[4].judge(
                format!("OPRTA-XPUT {:+.2} Mbit/s, OPRTA-MID {:+.2} Mbit/s from {LEAST} to {MOST} Mbit/s", rise(XPUT), rise(MID)),
                Judgement::met_or_differs(rise(XPUT) > 0.5 && rise(MID) > 0.25, rises),
                "OPRTA-MID leaves IF1 idle as long as it is the most expensive. Its throughput is that of the interfaces in use: IF2 and \
                 IF3; from 1.5 Mbit/s all three; at 2 Mbit/s IF1 and IF2.",
            ))
            .comparison(DYNAMICS.claims[5].judge(
                format!("IF2 carries at least {least_share:.1} %"),
                Judgement::met_or_not(least_share > 99.0),
                "",
            ))
    }
}

/// Minimum energy per bit of payload for IF3's throughput, if IF1 is cheaper than IF3. IF2 is filled first.
fn optimum_for_default(if1: f64) -> f64 {
    let rest = IF3.0 - super::IF2.0;
    (super::IF2.1 + rest * IF1.1 / if1) / IF3.0 / super::PAYLOAD
}

fn share_of(samples: &Samples, link: &str) -> Series {
    let dot = |x: &f64| {
        let share = samples.summary(link, (MATCH, *x));
        Dot { x: *x, y: share.mean * 100.0, half: share.half * 100.0 }
    };
    Series { name: link.to_owned(), dots: RATES.iter().map(dot).collect() }
}

fn range(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)))
}

static BASELINES: About = About {
    name: "operetta-9",
    paper: Paper::Operetta,
    figure: "fig. 9",
    title: "OPERETTA and the baseline schedulers",
    setting: concat!(
        table_three!(),
        "γ is 25 %; IF1's bandwidth is varied. Baselines rotate over streams, and over chunks for participating servers. The same at lower loads; \
         the claims are judged at Table III's."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "OPRTA-XPUT has more throughput than weighted round robin, which has more than round robin", paper: "in this order" },
        Claim { text: "Its lead over weighted round robin grows with the bandwidth", paper: "grows" },
        Claim { text: "In round robin the narrow interface is a bottleneck", paper: "far from the optimum" },
        Claim { text: "Both baselines are far from the throughput optimum", paper: "far" },
        Claim { text: "Round robin needs the most energy per unit of data", paper: "worst" },
        Claim { text: "OPRTA-XPUT needs almost the energy of weighted round robin", paper: "almost equal" },
    ],
};

/// Figure 9.
pub(super) struct Baselines;

impl Experiment for Baselines {
    fn about(&self) -> &'static About {
        &BASELINES
    }

    fn points(&self) -> Vec<Point> {
        let lower = LOWER.iter().flat_map(|(suffix, _)| [XPUT, WEIGHTED, ROTATION].map(|series| format!("{series}{suffix}")));
        let lower: Vec<String> = lower.collect();
        let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
        [Point::grid(&[XPUT, WEIGHTED, ROTATION], &RATES), Point::grid(&lower, &[LEAST, IF1.0, BREAK, MOST])].concat()
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        measure(point, run)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let lead = |name, ahead, behind| RATES.map(|rate| samples.gain(name, (ahead, rate), (behind, rate)));
        let (weighted, rotation) = (lead(THROUGHPUT, XPUT, WEIGHTED), lead(THROUGHPUT, WEIGHTED, ROTATION));
        let part = |series| RATES.map(|rate| 100.0 * samples.summary(THROUGHPUT, (series, rate)).mean / bound(rate));
        let (dearer, dearest) = (lead(ENERGY, XPUT, WEIGHTED), lead(ENERGY, ROTATION, WEIGHTED));
        let between = |gains: &[Summary]| range(&gains.iter().map(|gain| gain.mean).collect::<Vec<_>>());
        let ((low, high), (low2, high2)) = (between(&weighted), between(&rotation));
        let ahead = |gains: &[Summary]| gains.iter().filter(|gain| gain.mean > gain.half).count();
        let average = |ahead, behind| {
            samples
                .per_run(|value| RATES.map(|rate| value(THROUGHPUT, (ahead, rate)) / value(THROUGHPUT, (behind, rate)) - 1.0).iter().sum())
        };
        let order = Summary::weakest([average(XPUT, WEIGHTED), average(WEIGHTED, ROTATION)]);
        let ratio = |value: &dyn Fn(&str, (&str, f64)) -> f64, rate| value(THROUGHPUT, (XPUT, rate)) / value(THROUGHPUT, (WEIGHTED, rate));
        let grows = samples.per_run(|value| ratio(value, MOST) - ratio(value, LEAST));
        let behind = samples.gain(THROUGHPUT, (XPUT, MOST), (ROTATION, MOST));
        let lower_at = |name, ahead: &str, behind: &str, rate| {
            let gains = LOWER.map(|(suffix, _)| {
                let (ahead, behind) = (format!("{ahead}{suffix}"), format!("{behind}{suffix}"));
                format!("{:+.1} %{suffix}", samples.gain(name, (&ahead, rate), (&behind, rate)))
            });
            gains.join("; ")
        };
        let lower = |name, ahead, behind| lower_at(name, ahead, behind, MOST);
        let (first, last) = (weighted[0], weighted[RATES.len() - 1]);
        let ([xput, even, turns], (same_low, same_high)) = ([XPUT, WEIGHTED, ROTATION].map(part), between(&dearer));
        let (worst_low, worst_high) = between(&dearest);
        charts(samples, "over IF1's bandwidth", &axis(), |x| x)
            .into_iter()
            .fold(Results::default(), Results::chart)
            .table(within(samples, "IF1, Mbit/s"))
            .table(at_lower_loads(samples, "IF1, Mbit/s"))
            .comparison(BASELINES.claims[0].judge(
                format!("over weighted {low:+.1} to {high:+.1} %; that over round robin {low2:+.1} to {high2:+.1} %"),
                Judgement::met_or_differs(ahead(&weighted) + ahead(&rotation) == 2 * RATES.len(), order),
                format!(
                    "Beyond the confidence interval at {} and {} of {} bandwidths. With more load than the links can carry, all \
                     schedulers keep nearly all links full. With IF1 at {MOST} Mbit/s OPRTA-XPUT has over weighted round robin {}.",
                    ahead(&weighted),
                    ahead(&rotation),
                    RATES.len(),
                    lower(THROUGHPUT, XPUT, WEIGHTED),
                ),
            ))
            .comparison(BASELINES.claims[1].judge(
                format!("{first:+.1} % at {LEAST} Mbit/s, {last:+.1} % at {MOST}"),
                Judgement::met_or_differs(true, grows),
                format!(
                    "Even with IF1 at 2 Mbit/s the links carry 4.5 Mbit/s of payload, less than the 4.6 offered. At lower loads the lead at {MOST} \
                     Mbit/s is {}, at {LEAST} {}.",
                    lower(THROUGHPUT, XPUT, WEIGHTED),
                    lower_at(THROUGHPUT, XPUT, WEIGHTED, LEAST)
                ),
            ))
            .comparison(BASELINES.claims[2].judge(
                format!("{:.0} % of the optimum at {LEAST} Mbit/s, {:.0} % at {MOST}", turns[0], turns[RATES.len() - 1]),
                Judgement::met_or_differs(range(&turns).0 < 90.0, behind),
                "",
            ))
            .comparison(BASELINES.claims[3].judge(
                format!(
                    "round robin {:.0} to {:.0} %, weighted {:.0} to {:.0} %, OPRTA-XPUT {:.0} to {:.0} % of the {BOUND}",
                    range(&turns).0,
                    range(&turns).1,
                    range(&even).0,
                    range(&even).1,
                    range(&xput).0,
                    range(&xput).1,
                ),
                Judgement::met_or_not(range(&turns).1 < 90.0 && range(&even).1 < 90.0),
                "If the offered load exceeds the capacity of the links, a rotation in proportion to their rates fills them. Round robin is far from the optimum.",
            ))
            .comparison(BASELINES.claims[4].judge(
                format!("{worst_low:+.1} to {worst_high:+.1} % over weighted round robin"),
                Judgement::met_or_differs(worst_low > 0.0, Summary::weakest(dearest)),
                format!(
                    "Round robin gives IF3 less than it can carry, and IF2, which is cheaper, more than it can carry. At lower loads, with IF1 at \
                     {MOST} Mbit/s, it is {}.",
                    lower(ENERGY, ROTATION, WEIGHTED)
                ),
            ))
            .comparison(BASELINES.claims[5].judge(
                format!("{same_low:+.1} to {same_high:+.1} %"),
                Judgement::met_or_not(same_low.abs().max(same_high.abs()) < 5.0),
                "",
            ))
    }
}
