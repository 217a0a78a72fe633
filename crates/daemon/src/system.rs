//! Interfaces to the running system: names, time of day, battery, systemd.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use braid_control::core::Names;
use braid_control::steering::{AppId, ExeId};
use braid_decide::motion::{INTERVAL, MotionDetector};
use braid_decide::tradeoff::Supply;
use braid_model::{Application, DeviceModel, LinkIndex, Time};
use braid_platform::battery::BatterySensor;
use braid_platform::linux::battery::{SUPPLIES, SysBattery};
use braid_platform::linux::model::ModelFinder;
use braid_platform::linux::motion::Accelerometer;
use braid_platform::linux::netlink::wireless;
use braid_platform::linux::process::{self, CgroupTree};
use braid_platform::linux::sys::bpf::now;
use tokio::sync::mpsc;

/// Interval of battery readings.
const BATTERY_INTERVAL: Duration = Duration::from_secs(2);

/// Interval of the search for an accelerometer.
const SENSOR_INTERVAL: Duration = Duration::from_secs(2);
/// Number of consecutive readings of an accelerometer that may fail before the motion counts as unknown.
const MAX_FAILURES: u32 = 3;
/// Interval of readings of the wireless networks' names.
const SSID_INTERVAL: Duration = Duration::from_secs(1);

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

/// A fact about the system that a thread of its own reads while a rule depends on it, since drivers can be slow. Otherwise the thread sleeps.
pub(super) struct Watched<T> {
    values: mpsc::Receiver<T>,
    wanted: Arc<AtomicBool>,
    thread: Thread,
}

impl<T: Send + 'static> Watched<T> {
    /// Starts the thread. It passes to `read` whether the fact is wanted; `read` returns the fact, if there is something new to say, and the time until
    /// the next call.
    fn start(mut read: impl FnMut(bool) -> (Option<T>, Duration) + Send + 'static) -> Self {
        let (send, values) = mpsc::channel(1);
        let wanted = Arc::new(AtomicBool::new(false));
        let asked = wanted.clone();
        let work = move || {
            loop {
                let wanted = asked.load(Ordering::Acquire);
                let (value, pause) = read(wanted);
                if value.is_some_and(|value| send.blocking_send(value).is_err()) || send.is_closed() {
                    return;
                }
                if wanted {
                    std::thread::park_timeout(pause);
                } else {
                    std::thread::park();
                }
            }
        };
        let thread = std::thread::spawn(work).thread().clone();
        Self { values, wanted, thread }
    }

    /// Sets whether a rule depends on the fact.
    pub(super) fn want(&self, wanted: bool) {
        if self.wanted.swap(wanted, Ordering::AcqRel) != wanted {
            self.thread.unpark();
        }
    }

    /// The next new value. Never returns if there is none.
    pub(super) async fn next(&mut self) -> Option<T> {
        self.values.recv().await
    }
}

impl<T> Drop for Watched<T> {
    fn drop(&mut self) {
        self.values.close();
        self.thread.unpark();
    }
}

/// Whether the machine moves, by its accelerometer.
struct Motion {
    /// Directory of the sensors.
    root: PathBuf,
    sensor: Option<Accelerometer>,
    detector: MotionDetector,
    /// Consecutive failures of the sensor.
    failures: u32,
    moving: Option<bool>,
}

impl Motion {
    /// Takes a sample if it is `wanted`: sampling keeps a sensor awake. Returns whether the machine moves if that has changed.
    fn sample(&mut self, now: Time, wanted: bool) -> Option<Option<bool>> {
        self.sensor = if wanted { self.sensor.take().or_else(|| Accelerometer::find(&self.root)) } else { None };
        let moving = match self.sensor.as_ref().map(Accelerometer::read) {
            Some(Some(axes)) => {
                self.failures = 0;
                self.detector.on_sample(now, axes)
            }
            // A sensor may be busy for a moment.
            Some(None) if self.failures < MAX_FAILURES => {
                self.failures += 1;
                self.moving
            }
            _ => {
                (self.sensor, self.detector, self.failures) = (None, MotionDetector::default(), 0);
                None
            }
        };
        let changed = moving != self.moving;
        self.moving = moving;
        changed.then_some(moving)
    }
}

/// Whether the machine moves, at each change; `None` if that is not known. `root` is [`SENSORS`](braid_platform::linux::motion::SENSORS) on a real system.
pub(super) fn watch_motion(root: PathBuf) -> Watched<Option<bool>> {
    let mut motion = Motion { root, sensor: None, detector: MotionDetector::default(), failures: 0, moving: None };
    Watched::start(move |wanted| {
        let value = motion.sample(now(), wanted);
        (value, if motion.sensor.is_some() { INTERVAL } else { SENSOR_INTERVAL })
    })
}

/// The names of the wireless networks that this machine is connected to, or why they cannot be read.
pub(super) fn watch_ssids() -> Watched<io::Result<BTreeSet<String>>> {
    let mut known = false;
    Watched::start(move |wanted| {
        let value = match wanted {
            true => Some(wireless::ssids()),
            // Nobody asks any more.
            false => known.then(|| Ok(BTreeSet::new())),
        };
        known = wanted;
        (value, SSID_INTERVAL)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_read_only_while_a_rule_depends_on_it_and_its_thread_ends_with_it() {
        let alive = Arc::new(());
        let held = alive.clone();
        let mut fact = Watched::start(move |wanted| {
            let _ = &held;
            (Some(wanted), Duration::from_millis(1))
        });
        assert_eq!(fact.values.blocking_recv(), Some(false));
        assert!(fact.values.try_recv().is_err(), "it sleeps");
        fact.want(true);
        let mut read = std::iter::from_fn(|| fact.values.blocking_recv());
        assert!(read.find(|wanted| *wanted).is_some() && read.next() == Some(true), "it is read again and again");
        fact.want(false);
        while fact.values.blocking_recv() != Some(false) {}
        drop(fact);
        while Arc::strong_count(&alive) > 1 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn one_failed_reading_of_an_accelerometer_does_not_end_the_motion() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("iio:device0");
        std::fs::create_dir(&device).unwrap();
        std::fs::write(device.join("in_accel_scale"), "0.001\n").unwrap();
        let write = |raw: &str| ["x", "y", "z"].map(|axis| std::fs::write(device.join(format!("in_accel_{axis}_raw")), raw).unwrap());
        let mut motion =
            Motion { root: root.path().to_owned(), sensor: None, detector: MotionDetector::default(), failures: 0, moving: None };
        let mut time = Time::ZERO;
        let mut sample = |motion: &mut Motion, raw: &str| {
            write(raw);
            time = time + INTERVAL;
            motion.sample(time, true)
        };
        let shaken = (0..1000).find_map(|step: u32| sample(&mut motion, ["0", "20000"][step as usize % 2]));
        assert_eq!(shaken, Some(Some(true)));
        for _ in 0..MAX_FAILURES {
            assert_eq!(sample(&mut motion, "busy"), None);
        }
        assert_eq!(sample(&mut motion, "20000"), None);
        let ended: Vec<_> = (0..=MAX_FAILURES).map(|_| sample(&mut motion, "busy")).collect();
        assert_eq!(ended.last(), Some(&Some(None)), "{ended:?}");
    }

    #[test]
    fn a_sensor_that_nobody_asks_for_is_not_read() {
        let mut motion = Motion {
            root: PathBuf::from("/nonexistent"),
            sensor: None,
            detector: MotionDetector::default(),
            failures: 0,
            moving: Some(true),
        };
        assert_eq!(motion.sample(Time::ZERO, false), Some(None));
        assert_eq!(motion.sample(Time::ZERO, false), None);
    }
}
