//! What kind of traffic an application makes (DNIS III.A, DBAS II.B.1): by its executable, by the port it asks for, by the shape of
//! its traffic. What the user says comes before all of these and is not decided here.

use braid_model::{ByteCount, Class};

/// Process names (as the kernel keeps them, at most 15 bytes) that tell the class.
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
    // Over HTTPS too: the name is cut.
    ("git-remote-http", Class::Bulk),
    // How apt fetches.
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

/// The class by process name.
pub fn by_name(name: &str) -> Option<Class> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, class)| *class).filter(|class| *class != Class::Unclassified)
}

/// The class by remote port. The web's ports tell nothing: everything uses them.
pub fn by_port(port: u16) -> Option<Class> {
    match port {
        22 | 23 | 123 | 3389 | 5900..=5910 => Some(Class::RealTime),
        // SIP, STUN and TURN, Mumble, RTMP, SRT as commonly set, WireGuard-like calls.
        1935 | 3478..=3481 | 5060 | 5061 | 5349 | 19302..=19309 | 60000..=60010 | 64738 => Some(Class::RealTime),
        20 | 21 | 69 | 115 | 119 | 445 | 563 | 873 | 989 | 990 | 2049 | 6881..=6889 | 51413 => Some(Class::Bulk),
        _ => None,
    }
}

/// The shape of an application's traffic, over its ended flows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pattern {
    /// Flows it opens in a minute.
    pub flows_per_minute: f64,
    /// Mean bytes of a flow towards this machine.
    pub mean_down: ByteCount,
    /// Mean bytes of a flow away from this machine.
    pub mean_up: ByteCount,
    /// Mean seconds a flow lasts.
    pub mean_seconds: f64,
    /// The share of all bytes that moved in [large](is_large) flows, 0 to 1.
    pub in_large: f64,
    /// The remote port of the last flow.
    pub port: u16,
}

/// Bytes of a flow that is no page any more.
const LARGE: f64 = 5e6;

/// The class by the shape of the traffic; `None` while it looks like nothing in particular.
///
/// Flows that last, slow and with about as much each way, are real-time, however long; else few and large ones bulk, and those that
/// moved most bytes in large ones, however many small ones they had besides; many short and small ones to the web's ports a browser.
pub fn by_pattern(pattern: &Pattern) -> Option<Class> {
    let larger = pattern.mean_down.max(pattern.mean_up).get() as f64;
    if is_talk(pattern.mean_down, pattern.mean_up, pattern.mean_seconds) {
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

/// Whether a flow that moved so much in so many seconds, ended or not, is a transfer by itself, whatever else its program does.
pub fn is_large(down: ByteCount, up: ByteCount, seconds: f64) -> bool {
    down.max(up).get() as f64 >= LARGE && !is_talk(down, up, seconds)
}

/// Long and slow, with about as much each way.
fn is_talk(down: ByteCount, up: ByteCount, seconds: f64) -> bool {
    let (larger, smaller) = (down.max(up).get() as f64, down.min(up).get() as f64);
    let rate = (larger + smaller) * 8.0 / seconds.max(0.001);
    seconds >= 10.0 && smaller * 4.0 >= larger && smaller > 0.0 && rate <= 5e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernel_and_stand_once() {
        for (index, (name, _)) in NAMES.iter().enumerate() {
            assert!(name.len() <= 15, "{name}");
            assert!(NAMES[..index].iter().all(|(other, _)| other != name), "{name} is given twice");
        }
    }

    #[test]
    fn programs_and_ports_are_known() {
        assert_eq!(by_name("firefox"), Some(Class::Browser));
        assert_eq!(by_name("zoom"), Some(Class::RealTime));
        assert_eq!(by_name("unheard-of"), None);
        assert_eq!(by_port(5060), Some(Class::RealTime));
        assert_eq!(by_port(873), Some(Class::Bulk));
        assert_eq!(by_port(443), None);
    }

    #[test]
    fn regression_what_downloads_on_the_command_line_is_bulk_by_name() {
        for name in ["curl", "wget", "apt", "apt-get", "http", "https", "git", "git-remote-http", "rsync"] {
            assert_eq!(by_name(name), Some(Class::Bulk), "{name}");
        }
    }

    #[test]
    fn a_flow_that_moves_much_is_large_unless_two_talk() {
        let mb = |count: u64| ByteCount::new(count * 1_000_000);
        assert!(is_large(mb(5), ByteCount::new(3000), 2.0));
        assert!(is_large(ByteCount::new(3000), mb(9), 300.0));
        assert!(!is_large(mb(4), mb(4), 1.0));
        assert!(!is_large(mb(30), mb(25), 600.0), "a call");
        assert!(is_large(mb(300), mb(250), 60.0), "nobody talks that fast");
    }

    #[test]
    fn traffic_shows_its_kind() {
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
}
