//! Arguments of `braid energy`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum Energy {
    /// List the profiles that ship with Braid, and those of a file.
    List(EnergyList),
    /// Serve profiles to others over HTTP.
    Serve(EnergyServe),
    /// Fetch profiles from a service.
    Fetch(EnergyFetch),
    /// Print the powers that the daemon fitted to the battery's, as a file of profiles to send to a service's operator.
    Offer(EnergyOffer),
}

/// Print the powers that the daemon fitted to the battery's, as a file of profiles to send to a service's operator.
///
/// Nothing is sent. The file holds the models of your network devices and their power, and nothing else. "braid energy serve --import FILE" reads it.
#[derive(Debug, Args)]
pub(crate) struct EnergyOffer {
    #[command(flatten)]
    pub(crate) daemon: super::Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyList {
    /// A file of profiles. They take precedence over those that ship with Braid.
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print the profiles as a TOML file.
    #[arg(long, conflicts_with = "json")]
    pub(crate) toml: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyServe {
    /// Address to listen on. Other machines can read the profiles only if they can reach this address.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7632")]
    pub(crate) listen: SocketAddr,
    /// The database. If it does not exist, it is created with the profiles that ship with Braid. Only its owner may be able to write the
    /// file and its directory.
    #[arg(long, value_name = "FILE")]
    pub(crate) db: PathBuf,
    /// File of the key that signs the answers. Only its owner may be able to read it. If it does not exist, it is created. Default: beside the database,
    /// with the extension "key".
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Import the profiles of this file into the database first; repeatable.
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyFetch {
    /// URL of the service, http://HOST:PORT. Add a path and query to fetch only some profiles (/v1/profiles?technology=5g).
    pub(crate) url: hyper::Uri,
    /// Key that must have signed the answer, as "braid energy serve" prints it there. Default: any answer is accepted.
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<braid_model::key::PublicKey>,
    /// Add the profiles to this file. The file is rewritten and loses its comments. Default: print the profiles.
    #[arg(long, value_name = "FILE")]
    pub(crate) into: Option<PathBuf>,
}
