//! Yap's thesis, chapters 3 and 4: fair queueing over several interfaces.

mod http;
mod midrr;
mod overhead;
mod pgps;
mod preferences;
mod theorem;
mod theorems;

use crate::experiment::Experiment;

pub(super) fn all() -> [&'static dyn Experiment; 8] {
    [
        &preferences::Preferences,
        &theorems::Theorems,
        &pgps::Bounds,
        &theorem::Theorem,
        &midrr::Convergence,
        &overhead::FLOWS,
        &overhead::LINKS,
        &http::Http,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Judgement, Machine, Report, Samples, Sampling, Setting, conclude};
    use braid_model::Time;
    use std::cell::Cell;

    fn report(experiment: &dyn Experiment, seed: u64) -> Report {
        // A clock for timed experiments that advances by a nanosecond at each reading.
        let ticks = Cell::new(0);
        let clock = || {
            ticks.set(ticks.get() + 1);
            Time::from_nanos(ticks.get())
        };
        let setting = Setting { runs: 1, seed };
        let samples =
            setting.jobs(experiment).into_iter().map(|job| job.measure_on(experiment, &Machine { clock: &clock, quic: None })).collect();
        conclude(experiment, &setting, Samples::new(samples)).unwrap()
    }

    /// FNV-1a of the whole output: the report as JSON, and its plots.
    fn hash(report: &Report) -> u64 {
        let plots: String = report.plots().into_iter().map(|(_, svg)| svg).collect();
        let text = serde_json::to_string(report).unwrap() + &plots;
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// Theorems 5 and 6 and Lemma 5 are false, and the first seconds of figure 4.5 need a large quantum; the rest is as in the thesis.
    #[test]
    fn deterministic_experiments_differ_from_the_thesis_where_it_is_wrong() {
        for experiment in all().into_iter().filter(|experiment| experiment.about().sampling == Sampling::Once) {
            for seed in [1, 2, 3] {
                let report = report(experiment, seed);
                let judged = report.results.comparisons.iter().enumerate();
                let not_met: Vec<usize> = judged.filter(|(_, one)| one.judgement == Judgement::NotMet).map(|(claim, _)| claim).collect();
                let wanted: &[usize] = match report.about.name {
                    "thesis-4-3" => &[0, 1, 3],
                    "thesis-4-5" => &[4],
                    _ => &[],
                };
                assert_eq!(not_met, wanted, "{}: {:?}", report.about.name, report.results.comparisons);
            }
        }
    }

    #[test]
    fn a_counter_is_fair_where_the_flag_is_not_on_every_machine() {
        let report = report(&theorem::Theorem, 1);
        let within: Vec<f64> = report.results.tables[0].rows.iter().map(|row| row[2].trim_end_matches(" %").parse().unwrap()).collect();
        assert!(within[0] <= 70.0 && within[1] >= 90.0, "{:?}", report.results.tables);
        assert_eq!(report.results.tables[1].rows[0][1..], ["3.00 Mb/s", "2.00 Mb/s"]);
        assert_eq!(report.results.tables[1].rows[1][1..], ["2.50 Mb/s", "2.50 Mb/s"]);
        assert_eq!(hash(&report), 11_319_703_561_476_514_812, "if this change is intended, update the value");
    }

    #[test]
    fn results_are_the_same_on_every_machine() {
        let quick = all().into_iter().filter(|experiment| experiment.about().sampling != Sampling::Repeated);
        let hashes: Vec<(&str, u64)> = quick.map(|experiment| (experiment.about().name, hash(&report(experiment, 1)))).collect();
        let wanted = [
            ("thesis-3-1", 5_476_775_621_504_947_191),
            ("thesis-4-3", 15_394_089_997_820_195_825),
            ("thesis-4-5", 4_851_738_078_641_446_430),
            ("thesis-4-6", 12_231_958_365_430_245_648),
            ("thesis-4-7", 15_914_344_881_970_936_760),
            ("thesis-4-8", 87_622_523_207_683_264),
        ];
        assert_eq!(hashes, wanted, "if this change is intended, update the values");
    }
}
