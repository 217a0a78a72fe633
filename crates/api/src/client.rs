//! `GET /v1/clients`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A client of the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Client")]
pub struct ClientStatus {
    /// Name that it gave when it got its address by DHCP; `null` if unknown. The client chooses it.
    pub name: Option<String>,
    /// Its address.
    pub address: String,
    /// Its hardware address; `null` if the LAN device has none.
    pub mac: Option<String>,
    /// The LAN device.
    pub device: String,
    /// Number of its flows.
    pub flows: u64,
    /// Rate of its flows in bits per second, in both directions together.
    pub rate: u64,
    /// Rate towards the client in bits per second.
    pub rate_down_bps: u64,
    /// Rate away from the client in bits per second.
    pub rate_up_bps: u64,
    /// Time since its last new flow.
    pub idle_ms: u64,
    /// Number of the first `[[app]]` entry, starting at 1, that names it and has no other condition, so that it applies to all its flows for which no
    /// earlier entry decides; `null`: there is none.
    #[serde(default)]
    pub rule: Option<u32>,
}
