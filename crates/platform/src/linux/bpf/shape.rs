//! Rates of running TCP flows: pacing rates and window clamps, set by an iterator over the namespace's TCP sockets.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use aya::maps::{HashMap, MapData, MapError};
use braid_control::steering::{MAX_SHAPES, Shape, ShapeStep, ShapedFlow, SteeringError};
use braid_model::{ByteCount, FlowId, Rate, Time};

use super::convert::FORWARDED_ID;
use super::iterate::{SocketIterator, WAIT};
use super::{BpfSteering, failed};
use crate::linux::sys::{abi, bpf as sys};

pub(super) const ACTION: &str = "set the rates of flows";

/// The programs, and what the kernel's maps contain.
pub(super) struct Shaper {
    shape: SocketIterator,
    unshape: OwnedFd,
    sweep: SocketIterator,
    current: BTreeMap<FlowId, abi::Shape>,
    /// Whether a limit was removed after the last run that ended.
    removed: bool,
}

impl Shaper {
    pub(super) fn is_stuck(&self) -> bool {
        self.shape.is_stuck() || self.sweep.is_stuck()
    }

    /// Makes the shapes in the kernel these.
    fn write(&mut self, ebpf: &mut aya::Ebpf, shapes: &BTreeMap<FlowId, Shape>) -> Result<(), SteeringError> {
        let mut map = by_cookie::<abi::Shape>(ebpf, "shapes")?;
        let gone: Vec<FlowId> = self.current.keys().filter(|id| !shapes.contains_key(id)).copied().collect();
        for id in gone {
            remove(&mut map, id)?;
            self.current.remove(&id);
            self.removed = true;
        }
        for (id, shape) in shapes {
            let (wanted, current) = (raw(shape), self.current.get(id));
            if current.is_none_or(|current| differs(*current, wanted)) {
                map.insert(id.0, wanted, 0).map_err(failed(ACTION))?;
                self.current.insert(*id, wanted);
            }
        }
        Ok(())
    }

    /// After a run that began after the last removal: the program has removed the entries of living sockets; this removes those of closed ones.
    fn forget_closed(&mut self, ebpf: &mut aya::Ebpf) -> Result<(), SteeringError> {
        if !self.removed {
            return Ok(());
        }
        let mut map = by_cookie::<[u32; 5]>(ebpf, "shaped")?;
        let held: Vec<FlowId> = map.keys().filter_map(Result::ok).map(FlowId).collect();
        for id in held.into_iter().filter(|id| !self.current.contains_key(id)) {
            remove(&mut map, id)?;
        }
        self.removed = false;
        Ok(())
    }

    pub(super) fn new(shape: OwnedFd, unshape: OwnedFd, sweep: OwnedFd) -> Self {
        Self { shape: SocketIterator::new(shape), unshape, sweep: SocketIterator::new(sweep), current: BTreeMap::new(), removed: false }
    }
}

/// Gives all shaped sockets their own settings back.
#[derive(Debug)]
pub struct Unshape(OwnedFd);

impl Unshape {
    /// A descriptor that does so when it is read to its end. It can be used once, by any process.
    ///
    /// # Errors
    /// The process or the system has no descriptor left.
    pub fn iterator(&self) -> std::io::Result<OwnedFd> {
        sys::start_iterator(self.0.as_fd()).map(OwnedFd::from)
    }
}

const _: () = assert!(abi::MAX_SHAPES == MAX_SHAPES);

impl BpfSteering {
    /// What gives all shaped sockets their own settings back, also after this process has died. `None` if the kernel cannot shape flows.
    pub fn unshape(&self) -> Option<std::io::Result<Unshape>> {
        let shaper = self.shaper.as_ref().ok()?;
        Some(shaper.unshape.try_clone().map(Unshape))
    }

    /// Gives sockets their own settings back that a daemon limited which died together with its watchdog. Starts a thread, which goes on after
    /// `wait` if a socket is locked. No flow is limited before it has ended.
    pub fn release_stale_shapes(&mut self, wait: Duration) -> std::io::Result<()> {
        let Ok(shaper) = &mut self.shaper else { return Ok(()) };
        shaper.sweep.run(wait).map(drop)
    }

    /// Makes the shapes in the kernel these and reads the flows' progress.
    pub(super) fn set_shapes(&mut self, mut shapes: BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError> {
        let forwarded = shapes.split_off(&FlowId(FORWARDED_ID));
        let windows = self.set_windows(&forwarded)?;
        let mut step = self.set_socket_shapes(&shapes)?;
        step.took += windows.took;
        step.flows.extend(windows.flows);
        Ok(step)
    }

    /// The same for flows that have a socket here.
    fn set_socket_shapes(&mut self, shapes: &BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError> {
        let Ok(shaper) = &mut self.shaper else { return Ok(ShapeStep { complete: true, ..ShapeStep::default() }) };
        if shaper.sweep.is_running() || shaper.shape.is_running() {
            return Ok(ShapeStep { took: WAIT, ..ShapeStep::default() });
        }
        let late = shaper.shape.take_late();
        if late.is_some() {
            shaper.forget_closed(&mut self.ebpf)?;
        }
        shaper.write(&mut self.ebpf, shapes)?;
        let run = shaper.shape.run(WAIT).map_err(|error| SteeringError { action: ACTION, reason: error.to_string() })?;
        if run.ended {
            shaper.forget_closed(&mut self.ebpf)?;
        }
        let rows = late.filter(|_| !run.ended).unwrap_or(run.rows);
        let flows = rows.chunks_exact(size_of::<abi::FlowRow>()).filter_map(abi::read).map(|row| progress(&row)).collect();
        Ok(ShapeStep { flows, took: run.took, complete: run.ended })
    }
}

/// One of the maps by socket cookie or id of a flow.
pub(super) fn by_cookie<'a, V: aya::Pod>(ebpf: &'a mut aya::Ebpf, name: &str) -> Result<HashMap<&'a mut MapData, u64, V>, SteeringError> {
    let map = ebpf.map_mut(name).ok_or_else(|| SteeringError { action: ACTION, reason: format!("the programs have no map {name}") })?;
    HashMap::try_from(map).map_err(failed(ACTION))
}

pub(super) fn remove<V: aya::Pod>(map: &mut HashMap<&mut MapData, u64, V>, id: FlowId) -> Result<(), SteeringError> {
    match map.remove(&id.0) {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(failed(ACTION)),
    }
}

/// Whether the kernel must get the new shape: limits that differ by less than 1 % are the same.
pub(super) fn differs(current: abi::Shape, wanted: abi::Shape) -> bool {
    let differ = |a: u32, b: u32| (a == 0) != (b == 0) || a.abs_diff(b) > a / 100;
    [(current.pacing, wanted.pacing), (current.window, wanted.window), (current.client_window, wanted.client_window)]
        .into_iter()
        .any(|(current, wanted)| differ(current, wanted))
}

pub(super) fn raw(shape: &Shape) -> abi::Shape {
    // 0 means no limit, and the highest pacing rate means that none was set.
    let limit = |value: Option<u64>, highest: u32| value.map_or(0, |value| u32::try_from(value).unwrap_or(highest).clamp(1, highest));
    let [window, client_window] = [shape.window, shape.client_window].map(|bytes| limit(bytes.map(ByteCount::get), i32::MAX as u32));
    abi::Shape { pacing: limit(shape.pacing.map(Rate::bytes_per_second), u32::MAX - 1), window, client_window }
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
