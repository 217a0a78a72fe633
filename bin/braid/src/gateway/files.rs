//! Files that `braid gateway setup` writes.

/// Comment of dnsmasq's file that lists the addresses that were added: `# added: lan0 192.168.7.1/24`.
pub(super) const ADDED: &str = "# added: ";

pub(super) const DNSMASQ_FILE: &str = "/etc/dnsmasq.d/braid.conf";

pub(super) const IFUPDOWN_FILE: &str = "/etc/network/interfaces.d/braid";

/// Beginning of the names of networkd's files; the device and `.network` follow.
pub(super) const NETWORKD_FILES: &str = "/etc/systemd/network/50-braid-";
