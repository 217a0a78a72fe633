//! A log whose lines others cause: it takes so many bytes.

use braid_decide::bucket::Bucket;
use braid_model::{ByteCount, Rate, Time};
use braid_platform::linux::sys::bpf::now;

/// Bytes of the log: about 40 lines a second, and 2,000 at once.
const RATE: Rate = Rate::from_bps(32_000);
const BURST: ByteCount = ByteCount::new(200_000);

/// The log, whose lines others cause: switches, managers, and whoever poses as one.
pub(crate) struct LimitedLog {
    bytes: Bucket,
    omitted: u64,
}

impl LimitedLog {
    pub(crate) fn new(now: Time) -> Self {
        Self { bytes: Bucket::new(RATE, BURST, now), omitted: 0 }
    }

    pub(crate) fn write(&mut self, line: &str, is_trouble: bool) {
        if !self.bytes.take(ByteCount::new(line.len() as u64), now()) {
            self.omitted += 1;
            return;
        }
        match std::mem::take(&mut self.omitted) {
            0 => {}
            omitted => tracing::warn!("{omitted} lines were left out: more came than the log takes"),
        }
        if is_trouble {
            tracing::warn!("{line}");
        } else {
            tracing::info!("{line}");
        }
    }
}
