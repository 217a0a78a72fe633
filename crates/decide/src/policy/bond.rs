//! How bonds spread what their flows send over their paths.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::InvalidText;
use super::apps::COPIES;

/// The rule by which a bond chooses the path of the next piece of a flow. Urgent flows keep to earliest completion under every rule.
///
/// The rules are in [`packet`](crate::packet), except miDRR ([`midrr`](crate::midrr)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BondScheduler {
    /// Whichever path has room takes the piece of the flow whose turn it is by miDRR, unless the piece would arrive sooner over another.
    #[default]
    Midrr,
    /// One path after the other (DBAS II.D).
    RoundRobin,
    /// Bytes in proportion to the paths' rates (DBAS II.D).
    WeightedRoundRobin,
    /// Bytes in inverse proportion to the paths' round-trip times, within each flow (virtual interface 3.2.3, eq. 2).
    RttShare,
    /// The path on which the piece arrives first; it waits for a better path if that is sooner (ECF, CoNEXT 2017).
    EarliestCompletion,
    /// The path with the shortest round trip that has room.
    MinRtt,
    /// Copies of each piece on so many paths.
    Redundant(u8),
    /// Bytes by given shares: OPERETTA's `w_j` (eq. 9).
    Weights,
}

impl BondScheduler {
    /// Every rule, [`Self::Redundant`] with the usual number of copies.
    pub const ALL: [Self; 8] = [
        Self::Midrr,
        Self::RoundRobin,
        Self::WeightedRoundRobin,
        Self::RttShare,
        Self::EarliestCompletion,
        Self::MinRtt,
        Self::Redundant(COPIES),
        Self::Weights,
    ];

    /// The name in configuration and API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Midrr => "midrr",
            Self::RoundRobin => "round-robin",
            Self::WeightedRoundRobin => "weighted-round-robin",
            Self::RttShare => "rtt-share",
            Self::EarliestCompletion => "earliest-completion",
            Self::MinRtt => "min-rtt",
            Self::Redundant(_) => "redundant",
            Self::Weights => "weights",
        }
    }

    /// What the rule does with the bytes of flows that are not urgent, as a clause.
    pub fn explanation(self) -> String {
        match self {
            Self::Midrr => "any link with room takes the next piece unless it would arrive sooner over another".to_owned(),
            Self::RoundRobin => "links take turns, piece by piece".to_owned(),
            Self::WeightedRoundRobin => "links carry bytes in proportion to their rate".to_owned(),
            Self::RttShare => "each link carries bytes of each flow in inverse proportion to its round-trip time".to_owned(),
            Self::EarliestCompletion => "the link on which it arrives first takes the next piece".to_owned(),
            Self::MinRtt => "the link with the shortest round trip that has room takes the next piece".to_owned(),
            Self::Redundant(copies) => format!("each piece goes over {copies} links, as far as they have room"),
            Self::Weights => "links carry bytes by the weights of OPERETTA's optimum".to_owned(),
        }
    }
}

impl fmt::Display for BondScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BondScheduler {
    type Err = InvalidText;
    fn from_str(text: &str) -> Result<Self, InvalidText> {
        let wanted = "a scheduler of bonds: write midrr, round-robin, weighted-round-robin, rtt-share, earliest-completion, min-rtt, \
                      redundant or weights";
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| InvalidText { text: text.to_owned(), wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bond_schedulers_are_read_as_they_are_written() {
        for scheduler in BondScheduler::ALL {
            assert_eq!(scheduler.to_string().parse(), Ok(scheduler));
        }
        assert!("fastest".parse::<BondScheduler>().unwrap_err().to_string().contains("min-rtt"));
    }
}
