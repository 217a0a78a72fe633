//! State of the switch's programs.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use braid_control::steering::Port;
use braid_model::Time;

/// The switch's programs.
pub(super) enum Lan {
    /// Not loaded.
    Unloaded,
    /// The kernel refused them, for this reason.
    Refused(String),
    /// Loaded.
    Loaded(Box<Switch>),
}

/// The loaded programs, and the devices at which they act.
pub(super) struct Switch {
    /// Iterator over the table.
    pub(super) iterator: Arc<OwnedFd>,
    /// The devices, each with what keeps its programs attached.
    pub(super) devices: BTreeMap<Port, Vec<Box<dyn Send + Sync>>>,
    /// When the clients' flows were counted last.
    pub(super) counted: Option<Time>,
}

impl Lan {
    pub(super) fn new(iterator: OwnedFd) -> Self {
        Self::Loaded(Box::new(Switch { iterator: Arc::new(iterator), devices: BTreeMap::new(), counted: None }))
    }

    /// The iterator, while flows are forwarded.
    pub(super) fn dump(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Loaded(switch) if !switch.devices.is_empty() => Some(switch.iterator.clone()),
            _ => None,
        }
    }

    /// The loaded programs, or why there are none.
    pub(super) fn switch(&mut self) -> Result<&mut Switch, &str> {
        match self {
            Self::Loaded(switch) => Ok(switch),
            Self::Refused(reason) => Err(reason),
            Self::Unloaded => Err("the programs are not loaded"),
        }
    }
}
