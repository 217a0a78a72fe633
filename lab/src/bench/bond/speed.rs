//! Speed of the bond on links without limits, compared with bare TCP, a bare QUIC stream and wireguard-go.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use braid_model::ByteCount;
use serde_json::{Value, json};

use super::origin::{Origin, TcpVariant};
use super::stream::{self, Outcome, parse_spent};
use super::{Bonded, Settings};
use crate::bench::overhead::cpu;
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::median;
use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::spec::LinkSpec;

const LINKS: [&str; 2] = ["eth0", "eth1"];
/// Number of concurrent flows.
const FLOWS: [usize; 2] = [1, 64];
/// The server that is reached by the tunnel only.
const BEYOND: u8 = 11;
/// Aim for one flow, as a share of a bare QUIC stream.
const OF_STREAM: f64 = 0.6;

/// The compared transports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stack {
    Bare,
    /// One QUIC stream and no TCP at either end.
    Stream,
    Tunnel,
    Bond,
}

impl Stack {
    fn title(self) -> &'static str {
        match self {
            Self::Bare => "bare TCP",
            Self::Stream => "bare noq stream",
            Self::Tunnel => "wireguard-go",
            Self::Bond => "Braid",
        }
    }
}

/// One measurement: Gbit/s, and CPU seconds a gigabyte of the client's process, the server's process (user and kernel each), and of the
/// whole machine.
#[derive(Debug, Clone, Copy)]
struct Run {
    stack: Stack,
    flows: usize,
    rate: f64,
    cpu: [f64; 5],
}

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-speed",
        "The bond's speed without limits",
        "Client and server joined by two veth pairs without limits or emulator, both ends on the same CPUs. Downloads from one small server \
         alternate between bare TCP (first link), the bond (`braid up`, both links, `braid relay`) and a wireguard-go tunnel (first link). For \
         comparison, one stream of QUIC alone (unmodified noq, first link, the bond's sockets) starts and ends in its two threads. CPU: \
         /proc/PID/stat of the two ends and /proc/stat of the machine, per gigabyte received.",
    );
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let bonding = Origin::start(&lab, 10, 8080, TcpVariant::PLAIN)?;
    let bare = Origin::start(&lab, 10, 9000, TcpVariant::PLAIN)?;
    let beyond = Origin::start(&lab, BEYOND, 9000, TcpVariant::PLAIN)?;
    let (rounds, span) = if settings.quick { (1, 3) } else { (5, 5) };
    let span = Duration::from_secs(span);
    let mut runs = Vec::new();
    for round in 0..rounds {
        for flows in FLOWS {
            runs.push(measure(&lab, Stack::Bare, &bare, flows, span, None)?);
        }
        runs.push(measure_stream(&lab, span)?);
        match Tunnel::start(&lab) {
            Ok(tunnel) => {
                for flows in FLOWS {
                    runs.push(measure(&lab, Stack::Tunnel, &beyond, flows, span, Some(tunnel.pids()))?);
                }
            }
            Err(error) if round == 0 => report.notes.push(format!("wireguard-go was not measured: {error:#}.")),
            Err(_) => {}
        }
        let bonded = Bonded::start(settings, &lab)?;
        let pids = [bonded.daemon.pid(), bonded.relay.pid()];
        for flows in FLOWS {
            runs.push(measure(&lab, Stack::Bond, &bonding, flows, span, Some(pids))?);
        }
    }
    report_results(&runs, &mut report);
    Ok(report)
}

fn report_results(runs: &[Run], report: &mut Report) {
    let mut rows = Vec::new();
    for flows in FLOWS {
        let rate = |stack: Stack| middle(runs, stack, flows, |run| run.rate);
        for stack in [Stack::Bare, Stack::Stream, Stack::Tunnel, Stack::Bond] {
            let Some(own) = rate(stack) else { continue };
            let over = |other: Stack| rate(other).map_or("?".to_owned(), |other| format!("{:.3}", own / other));
            let cpu =
                (0..5).map(|part| middle(runs, stack, flows, |run| run.cpu[part]).map_or(String::new(), |seconds| format!("{seconds:.2}")));
            let first = [
                stack.title().to_owned(),
                flows.to_string(),
                format!("{own:.2}"),
                over(Stack::Bare),
                over(Stack::Stream),
                over(Stack::Tunnel),
            ];
            rows.push(first.into_iter().chain(cpu).collect());
        }
        if let (Some(bond), Some(tunnel)) = (rate(Stack::Bond), rate(Stack::Tunnel)) {
            let measured = format!("{:.2} of it ({bond:.2} and {tunnel:.2} Gbit/s)", bond / tunnel);
            report.aim(format!("{flows} flow(s): no slower than wireguard-go"), measured, bond >= tunnel);
        }
        if let (Some(bond), Some(stream)) = (rate(Stack::Bond), rate(Stack::Stream)) {
            let measured = format!("{:.2} of it ({bond:.2} and {stream:.2} Gbit/s)", bond / stream);
            report.aim(format!("{flows} flow(s): at least {OF_STREAM} of a bare noq stream"), measured, bond >= OF_STREAM * stream);
        }
    }
    let head = "what | flows | Gbit/s | / bare TCP | / noq stream | / wireguard-go | client: user, s/GB | kernel | server: user | kernel | machine";
    report.table("Medians:", head, rows);
    let raw = |run: &Run| json!({ "what": run.stack.title(), "flows": run.flows, "gbps": run.rate, "cpu_s_per_gb": run.cpu });
    report.raw = Value::Array(runs.iter().map(raw).collect());
}

fn middle(runs: &[Run], stack: Stack, flows: usize, figure: impl Fn(&Run) -> f64) -> Option<f64> {
    let figures: Vec<_> = runs.iter().filter(|run| run.stack == stack && run.flows == flows).map(figure).collect();
    (!figures.is_empty()).then(|| median(&figures))
}

/// So many downloads for so long; `ends` are the processes of the client's and the server's end.
fn measure(lab: &Lab, stack: Stack, origin: &Origin, flows: usize, span: Duration, ends: Option<[u32; 2]>) -> Result<Run> {
    let spent_by = || -> Result<[f64; 5]> {
        let [client, server] = match ends {
            Some([client, server]) => [spent(client)?, spent(server)?],
            None => [[0.0; 2]; 2],
        };
        Ok([client[0], client[1], server[0], server[1], cpu()?.all])
    };
    let before = spent_by()?;
    let begin = Instant::now();
    let bytes = lab.client().run(|| -> Result<ByteCount> {
        thread::scope(|scope| {
            let downloads: Vec<_> = (0..flows).map(|_| scope.spawn(|| origin.drain(TcpVariant::PLAIN, begin + span))).collect();
            downloads.into_iter().try_fold(ByteCount::ZERO, |sum, download| {
                Ok(sum + download.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
            })
        })
    })??;
    let took = begin.elapsed();
    let after = spent_by()?;
    Ok(Run::new(stack, flows, (bytes, took), std::array::from_fn(|part| after[part] - before[part])))
}

fn measure_stream(lab: &Lab, span: Duration) -> Result<Run> {
    let before = cpu()?.all;
    let Outcome { bytes, took, cpu: [client, server] } = stream::download(lab, 10, span)?;
    let all = cpu()?.all - before;
    Ok(Run::new(Stack::Stream, 1, (bytes, took), [client[0], client[1], server[0], server[1], all]))
}

impl Run {
    fn new(stack: Stack, flows: usize, (bytes, took): (ByteCount, Duration), seconds: [f64; 5]) -> Self {
        let gigabytes = bytes.get() as f64 / 1e9;
        let run = Self { stack, flows, rate: bytes.per(took).bps() as f64 / 1e9, cpu: seconds.map(|seconds| seconds / gigabytes) };
        progress(&format!("{}, {flows} flow(s): {:.2} Gbit/s, CPU s/GB {:.2?}", stack.title(), run.rate, run.cpu));
        run
    }
}

/// CPU seconds that a process has used: user, kernel.
pub(super) fn spent(pid: u32) -> Result<[f64; 2]> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid} has ended"))?;
    parse_spent(&stat).with_context(|| format!("/proc/{pid}/stat has no times: {stat}"))
}

/// Two wireguard-go processes and their tunnel; 203.0.113.11 is reachable only through it.
struct Tunnel([Child; 2]);

impl Tunnel {
    fn start(lab: &Lab) -> Result<Self> {
        let ends = [(lab.client(), "wgclient", 2), (lab.server(), "wgserver", 1)];
        let keys = [key(lab, "wgclient")?, key(lab, "wgserver")?];
        let spawn = |(namespace, name): (&Namespace, &str)| -> Result<Child> {
            let mut command = namespace.command("wireguard-go")?;
            let log = File::create(lab.directory().join(format!("{name}.log")))?;
            command.args(["-f", name]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            command.spawn().context("cannot run wireguard-go: go install golang.zx2c4.com/wireguard@latest, under that name")
        };
        let tunnel = Self([spawn((ends[0].0, ends[0].1))?, spawn((ends[1].0, ends[1].1))?]);
        for (number, (namespace, name, own)) in ends.iter().enumerate() {
            let begin = Instant::now();
            while !Path::new(&format!("/var/run/wireguard/{name}.sock")).exists() {
                ensure!(begin.elapsed() < Duration::from_secs(5), "wireguard-go has no socket after 5 s");
                thread::sleep(Duration::from_millis(20));
            }
            let private = lab.directory().join(name);
            let peer = &keys[1 - number];
            let mut command = namespace.command("wg")?;
            command.args(["set", name, "listen-port", "51820", "private-key"]).arg(private).args(["peer", peer]);
            command.args(["allowed-ips", if number == 0 { "203.0.113.11/32" } else { "10.99.0.2/32" }]);
            if number == 0 {
                command.args(["endpoint", "203.0.113.21:51820"]);
            }
            succeed(command)?;
            let route = if number == 0 { "route add 203.0.113.11 dev wgclient src 10.99.0.2\n" } else { "" };
            namespace.ip(&format!("link set dev {name} up\naddress add 10.99.0.{own}/24 dev {name}\n{route}"))?;
        }
        Ok(tunnel)
    }

    fn pids(&self) -> [u32; 2] {
        [self.0[0].id(), self.0[1].id()]
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // On SIGTERM it removes its socket.
            let _ = crate::sys::terminate(child.id());
            let _ = child.wait();
        }
    }
}

/// Makes a private key in the lab's directory and gives the public one.
fn key(lab: &Lab, name: &str) -> Result<String> {
    let path = lab.directory().join(name);
    let private = succeed({
        let mut command = lab.client().command("wg")?;
        command.arg("genkey");
        command
    })?;
    fs::write(&path, &private)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    let mut command = lab.client().command("wg")?;
    succeed({
        command.arg("pubkey").stdin(File::open(&path)?);
        command
    })
}

fn succeed(mut command: std::process::Command) -> Result<String> {
    let output = match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!("there is no wg: install wireguard-tools"),
        other => other?,
    };
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_may_contain_any_character() {
        let stat = "12 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 250 125 0 0 20 0";
        assert_eq!(parse_spent(stat), Some([2.5, 1.25]));
        assert_eq!(parse_spent("12 (a) S 1"), None);
        assert!(spent(std::process::id()).is_ok());
    }

    #[test]
    fn medians_are_compared_and_slower_ones_are_reported() {
        let run = |stack, rate| Run { stack, flows: 1, rate, cpu: [1.0; 5] };
        let runs = [
            run(Stack::Bare, 20.0),
            run(Stack::Stream, 2.5),
            run(Stack::Tunnel, 2.0),
            run(Stack::Bond, 1.0),
            run(Stack::Bond, 9.0),
            run(Stack::Bond, 1.5),
        ];
        let mut report = Report::new("bond-speed", "", "");
        report_results(&runs, &mut report);
        assert_eq!(report.tables[0].rows.last().unwrap()[2..6], ["1.50", "0.075", "0.600", "0.750"]);
        assert_eq!(report.aims.iter().map(|aim| aim.met).collect::<Vec<_>>(), [false, true]);
    }
}
