//! Energy profiles from files and services: error messages, hidden content, and the profile that a device gets.

use braid_control::profiles::{Content, PROFILE_LIMIT, ProfileError, from_json, from_toml, shipped, to_toml};
use braid_decide::energy::{Profile, Profiles, Technology};
use braid_model::Rate;

/// A row of a file with default values; `more` adds or replaces fields.
fn row(model: &str, technology: &str, more: &[(&str, &str)]) -> String {
    let (model, technology) = (format!("{model:?}"), format!("{technology:?}"));
    let usual = [("model", &*model), ("technology", &*technology), ("source", "\"me\"")];
    let powers = [("idle_mw", "100"), ("receive_mw", "300"), ("transmit_mw", "500")];
    let kept = usual.into_iter().chain(powers).filter(|(key, _)| !more.iter().any(|(other, _)| other == key));
    let lines = kept.chain(more.iter().copied()).map(|(key, value)| format!("{key} = {value}\n"));
    format!("[[profile]]\n{}\n", lines.collect::<String>())
}

fn read(text: &str) -> Result<Vec<Profile>, String> {
    from_toml("f.toml", text, Content::Shown).map_err(|error| error.to_string())
}

fn refused(text: &str) -> String {
    read(text).unwrap_err()
}

/// The shipped profiles, preceded by those of a file.
fn with(text: &str) -> Profiles {
    let mut profiles = shipped();
    profiles.extend(read(text).unwrap());
    profiles
}

#[test]
fn a_file_without_profiles_is_empty_but_valid() {
    assert_eq!((read(""), read("# nothing yet\n")), (Ok(vec![]), Ok(vec![])));
    assert!(from_json("url", b"{\"profiles\": []}").is_ok_and(|all| all.is_empty()));
    assert!(from_json("url", b"{}").is_err(), "another JSON document is refused");
}

#[test]
fn impossible_values_are_refused_with_their_field() {
    for (field, value) in [
        ("idle_mw", "-1"),
        ("idle_mw", "nan"),
        ("transmit_mw", "inf"),
        ("receive_mw", "100001"),
        ("receive_mw", "99"),
        ("transmit_mw", "99.9"),
        ("down_mw_per_mbps", "-0.1"),
        ("up_mw_per_mbps", "nan"),
        ("limit_down_mbps", "0"),
        ("limit_up_mbps", "1000001"),
        ("limit_up_mbps", "nan"),
        ("model", "\"\""),
        ("source", "\" \""),
        ("model", "\"a\\u0007b\""),
    ] {
        let said = refused(&row("x", "wifi", &[(field, value)]));
        assert!(said.starts_with(&format!("f.toml: profile 1: {field}: ")), "{field} = {value}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn one_wrong_row_refuses_all_and_each_wrong_row_is_reported() {
    let text = [row("a", "wifi", &[]), row("b", "wifi", &[("idle_mw", "-1")]), row("c", "wifi", &[]), "[[profile]]\n".to_owned()].concat();
    let Err(ProfileError::BadRows { place, rows }) = from_toml("f.toml", &text, Content::Shown) else { panic!() };
    let numbers: Vec<_> = rows.iter().map(|row| row.split(": ").next().unwrap()).collect();
    assert_eq!((place.as_str(), numbers), ("f.toml", vec!["profile 2", "profile 4"]));
}

#[test]
fn a_hidden_document_is_not_quoted() {
    let secret = "hunter2";
    for text in [
        format!("version = 1\npassword = {secret}\n"),
        format!("# first\n\n{secret} = 3\n"),
        format!("root:{secret}:19000:0:99999:7:::\n"),
        row("x", "wifi", &[(secret, "1")]),
        row("x", secret, &[]),
        row("x", "wifi", &[("idle_mw", "\"hunter2\"")]),
    ] {
        let said = from_toml("f.toml", &text, Content::Hidden).unwrap_err().to_string();
        assert!(!said.contains(secret) && said.contains("f.toml"), "{said}");
        assert!(refused(&text).contains(secret), "{text} is quoted if that is allowed");
    }
    let line = |text| from_toml("f.toml", text, Content::Hidden).unwrap_err().to_string();
    assert!(line("# ü\n\n  = 3\n").contains("line 3") && line("x = 1").contains("line 1"));
}

#[test]
fn rows_of_a_service_follow_the_same_rules_as_a_file() {
    let profiles = read(&[row("a", "wifi", &[]), row("b", "3g", &[("limit_up_mbps", "3")])].concat()).unwrap();
    let mut rows: Vec<_> = profiles.iter().map(|profile| serde_json::to_value(profile.row()).unwrap()).collect();
    let answer = |rows: &[serde_json::Value]| serde_json::json!({ "profiles": rows, "more": 1 }).to_string();
    assert_eq!(from_json("url", answer(&rows).as_bytes()).unwrap(), profiles, "additional fields are ignored");
    rows[1]["receive_mw"] = 7.into();
    rows.push(serde_json::json!({ "model": "x" }));
    let said = from_json("url", answer(&rows).as_bytes()).unwrap_err().to_string();
    assert!(said.starts_with("url: profile 2: receive_mw: 7 is less than idle_mw, 100\nprofile 3: "), "{said}");
}

#[test]
fn the_number_of_profiles_is_limited() {
    let profile = read(&row("x", "wifi", &[])).unwrap().remove(0);
    let answer = |count: usize| serde_json::json!({ "profiles": vec![profile.row(); count] }).to_string();
    assert_eq!(from_json("url", answer(PROFILE_LIMIT).as_bytes()).unwrap().len(), PROFILE_LIMIT);
    let said = from_json("url", answer(PROFILE_LIMIT + 1).as_bytes()).unwrap_err().to_string();
    assert!(said.contains("10001 profiles exceed the limit of 10000"), "{said}");
}

#[test]
fn names_with_quotes_and_other_scripts_survive_writing_and_reading() {
    let more = [("source", "'''\"it\" \\ says'''"), ("limit_down_mbps", "7.25"), ("up_mw_per_mbps", "0.1")];
    let all = read(&[row("WLAN-Gerät \"3\" #1", "wifi", &more), row("*", "lte", &[])].concat()).unwrap();
    assert_eq!(all[0].row().source, "\"it\" \\ says");
    assert_eq!(read(&to_toml(&all)).unwrap(), all);
    assert_eq!(to_toml([]), "");
}

#[test]
fn a_device_gets_the_profile_of_its_model_or_else_of_its_technology() {
    let profiles = with(&[row("Intel AX*", "wifi", &[("idle_mw", "7")]), row("Intel AX", "lte", &[])].concat());
    let model = |model, technology| profiles.find(model, technology).unwrap().row().model.clone();
    assert_eq!(model(Some("intel ax210"), Technology::Wifi), "Intel AX*", "case is ignored");
    assert_eq!(model(Some("Intel AX210"), Technology::Lte), "*", "the whole model and the technology must match");
    assert_eq!([model(Some("nobody's"), Technology::Wifi), model(None, Technology::Wifi)], ["*", "*"]);
    assert_eq!(model(Some("Intel AX"), Technology::Lte), "Intel AX");
    assert!(Profiles::default().find(Some("Intel AX"), Technology::Lte).is_none());
}

#[test]
fn profiles_of_a_file_precede_shipped_ones_and_replace_the_same_row() {
    let before = shipped().iter().count();
    let general = with(&row("*", "wifi", &[("idle_mw", "42")]));
    assert_eq!(general.find(None, Technology::Wifi).unwrap().row().idle_mw, 42.0);
    assert_eq!(general.iter().count(), before, "it replaces one");
    let wider = with(&row("Netgear*", "wifi", &[]));
    assert_eq!(wider.find(Some("Netgear MA701"), Technology::Wifi).unwrap().row().model, "Netgear*");
    assert_eq!(wider.iter().count(), before + 1);
    let order = with(&[row("ax*", "wifi", &[]), row("ax1", "wifi", &[])].concat());
    assert_eq!(order.find(Some("ax1"), Technology::Wifi).unwrap().row().model, "ax*", "the first match in a file applies");
}

#[test]
fn a_configuration_names_a_technology_or_a_model() {
    let profiles = with(&row("Modem*", "5g", &[]));
    let named = |name: &str| profiles.named(name).map(|profile| (profile.row().model.clone(), profile.row().technology));
    assert_eq!(named("5g"), Some(("*".to_owned(), Technology::FiveG)));
    assert_eq!(named("modem 7"), Some(("Modem*".to_owned(), Technology::FiveG)));
    assert_eq!((named("5G+"), named("")), (None, None), "the row for any model has no name");
}

#[test]
fn power_grows_up_to_the_measured_rate_and_a_byte_costs_the_power_above_idle() {
    let slopes = [("down_mw_per_mbps", "10"), ("up_mw_per_mbps", "100"), ("limit_up_mbps", "2")];
    let profile = read(&row("x", "wifi", &slopes)).unwrap().remove(0);
    let milliwatts = |down, up| (profile.power_at(Rate::from_mbps(down), Rate::from_mbps(up)).watts() * 1000.0).round();
    assert_eq!([milliwatts(0, 0), milliwatts(10, 0), milliwatts(0, 1), milliwatts(0, 9)], [100.0, 400.0, 600.0, 700.0]);
    assert_eq!(milliwatts(3, 1), 100.0 + 250.0 + 30.0 + 100.0, "the radio receives three quarters of the time");
    let cost = profile.cost(Rate::from_mbps(8), Rate::ZERO);
    // 380 mW minus the idle 100 mW, for one microsecond.
    assert_eq!(((cost.down.get() * 1e12).round(), cost.up.get()), (280_000.0, 0.0), "without capacity there is no cost");
}
