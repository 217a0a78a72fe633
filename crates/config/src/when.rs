//! Reads `when`: the context in which an entry applies.

use std::collections::BTreeMap;

use braid_decide::policy::{
    FACT_NAME_LIMIT, FACT_VALUE_LIMIT, InvalidWindow, MOVING, RESERVED_FACTS, TimeWindow, When, is_fact_name, is_fact_value,
};

use super::findings::nearest_name;
use super::reader::{Section, Value};

/// Maximum number of conditions of one entry.
const MAX_CONDITIONS: usize = 16;
/// Maximum length of the name of a wireless network, in bytes (IEEE 802.11).
const SSID_LIMIT: usize = 32;

/// The condition of an entry; the default if it has none. `None` if it was refused: the entry must not apply in any context then.
pub(super) fn when(section: &mut Section<'_>) -> Option<When> {
    let Some(value) = section.take("when") else { return Some(When::default()) };
    let table = value.section("when")?;
    if table.is_empty() {
        return value.refuse("a when without conditions".into(), "remove it, or write when = { moving = true }".into());
    }
    if table.len() > MAX_CONDITIONS {
        return value.refuse(format!("a when with {} conditions", table.len()), format!("write at most {MAX_CONDITIONS}"));
    }
    conditions(table)
}

fn conditions(mut section: Section<'_>) -> Option<When> {
    let mut refused = false;
    let mut when = When {
        facts: BTreeMap::new(),
        running: section.condition("running", &mut refused, running),
        time: section.condition("time", &mut refused, time),
        battery_below: section.condition("battery_below", &mut refused, battery),
        ssid: section.condition("ssid", &mut refused, ssid),
    };
    for (name, value) in section.rest() {
        match fact(name, &value) {
            Some(wanted) => drop(when.facts.insert(name.to_owned(), wanted)),
            None => refused = true,
        }
    }
    (!refused).then_some(when)
}

fn running(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.is_empty() || text.contains('/') && !text.starts_with('/') {
        let remedy = "write the name of a process, \"game\", or the absolute path of its executable";
        return value.refuse(format!("{text:?} is not a program"), remedy.into());
    }
    Some(text.to_owned())
}

fn time(value: &Value<'_>) -> Option<TimeWindow> {
    let text = value.text()?;
    match text.parse() {
        Ok(window) => Some(window),
        Err(error @ InvalidWindow::Empty) => value.refuse(
            format!("{text:?} is not a time window: {error}"),
            "write two different times, or remove time if the entry always applies".into(),
        ),
        Err(error @ InvalidWindow::Form) => {
            let remedy = "write two times of day from 00:00 to 23:59, \"22:00-06:00\"; the window may cross midnight";
            value.refuse(format!("{text:?} is not a time window: {error}"), remedy.into())
        }
    }
}

fn battery(value: &Value<'_>) -> Option<f64> {
    let level = value.number(0.0, 1.0)?;
    if level == 0.0 {
        return value.refuse("no battery's level is below 0".into(), "write a level above 0 and up to 1, such as 0.3".into());
    }
    Some(level)
}

fn ssid(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.is_empty() || text.len() > SSID_LIMIT {
        let reason = format!("{text:?} is not the name of a wireless network");
        return value.refuse(reason, format!("write the network's name, of 1 to {SSID_LIMIT} bytes"));
    }
    Some(text.to_owned())
}

/// The value that a fact must have. A name that resembles a condition is a typing error.
fn fact(name: &str, value: &Value<'_>) -> Option<String> {
    let own = "or name a fact that \"braid context set\" sets";
    let known = RESERVED_FACTS.iter().copied().chain([MOVING]);
    if name != MOVING
        && let Some(near) = nearest_name(name, known.clone())
    {
        let all: Vec<&str> = known.collect();
        return value.refuse_key(
            format!("there is no condition \"{name}\" in when"),
            Some(near),
            format!("write one of {}, {own}", all.join(", ")),
        );
    }
    if !is_fact_name(name) {
        let remedy = format!("write 1 to {FACT_NAME_LIMIT} lower-case letters, digits, - and _, starting with a letter");
        return value.refuse_key(format!("{name:?} is not the name of a fact"), None, remedy);
    }
    if let Some(flag) = value.flag_if() {
        return Some(flag.to_string());
    }
    let text = value.is_text().then(|| value.text()).flatten().filter(|text| is_fact_value(text));
    match text {
        Some(text) => Some(text.to_owned()),
        None => value.refuse(
            format!("{name} must have a value that \"braid context set\" can set"),
            format!("write true, false, or a text of 1 to {FACT_VALUE_LIMIT} bytes, {name} = \"work\""),
        ),
    }
}
