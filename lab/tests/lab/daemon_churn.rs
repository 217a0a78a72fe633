//! Links fail and return at random during a bond's flows, and then all fail at once: no data is lost.

use std::time::Duration;

use crate::support::*;
use braid_lab::churn::{Plan, any_seed, run};

/// Environment variable with the printed seed of a run to repeat.
const SEED: &str = "BRAID_SEED";

#[test]
fn downloads_and_an_ssh_session_survive_links_that_die_at_random_and_all_at_once() {
    if !able() {
        return;
    }
    let given = std::env::var(SEED).ok().map(|seed| seed.parse().unwrap_or_else(|_| panic!("{SEED}={seed} is no number")));
    let seed = given.unwrap_or_else(any_seed);
    println!("{SEED}={seed} repeats this");
    let plan = Plan { seed, downloads: 20, churn: Duration::from_secs(8), dark: Duration::from_secs(4) };
    let outcome = run(&braid(), plan, |_, _| Ok(())).unwrap();
    let [churned, dark] = outcome.phases;
    println!("{} deaths: {churned}\nall dark: {dark}", outcome.deaths);
    assert!(outcome.failures.is_empty(), "seed {seed}: {:?}", outcome.failures);
    assert!(outcome.deaths > 0 && outcome.echoed > 60, "{outcome:?}");
    assert!(dark.all_stalled >= plan.dark, "something crossed a dark link: {dark}");
}
