//! The system's part of a relay that forwards its clients' packets: a device of its own, firewall rules, and the settings that make the kernel forward
//! ([`super::gateway`] does the same for devices on a LAN).

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use braid_decide::outlet::{DEVICE, RECORDS, TABLE, ruleset};
use ipnet::IpNet;

use super::gateway::{GatewayError, Tables};
use super::sys::tun;
use super::tun::{Tun, TunError};

const TABLES: Tables = Tables { rules: TABLE, records: RECORDS };
/// How long to wait for a device of this name to go. The kernel may still be removing that of a relay that has died, and the relay's watchdog has it for a
/// moment.
const WAIT: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(50);

/// Why a relay cannot forward packets.
#[derive(Debug, thiserror::Error)]
pub enum OutletError {
    /// The device cannot be made.
    #[error(transparent)]
    Device(#[from] TunError),
    /// The kernel cannot be made to forward.
    #[error(transparent)]
    Forward(#[from] GatewayError),
}

/// The device over which the packets of a relay's clients enter and leave the system. What it changed in the system is reverted when it is dropped; after a
/// kill by [`sweep`].
pub struct Outlet {
    device: Tun,
    addresses: Vec<IpAddr>,
}

impl Outlet {
    /// Makes the device with these addresses and the networks around them, in which the clients' addresses are, and lets the kernel forward from and to it.
    /// Must be called inside a tokio runtime. Takes about 20 ms, and 8 s at most. Needs `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// A privilege is missing, another relay of this network namespace forwards packets, or the kernel or `nft` lacks something.
    pub fn open(mtu: u32, addresses: &[IpNet]) -> Result<Self, OutletError> {
        await_device();
        let device = Tun::make(DEVICE)?;
        // The settings of a relay that was killed are recorded; this one must not take them for those of the system.
        TABLES.sweep()?;
        let mut outlet = Self { device, addresses: Vec::new() };
        outlet.addresses = outlet.device.set_up(mtu, addresses)?;
        let ipv6 = outlet.addresses.iter().any(IpAddr::is_ipv6);
        TABLES.forward(ipv6, false, &mut Vec::new(), |closed| Ok(ruleset(closed)))?;
        Ok(outlet)
    }

    /// The device.
    pub fn device(&self) -> &Tun {
        &self.device
    }

    /// The device's own addresses, by which it is known which families it forwards.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if let Err(error) = TABLES.sweep() {
            tracing::warn!("settings of the relay's forwarding may remain: {error}");
        }
    }
}

/// Reverts what a relay that was killed changed in this network namespace, unless another one runs by now. Returns whether there was anything.
///
/// # Errors
/// A setting cannot be written, or a table cannot be read or removed.
pub fn sweep() -> Result<bool, GatewayError> {
    await_device();
    // Whoever has the device is in charge of the rest.
    match tun::open(DEVICE, tun::Kind::Packets) {
        Err(error) if is_busy(&error) => Ok(false),
        // Without a file that makes devices there is no such relay.
        _device => TABLES.sweep(),
    }
}

/// Waits until no process has the device, for a limited time.
fn await_device() {
    let begin = Instant::now();
    while tun::open(DEVICE, tun::Kind::Packets).is_err_and(|error| is_busy(&error)) && begin.elapsed() < WAIT {
        std::thread::sleep(POLL);
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}
