//! Synthetic traces of links.

use braid_netem::{Random, Trace};

/// A cellular link of `seconds` whose rate varies between `low` and `high` Mbit/s in steps of 200 ms. About one step in ten is followed by half a
/// second of darkness. It has the shape of the recordings of Winstein et al. (NSDI 2013), not their numbers.
pub(crate) fn cellular(seconds: u64, low: f64, high: f64, seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let mut rate = (low + high) / 2.0;
    let mut dark = 0;
    let mut credit = 0.0;
    let mut text = String::new();
    for millisecond in 1..=seconds * 1000 {
        if millisecond % 200 == 0 {
            let factor = 0.6 + random.up_to(1000) as f64 / 1000.0;
            rate = (rate * factor).clamp(low, high);
            if random.up_to(49) == 0 {
                dark = 500;
            }
        }
        if dark > 0 {
            dark -= 1;
            continue;
        }
        credit += rate * 1e6 / 8.0 / 1000.0 / Trace::OPPORTUNITY.get() as f64;
        while credit >= 1.0 {
            credit -= 1.0;
            text.push_str(&format!("{millisecond}\n"));
        }
    }
    text.push_str(&format!("{}\n", seconds * 1000));
    Trace::parse(&text).expect("sorted numbers above zero")
}
