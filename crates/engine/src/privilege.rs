//! What the daemon must be allowed to do, looked at before it does anything.

/// Capabilities without which nothing of `braid up` works, by their bit in `/proc/self/status` (capabilities(7)). The others it uses
/// are part of `CAP_SYS_ADMIN` (BPF, PERFMON), or something smaller is lost without them.
const NEEDED: [(&str, u32); 2] = [("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21)];

/// The daemon may not do its work.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`braid up` must be run as root ({missing} missing): use sudo, or steer single programs without privilege by `braid run -- COMMAND`"
)]
pub(crate) struct Unprivileged {
    missing: String,
}

/// Looks whether this process may do what the daemon has to. Where that cannot be told, trying will tell.
pub(crate) fn check() -> Result<(), Unprivileged> {
    std::fs::read_to_string("/proc/self/status").map_or(Ok(()), |status| judge(&status))
}

fn judge(status: &str) -> Result<(), Unprivileged> {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(have) = field.and_then(|field| u64::from_str_radix(field.trim(), 16).ok()) else { return Ok(()) };
    let missing: Vec<_> = NEEDED.iter().filter(|(_, bit)| have >> bit & 1 == 0).map(|(name, _)| *name).collect();
    if missing.is_empty() { Ok(()) } else { Err(Unprivileged { missing: missing.join(" and ") }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(judge("Name:\tbraid\nCapEff:\t000001ffffffffff\n"), Ok(()));
        let both = judge("CapEff:\t0000000000000000\n").unwrap_err().to_string();
        assert!(both.contains("CAP_NET_ADMIN and CAP_SYS_ADMIN missing") && both.contains("braid run"), "{both}");
        let one = judge("CapEff:\t000001ffffdfffff\n").unwrap_err().to_string();
        assert!(one.contains("(CAP_SYS_ADMIN missing)"), "{one}");
    }

    #[test]
    fn what_cannot_be_told_is_tried() {
        assert_eq!(judge(""), Ok(()));
        assert_eq!(judge("CapEff:\tnonsense\n"), Ok(()));
    }
}
