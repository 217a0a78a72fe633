//! Limits the total rate of all reads.

use std::sync::Mutex;
use std::time::Duration;

use braid_model::{ByteCount, Rate};
use tokio::time::Instant;

/// How far reads may run ahead of the rate.
const BURST: Duration = Duration::from_millis(50);

/// A rate limiter.
#[derive(Debug)]
pub(crate) struct Throttle {
    rate: Option<Rate>,
    /// Time at which all bytes so far have been paid for.
    due: Mutex<Option<Instant>>,
}

impl Throttle {
    pub(crate) fn new(rate: Option<Rate>) -> Self {
        Self { rate, due: Mutex::new(None) }
    }

    /// Waits until `count` more bytes may be read.
    pub(crate) async fn pass(&self, count: usize) {
        let Some(rate) = self.rate else { return };
        let until = {
            let mut due = self.due.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let now = Instant::now();
            let from = due.map_or(now, |due| due.max(now));
            *due = Some(from + rate.time_for(ByteCount::new(count as u64)).min(Duration::from_secs(3600)));
            from
        };
        if until > Instant::now() + BURST {
            tokio::time::sleep_until(until).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_megabyte_at_forty_megabits_takes_a_fifth_of_a_second() {
        let throttle = Throttle::new(Some(Rate::from_mbps(40)));
        let begin = Instant::now();
        for _ in 0..100 {
            throttle.pass(10_000).await;
        }
        let taken = begin.elapsed().as_secs_f64();
        assert!(taken > 0.14, "{taken}");
    }
}
