//! `braid energy`'s part of the command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum Energy {
    /// List the profiles that ship with Braid, and those of a file.
    List(EnergyList),
    /// Give profiles to others, over HTTP.
    Serve(EnergyServe),
    /// Take profiles from others.
    Fetch(EnergyFetch),
}

#[derive(Debug, Args)]
pub(crate) struct EnergyList {
    /// A file of profiles, which go before those that ship with Braid.
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a file of profiles.
    #[arg(long, conflicts_with = "json")]
    pub(crate) toml: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyServe {
    /// Where to listen; others than this machine may read only if you name an address they reach.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7632")]
    pub(crate) listen: SocketAddr,
    /// The database; made with the profiles that ship with Braid if there is none.
    #[arg(long, value_name = "FILE")]
    pub(crate) db: PathBuf,
    /// Put the profiles of this file into the database first; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyFetch {
    /// The service, http://HOST:PORT; with a path and query to ask for some only (/v1/profiles?technology=5g).
    pub(crate) url: hyper::Uri,
    /// Add them to this file, which is written anew, without what comments it had. Left out: print them.
    #[arg(long, value_name = "FILE")]
    pub(crate) into: Option<PathBuf>,
}
