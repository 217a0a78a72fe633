//! The configuration over the API: read, preview a change, apply it, take it back.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `GET /v1/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigView {
    /// The file; `null`: there is none, and the defaults hold. The first change makes one.
    pub path: Option<String>,
    /// What stands in it (TOML).
    pub text: String,
    /// Names this text; a change says which one it was made for.
    pub revision: String,
    /// Whether the daemon can write it.
    pub writable: bool,
    /// Whether there is a change to take back.
    pub can_undo: bool,
}

/// What `POST /v1/config` and `POST /v1/config/preview` take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigChange {
    /// The text that the edits were made for, as [`ConfigView`] names it.
    pub revision: String,
    /// What to change, one after the other.
    #[schemars(length(max = 1000))]
    pub edits: Vec<Edit>,
}

/// One change of the configuration. Values are JSON; TOML has no `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Edit {
    /// Sets a key, and makes the tables on the way.
    Set {
        /// The key: `["scheduler"]`, `["measure", "every"]`.
        path: Vec<String>,
        /// Its value.
        value: Value,
    },
    /// Removes a key.
    Unset {
        /// The key.
        path: Vec<String>,
    },
    /// Changes the `[[link]]` entry of this name; makes one if there is none.
    Link {
        /// The device's name.
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
        /// Which, counted from 0.
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
        /// Before which entry, counted from 0; left out: last.
        #[serde(default)]
        at: Option<usize>,
        /// The entry.
        value: Map<String, Value>,
    },
    /// Removes an `[[app]]` entry.
    AppRemove {
        /// Which, counted from 0.
        index: usize,
    },
    /// Puts an `[[app]]` entry elsewhere: the first that matches decides.
    AppMove {
        /// Which, counted from 0.
        index: usize,
        /// The place it has afterwards.
        to: usize,
    },
}

/// What a change makes of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigChanged {
    /// The new text (TOML).
    pub text: String,
    /// What changes, in plain words.
    pub changes: Vec<String>,
    /// What the checker warns of.
    pub warnings: Vec<String>,
    /// Names the new text.
    pub revision: String,
}

/// What `POST /v1/session` takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionRequest {
    /// The full or the read-only token, or what stood behind `#token=` in the page's address.
    pub token: String,
}

/// Who is asking: the answer to `POST /v1/session` and `GET /v1/session`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Session {
    /// Whether this client may change anything.
    pub may_change: bool,
}

/// What `POST /v1/ui` takes; nothing: the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UiRequest {
    /// The page is opened by a browser of the asking user on this machine, whose command line others can read: nobody else can begin a
    /// session by the address.
    #[serde(default)]
    pub here: bool,
}

/// Where the web page is: the answer to `POST /v1/ui`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UiAddress {
    /// Its address; what stands behind `#token=` begins one session, within two minutes, that may do what the one who asked may.
    pub url: String,
    /// Whether that is to change things.
    pub may_change: bool,
}
