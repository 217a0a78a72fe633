//! The firewall rules (nftables) of a relay that forwards its clients' packets: they leave with an address of the relay, and only answers return.
//!
//! The relay itself checks each packet's source and destination before it hands the packet to the system, over a device of its own. These rules hold
//! whatever it hands over: nothing reaches the relay's host itself, or another client.

use braid_model::PerFamily;

/// The relay's device, to which the packets of all clients come. A namespace has one such relay.
pub const DEVICE: &str = "braid-relay";
/// The table with the rules, of family `inet`.
pub const TABLE: &str = "braid_relay";
/// The table in which the kernel keeps the former values of settings, of family `inet`. [`ruleset`] leaves it alone.
pub const RECORDS: &str = "braid_relay_restore";

/// The script for `nft -f` that replaces the rules, in one transaction, whether or not there are any. `closed`: families in which this machine forwarded
/// nothing before. There, it forwards nothing but the clients' packets, and what a rule of the system forwards (DNAT).
pub fn ruleset(closed: PerFamily<bool>) -> String {
    let mut lines = vec![
        format!("table inet {TABLE} {{}}"),
        format!("delete table inet {TABLE}"),
        format!("table inet {TABLE} {{"),
        "chain input {".into(),
        "type filter hook input priority filter - 1; policy accept;".into(),
        format!("iifname \"{DEVICE}\" counter drop"),
        "}".into(),
        "chain forward {".into(),
        "type filter hook forward priority filter - 1; policy accept;".into(),
        format!("iifname \"{DEVICE}\" oifname \"{DEVICE}\" counter drop"),
        format!("oifname \"{DEVICE}\" ct state {{ new, invalid, untracked }} counter drop"),
    ];
    for (family, _) in [("ipv4", closed.v4), ("ipv6", closed.v6)].into_iter().filter(|(_, closed)| *closed) {
        lines.push(format!("iifname != \"{DEVICE}\" meta nfproto {family} ct state new ct status & dnat == 0 counter drop"));
    }
    lines.extend(["}", "chain postrouting {", "type nat hook postrouting priority srcnat; policy accept;"].map(String::from));
    lines.push(format!("iifname \"{DEVICE}\" masquerade"));
    lines.extend(["}", "}", ""].map(String::from));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_script() {
        let expected = r#"table inet braid_relay {}
delete table inet braid_relay
table inet braid_relay {
chain input {
type filter hook input priority filter - 1; policy accept;
iifname "braid-relay" counter drop
}
chain forward {
type filter hook forward priority filter - 1; policy accept;
iifname "braid-relay" oifname "braid-relay" counter drop
oifname "braid-relay" ct state { new, invalid, untracked } counter drop
iifname != "braid-relay" meta nfproto ipv6 ct state new ct status & dnat == 0 counter drop
}
chain postrouting {
type nat hook postrouting priority srcnat; policy accept;
iifname "braid-relay" masquerade
}
}
"#;
        assert_eq!(ruleset(PerFamily { v4: false, v6: true }), expected);
        assert!(!ruleset(PerFamily::default()).contains("dnat"));
    }
}
