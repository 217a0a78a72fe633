//! Bonds over real QUIC and emulated links.

mod quic;

use quic::Spec;
use quic::scenes::{DOWN, UP, share};

#[test]
fn one_flow_gets_the_links_sum() {
    for (specs, side) in [
        (vec![Spec::new(20.0, 5)], DOWN),
        (vec![Spec::new(20.0, 5), Spec::new(20.0, 5)], UP),
        (vec![Spec::new(20.0, 5), Spec::new(10.0, 50)], DOWN),
        (vec![Spec::new(20.0, 2), Spec { queue: 1_000_000, ..Spec::new(5.0, 2) }], DOWN),
    ] {
        let share = share(&specs, 1, side, 10.0);
        assert!(share > 0.90, "{specs:?}: {share}");
    }
}
