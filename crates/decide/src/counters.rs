//! Traffic of a device between two readings of its counters.

use std::time::Duration;

use braid_model::{ByteCount, Time, Traffic};

/// The last reading of a device's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    last: Option<(Time, Traffic)>,
}

/// Traffic since the previous reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Bytes in both directions.
    pub traffic: Traffic,
    /// Time between the two readings.
    pub span: Duration,
}

impl DeviceCounters {
    /// Records a reading. Returns `None` for the first one. A counter that decreased means that the device was re-created; its new value then counts
    /// as the traffic since.
    pub fn on_read(&mut self, now: Time, counters: Traffic) -> Option<Moved> {
        let (at, before) = self.last.replace((now, counters))?;
        let since = |count: ByteCount, before: ByteCount| if count >= before { count.saturating_sub(before) } else { count };
        let traffic = Traffic { rx: since(counters.rx, before.rx), tx: since(counters.tx, before.tx) };
        Some(Moved { traffic, span: now.since(at) })
    }

    /// The last reading and its time.
    pub fn last(&self) -> Option<(Time, Traffic)> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_of_a_recreated_device_counts_from_zero() {
        let mut counters = DeviceCounters::default();
        let traffic = |rx, tx| Traffic { rx: ByteCount::new(rx), tx: ByteCount::new(tx) };
        let mut read = |at: u64, counts| counters.on_read(Time::from_millis(at), counts).map(|moved| moved.traffic);
        assert_eq!(read(0, traffic(100, 1000)), None);
        assert_eq!(read(1000, traffic(150, 1000)), Some(traffic(50, 0)));
        assert_eq!(read(2000, traffic(20, 1200)), Some(traffic(20, 200)));
    }
}
