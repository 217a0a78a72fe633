//! Figures 7 and 8: sizes of streams, and errors of their estimates.

use std::time::Duration;

use super::{ENERGY, ENGR, IF1, LARGE, LOWER, MID, SMALL, Scheme, Setup, THROUGHPUT, WITHIN, XPUT, at_lower_loads, bound, charts, within};
use crate::experiment::{
    About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Series, Summary,
};

/// λ of the large class in MB.
const SIZES: [f64; 6] = [0.1, 0.285, 0.5, 1.0, 2.0, 4.0];
const NOMINAL: f64 = SIZES[1];
const MOST: f64 = SIZES[SIZES.len() - 1];
/// γ in percent, for each series.
const MIXES: [(&str, f64); 3] = [("γ = 0", 0.0), ("γ = 25 %", 25.0), ("γ = 100 %", 100.0)];
const CONNECTIONS: &str = MIXES[0].0;
const PACKETS: &str = MIXES[2].0;
/// Suffix of series in which the rate of large streams falls with their size.
const RARER: &str = ", rarer";
/// Duration of the `RARER` series, longer because large streams are rare.
const LONG: Duration = Duration::from_secs(300);

static HETEROGENEITY: About = About {
    name: "operetta-7",
    paper: Paper::Operetta,
    figure: "fig. 7",
    title: "OPERETTA with streams of uneven size",
    setting: concat!(
        table_three!(),
        "α is 1. The size of the large streams is varied, first at 1 per second as in the paper, so that the offered load rises from 3.1 \
         to 34 Mbit/s; then (\"rarer\", over 300 s) at a rate that keeps the offered load at 4.6 Mbit/s. The claims are judged by the paper's 1 per \
         second."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim {
            text: "The more uneven the streams, the further connection-oriented scheduling (γ = 0) is from the optimum",
            paper: "deviates",
        },
        Claim { text: "Packet-oriented scheduling (γ = 100 %) is not affected", paper: "not affected" },
        Claim { text: "The more servers participate, the better", paper: "better" },
    ],
};

/// Figure 7.
pub(super) struct Heterogeneity;

impl Experiment for Heterogeneity {
    fn about(&self) -> &'static About {
        &HETEROGENEITY
    }

    fn points(&self) -> Vec<Point> {
        let names: Vec<String> = ["", RARER].iter().flat_map(|end| MIXES.map(|(name, _)| format!("{name}{end}"))).collect();
        Point::grid(&names.iter().map(String::as_str).collect::<Vec<_>>(), &SIZES)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let (name, rarer) = point.series.strip_suffix(RARER).map_or((point.series.as_str(), false), |name| (name, true));
        let mix = MIXES.iter().find(|(series, _)| *series == name).map_or(0.0, |(_, mix)| mix / 100.0);
        let bytes = point.x * 1e6;
        let setup = Setup { mix, ..Setup::nominal(Scheme::utility(1.0)) };
        let (per_second, span) = if rarer { (LARGE.0 as f64 * LARGE.1 / bytes, LONG) } else { (LARGE.1, setup.span) };
        Setup { large: (bytes as u64, per_second), span, ..setup }.measure(run.seed)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let x = Axis::new("mean size of large streams, λ", "MB");
        let offered = |size: f64| (SMALL.0 as f64 * SMALL.1 + size * 1e6 * LARGE.1) * 8.0 / 1e6;
        let [same, rarer] = [("", false), ("rarer", true)].map(|(part, rare)| {
            let name = |chart: &str| if part.is_empty() { chart.to_owned() } else { format!("{chart}-{part}") };
            let of = |value| -> Vec<Series> {
                let lines = samples.series(value).into_iter().filter(|series| series.name.ends_with(RARER) == rare);
                lines.map(|line| Series { name: line.name.trim_end_matches(RARER).to_owned(), ..line }).collect()
            };
            let most = SIZES.map(|size| (size, if rare { bound(IF1.0) } else { bound(IF1.0).min(offered(size)) }));
            let title = |what: &str| format!("{what}, {}", if rare { "4.6 Mbit/s offered" } else { "1 large stream a second" });
            [
                Chart::lines(&name("throughput"), &title("Throughput over λ"), x.clone(), Axis::new("throughput", "Mbit/s"))
                    .with(of(THROUGHPUT))
                    .curve(super::BOUND, &most),
                Chart::lines(&name("energy"), &title("Energy over λ"), x.clone(), Axis::new("energy", "nJ/bit")).with(of(ENERGY)),
            ]
        });
        let results = same.into_iter().chain(rarer).fold(Results::default(), Results::chart);
        let name = |series: &str, rare: bool| if rare { format!("{series}{RARER}") } else { series.to_owned() };
        let part = |series, rare, size| 100.0 * samples.summary(THROUGHPUT, (&name(series, rare), size)).mean / bound(IF1.0);
        let changes = |series| {
            [false, true].map(|rare| {
                let name = name(series, rare);
                samples.gain(THROUGHPUT, (&name, MOST), (&name, NOMINAL))
            })
        };
        let said = |series, [same, rarer]: [Summary; 2]| {
            format!(
                "{same:+.1} % from {NOMINAL} to {MOST} MB (from {:.1} % of the optimum), rarer {rarer:+.1} % (from {:.1} %)",
                part(series, false, NOMINAL),
                part(series, true, NOMINAL),
            )
        };
        let (whole, chunks) = (changes(CONNECTIONS), changes(PACKETS));
        let share =
            |value: &dyn Fn(&str, (&str, f64)) -> f64, series| value(THROUGHPUT, (series, MOST)) / value(THROUGHPUT, (series, NOMINAL));
        let worse = samples.per_run(|value| 100.0 * (share(value, PACKETS) - share(value, CONNECTIONS)));
        let within_lead = samples.gain(WITHIN, (PACKETS, MOST), (CONNECTIONS, MOST));
        let lead = [false, true].map(|rare| samples.gain(THROUGHPUT, (&name(PACKETS, rare), MOST), (&name(CONNECTIONS, rare), MOST)));
        results
            .comparison(HETEROGENEITY.claims[0].judge(
                format!("{}; against γ = 100 % {:+.1} %", said(CONNECTIONS, whole), worse.negated()),
                // Only what connections lose more than packets is due to their granularity.
                Judgement::met_or_differs(whole[0].mean < -5.0, worse),
                "With more load than the links can carry, streams wait for each link, so no link is idle because a large stream is on \
                 another. If large streams are rare, the offered load is too low at times by chance, which γ = 100 % cannot change \
                 either.",
            ))
            .comparison(HETEROGENEITY.claims[1].judge(
                said(PACKETS, chunks),
                Judgement::met_or_not(chunks[0].mean.abs() < 2.0),
                "The distance from the optimum is due to the number of streams: each opens a connection on every link, and the connections \
                 cause each other's packet loss in full queues. With fewer streams the distance is smaller.",
            ))
            .comparison(HETEROGENEITY.claims[2].judge(
                format!("at {MOST} MB γ = 100 % carries {:+.1} % against γ = 0, rarer {:+.1} %", lead[0], lead[1]),
                Judgement::met_or_differs(true, lead[0]),
                format!("Within the span of arrivals, at 1 per second, it is {within_lead:+.1} %."),
            ))
    }
}

/// Error of the estimated demands in percent.
const ERRORS: [f64; 7] = [-75.0, -50.0, -25.0, 0.0, 25.0, 50.0, 100.0];
const FAR_UNDER: f64 = ERRORS[0];
const FAR_OVER: f64 = ERRORS[ERRORS.len() - 1];

static ERROR: About = About {
    name: "operetta-8",
    paper: Paper::Operetta,
    figure: "fig. 8",
    title: "OPERETTA with a consistent error of estimation",
    setting: concat!(
        table_three!(),
        "γ is 25 %. Every stream's estimated demand is off by this percentage; its remaining demand is the estimate minus the bytes moved, \
         at least zero. The paper does not give the range of its errors."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "A consistent error moves throughput little, whatever the utility", paper: "negligible" },
        Claim { text: "α = 1: any error lowers throughput, underestimation more", paper: "both lower it" },
        Claim { text: "α = 0.5, overestimation: more throughput than needed, for more energy", paper: "+11 % for 114 % of the energy" },
        Claim { text: "α = 0.5, underestimation: the required throughput is not reached", paper: "below the target" },
    ],
};

/// Figure 8.
pub(super) struct Errors;

impl Experiment for Errors {
    fn about(&self) -> &'static About {
        &ERROR
    }

    fn points(&self) -> Vec<Point> {
        let lower = [XPUT, MID].map(|series| format!("{series}{}", LOWER[1].0));
        let lower = Point::grid(&lower.each_ref().map(String::as_str), &[FAR_UNDER, 0.0, FAR_OVER]);
        [Point::grid(&[XPUT, MID, ENGR], &ERRORS), lower].concat()
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        Setup { error: 1.0 + point.x / 100.0, ..Setup::of(&point.series) }.measure(run.seed)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let change = |name, series, error| samples.gain(name, (series, error), (series, 0.0));
        let most =
            [XPUT, MID, ENGR].map(|series| ERRORS.iter().map(|error| change(THROUGHPUT, series, *error).mean.abs()).fold(0.0, f64::max));
        let (under, over) = (change(THROUGHPUT, XPUT, FAR_UNDER), change(THROUGHPUT, XPUT, FAR_OVER));
        let (faster, dearer) = (change(THROUGHPUT, MID, FAR_OVER), change(ENERGY, MID, FAR_OVER));
        let target = (super::IF2.0 + 0.5 * (IF1.0 + super::IF3.0)) * super::PAYLOAD;
        let [slow, exact] = [FAR_UNDER, 0.0].map(|error| samples.summary(THROUGHPUT, (MID, error)));
        let half = |series: &str, error| {
            let series = format!("{series}{}", LOWER[1].0);
            samples.gain(THROUGHPUT, (&series, error), (&series, 0.0))
        };
        let scale = format!(
            "Algorithm 1 compares loads with each other. If all loads, old and new, are wrong by the same factor, its decisions do \
                     not change. Only the bytes already moved do not scale, and these are few compared with hundreds of waiting streams. At half the load, with few waiting streams, throughput changes by \
                     {:+.1} % (α = 1) and {:+.1} % (0.5) at {FAR_UNDER} %, by {:+.1} % and {:+.1} % at +{FAR_OVER} %.",
            half(XPUT, FAR_UNDER),
            half(MID, FAR_UNDER),
            half(XPUT, FAR_OVER),
            half(MID, FAR_OVER)
        );
        let within_most =
            [XPUT, MID].map(|series| ERRORS.iter().map(|error| change(WITHIN, series, *error).mean.abs()).fold(0.0, f64::max));
        let scale = format!(
            "{scale} Within the 60 s it changes by at most {:.1} % (α = 1) and {:.1} % (0.5), so the larger changes by eq. 3 are those of the last streams.",
            within_most[0], within_most[1]
        );
        charts(samples, "over the error of estimation", &Axis::new("error of demands", "%").between(-75.0, 100.0), |_| IF1.0)
            .into_iter()
            .fold(Results::default(), Results::chart)
            .table(within(samples, "error, %"))
            .table(at_lower_loads(samples, "error, %"))
            .comparison(ERROR.claims[0].judge(
                format!("at most {:.1} % (α = 1), {:.1} % (0.5), {:.1} % (0)", most[0], most[1], most[2]),
                Judgement::met_or_not(most.iter().all(|change| *change < 5.0)),
                scale,
            ))
            .comparison(ERROR.claims[1].judge(
                format!(
                    "{:+.1} ± {:.1} % at {FAR_UNDER} %, {:+.1} ± {:.1} % at +{FAR_OVER} %",
                    under.mean, under.half, over.mean, over.half
                ),
                Judgement::met_or_differs(under.mean < over.mean, Summary::weakest([under.negated(), over.negated()])),
                "As above.",
            ))
            .comparison(ERROR.claims[2].judge(
                format!(
                    "{:+.1} ± {:.1} % throughput, {:+.1} ± {:.1} % energy at +{FAR_OVER} %",
                    faster.mean, faster.half, dearer.mean, dearer.half
                ),
                Judgement::met_or_differs(
                    (faster.mean - 11.0).abs() < 5.0 && (dearer.mean - 14.0).abs() < 5.0,
                    Summary::weakest([faster, dearer]),
                ),
                "As above.",
            ))
            .comparison(ERROR.claims[3].judge(
                format!("{:.2} Mbit/s at {FAR_UNDER} %, {:.2} without an error, {target:.2} required", slow.mean, exact.mean),
                // Only what the error takes away is due to it.
                Judgement::met_or_differs(slow.mean < target && exact.mean >= target, change(THROUGHPUT, MID, FAR_UNDER).negated()),
                "Until the last stream has ended the throughput is below the requirement without an error, too: links are idle at the end. Within the 60 s \
                 the offered load exceeds the requirement, and the links in use are full with any estimate.",
            ))
    }
}
