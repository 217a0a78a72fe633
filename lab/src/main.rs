//! `braid-lab`: the demonstration, the benchmarks, and an interactive lab.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use braid_lab::{
    Lab, LinkSpec, Responder, Web, ask, become_root_of_a_user_namespace, bench, churn, demo, effective_user, net_demo, verifier, workload,
};
use braid_model::Rate;
use clap::{Parser, Subcommand};

/// A network lab on one machine: namespaces, emulated links, real programs.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Runs the same downloads with one link and with all links, prints a table and writes a plot.
    Demo {
        /// The braid program [default: the one beside this program; if there is none, only the first link is used]
        #[arg(long)]
        braid: Option<PathBuf>,
        /// The schedulers to compare; the last one is also tested with a dark link.
        #[arg(long, value_delimiter = ',', default_value = "round-robin,weighted-round-robin,max-throughput")]
        schedulers: Vec<String>,
        /// Output directory for demo.svg and demo.json.
        #[arg(long, default_value = ".")]
        out: PathBuf,
        /// Use `braid run` even as root.
        #[arg(long)]
        unprivileged: bool,
    },
    /// Shows handovers: a host walks over four access points of a network with a controller while a video and a download run, under each mobility manager.
    /// Takes two minutes, and needs Open vSwitch and root (or a system that lets its users make user namespaces).
    NetDemo {
        /// The braid program [default: the one beside this program]
        #[arg(long)]
        braid: Option<PathBuf>,
        /// Output directory for net-demo-video.svg, net-demo-download.svg and net-demo.json.
        #[arg(long, default_value = ".")]
        out: PathBuf,
    },
    /// Runs the benchmarks; needs root. Writes bench.md and bench.json.
    Bench {
        /// The benchmarks: whole-connections, mixes, overhead, overhead-udp, calls, run-calls, decision, cut, footprint, api, schedulers, shares, bond,
        /// bond-few, bond-cut, moves, bond-simult, bond-matrix, bond-churn, bond-messages, bond-fair, bond-speed, bond-relay, relay-crowd, get, proxy, gateway,
        /// virtual, adhoc, adhoc-access, network, handover, net-copies, slicer [default: all]
        names: Vec<String>,
        /// The braid program [default: the one beside this program]
        #[arg(long)]
        braid: Option<PathBuf>,
        /// Output directory; results of benchmarks that do not run now stay.
        #[arg(long, default_value = "bench")]
        out: PathBuf,
        /// Fewer and shorter runs: a check that everything works, not a measurement. The finished part of an aborted run stays in NAME.part.md.
        #[arg(long)]
        quick: bool,
        /// Random seed; an earlier run printed its seed [default: a new one each time]
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Runs the downloads that standard input lists: the demonstration's programs under one `braid run`.
    #[command(hide = true)]
    Download,
    /// Holds memory and wakes periodically: the placebo of the benchmark `overhead`.
    #[command(hide = true)]
    Placebo,
    /// Times connects: the program under test of the benchmark `run-calls`.
    #[command(hide = true)]
    Connects {
        /// The listening socket.
        to: std::net::SocketAddr,
        /// Number of connects of each kind.
        count: usize,
    },
    /// Asks a `braid relay --local` to open addresses, and prints its answers: packaging/test-boot checks the relay's unit with it.
    #[command(hide = true)]
    Ask {
        /// The relay.
        relay: std::net::SocketAddr,
        /// The addresses.
        #[arg(required = true)]
        targets: Vec<std::net::SocketAddr>,
    },
    /// Loads each program of BPF objects alone and prints the kernel's result, one line of JSON each. May be the first process of a machine,
    /// which it then switches off: lab/kernels/test-verifier boots kernels with nothing else.
    #[command(hide = true)]
    Verifier {
        /// The objects, built from ebpf/.
        #[arg(required = true)]
        objects: Vec<PathBuf>,
    },
    /// Creates a lab with an HTTP server, a DNS server and a UDP echo, and prints how to enter it. Keeps the lab until its input ends. The
    /// input lines "dark LINK" and "bright LINK" make a link fail silently and return.
    Hold {
        /// Links as NAME=RATE or NAME=RATE,RTT ("wlan0=20 Mbit/s, 12 ms"), in order.
        #[arg(default_values = ["wlan0=20 Mbit/s", "lte0=6 Mbit/s"])]
        links: Vec<String>,
        /// Number of devices in a LAN behind the client, which the configuration makes their gateway.
        #[arg(long, default_value_t = 0)]
        lan: usize,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let was_root = effective_user() == 0;
    if !was_root {
        // Requires a single-threaded process.
        become_root_of_a_user_namespace().context(
            "the lab needs root, or a system that lets its users make user namespaces \
             (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
        )?;
    }
    match arguments.action {
        Action::Demo { braid, schedulers, out, unprivileged } => demonstrate(braid, &schedulers, &out, was_root && !unprivileged),
        Action::NetDemo { braid, out } => show_handovers(braid, &out),
        Action::Bench { names, braid, out, quick, seed } => {
            ensure!(was_root, "the benchmarks need root: they measure braid up");
            prove(braid, &names, &out, (quick, seed.unwrap_or_else(churn::any_seed)))
        }
        Action::Download => workload::serve_downloads(),
        Action::Placebo => bench::placebo(),
        Action::Connects { to, count } => bench::time_connects(to, count),
        Action::Ask { relay, targets } => ask(relay, &targets),
        Action::Verifier { objects } => verifier::run(&objects),
        Action::Hold { links, lan } => hold(&links, lan),
    }
}

fn demonstrate(braid: Option<PathBuf>, schedulers: &[String], out: &std::path::Path, daemon: bool) -> Result<()> {
    let mode = match find(braid)? {
        None => demo::Mode::Without,
        Some(braid) if daemon => demo::Mode::Daemon(braid),
        Some(braid) => demo::Mode::Run(braid),
    };
    eprintln!(
        "Three links, the same downloads by curl from nginx, {}:",
        match &mode {
            demo::Mode::Without => "without Braid, since the braid program was not found (--braid)",
            demo::Mode::Daemon(_) => "steered by braid up (eBPF)",
            demo::Mode::Run(_) => "steered by braid run (seccomp, no privilege)",
        }
    );
    let (outcomes, plot) = demo::run(&mode, schedulers)?;
    println!("{}", demo::table(&outcomes));
    keep(out, &[("demo.svg", plot), ("demo.json", serde_json::to_string_pretty(&outcomes)?)])
}

fn show_handovers(braid: Option<PathBuf>, out: &std::path::Path) -> Result<()> {
    let braid = find(braid)?.context(NO_BRAID)?;
    eprintln!("Four access points (Open vSwitch), braid net controller, and a host that walks from one to the next, three times:");
    let (outcomes, [video, download]) = net_demo::run(&braid)?;
    println!("{}", net_demo::table(&outcomes));
    let outcomes = serde_json::to_string_pretty(&outcomes)?;
    keep(out, &[("net-demo-video.svg", video), ("net-demo-download.svg", download), ("net-demo.json", outcomes)])
}

/// Writes files, and prints their paths.
fn keep(out: &std::path::Path, files: &[(&str, String)]) -> Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    for (name, content) in files {
        let path = out.join(name);
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

const NO_BRAID: &str = "the braid program was not found: build it (cargo build --release -p braid), or name it by --braid";

fn prove(braid: Option<PathBuf>, names: &[String], out: &std::path::Path, (quick, seed): (bool, u64)) -> Result<()> {
    let braid = find(braid)?.context(NO_BRAID)?;
    for report in bench::run(&bench::Settings { braid, quick, seed, out: out.to_owned() }, names)? {
        println!("{}", report.markdown());
    }
    println!("{}", out.join("bench.md").display());
    Ok(())
}

/// The braid program: the one named, else the one beside this program if there is one.
fn find(braid: Option<PathBuf>) -> Result<Option<PathBuf>> {
    match braid {
        Some(braid) => braid.canonicalize().map(Some).with_context(|| format!("there is no {}", braid.display())),
        None => Ok(demo::beside(&std::env::current_exe()?)),
    }
}

/// Parses `NAME=RATE` or `NAME=RATE,RTT`: `wlan0=20 Mbit/s, 12 ms`.
fn link(text: &str) -> Result<LinkSpec> {
    let wrong = || format!("{text:?} is not NAME=RATE or NAME=RATE,ROUND TRIP, as in \"wlan0=20 Mbit/s\" and \"wlan0=20 Mbit/s, 12 ms\"");
    let (name, rest) = text.split_once('=').with_context(wrong)?;
    let (rate, trip) = rest.split_once(',').unwrap_or((rest, "0 ms"));
    let rate: Rate = rate.trim().parse().with_context(|| format!("the rate of {name}"))?;
    let trip: u64 = trip.trim().strip_suffix("ms").and_then(|trip| trip.trim().parse().ok()).with_context(wrong)?;
    Ok(LinkSpec::new(name).rate(rate).delay(Duration::from_micros(trip * 500)))
}

fn hold(links: &[String], lan: usize) -> Result<()> {
    let mut builder = Lab::builder().rp_filter(2);
    if lan > 0 {
        builder = builder.lan(lan);
    }
    for text in links {
        builder = builder.link(link(text)?);
    }
    let lab = builder.start()?;
    let web = Web::start(&lab)?;
    let _responder = Responder::start(&lab)?;
    println!("ready {}", lab.directory().display());
    println!("client: nsenter --net={}", lab.client().path());
    println!("server: nsenter --net={}", lab.server().path());
    for number in 0..lab.devices() {
        println!("{}: nsenter --net={}", Lab::device_address(number), lab.device(number).path());
    }
    // The lab's links are virtual devices, which Braid uses only if the configuration names them.
    let mut config: String = lab.links().iter().map(|link| format!("[[link]]\nname = \"{}\"\n\n", link.name())).collect();
    if lan > 0 {
        config += "[gateway]\nlan = [\"lan0\"]\n";
    }
    let path = lab.directory().join("braid.toml");
    std::fs::write(&path, config).with_context(|| format!("cannot write {}", path.display()))?;
    println!("config: braid up --foreground --config {}", path.display());
    println!("file: curl -O {}", web.url(braid_model::ByteCount::new(20_000_000))?);
    for line in std::io::stdin().lines() {
        if let Err(error) = execute(&lab, line?.trim()) {
            eprintln!("{error:#}");
        }
    }
    Ok(())
}

/// Executes one line of input.
fn execute(lab: &Lab, line: &str) -> Result<()> {
    let (what, name) = line.split_once(' ').unwrap_or((line, ""));
    let find = || lab.links().iter().position(|link| link.name() == name).with_context(|| format!("there is no link {name:?}"));
    match what {
        "" => Ok(()),
        "dark" => lab.dark(find()?),
        "bright" => lab.bright(find()?),
        _ => bail!("{line:?} is neither \"dark LINK\" nor \"bright LINK\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_parsed_with_and_without_a_round_trip() {
        assert_eq!(link("lte0=6 Mbit/s").unwrap(), LinkSpec::new("lte0").rate(Rate::from_mbps(6)).delay(Duration::ZERO));
        assert_eq!(
            link("wlan0=20 Mbit/s, 13 ms").unwrap(),
            LinkSpec::new("wlan0").rate(Rate::from_mbps(20)).delay(Duration::from_micros(6500))
        );
        for wrong in ["wlan0", "wlan0=fast", "wlan0=20 Mbit/s,12", "wlan0=20 Mbit/s,-1 ms"] {
            assert!(link(wrong).is_err(), "{wrong}");
        }
    }
}
