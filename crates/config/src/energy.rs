//! Reads the settings of energy and money: `utility`, `price`, `energy_profiles`, and `energy` of a `[[link]]`.

use std::path::PathBuf;

use braid_control::config::EnergyService;
use braid_decide::energy::{Profile, Profiles, Row, Technology};
use braid_decide::tradeoff::{UtilityFunction, UtilityRule, Weights};
use braid_model::address::Address;
use braid_model::key::PublicKey;

use super::World;
use super::reader::{Section, Value};
use super::world::ProfileFileError;

const NAMES: [(&str, UtilityFunction); 2] = [("battery", UtilityFunction::Level), ("match-default", UtilityFunction::MatchDefault)];

/// Reads `utility`: a number, a name, or a table.
pub(super) fn utility(value: &Value<'_>) -> Option<UtilityRule> {
    if value.is_table() {
        return rule(value.section("utility")?);
    }
    let utility = simple(value)?;
    Some(UtilityRule { utility, plugged_in: default_plugged(utility) })
}

/// A utility that follows the battery is replaced by 1 while plugged in; any other applies always.
fn default_plugged(utility: UtilityFunction) -> Option<f64> {
    matches!(utility, UtilityFunction::Level | UtilityFunction::Step { .. }).then_some(1.0)
}

fn simple(value: &Value<'_>) -> Option<UtilityFunction> {
    if value.is_text() { value.one_of(&NAMES) } else { value.number(0.0, 1.0).map(UtilityFunction::Fixed) }
}

fn rule(mut section: Section<'_>) -> Option<UtilityRule> {
    let (reader, span) = (section.reader, section.span.clone());
    let on_battery = section.take("on_battery");
    let step = ["threshold", "above", "below"].map(|key| section.take(key));
    let plugged = section.take("plugged_in");
    section.finish();
    let plugged_in = plugged.as_ref().map(|value| value.number(0.0, 1.0));
    let utility = match (on_battery, step) {
        (Some(value), [None, None, None]) => simple(&value)?,
        (None, [Some(threshold), above, below]) => {
            let share = |value: Option<Value<'_>>, default| value.map_or(Some(default), |value| value.number(0.0, 1.0));
            let (threshold, above, below) = (threshold.number(0.0, 1.0), share(above, 1.0), share(below, 0.0));
            UtilityFunction::Step { threshold: threshold?, above: above?, below: below? }
        }
        _ => {
            let remedy = "write { threshold = 0.3, above = 1.0, below = 0.2 }, or { on_battery = 0.5, plugged_in = 1.0 }";
            reader.refuse(&span, "a utility with neither threshold nor on_battery alone", remedy);
            return None;
        }
    };
    match plugged_in {
        Some(given) => Some(UtilityRule { utility, plugged_in: Some(given?) }),
        None => Some(UtilityRule { utility, plugged_in: default_plugged(utility) }),
    }
}

/// Reads `price`: `{ energy = 1.0, money = 0.0 }`.
pub(super) fn weights(value: &Value<'_>) -> Option<Weights> {
    let mut section = value.section("price")?;
    let mut weight = |key, default| section.take(key).map_or(Some(default), |value| value.number(0.0, f64::MAX));
    let default = Weights::default();
    let (energy, money) = (weight("energy", default.energy), weight("money", default.money));
    section.finish();
    let weights = Weights { energy: energy?, money: money? };
    if weights.energy + weights.money == 0.0 {
        return value.refuse("a price in which neither energy nor money has a weight".into(), "set one of them above 0".into());
    }
    Some(weights)
}

/// Reads `energy_profiles`, including the file that it names.
pub(super) fn profiles(value: &Value<'_>, world: &World) -> Option<(PathBuf, Profiles)> {
    let path = PathBuf::from(value.text()?);
    if !path.is_absolute() {
        return value
            .refuse(format!("{} is not an absolute path", path.display()), "write the absolute path, \"/etc/braid/energy.toml\"".into());
    }
    match world.profiles(&path) {
        Ok(profiles) => Some((path, profiles)),
        Err(error @ ProfileFileError::Wrong(_)) => value.refuse(error.to_string(), "`braid energy list --toml` shows the format".into()),
        Err(error @ ProfileFileError::NotInForce(_)) => {
            value.refuse(error.to_string(), "write it into the configuration file by hand, then run `braid reload`".into())
        }
    }
}

/// Reads `energy_service` and `energy_service_key`.
pub(super) fn service(url: Option<&Value<'_>>, key: Option<&Value<'_>>) -> Option<EnergyService> {
    let (url, key) = match (url, key) {
        (Some(url), Some(key)) => (url, key),
        (Some(url), None) => {
            let remedy = "write energy_service_key = \"...\", the key that `braid energy serve` prints there: answers without its signature are refused";
            return url.refuse("energy_service without energy_service_key".into(), remedy.into());
        }
        (None, Some(key)) => {
            return key.refuse("energy_service_key without energy_service".into(), "write energy_service = \"http://HOST:PORT\"".into());
        }
        (None, None) => return None,
    };
    let (url_text, key_text) = (url.text(), key.text());
    let address = url_text.and_then(|text| match text.strip_prefix("http://").map(|rest| rest.trim_end_matches('/').parse::<Address>()) {
        Some(Ok(address)) => Some(address),
        Some(Err(error)) => url.refuse(error.to_string(), "write energy_service = \"http://HOST:PORT\"".into()),
        None => url.refuse(
            format!("{text:?} is not a URL of an energy service"),
            "write \"http://HOST:PORT\": the signature protects the answers".into(),
        ),
    });
    let parsed = key_text.and_then(|text| match text.parse::<PublicKey>() {
        Ok(parsed) => Some(parsed),
        Err(error) => key.refuse(error.to_string(), "`braid energy serve` prints its key".into()),
    });
    Some(EnergyService { address: address?, key: parsed? })
}

/// Reads `energy` of a link: the name of a technology or model, or a table of numbers.
pub(super) fn link(value: &Value<'_>, profiles: &Profiles) -> Option<Profile> {
    if !value.is_table() {
        let name = value.text()?;
        let technologies = Technology::ALL.iter().map(|(name, _)| *name);
        let known = technologies.chain(profiles.iter().map(|profile| profile.row().model.as_str()).filter(|model| *model != "*"));
        let remedy = "write a technology (wifi, bluetooth, gprs, 3g, lte, 5g, ethernet) or a model from `braid energy list`, or numbers: { idle_mw = 400, receive_mw = 900, transmit_mw = 1200 }";
        return profiles.named(name).cloned().or_else(|| value.refuse_name("energy profile", name, known, remedy.to_owned()));
    }
    let mut section = value.section("energy")?;
    let mut milliwatts = |key: &'static str| section.take(key).map(|value| value.number(0.0, 100_000.0));
    let keys = ["idle_mw", "receive_mw", "transmit_mw", "down_mw_per_mbps", "up_mw_per_mbps"];
    let [idle, receive, transmit, down, up] = keys.map(&mut milliwatts);
    section.finish();
    let (Some(receive), Some(transmit)) = (receive, transmit) else {
        let remedy = "write { idle_mw = 400, receive_mw = 900, transmit_mw = 1200 }, or the name of a profile";
        return value.refuse("energy without receive_mw and transmit_mw".into(), remedy.into());
    };
    let or_none = |value: Option<Option<f64>>| value.unwrap_or(Some(0.0));
    let row = Row {
        model: "*".to_owned(),
        technology: Technology::Ethernet,
        idle_mw: or_none(idle)?,
        receive_mw: receive?,
        transmit_mw: transmit?,
        down_mw_per_mbps: or_none(down)?,
        up_mw_per_mbps: or_none(up)?,
        limit_down_mbps: None,
        limit_up_mbps: None,
        source: "the configuration".to_owned(),
    };
    Profile::try_from(row)
        .map_err(|error| error.to_string())
        .map_or_else(|reason| value.refuse(reason, "an active interface needs at least the power of an idle one".into()), Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate as config;
    use braid_control::config::{Config, Finding};
    use braid_decide::tradeoff::Supply;

    fn world() -> World {
        World { strict: true, ..World::default() }
    }

    fn parse(text: &str) -> Config {
        config::parse("f", text, &world()).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(text: &str) -> Finding {
        let findings = config::parse("f", text, &world()).unwrap_err().findings().to_vec();
        assert_eq!(findings.len(), 1, "{findings:#?}");
        findings.into_iter().next().unwrap()
    }

    #[test]
    fn utilities_are_read_in_every_form() {
        let step = UtilityFunction::Step { threshold: 0.3, above: 1.0, below: 0.2 };
        for (text, utility, plugged_in) in [
            ("0.5", UtilityFunction::Fixed(0.5), None),
            ("1", UtilityFunction::Fixed(1.0), None),
            ("\"battery\"", UtilityFunction::Level, Some(1.0)),
            ("\"match-default\"", UtilityFunction::MatchDefault, None),
            ("{ threshold = 0.3, above = 1.0, below = 0.2 }", step, Some(1.0)),
            ("{ threshold = 0.3, below = 0.2, plugged_in = 0.7 }", step, Some(0.7)),
            ("{ on_battery = 0.4, plugged_in = 1.0 }", UtilityFunction::Fixed(0.4), Some(1.0)),
            ("{ on_battery = \"match-default\" }", UtilityFunction::MatchDefault, None),
        ] {
            let config = parse(&format!("scheduler = \"operetta\"\nutility = {text}\n"));
            assert_eq!(config.policy.utility, UtilityRule { utility, plugged_in }, "{text}");
        }
        assert_eq!(parse("").policy.utility, UtilityRule { utility: UtilityFunction::Level, plugged_in: Some(1.0) });
    }

    #[test]
    fn the_papers_variants_have_a_setting_each() {
        // OPERETTA VI.B: with a battery at 60 % that is not charging, and one at 20 %.
        let full = UtilityFunction::Fixed(1.0);
        for (variant, text, at_60, at_20) in [
            ("OPRTA-XPUT", "1", full, full),
            ("OPRTA-MID", "0.5", UtilityFunction::Fixed(0.5), UtilityFunction::Fixed(0.5)),
            ("OPRTA-ENGR", "0", UtilityFunction::Fixed(0.0), UtilityFunction::Fixed(0.0)),
            ("OPRTA-CUR-OS", "\"match-default\"", UtilityFunction::MatchDefault, UtilityFunction::MatchDefault),
            ("U1", "\"battery\"", UtilityFunction::Fixed(0.6), UtilityFunction::Fixed(0.2)),
            ("U2", "{ threshold = 0.5, above = 1.0, below = 0.0 }", full, UtilityFunction::Fixed(0.0)),
        ] {
            let rule = parse(&format!("scheduler = \"operetta\"\nutility = {text}\n")).policy.utility;
            let at = |level| rule.now(Some(&Supply { level, plugged: false, power: None }));
            assert_eq!((at(0.6), at(0.2)), (at_60, at_20), "{variant}");
        }
    }

    #[test]
    fn wrong_utilities_prices_and_costs_are_refused_with_line_and_remedy() {
        for (text, reason, nearest) in [
            ("utility = 1.5", "utility = 1.5 is not a number from 0 to 1", None),
            ("utility = \"batery\"", "there is no utility \"batery\"", Some("battery")),
            ("utility = true", "utility is a boolean", None),
            ("utility = {}", "neither threshold nor on_battery", None),
            ("utility = { threshold = 0.3, on_battery = 0.2 }", "neither threshold nor on_battery", None),
            ("utility = { above = 0.3 }", "neither threshold nor on_battery", None),
            ("utility = { threshold = 3 }", "threshold = 3", None),
            ("utility = { treshold = 0.3, threshold = 0.3 }", "there is no key \"treshold\" in utility", Some("threshold")),
            ("utility = { on_battery = 0.3, plugged_in = 2 }", "plugged_in = 2", None),
            ("price = { energy = 0 }", "neither energy nor money has a weight", None),
            ("price = { money = -1 }", "money = -1", None),
            ("price = { enrgy = 1 }", "there is no key \"enrgy\" in price", Some("energy")),
            ("energy_profiles = \"energy.toml\"", "not an absolute path", None),
            ("energy_profiles = \"/nonexistent/energy.toml\"", "cannot read the energy profiles /nonexistent/energy.toml", None),
        ] {
            let finding = refused(&format!("version = 1\n{text}\n"));
            assert!(finding.line == 2 && finding.reason.contains(reason), "{text}: {finding}");
            assert_eq!(finding.nearest.as_deref(), nearest, "{text}");
            assert!(finding.remedy.is_some(), "{text}");
        }
    }

    #[test]
    fn links_are_given_cost_and_energy() {
        let link = |text: &str| parse(&format!("[[link]]\nname = \"a\"\n{text}\n")).policy.links.remove(0);
        assert_eq!((link("").cost_per_gb, link("").energy), (0.0, None));
        assert_eq!(link("cost_per_gb = 2.5").cost_per_gb, 2.5);
        assert_eq!(link("energy = \"5g\"").energy.unwrap().row().technology, Technology::FiveG);
        assert_eq!(link("energy = \"netgear ma701\"").energy.unwrap().row().transmit_mw, 990.0);
        let own = link("energy = { idle_mw = 10, receive_mw = 20, transmit_mw = 30, up_mw_per_mbps = 2.5 }").energy.unwrap();
        assert_eq!((own.row().idle_mw, own.row().transmit_mw, own.row().up_mw_per_mbps), (10.0, 30.0, 2.5));
        for (text, reason, nearest) in [
            ("cost_per_gb = \"5\"", "cost_per_gb is a string", None),
            ("cost_per_gb = -1", "cost_per_gb = -1", None),
            ("energy = \"blutooth\"", "there is no energy profile", Some("bluetooth")),
            ("energy = 5", "energy is an integer", None),
            ("energy = { receive_mw = 5 }", "without receive_mw and transmit_mw", None),
            ("energy = { idle_mw = 9, receive_mw = 5, transmit_mw = 9 }", "receive_mw: 5 is less than idle_mw", None),
        ] {
            let finding = refused(&format!("[[link]]\nname = \"a\"\n{text}\n"));
            assert!(finding.line == 3 && finding.reason.contains(reason), "{text}: {finding}");
            assert_eq!(finding.nearest.as_deref(), nearest, "{text}");
        }
    }

    #[test]
    fn an_energy_service_has_an_address_and_a_key() {
        let key = PublicKey::from([7; 32]);
        let with = |url: &str, key: &str| format!("energy_service = \"{url}\"\nenergy_service_key = \"{key}\"\n");
        let service = parse(&with("http://profiles.example.org:7632/", &key.to_string())).energy_service.unwrap();
        assert_eq!((service.address.to_string(), service.key), ("profiles.example.org:7632".to_owned(), key));
        for (text, line, reason) in [
            ("energy_service = \"http://a:1\"\n".to_owned(), 1, "energy_service without energy_service_key"),
            (format!("energy_service_key = \"{key}\"\n"), 1, "energy_service_key without energy_service"),
            (with("https://a:1", &key.to_string()), 1, "not a URL of an energy service"),
            (with("http://a", &key.to_string()), 1, "no port"),
            (with("http://a:1/x", &key.to_string()), 1, "is not a port"),
            (with("http://a:1", "abc"), 2, "a key has 52"),
        ] {
            let finding = refused(&text);
            assert!(finding.line == line && finding.reason.contains(reason) && finding.remedy.is_some(), "{text}: {finding}");
        }
    }

    #[test]
    fn links_can_use_profiles_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("energy.toml");
        let profile = "model = \"Modem X\"\ntechnology = \"5g\"\nidle_mw = 1\nreceive_mw = 2\ntransmit_mw = 3\nsource = \"measured\"\n";
        std::fs::write(&path, format!("[[profile]]\n{profile}")).unwrap();
        let config = parse(&format!("energy_profiles = {path:?}\n[[link]]\nname = \"a\"\nenergy = \"modem x\"\n"));
        assert_eq!(config.policy.links[0].energy.as_ref().unwrap().row().source, "measured");
        assert_eq!(config.energy_profiles.as_deref(), Some(path.as_path()));
        std::fs::write(&path, format!("[[profile]]\n{}", profile.replace("= 2", "= -2"))).unwrap();
        let finding = refused(&format!("energy_profiles = {path:?}\n"));
        assert!(finding.line == 1 && finding.reason.contains("profile 1: receive_mw"), "{finding}");
    }
}
