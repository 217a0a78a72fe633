//! Rates of running TCP flows: pacing rates and window clamps, set by an iterator over the namespace's TCP sockets.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use aya::maps::HashMap;
use braid_control::steering::{Shape, ShapedFlow, SteeringError};
use braid_model::{ByteCount, FlowId, Rate, Time};

use super::{BpfSteering, failed};
use crate::linux::sys::{abi, bpf as sys};

const ACTION: &str = "set the rates of flows";

/// The two programs, and what the kernel's map contains.
pub(super) struct Shaper {
    shape: OwnedFd,
    unshape: OwnedFd,
    current: BTreeMap<FlowId, abi::Shape>,
}

impl Shaper {
    pub(super) fn new(shape: OwnedFd, unshape: OwnedFd) -> Self {
        Self { shape, unshape, current: BTreeMap::new() }
    }
}

impl BpfSteering {
    /// A descriptor that gives all shaped sockets their own settings back when it is read to its end, also after this process has died. It can be used
    /// once. `None` if the kernel cannot shape flows.
    pub fn unshape_on_read(&self) -> Option<std::io::Result<OwnedFd>> {
        let shaper = self.shaper.as_ref().ok()?;
        Some(sys::start_iterator(shaper.unshape.as_fd()).map(OwnedFd::from))
    }

    /// Makes the shapes in the kernel exactly these and reads the flows' progress.
    pub(super) fn set_shapes(&mut self, shapes: &BTreeMap<FlowId, Shape>) -> Result<Vec<ShapedFlow>, SteeringError> {
        let Ok(shaper) = &mut self.shaper else { return Ok(Vec::new()) };
        let fail = |error: std::io::Error| SteeringError { action: ACTION, reason: error.to_string() };
        let no_map = || SteeringError { action: ACTION, reason: "the programs have no map shapes".to_owned() };
        let map = self.ebpf.map_mut("shapes").ok_or_else(no_map)?;
        let mut map: HashMap<_, u64, abi::Shape> = HashMap::try_from(map).map_err(failed(ACTION))?;
        let wanted: BTreeMap<_, _> = shapes.iter().take(abi::MAX_SHAPES).map(|(id, shape)| (*id, raw(shape))).collect();
        let gone: Vec<FlowId> = shaper.current.keys().filter(|id| !wanted.contains_key(id)).copied().collect();
        for id in &gone {
            map.remove(&id.0).map_err(failed(ACTION))?;
            shaper.current.remove(id);
        }
        for (id, shape) in &wanted {
            if shaper.current.get(id) != Some(shape) {
                map.insert(id.0, shape, 0).map_err(failed(ACTION))?;
                shaper.current.insert(*id, *shape);
            }
        }
        let mut bytes = Vec::new();
        sys::start_iterator(shaper.shape.as_fd()).map_err(fail)?.read_to_end(&mut bytes).map_err(fail)?;
        // The program has given the living sockets their settings back; this removes the entries of closed ones.
        if let Some(map) = self.ebpf.map_mut("shaped").filter(|_| !gone.is_empty()) {
            let mut map: HashMap<_, u64, [u32; 5]> = HashMap::try_from(map).map_err(failed(ACTION))?;
            for id in gone {
                let _ = map.remove(&id.0);
            }
        }
        Ok(bytes.chunks_exact(size_of::<abi::FlowRow>()).filter_map(abi::read).map(|row| progress(&row)).collect())
    }
}

fn raw(shape: &Shape) -> abi::Shape {
    // 0 means no limit, and the highest pacing rate means that none was set.
    let limit = |value: Option<u64>, highest: u32| value.map_or(0, |value| u32::try_from(value).unwrap_or(highest).clamp(1, highest));
    let window = limit(shape.window.map(ByteCount::get), i32::MAX as u32);
    abi::Shape { pacing: limit(shape.pacing.map(Rate::bytes_per_second), u32::MAX - 1), window }
}

fn progress(row: &abi::FlowRow) -> ShapedFlow {
    let micros = |rtt: u32| Some(rtt).filter(|rtt| *rtt > 0);
    ShapedFlow {
        id: FlowId(row.flow.id),
        rx: ByteCount::new(row.rx),
        tx: ByteCount::new(row.tx),
        read_at: Time::from_nanos(row.read_at),
        rtt_us: micros(row.srtt_us),
        receive_rtt_us: micros(row.rcv_rtt_us),
    }
}
