use super::*;
use crate::snmp_slicer as config;
use braid_snmp::Access;

const EXAMPLE: &str = include_str!("../../../../snmp-slicer.example.toml");

fn parse(text: &str) -> SlicerConfig {
    config::parse("snmp.toml", text).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Expects one error, at this line, with these parts of its reason and remedy.
#[track_caller]
fn refuses(text: &str, line: usize, reason: &str, remedy: &str) {
    let findings = match config::parse("snmp.toml", text) {
        Ok(config) => panic!("taken: {config:?}"),
        Err(errors) => errors.findings().to_vec(),
    };
    let [finding] = &findings[..] else { panic!("{text}: {findings:?}") };
    let fits = finding.line == line && finding.reason.contains(reason) && finding.remedy.as_ref().is_some_and(|text| text.contains(remedy));
    assert!(fits, "{text}: {finding:?}");
}

/// The example with its disabled lines.
fn whole() -> String {
    EXAMPLE.lines().map(|line| format!("{}\n", line.strip_prefix("#: ").unwrap_or(line))).collect()
}

#[test]
fn the_example_is_accepted_with_its_lines_and_without() {
    assert_eq!(parse(EXAMPLE), SlicerConfig::default());
    let config = parse(&whole());
    assert_eq!(config.devices.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["ap1", "ap2"]);
    let user = CredentialFiles::User {
        name: "slicer".into(),
        auth: AuthProtocol::Sha256,
        auth_file: "/etc/braid/snmp/ap1.auth".into(),
        privacy_file: Some("/etc/braid/snmp/ap1.privacy".into()),
    };
    assert_eq!(config.devices[0].credentials, user);
    assert_eq!(config.devices[0].notifications, Some("192.0.2.1:1162".parse().unwrap()));
    let blue = &config.slices[0];
    assert_eq!(blue.managers.iter().map(|one| one.write).collect::<Vec<_>>(), [true, false]);
    assert_eq!(blue.managers[1].from.iter().map(ToString::to_string).collect::<Vec<_>>(), ["127.0.0.0/8", "::1/128"]);
    let access = |device: usize, name: &str| blue.views[&device].access(&name.parse().unwrap());
    for (name, expected) in [
        ("1.3.6.1.2.1.1.5.0", Access::Read),
        ("1.3.6.1.2.1.1.9.1", Access::None),
        ("1.3.6.1.2.1.2.2.1.7.3", Access::Write),
        ("1.3.6.1.2.1.2.2.1.7.12", Access::None),
        ("1.3.6.1.2.1.2.2.1.3.3", Access::None),
    ] {
        assert_eq!([access(0, name), access(1, name)], [expected; 2], "{name}");
    }
    let power = "1.3.6.1.4.1.8072.9999.9999.1.1.4.1";
    assert_eq!([access(0, power), access(1, power)], [Access::Write, Access::None]);
    assert_eq!(config.shared.len(), 4, "the last entry counts for both devices");
    assert_eq!(config.shared[0].policy, Policy::Owner(0));
    let Policy::Virtual { operational, to } = &config.shared[3].policy else { panic!() };
    assert!(operational.is_some() && to.len() == 2);
}

#[test]
fn slices_that_may_set_the_same_need_a_policy() {
    let text = whole();
    let alone = text.rsplit_once("[[shared]]").unwrap().0;
    let errors = config::parse("snmp.toml", alone).unwrap_err().to_string();
    assert!(
        errors.contains("slices blue and green may both set 1.3.6.1.2.1.2.2.1.7.3 at ap1") && errors.contains("[[shared]]"),
        "{errors}"
    );
    let device = "[[device]]\nname = \"a\"\nlisten = \"127.0.0.1:1\"\nagent = \"127.0.0.1:2\"\ncommunity_file = \"/c\"\n";
    let slice = |name: &str, view: &str| format!("[[slice]]\nname = \"{name}\"\n[[slice.view]]\n{view}\nwrite = true\n");
    let both = |one: &str, other: &str| [device, &slice("one", one), &slice("other", other)].concat();
    refuses(&both("subtree = \"1.3.6.1\"", "subtree = \"1.3.6.1.5\""), 11, "may both set 1.3.6.1.5", "only read it");
    // What one of them leaves out is the other one's; what is beside is no conflict.
    parse(&both("subtree = \"1.3.6.1\"\nexcept = [\"1.3.6.1.5\"]", "subtree = \"1.3.6.1.5\""));
    parse(&both("subtree = \"1.3.6.1.4\"", "subtree = \"1.3.6.1.44\""));
}

#[test]
fn mistakes_are_named_with_their_lines() {
    let device = "[[device]]\nname = \"a\"\nlisten = \"127.0.0.1:1\"\nagent = \"127.0.0.1:2\"\ncommunity_file = \"/c\"\n";
    for (text, line, reason, remedy) in [
        (
            "[[device]]\nname = \"a\"\nlisten = \"127.0.0.1:1\"\nagent = \"127.0.0.1:2\"\n".to_owned(),
            1,
            "neither community_file nor user",
            "SNMPv3",
        ),
        (format!("{device}user = \"x\"\n"), 6, "both", "one entry"),
        (format!("{device}auth = \"sha1\"\n"), 6, "belongs to a user", "remove"),
        (device.replace("\"/c\"", "\"c\""), 5, "does not begin with", "/etc/braid"),
        (format!("{device}{}", device.replace("127.0.0.1:1", "127.0.0.1:3")), 7, "line 2 has a device with this name", "remove"),
        (format!("{device}[[slice]]\nname = \"s\"\n[[slice.view]]\nsubtree = \"1.3\"\n"), 9, "too short", "1.3.6"),
        (format!("{device}[[slice]]\nname = \"s\"\n[[slice.view]]\nsubtree = \"system\"\n"), 9, "is not", "snmptranslate"),
        (format!("{device}[[slice]]\nname = \"s\"\n[[slice.view]]\ntable = \"1.3.6.1\"\n"), 8, "no rows", "rows ="),
        (format!("{device}[[slice]]\nname = \"s\"\n[[slice.view]]\ntable = \"1.3.6.1\"\nrows = [\"x\"]\n"), 10, "no index", "3"),
        (format!("{device}[[slice]]\nname = \"s\"\n[[slice.view]]\nsubtree = \"1.3.6\"\ndevices = [\"b\"]\n"), 10, "b", "[[device]]"),
        (format!("{device}[[shared]]\nobject = \"1.3.6.1.1\"\npolicy = \"owner\"\nslice = \"s\"\n"), 9, "s", "[[slice]]"),
        (
            format!("{device}[[shared]]\nobject = \"1.3.6.1.1\"\npolicy = \"lowest\"\nleast = 3\nmost = 2\n"),
            6,
            "least is above most",
            "exchange",
        ),
        (
            format!(
                "{device}[[shared]]\nobject = \"1.3.6.1.1\"\npolicy = \"fixed\"\n[[shared]]\nobject = \"1.3.6.1.1\"\npolicy = \"fixed\"\n"
            ),
            9,
            "line 6",
            "remove",
        ),
        ("answer_size = 100\n".to_owned(), 1, "answer_size", "484"),
    ] {
        refuses(&text, line, reason, remedy);
    }
}
