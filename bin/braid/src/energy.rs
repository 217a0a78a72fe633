//! `braid energy`: lists, serves and fetches energy profiles of interfaces.

use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, bail};
use braid_api::LinkStatus;
use braid_config::profiles;
use braid_control::profiles::{shipped, to_toml};
use braid_decide::energy::{Profile, Profiles, Row};
use braid_http::profile_service::database::Database;
use braid_http::{profile_client, profile_service};
use braid_peer::keys::KeyPair;
use braid_peer::state::StateDir;
use braid_platform::linux::owner::as_owner_of;
use serde::Serialize;
use tokio::net::TcpListener;

use crate::cli::{Energy, EnergyFetch, EnergyList, EnergyOffer, EnergyServe};
use crate::table::{Page, cell, colour_wanted, numbers, words};
use crate::{client, print};

/// Minimum confidence of a fitted power that is offered to others: that of the daemon's own use.
const MIN_CONFIDENCE: f64 = 0.5;

/// Runs the subcommand.
pub(crate) fn run(energy: Energy) -> anyhow::Result<()> {
    match energy {
        Energy::List(list) => show(&list),
        // Under sudo, the file may belong to another user.
        Energy::Serve(options) => as_owner_of(&options.db, || serve(&options))?,
        Energy::Fetch(options) => fetch(&options),
        Energy::Offer(options) => offer(&options),
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
    check_database(&options.db)?;
    let keys = service_keys(&options.db, options.key.as_deref())?;
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
        let open =
            if address.ip().is_loopback() { String::new() } else { format!("anyone who can reach {address} can read the profiles\n") };
        let serving = format!("serving energy profiles on http://{address}/v1/profiles");
        let signed = format!("answers are signed: set energy_service_key = \"{}\" on the clients", keys.public());
        // In one write: whoever waits for the first line may close the pipe then.
        let mut out = io::stdout();
        out.write_all(format!("{open}{serving}\n{signed}\n").as_bytes())?;
        out.flush()?;
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        };
        Ok(profile_service::serve(listener, database, keys, end).await?)
    })
}

/// The key that signs the service's answers: by default beside the database, so that it moves with it.
fn service_keys(db: &Path, key: Option<&Path>) -> anyhow::Result<KeyPair> {
    let file = key.map_or_else(|| db.with_extension("key"), Path::to_owned);
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{} is not the name of a file: name the key's file with --key", file.display()))?;
    let remedy = || format!("cannot use the key {}: name another file with --key", file.display());
    let directory = private_directory(&file).with_context(remedy)?;
    KeyPair::load_or_generate(&directory, name).with_context(remedy)
}

/// Refuses a database that other users can change: the service would sign what they write.
fn check_database(db: &Path) -> anyhow::Result<()> {
    private_directory(db).with_context(|| format!("cannot use the database {}: name another file with --db", db.display()))?;
    let found = match db.symlink_metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read the database {}", db.display())),
    };
    if !found.is_file() {
        bail!("the database {} is not a regular file: name the file itself with --db", db.display());
    }
    if found.mode() & 0o022 != 0 {
        bail!("other users can write the database {path}, so it cannot be trusted: run chmod go-w {path}", path = db.display());
    }
    Ok(())
}

/// The directory of `file`, or an error if other users can write it or replace it, as the owner of a directory above it can.
fn private_directory(file: &Path) -> anyhow::Result<StateDir> {
    let directory = file.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let opened = StateDir::open(directory)?;
    let real = directory.canonicalize()?;
    let me = real.metadata()?.uid();
    for above in real.ancestors().skip(1) {
        let found = above.metadata()?;
        // In a sticky directory (/tmp) users can only rename what is theirs.
        let open = found.mode() & 0o022 != 0 && found.mode() & 0o1000 == 0;
        if open || ![0, me].contains(&found.uid()) {
            bail!(
                "other users can replace {} because they can write {}: choose a directory under one that only you or root can write",
                real.display(),
                above.display()
            );
        }
    }
    Ok(opened)
}

/// Prints the fitted powers of the daemon's links as a file of profiles.
fn offer(options: &EnergyOffer) -> anyhow::Result<()> {
    let links: Vec<LinkStatus> = client::list(&options.daemon.socket, "/v1/links")?;
    let today = jiff::Zoned::now().date();
    let offered: Vec<Profile> = links.iter().filter_map(|link| offered(link, &today.to_string())).collect();
    if offered.is_empty() {
        bail!(
            "no link has a power fitted to the battery's: run Braid on battery until `braid links {}` shows a confidence of 50 %",
            links.first().map_or("LINK", |link| link.name.as_str())
        );
    }
    let mut text = Vec::new();
    let mut page = Page::new(&mut text, false);
    to_toml(&offered).lines().try_for_each(|line| page.line(line))?;
    Ok(io::stdout().write_all(&text)?)
}

/// The fitted power of a link as a profile, if it is reliable and the model of its device is known.
fn offered(link: &LinkStatus, today: &str) -> Option<Profile> {
    let profile = link.energy_profile.as_ref()?;
    let (fitted, confidence) = profile.fitted_mw.zip(profile.confidence.filter(|confidence| *confidence >= MIN_CONFIDENCE))?;
    let rate = |bps: Option<u64>| bps.filter(|bps| *bps > 0).map(|bps| bps as f64 / 1e6);
    let row = Row {
        model: link.model.clone()?,
        technology: profile.technology.parse().ok()?,
        idle_mw: profile.idle_mw,
        receive_mw: profile.idle_mw + fitted,
        transmit_mw: profile.idle_mw + fitted,
        down_mw_per_mbps: 0.0,
        up_mw_per_mbps: 0.0,
        limit_down_mbps: rate(link.capacity_down_bps),
        limit_up_mbps: rate(link.capacity_up_bps),
        source: format!(
            "fitted by Braid {} to a battery's power on {today}, confidence {:.0} %; idle power of the profile for {:?}",
            env!("CARGO_PKG_VERSION"),
            confidence * 100.0,
            profile.model
        ),
    };
    Profile::try_from(row).ok()
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}

fn fetch(options: &EnergyFetch) -> anyhow::Result<()> {
    let fetched = runtime()?.block_on(profile_client::fetch(&options.url, options.key.as_ref()))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn link(confidence: f64, model: Option<&str>) -> LinkStatus {
        let profile = serde_json::json!({
            "technology": "wifi", "model": "*", "origin": "shipped", "nearness": "technology", "idle_mw": 100.0, "fitted_mw": 900.0,
            "confidence": confidence,
        });
        let link = serde_json::json!({
            "name": "wlan0", "state": "up", "kind": "wireless", "addresses": [], "capacity_down_bps": 50_000_000, "capacity_up_bps": null,
            "rtt_us": null, "loss": null, "rx_bytes": 0, "tx_bytes": 0, "flows": 0, "energy_profile": profile, "model": model,
        });
        serde_json::from_value(link).unwrap()
    }

    #[test]
    fn a_reliable_fit_is_offered_as_a_profile_that_is_read_back() {
        let offer = offered(&link(0.8, Some("Chips Ltd Card One")), "2026-11-25").unwrap();
        assert_eq!((offer.row().receive_mw, offer.row().limit_down_mbps, offer.row().limit_up_mbps), (1000.0, Some(50.0), None));
        assert!(offer.row().source.contains("confidence 80 %"), "{}", offer.row().source);
        let content = braid_control::profiles::Content::Shown;
        assert_eq!(braid_control::profiles::from_toml("offer", &to_toml([&offer]), content).unwrap(), [offer]);
        assert!(offered(&link(0.4, Some("Card")), "").is_none() && offered(&link(0.8, None), "").is_none());
    }
}
