//! `braid get`'s part of the command line.

use std::path::PathBuf;
use std::time::Duration;

use braid_fetch::{Checksum, Credentials};
use braid_model::{ByteCount, Rate};
use clap::Args;

use super::{Daemon, span};

/// Download files over all links at once, from any server, with no privilege.
///
/// A file is asked for in ranges (HTTP), each over a link of its own choice, where the server allows that and proves that they are of one file;
/// else it comes whole over one link. Addresses that end in the same name, or all of them with -o, are mirrors of one file. What came is kept
/// beside the file (NAME.braid-part, NAME.braid-journal) until it is complete: -C goes on after any end. Where the daemon runs, its estimates,
/// states, prices and allowances of links hold. Exits with curl's statuses where they fit.
#[derive(Debug, Args)]
pub(crate) struct Get {
    /// The addresses.
    #[arg(required = true, value_name = "URL")]
    pub(crate) urls: Vec<String>,
    /// Write to this file; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Name the file as the address does. That is done anyway; for curl's habit.
    #[arg(long, short = 'O', conflicts_with = "output")]
    pub(crate) remote_name: bool,
    /// Put files into this directory.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
    /// Go on with what an earlier run left, if it is of the same file still.
    #[arg(long = "continue", short = 'C')]
    pub(crate) resume: bool,
    /// Keep the file only if this is its checksum: sha256: and 64 hexadecimal digits. The k-th is of the k-th file.
    #[arg(long, value_name = "sha256:HEX")]
    pub(crate) checksum: Vec<Checksum>,
    /// How much a file counts when several share links. The k-th is of the k-th file; left out: 1.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) weight: Vec<f64>,
    /// Use this link; may be given several times. Left out: all.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// Let a link bring no more than so much, as in lte0=500MB; may be given several times.
    #[arg(long, value_name = "LINK=AMOUNT", value_parser = link_amount)]
    pub(crate) max_link: Vec<(String, ByteCount)>,
    /// What 10^9 bytes over a link cost, as in lte0=2.5; may be given several times.
    #[arg(long, value_name = "LINK=PRICE", value_parser = link_price)]
    pub(crate) price: Vec<(String, f64)>,
    /// Spend no more than so much on all files, by --price and the daemon's prices.
    #[arg(long, value_name = "AMOUNT", value_parser = price)]
    pub(crate) max_cost: Option<f64>,
    /// Bring no more than this over all links together, as in 10Mbit/s.
    #[arg(long, value_name = "RATE")]
    pub(crate) limit_rate: Option<Rate>,
    /// Refuse larger files.
    #[arg(long, value_name = "AMOUNT")]
    pub(crate) max_filesize: Option<ByteCount>,
    /// Add a field to the header of requests, or those of a file, a line each; may be given several times. Other users of this machine see what
    /// stands here: secrets belong in a file.
    #[arg(long, short = 'H', value_name = "NAME: VALUE|@FILE", value_parser = header_fields)]
    pub(crate) header: Vec<HeaderFields>,
    /// Ask as this user (basic authentication), at the hosts named only. The password is asked for on a terminal; other users of this machine see
    /// one that stands here.
    #[arg(long, short, value_name = "USER[:PASSWORD]", value_parser = user)]
    pub(crate) user: Option<User>,
    /// Take users and passwords from ~/.netrc.
    #[arg(long, short)]
    pub(crate) netrc: bool,
    /// Take users and passwords from this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) netrc_file: Option<PathBuf>,
    /// Send the cookies of this file (Netscape's form). Those that answers set are sent back while the run lasts in any case.
    #[arg(long, short = 'b', value_name = "FILE")]
    pub(crate) cookie: Option<PathBuf>,
    /// Use this proxy (http://HOST:PORT, or socks5://HOST:PORT, which resolves names); "" for none. Left out: as http_proxy, https_proxy,
    /// all_proxy and no_proxy say.
    #[arg(long, short = 'x', value_name = "PROXY")]
    pub(crate) proxy: Option<String>,
    /// Trust the roots in this file (PEM) instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// Do not offer HTTP/2.
    #[arg(long = "http1.1")]
    pub(crate) http1: bool,
    /// Follow no more redirections than this. One from https to http is followed without users, passwords and header fields that may be secret.
    #[arg(long, value_name = "COUNT", default_value_t = 30)]
    pub(crate) max_redirs: u32,
    /// Give a file up when so many attempts in a row bring nothing.
    #[arg(long, value_name = "COUNT", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tries: u32,
    /// Give a file up when nothing came for so long: a number and s, min or h.
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = span)]
    pub(crate) timeout: Duration,
    /// Give a connection up that does not stand after so long.
    #[arg(long, value_name = "SPAN", default_value = "15s", value_parser = span)]
    pub(crate) connect_timeout: Duration,
    /// Open no more connections than this to a server over one link.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) connections: u32,
    /// Say nothing but errors.
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Tell all that happens as JSON, one event a line, on standard output.
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

/// What `--header` names.
#[derive(Debug, Clone)]
pub(crate) enum HeaderFields {
    One(HeaderField),
    /// Those in a file.
    File(PathBuf),
}

/// A field of a header.
pub(crate) type HeaderField = (hyper::header::HeaderName, hyper::header::HeaderValue);

fn header_fields(text: &str) -> Result<HeaderFields, String> {
    match text.strip_prefix('@') {
        Some(file) => Ok(HeaderFields::File(file.into())),
        None => header_field(text).map(HeaderFields::One),
    }
}

/// Whom `--user` names.
#[derive(Debug, Clone)]
pub(crate) enum User {
    Known(Credentials),
    /// Its password is to be asked for.
    Asked(String),
}

fn user(text: &str) -> Result<User, String> {
    if text.contains(':') { text.parse().map(User::Known) } else { Ok(User::Asked(text.to_owned())) }
}

pub(crate) fn header_field(text: &str) -> Result<HeaderField, String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    let name: hyper::header::HeaderName = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header field"))?;
    if [hyper::header::RANGE, hyper::header::IF_RANGE].contains(&name) {
        return Err(format!("{name} is Braid's own to set"));
    }
    Ok((name, value.trim().parse().map_err(|_| "its value holds what no header may".to_owned())?))
}
