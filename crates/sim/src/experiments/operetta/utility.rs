//! Figures 5 and 6: the user's utility.

use std::time::Duration;

use braid_decide::tradeoff::{Supply, UtilityFunction, UtilityRule};
use braid_model::{Joules, Power};

use super::{
    ENERGY, IF1, IF2, IF3, LOWER, PAYLOAD, Scheme, Setup, THROUGHPUT, WITHIN, WITHIN_ENERGY, bound, charts, least, run, split, within,
};
use crate::experiment::{
    About, Axis, Chart, Claim, Curve, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Summary, Table,
};
use crate::{Aim, Battery, Outcome, Scenario};

const ALPHAS: [f64; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];
const SERIES: &str = "OPERETTA";

static SWEEP: About = About {
    name: "operetta-5",
    paper: Paper::Operetta,
    figure: "fig. 5",
    title: "OPERETTA over the utility",
    setting: concat!(table_three!(), "γ is 25 %."),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "α = 0 gives the least energy", paper: "all on the interface of least energy per bit" },
        Claim { text: "α = 1 gives the most throughput, from all interfaces, for more energy", paper: "the maximum" },
        Claim { text: "Between them, throughput and energy follow the utility", paper: "both rise with α" },
    ],
};

/// Figure 5.
pub(super) struct Sweep;

impl Experiment for Sweep {
    fn about(&self) -> &'static About {
        &SWEEP
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(&[SERIES], &ALPHAS)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        Setup::nominal(Scheme::utility(point.x)).measure(run.seed)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let mean = |name, at| samples.summary(name, at).mean;
        let target = ALPHAS.map(|alpha| (alpha, (IF2.0 + alpha * (IF1.0 + IF3.0)) * PAYLOAD));
        let [throughput, energy] = charts(samples, "over the utility", &Axis::new("utility, α", ""), |_| IF1.0);
        let results = Results::default().chart(throughput.curve("target", &target)).chart(energy).table(within(samples, "α"));
        let cost = mean(ENERGY, (SERIES, 0.0)) / least(IF1.0);
        let most = 100.0 * mean(THROUGHPUT, (SERIES, 1.0)) / bound(IF1.0);
        let dearer = samples.gain(ENERGY, (SERIES, 1.0), (SERIES, 0.0));
        let faster = samples.gain(THROUGHPUT, (SERIES, 1.0), (SERIES, 0.0));
        let rises = |name| ALPHAS.windows(2).filter(|pair| mean(name, (SERIES, pair[1])) > 1.02 * mean(name, (SERIES, pair[0]))).count();
        let (whole, coming) = ((rises(THROUGHPUT), rises(ENERGY)), (rises(WITHIN), rises(WITHIN_ENERGY)));
        let all = ALPHAS.len() - 1;
        results
            .comparison(SWEEP.claims[0].judge(
                format!("IF2 carries {:.1} %; {cost:.2} times the least energy", 100.0 * mean("IF2", (SERIES, 0.0))),
                Judgement::met_or_not(mean("IF2", (SERIES, 0.0)) > 0.99 && cost < 1.1),
                "The additional energy is used by retransmissions, and by the connections that packet-oriented streams open on idle links.",
            ))
            .comparison(SWEEP.claims[1].judge(
                format!("{most:.1} % of the optimum, energy {:+.0} % over α = 0", dearer.mean),
                Judgement::met_or_differs(most > 97.0, Summary::weakest([faster, dearer])),
                format!(
                    "Links are idle until the last stream has ended. Within the 60 s it is {:.1} % of the optimum.",
                    100.0 * mean(WITHIN, (SERIES, 1.0)) / bound(IF1.0)
                ),
            ))
            .comparison(SWEEP.claims[2].judge(
                format!(
                    "throughput rises in {} of {all} steps and energy in {}; within the 60 s in {} and {}",
                    whole.0, whole.1, coming.0, coming.1,
                ),
                Judgement::met_or_differs(whole == (all, all), Summary::weakest([faster, dearer])),
                "While the offered load exceeds the target, each link in use is full, and throughput is that of the links in use: IF2 at α \
                 = 0, also IF3 up to α = 0.67, where the two meet the target, then all links. Measured until all streams have ended, \
                 the last one or two streams wait for their retransmission timers while the links are idle, which lowers the throughput.",
            ))
    }
}

const LINEAR: &str = "U1, linear";
const STEP: &str = "U2, a step";
const MINUTES: f64 = 10.0;
const BIN: Duration = Duration::from_secs(10);
/// Number of bins per value of a rate.
const WIDTH: usize = 3;
/// Power of the device without its links in watts, and the capacity of a battery in joules that lasts ten minutes, including 1.2 W for
/// the links.
const BASE: f64 = 10.0;
const FULL: f64 = (BASE + 1.2) * MINUTES * 60.0;
/// Half the battery.
const THRESHOLD: f64 = 0.5;
/// Length in minutes of the averages before and after the step.
const MEAN: f64 = 1.0;

static OVER_TIME: About = About {
    name: "operetta-6",
    paper: Paper::Operetta,
    figure: "fig. 6",
    title: "OPERETTA under two utility functions",
    setting: concat!(
        table_three!(),
        "γ is 25 %, over 10 minutes. A battery of 6.7 kJ, and a device that draws 10 W in addition to its links: U1 is the battery's \
         level, U2 is 1 above half and 0 below. The charts are of the first run. Throughput and power are instantaneous, as in the paper. The same \
         at lower loads; the claims are judged at Table III's."
    ),
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "With the linear utility (U1) throughput falls linearly with time", paper: "linear" },
        Claim { text: "... and so does the power used", paper: "linear" },
        Claim { text: "The step (U2) changes throughput and power when it occurs", paper: "at 5 min" },
    ],
};

/// Figure 6.
pub(super) struct OverTime;

fn rule(series: &str) -> UtilityRule {
    let step = UtilityFunction::Step { threshold: THRESHOLD, above: 1.0, below: 0.0 };
    UtilityRule { utility: if split(series).0 == STEP { step } else { UtilityFunction::Level }, plugged_in: None }
}

impl Experiment for OverTime {
    fn about(&self) -> &'static About {
        &OVER_TIME
    }

    fn points(&self) -> Vec<Point> {
        let lower: Vec<String> = LOWER.iter().flat_map(|(suffix, _)| [LINEAR, STEP].map(|series| format!("{series}{suffix}"))).collect();
        let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
        Point::grid(&[&[LINEAR, STEP][..], &lower].concat(), &[0.0])
    }

    fn measure(&self, point: &Point, run_of: &Run<'_>) -> Sample {
        let scheme = Scheme::Operetta(Aim::Battery(rule(&point.series)));
        let setup = Setup { span: Duration::from_secs(60) * MINUTES as u32, load: split(&point.series).1, ..Setup::nominal(scheme) };
        let battery = Some(Battery { capacity: Joules::new(FULL), level: 1.0, base: Power::from_watts(BASE) });
        let scenario = Scenario { battery, bin: BIN, ..setup.scenario(run_of.seed) };
        run(&scenario, scheme).map_or_else(Sample::default, |outcome| over_time(&outcome, &point.series))
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let time = || Axis::new("time", "min").between(0.0, MINUTES);
        let chart = |name, title, curve, y| {
            let chart = Chart::steps(name, title, time(), y);
            [LINEAR, STEP].into_iter().fold(chart, |chart, series| chart.curve(series, samples.curve(curve, (series, 0.0))))
        };
        let summary = |name: &str, series: &str| samples.summary(name, (series, 0.0));
        let straight = |name: &str| {
            let (fit, rise) = (summary(&format!("{name} fit"), LINEAR), summary(&format!("{name} rise"), LINEAR));
            (format!("{:+.0} % over the 10 min; a line explains {:.0} % of the variance", rise.mean, 100.0 * fit.mean), fit.mean, rise.mean)
        };
        let ((rate, rate_fit, rate_rise), (power, power_fit, power_rise)) = (straight("rate"), straight("power"));
        let steps = "The result is a step, not a line: links in use are full as long as the offered load exceeds the target. IF1 is no \
                     longer used when α is below 0.67, where IF2 and IF3 meet the target; IF3 would stop at 0.";
        let [before, after, end] = ["before", "after", "end"].map(|name| summary(name, STEP).mean);
        let change = summary("change", STEP).mean;
        let [power_before, power_after, power_end] = ["power before", "power after", "power end"].map(|name| summary(name, STEP).mean);
        Results::default()
            .chart(chart("utility", "Utility over time", "utility", Axis::new("utility, α", "").between(0.0, 1.2)))
            .chart(chart("throughput", "Throughput under two utility functions", "rate", Axis::new("throughput", "Mbit/s")))
            .chart(chart("power", "Power under two utility functions", "power", Axis::new("power of the links", "W")))
            .chart(chart("data", "Total data transmitted", "data", Axis::new("data", "MB")))
            .chart(chart("energy", "Total energy consumed", "energy", Axis::new("energy", "J")))
            .table(over_time_at_lower_loads(samples))
            .comparison(OVER_TIME.claims[0].judge(rate, Judgement::met_or_differs(rate_fit > 0.9 && rate_rise < -20.0, summary("rate rise", LINEAR).negated()), steps))
            .comparison(OVER_TIME.claims[1].judge(power, Judgement::met_or_differs(power_fit > 0.9 && power_rise < -20.0, summary("power rise", LINEAR).negated()), "As above."))
            .comparison(OVER_TIME.claims[2].judge(
                format!(
                    "at {change:.1} min: {before:.2} Mbit/s and {power_before:.2} W in the minute before, {after:.2} and {power_after:.2} \
                     in the minute after, {end:.2} and {power_end:.2} in the last",
                ),
                Judgement::met_or_not(after < 0.5 * before && power_after < 0.5 * power_before),
                format!(
                    "Connections stay on their link: IF1 and IF3 continue with the load assigned before the step, which is large, since the \
                     offered load exceeds their capacity. At lower loads, in the minutes before and after: {}.",
                    LOWER
                        .map(|(suffix, _)| {
                            let series = format!("{STEP}{suffix}");
                            let value = |name| summary(name, &series).mean;
                            let [before, after] = ["before", "after"].map(value);
                            let [power_before, power_after] = ["power before", "power after"].map(value);
                            format!("{before:.2} and {after:.2} Mbit/s, {power_before:.2} and {power_after:.2} W{suffix}")
                        })
                        .join("; ")
                ),
            ))
    }
}

/// The linear utility's line at all loads.
fn over_time_at_lower_loads(samples: &Samples) -> Table {
    let head = ["the linear utility", "throughput over the 10 min", "a line explains", "power over the 10 min", "a line explains"];
    [("Table III's load", "")].into_iter().chain(LOWER.map(|(suffix, _)| (suffix.trim_start_matches(", "), suffix))).fold(
        Table::new("The linear utility at lower loads", &head),
        |table, (load, suffix)| {
            let series = format!("{LINEAR}{suffix}");
            let value = |name: &str| samples.summary(name, (&series, 0.0)).mean;
            let fit = |name: &str| format!("{:.0} % of the variance", 100.0 * value(name));
            let rise = |name: &str| format!("{:+.0} %", value(name));
            table.row([load.to_owned(), rise("rate rise"), fit("rate fit"), rise("power rise"), fit("power fit")])
        },
    )
}

/// Curves of rates and sums over minutes, the linearity of the rates, and their averages around the step.
fn over_time(outcome: &Outcome, series: &str) -> Sample {
    let bin = BIN.as_secs_f64() / 60.0;
    let bins = outcome.battery.len();
    let megabits = |at: usize| outcome.links.iter().map(|link| link.goodput_bins[at].rx.get() as f64 * 8.0 / 1e6).sum::<f64>();
    let watts = [IF1.1, IF2.1, IF3.1].map(|milliwatts| milliwatts / 1e3);
    let joules = |at: usize| outcome.links.iter().zip(watts).map(|(link, watts)| link.busy_bins_ns[at] as f64 / 1e9 * watts).sum::<f64>();
    let utility = |at: usize| {
        let level = if at == 0 { 1.0 } else { outcome.battery[at - 1] };
        match rule(series).now(Some(&Supply { level, plugged: false, power: None })) {
            UtilityFunction::Fixed(alpha) => alpha,
            _ => 1.0,
        }
    };
    let sum = |amount: &dyn Fn(usize) -> f64, scale: f64| {
        let mut total = 0.0;
        let ends = (0..bins).map(|at| {
            total += amount(at) * scale;
            ((at + 1) as f64 * bin, total)
        });
        std::iter::once((0.0, 0.0)).chain(ends).collect::<Curve>()
    };
    let per_second = |amount: &dyn Fn(usize) -> f64| {
        let span = |from: usize| (from..from + WIDTH).map(amount).sum::<f64>() / (WIDTH as f64 * BIN.as_secs_f64());
        let mut curve = (0..bins / WIDTH).map(|at| ((at * WIDTH) as f64 * bin, span(at * WIDTH))).collect::<Curve>();
        curve.extend(curve.last().map(|last| (bins as f64 * bin, last.1)));
        curve
    };
    let (rate, power) = (per_second(&megabits), per_second(&joules));
    let change = outcome.battery.iter().position(|level| *level < THRESHOLD).map_or(MINUTES / 2.0, |at| at as f64 * bin);
    let about = |curve: &Curve, from: f64| {
        let within: Vec<f64> =
            curve.iter().filter(|(at, _)| *at >= from - 1e-9 && *at < from + MEAN - 1e-9).map(|(_, value)| *value).collect();
        within.iter().sum::<f64>() / within.len() as f64
    };
    let [(fit, rise), (power_fit, power_rise)] = [&rate, &power].map(|curve| line(&curve[..curve.len().saturating_sub(1)]));
    Sample::default()
        .value("change", change)
        .value("rate fit", fit)
        .value("rate rise", rise)
        .value("power fit", power_fit)
        .value("power rise", power_rise)
        .value("before", about(&rate, change - MEAN))
        .value("after", about(&rate, change))
        .value("end", about(&rate, MINUTES - MEAN))
        .value("power before", about(&power, change - MEAN))
        .value("power after", about(&power, change))
        .value("power end", about(&power, MINUTES - MEAN))
        .curve("utility", (0..bins).map(|at| (at as f64 * bin, utility(at))).collect())
        .curve("data", sum(&megabits, 1.0 / 8.0))
        .curve("energy", sum(&joules, 1.0))
        .curve("rate", rate)
        .curve("power", power)
}

/// The fraction of the variance that a linear fit explains, and the rise of the fit from end to end in percent.
fn line(curve: &[(f64, f64)]) -> (f64, f64) {
    let count = curve.len() as f64;
    let mean = |of: &dyn Fn(&(f64, f64)) -> f64| curve.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(&|dot| dot.0), mean(&|dot| dot.1));
    let both = mean(&|dot| (dot.0 - x) * (dot.1 - y));
    let (across, along) = (mean(&|dot| (dot.0 - x) * (dot.0 - x)), mean(&|dot| (dot.1 - y) * (dot.1 - y)));
    let slope = both / across;
    let (first, last) = (curve.first().map_or(0.0, |dot| dot.0), curve.last().map_or(0.0, |dot| dot.0));
    let begin = y + slope * (first - x);
    (both * both / across / along, slope * (last - first) / begin * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_fit_distinguishes_a_line_from_a_step() {
        let (fit, rise) = line(&[(0.0, 4.0), (1.0, 3.0), (2.0, 2.0)]);
        assert!((fit - 1.0).abs() < 1e-12 && (rise + 50.0).abs() < 1e-9, "{fit} {rise}");
        let (fit, _) = line(&[(0.0, 4.0), (1.0, 4.0), (2.0, 1.0), (3.0, 1.0)]);
        assert!((fit - 0.8).abs() < 1e-12, "{fit}");
    }
}
