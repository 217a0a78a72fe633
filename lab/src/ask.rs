//! Asks a relay that serves strangers (`braid relay --local`) to open addresses, one after the other, and prints its answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_transport::ResetCode;
use braid_transport::client::{Client, ClientLink, Peer, State};

/// Timeout of an answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Prints a line for each of the `targets`: "ADDRESS opened" or "ADDRESS refused CODE".
///
/// # Errors
/// The relay does not admit strangers, or does not answer within a minute.
pub fn ask(relay: SocketAddr, targets: &[SocketAddr]) -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let peer = Peer { addresses: vec![relay.into()], key: None, token: None, name: String::new() };
        let client = Client::start(peer, None, None)?;
        let any = |own: IpAddr| (own.is_ipv4() == relay.is_ipv4()).then_some(own);
        let (v4, v6) = (any(Ipv4Addr::UNSPECIFIED.into()), any(Ipv6Addr::UNSPECIFIED.into()));
        client.set_links(vec![ClientLink { number: 0, device: None, v4, v6, backup: false, dead: Default::default() }]);
        let mut state = client.state();
        let settled = tokio::time::timeout(TIMEOUT, state.wait_for(|state| *state != State::Connecting));
        let settled = settled.await.context("the relay does not answer")??.clone();
        ensure!(settled == State::Up, "the relay does not admit strangers: {settled:?}");
        for target in targets {
            let flow = client.open(Open { kind: FlowKind::Stream, target: Target::Address(*target), policy: FlowPolicy::default() })?;
            match tokio::time::timeout(TIMEOUT, flow.opened()).await.context("the relay does not answer")? {
                Ok(()) => println!("{target} opened"),
                Err(ResetCode(code)) => println!("{target} refused {code}"),
            }
            flow.reset(0);
        }
        Ok(())
    })
}
