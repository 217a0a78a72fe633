//! Figure 5: varying rate of large connections.

use super::{
    BOND, CO_BRAID, CO_KNOWN, CO_MOST, CO_WEIGHTED, NEARLY, ONLY_1, ONLY_2, PO_ROUND, PO_WEIGHTED, SMALL_RATE, Setup, Sweep, THROUGHPUT,
    gain_at, is_about, most_gain, otherwise,
};
use crate::experiment::{About, Claim, Judgement, Paper, Results, Samples, Sampling, Summary};

const LARGE_RATES: [f64; 7] = [0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0];

static ABOUT: About = About {
    name: "dbas-5",
    paper: Paper::Dbas,
    figure: "fig. 5",
    title: "Schedulers over the rate of large connections",
    setting: "As dbas-3a and dbas-3b, but IF2 has 1 Mbit/s, and x large connections are opened per second. Maximum throughput is also \
              measured with exactly known demands. The paper does not say which of Table I's nominal capacities, 1 and 2 Mbit/s, IF2 has \
              here; 1 is used, since the text mentions a slow interface. The bond is as in dbas-3b.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim {
            text: "Maximum throughput improves on weighted round robin, since it uses the demands of the applications",
            paper: "up to 130 %",
        },
        Claim {
            text: "Weighted round robin can be worse than a single interface, if it puts a large connection on the slow one",
            paper: "in words",
        },
        Claim { text: "Packet-oriented schedulers are not sensitive to the workload of applications", paper: "in words" },
        Claim { text: "DBAS improves on the operating system's single interface", paper: "up to 193 %" },
        Claim { text: "The bond: it is not sensitive to the workload of applications", paper: "in words" },
        Claim { text: "The bond improves on the operating system's single interface", paper: "up to 193 %" },
    ],
};

/// Figure 5.
pub(super) static APPLICATIONS: Sweep = Sweep {
    about: &ABOUT,
    series: &[ONLY_2, ONLY_1, CO_WEIGHTED, CO_MOST, CO_KNOWN, CO_BRAID, PO_ROUND, PO_WEIGHTED],
    xs: &LARGE_RATES,
    bond_xs: &[0.0, 1.0, 5.0],
    x: ("large connections", "per second"),
    setup: |large| Setup { rates: [SMALL_RATE, large], ..Setup::NOMINAL },
    detail_x: 1.0,
    queues: false,
    reasons: &[],
    judge,
};

fn judge(results: Results, samples: &Samples) -> Results {
    let claims = ABOUT.claims;
    let (known, known_at) = most_gain(samples, CO_MOST, CO_WEIGHTED);
    let (single, single_at) = most_gain(samples, ONLY_1, CO_WEIGHTED);
    let single_runs = || {
        let at = |rate: &f64| samples.values(THROUGHPUT, (ONLY_1, *rate)).into_iter().zip(samples.values(THROUGHPUT, (CO_WEIGHTED, *rate)));
        LARGE_RATES.iter().flat_map(at).collect::<Vec<_>>()
    };
    let (worse, all) = (single_runs().iter().filter(|(only, weighted)| only > weighted).count(), single_runs().len());
    let (slow, slow_at) = most_gain(samples, PO_WEIGHTED, ONLY_2);
    let (fast, fast_at) = most_gain(samples, PO_WEIGHTED, ONLY_1);
    // Limited by the load: without large connections it is less than both links can carry.
    let saturated = |series| {
        let means = LARGE_RATES.iter().filter(|rate| **rate >= 1.0).map(move |rate| samples.summary(THROUGHPUT, (series, *rate)).mean);
        means.fold((f64::INFINITY, 0.0_f64), |(low, high), mean| (low.min(mean), high.max(mean)))
    };
    let ((low, high), (bond_low, bond_high)) = (saturated(PO_WEIGHTED), saturated(BOND));
    let (bond_slow, bond_slow_at) = most_gain(samples, BOND, ONLY_2);
    let (bond_fast, bond_fast_at) = most_gain(samples, BOND, ONLY_1);
    let (braid, braid_at) = most_gain(samples, CO_BRAID, CO_WEIGHTED);
    let (exact, exact_at) = most_gain(samples, CO_KNOWN, CO_WEIGHTED);
    let last = LARGE_RATES[LARGE_RATES.len() - 1];
    let [learnt_last, exact_last] = [CO_MOST, CO_KNOWN].map(|series| samples.gain(THROUGHPUT, (series, last), (CO_WEIGHTED, last)).mean);
    let [learnt_99, exact_99] = [CO_MOST, CO_KNOWN].map(|series| samples.gain(NEARLY, (series, 1.0), (CO_WEIGHTED, 1.0)).mean);
    results
        .comparison(claims[0].judge(
            format!("up to {known:.0} %, at {known_at} a second"),
            gain_judgement(gain_at(samples, CO_MOST, CO_WEIGHTED, known_at), 130.0),
            format!(
                "{} With known demands it is, by the definition used, up to {exact:.0} % at {exact_at} a second, and at {last} a second \
                 {exact_last:+.0} % against {learnt_last:+.0} % with learned demands. Braid's rule with learned demands: up to {braid:.0} % at \
                 {braid_at} a second. Measured until 99 % of the payload have arrived, known demands give \
                 {exact_99:+.0} % at 1 a second and learned demands {learnt_99:+.0} %. On average weighted round robin keeps both links \
                 busy in proportion, so little can be gained. 130 % is possible for a workload in which a few large connections last \
                 longest and happen to be on the slow interface; the paper gives no duration.",
                otherwise(samples, CO_MOST, CO_WEIGHTED, known_at)
            ),
        ))
        .comparison(claims[1].judge(
            format!("only IF1 against weighted round robin {single:+.0} % at most, at {single_at} a second"),
            Judgement::met_or_not(single > 0.0),
            format!(
                "Not on average over the runs: every third connection goes to IF2, and over 60 s their sizes average out. In {worse} of {all} \
                 single runs only IF1 was better.",
            ),
        ))
        .comparison(claims[2].judge(
            format!("weighted round robin between {low:.2} and {high:.2} Mbit/s for 1 to 5 a second"),
            Judgement::met_or_not(high / low < 1.05),
            "",
        ))
        .comparison(claims[3].judge(
            format!("up to {slow:.0} % over only IF2, at {slow_at} a second, and {fast:.0} % over only IF1, at {fast_at}"),
            gain_judgement(gain_at(samples, PO_WEIGHTED, ONLY_2, slow_at), 193.0),
            format!(
                "The paper does not say which interface the system would use. Capacities allow 200 % over IF2 and 50 % over IF1. A higher \
                 gain is due to connections that end late if one interface carries all (see below). Over IF2 at {slow_at} a second: {}",
                otherwise(samples, PO_WEIGHTED, ONLY_2, slow_at)
            ),
        ))
        .comparison(claims[4].judge(
            format!("miDRR between {bond_low:.2} and {bond_high:.2} Mbit/s for 1 to 5 a second"),
            Judgement::met_or_not(bond_high / bond_low < 1.05),
            "The bond takes chunks from all connections in turn.",
        ))
        .comparison(claims[5].judge(
            format!(
                "miDRR up to {bond_slow:.0} % over only IF2, at {bond_slow_at} a second, and {bond_fast:.0} % over only IF1, at \
                 {bond_fast_at}"
            ),
            gain_judgement(gain_at(samples, BOND, ONLY_2, bond_slow_at), 193.0),
            "As above; the bond loses less than the model if many connections share the links.",
        ))
}

/// `Met` within a fifth of the paper's gain; otherwise `Differs` if there is a gain.
fn gain_judgement(found: Summary, paper: f64) -> Judgement {
    Judgement::met_or_differs(is_about(found.mean, paper), found)
}
