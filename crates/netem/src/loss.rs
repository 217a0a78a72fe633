//! Which packets get lost on the way.

use crate::random::Random;

/// A probability, held as a fraction of 2^64 so that drawing needs no floating point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Probability(u64);

impl Probability {
    /// It never happens.
    pub const NEVER: Self = Self(0);
    /// It always happens.
    pub const ALWAYS: Self = Self(u64::MAX);

    /// The probability `p`; values outside 0 to 1 and NaN are moved to the nearest end (NaN to 0).
    pub fn new(p: f64) -> Self {
        if p >= 1.0 {
            return Self::ALWAYS;
        }
        // `as` turns NaN and negatives to zero; the product of a double and a power of two is exact.
        Self((p * 18_446_744_073_709_551_616.0) as u64)
    }

    /// As a number from 0 to 1.
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

/// How packets get lost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Loss {
    /// None is.
    #[default]
    None,
    /// Each packet for itself with the same probability.
    Random(Probability),
    /// In bursts (Gilbert 1960, Elliott 1963): a state changes between good and bad from packet to packet.
    Bursty {
        /// From good to bad, before each packet.
        enter: Probability,
        /// From bad to good, before each packet; its inverse is the mean length of a burst in packets.
        leave: Probability,
        /// Loss in the good state (Gilbert: never).
        good: Probability,
        /// Loss in the bad state (Gilbert: 1 - h).
        bad: Probability,
    },
}

impl Loss {
    /// Random loss of each packet with probability `p`.
    pub fn random(p: f64) -> Self {
        if p > 0.0 { Self::Random(Probability::new(p)) } else { Self::None }
    }

    /// Bursts that lose everything: `mean` of all packets in the long run, `length` packets a burst on average.
    pub fn bursts(mean: f64, length: f64) -> Self {
        let leave = 1.0 / length.max(1.0);
        let enter = leave * mean / (1.0 - mean).max(f64::EPSILON);
        Self::Bursty { enter: Probability::new(enter), leave: Probability::new(leave), good: Probability::NEVER, bad: Probability::ALWAYS }
    }
}

/// A [`Loss`] and the state of its bursts.
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
    fn probabilities_are_held_and_clamped() {
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
    fn no_loss_loses_nothing_and_certain_loss_everything() {
        assert_eq!(share(&outcomes(Loss::random(0.0), 1000)), 0.0);
        assert_eq!(share(&outcomes(Loss::random(1.0), 1000)), 1.0);
    }
}
