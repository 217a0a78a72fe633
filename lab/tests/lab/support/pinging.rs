//! Pings that run while something happens.

use std::process::{Child, Command, Stdio};

use braid_lab::network::Host;

use super::text;

/// Pings of one host to another every 20 ms, until they are told to end.
pub struct Pinging(Child);

impl Pinging {
    pub fn start(one: &Host, other: &Host) -> Self {
        let mut ping = one.namespace().command("ping").unwrap();
        ping.args(["-i", "0.02", &other.address.to_string()]).stdout(Stdio::piped());
        Self(ping.spawn().unwrap())
    }

    /// Packets up to the last one that was answered, and answers. The answer to a later one may be under way.
    pub fn end(self) -> (usize, usize) {
        interrupt(self.0.id());
        let said = text(&self.0.wait_with_output().unwrap().stdout);
        let answers: Vec<usize> = said.lines().filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok()).collect();
        (answers.iter().copied().max().unwrap_or(0), answers.len())
    }
}

pub fn interrupt(pid: u32) {
    assert!(Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap().success());
}
