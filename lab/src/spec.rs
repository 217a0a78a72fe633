//! Specification of a link of the lab.

use std::sync::Arc;
use std::time::Duration;

use braid_model::{ByteCount, Rate};
use braid_netem::{Loss, Profile, RateSource, Trace};

/// `count` Mbit/s.
pub const fn mbps(count: u64) -> Rate {
    Rate::from_mbps(count)
}

/// `count` milliseconds.
pub const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// How the lab creates a link.
#[expect(clippy::large_enum_variant, reason = "there are a handful")]
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Medium {
    /// Through the emulator: towards the server, towards the client.
    Emulated { up: Profile, down: Profile },
    /// A bare pair of veth devices.
    Direct,
}

/// A link between client and server: the name of the client's device, and the link's effect on packets.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkSpec {
    pub(crate) name: String,
    pub(crate) mtu: u32,
    pub(crate) medium: Medium,
    queue_set: bool,
}

impl LinkSpec {
    /// An emulated link without limits. The name is the client's device: at most 15 bytes.
    pub fn new(name: &str) -> Self {
        let medium = Medium::Emulated { up: Profile::default(), down: Profile::default() };
        Self { name: name.to_owned(), mtu: 1500, medium, queue_set: false }
    }

    /// A bare veth pair, without emulator, as fast as the kernel: it cannot be dark, limited, counted or watched by the lab.
    pub fn direct(name: &str) -> Self {
        Self { medium: Medium::Direct, ..Self::new(name) }
    }

    /// Sets the rate of IP packets in both directions. Unless set, the queue follows the rate (100 ms, 64 kB at least).
    pub fn rate(self, rate: Rate) -> Self {
        self.down(rate).up(rate)
    }

    /// The rate towards the client.
    pub fn down(mut self, rate: Rate) -> Self {
        let queue = self.queue_for(rate);
        if let Medium::Emulated { down, .. } = &mut self.medium {
            (down.rate, down.queue) = (rate.into(), queue.unwrap_or(down.queue));
        }
        self
    }

    /// The rate towards the server.
    pub fn up(mut self, rate: Rate) -> Self {
        let queue = self.queue_for(rate);
        if let Medium::Emulated { up, .. } = &mut self.medium {
            (up.rate, up.queue) = (rate.into(), queue.unwrap_or(up.queue));
        }
        self
    }

    /// A recorded rate towards the client.
    pub fn down_trace(mut self, trace: Trace) -> Self {
        if let Medium::Emulated { down, .. } = &mut self.medium {
            down.rate = RateSource::Trace(Arc::new(trace));
        }
        self
    }

    /// Sets the one-way delay of each direction: the RTT is twice as long.
    pub fn delay(self, delay: Duration) -> Self {
        self.both(|profile| profile.delay = delay)
    }

    /// Sets the largest additional random delay; packets stay in order.
    pub fn jitter(self, jitter: Duration) -> Self {
        self.both(|profile| profile.jitter = jitter)
    }

    /// Sets the share of packets lost at random in each direction.
    pub fn loss(self, share: f64) -> Self {
        self.both(|profile| profile.loss = Loss::random(share))
    }

    /// Sets any loss model, in each direction.
    pub fn loss_model(self, loss: Loss) -> Self {
        self.both(|profile| profile.loss = loss)
    }

    /// Sets the size of the queue in each direction.
    pub fn queue(mut self, queue: ByteCount) -> Self {
        self.queue_set = true;
        self.both(|profile| profile.queue = queue)
    }

    /// Sets the largest IP packet in bytes.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// The name of the client's device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rate towards the client, where it is emulated and constant.
    pub fn down_rate(&self) -> Option<Rate> {
        match &self.medium {
            Medium::Emulated { down: Profile { rate: RateSource::Constant(rate), .. }, .. } => Some(*rate),
            _ => None,
        }
    }

    fn both(mut self, change: impl Fn(&mut Profile)) -> Self {
        if let Medium::Emulated { up, down } = &mut self.medium {
            change(up);
            change(down);
        }
        self
    }

    fn queue_for(&self, rate: Rate) -> Option<ByteCount> {
        let tenth = ByteCount::new((rate.bytes_per_second() / 10).max(64_000));
        (!self.queue_set).then_some(tenth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profiles(spec: &LinkSpec) -> (&Profile, &Profile) {
        match &spec.medium {
            Medium::Emulated { up, down } => (up, down),
            Medium::Direct => panic!("not emulated"),
        }
    }

    #[test]
    fn both_directions_follow_and_the_queue_follows_the_rate_unless_set() {
        let spec = LinkSpec::new("wlan0").rate(mbps(20)).up(mbps(1)).delay(ms(10)).loss(0.01);
        let (up, down) = profiles(&spec);
        assert_eq!((down.queue, up.queue), (ByteCount::new(250_000), ByteCount::new(64_000)));
        assert_eq!((up.delay, down.delay), (ms(10), ms(10)));
        assert_eq!(spec.down_rate(), Some(mbps(20)));
        let set = LinkSpec::new("wlan0").queue(ByteCount::new(9)).rate(mbps(20));
        assert_eq!(profiles(&set).1.queue, ByteCount::new(9));
    }

    #[test]
    fn a_direct_link_ignores_emulator_settings() {
        assert_eq!(LinkSpec::direct("eth0").rate(mbps(3)).loss(0.5), LinkSpec::direct("eth0"));
    }
}
