//! Functions with identical results on every machine. Logarithms and roots of the platform differ between machines; `+ - * /` do not.

use braid_netem::Random;

/// ln 2 in two parts. Integer multiples of the first, which has fewer bits, are exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// The natural logarithm of a positive, finite number, within 1e-14 (relative, or absolute near 1). Other arguments give NaN.
///
/// `x = m 2^e` with m between `sqrt(1/2)` and `sqrt(2)`, then `ln m = 2 atanh((m - 1) / (m + 1))` as a series of 13 terms.
pub fn ln(x: f64) -> f64 {
    if !(x.is_finite() && x > 0.0) {
        return f64::NAN;
    }
    // Scale subnormal numbers up first.
    let (x, lifted) = if x < f64::MIN_POSITIVE { (x * 18_014_398_509_481_984.0, 54.0) } else { (x, 0.0) };
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as f64 - 1023.0 - lifted;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for k in (0..13).rev() {
        sum = sum * square + 1.0 / f64::from(2 * k + 1);
    }
    exponent * LN_2_HIGH + (2.0 * s * sum + exponent * LN_2_LOW)
}

/// The cube root of a non-negative number, within 1e-14 (relative). Other arguments give zero.
///
/// Uses Newton's method, starting at a power of two near the root.
pub fn cbrt(x: f64) -> f64 {
    if !(x.is_finite() && x >= f64::MIN_POSITIVE) {
        return 0.0;
    }
    let exponent = (x.to_bits() >> 52) as i64 - 1023;
    let start = exponent.div_euclid(3) + 1;
    let mut root = f64::from_bits(((start + 1023) as u64) << 52);
    for _ in 0..7 {
        root = (2.0 * root + x / (root * root)) / 3.0;
    }
    root
}

/// A uniformly distributed number in (0, 1].
pub fn uniform(random: &mut Random) -> f64 {
    ((random.next() >> 11) + 1) as f64 / 9_007_199_254_740_992.0
}

/// An exponentially distributed number with mean `mean`.
pub fn exponential(random: &mut Random, mean: f64) -> f64 {
    -ln(uniform(random)) * mean
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn near(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() <= 1e-14 * wanted.abs().max(1.0)
    }

    proptest! {
        #[test]
        fn ln_agrees_with_the_platform(bits in 1u64..0x7ff0_0000_0000_0000) {
            let x = f64::from_bits(bits);
            prop_assert!(near(ln(x), x.ln()), "ln {x} = {} not {}", ln(x), x.ln());
        }

        #[test]
        fn ln_of_small_numbers_agrees_with_the_platform(x in 1e-12f64..4.0) {
            prop_assert!(near(ln(x), x.ln()), "ln {x} = {} not {}", ln(x), x.ln());
        }

        #[test]
        fn cbrt_agrees_with_the_platform(bits in 0x0010_0000_0000_0000u64..0x7ff0_0000_0000_0000) {
            let x = f64::from_bits(bits);
            prop_assert!((cbrt(x) / x.cbrt() - 1.0).abs() < 1e-14, "{x}: {} not {}", cbrt(x), x.cbrt());
        }
    }

    #[test]
    fn arguments_outside_the_domain_give_nan_or_zero() {
        assert!(ln(0.0).is_nan() && ln(-1.0).is_nan() && ln(f64::INFINITY).is_nan());
        assert_eq!((ln(1.0), cbrt(0.0), cbrt(-8.0)), (0.0, 0.0, 0.0));
    }

    #[test]
    fn exponential_draws_have_the_expected_mean_and_variance() {
        let mut random = Random::new(3);
        let drawn: Vec<f64> = (0..200_000).map(|_| exponential(&mut random, 5.0)).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let variance = drawn.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / drawn.len() as f64;
        assert!((mean - 5.0).abs() < 0.05, "{mean}");
        assert!((variance - 25.0).abs() < 0.7, "{variance}");
    }
}
