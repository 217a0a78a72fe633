//! `braid proxy`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use braid_engine::config::{Config, World};
use braid_engine::daemon::default_config;
use braid_engine::proxy::{ProxyFlows, ProxyOptions};
use braid_platform::linux::sys::process::raise_open_files;
use braid_proxy::{Access, Bounds, Credentials, Proxy};
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
        Some(path) => Config::read(&path, &World::here(false))?.policy,
        None => Default::default(),
    };
    let credentials = args.passwords.as_deref().map(Credentials::read).transpose()?.unwrap_or_default();
    let access = Access { networks: args.allow, credentials };
    let Steering { scheduler, links, carry, relay } = args.steering;
    let options = ProxyOptions { scheduler: scheduler.unwrap_or(policy.scheduler), links, policy, carry, relay, reach: args.reach };
    if let Err(error) = raise_open_files() {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args.listen, access, options))
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
