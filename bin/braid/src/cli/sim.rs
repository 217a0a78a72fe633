//! Arguments of `braid sim`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Simulate: run the papers' experiments, or instances of your own.
///
/// The simulator uses the daemon's schedulers. The same seed gives the same results on every machine, except for results that a clock measures,
/// which are marked.
#[derive(Debug, Subcommand)]
pub(crate) enum Sim {
    /// List the experiments.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run one experiment, or all.
    Run(SimRun),
    /// Run all experiments and write a page that compares the papers' claims with the results.
    Report {
        /// Output directory: the page is reproduction.md, its plots go into reproduction/.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        #[command(flatten)]
        sampling: Sampling,
    },
    /// Compute the max-min fair rates of flows and links, and the rates that miDRR reaches packet by packet.
    #[command(after_help = FAIR_FORMAT)]
    Fair(Instance),
    /// Assign a link to a stream, and shares to packets, with OPERETTA.
    #[command(after_help = OPERETTA_FORMAT)]
    Operetta(Instance),
}

const FAIR_FORMAT: &str = r#"The instance (a demand of null is unlimited; duration_s and seed are for the packet-level run):
  {"links": [{"name": "1", "capacity_bps": 3000000}],
   "flows": [{"name": "a", "weight": 1, "links": ["1"], "demand_bps": null, "packet_bytes": 1500}],
   "duration_s": 60, "seed": 1}
The result:
  {"rates_bps": {"a": ...}, "clusters": [{"flows": [...], "links": [...], "rate_per_weight_bps": ...}],
   "midrr": {"rates_bps": {"a": ...}, "max_relative_deviation": ...}, "midrr_flags": {...}}
midrr is the variant with service counters, midrr_flags the thesis's own with service flags, which is not always fair."#;

const OPERETTA_FORMAT: &str = r#"The instance (kinds are connection and packet; alpha is the utility, 0 to 1):
  {"alpha": 1.0,
   "links": [{"name": "wifi", "rate_bps": 1000000, "power_mw": 634}],
   "streams": [{"load_bytes": 1000, "kind": "connection", "link": "wifi"}, {"load_bytes": 1000, "kind": "packet"}],
   "new": {"load_bytes": 1000, "kind": "connection"}}
The result (assignment is null for a packet-oriented new stream; energy_j is that of all streams' remaining load):
  {"assignment": "wifi", "weights": {"wifi": 1.0}, "energy_j": ..., "throughput_bps": ..., "target_bps": ..., "feasible": true}"#;

#[derive(Debug, Args)]
pub(crate) struct SimRun {
    /// Name of an experiment (see `braid sim list`), or "all".
    #[arg(value_name = "NAME|all")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) sampling: Sampling,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write plots (SVG) and results (JSON) into this directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// Seed, repetitions and threads of experiments.
#[derive(Debug, Args)]
pub(crate) struct Sampling {
    /// Number of repetitions of each point that involves randomness.
    #[arg(long, value_name = "COUNT", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: u32,
    /// Seed of the random number generator.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Number of threads. Default: one for each processor.
    #[arg(long, value_name = "COUNT")]
    pub(crate) threads: Option<NonZeroUsize>,
}

#[derive(Debug, Args)]
pub(crate) struct Instance {
    /// File with the instance as JSON; "-" reads standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) instance: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
