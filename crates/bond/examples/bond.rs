//! Performance of bonds over emulated links, in tables: real QUIC in virtual time.
//!
//! `cargo run --release -p braid-bond --example bond [sums|where|simult|cuts|pairs|short|churn|messages|urgent|fair|rules|cost]...`; without
//! arguments, all tables.

#[path = "../tests/quic/mod.rs"]
mod quic;

use quic::scenes::{self, DOWN, UP};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let tables: [(&str, fn()); 12] = [
        ("sums", sums),
        ("where", account),
        ("simult", simult),
        ("cuts", cuts),
        ("pairs", pairs),
        ("short", short),
        ("churn", churn),
        ("messages", messages),
        ("urgent", urgent),
        ("fair", fair),
        ("rules", rules),
        ("cost", cost),
    ];
    for word in words.iter().filter(|word| tables.iter().all(|(name, _)| name != word)) {
        eprintln!("unknown table {word}: choose from {}", tables.map(|(name, _)| name).join(", "));
    }
    tables.iter().filter(|(name, _)| words.is_empty() || words.iter().any(|word| word == name)).for_each(|(_, table)| table());
}

fn sums() {
    println!("| links | loss | download | upload |\n|---|---|---|---|");
    for (name, specs) in scenes::link_sets() {
        for loss in [0.0, 0.01, 0.03] {
            let specs = scenes::lossy(&specs, loss);
            let [down, up] = [DOWN, UP].map(|side| scenes::share(&specs, 1, side, 20.0));
            println!("| {name} | {:.0} % | {down:.3} | {up:.3} |", loss * 100.0);
        }
    }
}

fn account() {
    println!("\n| links, 10 s | | share | used | payload of it | twice |\n|---|---|---|---|---|---|");
    for (name, specs) in scenes::link_sets() {
        let sum: f64 = specs.iter().map(|spec| spec.mbps).sum();
        for (way, side) in [("download", DOWN), ("upload", UP)] {
            let Some(account) = scenes::account(&specs, 1, side, (sum * 1.25e6) as usize) else { continue };
            let used: Vec<String> = account.used.iter().map(|used| format!("{used:.3}")).collect();
            let share = 10.0 / account.took.as_secs_f64();
            println!("| {name} | {way} | {share:.3} | {} | {:.4} | {:.4} |", used.join(" "), account.payload, account.twice);
        }
    }
}

fn simult() {
    println!("\n| links (one way) | | took | allowed | used |\n|---|---|---|---|---|");
    for (specs, limit) in scenes::simult() {
        for (way, side) in [("download", DOWN), ("upload", UP)] {
            let Some(account) = scenes::account(&specs, 1, side, 16 << 20) else { continue };
            let used: Vec<String> = account.used.iter().map(|used| format!("{used:.3}")).collect();
            println!("| {} | {way} | {:.2} s | {limit:.2} s | {} |", name(&specs), account.took.as_secs_f64(), used.join(" "));
        }
    }
}

fn cuts() {
    println!("\n| cut | told | gap median | worst | back after median | worst | gap then, worst |\n|---|---|---|---|---|---|---|");
    for link in 0..2 {
        for told in [false, true] {
            let all: Vec<_> = (1..=10).map(|seed| scenes::cut(seed, link, told)).collect();
            let sorted = |value: &dyn Fn(&scenes::Cut) -> f64| {
                let mut values: Vec<f64> = all.iter().map(value).collect();
                values.sort_unstable_by(f64::total_cmp);
                values
            };
            let gaps = sorted(&|cut| cut.gap.as_secs_f64() * 1e3);
            let backs = sorted(&|cut| cut.back.map_or(f64::INFINITY, |back| back.as_secs_f64() * 1e3));
            let after = sorted(&|cut| cut.gap_after.as_secs_f64() * 1e3);
            println!("| {link} | {told} | {:.0} ms | {:.0} | {:.0} | {:.0} | {:.0} |", gaps[5], gaps[9], backs[5], backs[9], after[9]);
        }
    }
}

fn name(specs: &[quic::Spec]) -> String {
    let one = |spec: &quic::Spec| format!("{} ({} ms, {} kB, {:.0} %)", spec.mbps, spec.delay_ms, spec.queue / 1000, spec.loss * 100.0);
    specs.iter().map(one).collect::<Vec<_>>().join(" + ")
}

fn pairs() {
    println!("\n| links (one way, buffer, loss) | both | best | ratio |\n|---|---|---|---|");
    for specs in scenes::profiles() {
        let (both, best) = scenes::both_and_best(&specs, 1, 15);
        println!("| {} | {both:.2} | {best:.2} | {:.3} |", name(&specs), both / best);
    }
}

fn short() {
    println!("\n| links | 50 kB, both | best | 500 kB | | 5 MB | |\n|---|---|---|---|---|---|---|");
    for specs in scenes::profiles() {
        let cells: Vec<String> = [50_000, 500_000, 5_000_000]
            .into_iter()
            .map(|size| {
                let (both, best) = scenes::short(&specs, 1, size);
                let slow = if both > best + best / 50 { " !" } else { "" };
                format!("{:.0} | {:.0}{slow}", both.as_secs_f64() * 1e3, best.as_secs_f64() * 1e3)
            })
            .collect();
        println!("| {} | {} |", name(&specs), cells.join(" | "));
    }
}

fn churn() {
    println!("\n| seed | complete | share of what could be carried | the rest after all were back |\n|---|---|---|---|");
    for seed in 1..=5 {
        let churn = scenes::churn(seed, 60);
        println!("| {seed} | {} of 20 | {:.3} | {:.1} s |", churn.complete, churn.share, churn.rest.as_secs_f64());
    }
}

fn messages() {
    println!("\n| copies | missing | the bulk flow's share of the rest |\n|---|---|---|");
    for copies in 1..=3 {
        let (missing, bulk) = scenes::messages(1, copies, 100_000);
        println!("| {copies} | {:.4} % | {bulk:.3} |", missing * 100.0);
    }
}

fn urgent() {
    println!("\n| bulk flow | median | 99th percentile |\n|---|---|---|");
    for bulk in [false, true] {
        let (median, most) = scenes::urgent(1, bulk, 60);
        println!("| {bulk} | {:.1} ms | {:.1} ms |", median.as_secs_f64() * 1e3, most.as_secs_f64() * 1e3);
    }
}

fn fair() {
    println!("\n| phase | rates (exact max-min), Mbit/s |\n|---|---|");
    for (phase, flows) in scenes::fair(1).iter().enumerate() {
        let cells: Vec<String> =
            flows.iter().map(|(rate, exact)| format!("{rate:.3} ({exact:.3}, {:+.1} %)", (rate / exact - 1.0) * 100.0)).collect();
        println!("| {} | {} |", phase + 1, cells.join(", "));
    }
}

fn rules() {
    use braid_bond::BondScheduler::{EarliestCompletion, Midrr, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights};
    println!("\n| scheduling | 20 + 20 (50 ms) | by link | 20 + 2 | by link |\n|---|---|---|---|---|");
    for scheduling in [Midrr, RoundRobin, WeightedRoundRobin, RttShare, EarliestCompletion, Weights, Redundant(2)] {
        let cells =
            [[quic::Spec::new(20.0, 10), quic::Spec::new(20.0, 50)], [quic::Spec::new(20.0, 10), quic::Spec::new(2.0, 10)]].map(|specs| {
                let (share, carried) = scenes::scheduled(&specs, 1, scheduling, 20_000_000);
                format!("{share:.3} | {}", carried.iter().map(|part| format!("{part:.2}")).collect::<Vec<_>>().join(" "))
            });
        println!("| {scheduling:?} | {} |", cells.join(" | "));
    }
}

/// Cost of two bonds without QUIC between them: 400 MB over two paths, both ends in this thread.
fn cost() {
    use braid_bond::{Bond, FlowKind, FlowPolicy, Limits, Open, PathFacts, PathId, Side, Target};
    use braid_model::{ByteCount, Rate, Time};
    println!("\n| flows | ns a datagram, both ends | Gbit/s |\n|---|---|---|");
    for count in [1, 64] {
        let mut now = Time::from_millis(1000);
        let mut ends = [Side::Client, Side::Server].map(|side| Bond::new(side, Limits::default(), now));
        let facts = PathFacts {
            rtt: std::time::Duration::from_millis(1),
            rate: Rate::from_mbps(1000),
            room: ByteCount::new(60_000),
            window: ByteCount::new(1 << 20),
        };
        for end in &mut ends {
            (0..2).for_each(|at| assert!(end.add_path(now, PathId(at), at as u8, facts)));
        }
        let flows: Vec<_> = (0..count)
            .map(|_| {
                let target = Target::Name("server".into(), 80);
                ends[0].open(now, Open { kind: FlowKind::Stream, target, policy: FlowPolicy::default() }).expect("a flow")
            })
            .collect();
        let data = bytes::Bytes::from(vec![7; 65_536]);
        let (mut got, mut datagrams) = (0usize, 0u64);
        let mut out = bytes::BytesMut::new();
        #[allow(clippy::disallowed_methods, reason = "this measures the machine")]
        let start = std::time::Instant::now();
        while got < 400_000_000 {
            now = now + std::time::Duration::from_micros(500);
            for flow in &flows {
                if ends[0].writable(now, *flow) >= data.len() {
                    ends[0].write(*flow, data.clone());
                }
            }
            for side in 0..2 {
                for path in [PathId(0), PathId(1)] {
                    ends[side].set_facts(path, facts);
                    while ends[side].poll_datagram(now, path, 1400, &mut out) {
                        datagrams += 1;
                        ends[1 - side].receive(now, path, out.split().freeze()).expect("a valid datagram");
                    }
                }
                ends[side].handle_timeout(now);
                while ends[side].poll_event().is_some() {}
            }
            for flow in &flows {
                while let Some(data) = ends[1].read(now, *flow, usize::MAX) {
                    got += data.len();
                }
            }
        }
        let took = start.elapsed();
        println!("| {count} | {:.0} | {:.2} |", took.as_nanos() as f64 / datagrams as f64, got as f64 * 8.0 / took.as_nanos() as f64);
    }
}
