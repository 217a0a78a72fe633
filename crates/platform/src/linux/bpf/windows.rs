//! Windows of forwarded TCP flows: the switch lowers them in passing segments (`ebpf/window.h`), and measures the flows.

use std::collections::BTreeMap;
use std::time::Instant;

use braid_control::steering::{Shape, ShapeStep, ShapedFlow, SteeringError};
use braid_model::{ByteCount, FlowId};

use super::shape::{ACTION, by_cookie, differs, raw, remove};
use super::{BpfSteering, failed};
use crate::linux::sys::{abi, bpf as sys};

/// What the kernel's maps contain of forwarded flows.
#[derive(Default)]
pub(super) struct Windows {
    current: BTreeMap<FlowId, abi::Shape>,
}

impl Windows {
    /// Whether the switch must look its packets up.
    pub(super) fn is_needed(&self) -> bool {
        !self.current.is_empty()
    }

    /// Makes the entries these.
    fn write(&mut self, ebpf: &mut aya::Ebpf, shapes: &BTreeMap<FlowId, Shape>) -> Result<(), SteeringError> {
        let gone: Vec<FlowId> = self.current.keys().filter(|id| !shapes.contains_key(id)).copied().collect();
        for id in gone {
            remove(&mut by_cookie::<abi::Shape>(ebpf, "shapes")?, id)?;
            remove(&mut by_cookie::<abi::Window>(ebpf, "windows")?, id)?;
            self.current.remove(&id);
        }
        for (id, shape) in shapes {
            let (wanted, current) = (raw(shape), self.current.get(id));
            if current.is_some_and(|current| !differs(*current, wanted)) {
                continue;
            }
            if current.is_none() {
                by_cookie(ebpf, "windows")?.insert(id.0, abi::Window::default(), 0).map_err(failed(ACTION))?;
            }
            by_cookie(ebpf, "shapes")?.insert(id.0, wanted, 0).map_err(failed(ACTION))?;
            self.current.insert(*id, wanted);
        }
        Ok(())
    }
}

impl BpfSteering {
    /// Makes the limits of forwarded flows these, and reads the flows' progress.
    pub(super) fn set_windows(&mut self, shapes: &BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError> {
        let started = Instant::now();
        let needed = self.windows.is_needed();
        self.windows.write(&mut self.ebpf, shapes)?;
        if self.windows.is_needed() != needed {
            self.switch()?;
        }
        let mut flows = Vec::with_capacity(shapes.len());
        if !shapes.is_empty() {
            let map = by_cookie::<abi::Window>(&mut self.ebpf, "windows")?;
            let read_at = sys::now();
            for id in shapes.keys() {
                let Ok(window) = map.get(&id.0, 0) else { continue };
                let round_trip = round_trip_us(&window);
                let (rx, tx) = (ByteCount::new(window.rx), ByteCount::new(window.tx));
                flows.push(ShapedFlow { id: *id, rx, tx, read_at, rtt_us: round_trip, receive_rtt_us: round_trip });
            }
        }
        Ok(ShapeStep { flows, took: started.elapsed(), complete: true })
    }
}

/// The round trip between both ends: the sum of those to each of them, or that of the handshake until the server's is measured.
fn round_trip_us(window: &abi::Window) -> Option<u32> {
    let [server, client] = window.echo.map(|echo| echo.took);
    let sum = if server > 0 { server.saturating_add(client) } else { window.handshake };
    Some(sum).filter(|sum| *sum > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_the_sum_of_both_sides_once_the_server_has_answered() {
        let window = |server, client, handshake| {
            let [server, client] = [server, client].map(|took| abi::Echo { took, ..Default::default() });
            abi::Window { echo: [server, client], handshake, ..Default::default() }
        };
        assert_eq!(round_trip_us(&window(0, 0, 0)), None);
        assert_eq!(round_trip_us(&window(0, 2_000, 43_000)), Some(43_000));
        assert_eq!(round_trip_us(&window(40_000, 2_000, 43_000)), Some(42_000));
    }
}
