//! `braid get`: downloads over all links at once.

mod advice;
mod show;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

use braid_fetch::{
    Cookies, Credentials, Download, DownloadLink, Event, FetchError, LinkProgress, Netrc, Options, Output, Proxy, Sockets, fetch, group,
};
use braid_model::{ByteCount, Rate, printable};
use braid_run::{Reachable, reachable, remember};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::Get;
use crate::cli::get::{HeaderField, HeaderFields, User, header_field};
use crate::secret;
use advice::Advice;
use show::Show;

/// Minimum amount that a link must transfer before its rate is remembered.
const MIN_REMEMBERED: ByteCount = ByteCount::new(1_000_000);
/// Seconds into a run at which rates are stored, so that the end of the run does not wait for the disk.
const STORE_AT_SECONDS: [f64; 2] = [2.0, 10.0];

/// Runs `braid get`. The exit status is that of the first file that failed.
pub(crate) fn run(get: Get) -> anyhow::Result<ExitCode> {
    let mut show = Show::new(get.quiet, get.json, get.output.as_deref() == Some(Path::new("-")));
    match download(&get, &mut show) {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            show.trouble(&error);
            Ok(ExitCode::from(error.exit_code()))
        }
    }
}

fn download(get: &Get, show: &mut Show) -> Result<u8, FetchError> {
    let downloads = downloads(get)?;
    let mut hosts: Vec<String> = downloads.iter().flat_map(|file| &file.urls).filter_map(|url| url.host_str()).map(str::to_owned).collect();
    hosts.sort();
    hosts.dedup();
    let options = options(get)?;
    let advice = Advice::ask(&get.daemon.socket, &downloads);
    let (links, known) = links(get, &advice, show)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| FetchError::Option(format!("cannot start: {error}")))?;
    show.begin(&links, &hosts);
    let mut last: Vec<LinkProgress> = Vec::new();
    let mut best: Vec<Rate> = vec![Rate::ZERO; links.len()];
    let mut writers: Vec<JoinHandle<()>> = Vec::new();
    let results = runtime.block_on(async {
        let stop = async {
            let (Ok(mut interrupt), Ok(mut end)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
                return std::future::pending().await;
            };
            tokio::select! { _ = interrupt.recv() => {}, _ = end.recv() => {} }
        };
        let on_event = |event: Event| {
            if let Event::Progress(progress) = &event {
                for (best, link) in best.iter_mut().zip(&progress.links) {
                    *best = (*best).max(link.rate_bps);
                }
                last.clone_from(&progress.links);
                if STORE_AT_SECONDS.get(writers.len()).is_some_and(|due| progress.seconds >= *due) {
                    let (known, last, best) = (known.clone(), last.clone(), best.clone());
                    writers.push(thread::spawn(move || learn(&known, &last, &best)));
                }
            }
            show.event(event);
        };
        fetch(Arc::new(Sockets::new(links)), downloads, options, stop, on_event).await
    })?;
    // Tasks that still resolve names need not finish.
    runtime.shutdown_background();
    if writers.is_empty() {
        learn(&known, &last, &best);
    }
    writers.into_iter().for_each(|writer| drop(writer.join()));
    let failed = results.iter().find_map(|result| result.as_ref().err());
    Ok(failed.map_or(0, FetchError::exit_code))
}

/// Stores the rates of links that transferred enough data to measure them.
fn learn(known: &[Reachable], last: &[LinkProgress], best: &[Rate]) {
    let measured = known.iter().zip(last).zip(best).filter(|((_, progress), rate)| progress.moved > MIN_REMEMBERED && **rate > Rate::ZERO);
    let rates: Vec<(&Reachable, Rate)> = measured.map(|((link, _), rate)| (link, *rate)).collect();
    if !rates.is_empty() {
        remember(&rates, unix());
    }
}

fn downloads(get: &Get) -> Result<Vec<Download>, FetchError> {
    let mut downloads = group(&get.urls, get.output.as_deref(), &get.output_dir)?;
    let count = downloads.len();
    for (what, given) in [("--checksum", get.checksum.len()), ("--weight", get.weight.len())] {
        if given > count {
            return Err(FetchError::Option(format!(
                "{what} is given {given} times, but there are {count} files: give it once for each file"
            )));
        }
    }
    for (download, checksum) in downloads.iter_mut().zip(&get.checksum) {
        download.checksum = Some(checksum.clone());
    }
    for (download, weight) in downloads.iter_mut().zip(&get.weight) {
        if !(weight.is_finite() && *weight >= 0.01 && *weight <= 100.0) {
            return Err(FetchError::Option(format!("a weight of {weight} is out of range: give one between 0.01 and 100")));
        }
        download.weight = *weight;
    }
    if get.json && downloads.iter().any(|download| download.output == Output::Standard) {
        return Err(FetchError::Option("the file and --json cannot both go to standard output: omit one of them".to_owned()));
    }
    Ok(downloads)
}

fn options(get: &Get) -> Result<Options, FetchError> {
    let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| refused(path, &error));
    let netrc = match (&get.netrc_file, get.netrc) {
        (Some(path), _) => Netrc::parse(&read(path)?),
        (None, true) => {
            let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
            Netrc::parse(&read(&home.join(".netrc"))?)
        }
        (None, false) => Netrc::default(),
    };
    let cookies = match &get.cookie {
        Some(path) => Cookies::parse(&read(path)?, unix()).map_err(|reason| FetchError::Read { path: path.clone(), reason })?,
        None => Cookies::default(),
    };
    let mut headers = Vec::new();
    for fields in &get.header {
        match fields {
            HeaderFields::One(field) => headers.push(field.clone()),
            HeaderFields::File(path) => headers.extend(header_lines(path, &read(path)?)?),
        }
    }
    Ok(Options {
        headers,
        credentials: get.user.clone().map(credentials).transpose()?,
        netrc,
        cookies,
        proxy: Proxy::new(get.proxy.as_deref(), |name| std::env::var(name).ok())?,
        cacert: get.cacert.clone(),
        http1: get.http1,
        limit_rate: get.limit_rate,
        max_cost: get.max_cost,
        max_size: get.max_filesize,
        redirects: get.max_redirs,
        resume: get.resume,
        timeout: get.timeout,
        connect_timeout: get.connect_timeout,
        tries: get.tries,
        connections: get.connections as usize,
    })
}

/// Parses the header fields in a file. Empty lines are ignored.
fn header_lines(path: &Path, text: &str) -> Result<Vec<HeaderField>, FetchError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let field = |(number, line)| {
        let bad = |reason| FetchError::Read { path: path.to_owned(), reason: format!("line {}: {reason}", number + 1) };
        header_field(line).map_err(bad)
    };
    lines.map(field).collect()
}

fn credentials(user: User) -> Result<Credentials, FetchError> {
    let user = match user {
        User::Known(credentials) => return Ok(credentials),
        User::Asked(user) => user,
    };
    if !io::stdin().is_terminal() {
        let text = format!("cannot ask for the password of {user} without a terminal: write user and password to a file for --netrc-file");
        return Err(FetchError::Option(text));
    }
    let asked = secret::ask(&format!("password of {}: ", printable(&user)));
    let password = asked.map_err(|error| FetchError::Option(format!("cannot read the password of {user}: {error}")))?;
    Ok(Credentials { user, password })
}

/// The links to use, with the estimates of earlier runs and of the daemon.
fn links(get: &Get, advice: &Advice, show: &mut Show) -> Result<(Vec<DownloadLink>, Vec<Reachable>), FetchError> {
    let (mut found, refused) = reachable(&get.links).map_err(|error| FetchError::NoLink(format!(" ({error})")))?;
    for name in refused {
        show.note(&format!(
            "{name} is not used for IPv4: the kernel would drop the answers (strict rp_filter); remedy: sysctl net.ipv4.conf.{name}.rp_filter=2, \
             or braid up"
        ));
    }
    let asked = |name: &String| get.links.contains(name);
    let barred = |name: &str| advice.forbids(name).map(|rule| format!("the daemon's rule {rule} does not allow it"));
    let barred = |name: &str| barred(name).or_else(|| advice.withholds(name));
    let reasons: Vec<String> = found.iter().filter_map(|link| Some(format!("{}: {}", link.name, barred(&link.name)?))).collect();
    found.retain(|link| asked(&link.name) || barred(&link.name).is_none());
    if found.is_empty() && !reasons.is_empty() {
        return Err(FetchError::NoLink(format!(" ({}; --link NAME overrides this)", reasons.join("; "))));
    }
    // Links that are dead, or kept in reserve, according to the daemon are used only if the user names them, or if there is no other.
    if found.iter().any(|link| advice.open(&link.name) || asked(&link.name)) {
        found.retain(|link| advice.open(&link.name) || asked(&link.name));
    }
    let links = found.iter().map(|link| {
        let limit = get.max_link.iter().find(|(name, _)| *name == link.name).map(|(_, amount)| *amount);
        let price = get.price.iter().find(|(name, _)| *name == link.name).map(|(_, price)| *price);
        DownloadLink {
            name: link.name.clone(),
            families: link.families,
            resolvers: link.resolvers.clone(),
            rate: advice.rate(&link.name).or(link.rate),
            allowance: [limit, advice.allowance(&link.name)].into_iter().flatten().min(),
            price_per_gb: price.or(advice.price(&link.name)).unwrap_or(0.0),
        }
    });
    let links: Vec<DownloadLink> = links.collect();
    for (what, name) in get.max_link.iter().map(|(name, _)| ("--max-link", name)).chain(get.price.iter().map(|(name, _)| ("--price", name)))
    {
        if !links.iter().any(|link| link.name == *name) {
            let known: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
            return Err(FetchError::Option(format!("{what} names {name:?}, which is not a link here (links: {})", known.join(", "))));
        }
    }
    if get.max_cost.is_some() && links.iter().all(|link| link.price_per_gb == 0.0) {
        show.note("--max-cost has no effect: no link has a price; set one with --price, or in the daemon's configuration");
    }
    if links.is_empty() {
        return Err(FetchError::NoLink(String::new()));
    }
    Ok((links, found))
}

fn refused(path: &Path, error: &io::Error) -> FetchError {
    FetchError::Read { path: path.to_owned(), reason: error.to_string() }
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_fields_are_read_from_a_file() {
        let read = |text| header_lines(Path::new("fields"), text);
        let fields = read("X-Key: one\n\n x-other : two\r\n").unwrap();
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(fields, [("x-key", "one"), ("x-other", "two")]);
        assert!(read("X-Key: one\nwrong").unwrap_err().to_string().contains("line 2"));
    }
}
