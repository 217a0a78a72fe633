//! Figures 3 and 4: a narrow or lossy IF2.

use super::{
    BOND, BOND_ROUND, BOND_WEIGHTED, BUSY, CO_BRAID, CO_KNOWN, CO_MOST, CO_ONE, CO_ROUND, CO_WEIGHTED, CONNECTIONS, IF1, ONLY_1, PACKETS,
    PO_ROUND, PO_WEIGHTED, Setup, Sweep, TAIL, THROUGHPUT, WASTE, WITHIN, gain_at, is_about, most, most_behind, most_gain, otherwise,
    shares,
};
use crate::experiment::{About, Claim, Comparison, Judgement, Paper, Results, Samples, Sampling};

/// Capacities of IF2 in Mbit/s.
const CAPACITIES: [f64; 7] = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0];
const NARROWEST: f64 = CAPACITIES[0];
/// Loss of IF2 in percent.
const LOSSES: [f64; 6] = [0.0, 1.0, 2.5, 5.0, 7.5, 10.0];
const LOSSIEST: f64 = LOSSES[5];

/// Figure 3a.
pub(super) static NARROW_CONNECTIONS: Sweep = Sweep {
    about: &NARROW_CO,
    series: &CONNECTIONS,
    xs: &CAPACITIES,
    bond_xs: &[],
    x: ("IF2's capacity", "Mbit/s"),
    setup: |if2| Setup { if2, ..Setup::NOMINAL },
    detail_x: NARROWEST,
    queues: true,
    reasons: &[CO_KNOWN],
    judge: judge_narrow_co,
};

/// Figure 3b.
pub(super) static NARROW_PACKETS: Sweep = Sweep {
    about: &NARROW_PO,
    series: &PACKETS,
    bond_xs: &[NARROWEST, 0.5, 1.0, 2.0],
    reasons: &[],
    judge: judge_narrow_po,
    ..NARROW_CONNECTIONS
};

/// Figure 4a.
pub(super) static LOSSY_CONNECTIONS: Sweep = Sweep {
    about: &LOSSY_CO,
    series: &CONNECTIONS,
    xs: &LOSSES,
    bond_xs: &[],
    x: ("IF2's packet loss", "%"),
    setup: |percent| Setup { loss: percent / 100.0, ..Setup::NOMINAL },
    detail_x: LOSSIEST,
    queues: false,
    reasons: &[CO_KNOWN, CO_ONE],
    judge: judge_lossy_co,
};

/// Figure 4b.
pub(super) static LOSSY_PACKETS: Sweep =
    Sweep { about: &LOSSY_PO, series: &PACKETS, bond_xs: &[0.0, 2.5, LOSSIEST], reasons: &[], judge: judge_lossy_po, ..LOSSY_CONNECTIONS };

static NARROW_CO: About = About {
    name: "dbas-3a",
    paper: Paper::Dbas,
    figure: "fig. 3a",
    title: "Connection-oriented schedulers as IF2 narrows",
    setting: "IF1 has 2 Mbit/s, IF2 x, the server's link 6 Mbit/s. Small connections move 22.38 kB, 13 per second; large ones 0.285 MB, 1 \
              per second; both are Poisson processes. Our choices, since the paper does not give them: sizes are exponentially \
              distributed, the round trip is 50 ms, queues hold 50 packets (ns-2's default; a table shows longer ones), connections are \
              opened for 60 s, and TCP is CUBIC. Demand is learned by eq. 1 from an initial estimate of 0.1 MB; capacities are known. \
              Maximum throughput is the paper's rule as printed: the interface that finishes its load and the new connection first. (The sentence \
              can also mean the interface with which the load of all ends first; with two interfaces both choose the same.) Braid's rule is beside it: the interface on which the connection itself is expected to end first. The paper does not define throughput. \
              OPERETTA, by the same authors with the same workload, does (eq. 3): the total payload over the time until the last stream \
              has ended. That is used for this workload everywhere on this page; the payload that arrives within the 60 s is beside it, in the \
              second chart and in a table. By that, nearly every scheduler fills both links, since Table I's load of 4.6 Mbit/s exceeds \
              their sum, and round robin is not below a single interface.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "With a very narrow IF2, using only IF1 outperforms round robin", paper: "in words" },
        Claim { text: "With a very narrow IF2, using only IF1 outperforms weighted round robin", paper: "in words" },
        Claim {
            text: "Weighted round robin improves on round robin, since it uses the capacities of the interfaces",
            paper: "up to 369 %",
        },
        Claim { text: "Maximum throughput outperforms the other connection-oriented schedulers", paper: "in words" },
        Claim {
            text: "Connection-oriented schedulers can generally be near the optimum (IV.C)",
            paper: "as packet-oriented ones: 9 % below at worst",
        },
        Claim { text: "Their lower bound is still as good as a single interface (IV.C)", paper: "in words" },
    ],
};

static NARROW_PO: About = About {
    name: "dbas-3b",
    paper: Paper::Dbas,
    figure: "fig. 3b",
    title: "Packet-oriented schedulers as IF2 narrows",
    setting: "As dbas-3a, but all servers run DBAS. A chunk is a segment; each connection's chunks are assigned to interfaces in strict \
              rotation and wait for their interface, at most 64 per interface. In addition to this model, Braid's own bond is measured \
              between the client and the servers, which share one host here. It is real QUIC with Braid's controller on each interface, \
              over the same links, with the paper's two rules and with miDRR, its default. The bond assigns a chunk to an interface once \
              that can send it. The bond's points are measured at most five times.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "Weighted round robin has the highest throughput", paper: "in words" },
        Claim { text: "It is near the optimum, the sum of both capacities", paper: "9 % below at worst" },
        Claim { text: "Round robin is worse than a single interface where IF2 is narrow", paper: "in words" },
        Claim { text: "The bond: weighted round robin has the highest throughput", paper: "in words" },
        Claim { text: "The bond: it is near the optimum, as miDRR is", paper: "9 % below at worst" },
        Claim { text: "The bond: round robin is worse than a single interface where IF2 is narrow", paper: "in words" },
    ],
};

static LOSSY_CO: About = About {
    name: "dbas-4a",
    paper: Paper::Dbas,
    figure: "fig. 4a",
    title: "Connection-oriented schedulers as IF2 loses packets",
    setting: "As dbas-3a, but IF2 has 1 Mbit/s and loses x of the packets towards the client. Schedulers know only the capacity, not the \
              loss (the paper's estimator measures an error rate, but the paper does not say that a scheduler uses it).",
    sampling: Sampling::Repeated,
    claims: &[
        Claim {
            text: "The order of the schedulers is basically that of fig. 3a: round robin lowest, maximum throughput highest",
            paper: "in words",
        },
        Claim { text: "With much loss, using only IF1 outperforms round robin, as with a narrow IF2", paper: "follows from the above" },
        Claim { text: "Throughput does not fall linearly with loss, because of TCP's AIMD", paper: "in words" },
    ],
};

static LOSSY_PO: About = About {
    name: "dbas-4b",
    paper: Paper::Dbas,
    figure: "fig. 4b",
    title: "Packet-oriented schedulers as IF2 loses packets",
    setting: "As dbas-4a, with all servers running DBAS, as in dbas-3b, or Braid.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim {
            text: "The order of the schedulers is basically that of fig. 3b: weighted round robin above round robin",
            paper: "in words",
        },
        Claim { text: "Weighted round robin is near the optimum under all conditions", paper: "9 % below at worst" },
        Claim { text: "The bond: weighted round robin above round robin", paper: "in words" },
        Claim { text: "The bond: it is near the optimum under all conditions, as miDRR is", paper: "9 % below at worst" },
    ],
};

/// A scheduler that is behind by at most this percentage ties.
const TIE: f64 = 0.05;

fn judge_narrow_co(results: Results, samples: &Samples) -> Results {
    let claims = NARROW_CO.claims;
    let narrow = |series| samples.gain(THROUGHPUT, (series, NARROWEST), (ONLY_1, NARROWEST)).mean;
    let below = |series| format!("{:+.0} % against only IF1 at {NARROWEST} Mbit/s", narrow(series));
    let (gain, at) = most_gain(samples, CO_WEIGHTED, CO_ROUND);
    let (behind, behind_at) = most_behind(samples, CO_MOST, &[ONLY_1, CO_ROUND, CO_WEIGHTED]);
    let missing = [CO_MOST, CO_WEIGHTED, CO_KNOWN].map(|series| most_missing(samples, series, |if2| IF1 + if2));
    let lowest = [CO_ROUND, CO_WEIGHTED, CO_MOST].map(|series| (series, most_behind(samples, series, &[ONLY_1])));
    let lowest = lowest.into_iter().fold(lowest[0], |least, one| if one.1.0 > least.1.0 { one } else { least });
    results
        .comparison(claims[0].judge(
            below(CO_ROUND),
            Judgement::met_or_differs(true, gain_at(samples, CO_ROUND, ONLY_1, NARROWEST).negated()),
            format!(
                "Half of the connections use an interface with an eighth of IF1's capacity, so the total is at most twice 0.25 Mbit/s. {}",
                otherwise(samples, CO_ROUND, ONLY_1, NARROWEST)
            ),
        ))
        .comparison(claims[1].judge(
            below(CO_WEIGHTED),
            Judgement::met_or_differs(true, gain_at(samples, CO_WEIGHTED, ONLY_1, NARROWEST).negated()),
            format!(
                "A ninth of the connections go to IF2, and the number of large ones among them is random. Over 60 s this averages out. If \
                 connections are opened for {} only, it is {:+.0} %; the paper gives no duration. {}",
                super::SPANS[0].0.trim_start_matches(", "),
                samples
                    .gain(
                        THROUGHPUT,
                        (&format!("{CO_WEIGHTED}{}", super::SPANS[0].0), NARROWEST),
                        (&format!("{ONLY_1}{}", super::SPANS[0].0), NARROWEST)
                    )
                    .mean,
                otherwise(samples, CO_WEIGHTED, ONLY_1, NARROWEST)
            ),
        ))
        .comparison(claims[2].judge(
            format!("up to {gain:.0} %, at {at} Mbit/s"),
            Judgement::met_or_differs(is_about(gain, 369.0), gain_at(samples, CO_WEIGHTED, CO_ROUND, at)),
            format!(
                "With perfect proportions the throughput would be 2.25 Mbit/s instead of 0.5, a gain of 350 %. {}",
                otherwise(samples, CO_WEIGHTED, CO_ROUND, at)
            ),
        ))
        .comparison(claims[3].judge(
            format!("against the best other {:+.1} % at worst, at {behind_at} Mbit/s", -behind),
            Judgement::met_or_not(behind < 0.0),
            format!(
                "{} Compared with weighted round robin at {behind_at} Mbit/s: {}",
                by_other_rules(samples, &[ONLY_1, CO_ROUND, CO_WEIGHTED], "Mbit/s"),
                otherwise(samples, CO_MOST, CO_WEIGHTED, behind_at)
            ),
        ))
        .comparison(claims[4].judge(
            format!("maximum throughput {:.1} % below at worst, at {} Mbit/s; weighted round robin {:.1} %, at {}", missing[0].0, missing[0].1, missing[1].0, missing[1].1),
            Judgement::met_or_not(missing[0].0.min(missing[1].0) <= 9.0),
            format!(
                "The last connections to end are on one interface, so the other is idle at the end. With exactly known demands maximum throughput is {:.1} % \
                 below at worst.",
                missing[2].0
            ),
        ))
        .comparison(claims[5].judge(
            format!("{} {:+.0} % against only IF1, at {} Mbit/s", lowest.0, -lowest.1.0, lowest.1.1),
            Judgement::met_or_not(lowest.1.0 <= 1.0),
            "The paper contradicts itself here: by its first claim above, a single interface outperforms both rotations.",
        ))
}

/// How Braid's rule and known demands compare with the best of `others`, at worst.
fn by_other_rules(samples: &Samples, others: &[&str], unit: &str) -> String {
    let worst = |series| {
        let (behind, at) = most_behind(samples, series, others);
        format!("{:+.1} % at worst, at {at} {unit}", -behind)
    };
    format!("With exactly known demands it is {}. Braid's rule with learned demands: {}.", worst(CO_KNOWN), worst(CO_BRAID))
}

fn judge_narrow_po(results: Results, samples: &Samples) -> Results {
    let claims = NARROW_PO.claims;
    let (behind, behind_at) = most_behind(samples, PO_WEIGHTED, &[ONLY_1, PO_ROUND]);
    let (missing, missing_at) = most_missing(samples, PO_WEIGHTED, |if2| IF1 + if2);
    let narrow_mean = |value| samples.summary(value, (PO_WEIGHTED, NARROWEST)).mean;
    let narrow = samples.gain(THROUGHPUT, (PO_ROUND, NARROWEST), (ONLY_1, NARROWEST)).mean;
    results
        .comparison(claims[0].judge(
            format!("against the best other {:+.1} % at worst, at {behind_at} Mbit/s", -behind),
            Judgement::met_or_not(behind <= TIE),
            "If both interfaces have the same capacity, both schedulers behave the same.",
        ))
        .comparison(claims[1].judge(
            format!("{missing:.1} % below at worst, at {missing_at} Mbit/s"),
            Judgement::met_or_not(missing <= 9.0),
            format!(
                "Headers alone take 3.5 %. A queue of 50 packets lasts 2.4 s on IF2 at {NARROWEST} Mbit/s, longer than TCP's initial \
                 timeout: {:.0} % of its traffic is headers and retransmissions. So it moves less than its weight, and because of the \
                 strict order IF1 waits for it: IF1 is busy {:.0} % of the time.",
                narrow_mean(WASTE),
                narrow_mean(BUSY)
            ),
        ))
        .comparison(claims[2].judge(
            format!("{narrow:+.0} % at {NARROWEST} Mbit/s"),
            Judgement::met_or_differs(true, gain_at(samples, PO_ROUND, ONLY_1, NARROWEST).negated()),
            "",
        ))
        .comparisons(judge_narrow_bond(samples))
        .table(shares(samples, "IF2, Mbit/s", |if2| IF1 + if2))
}

fn judge_narrow_bond(samples: &Samples) -> [Comparison; 3] {
    let claims = NARROW_PO.claims;
    let (behind, behind_at) = most_behind(samples, BOND_WEIGHTED, &[ONLY_1, BOND_ROUND]);
    let (missing, missing_at) = most_missing(samples, BOND_WEIGHTED, |if2| IF1 + if2);
    let (own, own_at) = most_missing(samples, BOND, |if2| IF1 + if2);
    let narrow = samples.gain(THROUGHPUT, (BOND_ROUND, NARROWEST), (ONLY_1, NARROWEST)).mean;
    let mean = |value| samples.summary(value, (BOND_WEIGHTED, NARROWEST)).mean;
    [
        claims[3].judge(
            format!("against the best other {:+.1} % at worst, at {behind_at} Mbit/s", -behind),
            Judgement::met_or_not(behind <= TIE),
            "miDRR, which the paper does not have, is not in the comparison: it assigns a chunk to an interface once that can send it, so each interface is fully used. Round \
             robin gives both interfaces the same number of bytes, so it is twice as fast as the slower one.",
        ),
        claims[4].judge(
            format!("{missing:.1} % below at worst, at {missing_at} Mbit/s; miDRR {own:.1} %, at {own_at} Mbit/s"),
            Judgement::met_or_not(missing.max(own) <= 9.0),
            format!(
                "The difference is headers (of IP, UDP, QUIC and the bond), acknowledgements of the bond, and the first round trips. The \
                 bond comes closer than the model, because each interface has one controller for all connections, which keeps the queue \
                 short. In the model each connection has its own, and together they fill the queue. At {NARROWEST} Mbit/s {:.0} % of the \
                 traffic on IF2 is headers and retransmissions, and IF1 is busy {:.0} % of the time. Also, no connection waits in TCP's \
                 backoff: the last hundredth of the payload takes {:.1} % of the time.",
                mean(WASTE),
                mean(BUSY),
                mean(TAIL)
            ),
        ),
        claims[5].judge(
            format!("{narrow:+.0} % at {NARROWEST} Mbit/s"),
            Judgement::met_or_differs(true, gain_at(samples, BOND_ROUND, ONLY_1, NARROWEST).negated()),
            "Every second chunk waits for IF2, as in the paper. Late binding, which the paper does not have, avoids that: miDRR gives a \
             chunk to the interface that can send it now.",
        ),
    ]
}

fn judge_lossy_co(results: Results, samples: &Samples) -> Results {
    let claims = LOSSY_CO.claims;
    let mean = |series, x| samples.summary(THROUGHPUT, (series, x)).mean;
    let (least, _) = most_gain(samples, CO_ROUND, CO_WEIGHTED);
    let (behind, behind_at) = most_behind(samples, CO_MOST, &[CO_ROUND, CO_WEIGHTED]);
    let lossy = samples.gain(THROUGHPUT, (CO_ROUND, LOSSIEST), (ONLY_1, LOSSIEST)).mean;
    let fall = |from, to| 100.0 * (1.0 - mean(CO_WEIGHTED, to) / mean(CO_WEIGHTED, from));
    let (first, second) = (fall(0.0, 5.0), fall(5.0, 10.0));
    results
        .comparison(claims[0].judge(
            format!(
                "round robin against weighted {least:+.0} % at best; maximum throughput against the best of both {:+.1} % at worst, at \
                 {behind_at} % loss",
                -behind
            ),
            Judgement::met_or_not(least < 0.0 && behind <= TIE),
            by_other_rules(samples, &[CO_ROUND, CO_WEIGHTED], "% loss"),
        ))
        .comparison(claims[1].judge(format!("{lossy:+.0} % against only IF1 at {LOSSIEST} % loss"), Judgement::met_or_differs(true, gain_at(samples, CO_ROUND, ONLY_1, LOSSIEST).negated()), "\"Met\" takes an interval below zero."))
        .comparison(claims[2].judge(
            format!("weighted round robin falls by {first:.0} % from 0 to 5 % loss, by {second:.0} % of the rest from 5 to 10 %"),
            Judgement::met_or_not(first + second >= 10.0 && (first > 1.5 * second || second > 1.5 * first)),
            format!(
                "Many connections share IF2. Each slows down with loss, but together they still fill 1 Mbit/s, so throughput hardly falls. A \
                 single endless connection over IF2 shows the shape: {} Mbit/s at {} % loss.",
                LOSSES.map(|loss| format!("{:.2}", mean(CO_ONE, loss))).join(", "),
                LOSSES.map(|loss| loss.to_string()).join(", ")
            ),
        ))
}

fn judge_lossy_po(results: Results, samples: &Samples) -> Results {
    let claims = LOSSY_PO.claims;
    let (least, _) = most_gain(samples, PO_ROUND, PO_WEIGHTED);
    let lossy_mean = |value| samples.summary(value, (PO_WEIGHTED, LOSSIEST)).mean;
    let (missing, missing_at) = most_missing(samples, PO_WEIGHTED, |_| IF1 + Setup::NOMINAL.if2);
    results
        .comparison(claims[0].judge(format!("round robin against weighted {least:+.0} % at best"), Judgement::met_or_not(least < 0.0), ""))
        .comparison(claims[1].judge(
            format!("{missing:.1} % below at worst, at {missing_at} % loss"),
            Judgement::met_or_not(missing <= 9.0),
            format!(
                "As in dbas-3b: {:.0} % of the traffic on IF2 is headers and retransmissions, and IF1 is busy {:.0} % of the time. Lost \
                 packets also use capacity that is part of the sum.",
                lossy_mean(WASTE),
                lossy_mean(BUSY)
            ),
        ))
        .comparisons(judge_lossy_bond(samples))
        .table(shares(samples, "loss, %", |_| IF1 + Setup::NOMINAL.if2))
}

fn judge_lossy_bond(samples: &Samples) -> [Comparison; 2] {
    let claims = LOSSY_PO.claims;
    let optimum = |_| IF1 + Setup::NOMINAL.if2;
    let (least, _) = most_gain(samples, BOND_ROUND, BOND_WEIGHTED);
    let (missing, missing_at) = most_missing(samples, BOND_WEIGHTED, optimum);
    let (own, own_at) = most_missing(samples, BOND, optimum);
    let mean = |series, value| samples.summary(value, (series, LOSSIEST)).mean;
    let left = Setup::NOMINAL.if2 * (1.0 - LOSSIEST / 100.0);
    let payload = 1.0 - mean(BOND, WASTE) / 100.0;
    // IF1 is nearly always busy, so IF2 delivers the rest.
    let filled = 100.0 * (mean(BOND, THROUGHPUT) / payload - IF1 * mean(BOND, BUSY) / 100.0) / left;
    let lost = 100.0 * (Setup::NOMINAL.if2 - left) / optimum(LOSSIEST);
    [
        claims[2].judge(
            format!("round robin against weighted {least:+.1} % at best"),
            Judgement::met_or_not(least < -1.0),
            "For the reason given in dbas-3b: half of the bytes wait for IF2.",
        ),
        claims[3].judge(
            format!("{missing:.1} % below at worst, at {missing_at} % loss; miDRR {own:.1} %, at {own_at} %"),
            Judgement::met_or_not(missing.max(own) <= 9.0),
            format!(
                "At {LOSSIEST} % loss {lost:.1} % of the sum is lost packets; headers are as in dbas-3b. The rest of the difference is on \
                 IF2. Unlike TCP (AIMD), the bond's single controller does not mistake random loss for a full queue, but on such a slow \
                 link it uses only about {filled:.0} % of the capacity that remains after the loss. Within the 60 s the model's many TCP \
                 connections carry more: {:.2} Mbit/s, the bond {:.2}.",
                mean(PO_WEIGHTED, WITHIN),
                mean(BOND, WITHIN)
            ),
        ),
    ]
}

/// The largest deficit in percent of `series` below `optimum`, and its x value.
fn most_missing(samples: &Samples, series: &str, optimum: impl Fn(f64) -> f64) -> (f64, f64) {
    let missing = |x| 100.0 * (1.0 - samples.summary(THROUGHPUT, (series, x)).mean / optimum(x));
    most(samples.xs(series).into_iter().map(|x| (missing(x), x)))
}
