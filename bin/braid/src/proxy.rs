//! `braid proxy`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use braid_config::{self as config, World};
use braid_daemon::default_config;
use braid_decide::policy::Policy;
use braid_platform::linux::sys::process::raise_open_files;
use braid_proxy::{Access, Bounds, Credentials, Proxy, Users};
use braid_run::proxy::{ProxyFlows, ProxyOptions};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{self, Steering};
use crate::start;

/// Interval at which learnt data is stored.
const STORE_INTERVAL: Duration = Duration::from_secs(300);

/// Runs the proxy until a signal ends it.
pub(crate) fn run(args: cli::Proxy, verbose: u8) -> anyhow::Result<()> {
    start::log("info", verbose);
    if !args.listen.ip().is_loopback() && args.allow.is_empty() {
        bail!(
            "--listen {} would admit no client: name the networks that may use the proxy with --allow, as in --allow 192.168.7.0/24",
            args.listen
        );
    }
    let policy = match args.config.clone().or_else(default_config) {
        // The configuration may name programs and users of other machines.
        Some(path) => without_conditions(config::read(&path, &World::here(false))?.policy, &path)?,
        None => Default::default(),
    };
    let credentials = args.passwords.as_deref().map(Credentials::read).transpose()?.unwrap_or_default();
    let access = Access { networks: args.allow, users: users(&args.allow_user, &World::here(false).users)?, credentials };
    let Steering { scheduler, links, carry, relay } = args.steering;
    let options = ProxyOptions { scheduler: scheduler.unwrap_or(policy.scheduler), links, policy, carry, relay, reach: args.reach };
    if let Err(error) = raise_open_files() {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args.listen, access, options))
}

/// The policy, if no entry has a condition. The proxy has no facts, so it could only ignore such entries, also those that restrict the links.
fn without_conditions(policy: Policy, path: &Path) -> anyhow::Result<Policy> {
    if let Some(when) = policy.conditions().next() {
        bail!(
            "{} has entries with when = {{ {when} }}, but braid proxy does not follow the context: name a file without them with --config FILE, \
             or run the daemon, which follows it",
            path.display()
        );
    }
    Ok(policy)
}

/// Users that `--allow-user` names, plus the user who starts the proxy.
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
        .with_context(|| format!("cannot listen on {listen}; choose another address with --listen ADDR:PORT"))?;
    let flows = ProxyFlows::start(options)?;
    let address = listener.local_addr()?;
    let proxy = Proxy::new(listener, access, Arc::new(flows.clone()), Bounds::default());
    tracing::info!("HTTP and SOCKS5 on {address}; browsers can load http://{address}/proxy.pac");
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut keep = tokio::time::interval(STORE_INTERVAL);
    let serving = tokio::spawn(proxy.run());
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = keep.tick() => {
                // Storing blocks on the disk.
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
    use braid_decide::policy::{AppRule, LinkRule, When};

    use super::*;

    #[test]
    fn a_policy_with_conditions_is_refused() {
        let path = Path::new("/etc/braid/braid.toml");
        assert_eq!(without_conditions(Policy::default(), path).unwrap(), Policy::default());
        let when = When { battery_below: Some(0.3), ..When::default() };
        let app = AppRule { when: when.clone(), ..AppRule::default() };
        let link = LinkRule { when, ..LinkRule::default() };
        for policy in [Policy { apps: vec![app], ..Policy::default() }, Policy { links: vec![link], ..Policy::default() }] {
            let error = without_conditions(policy, path).unwrap_err().to_string();
            assert!(error.contains("/etc/braid/braid.toml") && error.contains("battery_below") && error.contains("--config"), "{error}");
        }
    }

    #[test]
    fn named_users_are_added_to_the_own_user() {
        let known = BTreeMap::from([("ann".to_owned(), 4_000_000)]);
        let of = |names: &[&str]| users(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), &known);
        let Users::These(own) = Users::default() else { panic!("not everybody") };
        assert_eq!(of(&[]).unwrap(), Users::These(own.clone()));
        assert_eq!(of(&["ann", "4000001"]).unwrap(), Users::These(own.into_iter().chain([4_000_000, 4_000_001]).collect()));
        assert_eq!(of(&["ann", "all"]).unwrap(), Users::All);
        let error = of(&["bob"]).unwrap_err().to_string();
        assert!(error.contains("bob") && error.contains("number"), "{error}");
    }
}
