//! `braid up` and `braid down`.

mod service;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, absolute};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use braid_api::Accepted;
use braid_daemon as daemon;
use braid_daemon::background::Background;
use braid_http::DEFAULT_SOCKET;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::cli::{DEFAULT_STATE_DIR, Down, Start, Up};
use crate::{client, start};

/// Time limit for a daemon to become ready. The service's unit has the same limit (`TimeoutStartSec`).
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit to exit for a daemon that does not listen on the socket.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for one request to the daemon, before the next attempt.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(250);
const PAUSE: Duration = Duration::from_millis(20);

/// `braid up`.
pub(crate) fn up(up: Up, verbose: u8) -> anyhow::Result<()> {
    if up.foreground || service::started_this() {
        return start::daemon(up.start, None, verbose);
    }
    let progress = spinner();
    if let Some(status) = running(&up.start.daemon.socket, &progress)? {
        progress.finish_and_clear();
        return already(&up.start, verbose, &status);
    }
    let begun = begin(&up.start, verbose, &progress);
    // Another daemon may have started at the same time.
    let other = if begun.is_err() { running(&up.start.daemon.socket, &progress).ok().flatten() } else { None };
    progress.finish_and_clear();
    match other {
        Some(status) => already(&up.start, verbose, &status),
        None => Ok(writeln!(io::stdout(), "{}", begun?)?),
    }
}

/// `braid down`.
pub(crate) fn down(order: &Down) -> anyhow::Result<()> {
    let socket = &order.daemon.socket;
    if service::runs(socket) {
        service::stop(&spinner())?;
        return Ok(writeln!(io::stdout(), "Braid is down; systemd stopped it (braid.service)")?);
    }
    match client::send::<Accepted>(socket, "/v1/down", &()) {
        Ok(accepted) => Ok(crate::print_accepted(&accepted)?),
        Err(error) if error.is_not_running() => {
            // systemd runs this after a crash, too, and starts the daemon again a moment later (systemd.exec(5), SERVICE_RESULT).
            let crashed = order.quiet && std::env::var_os("SERVICE_RESULT").is_some_and(|result| result != "success");
            let swept = daemon::sweep(crashed).context("no daemon is running, and cannot remove what a crashed one may have left")?;
            match swept {
                None if order.quiet => Ok(()),
                None => Ok(writeln!(io::stdout(), "no daemon is running on {}, and there is nothing to remove", socket.display())?),
                Some(swept) => Ok(writeln!(io::stdout(), "no daemon is running on {}; {swept}", socket.display())?),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Starts the daemon. Returns the message to print when it is ready.
fn begin(start: &Start, verbose: u8, progress: &ProgressBar) -> anyhow::Result<String> {
    if !service::is_here() {
        return in_background(start, verbose, progress);
    }
    refuse_options(start, verbose)?;
    service::start(progress)?;
    Ok("Braid is up; systemd runs it (braid.service)".to_owned())
}

/// A spinner that shows on a terminal that something is in progress; it advances when ticked.
fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})").unwrap_or_else(|_| ProgressStyle::default_spinner());
    ProgressBar::new_spinner().with_style(style).with_message("Braid is starting")
}

/// Status of this network namespace's daemon, if one runs. Waits for a daemon that is starting or stopping.
fn running(socket: &Path, progress: &ProgressBar) -> anyhow::Result<Option<Value>> {
    let begin = Instant::now();
    loop {
        let Some(holder) = daemon::running()? else { return Ok(None) };
        let answer = client::read_from::<Value>(socket, "/v1/status", REQUEST_TIMEOUT);
        let timeout = match answer {
            Ok((status, server)) if server.pid().is_some_and(|process| holder.is(process, server.uid())) => return Ok(Some(status)),
            // The daemon listens, but does not answer yet.
            Err(client::ClientError::Silent(_)) => READY_TIMEOUT,
            _ => EXIT_TIMEOUT,
        };
        if begin.elapsed() > timeout {
            bail!("{}. It does not answer on {}", daemon::held(holder), socket.display());
        }
        progress.tick();
        std::thread::sleep(PAUSE);
    }
}

fn already(start: &Start, verbose: u8, status: &Value) -> anyhow::Result<()> {
    writeln!(io::stdout(), "Braid is already up")?;
    let ignored = given(start, verbose, status);
    if !ignored.is_empty() {
        let ignored = ignored.join(", ");
        writeln!(io::stderr(), "braid: the running daemon keeps its options: {ignored} had no effect (stop the daemon with `braid down`)")?;
    }
    Ok(())
}

fn refuse_options(start: &Start, verbose: u8) -> anyhow::Result<()> {
    let mut given = given(start, verbose, &Value::Null);
    if start.daemon.socket != Path::new(DEFAULT_SOCKET) {
        given.push("--socket");
    }
    if !given.is_empty() {
        bail!(
            "systemd starts Braid here, with BRAID_OPTIONS of /etc/default/braid: write {} there, or use `braid up --foreground`",
            given.join(", ")
        );
    }
    Ok(())
}

/// The given options that may differ from those of the running daemon with this status. The socket is known to be the same.
fn given(start: &Start, verbose: u8, status: &Value) -> Vec<&'static str> {
    let same_file = |path: &Path| {
        let theirs = status["config"].as_str().and_then(|theirs| std::fs::canonicalize(theirs).ok());
        theirs.is_some() && theirs == std::fs::canonicalize(path).ok()
    };
    let page = status["ui"].as_str().and_then(|page| page.split_once("://")).map(|(_, address)| address.trim_end_matches('/'));
    let options = [
        ("--config", start.config.as_deref().is_some_and(|path| !same_file(path))),
        ("--state-dir", start.state_dir != Path::new(DEFAULT_STATE_DIR)),
        ("--ui", start.page.ui.is_some_and(|address| page != Some(&address.to_string()))),
        ("--ui-name", !start.page.ui_name.is_empty()),
        ("--ui-cert", start.page.ui_cert.is_some()),
        ("--ui-key", start.page.ui_key.is_some()),
        ("--verbose", verbose > 0),
    ];
    options.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
}

/// Starts the daemon as a background process. Returns the message to print when it is ready; after an error no daemon runs.
fn in_background(start: &Start, verbose: u8, progress: &ProgressBar) -> anyhow::Result<String> {
    let instead = "cannot start the daemon in the background; `braid up --foreground` or `braid daemon` runs it in this process";
    let mut daemon = Background::start(&arguments(start, verbose)?).context(instead)?;
    let begin = Instant::now();
    loop {
        if let Some(status) = daemon.ended()? {
            bail!("the daemon did not start ({status}): {}", daemon.last_words());
        }
        // The API answers only when everything is set up.
        let answer = client::read_from::<Value>(&start.daemon.socket, "/v1/status", REQUEST_TIMEOUT);
        if answer.is_ok_and(|(_, server)| server.pid() == i32::try_from(daemon.process()).ok()) {
            break;
        }
        if begin.elapsed() > READY_TIMEOUT {
            bail!(
                "stopped the daemon, because it was not ready after {} s. Its last messages:\n{}",
                READY_TIMEOUT.as_secs(),
                daemon.last_words()
            );
        }
        progress.tick();
        if daemon.pause(PAUSE)? {
            bail!("interrupted: stopped the daemon, because it was not ready yet");
        }
    }
    let process = daemon.process();
    let log = daemon.leave().context("cannot keep the daemon's log; stopped the daemon")?;
    Ok(format!("Braid is up (process {process}); its log: {}", log.display()))
}

/// Command line of the daemon, for a process with another working directory.
fn arguments(start: &Start, verbose: u8) -> io::Result<Vec<OsString>> {
    let option = |name: &str, value: OsString| {
        let mut word = OsString::from(format!("{name}="));
        word.push(value);
        word
    };
    let path = |name: &str, path: &Path| Ok::<_, io::Error>(option(name, absolute(path)?.into()));
    let mut words = vec![OsString::from("daemon"), "--detached".into()];
    words.extend((0..verbose).map(|_| "--verbose".into()));
    words.push(path("--state-dir", &start.state_dir)?);
    words.push(path("--socket", &start.daemon.socket)?);
    for (name, file) in [("--config", &start.config), ("--ui-cert", &start.page.ui_cert), ("--ui-key", &start.page.ui_key)] {
        if let Some(file) = file {
            words.push(path(name, file)?);
        }
    }
    words.extend(start.page.ui.map(|address| option("--ui", address.to_string().into())));
    words.extend(start.page.ui_name.iter().map(|name| option("--ui-name", name.into())));
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, PageOptions};
    use clap::Parser;

    fn start(words: &[&str]) -> Start {
        match Cli::parse_from([&["braid", "up"], words].concat()).command {
            Command::Up(up) => up.start,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_background_daemon_gets_every_given_option() {
        let words = [
            "--config=c.toml",
            "--state-dir=s",
            "--socket=/run/x",
            "--ui=[::1]:80",
            "--ui-name=a",
            "--ui-name=-b",
            "--ui-cert=c",
            "--ui-key=k",
        ];
        let arguments = arguments(&start(&words), 2).unwrap();
        let cli = Cli::parse_from([&["braid".into()], arguments.as_slice()].concat());
        let Command::Daemon(daemon) = cli.command else { panic!("{cli:?}") };
        let here = std::env::current_dir().unwrap();
        let wanted = Start {
            config: Some(here.join("c.toml")),
            state_dir: here.join("s"),
            page: PageOptions { ui_cert: Some(here.join("c")), ui_key: Some(here.join("k")), ..start(&words).page },
            ..start(&words)
        };
        assert_eq!((format!("{:?}", daemon.start), daemon.detached, cli.verbose), (format!("{wanted:?}"), true, 2));
    }

    #[test]
    fn options_equal_to_those_of_the_running_daemon_give_no_warning() {
        let status = serde_json::json!({ "config": "/proc/self/status", "ui": "http://127.0.0.1:5759/" });
        assert!(given(&start(&[]), 0, &Value::Null).is_empty());
        assert!(given(&start(&["--ui", "--config=/proc/self/../self/status"]), 0, &status).is_empty());
        let other = start(&["--ui=127.0.0.1:575", "--config=/proc/self/stat", "--state-dir=/x", "--ui-name=a"]);
        assert_eq!(given(&other, 1, &status), ["--config", "--state-dir", "--ui", "--ui-name", "--verbose"]);
        assert!(refuse_options(&start(&[]), 0).is_ok());
        assert!(refuse_options(&start(&["--socket=/x"]), 0).unwrap_err().to_string().contains("write --socket there"));
    }
}
