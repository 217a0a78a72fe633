//! Packet loss models.

use crate::random::Random;

/// A probability, stored as a fraction of 2^64, so that sampling needs no floating point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Probability(u64);

impl Probability {
    /// The probability 0.
    pub const NEVER: Self = Self(0);
    /// The probability 1.
    pub const ALWAYS: Self = Self(u64::MAX);

    /// The probability `p`, clamped to 0 to 1; NaN counts as 0.
    pub fn new(p: f64) -> Self {
        if p >= 1.0 {
            return Self::ALWAYS;
        }
        // `as` converts NaN and negative values to zero. The product of a double and a power of two is exact.
        Self((p * 18_446_744_073_709_551_616.0) as u64)
    }

    /// The probability as a number from 0 to 1.
    pub fn get(self) -> f64 {
        if self == Self::ALWAYS { 1.0 } else { self.0 as f64 / 18_446_744_073_709_551_616.0 }
    }

    fn happens(self, random: &mut Random) -> bool {
        match self {
            Self::NEVER => false,
            Self::ALWAYS => true,
            Self(threshold) => random.next() < threshold,
        }
    }
}

/// A packet loss model.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Loss {
    /// No loss.
    #[default]
    None,
    /// Independent loss of each packet with the same probability.
    Random(Probability),
    /// Loss in bursts (Gilbert 1960, Elliott 1963): a state changes between good and bad from packet to packet.
    Bursty {
        /// Probability to change from good to bad, before each packet.
        enter: Probability,
        /// Probability to change from bad to good, before each packet; its inverse is the mean length of a burst in packets.
        leave: Probability,
        /// Loss in the good state (Gilbert: never).
        good: Probability,
        /// Loss in the bad state (Gilbert: 1 - h).
        bad: Probability,
    },
}

impl Loss {
    /// Independent loss of each packet with probability `p`.
    pub fn random(p: f64) -> Self {
        if p > 0.0 { Self::Random(Probability::new(p)) } else { Self::None }
    }

    /// Bursts that lose every packet: a share of `mean` of all packets in the long run, in bursts of `length` packets on average.
    pub fn bursts(mean: f64, length: f64) -> Self {
        let leave = 1.0 / length.max(1.0);
        let enter = leave * mean / (1.0 - mean).max(f64::EPSILON);
        Self::Bursty { enter: Probability::new(enter), leave: Probability::new(leave), good: Probability::NEVER, bad: Probability::ALWAYS }
    }
}

/// A [`Loss`] model and its burst state.
#[derive(Debug, Clone)]
pub(crate) struct LossProcess {
    pub(crate) loss: Loss,
    bad: bool,
}

impl LossProcess {
    pub(crate) fn new(loss: Loss) -> Self {
        Self { loss, bad: false }
    }

    /// Whether the next packet is lost.
    pub(crate) fn next(&mut self, random: &mut Random) -> bool {
        match self.loss {
            Loss::None => false,
            Loss::Random(p) => p.happens(random),
            Loss::Bursty { enter, leave, good, bad } => {
                let turn = if self.bad { leave } else { enter };
                self.bad ^= turn.happens(random);
                if self.bad { bad.happens(random) } else { good.happens(random) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(loss: Loss, count: usize) -> Vec<bool> {
        let mut random = Random::new(7);
        let mut process = LossProcess::new(loss);
        (0..count).map(|_| process.next(&mut random)).collect()
    }

    fn share(lost: &[bool]) -> f64 {
        lost.iter().filter(|l| **l).count() as f64 / lost.len() as f64
    }

    #[test]
    fn probabilities_are_stored_and_clamped() {
        assert_eq!(Probability::new(-1.0), Probability::NEVER);
        assert_eq!(Probability::new(f64::NAN), Probability::NEVER);
        assert_eq!(Probability::new(2.0), Probability::ALWAYS);
        assert_eq!(Probability::new(0.25).get(), 0.25);
    }

    #[test]
    fn random_loss_has_its_mean_and_no_memory() {
        let lost = outcomes(Loss::random(0.03), 200_000);
        assert!((share(&lost) - 0.03).abs() < 0.002, "{}", share(&lost));
        let after: Vec<bool> = lost.windows(2).filter(|w| w[0]).map(|w| w[1]).collect();
        assert!((share(&after) - 0.03).abs() < 0.01, "{}", share(&after));
    }

    #[test]
    fn bursts_have_their_mean_and_length() {
        let lost = outcomes(Loss::bursts(0.05, 8.0), 400_000);
        assert!((share(&lost) - 0.05).abs() < 0.005, "{}", share(&lost));
        let bursts = lost.windows(2).filter(|w| !w[0] && w[1]).count();
        let length = lost.iter().filter(|l| **l).count() as f64 / bursts as f64;
        assert!((length - 8.0).abs() < 0.5, "{length}");
    }

    #[test]
    fn zero_loss_loses_nothing_and_certain_loss_everything() {
        assert_eq!(share(&outcomes(Loss::random(0.0), 1000)), 0.0);
        assert_eq!(share(&outcomes(Loss::random(1.0), 1000)), 1.0);
    }
}
