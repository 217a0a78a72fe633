//! Arguments of `braid get`.

use std::path::PathBuf;
use std::time::Duration;

use braid_fetch::{Checksum, Credentials};
use braid_model::{ByteCount, Rate};
use clap::Args;

use super::{Daemon, span};

/// Download files over all links at once, from any server, without privileges.
///
/// Braid requests a file in byte ranges (HTTP), each over the link that suits it, if the server supports ranges and proves that they belong to the
/// same file. Otherwise the whole file comes over one link. URLs that end in the same file name, or all URLs with -o, are mirrors of one file. Data
/// is kept beside the file (NAME.braid-part, NAME.braid-journal) until the file is complete; -C resumes from it after an interruption. If the daemon
/// runs, its estimates, states, prices and allowances of links apply. Exit statuses are those of curl where they fit.
#[derive(Debug, Args)]
pub(crate) struct Get {
    /// URLs to download.
    #[arg(required = true, value_name = "URL")]
    pub(crate) urls: Vec<String>,
    /// Write to this file; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Name the file as in the URL. This is the default; the option exists for compatibility with curl.
    #[arg(long, short = 'O', conflicts_with = "output")]
    pub(crate) remote_name: bool,
    /// Write files to this directory.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
    /// Resume from the data of an earlier run, if it belongs to the same version of the file.
    #[arg(long = "continue", short = 'C')]
    pub(crate) resume: bool,
    /// Keep the file only if its checksum matches: sha256: followed by 64 hexadecimal digits. The k-th checksum applies to the k-th file.
    #[arg(long, value_name = "sha256:HEX")]
    pub(crate) checksum: Vec<Checksum>,
    /// Weight of a file when several files share links. The k-th weight applies to the k-th file. Default: 1.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) weight: Vec<f64>,
    /// Use this link; repeatable. Default: all links.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// Receive at most this amount over a link, as in lte0=500MB; repeatable.
    #[arg(long, value_name = "LINK=AMOUNT", value_parser = link_amount)]
    pub(crate) max_link: Vec<(String, ByteCount)>,
    /// Price of 10^9 bytes over a link, as in lte0=2.5; repeatable.
    #[arg(long, value_name = "LINK=PRICE", value_parser = link_price)]
    pub(crate) price: Vec<(String, f64)>,
    /// Spend at most this much on all files together, by --price and the daemon's prices.
    #[arg(long, value_name = "AMOUNT", value_parser = price)]
    pub(crate) max_cost: Option<f64>,
    /// Limit the total rate over all links, as in 10Mbit/s.
    #[arg(long, value_name = "RATE")]
    pub(crate) limit_rate: Option<Rate>,
    /// Refuse files larger than this.
    #[arg(long, value_name = "AMOUNT")]
    pub(crate) max_filesize: Option<ByteCount>,
    /// Add a header field to requests, or the fields of a file, one a line; repeatable. Other users of this machine can see arguments: put secrets
    /// in a file.
    #[arg(long, short = 'H', value_name = "NAME: VALUE|@FILE", value_parser = header_fields)]
    pub(crate) header: Vec<HeaderFields>,
    /// Authenticate as this user (basic authentication), only at the hosts of the given URLs. Without a password, Braid asks for it on the terminal.
    /// Other users of this machine can see a password given here.
    #[arg(long, short, value_name = "USER[:PASSWORD]", value_parser = user)]
    pub(crate) user: Option<User>,
    /// Read users and passwords from ~/.netrc.
    #[arg(long, short)]
    pub(crate) netrc: bool,
    /// Read users and passwords from this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) netrc_file: Option<PathBuf>,
    /// Send the cookies of this file (Netscape format). Cookies that servers set are sent back during the run in any case.
    #[arg(long, short = 'b', value_name = "FILE")]
    pub(crate) cookie: Option<PathBuf>,
    /// Use this proxy: http://HOST:PORT, or socks5://HOST:PORT, which also resolves names; "" for none. Default: the environment variables
    /// http_proxy, https_proxy, all_proxy and no_proxy.
    #[arg(long, short = 'x', value_name = "PROXY")]
    pub(crate) proxy: Option<String>,
    /// Trust the root certificates in this file (PEM) instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// Do not offer HTTP/2.
    #[arg(long = "http1.1")]
    pub(crate) http1: bool,
    /// Follow at most this many redirects. On a redirect from https to http, Braid omits users, passwords and header fields that may be secret.
    #[arg(long, value_name = "COUNT", default_value_t = 30)]
    pub(crate) max_redirs: u32,
    /// Abandon a file after this many attempts in a row that bring no data.
    #[arg(long, value_name = "COUNT", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tries: u32,
    /// Abandon a file when no data arrived for this long: a number followed by s, min or h.
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = span)]
    pub(crate) timeout: Duration,
    /// Abandon a connection that is not established after this long.
    #[arg(long, value_name = "SPAN", default_value = "15s", value_parser = span)]
    pub(crate) connect_timeout: Duration,
    /// Open at most this many connections to a server over one link.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) connections: u32,
    /// Print errors only.
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Print all events as JSON on standard output, one a line.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

fn link_amount(text: &str) -> Result<(String, ByteCount), String> {
    let (link, amount) = text.split_once('=').ok_or("write LINK=AMOUNT, as in lte0=500MB")?;
    Ok((link.to_owned(), amount.parse().map_err(|error: braid_model::UnitError| error.to_string())?))
}

fn link_price(text: &str) -> Result<(String, f64), String> {
    let (link, amount) = text.split_once('=').ok_or("write LINK=PRICE, as in lte0=2.5")?;
    Ok((link.to_owned(), price(amount)?))
}

fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text.parse().map_err(|_| "write a number".to_owned())?;
    if price.is_finite() && price >= 0.0 { Ok(price) } else { Err("write a number from 0".to_owned()) }
}

/// Argument of `--header`.
#[derive(Debug, Clone)]
pub(crate) enum HeaderFields {
    One(HeaderField),
    /// The fields in this file, one a line.
    File(PathBuf),
}

/// A header field: name and value.
pub(crate) type HeaderField = (hyper::header::HeaderName, hyper::header::HeaderValue);

fn header_fields(text: &str) -> Result<HeaderFields, String> {
    match text.strip_prefix('@') {
        Some(file) => Ok(HeaderFields::File(file.into())),
        None => header_field(text).map(HeaderFields::One),
    }
}

/// Argument of `--user`.
#[derive(Debug, Clone)]
pub(crate) enum User {
    Known(Credentials),
    /// A user whose password Braid asks for.
    Asked(String),
}

fn user(text: &str) -> Result<User, String> {
    if text.contains(':') { text.parse().map(User::Known) } else { Ok(User::Asked(text.to_owned())) }
}

pub(crate) fn header_field(text: &str) -> Result<HeaderField, String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    let name: hyper::header::HeaderName = name.trim().parse().map_err(|_| format!("{name:?} is not a valid header field name"))?;
    if [hyper::header::RANGE, hyper::header::IF_RANGE].contains(&name) {
        return Err(format!("{name} is set by Braid itself"));
    }
    Ok((name, value.trim().parse().map_err(|_| "its value contains characters that a header must not contain".to_owned())?))
}
