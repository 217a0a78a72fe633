//! MACsec devices (IEEE 802.1AE): makes them, and sets who sends and who is received over them.
//!
//! Sources: `include/uapi/linux/if_macsec.h`, `if_link.h` and `genetlink.h`; `drivers/net/macsec.c`. Extended packet numbers need Linux 5.7.

use std::io;

use braid_control::adhoc::group::SenderKey;
use braid_model::LinkIndex;
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NlasIterator};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::talk::NetlinkSocket;
use super::wireless::family;

const NESTED: u16 = 1 << 15;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;

const IFLA_MACSEC_SCI: u16 = 1;
const IFLA_MACSEC_CIPHER_SUITE: u16 = 4;
const IFLA_MACSEC_WINDOW: u16 = 5;
const IFLA_MACSEC_ENCRYPT: u16 = 7;
const IFLA_MACSEC_PROTECT: u16 = 8;
const IFLA_MACSEC_INC_SCI: u16 = 9;
const IFLA_MACSEC_REPLAY_PROTECT: u16 = 12;
const IFLA_MACSEC_VALIDATION: u16 = 13;
const MACSEC_VALIDATE_STRICT: u8 = 2;
const MACSEC_CIPHER_ID_GCM_AES_XPN_256: u64 = 0x0080_c200_0100_0004;
/// Frames that arrive later than this number of others are dropped as repetitions. Access points keep broadcasts for up to some 300 ms, and meanwhile pass others.
const WINDOW: u32 = 2048;

const MACSEC_CMD_ADD_RXSC: u8 = 1;
const MACSEC_CMD_DEL_RXSC: u8 = 2;
const MACSEC_CMD_ADD_TXSA: u8 = 4;
const MACSEC_CMD_ADD_RXSA: u8 = 7;
const MACSEC_ATTR_IFINDEX: u16 = 1;
const MACSEC_ATTR_RXSC_CONFIG: u16 = 2;
const MACSEC_ATTR_SA_CONFIG: u16 = 3;
const MACSEC_RXSC_ATTR_SCI: u16 = 1;
const MACSEC_RXSC_ATTR_ACTIVE: u16 = 2;
const MACSEC_SA_ATTR_AN: u16 = 1;
const MACSEC_SA_ATTR_ACTIVE: u16 = 2;
const MACSEC_SA_ATTR_PN: u16 = 3;
const MACSEC_SA_ATTR_KEY: u16 = 4;
const MACSEC_SA_ATTR_KEYID: u16 = 5;
const MACSEC_SA_ATTR_SSCI: u16 = 8;
const MACSEC_SA_ATTR_SALT: u16 = 9;

const RTM_GETSTATS: u16 = 94;
const IFLA_STATS_LINK_64: u16 = 1;
/// Length of `struct if_stats_msg`, and the place of `tx_packets` in `struct rtnl_link_stats64`.
const STATS_HEADER: usize = 12;
const SENT_PACKETS: usize = 8;

/// Name of a sender, as it is in its frames: an address and a number.
pub(crate) type Channel = [u8; 8];

/// Whether the kernel has MACsec. Loads its module if the system allows this.
///
/// # Errors
/// The kernel cannot be asked.
pub(crate) fn is_there() -> io::Result<bool> {
    family(&mut NetlinkSocket::with(NETLINK_GENERIC)?, "macsec").map(|family| family.is_some())
}

/// Makes a device that encrypts what leaves over `below`, as `own`, and lets only what is encrypted arrive. It is off, and lets nothing pass until
/// [`set_sender`] and [`add_receiver`] set keys.
///
/// # Errors
/// Errors of the kernel: `EOPNOTSUPP` without MACsec, `EINVAL` before Linux 5.7, `EEXIST` if the name is taken.
pub(crate) fn make(name: &str, below: LinkIndex, own: Channel) -> io::Result<()> {
    let device = [
        attribute(IFLA_MACSEC_SCI, &own),
        attribute(IFLA_MACSEC_CIPHER_SUITE, &MACSEC_CIPHER_ID_GCM_AES_XPN_256.to_ne_bytes()),
        attribute(IFLA_MACSEC_WINDOW, &WINDOW.to_ne_bytes()),
        attribute(IFLA_MACSEC_ENCRYPT, &[1]),
        attribute(IFLA_MACSEC_PROTECT, &[1]),
        attribute(IFLA_MACSEC_INC_SCI, &[1]),
        attribute(IFLA_MACSEC_REPLAY_PROTECT, &[1]),
        attribute(IFLA_MACSEC_VALIDATION, &[MACSEC_VALIDATE_STRICT]),
    ]
    .concat();
    let info = [attribute(IFLA_INFO_KIND, b"macsec"), attribute(IFLA_INFO_DATA | NESTED, &device)].concat();
    let body = [
        interface(LinkIndex(0)),
        attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat()),
        attribute(IFLA_LINK, &below.0.to_ne_bytes()),
        attribute(IFLA_LINKINFO | NESTED, &info),
    ]
    .concat();
    change(libc::RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &body)
}

/// Keeps the system from giving a device an IPv6 address, and from sending anything over it for one. Does nothing if the system has no IPv6.
///
/// # Errors
/// Errors of the kernel.
pub(crate) fn want_no_addresses(device: LinkIndex) -> io::Result<()> {
    let mode = attribute(IFLA_INET6_ADDR_GEN_MODE, &[IN6_ADDR_GEN_MODE_NONE]);
    let family = attribute(libc::AF_INET6 as u16 | NESTED, &mode);
    let body = [interface(device), attribute(IFLA_AF_SPEC | NESTED, &family)].concat();
    match change(libc::RTM_SETLINK, 0, &body) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) => Ok(()),
        done => done,
    }
}

/// Sets the key with which a device encrypts. Packet numbers begin at 1, so no key may be set twice.
///
/// # Errors
/// Errors of the kernel: `ENOENT` without AES in Galois counter mode.
pub(crate) fn set_sender(device: LinkIndex, key: &SenderKey) -> io::Result<()> {
    command(MACSEC_CMD_ADD_TXSA, device, &association(key, 1))
}

/// Lets arrive what a sender encrypts, from the packet with this number on. Replaces the sender with the same name.
///
/// # Errors
/// As [`set_sender`].
pub(crate) fn add_receiver(device: LinkIndex, sender: Channel, key: &SenderKey, packet: u64) -> io::Result<()> {
    remove_receiver(device, sender)?;
    let name = attribute(MACSEC_RXSC_ATTR_SCI, &sender);
    let active = [name.clone(), attribute(MACSEC_RXSC_ATTR_ACTIVE, &[1])].concat();
    command(MACSEC_CMD_ADD_RXSC, device, &attribute(MACSEC_ATTR_RXSC_CONFIG | NESTED, &active))?;
    command(MACSEC_CMD_ADD_RXSA, device, &[attribute(MACSEC_ATTR_RXSC_CONFIG | NESTED, &name), association(key, packet)].concat())
}

/// Lets nothing arrive any more that a sender encrypts. Does nothing if that was so.
///
/// # Errors
/// Errors of the kernel.
pub(crate) fn remove_receiver(device: LinkIndex, sender: Channel) -> io::Result<()> {
    let name = attribute(MACSEC_RXSC_ATTR_SCI, &sender);
    match command(MACSEC_CMD_DEL_RXSC, device, &attribute(MACSEC_ATTR_RXSC_CONFIG | NESTED, &name)) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        done => done,
    }
}

/// Number of packets that a device has sent.
///
/// # Errors
/// Errors of the kernel.
pub(crate) fn sent_packets(device: LinkIndex) -> io::Result<u64> {
    let filter = 1u32 << (IFLA_STATS_LINK_64 - 1);
    let request = [&[0; 4][..], &device.0.to_ne_bytes(), &filter.to_ne_bytes()].concat();
    let mut found = None;
    NetlinkSocket::open()?.request(RTM_GETSTATS, NLM_F_REQUEST | NLM_F_ACK, &request, |body| found = sent_of(body))?;
    found.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn sent_of(body: &[u8]) -> Option<u64> {
    let mut attributes = NlasIterator::new(body.get(STATS_HEADER..)?).map_while(Result::ok);
    let counters = attributes.find(|attribute| attribute.kind() == IFLA_STATS_LINK_64)?;
    Some(u64::from_ne_bytes(counters.value().get(SENT_PACKETS..SENT_PACKETS + 8)?.try_into().ok()?))
}

/// `struct ifinfomsg`.
fn interface(device: LinkIndex) -> Vec<u8> {
    [&[0; 4][..], &device.0.to_ne_bytes(), &[0; 8]].concat()
}

/// The attributes of a key, which is the only one of its sender.
fn association(key: &SenderKey, packet: u64) -> Vec<u8> {
    // The kernel refuses a number whose lower half is zero.
    let packet = if packet as u32 == 0 { packet.saturating_sub(1).max(1) } else { packet };
    let parts = [
        attribute(MACSEC_SA_ATTR_AN, &[0]),
        attribute(MACSEC_SA_ATTR_ACTIVE, &[1]),
        attribute(MACSEC_SA_ATTR_PN, &packet.to_ne_bytes()),
        attribute(MACSEC_SA_ATTR_KEY, &key.key),
        // A name for users of several keys.
        attribute(MACSEC_SA_ATTR_KEYID, &[0; 16]),
        // Each key has one sender, so their numbers need not differ.
        attribute(MACSEC_SA_ATTR_SSCI, &1u32.to_be_bytes()),
        attribute(MACSEC_SA_ATTR_SALT, &key.salt),
    ];
    attribute(MACSEC_ATTR_SA_CONFIG | NESTED, &parts.concat())
}

fn command(command: u8, device: LinkIndex, attributes: &[u8]) -> io::Result<()> {
    let mut kernel = NetlinkSocket::with(NETLINK_GENERIC)?;
    let family = family(&mut kernel, "macsec")?.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?;
    let body = [&[command, 1, 0, 0][..], &attribute(MACSEC_ATTR_IFINDEX, &device.0.to_ne_bytes())[..], attributes].concat();
    kernel.request(family, NLM_F_REQUEST | NLM_F_ACK, &body, |_| {}).map(drop)
}

fn change(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    NetlinkSocket::open()?.request(kind, NLM_F_REQUEST | NLM_F_ACK | flags, body, |_| {}).map(drop)
}

/// An attribute, padded.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((4 + value.len()).next_multiple_of(4));
    bytes.extend((4 + value.len() as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_attributes_that_extended_packet_numbers_need() {
        let key = SenderKey { key: [7; 32], salt: [8; 12] };
        let config = association(&key, 1 << 33);
        let outer = NlasIterator::new(&config[..]).next().unwrap().unwrap();
        assert_eq!((outer.kind(), outer.value_length()), (MACSEC_ATTR_SA_CONFIG, config.len() - 4));
        let parts: Vec<(u16, Vec<u8>)> =
            NlasIterator::new(outer.value()).flatten().map(|part| (part.kind(), part.value().to_vec())).collect();
        let value = |kind: u16| parts.iter().find(|(found, _)| *found == kind).map(|(_, value)| value.clone());
        assert_eq!(value(MACSEC_SA_ATTR_PN), Some(((1u64 << 33) - 1).to_ne_bytes().to_vec()), "its lower half is not zero");
        assert_eq!((value(MACSEC_SA_ATTR_KEY), value(MACSEC_SA_ATTR_SALT)), (Some(vec![7; 32]), Some(vec![8; 12])));
        assert_eq!((value(MACSEC_SA_ATTR_KEYID).map(|id| id.len()), value(MACSEC_SA_ATTR_AN)), (Some(16), Some(vec![0])));
    }

    #[test]
    fn the_packets_of_the_loopback_device_are_counted() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let before = sent_packets(LinkIndex(1)).unwrap();
        for _ in 0..3 {
            socket.send_to(&[0], socket.local_addr().unwrap()).unwrap();
        }
        assert!(sent_packets(LinkIndex(1)).unwrap() >= before + 3);
        assert_eq!(sent_packets(LinkIndex(u32::MAX >> 1)).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert_eq!(sent_of(&[0; 20]), None);
    }

    #[test]
    fn the_kernel_says_whether_it_has_macsec() {
        // Either answer is right; without the kernel's families there is none.
        is_there().unwrap();
    }
}
