//! Names of clients, from the lease files of DHCP servers on this machine.

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

use braid_control::core::Lease;

/// Where dnsmasq keeps its leases: on Debian, on OpenWrt.
pub const FILES: [&str; 2] = ["/var/lib/misc/dnsmasq.leases", "/tmp/dhcp.leases"];
/// Most that is read of one file.
const MAX_SIZE: u64 = 1 << 20;
/// Longest label of a host name (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 63;

/// The leases in all of these files. A file that is missing or cannot be read has none.
pub fn read(files: &[&Path]) -> Vec<Lease> {
    let text = |path: &&Path| {
        let mut text = String::new();
        File::open(path).and_then(|file| file.take(MAX_SIZE).read_to_string(&mut text)).map(|_| text).unwrap_or_default()
    };
    files.iter().map(text).flat_map(|text| text.lines().filter_map(lease).collect::<Vec<_>>()).collect()
}

/// One line of dnsmasq's file: expiry, hardware address (IPv6: IAID), address, name or `*`, client id. The client chooses its name.
fn lease(line: &str) -> Option<Lease> {
    let mut words = line.split_ascii_whitespace();
    let (_expiry, hardware, address, name) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let valid = name.len() <= MAX_NAME && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if !valid {
        return None;
    }
    let address: IpAddr = address.parse().ok()?;
    Some(Lease { address, mac: hardware.parse().ok(), name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Mac;

    #[test]
    fn leases_with_a_name_are_read() {
        let lines = "1764279000 02:00:00:00:00:20 192.168.7.20 phone 01:02:00:00:00:00:20\n1764279000 02:00:00:00:00:21 192.168.7.21 * *\n\
                     duid 00:01:00:01\n1764279000 1234 fd07::20 phone 00:01\n1764279000 02:00:00:00:00:22 192.168.7.22 bad;name *\n";
        let found: Vec<_> = lines.lines().filter_map(lease).collect();
        let expected = [
            Lease { address: "192.168.7.20".parse().unwrap(), mac: Some(Mac([2, 0, 0, 0, 0, 0x20])), name: "phone".into() },
            Lease { address: "fd07::20".parse().unwrap(), mac: None, name: "phone".into() },
        ];
        assert_eq!(found, expected);
        assert_eq!(read(&[Path::new("/nonexistent")]), []);
    }
}
