//! Frames of the model's hosts: UDP over IPv4 with a number in the payload, and broadcasts.

use braid_model::Mac;
use bytes::Bytes;

/// The address of all stations.
pub const BROADCAST: Mac = Mac([0xff; 6]);

/// A host's Ethernet address.
pub fn host(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 1, number])
}

/// A datagram with a number, to UDP port `port`. IP addresses follow from Ethernet addresses.
pub fn datagram(from: Mac, to: Mac, port: u16, number: u64) -> Bytes {
    let mut frame = [&to.0[..], &from.0, &0x0800u16.to_be_bytes()].concat();
    frame.extend([0x45, 0, 0, 36, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, from.0[4], from.0[5], 10, 0, to.0[4], to.0[5]]);
    frame.extend([0x10, 0]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 16, 0, 0]);
    frame.extend(number.to_be_bytes());
    frame.into()
}

/// An ARP announcement with a number behind it.
pub fn announcement(from: Mac, number: u64) -> Bytes {
    let mut frame = [&BROADCAST.0[..], &from.0, &0x0806u16.to_be_bytes()].concat();
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(from.0);
    frame.extend([10, 0, from.0[4], from.0[5]]);
    frame.extend([0; 6]);
    frame.extend([10, 0, from.0[4], from.0[5]]);
    frame.extend(number.to_be_bytes());
    frame.into()
}

/// The number at the end of a frame.
pub fn number(frame: &[u8]) -> u64 {
    frame.last_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// The destination of a frame. Panics if the frame has none.
pub fn destination(frame: &[u8]) -> Mac {
    Mac(*frame.first_chunk().expect("an address"))
}

/// The EtherType of a frame without VLAN tags. Panics if the frame is too short.
pub fn ethertype(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[12], frame[13]])
}
