//! Frames that any IPv4 or IPv6 host understands: questions for its hardware address, which show whether a radio reaches it, and news of this host's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{Mac, checksum};

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Types and options of ICMPv6 (RFC 4861, sections 4.3, 4.4 and 4.6.1).
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_ADDRESS: u8 = 1;
const TARGET_ADDRESS: u8 = 2;
/// Replaces what the host knows; and the sender is a router.
const OVERRIDE: u8 = 0x20;
const ROUTER: u8 = 0x80;

/// Asks the host `to`, whose address is `address`, for its hardware address. It answers over the radio that has `from`, and what it knows about the addresses of this
/// device does not change: an ARP probe (RFC 5227, section 1.1), or a neighbour solicitation from an address that only the radio has (RFC 4861, section 7.2.2).
pub fn question(to: Mac, from: Mac, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => arp_request(to, from, Ipv4Addr::UNSPECIFIED, address),
        IpAddr::V6(address) => discovery((to, from), [link_local(from), address], [SOLICITATION, 0, SOURCE_ADDRESS], address),
    }
}

/// Tells the host `to` that `address` of this device is at `from` now: an ARP announcement (RFC 5227, section 3) or an unsolicited neighbour advertisement
/// (RFC 4861, section 7.2.6). A host that does not know the address ignores it. `is_router`: whether this
/// host is an IPv6 router; a host removes its default route if that changes.
pub fn news(to: Mac, from: Mac, address: IpAddr, is_router: bool) -> Vec<u8> {
    let flags = OVERRIDE | if is_router { ROUTER } else { 0 };
    match address {
        IpAddr::V4(address) => arp_request(to, from, address, address),
        IpAddr::V6(address) => discovery((to, from), [address, ALL_NODES], [ADVERTISEMENT, flags, TARGET_ADDRESS], address),
    }
}

/// The link-local address of an Ethernet address (RFC 4291, appendix A).
pub fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

fn arp_request(to: Mac, from: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    // Ethernet, IPv4, lengths of addresses, request.
    let header = [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1];
    [&to.0[..], &from.0, &header, &from.0, &sender.octets(), &[0; 6], &target.octets()].concat()
}

/// A message of neighbour discovery about `target`, with `from` in its only option.
fn discovery((to, from): (Mac, Mac), [source, destination]: [Ipv6Addr; 2], [kind, flags, option]: [u8; 3], target: Ipv6Addr) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, flags, 0, 0, 0], &target.octets()[..], &[option, 1], &from.0].concat();
    let (length, next, hops) = (message.len() as u8, 58, 255);
    let addresses = [source.octets(), destination.octets()].concat();
    // The pseudo header (RFC 8200, section 8.1).
    let sum = checksum(&[&addresses, &[0, 0, 0, length, 0, 0, 0, next][..], &message].concat());
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    [&to.0[..], &from.0, &[0x86, 0xdd, 0x60, 0, 0, 0, 0, length, next, hops], &addresses, &message].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const FROM: Mac = Mac([2, 0, 0, 0, 0, 9]);

    #[test]
    fn an_arp_probe_names_no_sender_and_an_announcement_names_one() {
        let probe = question(TO, FROM, [10, 0, 0, 7].into());
        assert_eq!(probe[12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!((&probe[..6], &probe[22..28]), (&TO.0[..], &FROM.0[..]));
        assert_eq!((&probe[28..38], &probe[38..]), (&[0; 10][..], &[10, 0, 0, 7][..]));
        let announcement = news(TO, FROM, [10, 0, 0, 7].into(), true);
        assert_eq!((&announcement[28..32], &announcement[38..]), (&[10, 0, 0, 7][..], &[10, 0, 0, 7][..]));
        assert_eq!((probe.len(), announcement.len()), (42, 42));
    }

    #[test]
    fn discovery_has_the_checksum_and_the_addresses() {
        let target: Ipv6Addr = "fd00::7".parse().unwrap();
        for (frame, kind, option, source) in
            [(question(TO, FROM, target.into()), 135, 1, "fe80::ff:fe00:9"), (news(TO, FROM, target.into(), true), 136, 2, "fd00::7")]
        {
            assert_eq!(frame.len(), 86);
            let (ip, message) = frame[14..].split_at(40);
            assert_eq!(checksum(&[&ip[8..], &[0, 0, 0, 32, 0, 0, 0, 58], message].concat()), 0);
            assert_eq!((&ip[..8], ip[8..24] == source.parse::<Ipv6Addr>().unwrap().octets()), (&[0x60, 0, 0, 0, 0, 32, 58, 255][..], true));
            assert_eq!(
                (message[0], &message[8..24], &message[24..26], &message[26..]),
                (kind, &target.octets()[..], &[option, 1][..], &FROM.0[..])
            );
        }
    }
}
