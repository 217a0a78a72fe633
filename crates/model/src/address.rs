//! Addresses in text form, as in configurations and invitations: HOST:PORT, where HOST is an IPv4 or IPv6 address or a name.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// A host and a non-zero port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Host part of the address.
    pub host: Host,
    port: u16,
}

/// A host, by address or by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// An IP address.
    Ip(IpAddr),
    /// A DNS name.
    Name(HostName),
}

/// A DNS name: at most 253 characters, in labels of 1 to 63 letters, digits, hyphens and underscores (RFC 1035, section 2.3.4). The last
/// label is not a number. Stored in lower case, without the trailing dot.
///
/// Text that the C library would parse as an IPv4 address in another notation (`127.1`, `0x7f000001`, `2130706433`) is rejected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

/// Reason why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The port is missing.
    #[error("{0:?} has no port; write HOST:PORT, or [ADDRESS]:PORT for IPv6")]
    NoPort(String),
    /// The port is not a number from 1 to 65535.
    #[error("{1:?} in {0:?} is not a port; ports are numbers from 1 to 65535")]
    Port(String, String),
    /// An IPv6 address without brackets.
    #[error("{0:?} is ambiguous; write an IPv6 address in brackets, as in [2001:db8::1]:5757")]
    Brackets(String),
    /// The host is neither an IP address nor a host name; the second value is the reason.
    #[error("{0:?} is neither an IP address nor a host name: {1}")]
    Host(String, &'static str),
}

impl Address {
    /// Combines a host and a port. Returns `None` for port 0.
    pub fn new(host: Host, port: u16) -> Option<Self> {
        (port != 0).then_some(Self { host, port })
    }

    /// The port, never 0.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl From<SocketAddr> for Address {
    /// Maps port 0, which is not a valid destination, to port 1, on which no service listens.
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Ip(address.ip()), port: address.port().max(1) }
    }
}

impl HostName {
    /// The name in lower case.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let refused = |reason| Err(AddressError::Host(text.chars().take(80).collect(), reason));
        let name = text.strip_suffix('.').unwrap_or(text);
        if name.is_empty() || name.len() > 253 {
            return refused("names have 1 to 253 characters");
        }
        if !name.is_ascii() {
            return refused("write names that have letters other than a to z in their DNS form (xn--...)");
        }
        for label in name.split('.') {
            if label.is_empty() || label.len() > 63 {
                return refused("each part between dots has 1 to 63 characters");
            }
            if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
                return refused("names consist of letters, digits, hyphens and dots");
            }
        }
        let last = name.rsplit('.').next().unwrap_or_default();
        let hexadecimal = last.get(..2).is_some_and(|start| start.eq_ignore_ascii_case("0x"));
        if last.bytes().all(|byte| byte.is_ascii_digit()) || hexadecimal {
            return refused("a name cannot end in a number; write IPv4 addresses as four decimal numbers");
        }
        Ok(Self(name.to_ascii_lowercase()))
    }
}

impl FromStr for Host {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.parse() {
            Ok(ip) => Ok(Self::Ip(ip)),
            Err(_) => text.parse().map(Self::Name),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let text = text.trim();
        let owned = || text.chars().take(300).collect::<String>();
        let (host, port) = text.rsplit_once(':').ok_or_else(|| AddressError::NoPort(owned()))?;
        let host = match host.strip_prefix('[') {
            Some(rest) => {
                let inner = rest.strip_suffix(']').ok_or_else(|| AddressError::NoPort(owned()))?;
                let ip: Ipv6Addr =
                    inner.parse().map_err(|_| AddressError::Host(inner.to_owned(), "only IPv6 addresses may be in brackets"))?;
                Host::Ip(ip.into())
            }
            None if host.contains(':') => return Err(AddressError::Brackets(owned())),
            None => host.parse()?,
        };
        let number = port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok()).flatten();
        number.and_then(|port| Self::new(host, port)).ok_or_else(|| AddressError::Port(owned(), port.to_owned()))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        text.parse::<Address>().unwrap_err().to_string()
    }

    #[test]
    fn addresses_and_names_round_trip_through_text() {
        for text in ["192.0.2.1:5757", "[2001:db8::1]:443", "relay.example.org:1", "under_score.example:65535", "localhost:80"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("Relay.Example.:1".parse::<Address>().unwrap().to_string(), "relay.example:1");
    }

    #[test]
    fn parse_errors_name_the_reason() {
        assert!(refusal("relay").contains("no port"));
        assert!(refusal("2001:db8::1:443").contains("brackets"));
        assert!(refusal("[2001:db8::1]").contains("no port") && refusal("[relay]:1").contains("brackets"));
        for port in ["0", "65536", "+5", "-1", "", "http"] {
            assert!(refusal(&format!("relay:{port}")).contains("1 to 65535"), "{port}");
        }
        assert!(refusal("bücher.example:1").contains("xn--"));
        assert!(refusal("a..b:1").contains("between dots"));
        assert!(refusal(":1").contains("1 to 253") && refusal(&format!("{}:1", "a.".repeat(200))).contains("1 to 253"));
        assert!(refusal("a b:1").contains("letters, digits"));
    }

    #[test]
    fn ipv4_addresses_in_other_notations_are_rejected_as_names() {
        for host in ["127.1", "2130706433", "0x7f000001", "0x7f.1", "1.2.3.4.5", "0177.0.0.1", "127.0.0.0X1", "256.1.1.1"] {
            assert!(refusal(&format!("{host}:80")).contains("number"), "{host}");
        }
    }
}
