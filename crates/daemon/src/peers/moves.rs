//! Requests to servers to move flows between the links of this machine.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_bond::{PathId, PathState, PathView};
use braid_control::core::{MAX_ORDER, MoveOrder, MoveStep, OrderedFlow, Recipient};
use braid_model::Protocol;
use braid_transport::ControlFlow;
use braid_transport::client::{Client, State};
use braid_transport::control::{self, FlowProtocol, MAX_FLOWS, MoveAnswer, PassingFlow, PeerFlow};
use tokio::sync::mpsc;

use super::Change;
use super::tunnels::Tunnels;

const _: () = assert!(MAX_ORDER <= MAX_FLOWS, "an order is one request");

/// Delay before a control flow is opened again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Hands orders to a server or relay as long as its bond lives, that is as long as the sender exists.
pub(super) fn serve(
    recipient: Recipient,
    client: Client,
    tunnels: Option<Tunnels>,
    changes: mpsc::UnboundedSender<Change>,
) -> mpsc::UnboundedSender<MoveOrder> {
    let (orders, mut received) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let tell = |ready| {
            let datagrams = ready && client.moves_datagrams();
            drop(changes.send(Change::Mover { recipient: recipient.clone(), ready, datagrams }));
        };
        let refuse = |order: MoveOrder| answer(&changes, order.number, Err("it cannot be asked now".to_owned()));
        let mut state = client.state();
        loop {
            let takes = || match &recipient {
                Recipient::Host(_) => client.takes_control(),
                Recipient::Waypoint(_) => client.is_waypoint(),
            };
            while !(*state.borrow_and_update() == State::Up && takes()) {
                tokio::select! {
                    changed = state.changed() => if changed.is_err() { return },
                    order = received.recv() => match order {
                        Some(order) => refuse(order),
                        None => return,
                    },
                }
            }
            if let Ok(control) = client.open_control().await {
                tell(true);
                let tunnel = async {
                    match (&recipient, &tunnels) {
                        (Recipient::Host(host), Some(tunnels)) => tunnels.keep(*host, &client, &changes).await,
                        _ => std::future::pending().await,
                    }
                };
                let ended = tokio::select! {
                    ended = carry_out(control, &client, &mut received, &changes) => ended,
                    () = tunnel => Some(()),
                };
                tell(false);
                if ended.is_none() {
                    return;
                }
            }
            let pause = tokio::time::sleep(RETRY_AFTER);
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    order = received.recv() => match order {
                        Some(order) => refuse(order),
                        None => return,
                    },
                }
            }
        }
    });
    orders
}

/// Carries out orders until the control flow ends; `None` if there will be no more orders.
async fn carry_out(
    mut control: ControlFlow,
    client: &Client,
    orders: &mut mpsc::UnboundedReceiver<MoveOrder>,
    changes: &mpsc::UnboundedSender<Change>,
) -> Option<()> {
    loop {
        let order = tokio::select! {
            order = orders.recv() => order?,
            () = control.ended() => return Some(()),
        };
        // A path of each family leads to a relay, and an address is proved by one of its own.
        let is_v4 = order.flows.first().is_some_and(|flow| flow.via.is_ipv4());
        let goes = |(id, path): &(PathId, PathView)| match order.slot {
            Some(slot) => usize::from(path.link) == slot && client.remote(*id).is_some_and(|remote| remote.is_ipv4() == is_v4),
            None => true,
        };
        let good = client.paths().into_iter().find(|path| path.1.state == PathState::Good && goes(path));
        let Some((id @ PathId(path), _)) = good else {
            let over = if order.slot.is_some() { " over that link" } else { "" };
            answer(changes, order.number, Err(format!("no path to the other host{over} is good")));
            continue;
        };
        let flow = |flow: &OrderedFlow| PeerFlow {
            client: flow.own.source,
            server: flow.own.destination,
            via: flow.via,
            protocol: if flow.own.protocol == Protocol::Udp { FlowProtocol::Udp } else { FlowProtocol::Tcp },
            sent: flow.numbers.sent,
            received: flow.numbers.received,
        };
        let step = match order.step {
            MoveStep::Accept => control::MoveStep::Accept,
            MoveStep::Test => control::MoveStep::Test,
            MoveStep::Renew => control::MoveStep::Move,
            MoveStep::Prove => control::MoveStep::Prove,
        };
        let asked = match (&order.recipient, order.lease) {
            (Recipient::Waypoint(_), Some(lease)) => {
                let passing = |flow: &OrderedFlow| PassingFlow { client: flow.via, server: flow.own.destination, far: flow.far };
                control.ask_to_pass(path, lease, step, order.flows.iter().map(passing).collect()).await
            }
            _ => control.ask(path, order.lease, step, order.flows.iter().map(flow).collect()).await,
        };
        match asked {
            Ok(MoveAnswer { passing, .. }) if order.flows.iter().all(|flow| flow.far.is_none()) && passing.len() == 1 => {
                for passage in passing.into_values() {
                    if client.remote(id) == Some(passage.near.ip()) {
                        let _ = changes.send(Change::Passage { number: order.number, near: passage.near, far: passage.far });
                    } else {
                        answer(changes, order.number, Err(format!("a NAT translates the waypoint's address {}", passage.near.ip())));
                    }
                }
            }
            Ok(MoveAnswer { blocked: true, refused, .. }) => {
                drop(changes.send(Change::MoveBlocked { number: order.number, reasons: refused }))
            }
            Ok(answered) => answer(changes, order.number, Ok(answered.refused)),
            Err(error) => {
                answer(changes, order.number, Err(error.to_string()));
                return Some(());
            }
        }
    }
}

fn answer(changes: &mpsc::UnboundedSender<Change>, number: u64, answer: Result<BTreeMap<usize, String>, String>) {
    tracing::debug!(number, ?answer, "the answer of a host that was asked to move flows");
    let _ = changes.send(Change::MoveAnswer { number, answer });
}
