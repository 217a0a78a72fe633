//! TUN devices of this process. The kernel removes them when the process ends, however it ends.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::IpAddr;

use braid_model::LinkIndex;
use ipnet::IpNet;
use tokio::io::unix::AsyncFd;

use super::netlink;
use super::sys::tun;

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The file that makes devices cannot be opened.
    #[error(
        "cannot open /dev/net/tun to make the device {0}: {1}; a sandbox or container may hide it, or the kernel may lack the module tun: allow or load it"
    )]
    Maker(String, #[source] io::Error),
    /// The kernel rejected the device.
    #[error("cannot make the device {}: {}; {}", .0, .1, remedy(.1))]
    Make(String, #[source] io::Error),
    /// The device could not be set up.
    #[error("cannot set up the device {0}: {1}; this needs CAP_NET_ADMIN")]
    SetUp(String, #[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "this needs CAP_NET_ADMIN: run as root, or give the service AmbientCapabilities=CAP_NET_ADMIN",
        Some(libc::EBUSY | libc::EEXIST) => "another process has a device of this name in this network namespace: stop it",
        _ => "the kernel needs CONFIG_TUN",
    }
}

/// A TUN device, which lives as long as this.
pub struct Tun {
    file: AsyncFd<File>,
    name: String,
}

impl Tun {
    /// Makes a device, which is down. Must be called inside a tokio runtime. Needs `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// There is another device of this name, a privilege is missing, or the kernel has no such devices.
    pub fn make(name: &str) -> Result<Self, TunError> {
        let file = tun::open(name, tun::Kind::Packets).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => TunError::Maker(name.to_owned(), error),
            // The file's own permissions, not the privilege to make a device.
            io::ErrorKind::PermissionDenied if error.raw_os_error() == Some(libc::EACCES) => TunError::Maker(name.to_owned(), error),
            _ => TunError::Make(name.to_owned(), error),
        })?;
        let file = tun::register(file).map_err(|error| TunError::Make(name.to_owned(), error))?;
        Ok(Self { file, name: name.to_owned() })
    }

    /// Gives the device its addresses and the size of its largest packet in bytes, and turns it on. The system sends nothing over it by itself, and does
    /// not check over which device answers come. Returns the addresses that it has: the system may have IPv6 turned off.
    ///
    /// # Errors
    /// The kernel rejects the size or all addresses.
    pub fn set_up(&self, mtu: u32, addresses: &[IpNet]) -> Result<Vec<IpAddr>, TunError> {
        let failed = |error| TunError::SetUp(self.name.clone(), error);
        let index = LinkIndex(tun::index(&self.name).map_err(failed)?);
        // Without these settings it works too, except behind a strict reverse path filter.
        for (family, setting, value) in [("ipv4", "rp_filter", "2"), ("ipv6", "accept_ra", "0"), ("ipv6", "addr_gen_mode", "1")] {
            let _ = std::fs::write(format!("/proc/sys/net/{family}/conf/{}/{setting}", self.name), value);
        }
        netlink::turn_on(index, mtu).map_err(failed)?;
        let mut outcome = Ok(());
        let mut has = Vec::new();
        for address in addresses {
            match netlink::add_address(index, *address) {
                Ok(()) => has.push(address.addr()),
                Err(error) => outcome = Err(failed(error)),
            }
        }
        if has.is_empty() { outcome.map(|()| has) } else { Ok(has) }
    }

    /// Whether there is a device of its name: somebody may have removed it.
    pub fn exists(&self) -> bool {
        tun::index(&self.name).is_ok()
    }

    /// The next packet that the system sends over the device, from its IP header on: its length in bytes. Cancel safe.
    ///
    /// # Errors
    /// `EBADFD` once the device was removed.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.file.readable().await?;
            let read = ready.try_io(|file| {
                let mut file = file.get_ref();
                file.read(buffer)
            });
            if let Ok(read) = read {
                return read;
            }
        }
    }

    /// Hands a packet to the system as if it came over the device. Does not block.
    ///
    /// # Errors
    /// `EIO` while the device is down, `EINVAL` if it is no IP packet.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        let mut file = self.file.get_ref();
        file.write(packet).map(drop)
    }
}
