//! The settings of the ad-hoc device, from the configuration, the command line or the API.

use std::path::PathBuf;
use std::time::Duration;

use braid_api::{AdhocChange, AdhocUp};
use braid_decide::adhoc::{MAX_RADIOS, Terms};
use braid_decide::energy::Technology;
use braid_model::Mac;

use crate::RequestError;

/// Default of `[adhoc] name`.
pub const DEFAULT_NAME: &str = "vi0";
/// Shortest expiry: twice the interval of announcements.
const SHORTEST_EXPIRY: Duration = Duration::from_secs(2);
/// Longest expiry and hysteresis.
const LONGEST: Duration = Duration::from_secs(3600);

/// The settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdhocSettings {
    /// Name of the device.
    pub name: String,
    /// Its address; `None`: one that its name and the first radio determine.
    pub mac: Option<Mac>,
    /// Its radios.
    pub radios: Vec<RadioTerms>,
    /// How neighbours are reached.
    pub terms: Terms,
    /// File with the key of the group; `None`: it has none. No request names one, because this process would open it with its own rights.
    pub key_file: Option<PathBuf>,
}

/// A radio as the user named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RadioTerms {
    /// Name of the device.
    pub name: String,
    /// Priority: 0 is the highest, and the default.
    pub priority: u32,
    /// Technology, by which its power is known; `None`: by the kind of device.
    pub technology: Option<Technology>,
    /// Whether addresses are translated; `None`: where the kind of device needs it.
    pub translates: Option<bool>,
}

impl RadioTerms {
    /// A radio without settings.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), priority: 0, technology: None, translates: None }
    }
}

impl Default for AdhocSettings {
    fn default() -> Self {
        Self { name: DEFAULT_NAME.to_owned(), mac: None, radios: Vec::new(), terms: Terms::default(), key_file: None }
    }
}

impl AdhocSettings {
    /// The settings of a request.
    ///
    /// # Errors
    /// No radio, a name or an address that no device can have, or those of [`changed`](Self::changed).
    pub fn of(up: &AdhocUp) -> Result<Self, RequestError> {
        let mac = match &up.mac {
            None => None,
            Some(text) => {
                let mac: Option<Mac> = text.parse().ok().filter(|mac: &Mac| mac.0[0] & 1 == 0 && mac.0 != [0; 6]);
                Some(mac.ok_or_else(|| {
                    RequestError::unclear(format!("{text:?} is not the Ethernet address of a host: write one such as 02:00:00:00:00:01"))
                })?)
            }
        };
        let name = up.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned());
        check_name(&name)?;
        let settings = Self { name, mac, ..Self::default() }.changed(&up.settings)?;
        if settings.radios.is_empty() {
            return Err(RequestError::unclear(format!("{} has no radio: name at least one device that carries its frames", settings.name)));
        }
        Ok(settings)
    }

    /// These settings with a change.
    ///
    /// # Errors
    /// A radio to add is there, one to remove or set is not, there are too many, or a value is out of range. The error names it.
    pub fn changed(&self, change: &AdhocChange) -> Result<Self, RequestError> {
        let mut new = self.clone();
        let names = |settings: &Self| settings.radios.iter().map(|radio| radio.name.clone()).collect::<Vec<_>>().join(", ");
        for name in &change.remove {
            let place = new.radios.iter().position(|radio| radio.name == *name);
            let place = place.ok_or_else(|| {
                RequestError::not_found("No such radio", format!("{name} is no radio of {}, which has {}", self.name, names(self)))
            })?;
            new.radios.remove(place);
        }
        for name in &change.add {
            check_name(name)?;
            if new.radios.iter().any(|radio| radio.name == *name) {
                return Err(RequestError::conflict("Not added", format!("{name} is a radio of {} already", self.name)));
            }
            if *name == self.name {
                return Err(RequestError::conflict("Not added", format!("{name} cannot be a radio of itself")));
            }
            if new.radios.len() >= MAX_RADIOS {
                let detail = format!("{} has {MAX_RADIOS} radios, which is the most: remove one before you add {name}", self.name);
                return Err(RequestError::conflict("Not added", detail));
            }
            new.radios.push(RadioTerms::new(name));
        }
        for change in &change.radios {
            let all = names(&new);
            let radio = new.radios.iter_mut().find(|radio| radio.name == change.radio);
            let radio = radio.ok_or_else(|| {
                RequestError::not_found("No such radio", format!("{} is no radio of {}, which has {all}", change.radio, self.name))
            })?;
            radio.priority = change.priority.unwrap_or(radio.priority);
            radio.translates = change.translates.or(radio.translates);
            if let Some(technology) = &change.technology {
                radio.technology = Some(technology.parse().map_err(|error| RequestError::unclear(format!("{}: {error}", change.radio)))?);
            }
        }
        let span = |name: &str, ms: Option<u64>, old: Duration, least: Duration| {
            let span = ms.map_or(old, Duration::from_millis);
            if (least..=LONGEST).contains(&span) {
                return Ok(span);
            }
            Err(RequestError::unclear(format!("{name} is {span:?}: it must be from {least:?} to {LONGEST:?}")))
        };
        new.terms = Terms {
            hysteresis: span("the hysteresis", change.hysteresis_ms, new.terms.hysteresis, Duration::ZERO)?,
            expiry: span("the expiry", change.expiry_ms, new.terms.expiry, SHORTEST_EXPIRY)?,
            power_saving: change.power_saving.unwrap_or(new.terms.power_saving),
            by_frame: change.by_frame.unwrap_or(new.terms.by_frame),
        };
        Ok(new)
    }
}

/// Rejects what no device can be named.
fn check_name(name: &str) -> Result<(), RequestError> {
    let valid = (1..=15).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:*\"\\%".contains(&byte));
    if valid && !["lo", ".", ".."].contains(&name) {
        return Ok(());
    }
    Err(RequestError::unclear(format!(
        "{name:?} is no name of a network device: write one as `ip link` shows it, of 15 characters at most, without wildcards"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_api::AdhocRadioChange;

    fn two() -> AdhocSettings {
        let change = AdhocChange { add: vec!["wlan0".into(), "wlan1".into()], ..AdhocChange::default() };
        AdhocSettings::of(&AdhocUp { settings: change, ..AdhocUp::default() }).unwrap()
    }

    fn refused(change: AdhocChange) -> String {
        two().changed(&change).unwrap_err().to_string()
    }

    #[test]
    fn a_change_names_what_is_wrong() {
        let of = |name: &str| vec![name.to_owned()];
        let radio = |radio: &str, technology: Option<&str>| {
            let technology = technology.map(str::to_owned);
            AdhocChange { radios: vec![AdhocRadioChange { radio: radio.into(), technology, ..Default::default() }], ..Default::default() }
        };
        for (change, expected) in [
            (AdhocChange { add: of("wlan0"), ..Default::default() }, "wlan0 is a radio of vi0 already"),
            (AdhocChange { add: of("vi0"), ..Default::default() }, "vi0 cannot be a radio of itself"),
            (AdhocChange { add: of("a/b"), ..Default::default() }, "\"a/b\" is no name of a network device"),
            (AdhocChange { add: of(""), ..Default::default() }, "\"\" is no name"),
            (AdhocChange { add: (2..9).map(|n| format!("wlan{n}")).collect(), ..Default::default() }, "remove one before you add wlan8"),
            (AdhocChange { remove: of("eth9"), ..Default::default() }, "eth9 is no radio of vi0, which has wlan0, wlan1"),
            (radio("eth9", None), "eth9 is no radio of vi0"),
            (radio("wlan0", Some("lora")), "wlan0: \"lora\" is not a technology"),
            (AdhocChange { expiry_ms: Some(1999), ..Default::default() }, "the expiry is 1.999s: it must be from 2s"),
            (AdhocChange { hysteresis_ms: Some(u64::MAX), ..Default::default() }, "the hysteresis is"),
        ] {
            let error = refused(change);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_radio_can_be_exchanged_for_another_at_once() {
        let names = |settings: &AdhocSettings| settings.radios.iter().map(|radio| radio.name.clone()).collect::<Vec<_>>();
        let change = AdhocChange {
            add: vec!["eth0".into()],
            remove: vec!["wlan0".into()],
            radios: vec![AdhocRadioChange { radio: "eth0".into(), priority: Some(3), ..Default::default() }],
            by_frame: Some(true),
            ..Default::default()
        };
        let changed = two().changed(&change).unwrap();
        assert_eq!(names(&changed), ["wlan1", "eth0"]);
        assert_eq!((changed.radios[1].priority, changed.terms.by_frame), (3, true));
    }

    #[test]
    fn a_device_needs_a_radio_and_an_address_of_a_host() {
        let up = |mac: &str| AdhocUp { mac: Some(mac.to_owned()), ..AdhocUp::default() };
        assert!(AdhocSettings::of(&AdhocUp::default()).unwrap_err().to_string().contains("vi0 has no radio"));
        for mac in ["03:00:00:00:00:01", "00:00:00:00:00:00", "02:00"] {
            assert!(AdhocSettings::of(&up(mac)).unwrap_err().to_string().contains("is not the Ethernet address of a host"), "{mac}");
        }
    }
}
