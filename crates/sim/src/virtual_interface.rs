//! The rules of Mota's virtual interface as a scheduler.

use std::time::Duration;

use braid_decide::virtual_interface::{Interface, Srtt, power_saving_shares, saves_power, shares};
use braid_model::{ByteCount, LinkSet, Power, Rate};

use crate::schedule::{NewStream, Scheduler, View};
use crate::tcp::SEGMENT;

/// Interval between samples of round-trip times (Mota, section 3.2.3).
const SAMPLED: Duration = Duration::from_secs(5);

/// Mota's virtual interface (2011), per flow. Each flow uses one interface at a time. Turns follow the shares of
/// [`braid_decide::virtual_interface`]; a new turn starts at each sample of the round-trip times.
///
/// The paper's shares are of data "within a certain data flow". It does not say how much data goes to one interface before the next has its
/// turn. Here a turn lasts for the only interval in the paper, the 5 seconds between two samples. So an interface has a share of turns, and
/// a fast interface moves more data per turn. All interfaces have the same priority.
#[derive(Debug, Clone)]
pub struct VirtualInterface {
    interfaces: Vec<Interface>,
    estimates: Vec<Srtt>,
    /// Virtual time of each interface's next turn, and of the latest turn.
    tags: Vec<f64>,
    virtual_time: f64,
    adapter: bool,
}

impl VirtualInterface {
    /// Creates the scheduler. `interfaces` has, for each link of the scenario, the nominal rate (the initial value of equation 3) and the power
    /// while sending. The scheduler saves power when the scenario's battery is low, unless an `adapter` is plugged in.
    pub fn new(interfaces: &[(Rate, Power)], adapter: bool) -> Self {
        let interface = |&(bandwidth, power)| Interface { priority: 0, available: true, srtt: None, bandwidth, falls_per_hour: 0.0, power };
        Self {
            interfaces: interfaces.iter().map(interface).collect(),
            estimates: vec![Srtt::default(); interfaces.len()],
            tags: vec![0.0; interfaces.len()],
            virtual_time: 0.0,
            adapter,
        }
    }

    /// The link for a flow's next turn: the one whose turn is first in virtual time, as in the daemon's weighted round robin. Ties go to the
    /// link with the largest share.
    fn turn(&mut self, allowed: LinkSet, rest: ByteCount, battery: Option<f64>) -> Option<usize> {
        for (link, interface) in self.interfaces.iter_mut().enumerate() {
            interface.available = allowed.contains(link);
            interface.srtt = self.estimates[link].get();
        }
        let percent = battery.map(|level| (level * 100.0) as u8);
        let shares = match saves_power(percent, self.adapter) {
            true => power_saving_shares(&self.interfaces, rest, SEGMENT),
            false => shares(&self.interfaces),
        };
        let start = |link: usize| self.tags[link].max(self.virtual_time);
        let turns = shares.iter().enumerate().filter(|(_, share)| **share > 0.0).map(|(link, share)| (link, start(link), 1.0 / share));
        let (link, start, length) = turns.min_by(|a, b| a.1.total_cmp(&b.1).then(a.2.total_cmp(&b.2)))?;
        self.tags[link] = start + length;
        self.virtual_time = start;
        Some(link)
    }
}

impl Scheduler for VirtualInterface {
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize> {
        // A flow with a single allowed link takes no turn: it belongs to another station, not to the virtual interface.
        let mut slots = new.allowed.iter();
        match (slots.next(), slots.next()) {
            (Some(only), None) => Some(only),
            _ => self.turn(new.allowed, new.demand, view.battery),
        }
    }

    fn steers(&self) -> Option<Duration> {
        Some(SAMPLED)
    }

    fn round_trips(&mut self, by_link: &[Option<Duration>]) {
        for (estimate, sample) in self.estimates.iter_mut().zip(by_link) {
            if let Some(sample) = sample {
                estimate.sample(*sample);
            }
        }
    }

    fn steer(&mut self, view: &View<'_>, stream: &NewStream, current: usize) -> usize {
        self.connection(view, stream).unwrap_or(current)
    }
}
