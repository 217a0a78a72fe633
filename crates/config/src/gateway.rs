//! Reads `[gateway]` and `[virtual]`.

use std::net::IpAddr;

use braid_decide::policy::LinkRule;
use braid_decide::virtual_device::{self, VirtualDevice};
use braid_model::Family;
use ipnet::IpNet;

use super::reader::{Section, Value};

/// Maximum length of a device's name in bytes (`IFNAMSIZ`, with the terminating zero).
const DEVICE_LIMIT: usize = 15;

/// The LAN devices, and whether flows may take the fast path. `links` are the `[[link]]` entries, which must not name one of them.
pub(super) fn lan(mut section: Section<'_>, links: &[LinkRule]) -> (Vec<String>, bool) {
    let (reader, span) = (section.reader, section.span.clone());
    let mut devices: Vec<String> = Vec::new();
    let listed = section.take("lan");
    let values = listed.as_ref().and_then(|value| value.list());
    if values.as_ref().map_or(listed.is_none(), Vec::is_empty) {
        reader.refuse(&span, "[gateway] names no LAN device", "write lan = [\"eth1\"]: the devices behind which the clients are");
    }
    for value in values.unwrap_or_default() {
        let Some(name) = device(&value, DEVICE_LIMIT, "a LAN device", "\"eth1\" or \"br-lan\"") else { continue };
        if links.iter().any(|rule| rule.matcher.name.as_ref().is_some_and(|pattern| pattern.as_str() == name)) {
            let reason = format!("{name} is a LAN device here and has a [[link]] entry");
            value.reader.refuse(&value.span, reason, "a device is either a link or a LAN device: remove one of the two");
        } else if devices.contains(&name) {
            value.reader.warn(&value.span, format!("{name} is listed twice"), "remove one of the two");
        } else {
            devices.push(name);
        }
    }
    let fast_path = section.take("fast_path").and_then(|value| value.flag()).unwrap_or(true);
    section.finish();
    (devices, fast_path)
}

/// The virtual interface, which is neither one of `links` nor of `lan`.
pub(super) fn virtual_device(mut section: Section<'_>, links: &[LinkRule], lan: &[String]) -> Option<VirtualDevice> {
    let (reader, span) = (section.reader, section.span.clone());
    let name = match section.take("name") {
        None => virtual_device::DEFAULT_NAME.to_owned(),
        Some(value) => {
            let name = device(&value, virtual_device::NAME_LIMIT, "a virtual interface", "\"braid0\"")?;
            let used = lan.contains(&name) || links.iter().any(|rule| rule.matcher.name.as_ref().is_some_and(|one| one.as_str() == name));
            if used {
                return value.refuse(
                    format!("{name} is the virtual interface here and a link or LAN device elsewhere"),
                    "Braid makes the virtual interface itself: give it another name".into(),
                );
            }
            name
        }
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    let listed = section.take("address");
    let values = listed.map(|value| if value.is_list() { value.list().unwrap_or_default() } else { vec![value] }).unwrap_or_default();
    if values.is_empty() {
        reader.refuse(&span, "[virtual] has no address", "write address = \"10.99.0.1/24\": an address that no other network here uses");
    }
    for value in values {
        let Some(address) = address(&value) else { continue };
        if addresses.iter().any(|other| Family::of(*other) == Family::of(address)) {
            value.reader.refuse(&value.span, "the virtual interface has two addresses of one family", "remove one of them");
        } else {
            addresses.push(address);
        }
    }
    section.finish();
    (!addresses.is_empty()).then_some(VirtualDevice { name, addresses })
}

/// An address with or without the length of a prefix, which says nothing here: the network of the virtual interface has no other hosts.
fn address(value: &Value<'_>) -> Option<IpAddr> {
    const REMEDY: &str = "write an address that no other network here uses, such as \"10.99.0.1/24\"";
    let text = value.text()?;
    let address = text.parse::<IpNet>().map(|net| net.addr()).or_else(|_| text.parse());
    match address {
        Err(_) => value.refuse(format!("{text:?} is not an address"), REMEDY.into()),
        Ok(address) => match virtual_device::refusal(address) {
            Some(reason) => value.refuse(format!("the virtual interface cannot have {address}: {reason}"), REMEDY.into()),
            None => Some(address),
        },
    }
}

fn device(value: &Value<'_>, limit: usize, what: &str, example: &str) -> Option<String> {
    let text = value.text()?;
    let valid =
        !text.is_empty() && text.len() <= limit && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '*' | '"' | '\\'));
    if !valid || text == "lo" || text == "." || text == ".." {
        let remedy =
            format!("write the name of a network device as `ip link` shows it, {example}, of {limit} characters at most; no pattern");
        return value.refuse(format!("{text:?} is not {what}"), remedy);
    }
    Some(text.to_owned())
}
