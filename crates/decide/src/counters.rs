//! What a device moved between two readings of its counters.

use std::time::Duration;

use braid_model::{ByteCount, Time};

/// A device's counters, received and sent, as they were last read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    last: Option<(Time, [ByteCount; 2])>,
}

/// What was moved since the reading before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Received and sent.
    pub bytes: [ByteCount; 2],
    /// The time between the readings.
    pub span: Duration,
}

impl DeviceCounters {
    /// Takes a reading in; `None` for the first. A count that went back means that the device was made anew, and has counted since.
    pub fn on_read(&mut self, now: Time, counters: [ByteCount; 2]) -> Option<Moved> {
        let (at, before) = self.last.replace((now, counters))?;
        let since =
            |index: usize| if counters[index] >= before[index] { counters[index].saturating_sub(before[index]) } else { counters[index] };
        Some(Moved { bytes: [since(0), since(1)], span: now.since(at) })
    }

    /// The last reading, and when it was made.
    pub fn last(&self) -> Option<(Time, [ByteCount; 2])> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_made_anew_has_counted_since() {
        let mut counters = DeviceCounters::default();
        let mut read = |at: u64, bytes: [u64; 2]| {
            counters.on_read(Time::from_millis(at), bytes.map(ByteCount::new)).map(|moved| moved.bytes.map(|bytes| bytes.get()))
        };
        assert_eq!(read(0, [100, 1000]), None);
        assert_eq!(read(1000, [150, 1000]), Some([50, 0]));
        assert_eq!(read(2000, [20, 1200]), Some([20, 200]));
    }
}
