//! `braid energy`: lists, serves and fetches energy profiles of interfaces.

use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use braid_config::profiles;
use braid_control::profiles::{SIZE_LIMIT, from_json, shipped, to_toml};
use braid_decide::energy::{Profile, Profiles, Row};
use braid_http::profile_service;
use braid_http::profile_service::database::Database;
use braid_platform::linux::owner::as_owner_of;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};

use crate::cli::{Energy, EnergyFetch, EnergyList, EnergyServe};
use crate::print;
use crate::table::{Page, cell, colour_wanted, numbers, words};

/// Time limit for a profile service to answer.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Runs the subcommand.
pub(crate) fn run(energy: Energy) -> anyhow::Result<()> {
    match energy {
        Energy::List(list) => show(&list),
        // Under sudo, the file may belong to another user.
        Energy::Serve(options) => as_owner_of(&options.db, || serve(&options))?,
        Energy::Fetch(options) => fetch(&options),
    }
}

/// Output of `braid energy list --json`, and answer of a profile service.
#[derive(Serialize)]
struct ProfilesView<'a> {
    profiles: Vec<&'a Row>,
}

fn show(list: &EnergyList) -> anyhow::Result<()> {
    let mut known = shipped();
    if let Some(file) = &list.file {
        known.extend(profiles::load(file)?);
    }
    let mut text = Vec::new();
    if list.json {
        let profiles = known.iter().map(Profile::row).collect();
        return Ok(print(true, &ProfilesView { profiles }, |_, _| Ok(()))?);
    } else if list.toml {
        let mut page = Page::new(&mut text, false);
        to_toml(known.iter()).lines().try_for_each(|line| page.line(line))?;
    } else {
        table(&mut Page::new(&mut text, colour_wanted()), &known)?;
    }
    Ok(io::stdout().write_all(&text)?)
}

fn table(page: &mut Page<'_>, known: &Profiles) -> io::Result<()> {
    let columns = [
        words("TECHNOLOGY"),
        words("MODEL"),
        numbers("IDLE"),
        numbers("RECEIVING"),
        numbers("SENDING"),
        numbers("A MBIT/S DOWN"),
        numbers("UP"),
        words("SOURCE"),
    ];
    let milliwatts = |value: f64| cell(Some(format!("{value} mW")));
    let row = |profile: &Profile| {
        let row = profile.row();
        vec![
            cell(Some(row.technology)),
            cell(Some(&row.model)),
            milliwatts(row.idle_mw),
            milliwatts(row.receive_mw),
            milliwatts(row.transmit_mw),
            milliwatts(row.down_mw_per_mbps),
            milliwatts(row.up_mw_per_mbps),
            cell(Some(&row.source)),
        ]
    };
    page.table(&columns, &known.iter().map(row).collect::<Vec<_>>(), "no profiles")
}

fn serve(options: &EnergyServe) -> anyhow::Result<()> {
    let mut database = Database::open(&options.db)?;
    for file in &options.import {
        database.put(&profiles::load(file)?)?;
    }
    runtime()?.block_on(async {
        let listen = |address: SocketAddr| async move {
            TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}; name another address with --listen"))
        };
        let listener = listen(options.listen).await?;
        let address = listener.local_addr()?;
        let mut out = io::stdout();
        if !address.ip().is_loopback() {
            writeln!(out, "anyone who can reach {address} can read the profiles")?;
        }
        writeln!(out, "serving energy profiles on http://{address}/v1/profiles")?;
        out.flush()?;
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        };
        Ok(profile_service::serve(listener, database, end).await?)
    })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}

fn fetch(options: &EnergyFetch) -> anyhow::Result<()> {
    let url = &options.url;
    let answer = runtime()?.block_on(async { tokio::time::timeout(TIMEOUT, download(url)).await });
    let body = answer.with_context(|| format!("{url} does not answer within {} s", TIMEOUT.as_secs()))??;
    let fetched = from_json(&url.to_string(), &body)?;
    let count = fetched.len();
    let Some(file) = &options.into else {
        let mut text = Vec::new();
        let mut page = Page::new(&mut text, false);
        to_toml(&fetched).lines().try_for_each(|line| page.line(line))?;
        return Ok(io::stdout().write_all(&text)?);
    };
    let mut all = Profiles::default();
    if file.exists() {
        all.extend(profiles::load(file)?);
    }
    all.extend(fetched);
    as_owner_of(file, || replace(file, &to_toml(all.iter())))??;
    Ok(writeln!(io::stdout(), "{count} profiles are in {}: set energy_profiles in the configuration to this file", file.display())?)
}

/// Replaces a file atomically, so that no reader sees half of it.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let fresh = file.with_extension(format!("new-{}", std::process::id()));
    // A process with the same id that was killed may have left it.
    let _ = std::fs::remove_file(&fresh);
    let write = || {
        File::create_new(&fresh)?.write_all(text.as_bytes())?;
        std::fs::rename(&fresh, file)
    };
    let done = write();
    if done.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    done.with_context(|| format!("cannot write {}; name a file that can be written with --into", file.display()))
}

async fn download(url: &Uri) -> anyhow::Result<Bytes> {
    let host = url.host().filter(|_| url.scheme_str() == Some("http"));
    let Some(host) = host else {
        bail!("{url} is not a URL of a profile service: write http://HOST:PORT (for an encrypted service, use a proxy or tunnel)")
    };
    let path = match url.path_and_query() {
        Some(path) if path.as_str() != "/" => path.as_str(),
        _ => "/v1/profiles",
    };
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let unreachable = || format!("no profile service answers on {url}: check that `braid energy serve` runs there");
    let stream = TcpStream::connect((name, url.port_u16().unwrap_or(80))).await.with_context(unreachable)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(unreachable)?;
    tokio::spawn(connection);
    let authority = url.authority().map_or(host, |authority| authority.as_str().rsplit('@').next().unwrap_or(host));
    let request = Request::get(path).header(header::HOST, authority).body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await.with_context(unreachable)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), SIZE_LIMIT).collect().await;
    let body =
        body.map_err(|error| anyhow::anyhow!("{url} did not send a complete answer of at most {SIZE_LIMIT} bytes: {error}"))?.to_bytes();
    if !status.is_success() {
        let problem = serde_json::from_slice::<braid_api::Problem>(&body).map(|problem| format!(": {problem}")).unwrap_or_default();
        bail!("{url} refused with status {}{}", status.as_u16(), problem.replace(char::is_control, " "));
    }
    Ok(body)
}
