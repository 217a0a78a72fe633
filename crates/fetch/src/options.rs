//! What a download is asked to do.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use braid_model::{ByteCount, Rate};
use hyper::header::{HeaderName, HeaderValue};

use crate::cookies::Cookies;
use crate::credentials::Credentials;
use crate::netrc::Netrc;
use crate::proxy::Proxy;

/// What holds for all files.
#[derive(Debug, Clone)]
pub struct Options {
    /// Further header fields of every request to the hosts that were named (to where those redirect only what says nothing of the user, as `Accept`).
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Who asks, for the hosts that were named.
    pub credentials: Option<Credentials>,
    /// Who asks, by host.
    pub netrc: Netrc,
    /// Cookies by host and path.
    pub cookies: Cookies,
    /// Proxies.
    pub proxy: Proxy,
    /// Trust these roots instead of the system's.
    pub cacert: Option<PathBuf>,
    /// Do not offer HTTP/2.
    pub http1: bool,
    /// All links together bring no more than this.
    pub limit_rate: Option<Rate>,
    /// What all files together may cost.
    pub max_cost: Option<f64>,
    /// Larger files are refused.
    pub max_size: Option<ByteCount>,
    /// Redirections that are followed; from https to http without anything above that may be secret.
    pub redirects: u32,
    /// Go on with what an earlier run left.
    pub resume: bool,
    /// A file that gets nothing for so long is given up.
    pub patience: Duration,
    /// A connection, with its TLS, that takes longer is given up.
    pub connect_timeout: Duration,
    /// Attempts in a row that may bring nothing.
    pub tries: u32,
    /// Connections to one server over one link, at most.
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
            patience: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(15),
            tries: 12,
            connections: 8,
        }
    }
}

/// Where a file goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Into this file, which appears when it is complete.
    File(PathBuf),
    /// To standard output, in order.
    Standard,
}

/// What a file must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksum {
    /// The SHA-256 of its bytes.
    pub sha256: [u8; 32],
}

impl FromStr for Checksum {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = "write sha256: and 64 hexadecimal digits";
        let digits = text.strip_prefix("sha256:").ok_or(wanted)?;
        let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(digits.as_bytes()).map_err(|_| wanted)?;
        Ok(Self { sha256: bytes.try_into().map_err(|_| wanted)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_read() {
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
