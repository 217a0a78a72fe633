//! Interfaces to the running system: names, time of day, battery, systemd.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use braid_control::core::Names;
use braid_control::steering::{AppId, ExeId};
use braid_decide::motion::{INTERVAL, MotionDetector};
use braid_decide::tradeoff::Supply;
use braid_model::{Application, DeviceModel, LinkIndex};
use braid_platform::battery::BatterySensor;
use braid_platform::linux::battery::{SUPPLIES, SysBattery};
use braid_platform::linux::model::ModelFinder;
use braid_platform::linux::motion::Accelerometer;
use braid_platform::linux::process::{self, CgroupTree};
use braid_platform::linux::sys::bpf::now;
use tokio::sync::mpsc;

/// Interval of battery readings.
const BATTERY_INTERVAL: Duration = Duration::from_secs(2);

/// Interval of the search for an accelerometer.
const SENSOR_INTERVAL: Duration = Duration::from_secs(2);

/// Milliseconds of Unix time.
pub(super) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

/// Seconds of Unix time.
pub(super) fn unix() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| i64::try_from(span.as_secs()).unwrap_or(i64::MAX))
}

/// Time since local midnight by the wall clock.
pub(super) fn local_time() -> Duration {
    let time = jiff::Zoned::now().time();
    let seconds = (i64::from(time.hour()) * 60 + i64::from(time.minute())) * 60 + i64::from(time.second());
    Duration::new(seconds.unsigned_abs(), time.subsec_nanosecond().unsigned_abs())
}

/// Looks up names in the running system.
pub(super) struct SystemNames {
    pub(super) cgroups: Option<CgroupTree>,
}

impl Names for SystemNames {
    fn executable(&mut self, path: &Path) -> Option<ExeId> {
        process::exe_id(path)
    }

    fn cgroup(&mut self, path: &str) -> Option<(u64, u32)> {
        self.cgroups.as_ref()?.find(path)
    }

    fn application(&mut self, app: &AppId, pid: u32, cgroup: u64) -> (Application, Option<String>) {
        // The process may have exited and its id may have been reused: only the executable that the kernel saw counts.
        let exe = process::exe_path(pid).filter(|_| process::exe_inode(pid).is_ok_and(|inode| inode == app.exe.inode));
        let group = self.cgroups.as_mut().and_then(|tree| tree.path(cgroup, pid)).filter(|path| *path != "/").map(str::to_owned);
        (Application { exe, name: app.name.clone() }, group)
    }
}

/// Reads the battery periodically on a separate thread, since some firmware is slow. The thread ends with the receiver.
pub(super) fn watch_battery(sys: &Path) -> mpsc::Receiver<Option<Supply>> {
    let (send, receive) = mpsc::channel(1);
    let mut sensor = SysBattery::new(&sys.join(SUPPLIES));
    std::thread::spawn(move || {
        loop {
            let reading = sensor.read();
            let supply = reading.map(|reading| Supply { level: reading.level, plugged: reading.plugged, power: reading.power });
            if send.blocking_send(supply).is_err() {
                return;
            }
            std::thread::sleep(BATTERY_INTERVAL);
        }
    });
    receive
}

/// Reads the accelerometer periodically on a separate thread, while `wanted` is set: whether the machine moves, at each change. `root` is
/// [`SENSORS`](motion::SENSORS) on a real system. The thread ends with the receiver.
pub(super) fn watch_motion(root: PathBuf, wanted: Arc<AtomicBool>) -> mpsc::Receiver<Option<bool>> {
    let (send, receive) = mpsc::channel(1);
    std::thread::spawn(move || {
        let (mut detector, mut sensor, mut known) = (MotionDetector::default(), None, None);
        loop {
            // Sampling keeps a sensor awake, so it happens only while a rule asks for it.
            sensor = if wanted.load(Ordering::Relaxed) { sensor.or_else(|| Accelerometer::find(&root)) } else { None };
            let sample = sensor.as_ref().and_then(Accelerometer::read);
            let moving = match sample {
                Some(axes) => detector.on_sample(now(), axes),
                None => {
                    (detector, sensor) = Default::default();
                    None
                }
            };
            if moving != known && send.blocking_send(moving).is_err() {
                return;
            }
            known = moving;
            if send.is_closed() {
                return;
            }
            std::thread::sleep(if sensor.is_some() { INTERVAL } else { SENSOR_INTERVAL });
        }
    });
    receive
}

/// A link whose device's model was looked up, the device's name, and the model.
pub(super) type Identified = (LinkIndex, String, Option<DeviceModel>);

/// Looks up models of network devices on a separate thread, since the databases are large. `sys` is the tree of sysfs. The thread ends with the
/// sender.
pub(super) fn find_models(sys: &Path) -> (std::sync::mpsc::Sender<(LinkIndex, String)>, mpsc::UnboundedReceiver<Identified>) {
    let mut finder = ModelFinder::new(sys);
    let (ask, asked) = std::sync::mpsc::channel::<(LinkIndex, String)>();
    let (send, receive) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for (link, device) in asked {
            let model = finder.model(link, &device);
            if send.send((link, device, model)).is_err() {
                return;
            }
        }
    });
    (ask, receive)
}

/// Notifies systemd of a state (sd_notify(3)), if it started this process.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = std::os::unix::net::UnixDatagram::unbound().and_then(|socket| match path.to_str().and_then(|path| path.strip_prefix('@')) {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            let addr = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            socket.send_to_addr(state.as_bytes(), &addr)
        }
        None => socket.send_to(state.as_bytes(), &path),
    });
    if let Err(error) = sent {
        tracing::debug!("cannot notify systemd of {state}: {error}");
    }
}
