//! Both sides of a connection, joined by queues of bytes.

use std::time::Duration;

use braid_model::Time;
use braid_openflow::ids::DatapathId;
use braid_openflow::switch::Features;
use braid_openflow::{Config, Connection, Event, Message, Side, Version};

pub(crate) struct Pair {
    pub(crate) now: Time,
    pub(crate) controller: Connection,
    pub(crate) switch: Connection,
    /// Bytes on the way to the controller, and to the switch.
    pub(crate) to_controller: Vec<u8>,
    pub(crate) to_switch: Vec<u8>,
}

pub(crate) fn features() -> Features {
    Features { datapath: DatapathId(42), buffers: 0, tables: 4, auxiliary: 0, capabilities: Default::default(), actions: 0, ports: vec![] }
}

impl Pair {
    pub(crate) fn new(controller: &[Version], switch: &[Version]) -> Self {
        let config = |side, versions: &[Version]| Config { versions: versions.to_vec(), ..Config::new(side) };
        Self::with(config(Side::Controller, controller), config(Side::Switch, switch))
    }

    pub(crate) fn with(controller: Config, switch: Config) -> Self {
        let now = Time::from_millis(1000);
        Self {
            now,
            controller: Connection::new(controller, now),
            switch: Connection::new(switch, now),
            to_controller: Vec::new(),
            to_switch: Vec::new(),
        }
    }

    /// A pair whose handshake is done. Its first events are gone.
    pub(crate) fn ready(version: Version) -> Self {
        let mut pair = Self::new(&[version], &[version]);
        let (controller, switch) = pair.exchange();
        assert!(matches!(&controller[..], [Event::Ready { .. }]) && matches!(&switch[..], [Event::Ready { .. }]));
        pair
    }

    /// Moves all waiting bytes to the queues.
    pub(crate) fn collect(&mut self) {
        self.controller.poll_output(&mut self.to_switch);
        self.switch.poll_output(&mut self.to_controller);
    }

    /// Delivers bytes until none is left, and answers requests for features. Returns the other events of the controller and of the switch.
    pub(crate) fn exchange(&mut self) -> (Vec<Event>, Vec<Event>) {
        let (mut controller, mut switch) = (Vec::new(), Vec::new());
        loop {
            self.collect();
            controller.extend(std::iter::from_fn(|| self.controller.poll_event()));
            for event in std::iter::from_fn(|| self.switch.poll_event()).collect::<Vec<_>>() {
                match event {
                    Event::Message { xid, message } if *message == Message::FeaturesRequest => {
                        self.switch.respond(xid, Message::FeaturesReply(features())).unwrap();
                    }
                    event => switch.push(event),
                }
            }
            self.collect();
            if self.to_controller.is_empty() && self.to_switch.is_empty() {
                return (controller, switch);
            }
            self.controller.receive(self.now, &std::mem::take(&mut self.to_controller));
            self.switch.receive(self.now, &std::mem::take(&mut self.to_switch));
        }
    }

    /// Lets time pass, without delivering anything.
    pub(crate) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        for side in [&mut self.controller, &mut self.switch] {
            if side.poll_timeout().is_some_and(|due| due <= self.now) {
                side.handle_timeout(self.now);
            }
            assert!(side.poll_timeout().is_none_or(|due| due > self.now), "a timer was due and had no effect");
        }
    }
}
