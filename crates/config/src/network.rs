//! Reads `[network]`.

use std::collections::BTreeMap;

use braid_api::{AdhocChange, AdhocUp};
use braid_control::adhoc::AdhocSettings;
use braid_control::config::{NETWORK_DEVICE, NetworkSettings};
use braid_model::Mac;

use super::adhoc::each;
use super::reader::{Section, Value};

/// The network with a controller that this host joins.
pub(super) fn network(mut section: Section<'_>) -> Option<NetworkSettings> {
    let (reader, span) = (section.reader, section.span.clone());
    let text = |value: Value<'_>| value.text().map(str::to_owned);
    let name = section.take("name").and_then(text).unwrap_or_else(|| NETWORK_DEVICE.to_owned());
    let mac = section.take("mac").and_then(text);
    let add = section.take("radios").and_then(|value| value.list()).unwrap_or_default().into_iter().filter_map(text).collect();
    let mut cables: BTreeMap<String, Mac> = BTreeMap::new();
    let mut unused = Vec::new();
    each(section.take("accesses"), "[network] accesses", |radio, value| {
        unused.push((radio.clone(), value.span.clone()));
        cables.extend(value.parsed("the Ethernet address of an access point, such as \"02:00:00:00:0a:01\"").map(|access| (radio, access)));
    });
    let controller = section.need("controller", "write controller = \"ADDRESS:PORT\", where the controller takes clients");
    let controller = controller.and_then(|value| value.parsed("an address with a port, such as \"192.0.2.1:2209\""));
    let controller_key = section.take("controller_key").and_then(|value| value.parsed("a key, as the controller prints it at its start"));
    let supplicants = section.take("supplicants").and_then(|value| value.whole_path("\"/run/wpa_supplicant\""));
    section.finish();
    let settings = AdhocChange { add, ..AdhocChange::default() };
    let device = match AdhocSettings::of(&AdhocUp { name: Some(name), mac, settings }) {
        Ok(device) => device,
        Err(error) => {
            reader.refuse(&span, format!("[network]: {}", error.detail), "braid.example.toml shows [network]");
            return None;
        }
    };
    let is_radio = |name: &str| device.radios.iter().any(|radio| radio.name == name);
    for (name, span) in unused.into_iter().filter(|(name, _)| !is_radio(name)) {
        reader.refuse(&span, format!("{name} is no radio of [network]"), "add it to radios, or take it out of accesses");
    }
    let accesses = device.radios.iter().map(|radio| cables.get(&radio.name).copied()).collect();
    Some(NetworkSettings { device, accesses, controller: controller?, controller_key, supplicants })
}
