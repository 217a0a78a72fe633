//! A small random number generator with the same sequence on every machine.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "the sequence is endless, so there is no Option")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `limit`, both inclusive.
    pub fn up_to(&mut self, limit: u64) -> u64 {
        let scaled = u128::from(self.next()) * (u128::from(limit) + 1);
        (scaled >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        // First outputs of the reference implementation for seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
        assert_eq!(random.next(), 9_817_491_932_198_370_423);
    }

    #[test]
    fn limits_are_reached_and_kept() {
        let mut random = Random::new(1);
        let drawn: Vec<u64> = (0..1000).map(|_| random.up_to(3)).collect();
        assert!(drawn.iter().all(|n| *n <= 3));
        assert!((0..=3).all(|n| drawn.iter().filter(|d| **d == n).count() > 200));
        assert_eq!(random.up_to(0), 0);
        random.up_to(u64::MAX);
    }
}
