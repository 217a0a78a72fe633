//! `braid proxy`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use braid_config::{self as config, World};
use braid_daemon::default_config;
use braid_platform::linux::sys::process::raise_open_files;
use braid_proxy::{Access, Bounds, Credentials, Proxy, Users};
use braid_run::proxy::{ProxyFlows, ProxyOptions};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{self, Steering};
use crate::start;

/// How often what was learnt is kept.
const KEEP: Duration = Duration::from_secs(300);

/// Serves until it is told to end.
pub(crate) fn run(args: cli::Proxy, verbose: u8) -> anyhow::Result<()> {
    start::log("info", verbose);
    if !args.listen.ip().is_loopback() && args.allow.is_empty() {
        bail!(
            "--listen {} would let nobody in: say with --allow which networks may use the proxy, as in --allow 192.168.7.0/24",
            args.listen
        );
    }
    let policy = match args.config.clone().or_else(default_config) {
        // Another machine's programs and users are no mistake here.
        Some(path) => config::read(&path, &World::here(false))?.policy,
        None => Default::default(),
    };
    let credentials = args.passwords.as_deref().map(Credentials::read).transpose()?.unwrap_or_default();
    let access = Access { networks: args.allow, users: users(&args.allow_user, &World::here(false).users)?, credentials };
    let Steering { scheduler, links, carry, relay } = args.steering;
    let options = ProxyOptions { scheduler: scheduler.unwrap_or(policy.scheduler), links, policy, carry, relay, reach: args.reach };
    if let Err(error) = raise_open_files() {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args.listen, access, options))
}

/// The users that `--allow-user` names, beside the one who starts the proxy.
fn users(named: &[String], known: &BTreeMap<String, u32>) -> anyhow::Result<Users> {
    if named.iter().any(|name| name == "all") {
        return Ok(Users::All);
    }
    let number = |name: &String| {
        let number = known.get(name).copied().or_else(|| name.parse().ok());
        number.with_context(|| format!("--allow-user {name}: /etc/passwd has no such user; name another, or give the number"))
    };
    let Users::These(mut all) = Users::default() else { return Ok(Users::All) };
    for name in named {
        all.insert(number(name)?);
    }
    Ok(Users::These(all))
}

async fn serve(listen: SocketAddr, access: Access, options: ProxyOptions) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on {listen}; name another place with --listen ADDR:PORT"))?;
    let flows = ProxyFlows::start(options)?;
    let address = listener.local_addr()?;
    let proxy = Proxy::new(listener, access, Arc::new(flows.clone()), Bounds::default());
    tracing::info!("HTTP and SOCKS5 on {address}; http://{address}/proxy.pac sets browsers up");
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut keep = tokio::time::interval(KEEP);
    let serving = tokio::spawn(proxy.run());
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = keep.tick() => {
                // It waits for the disk.
                let flows = flows.clone();
                tokio::task::spawn_blocking(move || flows.remember());
            }
        }
    }
    serving.abort();
    flows.remember();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_named_beside_the_own() {
        let known = BTreeMap::from([("ann".to_owned(), 4_000_000)]);
        let of = |names: &[&str]| users(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), &known);
        let Users::These(own) = Users::default() else { panic!("not everybody") };
        assert_eq!(of(&[]).unwrap(), Users::These(own.clone()));
        assert_eq!(of(&["ann", "4000001"]).unwrap(), Users::These(own.into_iter().chain([4_000_000, 4_000_001]).collect()));
        assert_eq!(of(&["ann", "all"]).unwrap(), Users::All);
        let told = of(&["bob"]).unwrap_err().to_string();
        assert!(told.contains("bob") && told.contains("number"), "{told}");
    }
}
