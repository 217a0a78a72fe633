//! Reads `[adhoc]`.

use std::path::PathBuf;
use std::time::Duration;

use braid_api::{AdhocChange, AdhocRadioChange, AdhocUp};
use braid_control::adhoc::AdhocSettings;

use super::reader::{Section, Value};

/// The ad-hoc device.
pub(super) fn adhoc(mut section: Section<'_>) -> Option<AdhocSettings> {
    let (reader, span) = (section.reader, section.span.clone());
    let text = |value: Value<'_>| value.text().map(str::to_owned);
    let name = section.take("name").and_then(text);
    let mac = section.take("mac").and_then(text);
    let add = section.take("radios").and_then(|value| value.list()).unwrap_or_default().into_iter().filter_map(text).collect();
    let mut radios = Vec::new();
    each(section.take("priorities"), "[adhoc] priorities", |radio, value| {
        let priority = value.whole(0..=u64::from(u32::MAX)).map(|priority| priority as u32);
        radios.push(AdhocRadioChange { radio, priority, ..AdhocRadioChange::default() });
    });
    each(section.take("technologies"), "[adhoc] technologies", |radio, value| {
        radios.push(AdhocRadioChange { radio, technology: value.text().map(str::to_owned), ..AdhocRadioChange::default() });
    });
    each(section.take("translate"), "[adhoc] translate", |radio, value| {
        radios.push(AdhocRadioChange { radio, translates: value.flag(), ..AdhocRadioChange::default() });
    });
    let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let settings = AdhocChange {
        add,
        remove: Vec::new(),
        radios,
        hysteresis_ms: section.take("hysteresis").and_then(|value| value.duration()).map(ms),
        expiry_ms: section.take("expiry").and_then(|value| value.duration()).map(ms),
        power_saving: section.take("power_saving").and_then(|value| value.flag()),
        by_frame: section.take("spread").and_then(|value| value.one_of(&[("flow", false), ("frame", true)])),
    };
    let key_file = section.take("key_file").and_then(key_file);
    section.finish();
    match AdhocSettings::of(&AdhocUp { name, mac, settings }) {
        Ok(settings) => Some(AdhocSettings { key_file, ..settings }),
        Err(error) => {
            let remedy = "braid.example.toml shows [adhoc]";
            reader.refuse(&span, format!("[adhoc]: {}", error.detail), remedy);
            None
        }
    }
}

/// The file with the group's key. It is read when the device is made: a check of the configuration may run as a user who must not read it.
fn key_file(value: Value<'_>) -> Option<PathBuf> {
    value.whole_path("\"/etc/braid/adhoc.key\"; `sudo braid adhoc key FILE` makes such a file")
}

/// Reads a table with a value for each radio.
pub(super) fn each(value: Option<Value<'_>>, what: &'static str, mut take: impl FnMut(String, Value<'_>)) {
    if let Some(section) = value.and_then(|value| value.section(what)) {
        section.rest().for_each(|(radio, value)| take(radio.to_owned(), value));
    }
}
