//! What a device moved between two readings of its counters.

use std::time::Duration;

use braid_model::{ByteCount, Time, Traffic};

/// A device's counters as they were last read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    last: Option<(Time, Traffic)>,
}

/// What was moved since the reading before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// The bytes.
    pub traffic: Traffic,
    /// The time between the readings.
    pub span: Duration,
}

impl DeviceCounters {
    /// Takes a reading in; `None` for the first. A count that went back means that the device was made anew, and has counted since.
    pub fn on_read(&mut self, now: Time, counters: Traffic) -> Option<Moved> {
        let (at, before) = self.last.replace((now, counters))?;
        let since = |count: ByteCount, before: ByteCount| if count >= before { count.saturating_sub(before) } else { count };
        let traffic = Traffic { rx: since(counters.rx, before.rx), tx: since(counters.tx, before.tx) };
        Some(Moved { traffic, span: now.since(at) })
    }

    /// The last reading, and when it was made.
    pub fn last(&self) -> Option<(Time, Traffic)> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_made_anew_has_counted_since() {
        let mut counters = DeviceCounters::default();
        let traffic = |rx, tx| Traffic { rx: ByteCount::new(rx), tx: ByteCount::new(tx) };
        let mut read = |at: u64, counts| counters.on_read(Time::from_millis(at), counts).map(|moved| moved.traffic);
        assert_eq!(read(0, traffic(100, 1000)), None);
        assert_eq!(read(1000, traffic(150, 1000)), Some(traffic(50, 0)));
        assert_eq!(read(2000, traffic(20, 1200)), Some(traffic(20, 200)));
    }
}
