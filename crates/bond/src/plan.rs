//! How an end of a bond distributes what it sends over the paths.

use braid_decide::policy::BondScheduler;
use braid_model::LinkSet;

/// How one end of a bond distributes what it sends over the paths: the rule, and the share of each link under [`BondScheduler::Weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingPlan {
    scheduler: BondScheduler,
    /// By link number, in parts of [`u16::MAX`].
    shares: [u16; LinkSet::CAPACITY],
}

impl Default for SchedulingPlan {
    fn default() -> Self {
        Self::new(BondScheduler::default())
    }
}

impl SchedulingPlan {
    /// Creates a plan without shares.
    pub const fn new(scheduler: BondScheduler) -> Self {
        Self { scheduler, shares: [0; LinkSet::CAPACITY] }
    }

    /// Creates a plan from OPERETTA's weights `w_j` (eq. 9): link numbers with shares from 0 to 1. Shares outside that range are clamped.
    pub fn weights(weights: impl IntoIterator<Item = (u8, f64)>) -> Self {
        let mut plan = Self::new(BondScheduler::Weights);
        for (link, weight) in weights {
            // `as` saturates, and converts NaN to zero.
            plan.set_share(link, (weight * f64::from(u16::MAX)).round() as u16);
        }
        plan
    }

    /// The rule.
    pub const fn scheduler(&self) -> BondScheduler {
        self.scheduler
    }

    /// Links with a share, by ascending number; shares are in parts of [`u16::MAX`].
    pub fn shares(&self) -> impl Iterator<Item = (u8, u16)> {
        self.shares.iter().enumerate().filter(|(_, share)| **share > 0).map(|(link, share)| (link as u8, *share))
    }

    /// Sets a link's share in parts of [`u16::MAX`]. Returns `false` if the link's number is out of range.
    pub(crate) fn set_share(&mut self, link: u8, share: u16) -> bool {
        self.shares.get_mut(usize::from(link)).map(|known| *known = share).is_some()
    }

    /// A link's share from 0 to 1.
    pub(crate) fn share(&self, link: u8) -> f64 {
        self.shares.get(usize::from(link)).map_or(0.0, |share| f64::from(*share) / f64::from(u16::MAX))
    }
}
