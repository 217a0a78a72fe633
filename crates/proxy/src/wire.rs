//! SOCKS5 messages (RFC 1928, RFC 1929). Parsers take the bytes received so far and return the length of the message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use braid_model::address::{Address, Host};

pub(crate) const VERSION: u8 = 5;
/// Method: no authentication.
pub(crate) const NO_PASSWORD: u8 = 0;
/// Method: name and password.
pub(crate) const PASSWORD: u8 = 2;
pub(crate) const NO_METHOD: u8 = 0xff;
const PASSWORD_VERSION: u8 = 1;
/// Maximum length of a message before a connection is open: 4 bytes, a name of 255, a port.
pub(crate) const MAX_MESSAGE: usize = 513;

/// Command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Connect,
    Associate,
    /// BIND, or an unknown command.
    Other(u8),
}

/// Reply code (RFC 1928, section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reply {
    Succeeded = 0,
    Failure = 1,
    NotAllowed = 2,
    NetworkUnreachable = 3,
    HostUnreachable = 4,
    Refused = 5,
    TimedOut = 6,
    NoCommand = 7,
    NoAddress = 8,
}

/// Reason why the bytes are not a message; the connection is closed, in some cases after a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Another protocol, or another version.
    Version,
    /// An unknown address type, or an invalid address.
    Address,
}

/// A message and its length, or `None` if more bytes are needed.
pub(crate) type Parsed<T> = Result<Option<(T, usize)>, Malformed>;

/// Parses the methods that a client offers.
pub(crate) fn methods(bytes: &[u8]) -> Parsed<&[u8]> {
    let [version, count, rest @ ..] = bytes else { return version_only(bytes, VERSION) };
    if *version != VERSION {
        return Err(Malformed::Version);
    }
    let count = usize::from(*count);
    Ok(rest.get(..count).map(|methods| (methods, 2 + count)))
}

/// Parses a name and a password.
pub(crate) fn password(bytes: &[u8]) -> Parsed<(&[u8], &[u8])> {
    let [version, name_length, rest @ ..] = bytes else { return version_only(bytes, PASSWORD_VERSION) };
    if *version != PASSWORD_VERSION {
        return Err(Malformed::Version);
    }
    let name_length = usize::from(*name_length);
    let Some((name, [length, rest @ ..])) = rest.split_at_checked(name_length) else { return Ok(None) };
    let length = usize::from(*length);
    Ok(rest.get(..length).map(|password| ((name, password), 3 + name_length + length)))
}

/// The reply to a password.
pub(crate) fn password_answer(right: bool) -> [u8; 2] {
    [PASSWORD_VERSION, u8::from(!right)]
}

/// Parses a request. Port 0 and an invalid name yield `None`: an association may announce such an address.
pub(crate) fn request(bytes: &[u8]) -> Parsed<(Command, Option<Address>)> {
    let [version, command, _, rest @ ..] = bytes else { return version_only(bytes, VERSION) };
    if *version != VERSION {
        return Err(Malformed::Version);
    }
    let command = match command {
        1 => Command::Connect,
        3 => Command::Associate,
        other => Command::Other(*other),
    };
    Ok(address(rest)?.map(|(address, length)| ((command, address), 3 + length)))
}

/// The reply to a request.
pub(crate) fn reply(reply: Reply, bound: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![VERSION, reply as u8, 0];
    push_address(&mut bytes, bound);
    bytes
}

/// Parses a datagram from a client: its target, and the offset of its payload. `None`: incomplete, a fragment, or without a valid target.
pub(crate) fn datagram(bytes: &[u8]) -> Option<(Address, usize)> {
    let [_, _, 0, rest @ ..] = bytes else { return None };
    let (address, length) = address(rest).ok()??;
    Some((address?, 3 + length))
}

/// The header of a datagram to a client.
pub(crate) fn datagram_head(from: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![0; 3];
    push_address(&mut bytes, from);
    bytes
}

fn address(bytes: &[u8]) -> Parsed<Option<Address>> {
    let [kind, rest @ ..] = bytes else { return Ok(None) };
    let (host, length) = match kind {
        1 => (rest.first_chunk().map(|ip: &[u8; 4]| Some(Host::Ip(IpAddr::V4(Ipv4Addr::from(*ip))))), 4),
        4 => (rest.first_chunk().map(|ip: &[u8; 16]| Some(Host::Ip(IpAddr::V6(Ipv6Addr::from(*ip))))), 16),
        3 => {
            let Some(length) = rest.first().map(|length| usize::from(*length)) else { return Ok(None) };
            (rest.get(1..=length).map(name), 1 + length)
        }
        _ => return Err(Malformed::Address),
    };
    let Some((host, port)) = host.zip(rest.get(length..).and_then(|rest| rest.first_chunk())) else { return Ok(None) };
    let address = host.and_then(|host| Address::new(host, u16::from_be_bytes(*port)));
    Ok(Some((address, 1 + length + 2)))
}

/// Parses a name, or an IP address in text form, which some clients send as a name.
fn name(bytes: &[u8]) -> Option<Host> {
    let text = std::str::from_utf8(bytes).ok()?;
    if let Ok(ip) = text.parse() {
        return Some(Host::Ip(ip));
    }
    text.parse().ok().map(Host::Name)
}

fn push_address(bytes: &mut Vec<u8>, address: SocketAddr) {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            bytes.push(1);
            bytes.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes.push(4);
            bytes.extend(ip.octets());
        }
    }
    bytes.extend(address.port().to_be_bytes());
}

/// Rejects a wrong version as soon as its byte arrives.
fn version_only<T>(bytes: &[u8], version: u8) -> Parsed<T> {
    if bytes.first().is_some_and(|first| *first != version) { Err(Malformed::Version) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn incomplete_messages_yield_nothing() {
        let hello = [5, 2, 0, 2];
        let secret = [1, 3, b'a', b'n', b'n', 2, b'p', b'w'];
        let connect = b"\x05\x01\x00\x03\x0bexample.org\x01\xbb";
        for cut in 0..hello.len() {
            assert_eq!(methods(&hello[..cut]), Ok(None));
        }
        for cut in 0..secret.len() {
            assert_eq!(password(&secret[..cut]), Ok(None));
        }
        for cut in 0..connect.len() {
            assert_eq!(request(&connect[..cut]), Ok(None), "{cut}");
        }
        assert_eq!(methods(&hello), Ok(Some((&[0, 2][..], 4))));
        assert_eq!(password(&secret), Ok(Some(((&b"ann"[..], &b"pw"[..]), 8))));
        let target: Address = "example.org:443".parse().unwrap();
        assert_eq!(request(connect), Ok(Some(((Command::Connect, Some(target)), connect.len()))));
    }

    #[test]
    fn malformed_requests_are_rejected() {
        assert_eq!(methods(&[4]), Err(Malformed::Version));
        assert_eq!(password(&[5]), Err(Malformed::Version));
        assert_eq!(request(&[5, 1, 0, 9, 0, 0, 0, 0]), Err(Malformed::Address));
        // A bad name and port 0 are no target, but the message is complete.
        assert_eq!(request(b"\x05\x01\x00\x03\x03a b\x00\x50"), Ok(Some(((Command::Connect, None), 10))));
        assert_eq!(request(b"\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00"), Ok(Some(((Command::Associate, None), 10))));
        assert!(matches!(request(b"\x05\x02\x00\x01\x7f\x00\x00\x01\x00\x50"), Ok(Some(((Command::Other(2), Some(_)), _)))));
    }

    #[test]
    fn an_address_as_a_name_is_an_address() {
        let request = request(b"\x05\x01\x00\x03\x09192.0.2.1\x00\x50").unwrap().unwrap().0.1.unwrap();
        assert_eq!(request.host, Host::Ip("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn fragments_are_rejected() {
        let mut bytes = datagram_head("192.0.2.1:53".parse().unwrap());
        bytes.extend(b"payload");
        let (target, at) = datagram(&bytes).unwrap();
        assert_eq!((target.to_string(), &bytes[at..]), ("192.0.2.1:53".to_owned(), &b"payload"[..]));
        bytes[2] = 1;
        assert_eq!(datagram(&bytes), None);
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let whole = |length: usize| assert!(length <= bytes.len() && length <= MAX_MESSAGE);
            if let Ok(Some((_, length))) = methods(&bytes) { whole(length) }
            if let Ok(Some((_, length))) = password(&bytes) { whole(length) }
            if let Ok(Some((_, length))) = request(&bytes) { whole(length) }
            if let Some((_, at)) = datagram(&bytes) { whole(at) }
        }

        #[test]
        fn replies_contain_the_address(ip in any::<u128>(), v4 in any::<bool>(), port in any::<u16>()) {
            let ip: IpAddr = if v4 { Ipv4Addr::from(ip as u32).into() } else { Ipv6Addr::from(ip).into() };
            let bytes = reply(Reply::Succeeded, SocketAddr::new(ip, port));
            let (found, length) = address(&bytes[3..]).unwrap().unwrap();
            prop_assert_eq!(length, bytes.len() - 3);
            prop_assert_eq!(found.is_some(), port != 0);
            if let Some(found) = found {
                prop_assert_eq!(found.host, Host::Ip(ip.to_canonical()));
            }
        }
    }
}
