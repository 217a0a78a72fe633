//! Descriptions of packets in words, as operators write them.

use std::net::IpAddr;

use braid_model::Mac;
use braid_openflow::oxm::{Field, Oxm, VLAN_PRESENT};
use thiserror::Error;

use crate::space::Header;

/// Why a description is not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WordsError {
    /// No such condition.
    #[error(
        "there is no condition {0:?}: write vlan, mac, eth_src, eth_dst, eth_type, ip, ip_src, ip_dst, protocol, port, port_src or port_dst, each with = and a value"
    )]
    Unknown(String),
    /// A value has another form.
    #[error("{key} = {value:?} is not {wanted}")]
    Value {
        /// The condition.
        key: String,
        /// Its value.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// Conditions exclude each other.
    #[error("no packet can be like {0:?}: remove a condition")]
    Contradiction(String),
    /// A port without a protocol.
    #[error("ports need a protocol: add protocol=tcp, protocol=udp or protocol=sctp")]
    NoProtocol,
}

/// One way in which a condition can hold: all of these.
type Way = Vec<Oxm>;

/// The packets of a description, such as `vlan=10, protocol=tcp, port_dst=80`; of an empty one, all. `mac`, `ip` and `port` hold for senders and receivers, so
/// there may be several headers.
///
/// # Errors
/// A condition is unknown, its value has another form, or conditions exclude each other.
pub fn headers(text: &str) -> Result<Vec<Header>, WordsError> {
    let conditions: Vec<(&str, &str)> = text
        .split(',')
        .map(str::trim)
        .filter(|condition| !condition.is_empty())
        .map(|condition| condition.split_once('=').map(|(key, value)| (key.trim(), value.trim())).ok_or(condition))
        .collect::<Result<_, _>>()
        .map_err(|condition| WordsError::Unknown(condition.to_owned()))?;
    let protocol = conditions.iter().find(|(key, _)| *key == "protocol").map(|(_, value)| *value);
    let mut all = vec![Header::ANY];
    for (key, value) in conditions {
        let ways = ways(key, value, protocol)?;
        let both = |header: &Header| -> Vec<Header> { ways.iter().filter_map(|way| narrowed(header, way)).collect() };
        all = all.iter().flat_map(both).collect();
    }
    if all.is_empty() {
        return Err(WordsError::Contradiction(text.trim().to_owned()));
    }
    Ok(all)
}

fn narrowed(header: &Header, way: &Way) -> Option<Header> {
    let mut header = header.clone();
    let holds = |oxm: &Oxm| match oxm {
        Oxm::Basic { field, value, mask } => header.narrow(*field, *value, mask.unwrap_or(field.full_mask())),
        Oxm::Other { .. } => false,
    };
    way.iter().all(holds).then_some(header)
}

fn ways(key: &str, value: &str, protocol: Option<&str>) -> Result<Vec<Way>, WordsError> {
    let wrong = |wanted| WordsError::Value { key: key.to_owned(), value: value.to_owned(), wanted };
    let number = |most: u64, wanted| {
        let parsed = value.strip_prefix("0x").map_or_else(|| value.parse().ok(), |digits| u64::from_str_radix(digits, 16).ok());
        parsed.filter(|number| *number <= most).ok_or_else(|| wrong(wanted))
    };
    let mac = |field| match value.parse::<Mac>() {
        Ok(mac) => Ok(vec![Oxm::mac(field, mac)]),
        Err(_) => Err(wrong("an Ethernet address such as 02:00:5e:10:00:01")),
    };
    let port = |source: bool| -> Result<Way, WordsError> {
        let fields = match protocol {
            Some("tcp" | "6") => [Field::TcpSrc, Field::TcpDst],
            Some("udp" | "17") => [Field::UdpSrc, Field::UdpDst],
            Some("sctp" | "132") => [Field::SctpSrc, Field::SctpDst],
            _ => return Err(WordsError::NoProtocol),
        };
        let field = if source { fields[0] } else { fields[1] };
        Ok(vec![Oxm::exact(field, number(0xffff, "a port from 0 to 65535")? as u16)])
    };
    let network = |source: bool| address(value, source).ok_or_else(|| wrong("an IP address or a network such as 10.1.0.0/16"));
    // As headers are shown: any field by its name, bit by bit.
    if let (Some(field), true) = (Field::all().find(|field| field.name() == key), value.starts_with("0x")) {
        return bits(field, value)
            .map(|oxm| vec![vec![oxm]])
            .ok_or_else(|| wrong("a number, or a number and a mask, such as 0x800 or 0x1000/0x1000"));
    }
    match key {
        "vlan" => match value {
            "none" => Ok(vec![vec![Oxm::vlan(None)]]),
            "any" => Ok(vec![vec![Oxm::masked(Field::VlanVid, VLAN_PRESENT, VLAN_PRESENT)]]),
            _ => Ok(vec![vec![Oxm::vlan(Some(number(0xfff, "a VLAN from 0 to 4095, none or any")? as u16))]]),
        },
        "mac" => Ok(vec![mac(Field::EthSrc)?, mac(Field::EthDst)?]),
        "eth_src" => Ok(vec![mac(Field::EthSrc)?]),
        "eth_dst" => Ok(vec![mac(Field::EthDst)?]),
        "eth_type" => {
            let named = match value {
                "ip" => 0x0800,
                "ipv6" => 0x86dd,
                "arp" => 0x0806,
                _ => number(0xffff, "an EtherType such as 0x0800, or ip, ipv6 or arp")? as u16,
            };
            Ok(vec![vec![Oxm::exact(Field::EthType, named)]])
        }
        "ip" => Ok([network(true)?, network(false)?].concat()),
        "ip_src" => network(true),
        "ip_dst" => network(false),
        "protocol" => {
            let known = match value {
                "icmp" => return Ok(vec![of_ip(0x0800, 1)]),
                "icmpv6" => return Ok(vec![of_ip(0x86dd, 58)]),
                "tcp" => 6,
                "udp" => 17,
                "sctp" => 132,
                _ => number(0xff, "tcp, udp, sctp, icmp, icmpv6 or a number from 0 to 255")? as u8,
            };
            Ok(vec![of_ip(0x0800, known), of_ip(0x86dd, known)])
        }
        "port" => Ok(vec![port(true)?, port(false)?]),
        "port_src" => Ok(vec![port(true)?]),
        "port_dst" => Ok(vec![port(false)?]),
        _ => Err(WordsError::Unknown(key.to_owned())),
    }
}

/// A value in hexadecimal digits, and a mask.
fn bits(field: Field, text: &str) -> Option<Oxm> {
    let number = |text: &str| u128::from_str_radix(text.strip_prefix("0x")?, 16).ok().filter(|number| *number <= field.full_mask());
    match text.split_once('/') {
        Some((value, mask)) => Some(Oxm::masked(field, number(value)?, number(mask)?)),
        None => Some(Oxm::exact(field, number(text)?)),
    }
}

fn of_ip(ethertype: u16, protocol: u8) -> Way {
    vec![Oxm::exact(Field::EthType, ethertype), Oxm::exact(Field::IpProto, protocol)]
}

/// An address in IP packets and in what finds its owner (ARP).
fn address(text: &str, source: bool) -> Option<Vec<Way>> {
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address.parse::<IpAddr>().ok()?, Some(length.parse::<u8>().ok()?)),
        None => (text.parse::<IpAddr>().ok()?, None),
    };
    let fits = |most: u8| Some(length.unwrap_or(most)).filter(|length| *length <= most);
    match address {
        IpAddr::V4(address) => {
            let length = fits(32)?;
            let way = |ethertype: u16, field| {
                let bits = (length > 0).then(|| Oxm::ipv4(field, address, length));
                [Oxm::exact(Field::EthType, ethertype)].into_iter().chain(bits).collect()
            };
            let fields = if source { [Field::Ipv4Src, Field::ArpSpa] } else { [Field::Ipv4Dst, Field::ArpTpa] };
            Some(vec![way(0x0800, fields[0]), way(0x0806, fields[1])])
        }
        IpAddr::V6(address) => {
            let length = fits(128)?;
            let field = if source { Field::Ipv6Src } else { Field::Ipv6Dst };
            let bits = (length > 0).then(|| Oxm::ipv6(field, address, length));
            Some(vec![[Oxm::exact(Field::EthType, 0x86ddu16)].into_iter().chain(bits).collect()])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_understood() {
        let count = |text: &str| headers(text).map(|all| all.len());
        assert_eq!(count(""), Ok(1));
        assert_eq!(count("vlan=10"), Ok(1));
        assert_eq!(count("mac=02:00:5e:10:00:01"), Ok(2));
        // Source and destination, in IP and in ARP.
        assert_eq!(count("ip=10.1.0.0/16"), Ok(4));
        assert_eq!(count("ip = 10.1.0.0/16, protocol = tcp, port_dst = 80"), Ok(2));
        assert_eq!(count("protocol=icmp"), Ok(1));
        assert_eq!(count("ip=2001:db8::/32"), Ok(2));
        // A header that is shown is read again.
        for text in ["ip=10.1.0.0/16, protocol=tcp, port_dst=80", "vlan=any, mac=02:00:5e:10:00:01", "ip=2001:db8::/32", "vlan=none"] {
            for header in headers(text).unwrap() {
                assert_eq!(headers(&header.to_string()), Ok(vec![header]));
            }
        }
        let one = headers("ip_dst=10.1.2.3, protocol=tcp, port_dst=80, vlan=0x0a").unwrap();
        assert_eq!(one.len(), 1);
        assert_eq!((one[0].exact(Field::Ipv4Dst), one[0].exact(Field::VlanVid)), (Some(0x0a01_0203), Some(0x100a)));
    }

    #[test]
    fn wrong_descriptions_are_refused_with_the_reason() {
        for (text, reason) in [
            ("vlan", "no condition \"vlan\""),
            ("colour=red", "no condition \"colour\""),
            ("vlan=4096", "vlan = \"4096\" is not"),
            ("mac=1", "an Ethernet address"),
            ("ip=10.0.0.0/33", "an IP address"),
            ("port_dst=80", "need a protocol"),
            ("eth_type=arp, protocol=tcp", "no packet can be like"),
        ] {
            let error = headers(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
