//! The Internet checksum.

/// Internet checksum (RFC 1071) of up to 64 KiB.
pub fn checksum(packet: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = packet.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        // Section 3.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0x220d);
        assert_eq!(checksum(&[0x01]), 0xfeff, "a missing byte counts as zero");
    }
}
