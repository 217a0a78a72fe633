//! A radio of a group with a key: a MACsec device over a TAP device of this process, and the programs of `ebpf/adhoc_sealed.h` between that and the radio.
//!
//! The TAP device goes with its file, and the MACsec device with the TAP device.

use std::fs::File;
use std::io;
use std::time::Duration;

use aya::maps::{HashMap, MapData};
use aya::programs::{LinkOrder, TcAttachType};
use braid_control::adhoc::Port;
use braid_control::adhoc::group::{GroupKey, OVERHEAD, Sender, Sending, channel};
use braid_control::steering::SteeringError;
use braid_decide::adhoc::frame::ETHER_TYPE;
use braid_model::{LinkIndex, Mac, Time};
use socket2::Socket;

use super::super::forward::{PRIORITY, Place, attach_classifier};
use super::MOST_MTU;
use crate::linux::netlink;
use crate::linux::netlink::macsec;
use crate::linux::sys::{bpf as sys, socket, tun};

pub(super) const OUT_PROGRAM: &str = "braid_adhoc_sealed_out";
pub(super) const IN_PROGRAM: &str = "braid_adhoc_sealed_in";
/// The number of packets is read again after this time. Meanwhile a smaller one is said.
const READ: Duration = Duration::from_secs(1);

/// The key of the group, and the random number of this start.
#[derive(Debug, Clone)]
pub struct Membership {
    /// The key.
    pub key: GroupKey,
    /// The number, as in this host's frames.
    pub instance: u64,
}

/// The devices of a radio.
pub(super) struct Seal {
    /// The MACsec device.
    pub(super) device: LinkIndex,
    pub(super) name: String,
    /// Reads Braid's frames that were encrypted.
    pub(super) socket: Socket,
    radio: LinkIndex,
    tap: LinkIndex,
    sending: Sending,
    read: Option<Time>,
    gone: bool,
    _out: Option<Box<dyn Send + Sync>>,
    _in: Option<Box<dyn Send + Sync>>,
    _file: File,
}

/// Where a radio of a device is sealed.
pub(super) struct Spot<'a> {
    /// Name and address of the device.
    pub(super) device: (&'a str, Mac),
    pub(super) place: usize,
    pub(super) port: &'a Port,
    /// Counts up with each seal of the device: no key is used twice.
    pub(super) epoch: u32,
}

impl Seal {
    /// Makes the devices and attaches the programs. The error says what failed.
    pub(super) fn make(
        ebpf: &mut aya::Ebpf,
        seals: &mut HashMap<MapData, u32, u32>,
        member: &Membership,
        spot: &Spot<'_>,
    ) -> Result<Self, String> {
        let Spot { device: (device, mac), place, port, epoch } = spot;
        let [tap_name, name] = ['w', 'm'].map(|side| name_of(device, *place, side));
        if let Some(taken) = [&tap_name, &name].into_iter().find(|name| tun::index(name).is_ok()) {
            return Err(format!(
                "there is a device {taken} already, whose name the group's key needs: remove it with `ip link del {taken}`"
            ));
        }
        let failed = |what: &str, error: &io::Error| format!("cannot {what}: {error}");
        let file = tun::open(&tap_name, tun::Kind::Frames).map_err(|error| failed("make a TAP device for MACsec", &error))?;
        let tap = LinkIndex(tun::index(&tap_name).map_err(|error| failed("find the TAP device for MACsec", &error))?);
        let radio = u8::try_from(*place).map_err(|error| error.to_string())?;
        let at = |device, side| Place { device, side, order: LinkOrder::default(), priority: PRIORITY, stays: false };
        // Before the device is on: nothing leaves over it in clear.
        let out = attach_classifier(ebpf, OUT_PROGRAM, at(&tap_name, TcAttachType::Egress))?;
        netlink_ready(tap, MOST_MTU).map_err(|error| failed("set up the TAP device for MACsec", &error))?;
        macsec::make(&name, tap, channel(*mac, radio)).map_err(|error| explained(&error))?;
        let index = LinkIndex(tun::index(&name).map_err(|error| failed("find the MACsec device", &error))?);
        let sender = Sender { device: *mac, instance: member.instance, radio, epoch: *epoch };
        macsec::set_sender(index, &member.key.sender(&sender)).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => "the kernel has no AES in Galois counter mode: load the modules gcm and aes".to_owned(),
            _ => failed("set the key of the MACsec device", &error),
        })?;
        netlink_ready(index, MOST_MTU - OVERHEAD).map_err(|error| failed("set up the MACsec device", &error))?;
        let socket = socket::frames(index, ETHER_TYPE, None).map_err(|error| failed("open a socket at the MACsec device", &error))?;
        let attached = attach_classifier(ebpf, IN_PROGRAM, at(&port.name, TcAttachType::Ingress))?;
        for (from, to) in [(tap, port.index), (port.index, tap)] {
            seals.insert(from.0, to.0, 0).map_err(|error| error.to_string())?;
        }
        let sending = Sending { epoch: *epoch, packet: 1 };
        Ok(Self {
            device: index,
            name,
            socket,
            radio: port.index,
            tap,
            sending,
            read: None,
            gone: false,
            _out: out,
            _in: attached,
            _file: file,
        })
    }

    /// Removes what the programs know about it.
    pub(super) fn forget(&self, seals: &mut HashMap<MapData, u32, u32>) {
        for device in [self.tap, self.radio] {
            // Whatever fails here is about a device that is gone.
            let _ = seals.remove(&device.0);
        }
    }

    /// How this host encrypts for the radio; `None` if somebody has removed one of the devices.
    pub(super) fn sending(&mut self) -> Option<Sending> {
        let now = sys::now();
        if self.read.is_none_or(|read| now.since(read) >= READ) {
            self.read = Some(now);
            match macsec::sent_packets(self.device) {
                Ok(sent) => self.sending.packet = self.sending.packet.max(sent.saturating_add(1)),
                Err(error) => self.gone |= error.raw_os_error() == Some(libc::ENODEV),
            }
        }
        (!self.gone).then_some(self.sending)
    }

    pub(super) fn accept(&self, member: &Membership, sender: &Sender, packet: u64) -> Result<(), SteeringError> {
        macsec::add_receiver(self.device, sender.channel(), &member.key.sender(sender), packet)
            .map_err(|error| SteeringError { action: "set the key of a neighbour", reason: error.to_string() })
    }

    pub(super) fn refuse(&self, device: Mac, remote: u8) -> Result<(), SteeringError> {
        macsec::remove_receiver(self.device, channel(device, remote))
            .map_err(|error| SteeringError { action: "remove the key of a neighbour", reason: error.to_string() })
    }
}

/// Turns a device on that the system itself does not use.
fn netlink_ready(device: LinkIndex, mtu: u32) -> io::Result<()> {
    macsec::want_no_addresses(device)?;
    netlink::turn_on(device, mtu)
}

/// Why the kernel makes no MACsec device.
fn explained(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => NO_MACSEC.to_owned(),
        Some(libc::EINVAL) => "the kernel's MACsec has no extended packet numbers: they came with Linux 5.7".to_owned(),
        _ => format!("cannot make a MACsec device: {error}"),
    }
}

/// What a group with a key needs.
pub(super) const NO_MACSEC: &str =
    "the kernel has no MACsec, which a group with a key needs: load the module macsec, or leave key_file out";

/// Name of a device of a radio: that of the ad-hoc device, shortened if need be, the side, and the place.
fn name_of(device: &str, place: usize, side: char) -> String {
    const LONGEST: usize = 15;
    let end = format!("-{side}{place}");
    let kept: String = device.chars().take(LONGEST - end.len()).collect();
    kept + &end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_and_differ() {
        assert_eq!(name_of("vi0", 2, 'm'), "vi0-m2");
        assert_eq!(name_of("a-name-of-15-by", 7, 'w'), "a-name-of-15-w7");
    }

    #[test]
    fn a_kernel_without_macsec_is_named() {
        let of = |code| explained(&io::Error::from_raw_os_error(code));
        assert!(of(libc::EOPNOTSUPP).contains("load the module macsec, or leave key_file out"));
        assert!(of(libc::EINVAL).contains("Linux 5.7") && of(libc::EPERM).contains("cannot make a MACsec device"));
    }
}
