use std::collections::BTreeMap;
use std::time::Duration;

use braid_control::config::{Detect, Finding};
use braid_decide::policy::{BondScheduler, Carry, ClientMatcher, LinkSelector, Pattern, Portion, Resolve};
use braid_model::{ByteCount, Class, LinkKind, Mac, Rate, Role};

use super::*;
use crate as config;

const EXAMPLE: &str = include_str!("../../../braid.example.toml");

fn world() -> World {
    World {
        strict: true,
        devices: vec!["lo".into(), "wlan0".into(), "eth0".into()],
        users: BTreeMap::from([("root".into(), 0), ("ada".into(), 1000)]),
        files: Files::These { programs: vec!["/usr/bin/curl".into(), "/usr/bin/wget".into()], profiles: Vec::new() },
        relays: Some(vec!["home".into(), "office".into()]),
    }
}

fn parse(text: &str) -> Config {
    config::parse("braid.toml", text, &world()).unwrap_or_else(|error| panic!("{error}"))
}

/// The findings of a file that must be refused.
fn refused(text: &str) -> Vec<Finding> {
    match config::parse("braid.toml", text, &world()) {
        Ok(config) => panic!("taken: {config:?}"),
        Err(error) => error.findings().to_vec(),
    }
}

/// The example with its commented-out lines activated.
fn all_on() -> String {
    EXAMPLE.lines().map(|line| format!("{}\n", line.strip_prefix("#: ").unwrap_or(line))).collect()
}

#[test]
fn no_file_and_an_empty_file_are_the_same() {
    assert_eq!(parse(""), Config::default());
}

#[test]
fn the_examples_defaults_are_the_defaults() {
    let mut config = parse(EXAMPLE);
    assert_eq!(config.policy.links.len(), 2);
    config.policy.links.clear();
    assert_eq!(config, Config::default());
}

#[test]
fn the_example_is_accepted_with_all_lines_activated() {
    let config = parse(&all_on());
    assert_eq!(config.warnings, []);
    assert_eq!((config.probe_targets.len(), config.measure.servers.len(), config.policy.exclude.matchers().len()), (3, 2, 5));
    let secure = &config.measure.servers[0];
    assert_eq!((secure.tls, secure.page.address.port(), secure.upload.as_deref()), (true, 443, Some("/upload")));
    let [wifi, cellular] = &config.policy.links[..] else { panic!("{:?}", config.policy.links) };
    assert_eq!((wifi.capacity_down, wifi.probe), (Some(Rate::from_mbps(20)), Some(ProbeMode::Continuous)));
    assert_eq!((cellular.role, cellular.matcher.kind, cellular.matcher.mac.is_some()), (Role::Backup, Some(LinkKind::Cellular), true));
    let [_, network, hardware, named, app] = &config.policy.apps[..] else { panic!("{:?}", config.policy.apps) };
    let clients = [network, hardware, named].map(|rule| rule.matcher.client.clone().unwrap());
    let network = ClientMatcher::Network("192.168.7.0/24".parse().unwrap());
    assert_eq!(clients, [network, ClientMatcher::Mac(Mac([2, 0, 0x5e, 0x10, 0, 2])), ClientMatcher::User("camera".into())]);
    assert_eq!((config.policy.bonds_all, config.policy.relay.as_deref()), (true, Some("home")));
    assert_eq!(config.policy.lan, ["eth1", "br-lan"]);
    assert_eq!((app.class, app.affinity, app.weight, app.matcher.user), (Some(Class::Bulk), Some(Affinity::Application), 0.5, Some(0)));
    assert_eq!((app.rate, app.guarantee), (Some(Portion::Rate(Rate::from_mbps(8))), Some(Portion::Share(0.1))));
    assert_eq!((app.carry, app.copies, app.relay.as_deref(), app.resolve), (Carry::Duplicate, 2, Some("home"), Resolve::Relay));
}

#[test]
fn names_are_resolved_by_a_relay_only_if_one_may_carry_the_flow() {
    let entry = |more: &str| format!("[[app]]\nmatch = {{ client = \"10.0.0.0/8\" }}\n{more}");
    let asked = |more: &str| parse(&entry(more)).policy.apps[0].resolve;
    assert_eq!((asked(""), asked("carry = \"bond\"\nresolve = \"relay\"\n")), (Resolve::Here, Resolve::Relay));
    for (more, line) in [("carry = \"direct\"\nresolve = \"relay\"\n", 4), ("resolve = \"there\"\n", 3)] {
        let [finding] = &refused(&entry(more))[..] else { panic!("{more}") };
        assert_eq!(finding.line, line, "{finding:?}");
    }
}

#[test]
fn a_weight_of_one_divides_links_only_in_an_entry_that_names_clients() {
    let shares =
        |matcher: &str, more: &str| parse(&format!("[[app]]\nmatch = {{ {matcher} }}\n{more}")).policy.apps[0].preference().shares();
    assert!(shares("client = \"192.168.7.0/24\"", "weight = 1\n"));
    assert!(!shares("client = \"192.168.7.0/24\"", "") && !shares("port = 443", "weight = 1\n"));
    assert!(shares("port = 443", "weight = 2\n"));
}

#[test]
fn an_unknown_relay_is_reported_with_the_nearest_name() {
    let text = "[[app]]\nmatch = { port = 80 }\ncarry = \"bond\"\nrelay = \"hom\"\n";
    let [finding] = &refused(text)[..] else { panic!() };
    assert_eq!((finding.line, finding.nearest.as_deref()), (4, Some("home")));
    assert!(finding.remedy.as_ref().unwrap().contains("braid join --name hom"), "{finding}");
    let with = |strict, relays: Option<Vec<String>>| config::parse("braid.toml", text, &World { strict, relays, ..world() });
    let lenient = with(false, Some(Vec::new())).unwrap();
    assert!(lenient.warnings.len() == 1 && lenient.warnings[0].to_string().contains("no relay is joined"), "{:?}", lenient.warnings);
    assert_eq!(with(true, None).unwrap().warnings, [], "unknown relays are not checked");
    assert_eq!(with(true, Some(vec!["hom".into()])).unwrap().warnings, []);
}

#[test]
fn regression_a_bond_without_any_relay_causes_a_warning() {
    let with = |carry: &str, relays: Option<Vec<String>>| {
        let text = format!("[[app]]\nmatch = {{ port = 80 }}\ncarry = \"{carry}\"\n");
        config::parse("braid.toml", &text, &World { relays, ..world() }).unwrap().warnings
    };
    let [finding] = &with("bond", Some(Vec::new()))[..] else { panic!() };
    assert!(finding.line == 3 && finding.reason.contains("no relay is joined") && finding.to_string().contains("braid join"), "{finding}");
    assert_eq!(with("duplicate", Some(Vec::new())).len(), 1);
    for (carry, relays) in [("direct", Some(Vec::new())), ("auto", Some(Vec::new())), ("bond", None), ("bond", Some(vec!["home".into()]))] {
        assert_eq!(with(carry, relays), []);
    }
}

#[test]
fn the_scheduler_of_bonds_is_read_and_copies_belong_to_redundant() {
    let scheduler = |text: &str| parse(text).policy.bond_scheduler;
    assert_eq!(scheduler(""), None);
    for one in BondScheduler::ALL {
        assert_eq!(scheduler(&format!("[bond]\nscheduler = \"{one}\"\n")), Some(one));
    }
    assert_eq!(scheduler("[bond]\nscheduler = \"redundant\"\ncopies = 3\n"), Some(BondScheduler::Redundant(3)));
    for wrong in [
        "[bond]\nscheduler = \"fastest\"\n",
        "[bond]\nscheduler = \"midrr\"\ncopies = 2\n",
        "[bond]\ncopies = 2\n",
        "[bond]\nscheduler = \"redundant\"\ncopies = 9\n",
    ] {
        assert_eq!(refused(wrong).len(), 1, "{wrong}");
    }
}

#[test]
fn lan_devices_of_the_gateway_are_read() {
    let lan = |text: &str| parse(text).policy.lan;
    assert_eq!(lan(""), [""; 0]);
    // A LAN device need not exist yet.
    assert_eq!(lan("[gateway]\nlan = [\"br-lan\", \"eth1.5\"]\n"), ["br-lan", "eth1.5"]);
    let twice = parse("[gateway]\nlan = [\"eth1\", \"eth1\"]\n");
    assert_eq!((twice.policy.lan.len(), twice.warnings.len()), (1, 1), "{:?}", twice.warnings);
    // An entry by pattern or kind may match a LAN device: it still is no link.
    assert_eq!(lan("[gateway]\nlan = [\"eth1\"]\n[[link]]\nname = \"eth*\"\n[[link]]\nkind = \"wired\"\n"), ["eth1"]);
}

#[test]
fn a_gateway_without_usable_lan_devices_is_refused() {
    let wrong = [
        ("[gateway]\n", "names no LAN device", 1),
        ("[gateway]\nlan = []\n", "names no LAN device", 1),
        ("[gateway]\nlan = \"eth1\"\n", "lan", 2),
        ("[gateway]\nlan = [\"eth0\"]\n[[link]]\nname = \"eth0\"\n", "eth0 is a LAN device here and has a [[link]] entry", 2),
    ];
    for (text, reason, line) in wrong {
        let [finding] = &refused(text)[..] else { panic!("{text}: {:?}", refused(text)) };
        assert!(finding.line == line && finding.reason.contains(reason), "{text}: {finding:?}");
    }
    for name in ["", "lo", "eth*", "a/b", "a b", "..", "sixteen-bytes-00", "a\\\"b"] {
        let [finding] = &refused(&format!("[gateway]\nlan = [\"{name}\"]\n"))[..] else { panic!("{name}") };
        assert!(
            finding.reason.contains("is not a LAN device") && finding.remedy.as_ref().unwrap().contains("ip link"),
            "{name}: {finding:?}"
        );
    }
}

#[test]
fn one_relay_carries_everything() {
    let with = |text: &str, relays: &[&str]| {
        let relays = Some(relays.iter().map(|name| (*name).to_owned()).collect());
        config::parse("braid.toml", text, &World { relays, ..world() })
    };
    let carried = |text: &str, relays: &[&str]| {
        let config = with(text, relays).unwrap();
        (config.policy.bonds_all, config.policy.relay, config.warnings.len())
    };
    assert_eq!(carried("", &["home", "office"]), (false, None, 0));
    assert_eq!(carried("carry = \"direct\"\n", &["home", "office"]), (false, None, 0));
    assert_eq!(carried("carry = \"bond\"\n", &["home"]), (true, None, 0));
    assert_eq!(carried("carry = \"bond\"\n", &[]), (true, None, 1), "no relay is joined yet");
    assert_eq!(carried("carry = \"bond\"\nrelay = \"office\"\n", &["home", "office"]), (true, Some("office".into()), 0));
    let error = with("carry = \"bond\"\n", &["home", "office"]).unwrap_err().to_string();
    assert!(error.contains("home, office") && error.contains("relay = \"home\""), "{error}");
    for text in ["relay = \"home\"\n", "carry = \"direct\"\nrelay = \"home\"\n"] {
        let [finding] = &refused(text)[..] else { panic!("{text}") };
        assert!(finding.reason.contains("no effect"), "{finding:?}");
    }
    for text in ["carry = \"auto\"\n", "carry = \"duplicate\"\n", "carry = \"bond\"\nrelay = \"hom\"\n"] {
        assert_eq!(refused(text).len(), 1, "{text}");
    }
}

#[test]
fn a_fallback_needs_a_carry_by_relay() {
    let world = World { relays: Some(vec!["home".into()]), ..world() };
    let policy = |text: &str| config::parse("braid.toml", text, &world).unwrap().policy;
    let all = policy(
        "carry = \"bond\"\nfallback = \"none\"\n[[app]]\nmatch = { port = 25 }\ncarry = \"direct\"\n[[app]]\nmatch = { port = 22 }\n\
                      [[app]]\nmatch = { port = 53 }\ncarry = \"duplicate\"\nfallback = \"direct\"\n",
    );
    assert!(all.confines(None));
    assert_eq!(all.apps.iter().map(|rule| all.confines(Some(rule))).collect::<Vec<_>>(), [false, true, false]);
    let one = policy("[[app]]\nmatch = { port = 25 }\ncarry = \"bond\"\nfallback = \"none\"\n");
    assert_eq!([one.confines(None), one.confines(Some(&one.apps[0]))], [false, true]);
    for text in
        ["fallback = \"none\"\n", "[[app]]\nmatch = { port = 25 }\nfallback = \"none\"\n", "carry = \"direct\"\nfallback = \"direct\"\n"]
    {
        let [finding] = &refused(text)[..] else { panic!("{text}") };
        assert!(finding.reason.contains("no effect"), "{finding:?}");
    }
    assert_eq!(refused("carry = \"bond\"\nrelay = \"home\"\nfallback = \"never\"\n").len(), 1);
}

#[test]
fn exceptions_that_the_firewall_does_not_know_are_reported() {
    let world = World { relays: Some(vec!["home".into()]), ..world() };
    let warnings = |text: &str| config::parse("braid.toml", text, &world).unwrap().warnings;
    for (entry, held) in [
        ("[[app]]\nmatch = { name = \"curl\" }\ncarry = \"direct\"\n", false),
        ("[[app]]\nmatch = { class = \"bulk\", port = 25 }\ncarry = \"direct\"\n", false),
        ("[exclude]\ncgroups = [\"/x\"]\n", false),
        ("[[app]]\nmatch = { name = \"curl\" }\nweight = 2\n", true),
        ("[[app]]\nmatch = { port = 25, user = 0 }\ncarry = \"direct\"\n", true),
        ("[exclude]\ndestinations = [\"192.0.2.0/24\"]\n", true),
    ] {
        let said =
            |top: &str| warnings(&format!("{top}{entry}")).iter().filter(|warning| warning.reason.contains("excepts nothing")).count();
        assert_eq!(said("carry = \"bond\"\nfallback = \"none\"\n"), usize::from(!held), "{entry}");
        assert_eq!(said("carry = \"bond\"\n"), 0, "{entry}");
    }
}

#[test]
fn the_key_of_an_ad_hoc_group_is_in_a_file_with_a_whole_path() {
    let of = |path: &str| format!("[adhoc]\nradios = [\"wlan0\"]\nkey_file = \"{path}\"\n");
    // It is read when the device is made.
    let adhoc = parse(&of("/no/such/file.key")).adhoc.unwrap();
    assert_eq!(adhoc.key_file.as_deref(), Some(std::path::Path::new("/no/such/file.key")));
    let findings = refused(&of("adhoc.key"));
    let [finding] = &findings[..] else { panic!("{findings:?}") };
    assert!(finding.reason.contains("does not begin with \"/\"") && finding.remedy.as_ref().unwrap().contains("braid adhoc key"));
    assert_eq!(parse("[adhoc]\nradios = [\"wlan0\"]\n").adhoc.unwrap().key_file, None);
}

#[test]
fn a_remote_controller_is_authenticated_or_on_this_machine() {
    let files = "certificate = \"/d/cert.pem\"\nkey = \"/d/key.pem\"\nca = \"/d/ca.pem\"\n";
    let of = |controller: &str, rest: &str| format!("[datapath]\ncontroller = \"{controller}\"\n{rest}");
    // The files are read when the daemon connects.
    let secure = parse(&of("ssl:control.example:6653", &format!("{files}id = \"00000200005e0001\"\n"))).datapath.unwrap();
    assert_eq!((secure.to_string().as_str(), secure.id.map(|id| id.0)), ("ssl:control.example:6653", Some(0x0200_005e_0001)));
    assert_eq!(secure.tls.unwrap().key, Path::new("/d/key.pem"));
    for plain in [of("tcp:127.0.0.1:6653", ""), of("tcp:[::1]:6653", ""), of("tcp:192.0.2.1:6653", "insecure = true\n")] {
        assert_eq!(parse(&plain).datapath.unwrap().tls, None, "{plain}");
    }
    for (text, expected) in [
        ("[datapath]\n".to_owned(), "has no controller"),
        (of("192.0.2.1:6653", files), "does not begin with ssl: or tcp:"),
        (of("ssl:192.0.2.1", files), "has no port"),
        (of("ssl:192.0.2.1:6653", ""), "names no files for TLS"),
        (of("ssl:192.0.2.1:6653", &files.replace("/d/key", "key")), "does not begin with \"/\""),
        (of("ssl:192.0.2.1:6653", &format!("{files}insecure = true\n")), "insecure has no effect"),
        (of("tcp:127.0.0.1:6653", files), "certificate has no effect"),
        (of("tcp:192.0.2.1:6653", ""), "whoever is on the way"),
        (of("tcp:localhost.example:6653", "insecure = false\n"), "whoever is on the way"),
        (of("tcp:127.0.0.1:6653", "id = \"0000000000000000\"\n"), "is not the number of a datapath"),
        (of("tcp:127.0.0.1:6653", "id = \"2\"\n"), "is not the number of a datapath"),
    ] {
        let findings = refused(&text);
        assert!(findings.len() == 1 && findings[0].reason.contains(expected), "{text}: {findings:?}");
    }
}

#[test]
fn a_network_names_its_controller_and_radios() {
    let network =
        parse("[network]\nradios = [\"wlan0\", \"eth0\"]\ncontroller = \"192.0.2.1:2209\"\naccesses = { eth0 = \"02:00:00:00:0a:01\" }\n")
            .network
            .unwrap();
    assert_eq!((network.device.name.as_str(), network.controller.to_string().as_str()), ("net0", "192.0.2.1:2209"));
    assert_eq!(network.accesses, [None, Some(Mac([2, 0, 0, 0, 10, 1]))]);
    let reasons = |text: &str| refused(text).into_iter().map(|finding| finding.reason).collect::<Vec<_>>();
    assert_eq!(reasons("[network]\nradios = [\"wlan0\"]\n"), ["[network] has no controller"]);
    let other = "[network]\nradios = [\"wlan0\"]\ncontroller = \"192.0.2.1:2209\"\n";
    assert_eq!(reasons(&format!("{other}accesses = {{ eth0 = \"02:00:00:00:0a:01\" }}\n")), ["eth0 is no radio of [network]"]);
    assert!(reasons(&format!("{other}controller_key = \"x\"\n"))[0].contains("is not a key"));
    assert!(reasons(&format!("{other}supplicants = \"run\"\n"))[0].contains("does not begin with \"/\""));
    assert!(reasons(&format!("{other}[adhoc]\nradios = [\"wlan1\"]\n"))[0].contains("are both there"));
}

/// The example must contain every key: wrong keys list all valid ones in their remedy.
#[test]
fn the_example_names_every_key() {
    let wrong = "x = 1\ndetect = { x = 1 }\nutility = { x = 1, threshold = 0.5 }\nprice = { x = 1 }\n[[link]]\nname = \"eth0\"\nx = 1\nenergy = { receive_mw = 1, transmit_mw = 1, x = 1 }\n[[app]]\nmatch = { port = 1, x = 1 }\nx = 1\n[exclude]\nx = 1\n[measure]\nx = 1\n[bond]\nx = 1\n[gateway]\nlan = [\"eth1\"]\nx = 1\n[adhoc]\nradios = [\"wlan0\"]\nx = 1\n[datapath]\ncontroller = \"tcp:127.0.0.1:6653\"\nx = 1\n";
    let findings = refused(wrong);
    assert_eq!(findings.len(), 14, "{findings:#?}");
    let example = all_on();
    for finding in findings {
        let keys = finding.remedy.unwrap();
        for key in keys.strip_prefix("the keys are: ").unwrap().split(", ") {
            let written = [format!("{key} = "), format!("[{key}]")];
            assert!(written.iter().any(|text| example.contains(text)), "{key}");
        }
    }
}

#[test]
fn the_documented_format_is_accepted() {
    let config = parse(
        r#"
        version = 1             # may be left out
        scheduler = "max-throughput"
        [[link]]
        name = "wlan0"          # or match by kind, MAC, address prefix
        role = "normal"         # normal, backup; beside it: metered, cap, reset_day, probe
        [[app]]
        match = { exe = "/usr/bin/curl" }   # keys: exe, name, port, destination (CIDR), cgroup, user; all given must match
        links = ["wlan0"]                   # allowed links; prefer = [...], class = "...", weight = 1.0 beside it
        "#,
    );
    assert_eq!(config.policy.apps[0].links, Some(vec![LinkSelector::Name(Pattern::new("wlan0"))]));
    assert_eq!(config.policy.apps[0].matcher.exe.as_deref(), Some(Path::new("/usr/bin/curl")));
}

#[test]
fn a_wrong_key_is_shown_with_its_line_and_the_nearest_key() {
    let error = config::parse("braid.toml", "version = 1\nsheduler = \"round-robin\"\n", &world()).unwrap_err().to_string();
    let expected = "braid.toml:2:1: error: there is no key \"sheduler\" in the configuration\n 2 | sheduler = \"round-robin\"\n   | ^^^^^^^^\n   = did you mean \"scheduler\"?\n   = the keys are: ";
    assert!(error.starts_with(expected), "{error}");
    assert!(error.ends_with("1 error: the configuration is refused"), "{error}");
}

#[test]
fn all_errors_are_reported_at_once_in_the_order_of_the_file() {
    let findings = refused("scheduler = \"max-troughput\"\ndefault_demand = true\n[[link]]\nnam = \"wlan0\"\n[[app]]\nlinks = []\n");
    let lines: Vec<_> = findings.iter().map(|finding| finding.line).collect();
    assert_eq!(lines, [1, 2, 3, 4, 5, 6], "{findings:#?}");
    assert_eq!(findings[0].nearest.as_deref(), Some("max-throughput"));
    assert!(findings.iter().all(|finding| finding.remedy.is_some()));
}

#[test]
fn invalid_values_are_refused() {
    for (text, reason, line) in [
        ("version = 2", "version 2", 1),
        ("affinity = \"sticky\"", "no affinity \"sticky\"", 1),
        ("probe = \"often\"", "no probe \"often\"", 1),
        ("default_demand = \"1 bucket\"", "\"1 bucket\" is not an amount", 1),
        ("reconnect_after = \"soon\"", "not a length of time", 1),
        ("probe_targets = [\"tcp:example.org:80\"]", "not a probe target", 1),
        ("probe_targets = [{ status = 204 }]", "needs a url", 1),
        ("[measure]\nmax_bytes = \"1 kB\"", "max_bytes is less than 1 MB", 2),
        ("[measure]\nservers = [{ url = \"https://192.0.2.1/\", upload = \"up\" }]", "\"up\" is not a path", 2),
        ("probe_targets = [{ url = \"https://192.0.2.1/\" }]", "is not http:// with an IP address", 1),
        ("[measure]\nevery = \"1 s\"", "less than a minute", 2),
        ("link = 3", "link is an integer", 1),
        ("[[link]]", "names no link", 1),
        ("[[link]]\nname = \"lo\"", "loopback", 2),
        ("[[link]]\nname = \"a/b\"", "cannot be the name", 2),
        ("[[link]]\nkind = \"wirless\"", "no kind \"wirless\"", 2),
        ("[[link]]\nmac = \"02:00\"", "not a hardware address", 2),
        ("[[link]]\nname = \"w\"\nreset_day = 32\nmetered = true\ncap = 9", "1 to 31", 3),
        ("[[link]]\nname = \"w\"\nreset_day = 0\nmetered = true\ncap = 9", "1 to 31", 3),
        ("[[link]]\nname = \"w\"\ncap = \"1 GB\"", "not metered", 3),
        ("[[link]]\nname = \"w\"\nmetered = true\ncap = 0", "cap of zero", 4),
        ("[[link]]\nname = \"w\"\nmetered = true\nreset_day = 3", "without a cap", 4),
        ("[[link]]\nname = \"w\"\ncapacity_up = 0", "capacity_up is zero", 3),
        ("[[link]]\nname = \"w\"\n[[link]]\nname = \"w\"", "line 1 matches the same links", 3),
        ("[[app]]\nclass = \"bulk\"", "without match", 1),
        ("[[app]]\nmatch = {}", "without conditions", 2),
        ("[[app]]\nmatch = { exe = \"curl\" }", "not the absolute path", 2),
        ("[[app]]\nmatch = { name = \"a/b\" }", "not the name of a process", 2),
        ("[[app]]\nmatch = { port = 0 }", "1 to 65535", 2),
        ("[[app]]\nmatch = { destination = \"example.org\" }", "not a destination", 2),
        ("[[app]]\nmatch = { cgroup = \"user.slice\" }", "not the path of a control group", 2),
        ("[[app]]\nmatch = { user = \"adam\" }", "no user \"adam\"", 2),
        ("[[app]]\nmatch = { port = 1 }\nweight = 0", "above 0", 3),
        ("[[app]]\nmatch = { port = 1 }\nrate = \"0 %\"", "not a percentage above 0", 3),
        ("[[app]]\nmatch = { port = 1 }\nguarantee = \"101 %\"", "not a percentage above 0", 3),
        ("[[app]]\nmatch = { port = 1 }\nrate = \"1 kbit/s\"", "too low to be kept", 3),
        ("[[app]]\nmatch = { port = 1 }\nrate = \"fast\"", "a rate", 3),
        ("[[app]]\nmatch = { port = 1 }\nrate = \"10 %\"\nguarantee = \"20 %\"", "guarantee exceeds rate", 4),
        ("[[app]]\nmatch = { port = 1 }\nlinks = []", "links is empty", 3),
        ("[[app]]\nmatch = { port = 1 }\nlinks = [\"wlan0\", \"wlan0\"]", "twice", 3),
        ("[[app]]\nmatch = { port = 1 }\nlinks = [\"wlan1\"]", "no link wlan1", 3),
        ("[[app]]\nmatch = { port = 1 }\nlinks = [\"kind:warp\"]", "not a link", 3),
        ("[[app]]\nmatch = { port = 1 }\nlinks = [\"wlan0\"]\nprefer = [\"eth0\"]", "preferred but not allowed", 4),
        ("[[link]]\nname = \"eth0\"\nrole = \"excluded\"\n[[app]]\nmatch = { port = 1 }\nlinks = [\"eth0\"]", "is excluded", 6),
        ("[[app]]\nmatch = { port = 1 }\n[[app]]\nmatch = { port = 1 }", "line 1 matches the same flows", 3),
        ("[[app]]\nmatch = { port = 1 }\ncarry = \"bonded\"", "no carry \"bonded\"", 3),
        ("[[app]]\nmatch = { port = 1 }\ncarry = true", "carry is a boolean", 3),
        ("[[app]]\nmatch = { port = 1 }\nrelay = \"\"", "not the name of a relay", 3),
        ("[[app]]\nmatch = { port = 1 }\nrelay = \"-x\"", "not the name of a relay", 3),
        ("[[app]]\nmatch = { port = 1 }\ncarry = \"direct\"\nrelay = \"home\"", "takes no relay", 4),
        ("[[app]]\nmatch = { port = 1 }\ncarry = \"bond\"\ncopies = 2", "takes no copies", 4),
        ("[[app]]\nmatch = { port = 1 }\ncarry = \"duplicate\"\ncopies = 1", "copies = 1 is not a whole number from 2 to 8", 4),
        ("[exclude]\nusers = [-1]", "users = -1", 2),
        ("detect = \"yes\"", "detect is a string", 1),
        ("detect = [\"203.0.113.0/33\"]", "neither a host name nor an address", 1),
        ("detect = [\"https://example.org/\"]", "neither a host name nor an address", 1),
        ("detect = { hold = \"300 ms\" }", "hold has no effect", 1),
        ("detect = { hosts = true, hold = \"3 s\" }", "hold is longer than 2 s", 1),
        ("detect = { moves = true }", "moves has no effect", 1),
        ("detect = { hosts = true, networks = [\"8.8.8.0/24\"] }", "8.8.8.0/24 is not private", 1),
        ("detect = { hosts = true, networks = [\"example.org\"] }", "\"example.org\" is not a network", 1),
        ("[detect]\nhost = true", "no key \"host\"", 2),
        ("detect = [\"192.168.0.0/16\"]", "192.168.0.0/16 is private", 1),
        ("detect = [\"203.0.113.1\", 5]", "integer", 1),
        ("version = 1\nversion = 1", "duplicate key", 2),
        ("scheduler = \n", "", 1),
    ] {
        let findings = refused(text);
        assert!(findings.iter().any(|finding| finding.reason.contains(reason) && finding.line == line), "{text}\n{findings:#?}");
    }
}

#[test]
fn nearest_names_are_suggested() {
    for (text, near) in [
        ("[[app]]\nmatch = { user = \"adda\" }", "ada"),
        ("[[app]]\nmatch = { prt = 3 }", "port"),
        ("[[app]]\nmatch = { port = 1 }\nprefer = [\"wlan1\"]", "wlan0"),
        ("[[link]]\nkind = \"wirless\"", "wireless"),
        ("[[app]]\nmatch = { port = 1 }\ncarry = \"bnd\"", "bond"),
    ] {
        assert!(refused(text).iter().any(|finding| finding.nearest.as_deref() == Some(near)), "{text}");
    }
}

#[test]
fn a_start_accepts_names_that_this_machine_does_not_have() {
    let lenient = World { strict: false, ..world() };
    let text = "[[app]]\nmatch = { exe = \"/opt/gone\" }\nlinks = [\"usb0\"]\n";
    let config = config::parse("f", text, &lenient).unwrap();
    assert_eq!(config.warnings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2, 3]);
    let findings = refused(text);
    assert_eq!(findings.iter().map(|finding| finding.severity).collect::<Vec<_>>(), [Severity::Warning, Severity::Error], "{findings:#?}");
    // A link entry declares a device that may appear later.
    let config = parse("[[link]]\nname = \"usb*\"\n[[app]]\nmatch = { port = 1 }\nlinks = [\"usb0\"]\n");
    assert_eq!(config.warnings, []);
}

#[test]
fn regression_a_link_without_a_device_causes_a_warning() {
    let text = "[[link]]\nname = \"wlan7\"\n[[link]]\nname = \"usb*\"\n[[link]]\nname = \"eth0\"\n";
    let [warning] = &parse(text).warnings[..] else { panic!("{:?}", parse(text).warnings) };
    assert_eq!((warning.line, warning.nearest.as_deref(), warning.severity), (1, Some("wlan0"), Severity::Warning));
    assert!(warning.reason.contains("there is currently no device called wlan7"), "{warning}");
    let start = World { strict: false, ..world() };
    assert_eq!(config::parse("f", text, &start).unwrap().warnings, [], "it may appear after the start");
    let unknown = World { devices: Vec::new(), ..world() };
    assert_eq!(config::parse("f", text, &unknown).unwrap().warnings, []);
}

#[test]
fn regression_a_missing_program_does_not_refuse_the_file() {
    for text in ["[[app]]\nmatch = { exe = \"/usr/bin/crul\" }\n", "[exclude]\napplications = [\"/usr/bin/crul\"]\n"] {
        let config = parse(text);
        let [finding] = &config.warnings[..] else { panic!("{:#?}", config.warnings) };
        assert_eq!((finding.line, finding.nearest.as_deref()), (2, Some("/usr/bin/curl")));
        assert!(finding.reason.contains("currently no program /usr/bin/crul"), "{finding}");
        assert_eq!(config.policy.apps.len() + config.policy.exclude.matchers().len(), 1, "the rule is kept");
    }
}

#[test]
fn a_start_accepts_a_removed_user() {
    let lenient = World { strict: false, ..world() };
    let text = "[[app]]\nmatch = { user = \"gone\", port = 1 }\n";
    let config = config::parse("f", text, &lenient).unwrap();
    assert_eq!(config.warnings.len(), 1, "{:#?}", config.warnings);
    assert_eq!(config.policy.apps[0].matcher.user, Some(u32::MAX), "no process has this user");
    assert_eq!(refused(text).len(), 1);
}

#[test]
fn names_of_the_previous_release_are_accepted_with_a_warning() {
    let old = "destroy_stuck_after = 9\nmaxdiff = \"20 ms\"\nprobe = \"eager\"\n[[link]]\nname = \"w*\"\nprobe = \"sparing\"\n";
    let config = config::parse("f", old, &World::default()).unwrap();
    assert_eq!((config.reconnect_after, config.probe), (Some(Duration::from_secs(9)), ProbeMode::Continuous));
    assert_eq!((config.policy.hysteresis, config.policy.links[0].probe), (Duration::from_millis(20), Some(ProbeMode::OnDemand)));
    let said: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    for name in ["reconnect_after", "hysteresis", "continuous", "on-demand"] {
        assert!(said.iter().any(|text| text.contains(&format!("is now called \"{name}\""))), "{name}: {said:?}");
    }
    let both = refused("destroy_stuck_after = 9\nreconnect_after = 8\n");
    assert!(both.len() == 1 && both[0].to_string().contains("is the old name of reconnect_after"), "{both:?}");
}

/// Users copy the README's examples to machines that have neither Zoom nor `eth0`.
#[test]
fn regression_the_readmes_policy_is_valid_on_any_machine() {
    let readme = include_str!("../../../README.md");
    let mut blocks = vec![String::new()];
    for line in readme.lines() {
        match (line.strip_prefix("    "), blocks.last_mut()) {
            (Some(code), Some(block)) => block.extend([code, "\n"]),
            (None, Some(block)) if line.is_empty() => block.push('\n'),
            _ => blocks.push(String::new()),
        }
    }
    let shown: Vec<&String> = blocks.iter().filter(|block| block.contains("[[app]]")).collect();
    assert!(shown.len() >= 2, "{shown:#?}");
    let bare = World {
        strict: true,
        files: Files::These { programs: Vec::new(), profiles: Vec::new() },
        relays: Some(Vec::new()),
        ..World::default()
    };
    for text in shown {
        config::parse("README.md", text, &bare).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn entries_that_never_apply_cause_warnings() {
    for (text, line) in [
        ("[[link]]\nname = \"w*\"\n[[link]]\nname = \"wlan0\"\nrole = \"backup\"\n", 3),
        ("[[app]]\nmatch = { name = \"curl\" }\n[[app]]\nmatch = { name = \"curl\", port = 80 }\n", 3),
        ("[exclude]\nusers = [0]\n[[app]]\nmatch = { user = \"root\", port = 80 }\n", 3),
        ("[[link]]\nname = \"w*\"\nrole = \"excluded\"\nprobe = \"continuous\"\n", 1),
        ("[[app]]\nmatch = { destination = \"10.0.0.1/8\" }\n", 2),
        ("[[app]]\nmatch = { class = \"real-time\" }\nrate = \"1 Mbit/s\"\n", 1),
        ("[[app]]\nmatch = { port = 3478 }\nrate = \"1 Mbit/s\"\n", 1),
    ] {
        let lines: Vec<_> = parse(text).warnings.iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [line], "{text}");
    }
}

#[test]
fn a_refused_condition_does_not_leave_a_rule_that_matches_more() {
    let findings = refused("[[app]]\nmatch = { name = \"curl\", port = 99999 }\n[[app]]\nmatch = { name = \"curl\" }\n");
    assert_eq!(findings.len(), 1, "{findings:#?}");
}

#[test]
fn too_many_rules_are_refused() {
    let text: String = (1..=65).map(|port| format!("[[app]]\nmatch = {{ port = {port} }}\n")).collect();
    assert!(refused(&text)[0].reason.contains("65 [[app]]"));
}

/// Unrequested questions look like a scan.
#[test]
fn regression_no_host_is_asked_whether_it_runs_braid_by_default() {
    let detect = |text: &str| parse(text).detect;
    assert_eq!([detect(""), detect("detect = false")], [Detect::Nobody, Detect::Nobody]);
    assert_eq!(detect("detect = true"), Detect::Everybody);
    let config = parse("[detect]\nhosts = true\nnetworks = [\"10.0.0.0/8\", \"192.168.7.20\"]\nhold = \"300 ms\"");
    assert_eq!((&config.detect, config.hold), (&Detect::Everybody, Duration::from_millis(300)));
    assert_eq!(config.detect_networks, ["10.0.0.0/8", "192.168.7.20/32"].map(|net| net.parse().unwrap()));
    assert!(!config.moves && parse("[detect]\nhosts = true\nmoves = true").moves);
    assert!(parse("detect = { networks = [\"10.0.0.0/8\"] }").detects_any() && !parse("detect = { hold = 0 }").detects_any());
    let listed = detect("detect = [\"Server.example.org\", \"203.0.113.7\", \"2001:db8::/32\"]");
    let named = ["198.51.100.1".parse().unwrap()].into();
    let asks = |host: &str| listed.asks(host.parse().unwrap(), &named);
    assert_eq!(listed.names().iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["server.example.org"]);
    assert!(asks("198.51.100.1") && asks("203.0.113.7") && asks("2001:db8::1") && !asks("2001:db9::1"));
}

#[test]
fn units_and_times_are_read() {
    let config = parse("default_demand = 5\nreconnect_after = \"never\"\n[[link]]\nname = \"w\"\nmetered = true\ncap = \"2 GB\"\n");
    assert_eq!((config.policy.default_demand, config.reconnect_after), (ByteCount::new(5), None));
    assert_eq!((config.policy.links[0].cap, config.policy.links[0].reset_day), (Some(ByteCount::new(2_000_000_000)), 1));
    assert_eq!(parse("reconnect_after = 9").reconnect_after, Some(Duration::from_secs(9)));
}

#[test]
fn an_unreadable_file_is_reported_with_its_name() {
    let error = config::load(Path::new("/nonexistent/braid.toml"), None).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/braid.toml") && error.findings().is_empty(), "{error}");
}

#[test]
fn a_condition_on_the_context_is_read() {
    let text = "[[app]]\nmatch = { name = \"curl\" }\nwhen = { moving = true, place = \"work\", running = \"game\", time = \"22:00-06:00\", \
                battery_below = 0.3, ssid = \"home\" }\n[[link]]\nname = \"wlan0\"\nwhen = { moving = false }\n";
    let config = parse(text);
    let when = &config.policy.apps[0].when;
    assert_eq!(
        when.to_string(),
        "moving = true, place = \"work\", running = \"game\", time = \"22:00-06:00\", battery_below = 0.3, ssid = \"home\""
    );
    assert_eq!(config.policy.links[0].when.to_string(), "moving = false");
}

#[test]
fn wrong_conditions_on_the_context_are_refused_with_line_and_remedy() {
    for (when, reason, remedy) in [
        ("{}", "a when without conditions", "when = { moving = true }"),
        ("true", "when is a boolean, but must be a table", "a table"),
        ("{ time = \"07:00-7:00\" }", "it begins and ends at the same time", "two different times"),
        ("{ time = \"night\" }", "not of the form", "22:00-06:00"),
        ("{ time = 22 }", "must be a text in quotes", "text"),
        ("{ battery_below = 30 }", "not a number from 0 to 1", "from 0 to 1"),
        ("{ battery_below = 0 }", "no battery's level is below 0", "such as 0.3"),
        ("{ batery_below = 0.3 }", "no condition \"batery_below\" in when", "braid context set"),
        ("{ movng = true }", "no condition \"movng\" in when", "braid context set"),
        ("{ Docked = true }", "not the name of a fact", "lower-case"),
        ("{ docked = 3 }", "docked must have a value", "true, false, or a text"),
        ("{ ssid = \"\" }", "not the name of a wireless network", "1 to 32"),
        ("{ running = \"bin/game\" }", "not a program", "absolute path"),
    ] {
        for (head, line) in [("[[app]]\nmatch = { name = \"curl\" }", 3), ("[[link]]\nname = \"wlan0\"", 3)] {
            let findings = refused(&format!("{head}\nwhen = {when}\n"));
            let found = findings.iter().find(|finding| finding.reason.contains(reason)).unwrap_or_else(|| panic!("{when}: {findings:?}"));
            assert_eq!(found.line, line, "{when}");
            assert!(found.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{when}: {found:?}");
        }
    }
    let near = refused("[[app]]\nmatch = { name = \"curl\" }\nwhen = { movng = true }\n");
    assert_eq!(near[0].nearest.as_deref(), Some("moving"));
}

#[test]
fn entries_with_different_conditions_may_match_the_same_flows_and_links() {
    let curl = |when: &str| format!("[[app]]\nmatch = {{ name = \"curl\" }}\n{when}\n");
    let moving = "when = { moving = true }";
    assert!(parse(&(curl(moving) + &curl("when = { moving = false }") + &curl(""))).warnings.is_empty());
    let same = refused(&(curl(moving) + &curl(moving)));
    assert!(same[0].reason.contains("the entry in line 1 matches the same flows"), "{same:?}");
    let never = parse(&(curl("") + &curl(moving))).warnings;
    assert!(never[0].reason.contains("this entry can never match"), "{never:?}");
    let link = |when: &str| format!("[[link]]\nname = \"wlan0\"\nrole = \"excluded\"\n{when}\n");
    let config = parse(&(link(moving) + "[[link]]\nname = \"wlan0\"\n[[app]]\nmatch = { name = \"curl\" }\nlinks = [\"wlan0\"]\n"));
    assert!(config.warnings.is_empty(), "a link that is excluded in one context may be used in another: {:?}", config.warnings);
}
