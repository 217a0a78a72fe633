//! The virtual interface, section 4: throughput over several access points, handover, power saving.

mod handover;
mod power;
mod throughput;

use std::time::Duration;

use braid_model::{Power, Rate};

use crate::experiment::Experiment;
use crate::{LinkPower, LinkSpec};

pub(super) fn all() -> [&'static dyn Experiment; 5] {
    [&handover::Handovers, &throughput::IDLE, &throughput::SATURATED, &throughput::SHARED, &power::Saving]
}

/// A kind of interface.
#[derive(Debug, Clone, Copy)]
struct Wifi {
    name: &'static str,
    /// Goodput of a single TCP connection, after contention, headers and acknowledgements.
    goodput: Rate,
    /// Nominal rate of the device.
    nominal: Rate,
}

/// 802.11g, with the goodput of the paper's table 5.
const WIFI_G: Wifi = Wifi { name: "802.11g", goodput: Rate::from_bps(28_879_000), nominal: Rate::from_mbps(54) };
/// 802.11b, with a common goodput; the paper gives none.
const WIFI_B: Wifi = Wifi { name: "802.11b", goodput: Rate::from_bps(5_900_000), nominal: Rate::from_mbps(11) };
/// From the paper's table 1, without the virtual interface.
const ROUND_TRIP: Duration = Duration::from_micros(1730);

impl Wifi {
    /// A link on which one TCP flow has this goodput: two segments' payload in the time of two segments and their acknowledgement.
    fn link(self, name: &str) -> LinkSpec {
        let rate = self.goodput.scale((2.0 * 1500.0 + 52.0) / (2.0 * 1448.0));
        LinkSpec::symmetric(&format!("{} {name}", self.name), rate, ROUND_TRIP)
    }

    fn interface(self, power: LinkPower) -> (Rate, Power) {
        (self.nominal, power.extra())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Job, Judgement, Point, Samples, Setting, conclude};

    fn total(rates: &[f64]) -> f64 {
        rates.iter().take(rates.len() - 1).sum()
    }

    #[test]
    fn one_interface_has_its_specified_goodput() {
        let rates = throughput::IDLE.rates(1, throughput::RAW, Duration::from_secs(3), 1).0;
        // It starts within the first of three seconds.
        assert!(rates[0] > 28.879 * 0.6 && rates[0] < 28.879, "{rates:?}");
        assert_eq!(rates[1..], [0.0, 0.0]);
    }

    #[test]
    fn several_flows_use_both_idle_access_points_equally() {
        let rates = throughput::IDLE.rates(4, throughput::LOSSLESS, Duration::from_secs(4), 1).0;
        assert!((rates[0] / rates[1] - 1.0).abs() < 0.1 && total(&rates) > 1.4 * 28.879, "{rates:?}");
    }

    #[test]
    fn one_flow_mostly_avoids_the_saturated_access_point() {
        let span = Duration::from_secs(20);
        let (shared, alone) =
            (throughput::SATURATED.rates(1, throughput::LOSSLESS, span, 1).0, throughput::SATURATED.rates(1, throughput::RAW, span, 1).0);
        assert!(shared[1] > 2.0 * shared[0], "{shared:?}");
        assert!(total(&shared) > 1.3 * total(&alone), "{shared:?} against {alone:?}");
        assert!((alone[0] / alone[2] - 1.0).abs() < 0.1, "the other station uses half of the air time: {alone:?}");
    }

    #[test]
    fn moves_that_lose_packets_cost_throughput() {
        let span = Duration::from_secs(20);
        let [with, without] = [throughput::VIRTUAL, throughput::LOSSLESS].map(|series| throughput::IDLE.rates(1, series, span, 1));
        assert!(with.1 > without.1, "{with:?} {without:?}");
        assert!(total(&with.0) < total(&without.0), "{with:?} {without:?}");
    }

    #[test]
    fn a_slow_interface_slows_the_other_station() {
        let span = Duration::from_secs(4);
        let (three, alone) =
            (throughput::SHARED.rates(6, throughput::LOSSLESS, span, 1).0, throughput::SHARED.rates(1, throughput::RAW, span, 1).0);
        assert!(three[3] < 0.5 * alone[3], "{three:?} against {alone:?}");
        assert!(total(&three) < total(&alone) * 1.5, "{three:?} against {alone:?}");
    }

    #[test]
    fn a_larger_maxdiff_takes_longer_with_any_seed() {
        for seed in 1..6 {
            let setting = Setting { runs: 3, seed };
            let samples = setting.jobs(&handover::Handovers).into_iter().map(|job| job.measure(&handover::Handovers)).collect();
            let comparisons = conclude(&handover::Handovers, &setting, Samples::new(samples)).unwrap().results.comparisons;
            assert!(comparisons[..2].iter().all(|comparison| comparison.judgement != Judgement::NotMet), "{comparisons:?}");
        }
    }

    #[test]
    fn power_saving_uses_less_energy() {
        let point = |series: &str| Point { series: series.to_owned(), x: 0.0 };
        let measured = [power::SHARING, power::SAVING].map(|series| {
            let job = Job { point: point(series), index: 0, seed: 1 };
            (job, power::measure(series, Duration::from_secs(100), 1))
        });
        let samples = Samples::new(measured.to_vec());
        let saved = samples.gain("energy", (power::SAVING, 0.0), (power::SHARING, 0.0)).mean;
        assert!(saved < -0.1, "{saved} %");
        assert!(samples.summary("b busy", (power::SAVING, 0.0)).mean < 5.0);
    }
}
