//! Reads `[gateway]`.

use braid_decide::policy::LinkRule;

use super::reader::{Section, Value};

/// Maximum length of a device's name in bytes (`IFNAMSIZ`, with the terminating zero).
const DEVICE_LIMIT: usize = 15;

/// The LAN devices. `links` are the `[[link]]` entries, which must not name one of them.
pub(super) fn lan(mut section: Section<'_>, links: &[LinkRule]) -> Vec<String> {
    let (reader, span) = (section.reader, section.span.clone());
    let mut devices: Vec<String> = Vec::new();
    let listed = section.take("lan");
    let values = listed.as_ref().and_then(|value| value.list());
    if values.as_ref().map_or(listed.is_none(), Vec::is_empty) {
        reader.refuse(&span, "[gateway] names no LAN device", "write lan = [\"eth1\"]: the devices behind which the clients are");
    }
    for value in values.unwrap_or_default() {
        let Some(name) = device(&value) else { continue };
        if links.iter().any(|rule| rule.matcher.name.as_ref().is_some_and(|pattern| pattern.as_str() == name)) {
            let reason = format!("{name} is a LAN device here and has a [[link]] entry");
            value.reader.refuse(&value.span, reason, "a device is either a link or a LAN device: remove one of the two");
        } else if devices.contains(&name) {
            value.reader.warn(&value.span, format!("{name} is listed twice"), "remove one of the two");
        } else {
            devices.push(name);
        }
    }
    section.finish();
    devices
}

fn device(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    let valid = !text.is_empty()
        && text.len() <= DEVICE_LIMIT
        && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '*' | '"' | '\\'));
    if !valid || text == "lo" || text == "." || text == ".." {
        let remedy = "write the name of a network device as `ip link` shows it, \"eth1\" or \"br-lan\"; patterns are not possible here";
        return value.refuse(format!("{text:?} is not a LAN device"), remedy.into());
    }
    Some(text.to_owned())
}
