//! Scratch: writes the page with cached samples.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use braid_model::Time;
use braid_peer::{keys::KeyPair, tls};
use braid_sim::Quic;
use braid_sim::experiment::*;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (out, cache, names) = (&args[1], Path::new(&args[2]), &args[3..]);
    std::fs::create_dir_all(cache).unwrap();
    let (mine, theirs) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let quic = Quic {
        epoch: Instant::now(),
        client: tls::client(Some(&mine), tls::Expect::Pinned(theirs.public())).unwrap(),
        server: tls::server(&theirs, tls::Clients::Keyed).unwrap(),
    };
    let runs = std::env::var("RUNS").ok().and_then(|r| r.parse().ok()).unwrap_or(15);
    let setting = Setting { runs, seed: 1 };
    let mut reports = Vec::new();
    for experiment in braid_sim::experiments::all() {
        let name = experiment.about().name;
        let begin = Instant::now();
        let file = cache.join(format!("{name}.json"));
        let known: BTreeMap<String, Sample> =
            std::fs::read(&file).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();
        let may = names.is_empty() || names.iter().any(|n| n == name);
        let jobs = setting.jobs(experiment);
        let key = |job: &Job| format!("{}|{}|{}|{}", job.point.series, job.point.x, job.index, job.seed);
        let missing: Vec<Job> = jobs.iter().filter(|job| !known.contains_key(&key(job))).cloned().collect();
        if !missing.is_empty() && !may {
            eprintln!("{name}: skipped, {} missing", missing.len());
            continue;
        }
        let threads = if experiment.about().sampling == Sampling::Timed { 1 } else { 2 };
        let next = AtomicUsize::new(0);
        let fresh = Mutex::new(known);

        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let clock = || Time::ZERO + begin.elapsed();
                    while let Some(job) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let (job, sample) = job.clone().measure_on(experiment, &Machine { clock: &clock, quic: Some(&quic) });
                        fresh.lock().unwrap().insert(key(&job), sample);
                    }
                });
            }
        });

        let all = fresh.into_inner().unwrap();
        std::fs::write(&file, serde_json::to_vec(&all).unwrap()).unwrap();
        let samples = jobs.into_iter().map(|job| { let s = all[&key(&job)].clone(); (job, s) }).collect();
        eprintln!("{name}: {} measured in {:.0} s", missing.len(), begin.elapsed().as_secs_f64());
        match conclude(experiment, &setting, Samples::new(samples)) {
            Ok(report) => reports.push(report),
            Err(error) => eprintln!("{error}"),
        }
    }
    let plots = Path::new(out).join("reproduction");
    std::fs::create_dir_all(&plots).unwrap();
    for report in &reports {
        for (name, svg) in report.plots() {
            std::fs::write(plots.join(name), svg).unwrap();
        }
    }
    std::fs::write(Path::new(out).join("reproduction.md"), markdown(&reports, "reproduction")).unwrap();
    for report in &reports {
        for c in &report.results.comparisons {
            println!("{} | {} | {} | {}", report.about.name, c.claim.text, c.here, c.judgement);
        }
    }
}
