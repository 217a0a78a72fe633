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

/// Dumps the table of forwarded flows: `program` prepares that (`braid_tend`), then this process reads `table`.
pub(super) struct Dumper {
    pub(super) program: OwnedFd,
    pub(super) table: OwnedFd,
}

/// The loaded programs, and the devices at which they act.
pub(super) struct Switch {
    /// Dumps the table.
    pub(super) dumper: Arc<Dumper>,
    /// The devices, each with what keeps its programs attached.
    pub(super) devices: BTreeMap<Port, Vec<Box<dyn Send + Sync>>>,
    /// When the clients' flows were counted last.
    pub(super) counted: Option<Time>,
    /// For how many flows the table has room.
    room: usize,
    /// Whether more than a quarter of that is used.
    pressure: bool,
}

impl Switch {
    /// Notes how many flows are in the table. Returns whether it has come under pressure, or is so no longer.
    pub(super) fn note_used(&mut self, used: usize) -> bool {
        let pressure = used > self.room / 4;
        std::mem::replace(&mut self.pressure, pressure) != pressure
    }
}

impl Lan {
    /// The loaded programs, with room for this number of flows.
    pub(super) fn new(dumper: Dumper, room: usize) -> Self {
        Self::Loaded(Box::new(Switch { dumper: Arc::new(dumper), devices: BTreeMap::new(), counted: None, room, pressure: false }))
    }

    /// Whether more than a quarter of the table of forwarded flows is used.
    pub(super) fn is_under_pressure(&self) -> bool {
        matches!(self, Self::Loaded(switch) if switch.pressure)
    }

    /// What dumps the table, while flows are forwarded.
    pub(super) fn dump(&self) -> Option<Arc<Dumper>> {
        match self {
            Self::Loaded(switch) if !switch.devices.is_empty() => Some(switch.dumper.clone()),
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
