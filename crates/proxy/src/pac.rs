//! The file by which browsers and systems set themselves up (proxy auto-configuration).

use std::net::SocketAddr;

/// Where it is.
pub(crate) const PATHS: [&str; 2] = ["/proxy.pac", "/wpad.dat"];
/// What it is.
pub(crate) const TYPE: &str = "application/x-ns-proxy-autoconfig";

/// Everything goes through the proxy at `address`, and direct if it does not answer; names without a dot and private addresses never do.
pub(crate) fn file(address: SocketAddr) -> String {
    format!(
        r#"function FindProxyForURL(url, host) {{
  if (isPlainHostName(host) || dnsDomainIs(host, ".local") || dnsDomainIs(host, ".localhost")) return "DIRECT";
  if (/^\d+\.\d+\.\d+\.\d+$/.test(host) &&
      (isInNet(host, "10.0.0.0", "255.0.0.0") || isInNet(host, "172.16.0.0", "255.240.0.0") ||
       isInNet(host, "192.168.0.0", "255.255.0.0") || isInNet(host, "169.254.0.0", "255.255.0.0") ||
       isInNet(host, "127.0.0.0", "255.0.0.0"))) return "DIRECT";
  if (/^\[?(::1|f[cd][0-9a-f]*:|fe[89ab][0-9a-f]*:)/i.test(host)) return "DIRECT";
  return "PROXY {address}; DIRECT";
}}
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_that_of_the_proxy() {
        assert!(file("127.0.0.1:5700".parse().unwrap()).contains("\"PROXY 127.0.0.1:5700; DIRECT\""));
        assert!(file("[fd00::1]:5700".parse().unwrap()).contains("PROXY [fd00::1]:5700;"));
    }
}
