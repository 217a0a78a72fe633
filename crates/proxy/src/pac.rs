//! The proxy auto-configuration file for browsers and systems.

use std::net::SocketAddr;

/// Paths of the file.
pub(crate) const PATHS: [&str; 2] = ["/proxy.pac", "/wpad.dat"];
/// Media type of the file.
pub(crate) const TYPE: &str = "application/x-ns-proxy-autoconfig";

/// Sends everything through the proxy at `address`, or direct if it does not answer. Names without a dot and private addresses are always direct.
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
    fn the_file_names_the_proxys_address() {
        assert!(file("127.0.0.1:5700".parse().unwrap()).contains("\"PROXY 127.0.0.1:5700; DIRECT\""));
        assert!(file("[fd00::1]:5700".parse().unwrap()).contains("PROXY [fd00::1]:5700;"));
    }
}
