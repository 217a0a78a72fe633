//! Traffic class of an application (DNIS III.A, DBAS II.B.1): by its executable, by its remote port, by its traffic pattern. The user's configuration
//! takes precedence over all of these and is not handled here.

use std::time::Duration;

use braid_model::{ByteCount, Class};

/// Process names with a known class (truncated to 15 bytes, as in the kernel).
pub const NAMES: &[(&str, Class)] = &[
    ("brave", Class::Browser),
    ("chrome", Class::Browser),
    ("chromium", Class::Browser),
    ("chromium-browse", Class::Browser),
    ("epiphany", Class::Browser),
    ("falkon", Class::Browser),
    ("firefox", Class::Browser),
    ("firefox-bin", Class::Browser),
    ("firefox-esr", Class::Browser),
    ("konqueror", Class::Browser),
    ("librewolf", Class::Browser),
    ("midori", Class::Browser),
    ("msedge", Class::Browser),
    ("opera", Class::Browser),
    ("qutebrowser", Class::Browser),
    ("vivaldi-bin", Class::Browser),
    ("Socket Process", Class::Browser),
    ("baresip", Class::RealTime),
    ("Discord", Class::RealTime),
    ("jitsi", Class::RealTime),
    ("linphone", Class::RealTime),
    ("mosh-client", Class::RealTime),
    ("mumble", Class::RealTime),
    ("obs", Class::RealTime),
    ("signal-desktop", Class::RealTime),
    ("skypeforlinux", Class::RealTime),
    ("ssh", Class::RealTime),
    ("teams", Class::RealTime),
    ("teams-for-linux", Class::RealTime),
    ("telegram-deskto", Class::RealTime),
    ("zoom", Class::RealTime),
    ("apt", Class::Bulk),
    ("apt-get", Class::Bulk),
    ("aptitude", Class::Bulk),
    ("aria2c", Class::Bulk),
    ("axel", Class::Bulk),
    ("cargo", Class::Bulk),
    ("containerd", Class::Bulk),
    ("curl", Class::Bulk),
    ("deluged", Class::Bulk),
    ("dnf", Class::Bulk),
    ("dockerd", Class::Bulk),
    ("flatpak", Class::Bulk),
    ("git", Class::Bulk),
    // Also used over HTTPS: the kernel truncates the name.
    ("git-remote-http", Class::Bulk),
    // Apt's download helpers.
    ("http", Class::Bulk),
    ("https", Class::Bulk),
    ("lftp", Class::Bulk),
    ("pacman", Class::Bulk),
    ("podman", Class::Bulk),
    ("qbittorrent", Class::Bulk),
    ("rclone", Class::Bulk),
    ("restic", Class::Bulk),
    ("rsync", Class::Bulk),
    ("rtorrent", Class::Bulk),
    ("snapd", Class::Bulk),
    ("steam", Class::Bulk),
    ("syncthing", Class::Bulk),
    ("transmission-da", Class::Bulk),
    ("transmission-gt", Class::Bulk),
    ("unattended-upgr", Class::Bulk),
    ("wget", Class::Bulk),
    ("wget2", Class::Bulk),
    ("yt-dlp", Class::Bulk),
    ("yum", Class::Bulk),
    ("zypper", Class::Bulk),
];

/// The class of a process name.
pub fn by_name(name: &str) -> Option<Class> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, class)| *class).filter(|class| *class != Class::Unclassified)
}

/// The class of a remote port. The web's ports have none, because every kind of application uses them.
pub fn by_port(port: u16) -> Option<Class> {
    match port {
        22 | 23 | 123 | 3389 | 5900..=5910 => Some(Class::RealTime),
        // SIP, STUN and TURN, Mumble, RTMP, the usual ports of SRT, and WireGuard-like calls.
        1935 | 3478..=3481 | 5060 | 5061 | 5349 | 19302..=19309 | 60000..=60010 | 64738 => Some(Class::RealTime),
        20 | 21 | 69 | 115 | 119 | 445 | 563 | 873 | 989 | 990 | 2049 | 6881..=6889 | 51413 => Some(Class::Bulk),
        _ => None,
    }
}

/// The remote ports that have a class, with it.
pub fn classified_ports() -> impl Iterator<Item = (u16, Class)> {
    (0..=u16::MAX).filter_map(|port| Some((port, by_port(port)?)))
}

/// Traffic pattern of an application, over its ended flows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pattern {
    /// Flows opened per minute.
    pub flows_per_minute: f64,
    /// Mean bytes per flow towards this machine.
    pub mean_down: ByteCount,
    /// Mean bytes per flow away from this machine.
    pub mean_up: ByteCount,
    /// Mean duration of a flow in seconds.
    pub mean_seconds: f64,
    /// Share of all bytes that moved in [large](is_large) flows, 0 to 1.
    pub in_large: f64,
    /// Remote port of the last flow.
    pub port: u16,
}

/// Minimum size in bytes of a flow that is too large for a web page.
const LARGE: f64 = 5e6;

/// The class of a traffic pattern; `None` if no class fits.
///
/// Long, slow flows with similar volume in both directions are real-time. Otherwise an application is bulk if its flows are large on average, or if
/// most of its bytes moved in large flows, however many small ones there are. Many short, small flows to the web's ports are a browser's.
pub fn by_pattern(pattern: &Pattern) -> Option<Class> {
    let larger = pattern.mean_down.max(pattern.mean_up).get() as f64;
    if is_conversation(pattern.mean_down, pattern.mean_up, pattern.mean_seconds) {
        return Some(Class::RealTime);
    }
    if larger >= LARGE || pattern.in_large >= 0.5 {
        return Some(Class::Bulk);
    }
    let web = matches!(pattern.port, 80 | 443 | 8080 | 8443);
    if web && pattern.flows_per_minute >= 12.0 && larger <= 1e6 {
        return Some(Class::Browser);
    }
    None
}

/// Evidence after which a class by pattern is confident: this many ended flows in a row for which the pattern gave the same class.
const CONFIDENT: u32 = 8;
/// A long flow is evidence of its own: each full minute counts like one more flow, up to this many. A call lasts minutes, and few are made.
const MAX_MINUTES: u32 = 3;

/// The class that an application's traffic pattern has shown for long enough to be used by rules.
///
/// Both ways take the same evidence: an application gets a class, and loses it to another one or to none, only after [`CONFIDENT`] flows in a row
/// for which the pattern says so. So an application between two classes keeps the one that it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PatternClass {
    confident: Option<Class>,
    /// What the pattern of the last flows gave, and the evidence for it.
    latest: Option<Class>,
    evidence: u32,
}

impl PatternClass {
    /// Takes what the pattern gives after a flow of this duration has ended; `None` if no class fits.
    pub fn on_ended(&mut self, pattern: Option<Class>, duration: Duration) {
        if pattern != self.latest {
            (self.latest, self.evidence) = (pattern, 0);
        }
        let minutes = u32::try_from(duration.as_secs() / 60).unwrap_or(MAX_MINUTES).min(MAX_MINUTES);
        self.evidence = self.evidence.saturating_add(1 + minutes).min(CONFIDENT);
        if self.evidence >= CONFIDENT {
            self.confident = self.latest;
        }
    }

    /// The class that rules use; [`Class::Unclassified`] while there is none.
    pub fn confident(&self) -> Class {
        self.confident.unwrap_or_default()
    }
}

/// Whether a flow that moved this much in this many seconds, ended or not, is a bulk transfer, regardless of the rest of its program's traffic.
pub fn is_large(down: ByteCount, up: ByteCount, seconds: f64) -> bool {
    down.max(up).get() as f64 >= LARGE && !is_conversation(down, up, seconds)
}

/// Whether a flow is long and slow, with similar volume in both directions.
fn is_conversation(down: ByteCount, up: ByteCount, seconds: f64) -> bool {
    let (larger, smaller) = (down.max(up).get() as f64, down.min(up).get() as f64);
    let rate = (larger + smaller) * 8.0 / seconds.max(0.001);
    seconds >= 10.0 && smaller * 4.0 >= larger && smaller > 0.0 && rate <= 5e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernel_limit_and_are_unique() {
        for (index, (name, _)) in NAMES.iter().enumerate() {
            assert!(name.len() <= 15, "{name}");
            assert!(NAMES[..index].iter().all(|(other, _)| other != name), "{name} occurs twice");
        }
    }

    #[test]
    fn names_and_ports_determine_the_class() {
        assert_eq!(by_name("firefox"), Some(Class::Browser));
        assert_eq!(by_name("zoom"), Some(Class::RealTime));
        assert_eq!(by_name("unheard-of"), None);
        assert_eq!(by_port(5060), Some(Class::RealTime));
        assert_eq!(by_port(873), Some(Class::Bulk));
        assert_eq!(by_port(443), None);
    }

    #[test]
    fn regression_command_line_downloaders_are_bulk_by_name() {
        for name in ["curl", "wget", "apt", "apt-get", "http", "https", "git", "git-remote-http", "rsync"] {
            assert_eq!(by_name(name), Some(Class::Bulk), "{name}");
        }
    }

    #[test]
    fn a_flow_of_many_bytes_is_large_unless_it_is_a_conversation() {
        let mb = |count: u64| ByteCount::new(count * 1_000_000);
        assert!(is_large(mb(5), ByteCount::new(3000), 2.0));
        assert!(is_large(ByteCount::new(3000), mb(9), 300.0));
        assert!(!is_large(mb(4), mb(4), 1.0));
        assert!(!is_large(mb(30), mb(25), 600.0), "a call");
        assert!(is_large(mb(300), mb(250), 60.0), "too fast for a call");
    }

    #[test]
    fn traffic_patterns_determine_the_class() {
        let call = Pattern {
            flows_per_minute: 0.5,
            mean_down: ByteCount::new(900_000),
            mean_up: ByteCount::new(800_000),
            mean_seconds: 60.0,
            in_large: 0.0,
            port: 40_000,
        };
        assert_eq!(by_pattern(&call), Some(Class::RealTime));
        let page = Pattern {
            flows_per_minute: 60.0,
            mean_down: ByteCount::new(22_380),
            mean_up: ByteCount::new(600),
            mean_seconds: 0.4,
            in_large: 0.0,
            port: 443,
        };
        assert_eq!(by_pattern(&page), Some(Class::Browser));
        assert_eq!(by_pattern(&Pattern { in_large: 0.9, ..page }), Some(Class::Bulk), "a download among many small requests");
        let image = Pattern { flows_per_minute: 1.0, mean_down: ByteCount::new(700_000_000), mean_seconds: 60.0, in_large: 1.0, ..page };
        assert_eq!(by_pattern(&image), Some(Class::Bulk));
        assert_eq!(by_pattern(&Pattern { port: 443, ..Pattern::default() }), None);
    }

    #[test]
    fn a_class_by_pattern_is_confident_after_enough_flows_and_changes_only_after_as_many() {
        let short = Duration::from_secs(1);
        let mut class = PatternClass::default();
        for _ in 0..CONFIDENT - 1 {
            class.on_ended(Some(Class::Bulk), short);
            assert_eq!(class.confident(), Class::Unclassified);
        }
        class.on_ended(Some(Class::Bulk), short);
        assert_eq!(class.confident(), Class::Bulk);
        // Between two classes: neither gets enough flows in a row.
        for flow in 0..99 {
            let other = [Some(Class::Browser), None, Some(Class::Bulk)][flow % 3];
            class.on_ended(other, short);
            assert_eq!(class.confident(), Class::Bulk, "after {flow} flows");
        }
        for _ in 0..CONFIDENT {
            assert_eq!(class.confident(), Class::Bulk);
            class.on_ended(Some(Class::Browser), short);
        }
        assert_eq!(class.confident(), Class::Browser);
        (0..CONFIDENT).for_each(|_| class.on_ended(None, short));
        assert_eq!(class.confident(), Class::Unclassified, "a pattern that has gone");
    }

    #[test]
    fn long_flows_are_more_evidence_but_one_is_not_enough() {
        let call = Duration::from_secs(3600);
        let mut class = PatternClass::default();
        class.on_ended(Some(Class::RealTime), call);
        assert_eq!(class.confident(), Class::Unclassified);
        class.on_ended(Some(Class::RealTime), call);
        assert_eq!(class.confident(), Class::RealTime);
        class.on_ended(None, call);
        assert_eq!(class.confident(), Class::RealTime);
    }
}
