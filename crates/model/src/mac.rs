//! Hardware addresses (EUI-48).

use std::fmt;
use std::str::FromStr;

/// A hardware address. Its text is six pairs of hexadecimal digits with colons, or with hyphens when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

/// A text that is no hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMac;

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = NoMac;

    fn from_str(text: &str) -> Result<Self, NoMac> {
        // The conversion alone would accept a sign.
        let is_pair = |part: &str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        let byte = |part: &str| is_pair(part).then(|| u8::from_str_radix(part, 16).ok())?;
        let bytes: Option<Vec<u8>> = text.split([':', '-']).map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or(NoMac)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_convert_back() {
        let mac = Mac([2, 0, 0x5e, 0x10, 0, 0xab]);
        assert_eq!(mac.to_string(), "02:00:5e:10:00:ab");
        assert_eq!(["02:00:5e:10:00:ab", "02-00-5E-10-00-AB"].map(str::parse), [Ok(mac); 2]);
        for wrong in ["", "02:00:5e:10:00", "02:00:5e:10:00:ab:cd", "2:0:5e:10:0:ab", "02:00:5e:10:00:zz", "+2:00:5e:10:00:ab"] {
            assert_eq!(wrong.parse::<Mac>(), Err(NoMac), "{wrong}");
        }
    }
}
