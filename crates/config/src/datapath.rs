//! Reads `[datapath]`.

use std::path::PathBuf;

use braid_control::config::{DatapathFiles, DatapathSettings};
use braid_model::address::{Address, Host};
use braid_openflow::ids::DatapathId;

use super::World;
use super::reader::{Section, Value};

const ADDRESS: &str = "write \"ssl:HOST:PORT\", or \"tcp:127.0.0.1:PORT\" for a controller on this machine";
const FILES: &str = "an ssl: controller needs certificate, key and ca: the paths of PEM files";

/// The remote controller.
pub(super) fn datapath(mut section: Section<'_>, world: &World) -> Option<DatapathSettings> {
    let (reader, span) = (section.reader, section.span.clone());
    let controller = section.need("controller", ADDRESS);
    let address = controller.as_ref().and_then(address);
    let [certificate, key, ca] = ["certificate", "key", "ca"].map(|key| section.take(key));
    let insecure = section.take("insecure");
    let id = section.take("id").map(|value| id(&value));
    section.finish();
    let files = [&certificate, &key, &ca];
    let (is_secure, address) = address?;
    let allowed = insecure.as_ref().and_then(|value| value.flag()).unwrap_or(false);
    let tls = if is_secure {
        if let Some(value) = &insecure {
            value.reader.refuse(&value.span, "insecure has no effect beside an ssl: controller", "remove insecure");
        }
        if files.iter().any(|file| file.is_none()) {
            reader.refuse(&span, "[datapath] names no files for TLS", FILES);
        }
        let [certificate, key, ca] = files.map(|file| file.as_ref().and_then(path));
        let files = DatapathFiles { certificate: certificate?, key: key?, ca: ca? };
        if !world.may_open(&files) {
            let reason = "these are not the files of [datapath] in force, and the daemon does not open others for a client";
            reader.refuse(&span, reason, "write them into the configuration file by hand, then run `braid reload`");
        }
        Some(files)
    } else {
        if let Some(value) = files.into_iter().flatten().next() {
            let reason = format!("{} has no effect beside a tcp: controller", value.key);
            value.reader.refuse(&value.span, reason, "write \"ssl:HOST:PORT\", or remove certificate, key and ca");
        }
        if !allowed && !matches!(address.host, Host::Ip(host) if host.is_loopback()) {
            let reason = "with tcp: to another machine, whoever is on the way can steer this device's flows and see their destinations";
            reader.refuse(
                &span,
                reason,
                "write \"ssl:HOST:PORT\" with certificate, key and ca; or insecure = true, in a network that you trust",
            );
        }
        None
    };
    // A refused number is an error already.
    let id = id.map_or(Some(None), |id| id.map(Some))?;
    Some(DatapathSettings { controller: address, tls, insecure: allowed, id })
}

/// Whether the connection uses TLS, and the address.
fn address(value: &Value<'_>) -> Option<(bool, Address)> {
    let text = value.text()?;
    let (is_secure, rest) = match text.split_once(':') {
        Some(("ssl", rest)) => (true, rest),
        Some(("tcp", rest)) => (false, rest),
        _ => return value.refuse(format!("{text:?} does not begin with ssl: or tcp:"), ADDRESS.into()),
    };
    match rest.parse::<Address>() {
        Ok(address) => Some((is_secure, address)),
        Err(error) => value.refuse(format!("{error}"), ADDRESS.into()),
    }
}

/// A file. It is read when the daemon connects: a check of the configuration may run as a user who must not read it.
fn path(value: &Value<'_>) -> Option<PathBuf> {
    value.whole_path(&format!("\"/etc/braid/datapath-{}.pem\"", value.key))
}

/// Sixteen hexadecimal digits, as Open vSwitch writes them.
fn id(value: &Value<'_>) -> Option<DatapathId> {
    let text = value.text()?;
    let is_number = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = if is_number { u64::from_str_radix(text, 16).ok().filter(|number| *number != 0) } else { None };
    let remedy = "write sixteen hexadecimal digits, such as \"000002005e100001\"".to_owned();
    number.map(DatapathId).or_else(|| value.refuse(format!("{text:?} is not the number of a datapath"), remedy))
}
