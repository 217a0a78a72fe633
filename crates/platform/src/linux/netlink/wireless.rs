//! Names of the wireless networks that interfaces are associated with, over nl80211.
//!
//! Sources: `include/uapi/linux/nl80211.h` and `include/uapi/linux/genetlink.h`. Reading needs no privilege.

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlasIterator};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::talk::NetlinkSocket;

/// Message type of the controller, which numbers the families.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const NL80211_CMD_GET_INTERFACE: u8 = 5;
const NL80211_ATTR_SSID: u16 = 52;
/// Length of `struct genlmsghdr`.
const GENERIC_HEADER: usize = 4;
/// Maximum length of a network's name (IEEE 802.11).
const SSID_LIMIT: usize = 32;

/// The names of the networks that this network namespace's wireless interfaces are associated with, or that they offer as access points. Empty
/// if the kernel has no wireless devices.
///
/// # Errors
/// If the kernel cannot be asked, for example because a sandbox forbids netlink.
pub fn ssids() -> io::Result<BTreeSet<String>> {
    let mut kernel = NetlinkSocket::with(NETLINK_GENERIC)?;
    // The module is not loaded if there is no wireless device.
    let Some(family) = family(&mut kernel, "nl80211")? else { return Ok(BTreeSet::new()) };
    let mut found = BTreeSet::new();
    let request = [NL80211_CMD_GET_INTERFACE, 0, 0, 0];
    kernel.request(family, NLM_F_REQUEST | NLM_F_DUMP, &request, |body| found.extend(ssid_of(body)))?;
    Ok(found)
}

/// The number of a family of generic netlink; `None` if the kernel has none of this name.
pub(super) fn family(kernel: &mut NetlinkSocket, name: &str) -> io::Result<Option<u16>> {
    let mut family = None;
    let request = with_text(CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME, name);
    match kernel.request(GENL_ID_CTRL, NLM_F_REQUEST | NLM_F_ACK, &request, |body| family = family.or_else(|| family_of(body))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        answer => answer.map(|_| family),
    }
}

/// A generic netlink request with one attribute, a text.
fn with_text(command: u8, attribute: u16, text: &str) -> Vec<u8> {
    let mut request = vec![command, 1, 0, 0];
    let length = 4 + text.len() + 1;
    request.extend((length as u16).to_ne_bytes());
    request.extend(attribute.to_ne_bytes());
    request.extend(text.as_bytes());
    request.resize(GENERIC_HEADER + length.next_multiple_of(4), 0);
    request
}

fn family_of(body: &[u8]) -> Option<u16> {
    let value = attribute(body, CTRL_ATTR_FAMILY_ID)?;
    Some(u16::from_ne_bytes(value.get(..2)?.try_into().ok()?))
}

/// The network of one interface; `None` if it is not associated. Bytes that are not UTF-8 are replaced.
fn ssid_of(body: &[u8]) -> Option<String> {
    let name = attribute(body, NL80211_ATTR_SSID)?;
    (1..=SSID_LIMIT).contains(&name.len()).then(|| String::from_utf8_lossy(&name).into_owned())
}

fn attribute(body: &[u8], kind: u16) -> Option<Vec<u8>> {
    let attributes = NlasIterator::new(body.get(GENERIC_HEADER..)?);
    attributes.map_while(Result::ok).find(|attribute| attribute.kind() == kind).map(|attribute| attribute.value().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface as the kernel describes it: its index (3), its name (4), and other attributes.
    fn interface(name: &str, others: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![7, 1, 0, 0];
        let name = [name.as_bytes(), &[0]].concat();
        for (kind, value) in [(3, &7u32.to_ne_bytes()[..]), (4, &name)].iter().chain(others) {
            body.extend((4 + value.len() as u16).to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        body
    }

    #[test]
    fn the_network_of_an_associated_interface_is_read() {
        assert_eq!(ssid_of(&interface("wlan0", &[(52, b"home")])).as_deref(), Some("home"));
        assert_eq!(ssid_of(&interface("wlan0", &[(52, b"caf\xc3\xa9 5G"), (9, &[1])])).as_deref(), Some("café 5G"));
        assert_eq!(ssid_of(&interface("wlan0", &[])), None, "not associated");
        assert_eq!(ssid_of(&interface("wlan0", &[(52, b"")])), None, "a hidden network");
        assert_eq!(ssid_of(&interface("wlan0", &[(52, &[b'x'; 33])])), None);
        assert_eq!(ssid_of(&interface("wlan0", &[(52, b"a\xff")])).as_deref(), Some("a\u{fffd}"));
    }

    #[test]
    fn truncated_messages_are_ignored() {
        let whole = interface("wlan0", &[(52, b"home")]);
        (0..whole.len()).for_each(|length| drop(ssid_of(&whole[..length])));
        assert_eq!((family_of(&[]), family_of(&[1, 2, 0, 0, 5, 0, 1, 0, 9])), (None, None));
    }

    #[test]
    fn the_kernel_is_asked() {
        // A machine without wireless devices has none; one with them may be associated.
        assert!(ssids().unwrap().iter().all(|name| name.len() <= 3 * SSID_LIMIT));
    }

    #[test]
    fn a_request_is_padded() {
        let request = with_text(CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME, "nl80211");
        assert_eq!((request.len(), &request[4..8]), (16, &[12, 0, 2, 0][..]));
    }
}
