use braid_network::sfnet::{HostRights, Sees};

use super::*;
use crate::controller as config;

const EXAMPLE: &str = include_str!("../../../../controller.example.toml");
const ONE: Mac = Mac([2, 0, 0x5e, 0x10, 0, 2]);
const OTHER: Mac = Mac([2, 0, 0x5e, 0x10, 0, 3]);

fn parse(text: &str) -> ControllerConfig {
    config::parse("controller.toml", text).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The findings of a file that must be refused.
fn refused(text: &str) -> Vec<Finding> {
    match config::parse("controller.toml", text) {
        Ok(config) => panic!("taken: {config:?}"),
        Err(errors) => errors.findings().to_vec(),
    }
}

/// Expects one error, at this line, with these parts of its reason and remedy.
#[track_caller]
fn refuses(text: &str, line: usize, reason: &str, remedy: &str) {
    let [finding] = &refused(text)[..] else { panic!("{text}: {:?}", refused(text)) };
    let fits = finding.line == line && finding.reason.contains(reason) && finding.remedy.as_ref().is_some_and(|text| text.contains(remedy));
    assert!(fits, "{text}: {finding:?}");
}

#[test]
fn an_empty_file_configures_nothing() {
    assert_eq!(parse(""), ControllerConfig::default());
}

#[test]
fn the_example_is_accepted_with_its_lines_and_without() {
    let plain = parse(EXAMPLE);
    let expected = ControllerConfig {
        listen: vec!["127.0.0.1:6653".parse().unwrap()],
        manager: Some("hard".into()),
        hold: Some(Duration::from_secs(2)),
        ..ControllerConfig::default()
    };
    assert_eq!(plain, expected);
    let all: String = EXAMPLE.lines().map(|line| format!("{}\n", line.strip_prefix("#: ").unwrap_or(line))).collect();
    let access = Access {
        id: AccessId(Mac([2, 0, 0x5e, 0x10, 0, 1])),
        place: Place::new(1, 4),
        kind: AccessKind::Wifi,
        channel: Channel(36),
        entry: Duration::from_millis(700),
        capacity: Rate::from_mbps(100),
        reservable: Rate::from_mbps(50),
    };
    let host = HostSettings {
        mac: ONE,
        key: Some("aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypq".parse().unwrap()),
        manager: Some("n-cast".into()),
        slice: Some("guests".into()),
        limit: Some(Rate::from_mbps(20)),
        programs: Some(HostRights::Sees(Sees::Network)),
    };
    let flow = FlowSpec { to: ONE, from: Some(OTHER), protocol: Some(17), port: Some(5004) };
    let expected = ControllerConfig {
        tls: Some(TlsFiles {
            certificate: "/etc/braid/net-cert.pem".into(),
            key: "/etc/braid/net-key.pem".into(),
            ca: "/etc/braid/switch-ca.pem".into(),
        }),
        clients_listen: vec!["192.0.2.1:2209".parse().unwrap()],
        sfnet: Some(SfnetSettings {
            listen: vec!["192.0.2.1:2210".parse().unwrap()],
            tls_listen: vec!["192.0.2.1:2211".parse().unwrap()],
            discovery: true,
            sees: Sees::Own,
            services: ["access", "multicast", "multipath", "notices", "reserve"].map(str::to_owned).into(),
            groups: vec!["239.192.0.0/14".parse().unwrap()],
        }),
        accesses: vec![access],
        weights: vec![(Place::new(1, 3), Weight(100))],
        slices: vec![SliceSettings { name: "guests".into(), manager: Some("hoolock".into()) }],
        hosts: vec![host],
        groups: vec![GroupSpec { address: "239.1.2.3".parse().unwrap(), members: vec![ONE, OTHER] }],
        flows: vec![(flow, FlowMode::Copies(2))],
        ..expected
    };
    assert_eq!(parse(&all), expected);
}

#[test]
fn weights_of_links_have_one_end_each_and_only_make_links_worse() {
    let link = |weight: &str| format!("[[link]]\nswitch = \"a\"\nport = 3\n{weight}");
    assert_eq!(parse(&link("weight = 10\n")).weights, [(Place::new(10, 3), Weight(10))]);
    refuses(&link(""), 1, "weight", "write weight = 100");
    refuses(&link("weight = 9\n"), 4, "from 10 to 100000", "whole number");
    refuses(&(link("weight = 20\n") + &link("weight = 30\n")), 5, "line 1 has a link at this port, too", "remove one");
}

#[test]
fn every_manager_is_accepted_and_others_are_refused() {
    for name in NAMES {
        assert_eq!(parse(&format!("manager = \"{name}\"\n")).manager.as_deref(), Some(name));
    }
    refuses("manager = \"fast\"\n", 1, "there is no manager \"fast\"", "hard, hoolock, n-cast, predict, balance");
    let near = refused("[[slice]]\nname = \"a\"\nmanager = \"hoolok\"\n");
    assert_eq!((near[0].line, near[0].nearest.as_deref()), (3, Some("hoolock")));
}

#[test]
fn wrong_settings_of_the_controller_are_refused() {
    refuses("listen = \"192.0.2.1:6653\"\n", 1, "must be a list", "write listen = [\"192.0.2.1:6653\"]");
    refuses("listen = [\"192.0.2.1\"]\n", 1, "is not an address with a port", "192.0.2.1:6653");
    refuses("listen = [\"[::1]:1\", \"[::1]:1\"]\n", 1, "line 1 has this address, too", "remove one");
    refuses("hold = \"long\"\n", 1, "is not a length of time", "500 ms");
    refuses("lsten = []\n", 1, "there is no key \"lsten\"", "listen, manager, hold, tls, clients, sfnet");
    refuses("[clients]\nport = 3\n", 2, "there is no key \"port\" in [clients]", "listen");
    refuses("[[tls]]\n", 1, "there can be only one [tls]", "one pair of square brackets");
    assert!(refused("listen = [\n")[0].remedy.as_ref().is_some_and(|remedy| remedy.starts_with("controller.example.toml")));
    let tls = "[tls]\ncertificate = \"/c\"\nkey = \"/k\"\n";
    refuses(tls, 1, "[tls] has no ca", "ca = ");
    refuses(&format!("{tls}ca = \"ca.pem\"\n"), 4, "does not begin with \"/\"", "whole path");
}

#[test]
fn wrong_access_points_are_refused() {
    let access = |more: &str| format!("[[access]]\nid = \"02:00:00:00:00:01\"\nswitch = \"00a1\"\nport = 7\ncapacity = 1000\n{more}");
    let read = parse(&access("")).accesses[0];
    let expected = (Place::new(0xa1, 7), AccessKind::Wired, Channel(0), Duration::ZERO, Rate::from_bps(1000));
    assert_eq!((read.place, read.kind, read.channel, read.entry, read.capacity), expected);
    refuses("[access]\n", 1, "each access needs its own entry", "write [[access]]");
    for (line, key) in [(2, "id"), (3, "switch"), (4, "port"), (5, "capacity")] {
        let text: Vec<_> = access("").lines().enumerate().filter(|(at, _)| at + 1 != line).map(|(_, text)| text.to_owned()).collect();
        refuses(&text.join("\n"), 1, &format!("an [[access]] entry has no {key}"), &format!("write {key} = "));
    }
    for (key, value, reason, remedy) in [
        ("id", "\"02:00\"", "is not a hardware address", "six pairs"),
        ("id", "\"01:00:5e:00:00:01\"", "is the address of several stations", "one network device"),
        ("switch", "1", "must be a text", "text in quotes"),
        ("switch", "\"\"", "is not the datapath of a switch", "1 to 16 hexadecimal digits"),
        ("switch", "\"+1\"", "is not the datapath of a switch", "braid net status"),
        ("switch", "\"12345678901234567\"", "is not the datapath of a switch", "16"),
        ("port", "0", "is not a whole number from 1", "4294967040"),
        ("capacity", "0", "capacity is zero", "above 0"),
        ("capacity", "\"fast\"", "is not a rate", "20 Mbit/s"),
    ] {
        let text: Vec<_> =
            access("").lines().map(|text| if text.starts_with(key) { format!("{key} = {value}") } else { text.to_owned() }).collect();
        let line = text.iter().position(|text| text.starts_with(key)).unwrap() + 1;
        refuses(&text.join("\n"), line, reason, remedy);
    }
    refuses(&access("kind = \"lte\"\n"), 6, "there is no kind \"lte\"", "wired, wifi, cellular");
    refuses(&access("channel = 70000\n"), 6, "from 0 to 65535", "whole number");
    let other = access("").replace("00:01", "00:02").replace("port = 7", "port = 8");
    assert_eq!(parse(&(access("") + &other)).accesses.len(), 2);
    refuses(&(access("") + &other.replace("00:02", "00:01")), 7, "line 2 has an access point with this id, too", "remove one");
    refuses(&(access("") + &other.replace("port = 8", "port = 7")), 6, "line 1 has an access point at this port, too", "remove one");
}

#[test]
fn wrong_hosts_and_slices_are_refused() {
    let guests = "[[slice]]\nname = \"guests\"\n";
    let host = |more: &str| format!("{guests}[[host]]\nmac = \"{ONE}\"\n{more}");
    assert_eq!(parse(&host("")).hosts, [HostSettings { mac: ONE, key: None, manager: None, slice: None, limit: None, programs: None }]);
    refuses("[[slice]]\n", 1, "a [[slice]] entry has no name", "write name");
    refuses("[[slice]]\nname = \"\"\n", 2, "is no name", "1 to 64 bytes");
    refuses(&format!("{guests}{guests}"), 4, "line 2 has a slice with this name, too", "remove one");
    refuses("[[host]]\n", 1, "a [[host]] entry has no mac", "write mac");
    refuses(&host("limit = 999\n"), 5, "is too low", "at least 1.0 kbit/s");
    refuses(&host("limit = 0\n"), 5, "limit is zero", "above 0");
    refuses(&host("key = \"abc\"\n"), 5, "52 letters and digits", "braid net key");
    refuses(&host(&format!("[[host]]\nmac = \"{ONE}\"\n")), 6, "line 4 has a host with this address, too", "remove one");
    let key = "key = \"aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypq\"\n";
    refuses(&host(&format!("{key}[[host]]\nmac = \"{OTHER}\"\n{key}")), 8, "line 5 has a host with this key, too", "remove one");
    let near = refused(&host("slice = \"guest\"\n"));
    assert_eq!((near[0].line, near[0].nearest.as_deref()), (5, Some("guests")));
    assert!(near[0].remedy.as_ref().unwrap().contains("[[slice]]"), "{near:?}");
}

#[test]
fn wrong_groups_and_flows_are_refused() {
    let group = |address: &str| format!("[[group]]\naddress = \"{address}\"\nmembers = [\"{ONE}\"]\n");
    assert_eq!(parse(&group("ff0e::1")).groups[0].members, [ONE]);
    refuses(&group("10.0.0.1"), 2, "is no multicast address", "239.1.2.3");
    refuses(&group("nowhere"), 2, "is not a multicast address", "ff0e::1");
    // Both have the same 23 bits on Ethernet.
    refuses(&(group("239.1.2.3") + &group("224.1.2.3")), 5, "line 2 has a group with this address on Ethernet, too", "remove one");
    refuses("[[group]]\naddress = \"239.1.2.3\"\n", 1, "a [[group]] entry has no members", "write members");
    let twice = format!("[[group]]\naddress = \"239.1.2.3\"\nmembers = [\"{ONE}\",\n\"{ONE}\"]\n");
    refuses(&twice, 4, "line 3 has this member, too", "remove one");
    let flow = |more: &str| format!("[[flow]]\nto = \"{ONE}\"\n{more}");
    let read = |more: &str| parse(&flow(more)).flows[0];
    assert_eq!(read(""), (FlowSpec { to: ONE, from: None, protocol: None, port: None }, FlowMode::Movable));
    assert_eq!(read("protocol = \"icmp\"\n").0.protocol, Some(1));
    assert_eq!(read("protocol = 132\n").0.protocol, Some(132));
    assert_eq!(read("protocol = 6\nport = 443\n").0.port, Some(443));
    refuses("[[flow]]\n", 1, "a [[flow]] entry has no to", "write to");
    refuses(&flow("protocol = 256\n"), 3, "from 0 to 255", "whole number");
    refuses(&flow("protocol = \"sctp\"\n"), 3, "there is no protocol \"sctp\"", "icmp, tcp, udp");
    refuses(&flow("port = 80\n"), 3, "needs a protocol that has ports", "protocol = \"tcp\"");
    refuses(&flow("protocol = \"icmp\"\nport = 80\n"), 4, "needs a protocol that has ports", "udp");
    refuses(&flow("copies = 1\n"), 3, "from 2 to 8", "whole number");
    refuses(&(flow("copies = 2\n") + &flow("")), 4, "line 1 has an entry with the same flow, too", "remove one");
}

#[test]
fn an_access_point_says_what_clients_may_reserve() {
    let text = |more: &str| format!("[[access]]\nid = \"02:00:5e:10:00:01\"\nswitch = \"1\"\nport = 4\ncapacity = \"20 Mbit/s\"\n{more}\n");
    let reservable = |more: &str| parse(&text(more)).accesses[0].reservable;
    assert_eq!(reservable(""), Rate::from_mbps(10));
    assert_eq!(reservable("reservable = \"25 %\""), Rate::from_mbps(5));
    assert_eq!(reservable("reservable = \"18 Mbit/s\""), Rate::from_mbps(18));
    assert_eq!((reservable("reservable = 0"), reservable("reservable = \"0 %\"")), (Rate::ZERO, Rate::ZERO));
    for (wrong, said) in [
        ("\"91 %\"", "is not a percentage from 0 to 90"),
        ("\"-1 %\"", "is not a percentage from 0 to 90"),
        ("\"NaN %\"", "is not a percentage from 0 to 90"),
        ("\"19 Mbit/s\"", "leaves too little to hosts without a reservation"),
        ("-1", "a rate such as"),
        ("\"much\"", "a rate such as"),
    ] {
        let errors = super::parse("controller.toml", &text(&format!("reservable = {wrong}"))).unwrap_err().to_string();
        assert!(errors.contains(said), "{wrong}: {errors}");
    }
}

#[test]
fn programs_are_served_only_where_the_file_says_so() {
    assert_eq!((parse("").sfnet, parse("").rights()), (None, None));
    let plain = parse("[sfnet]\n");
    let sfnet = plain.sfnet.clone().unwrap();
    assert_eq!((sfnet.listen, sfnet.tls_listen, sfnet.discovery), (vec!["127.0.0.1:2210".parse().unwrap()], vec![], true));
    assert_eq!((sfnet.sees, sfnet.services.len(), sfnet.groups), (Sees::Own, 5, vec!["239.192.0.0/14".parse().unwrap()]));
    let sfnet = parse("[sfnet]\ntls_listen = [\"192.0.2.1:2211\"]\n").sfnet.unwrap();
    assert_eq!((sfnet.listen, sfnet.tls_listen.len()), (vec![], 1), "with TLS only");
    let text = format!("[sfnet]\nservices = [\"notices\"]\nsees = \"network\"\n[[host]]\nmac = \"{ONE}\"\nprograms = \"none\"\n");
    let rights = parse(&text).rights().unwrap();
    assert_eq!((rights.sees, rights.hosts), (Sees::Network, [(ONE, HostRights::Nothing)].into()));
    assert_eq!(rights.services, Some(["notices".to_owned()].into()));
    refuses("[sfnet]\nservices = [\"storage\"]\n", 2, "there is no services \"storage\"", "access, multicast, multipath, notices, reserve");
    refuses("[sfnet]\nsees = \"all\"\n", 2, "\"all\"", "own, network");
    refuses("[sfnet]\ngroups = [\"10.0.0.0/8\"]\n", 2, "no multicast addresses", "239.192.0.0/14");
    refuses("[sfnet]\ngroups = [\"239.0.0.0/3\"]\n", 2, "no multicast addresses", "239.192.0.0/14");
    refuses("[sfnet]\nlisten = [\"0.0.0.0:2210\"]\ndiscovery = true\n", 3, "get an IPv4 address", "discovery = false");
    refuses("[sfnet]\nprot = 1\n", 2, "there is no key \"prot\" in [sfnet]", "listen, tls_listen, discovery, sees, services, groups");
    refuses(&format!("[[host]]\nmac = \"{ONE}\"\nprograms = \"some\"\n"), 3, "\"some\"", "none, own, network");
}
