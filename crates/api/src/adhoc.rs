//! `GET /v1/adhoc` and the operations that change the ad-hoc device.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::NetworkReservation;

/// The ad-hoc device: one Ethernet device over several radios.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AdhocStatus {
    /// Name of the device.
    pub name: String,
    /// Its Ethernet address.
    pub mac: String,
    /// Size of its largest packet in bytes: the least of its radios; `null` without radios.
    pub mtu: Option<u32>,
    /// Whether frames of the group are authenticated.
    pub authenticated: bool,
    /// Whether each frame gets a radio anew, not each flow.
    pub by_frame: bool,
    /// The paper's `maxdiff`: a radio of better priority is not used for a neighbour that another radio heard later by more than this.
    pub hysteresis_ms: u64,
    /// Time after which a neighbour that was not heard is forgotten.
    pub expiry_ms: u64,
    /// Whether only the radio with the least energy is used while the battery is low.
    pub power_saving: bool,
    /// Whether it is low now.
    pub saving_power: bool,
    /// Its radios.
    pub radios: Vec<AdhocRadio>,
    /// Its neighbours, once for each radio that reaches them.
    pub neighbours: Vec<AdhocNeighbour>,
    /// Frames that did not pass, or passed otherwise, since the start.
    pub counts: AdhocCounts,
    /// Warnings: another host with the same address, radios in one network.
    pub warnings: Vec<String>,
    /// What the host has asked the controller of its network to reserve; `null`: nothing, or the device has joined no network.
    #[serde(default)]
    pub reservation: Option<NetworkReservation>,
}

/// A radio: a device below the ad-hoc device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AdhocRadio {
    /// Name of the device.
    pub name: String,
    /// Its Ethernet address.
    pub mac: Option<String>,
    /// Whether frames may leave over it.
    pub up: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Priority: 0 is the highest.
    pub priority: u32,
    /// Its technology, if known.
    pub technology: Option<String>,
    /// Whether it carries only its own address, so that addresses are translated.
    pub translates: bool,
    /// Number of neighbours that it reaches.
    pub neighbours: u64,
}

/// A neighbour over one radio.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AdhocNeighbour {
    /// Address of the neighbour's device.
    pub mac: String,
    /// The radio.
    pub radio: String,
    /// The neighbour's address on this radio, if it is another.
    pub at: Option<String>,
    /// Whether the neighbour runs Braid.
    pub braid: bool,
    /// `up`, `dead`: frames leave and none arrives, or `new`: it has not answered yet.
    pub state: String,
    /// Time since it was heard over this radio.
    pub last_heard_ms: u64,
    /// Smoothed round trip; `null`: not measured.
    pub rtt_us: Option<u64>,
    /// Share of its announcements that did not arrive, 0 to 1; `null`: it sends none.
    pub loss: Option<f64>,
    /// Share of this radio in what leaves for it, 0 to 1.
    pub share: f64,
}

/// What became of frames since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AdhocCounts {
    /// Copies of broadcasts that had arrived over another radio.
    pub duplicates: u64,
    /// Frames whose source is this device.
    pub own: u64,
    /// Broadcasts beyond the limit of a radio.
    pub storms: u64,
    /// Frames for unknown addresses, which left over all radios.
    pub flooded: u64,
    /// Frames from a bridge that a radio cannot carry.
    pub foreign: u64,
    /// Frames that were lost because no radio works.
    pub no_radio: u64,
}

/// `POST /v1/adhoc`: changes the running device. Fields that are missing stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdhocChange {
    /// Radios to add.
    pub add: Vec<String>,
    /// Radios to remove.
    pub remove: Vec<String>,
    /// Settings of radios.
    pub radios: Vec<AdhocRadioChange>,
    /// See [`AdhocStatus::hysteresis_ms`].
    pub hysteresis_ms: Option<u64>,
    /// See [`AdhocStatus::expiry_ms`]; at least 2,000: neighbours announce themselves once a second.
    pub expiry_ms: Option<u64>,
    /// See [`AdhocStatus::power_saving`].
    pub power_saving: Option<bool>,
    /// See [`AdhocStatus::by_frame`].
    pub by_frame: Option<bool>,
}

/// New settings of a radio.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdhocRadioChange {
    /// The radio.
    pub radio: String,
    /// Its priority: 0 is the highest.
    #[serde(default)]
    pub priority: Option<u32>,
    /// Its technology, by which its power is known: `wifi`, `bluetooth`, `gprs`, `3g`, `lte`, `5g` or `ethernet`.
    #[serde(default)]
    pub technology: Option<String>,
    /// Whether addresses are translated.
    #[serde(default)]
    pub translates: Option<bool>,
}

/// `POST /v1/adhoc/up`: makes the device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdhocUp {
    /// Its name; `null`: `vi0`.
    pub name: Option<String>,
    /// Its Ethernet address; `null`: one that its name and the first radio determine.
    pub mac: Option<String>,
    /// Its radios (`add`) and settings.
    pub settings: AdhocChange,
}
