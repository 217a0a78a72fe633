//! Effect of one client's many flows on another client of the relay.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use braid_peer::invite::Invite;
use braid_peer::keys::KeyPair;
use braid_transport::client::{Client, ClientLink, Peer, State};
use braid_transport::{BondFlow, ResetCode};
use serde_json::json;

use super::Settings;
use super::relay::greeter;
use crate::bench::footprint::resident;
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, quantile, worst};
use crate::lab::Lab;
use crate::relay::Relay;
use crate::spec::LinkSpec;

/// Requests of the greedy client: connections, and UDP exchanges.
const CROWD: [(FlowKind, usize); 2] = [(FlowKind::Stream, 20_000), (FlowKind::Messages, 10_000)];
/// Flows that one bond asks for at a time: a client may have several.
const OF_ONE_BOND: usize = 10_000;
/// A new flow of the other client is to be open within this, 99 % of the time.
const SOON: Duration = Duration::from_millis(100);
/// Megabytes of the relay with all that.
const MEMORY: f64 = 300.0;
/// Timeout of every step.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "relay-crowd",
        "Another client's flows during one client's flood",
        "Two links without limits and one relay. One client requests 20,000 TCP connections and 10,000 UDP exchanges and keeps all that the relay \
         accepts. Another client opens flows to a server, one after the other; the time is from the request until the relay reports the flow open. \
         Memory is VmRSS of `braid relay`.",
    );
    let lab = ["wlan0", "lte0"].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let greeter = greeter(&lab)?;
    let relay = Relay::start(&lab, &settings.braid)?;
    let invites = [relay.invite(&lab)?, relay.invite(&lab)?];
    let links: Vec<String> = lab.links().iter().map(|link| link.name().to_owned()).collect();
    let count = if settings.quick { 200 } else { 1000 };
    let memory = || resident(relay.pid()).map(|(resident, _)| resident);
    let found = lab.client().run(|| -> Result<Found> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.block_on(measure(&invites, &links, greeter, count, &memory))
    })??;
    for (what, times, resident) in [("alone", &found.alone, found.idle_mb), ("beside the crowd", &found.beside, found.busy_mb)] {
        let told = [median(times), quantile(times, 0.99), worst(times)].map(|time| format!("{:.1} ms", time * 1e3));
        progress(&format!("{what}: 99 % of {} flows open within {}, the relay has {resident:.1} MB", times.len(), told[1]));
        let row = [what.to_owned()].into_iter().chain(told).chain([format!("{resident:.1} MB")]).collect();
        report.row("New flows of the other client:", "when | median | 99 % | worst | memory of the relay", row);
    }
    let late = quantile(&found.beside, 0.99);
    report.aim(
        format!("99 % of another client's new flows open within {SOON:?}"),
        format!("{:.1} ms", late * 1e3),
        late < SOON.as_secs_f64(),
    );
    report.aim(format!("the relay under {MEMORY} MB"), format!("{:.1} MB", found.busy_mb), found.busy_mb < MEMORY);
    report
        .notes
        .push(format!("Of the crowd, {} flows were taken, {} refused, {} failed otherwise.", found.taken, found.refused, found.failed));
    report.raw = json!({
        "alone_s": found.alone, "beside_s": found.beside, "idle_mb": found.idle_mb, "busy_mb": found.busy_mb, "taken": found.taken,
        "refused": found.refused, "failed": found.failed,
    });
    Ok(report)
}

#[derive(Default)]
struct Found {
    alone: Vec<f64>,
    beside: Vec<f64>,
    idle_mb: f64,
    busy_mb: f64,
    taken: usize,
    refused: usize,
    failed: usize,
}

async fn measure(
    invites: &[String; 2],
    links: &[String],
    to: SocketAddr,
    count: usize,
    memory: &impl Fn() -> Result<f64>,
) -> Result<Found> {
    let mut found = Found::default();
    let (greedy, modest) = (KeyPair::generate()?, KeyPair::generate()?);
    let other = join(&invites[1], true, &modest, links).await?;
    found.idle_mb = memory()?;
    found.alone = opened(&other, to, count).await?;
    let mut bonds = Vec::new();
    let mut crowd = Vec::new();
    for (kind, wanted) in CROWD {
        for part in 0..wanted.div_ceil(OF_ONE_BOND) {
            let bond = join(&invites[0], bonds.is_empty(), &greedy, links).await?;
            let begin = |_| bond.open(open(kind, to)).context("the greedy client cannot ask for a flow");
            crowd.extend((0..OF_ONE_BOND.min(wanted - part * OF_ONE_BOND)).map(begin).collect::<Result<Vec<BondFlow>>>()?);
            bonds.push(bond);
        }
    }
    for flow in &crowd {
        match tokio::time::timeout(TIMEOUT, flow.opened()).await.context("the relay does not answer")? {
            Ok(()) => found.taken += 1,
            Err(ResetCode(codes::BUSY)) => found.refused += 1,
            Err(_) => found.failed += 1,
        }
    }
    progress(&format!("{} flows of the crowd are open", found.taken));
    found.beside = opened(&other, to, count).await?;
    found.busy_mb = memory()?;
    Ok(found)
}

/// A bond of the client that has these keys.
async fn join(line: &str, first: bool, keys: &KeyPair, links: &[String]) -> Result<Client> {
    let invite = Invite::parse(line)?;
    let token = first.then(|| *invite.token.reveal());
    let peer = Peer { addresses: invite.addresses().to_vec(), key: Some(invite.relay), token, name: "lab".to_owned() };
    let client = Client::start(peer, Some(keys), None)?;
    let link = |(number, device): (usize, &String)| ClientLink {
        number: number as u8,
        device: Some(device.clone()),
        v4: Some(IpAddr::from([10, 77, number as u8, 2])),
        v6: None,
        backup: false,
        dead: Default::default(),
    };
    client.set_links(links.iter().enumerate().map(link).collect());
    let mut state = client.state();
    let settled =
        tokio::time::timeout(TIMEOUT, state.wait_for(|state| *state != State::Connecting)).await.context("the relay is silent")??.clone();
    ensure!(settled == State::Up, "the relay does not admit the client: {settled:?}");
    Ok(client)
}

fn open(kind: FlowKind, to: SocketAddr) -> Open {
    Open { kind, target: Target::Address(to), policy: FlowPolicy::default() }
}

/// Seconds until each of `count` flows is open.
async fn opened(client: &Client, to: SocketAddr, count: usize) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        let flow = client.open(open(FlowKind::Stream, to))?;
        let said = tokio::time::timeout(TIMEOUT, flow.opened()).await.context("the relay does not answer")?;
        ensure!(said.is_ok(), "the other client is refused: {said:?}");
        times.push(begin.elapsed().as_secs_f64());
        flow.reset(0);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(times)
}
