//! Forwards the datagrams that the command's connected datagram sockets send and receive.
//!
//! Braid connects such a socket to a loopback socket of its own, which it connects back, so neither accepts datagrams from anyone else. The
//! first datagram opens the flow. The kernel would report the loopback address as the sender of received datagrams, so
//! [`Listener::answer_datagram`](braid_platform::linux::seccomp::Listener::answer_datagram) answers calls that ask for the sender.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::FlowKind;
use braid_model::Family;
use braid_platform::linux::seccomp::told::Told;
use braid_platform::linux::seccomp::{RawCall, Reaches, Socket};
use braid_platform::linux::sockdiag;
use braid_platform::linux::sys::process;
use braid_transport::{Opening, UdpExchange, datagram};
use bytes::Bytes;
use tokio::net::UdpSocket;

use super::redirect_states::{RedirectState, State};
use super::redirector::{Redirector, source};

/// Interval between checks whether the program's socket still exists.
const POLL: Duration = Duration::from_millis(250);
/// Interval between checks whether a thread that waits for a datagram has a pending signal.
const SIGNALS: Duration = Duration::from_millis(50);

/// A datagram socket whose datagrams Braid forwards.
struct RedirectedExchange {
    cookie: u64,
    number: u64,
    remote: SocketAddr,
    /// Address of the program's socket.
    caller: SocketAddr,
    /// Our loopback socket, to which the program's socket is connected.
    ours: UdpSocket,
}

impl Redirector {
    /// Connects a datagram socket to a loopback socket of ours if its flow is to be redirected.
    pub(super) fn on_connect_datagrams(self: &Arc<Self>, call: &RawCall, socket: &Socket, remote: SocketAddr) -> bool {
        let cookie = socket.cookie();
        let family = Family::of(remote.ip());
        if self.redirect_states.forget(cookie).is_some() {
            // Restore the socket to the state in which its program left it.
            let _ = socket.disconnect();
        }
        let local = socket.local();
        // A connected socket with a local port is not a server.
        let free = local.ip().is_unspecified() && !socket.is_directed() && socket.route(family).is_none();
        if !free || !self.may_redirect(remote) {
            return false;
        }
        let number = self.number();
        let Ok(exchange) = self.exchange(socket, cookie, number, remote) else {
            let _ = socket.disconnect();
            return false;
        };
        self.redirect_states.put(cookie, RedirectState { remote, local: source(remote), state: State::Datagrams(number) });
        let (redirector, active) = (self.clone(), self.active());
        self.runtime.spawn(async move {
            redirector.forward_exchange(exchange).await;
            drop(active);
        });
        self.listener.answer(call.id, Ok(0));
        true
    }

    fn exchange(&self, socket: &Socket, cookie: u64, number: u64, remote: SocketAddr) -> io::Result<RedirectedExchange> {
        let loopback: IpAddr = if socket.reaches() == Reaches::V6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        let ours = std::net::UdpSocket::bind((loopback, 0))?;
        socket.begin(ours.local_addr()?)?;
        let caller = socket.local();
        ours.connect(caller)?;
        ours.set_nonblocking(true)?;
        let _inside = self.runtime.enter();
        Ok(RedirectedExchange { cookie, number, remote, caller, ours: UdpSocket::from_std(ours)? })
    }

    async fn forward_exchange(&self, exchange: RedirectedExchange) {
        let mut onward: Option<UdpExchange> = None;
        let mut poll = tokio::time::interval(POLL);
        let mut quiet = false;
        loop {
            tokio::select! {
                ready = exchange.ours.readable() => {
                    // An error means that the program's socket is closed, which the next poll also detects.
                    let Ok(payload) = ready.and_then(|()| datagram::try_receive(&exchange.ours)) else { continue };
                    if onward.is_none() {
                        onward = self.open(&exchange).await;
                    }
                    // If the flow is gone, the next datagram opens another.
                    onward = onward.filter(|onward| onward.send(payload).is_ok());
                }
                datagram = receive(onward.as_ref()) => match datagram {
                    // A datagram for which the program's socket buffer has no room is lost.
                    Ok(datagram) => drop(exchange.ours.send(&datagram).await),
                    // The flow has ended; the next datagram opens another.
                    Err(_) => onward = None,
                },
                _ = poll.tick() => {
                    // Its last datagrams may arrive after it is gone, so wait for one more poll.
                    let here = exchange.is_here() && self.is_current(&exchange);
                    if !here && quiet {
                        break;
                    }
                    quiet = !here;
                    if matches!(onward, Some(UdpExchange::Bonded(_))) && !self.is_up() {
                        onward = None;
                    }
                }
            }
        }
        if self.is_current(&exchange) {
            self.redirect_states.forget(exchange.cookie);
        }
    }

    async fn open(&self, exchange: &RedirectedExchange) -> Option<UdpExchange> {
        match self.bond(exchange.remote, FlowKind::Messages).await {
            Opening::Bonded(flow) => Some(UdpExchange::Bonded(flow)),
            Opening::Direct(_) => self.choice.exchange(exchange.remote).ok().map(|socket| UdpExchange::Direct(Arc::new(socket))),
            Opening::Refused(_) => None,
        }
    }

    fn is_current(&self, exchange: &RedirectedExchange) -> bool {
        self.redirect_states.get(exchange.cookie).is_some_and(|redirect_state| redirect_state.state == State::Datagrams(exchange.number))
    }

    /// Handles a datagram that names its destination, on a redirected socket.
    pub(super) fn on_send(&self, call: &RawCall, socket: &Socket, remote: SocketAddr, cookie: u64, redirect_state: RedirectState) -> bool {
        let State::Datagrams(_) = redirect_state.state else { return false };
        if remote == redirect_state.remote {
            let outcome = self.listener.send(call, socket);
            self.listener.answer(call.id, outcome);
            return true;
        }
        // Another destination is reached from the socket's real address, so from now on both destinations go direct.
        self.redirect_states.forget(cookie);
        let _ = socket.disconnect();
        let _ = socket.begin(redirect_state.remote);
        false
    }

    /// Handles a call that asks for a datagram and its sender.
    pub(super) fn on_receive(self: &Arc<Self>, call: &RawCall, socket: Socket, from: SocketAddr) -> bool {
        if self.listener.wants_errors(call) {
            return false;
        }
        let outcome = self.listener.answer_datagram(call, &socket, from);
        if outcome != Err(libc::EAGAIN) || socket.is_nonblocking() || !self.listener.may_wait(call) {
            drop(socket);
            self.listener.answer(call.id, outcome);
            return true;
        }
        let (redirector, call, hold) = (self.clone(), *call, self.hold(call.id));
        self.runtime.spawn_blocking(move || {
            let outcome = redirector.wait_for_datagram(&call, &socket, from);
            drop(socket);
            redirector.listener.answer(call.id, outcome);
            drop(hold);
        });
        true
    }

    /// Waits for a datagram as long as the caller would: until its receive timeout or a signal ends the wait.
    fn wait_for_datagram(&self, call: &RawCall, socket: &Socket, from: SocketAddr) -> Told {
        let end = socket.patience().map(|patience| Instant::now() + patience);
        loop {
            // The receive call itself reports an error of the socket.
            let _ = process::poll([(socket.as_fd(), true)], Some(SIGNALS));
            match self.listener.answer_datagram(call, socket, from) {
                Err(libc::EAGAIN) => {}
                outcome => return outcome,
            }
            if !self.listener.is_waiting(call.id) || has_signal(call.thread) {
                return Err(libc::EINTR);
            }
            if end.is_some_and(|end| end <= Instant::now()) {
                return Err(libc::EAGAIN);
            }
        }
    }
}

impl RedirectedExchange {
    /// Whether the program's socket still has its address.
    fn is_here(&self) -> bool {
        let Ok(ours) = self.ours.local_addr() else { return false };
        // If the kernel does not answer, assume that it exists; the exchange then ends with the command.
        sockdiag::udp_owner(self.caller, ours).map_or(true, |owner| owner == Some(self.cookie))
    }
}

/// The next datagram from the far end; waits forever when there is no flow.
async fn receive(onward: Option<&UdpExchange>) -> io::Result<Bytes> {
    match onward {
        None => std::future::pending().await,
        Some(onward) => onward.receive().await,
    }
}

/// Whether a thread has a pending signal that its program handles.
fn has_signal(thread: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{thread}/status")).is_ok_and(|status| waits_in(&status))
}

fn waits_in(status: &str) -> bool {
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        u64::from_str_radix(line.trim(), 16).unwrap_or(0)
    };
    (mask("SigPnd:") | mask("ShdPnd:")) & mask("SigCgt:") & !mask("SigBlk:") != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_handled_and_unblocked_signals_end_a_wait() {
        let status = |pending: u64, blocked: u64, caught: u64| {
            waits_in(&format!("Name:\tx\nSigPnd:\t{:016x}\nShdPnd:\t{pending:016x}\nSigBlk:\t{blocked:016x}\nSigCgt:\t{caught:016x}\n", 0))
        };
        assert!(status(2, 0, 2));
        assert!(!status(2, 2, 2) && !status(2, 0, 4) && !status(0, 0, 2));
    }
}
