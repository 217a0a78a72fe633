//! The configuration over the API: read it, preview a change, apply it, undo it. Also sessions and the address of the web page.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `GET /v1/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigView {
    /// Path of the file; `null` if there is none and the defaults apply. The first change creates one.
    pub path: Option<String>,
    /// Text of the file (TOML).
    pub text: String,
    /// Identifies this version of the text. A change refers to it.
    pub revision: String,
    /// Whether the daemon can write the file.
    pub writable: bool,
    /// Whether there is a change to undo.
    pub can_undo: bool,
}

/// Request of `POST /v1/config` and `POST /v1/config/preview`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigChange {
    /// The `revision` of the [`ConfigView`] that the edits apply to.
    pub revision: String,
    /// Edits, applied in this order.
    #[schemars(length(max = 1000))]
    pub edits: Vec<Edit>,
}

/// One edit of the configuration. Values are JSON, except `null`, which TOML does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Edit {
    /// Sets a key. Creates missing parent tables.
    Set {
        /// Path of the key: `["scheduler"]`, `["measure", "every"]`.
        path: Vec<String>,
        /// Value of the key.
        value: Value,
    },
    /// Removes a key.
    Unset {
        /// Path of the key.
        path: Vec<String>,
    },
    /// Changes the `[[link]]` entry with this name. Creates it if there is none.
    Link {
        /// Name of the device.
        name: String,
        /// Keys to set.
        #[serde(default)]
        set: Map<String, Value>,
        /// Keys to remove.
        #[serde(default)]
        unset: Vec<String>,
    },
    /// Changes an `[[app]]` entry.
    App {
        /// Index of the entry, starting at 0.
        index: usize,
        /// Keys to set.
        #[serde(default)]
        set: Map<String, Value>,
        /// Keys to remove.
        #[serde(default)]
        unset: Vec<String>,
    },
    /// Adds an `[[app]]` entry.
    AppAdd {
        /// Index at which to insert the entry, starting at 0. Default: at the end.
        #[serde(default)]
        at: Option<usize>,
        /// Keys and values of the entry.
        value: Map<String, Value>,
    },
    /// Removes an `[[app]]` entry.
    AppRemove {
        /// Index of the entry, starting at 0.
        index: usize,
    },
    /// Moves an `[[app]]` entry. The order matters, because the first entry that matches decides.
    AppMove {
        /// Index of the entry, starting at 0.
        index: usize,
        /// Index of the entry after the move.
        to: usize,
    },
}

/// Result of a configuration change or of its preview.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigChanged {
    /// The new text (TOML).
    pub text: String,
    /// Descriptions of the changes.
    pub changes: Vec<String>,
    /// Warnings of the configuration checker.
    pub warnings: Vec<String>,
    /// Identifies the new text.
    pub revision: String,
}

/// Request of `POST /v1/session`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionRequest {
    /// The full or the read-only token, or the value after `#token=` in the address of the web page.
    pub token: String,
}

/// Rights of the client: response of `POST /v1/session` and `GET /v1/session`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Session {
    /// Whether this client may change anything.
    pub may_change: bool,
}

/// Request of `POST /v1/ui`. An empty object selects the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UiRequest {
    /// Whether a browser of the requesting user on this machine opens the page. Other users can read the command line of the browser, so
    /// only this user can start a session with the returned address.
    #[serde(default)]
    pub here: bool,
}

/// Address of the web page: response of `POST /v1/ui`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UiAddress {
    /// Address of the page. The value after `#token=` is valid for two minutes and starts one session, with the rights of the requesting
    /// client.
    pub url: String,
    /// Whether this session may change anything.
    pub may_change: bool,
}
