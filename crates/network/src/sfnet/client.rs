//! A program's side of the network that programs can ask, without I/O.
//!
//! A program says what it wants once. [`Client`] asks for it on every connection, so that it comes back with the controller.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::Time;
use serde_json::Value;

use super::wire::{Ask, Say};

/// What a program wants: a service, for as long as it says so.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    /// Name of the service.
    pub service: String,
    /// What the service needs.
    pub with: Value,
    /// Seconds for which it stays after a connection has ended: enough to come back after the controller was started again.
    pub keep: u32,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientEvent {
    /// The controller serves the program.
    Welcome {
        /// The host for which requests count.
        host: String,
        /// The services that it offers.
        services: Vec<String>,
    },
    /// A service has begun, the first time or again.
    Started {
        /// The number of the want.
        want: u64,
        /// What the service says.
        result: Value,
    },
    /// A service was refused. It is not asked for again on this connection.
    Refused {
        /// The number of the want or of the question.
        want: u64,
        /// Why.
        reason: String,
    },
    /// A service reports something.
    Event {
        /// The number of the want.
        want: u64,
        /// What.
        event: Value,
    },
    /// The controller has ended a service, or has done what [`Client::end`] asked for.
    Ended {
        /// The number of the want.
        want: u64,
        /// Why.
        reason: String,
    },
    /// The answer to [`Client::state`].
    State {
        /// The number of the question.
        question: u64,
        /// The state.
        state: Value,
    },
    /// The connection has ended, or could not be made.
    Disconnected {
        /// Why.
        reason: String,
        /// When to connect again.
        again: Time,
    },
    /// The controller did not understand a line.
    Misunderstood {
        /// What it says.
        reason: String,
    },
}

/// Time before the next connection, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

#[derive(Debug)]
struct Wanted {
    want: Want,
    lease: Option<u64>,
    /// Whether it is to be asked for again.
    stays: bool,
}

/// A program's connection to the controller, and what it wants there.
#[derive(Debug, Default)]
pub struct Client {
    wants: BTreeMap<u64, Wanted>,
    /// Questions about the state that are not answered.
    questions: BTreeMap<u64, Option<String>>,
    /// Wants by their leases.
    leases: BTreeMap<u64, u64>,
    last: u64,
    is_welcome: bool,
    failures: u32,
    /// What the controller said last before it closed the connection.
    bye: Option<String>,
    lines: VecDeque<String>,
    events: VecDeque<ClientEvent>,
}

impl Client {
    /// Wants a service from now on. Returns the number of the want.
    pub fn start(&mut self, want: Want) -> u64 {
        self.last += 1;
        self.wants.insert(self.last, Wanted { want, lease: None, stays: true });
        self.ask_for(self.last);
        self.last
    }

    /// Wants it no longer.
    pub fn end(&mut self, want: u64) {
        let Some(wanted) = self.wants.get_mut(&want) else { return };
        match wanted.lease {
            Some(lease) if self.is_welcome => {
                wanted.stays = false;
                self.lines.push_back(Ask::End { id: want, lease }.line());
            }
            // The answer is still to come: the lease ends then.
            None if self.is_welcome && wanted.stays => wanted.stays = false,
            _ => drop(self.wants.remove(&want)),
        }
    }

    /// Asks for the state, and the path to a host if one is given. Returns the number of the question.
    pub fn state(&mut self, to: Option<String>) -> u64 {
        self.last += 1;
        if self.is_welcome {
            self.lines.push_back(Ask::State { id: self.last, to: to.clone() }.line());
        }
        self.questions.insert(self.last, to);
        self.last
    }

    fn ask_for(&mut self, number: u64) {
        let Some(Wanted { want, .. }) = self.wants.get(&number).filter(|_| self.is_welcome) else { return };
        let Want { service, with, keep } = want.clone();
        self.lines.push_back(Ask::Start { id: number, service, with, keep, host: None }.line());
    }

    /// The controller sent a line, without its end. What is not understood is ignored: it may be of a later version.
    pub fn line(&mut self, text: &str) {
        let Ok(say) = serde_json::from_str::<Say>(text) else { return };
        match say {
            Say::Welcome { host, services, .. } => {
                (self.is_welcome, self.failures) = (true, 0);
                self.events.push_back(ClientEvent::Welcome { host, services });
                let wants: Vec<u64> = self.wants.keys().copied().collect();
                wants.into_iter().for_each(|want| self.ask_for(want));
                let questions = self.questions.iter().map(|(id, to)| Ask::State { id: *id, to: to.clone() }.line());
                self.lines.extend(questions);
            }
            Say::State { id, state } => {
                if self.questions.remove(&id).is_some() {
                    self.events.push_back(ClientEvent::State { question: id, state });
                }
            }
            Say::Started { id, lease, result } => {
                let Some(wanted) = self.wants.get_mut(&id) else { return };
                wanted.lease = Some(lease);
                self.leases.insert(lease, id);
                if wanted.stays {
                    self.events.push_back(ClientEvent::Started { want: id, result });
                } else {
                    self.lines.push_back(Ask::End { id, lease }.line());
                }
            }
            Say::Refused { id: Some(id), reason } => {
                let is_known = self.wants.remove(&id).is_some() | self.questions.remove(&id).is_some();
                let event = if is_known { ClientEvent::Refused { want: id, reason } } else { ClientEvent::Misunderstood { reason } };
                self.events.push_back(event);
            }
            Say::Refused { id: None, reason } => self.events.push_back(ClientEvent::Misunderstood { reason }),
            Say::Ended { lease, reason, .. } => {
                if let Some(want) = self.leases.remove(&lease) {
                    self.wants.remove(&want);
                    self.events.push_back(ClientEvent::Ended { want, reason });
                }
            }
            Say::Event { lease, event } => {
                if let Some(want) = self.leases.get(&lease) {
                    self.events.push_back(ClientEvent::Event { want: *want, event });
                }
            }
            Say::Bye { reason } => self.bye = Some(reason),
            Say::Other => {}
        }
    }

    /// The connection has ended, or could not be made.
    pub fn disconnected(&mut self, now: Time, reason: &str) {
        self.is_welcome = false;
        self.leases.clear();
        self.lines.clear();
        self.wants.retain(|_, wanted| wanted.stays);
        self.wants.values_mut().for_each(|wanted| wanted.lease = None);
        let pause = AGAIN.0.saturating_mul(1 << self.failures.min(10)).min(AGAIN.1);
        self.failures += 1;
        let reason = self.bye.take().unwrap_or_else(|| reason.to_owned());
        self.events.push_back(ClientEvent::Disconnected { reason, again: now + pause });
    }

    /// The next line to send, with its end.
    pub fn poll_line(&mut self) -> Option<String> {
        self.lines.pop_front()
    }

    /// What happened next.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn welcome(client: &mut Client) {
        client.line(&Say::Welcome { version: 1, host: "02:00:00:00:00:01".into(), services: Vec::new() }.line());
    }

    fn lines(client: &mut Client) -> Vec<Ask> {
        std::iter::from_fn(|| client.poll_line()).map(|line| Ask::read(&line).unwrap()).collect()
    }

    fn want() -> Want {
        Want { service: "multicast".into(), with: json!({"group": "239.192.0.1"}), keep: 10 }
    }

    #[test]
    fn what_is_wanted_is_asked_for_on_every_connection_until_it_ends() {
        let mut client = Client::default();
        let number = client.start(want());
        assert_eq!(lines(&mut client), []);
        for lease in [7, 8] {
            welcome(&mut client);
            assert!(matches!(&lines(&mut client)[..], [Ask::Start { id, keep: 10, .. }] if *id == number));
            client.line(&Say::Started { id: number, lease, result: json!(1) }.line());
            client.line(&Say::Event { lease, event: json!(2) }.line());
            client.disconnected(Time::ZERO, "killed");
        }
        welcome(&mut client);
        lines(&mut client);
        client.line(&Say::Started { id: number, lease: 9, result: json!(1) }.line());
        client.end(number);
        assert_eq!(lines(&mut client), [Ask::End { id: number, lease: 9 }]);
        client.line(&Say::Ended { id: Some(number), lease: 9, reason: "done".into() }.line());
        client.disconnected(Time::ZERO, "killed");
        welcome(&mut client);
        assert_eq!(lines(&mut client), []);
    }

    #[test]
    fn what_ends_before_it_begins_is_ended_then() {
        let mut client = Client::default();
        welcome(&mut client);
        let number = client.start(want());
        client.end(number);
        lines(&mut client);
        client.line(&Say::Started { id: number, lease: 3, result: json!(1) }.line());
        assert_eq!(lines(&mut client), [Ask::End { id: number, lease: 3 }]);
        let refused = client.start(Want { service: "x".into(), ..want() });
        client.line(&Say::Refused { id: Some(refused), reason: "no".into() }.line());
        client.disconnected(Time::ZERO, "");
        welcome(&mut client);
        assert_eq!(lines(&mut client), [], "neither is asked for again");
    }

    #[test]
    fn pauses_grow_and_the_reason_is_the_controllers() {
        let mut client = Client::default();
        let pause = |client: &mut Client, reason: &str| {
            client.disconnected(Time::ZERO, reason);
            match std::iter::from_fn(|| client.poll_event()).last() {
                Some(ClientEvent::Disconnected { reason, again }) => (reason, again.since(Time::ZERO)),
                other => panic!("{other:?}"),
            }
        };
        let pauses: Vec<Duration> = (0..8).map(|_| pause(&mut client, "refused").1).collect();
        assert_eq!((pauses[0], pauses[1], pauses[7]), (Duration::from_millis(200), Duration::from_millis(400), Duration::from_secs(10)));
        welcome(&mut client);
        client.line(&Say::Bye { reason: "barred".into() }.line());
        assert_eq!(pause(&mut client, "end of stream"), ("barred".to_owned(), Duration::from_millis(200)));
    }

    #[test]
    fn noise_is_ignored() {
        let mut client = Client::default();
        for text in ["", "x", "{}", "[1]", r#"{"say":"sing"}"#, r#"{"say":"started","id":9,"lease":1,"result":null}"#] {
            client.line(text);
        }
        assert_eq!((client.poll_event(), client.poll_line()), (None, None));
    }
}
