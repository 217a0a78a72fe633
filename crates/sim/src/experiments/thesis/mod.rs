//! Yap's thesis, chapters 3 and 4: fair queueing over several interfaces.

mod midrr;
mod overhead;
mod pgps;
mod preferences;

use crate::experiment::Experiment;

pub(super) fn all() -> [&'static dyn Experiment; 5] {
    [&preferences::Preferences, &midrr::Convergence, &overhead::FLOWS, &overhead::LINKS, &pgps::Bounds]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Judgement, Report, Samples, Sampling, Setting, conclude};
    use std::cell::Cell;

    fn report(experiment: &dyn Experiment, seed: u64) -> Report {
        // A clock that goes on by a nanosecond each time it is looked at, for what is timed.
        let ticks = Cell::new(0);
        let clock = || {
            ticks.set(ticks.get() + 1);
            braid_model::Time::from_nanos(ticks.get())
        };
        let setting = Setting { runs: 2, seed };
        let samples = setting.jobs(experiment).into_iter().map(|job| job.measure_by(experiment, &clock)).collect();
        conclude(experiment, &setting, Samples::new(samples)).unwrap()
    }

    #[test]
    fn what_is_not_timed_meets_the_thesis_with_any_seed() {
        for experiment in all().into_iter().filter(|experiment| experiment.about().sampling != Sampling::Timed) {
            for seed in [1, 2, 3] {
                let report = report(experiment, seed);
                for verdict in &report.results.verdicts {
                    assert!(verdict.judgement != Judgement::NotMet, "{}: {verdict:?}", report.about.name);
                }
            }
        }
    }

    #[test]
    fn results_are_the_same_on_every_machine() {
        let hash = |experiment: &dyn Experiment| {
            let report = report(experiment, 1);
            let text = serde_json::to_string(&report).unwrap() + &report.plots().concat_svg();
            // FNV-1a.
            text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
        };
        assert_eq!(all().map(hash), [0, 0, 0, 0, 0]);
    }

    trait ConcatSvg {
        fn concat_svg(&self) -> String;
    }

    impl ConcatSvg for Vec<(String, String)> {
        fn concat_svg(&self) -> String {
            self.iter().map(|(_, svg)| svg.as_str()).collect()
        }
    }
}
