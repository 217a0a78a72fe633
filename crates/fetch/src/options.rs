//! Options of a download.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use braid_model::{ByteCount, Rate};
use hyper::header::{HeaderName, HeaderValue};

use crate::cookies::Cookies;
use crate::credentials::Credentials;
use crate::netrc::Netrc;
use crate::proxy::Proxy;

/// Options for all files.
#[derive(Debug, Clone)]
pub struct Options {
    /// Additional header fields of every request to the hosts of the given URLs. After a redirect to another host, only fields that reveal nothing
    /// about the user are sent, such as `Accept`.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Credentials for the hosts of the given URLs.
    pub credentials: Option<Credentials>,
    /// Credentials by host.
    pub netrc: Netrc,
    /// Cookies by host and path.
    pub cookies: Cookies,
    /// Proxies by destination.
    pub proxy: Proxy,
    /// Root certificates (PEM) to trust instead of the system's.
    pub cacert: Option<PathBuf>,
    /// Do not offer HTTP/2.
    pub http1: bool,
    /// Limit of the total rate over all links.
    pub limit_rate: Option<Rate>,
    /// Limit of the total cost of all files.
    pub max_cost: Option<f64>,
    /// Maximum size of a file; larger files fail.
    pub max_size: Option<ByteCount>,
    /// Maximum number of redirects. After a redirect from https to http, no option above that may be secret is sent.
    pub redirects: u32,
    /// Resume from the data of an earlier run.
    pub resume: bool,
    /// Time without data after which a file fails.
    pub timeout: Duration,
    /// Time limit for a connection to be established, with TLS.
    pub connect_timeout: Duration,
    /// Maximum number of consecutive attempts without data.
    pub tries: u32,
    /// Maximum number of connections to one server over one link.
    pub connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            headers: Vec::new(),
            credentials: None,
            netrc: Netrc::default(),
            cookies: Cookies::default(),
            proxy: Proxy::default(),
            cacert: None,
            http1: false,
            limit_rate: None,
            max_cost: None,
            max_size: None,
            redirects: 30,
            resume: false,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(15),
            tries: 12,
            connections: 8,
        }
    }
}

/// Destination of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// This file, which appears when it is complete.
    File(PathBuf),
    /// Standard output, in order.
    Standard,
}

/// Expected checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksum {
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
}

impl FromStr for Checksum {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = "write sha256: followed by 64 hexadecimal digits";
        let digits = text.strip_prefix("sha256:").ok_or(wanted)?;
        let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(digits.as_bytes()).map_err(|_| wanted)?;
        Ok(Self { sha256: bytes.try_into().map_err(|_| wanted)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_parsed() {
        let digits = "0123456789abcdefABCDEF".to_owned() + &"0".repeat(42);
        assert_eq!(format!("sha256:{digits}").parse::<Checksum>().unwrap().sha256[..4], [0x01, 0x23, 0x45, 0x67]);
        for bad in ["", "sha256:", "md5:00", &format!("sha256:{}", &digits[1..])] {
            assert!(bad.parse::<Checksum>().unwrap_err().contains("64"), "{bad}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let who: Credentials = "alice:s:ecret".parse().unwrap();
        assert_eq!(who.password, "s:ecret");
        assert!(!format!("{who:?}").contains("ecret"));
        assert_eq!(who.basic().unwrap(), "Basic YWxpY2U6czplY3JldA==");
    }
}
