//! The virtual interface (`[virtual]`): figures 2.3, 2.7, 2.8 and 2.9 of Yap's thesis on the lab's links.

mod cost;
mod flows;
mod outages;
mod sum;
mod ten;

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::bond::Bonded;
use super::gateway::{LIMIT, SETTLE};
use super::overhead::note_other_daemons;
use super::report::Report;
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;

/// Address of the virtual interface, to which programs bind.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The configuration that makes it.
const CONFIG: &str = "[virtual]\naddress = \"10.99.0.1/24\"\n";
/// Port of the lab's echo.
const ECHO: u16 = 7;

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "virtual",
        "The virtual interface",
        "The experiments of Yap's thesis, section 2.3.2, with `[virtual] address = \"10.99.0.1/24\"`: programs bind to that address. Cost (figure 2.3): \
         one link, a bare veth pair or an emulated one of 100 Mbit/s and 5 ms each way. Each round has three parts, in changing order: no Braid, Braid \
         without the interface, and programs bound to the interface; before each part the machine rests for 1.5 s. Ten TCP flows and one by iperf3 for 1 s \
         (on the veth pair with windows of 64 KiB); there, ten flows that are paced to 0.4 Gbit/s each; 300 pings, the median; CPU: that of the whole machine (/proc/stat, niced programs excluded) per \
         gigabyte that such paced flows receive. Ratios are computed per round. The table shows geometric means with 95 % \
         confidence intervals (Student's t, of the logarithms); an aim is met if the interval reaches it and is no wider than 0.05 to each side. Power is \
         not measured, the CPU time stands for it. Two links (figure 2.7): five downloads by curl for 20 s over links of 20 and 10 Mbit/s with 10 ms each \
         way, over each link alone (by a rule, not bound) and through the interface, divided by the sum of the two alone, and by the links' payload \
         (0.965 of their rates). Outages (figure 2.8): on the same links, five downloads without end, four UDP exchanges of 50 datagrams a second and \
         ten new TCP connections a second, all through the interface; each link fails in turn for 20 s, with 20 s before, between and after. A download \
         has ended if its connection fails (it then starts anew), an exchange if it has no answer in the second half of an outage, a new connection if \
         no byte arrives within 5 s. Ten links (figure 2.9): the thesis's rates are not legible, so they are ours; one link is up, then every 10 s one more \
         gets its carrier; 24 downloads of 500 kB, each followed by the next; goodput is what they receive in the last 6 s of each step. Direct: each \
         flow over one link. Bonded: `carry = \"bond\"`, through the relay.",
    );
    cost::run(settings, &mut report)?;
    settings.keep(&report)?;
    sum::run(settings, &mut report)?;
    settings.keep(&report)?;
    outages::run(settings, &mut report)?;
    settings.keep(&report)?;
    ten::run(settings, &mut report)?;
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// How the flows of the virtual interface travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carry {
    Direct,
    Bonded,
}

impl Carry {
    const ALL: [Self; 2] = [Self::Direct, Self::Bonded];

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Bonded => "bonded",
        }
    }
}

/// A daemon with a virtual interface, until it is dropped.
enum Up {
    Direct(Daemon),
    Bonded(Bonded),
}

impl Up {
    /// Starts it, and waits until the lab's echo answers through the interface and the machine is at rest.
    fn start(settings: &Settings, lab: &Lab, carry: Carry) -> Result<Self> {
        let this = match carry {
            Carry::Direct => Self::Direct(Daemon::start(lab, &settings.braid, "max-throughput", CONFIG)?),
            Carry::Bonded => Self::Bonded(Bonded::with_rules(settings, lab, &format!("carry = \"bond\"\n{CONFIG}"))?),
        };
        let (begin, to) = (Instant::now(), SocketAddr::from((Lab::internet(10), ECHO)));
        while !lab.client().run(|| flows::echoes(to))?.is_ok_and(|answered| answered) {
            ensure!(begin.elapsed() < LIMIT, "the virtual interface does not work after {LIMIT:?}");
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(SETTLE);
        Ok(this)
    }

    fn daemon(&self) -> &Daemon {
        match self {
            Self::Direct(daemon) => daemon,
            Self::Bonded(bonded) => &bonded.daemon,
        }
    }
}

/// An error if the lab's emulator lost frames of these links. It also counts frames for a device that is down.
pub(super) fn ensure_none_missed(lab: &Lab, links: Range<usize>) -> Result<()> {
    let missed: u64 = links.map(|link| lab.counters(link).map(|c| c.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the lab was too slow and lost {missed} frames: the machine is too busy to measure");
    Ok(())
}
