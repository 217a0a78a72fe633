//! `braid net sfnet`.

use std::io::{self, BufRead as _, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, bail};
use braid_daemon::joined::client_keys;
use braid_model::Rate;
use braid_sfnet::{ClientEvent, Network, Options, discover, receiver, sender, tls};
use serde_json::{Value, json};

use crate::cli::{About, SfnetAction, SfnetCommand};

/// Time to find the controller.
const FIND: Duration = Duration::from_secs(3);
/// Time for the answer to a question.
const ANSWER: Duration = Duration::from_secs(10);
/// Interval at which the end of the datagrams is looked for.
const LOOKED: Duration = Duration::from_millis(100);
/// Longest datagram.
const DATAGRAM: usize = 65_535;

/// Runs the command.
pub(crate) fn run(command: SfnetCommand) -> anyhow::Result<()> {
    let keys = command.identity.as_deref().map(client_keys).transpose()?;
    let config = keys.as_ref().map(|keys| tls(keys, command.controller_key)).transpose()?;
    let options = Options { controller: command.controller, device: command.device.clone(), tls: config };
    let show = Show { json: command.json };
    let mut asking = Asking { network: Network::new(options), show, keep: command.keep };
    match command.action {
        SfnetAction::Discover => found(&show, command.device.as_deref()),
        SfnetAction::State { to } => asking.state(to.as_deref()),
        SfnetAction::Receive { group, port, count } => asking.receive(group, port, count),
        SfnetAction::Send { group, port, texts } => asking.send(group, port, texts),
        SfnetAction::Reserve { down, up } => {
            let bps = |rate: Option<Rate>| rate.unwrap_or_default().bps();
            asking.hold("reserve", json!({"down_bps": bps(down), "up_bps": bps(up)}))
        }
        SfnetAction::Multipath { from, to, protocol, ports } => {
            let mut with = json!({"protocol": protocol.name(), "ports": ports});
            for (key, host) in [("from", from), ("to", to)] {
                if let Some(host) = host {
                    with[key] = host.into();
                }
            }
            asking.hold("multipath", with)
        }
        SfnetAction::Block { sender } => asking.hold("access", json!({"from": sender})),
        SfnetAction::Watch { about } => {
            let about: Vec<&str> = about.into_iter().map(About::name).collect();
            asking.hold("notices", json!({"about": about}))
        }
    }
}

/// How results are printed.
#[derive(Debug, Clone, Copy)]
struct Show {
    json: bool,
}

impl Show {
    fn line(self, text: &str, value: &Value) -> anyhow::Result<()> {
        let mut out = io::stdout();
        if self.json {
            writeln!(out, "{value}")?
        } else {
            writeln!(out, "{text}")?
        }
        Ok(out.flush()?)
    }

    /// Prints datagrams as they come, up to a number.
    fn datagrams(self, socket: &UdpSocket, count: Option<u64>) -> anyhow::Result<()> {
        let mut buffer = vec![0; DATAGRAM];
        for _ in 0..count.unwrap_or(u64::MAX) {
            let (length, from) = socket.recv_from(&mut buffer).context("cannot receive")?;
            let text = String::from_utf8_lossy(&buffer[..length]);
            self.line(&format!("{from}: {text}"), &json!({"from": from.to_string(), "text": text}))?;
        }
        Ok(())
    }
}

fn found(show: &Show, device: Option<&str>) -> anyhow::Result<()> {
    let found = discover(device, FIND)?;
    let offer = &found.offer;
    let mut at: Vec<String> = offer.port.iter().map(|port| format!("{}:{port}", offer.address)).collect();
    at.extend(offer.tls_port.iter().map(|port| {
        let key = offer.key.as_ref().map(|key| format!(", key {key}")).unwrap_or_default();
        format!("{}:{port} with TLS{key}", offer.address)
    }));
    let text =
        format!("the controller takes programs at {}; it answered after {:.1} ms", at.join(" and "), found.after.as_secs_f64() * 1e3);
    let mut value = serde_json::to_value(offer)?;
    value["after_us"] = (found.after.as_micros() as u64).into();
    show.line(&text, &value)
}

/// A command that asks.
struct Asking {
    network: Network,
    show: Show,
    keep: u32,
}

impl Asking {
    /// The next event; refusals and ends are errors, and connections that break are only said.
    fn next(&mut self, limit: Duration) -> anyhow::Result<Option<ClientEvent>> {
        match self.network.wait(limit) {
            Some(ClientEvent::Refused { reason, .. } | ClientEvent::Misunderstood { reason }) => bail!("the controller refuses: {reason}"),
            Some(ClientEvent::Ended { reason, .. }) => bail!("the controller has ended it: {reason}"),
            Some(ClientEvent::Disconnected { reason, .. }) => {
                let _ = writeln!(io::stderr(), "braid: {reason}; trying again");
                Ok(None)
            }
            event => Ok(event),
        }
    }

    fn state(&mut self, to: Option<&str>) -> anyhow::Result<()> {
        self.network.state(to);
        loop {
            match self.network.wait(ANSWER) {
                Some(ClientEvent::State { state, .. }) => return self.show.line(&serde_json::to_string_pretty(&state)?, &state),
                Some(ClientEvent::Refused { reason, .. } | ClientEvent::Disconnected { reason, .. }) => bail!("{reason}"),
                Some(_) => {}
                None => bail!("the controller has not answered within {} s", ANSWER.as_secs()),
            }
        }
    }

    /// Waits until a service has begun. Returns what it says.
    fn begin(&mut self, service: &str, with: Value) -> anyhow::Result<Value> {
        self.network.start(service, with, self.keep);
        loop {
            if let Some(ClientEvent::Started { result, .. }) = self.next(ANSWER)? {
                return Ok(result);
            }
        }
    }

    /// Asks for a service, and prints its events until this process ends.
    fn hold(&mut self, service: &str, with: Value) -> anyhow::Result<()> {
        let result = self.begin(service, with)?;
        self.show.line(&format!("{service} until this process ends (Ctrl-C): {result}"), &json!({"started": service, "result": result}))?;
        loop {
            match self.next(ANSWER)? {
                Some(ClientEvent::Event { event, .. }) => self.show.line(&event.to_string(), &json!({"event": event}))?,
                Some(ClientEvent::Started { result, .. }) => {
                    self.show.line(&format!("{service} again: {result}"), &json!({"started": service, "result": result}))?;
                }
                _ => {}
            }
        }
    }

    fn own_address(&self) -> anyhow::Result<Ipv4Addr> {
        self.network.own_address().context("multicast groups need an IPv4 connection to the controller")
    }

    fn receive(&mut self, group: Ipv4Addr, port: u16, count: Option<u64>) -> anyhow::Result<()> {
        let result = self.begin("multicast", json!({"group": group.to_string()}))?;
        let socket = receiver(group, port, self.own_address()?).with_context(|| format!("cannot receive from {group}:{port}"))?;
        self.show.line(
            &format!("receiving from {group}:{port} until this process ends (Ctrl-C)"),
            &json!({"started": "multicast", "result": result}),
        )?;
        // Datagrams are printed whatever the controller does.
        let show = self.show;
        let printing = std::thread::spawn(move || show.datagrams(&socket, count));
        while !printing.is_finished() {
            if let Some(ClientEvent::Started { result, .. }) = self.next(LOOKED)? {
                self.show.line(&format!("receiving from {group}:{port} again"), &json!({"started": "multicast", "result": result}))?;
            }
        }
        printing.join().map_err(|_| anyhow::anyhow!("printing failed"))?
    }

    fn send(&mut self, group: Ipv4Addr, port: u16, texts: Vec<String>) -> anyhow::Result<()> {
        self.begin("multicast", json!({"group": group.to_string()}))?;
        let socket = sender(self.own_address()?)?;
        let mut sent = 0u64;
        let mut send = |text: &str| -> anyhow::Result<()> {
            socket.send_to(text.as_bytes(), (group, port)).with_context(|| format!("cannot send to {group}:{port}"))?;
            sent += 1;
            Ok(())
        };
        if texts.is_empty() {
            for line in io::stdin().lock().lines() {
                send(&line?)?;
            }
        } else {
            texts.iter().try_for_each(|text| send(text))?;
        }
        self.show.line(&format!("sent {sent} datagrams to {group}:{port}"), &json!({"sent": sent}))
    }
}
