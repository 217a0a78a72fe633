//! What a slicer is made of.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::credentials::Credentials;
use crate::policy::Shared;
use crate::view::View;

/// This program as an engine of SNMPv3.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its id, of 5 to 32 bytes, which is always the same.
    pub engine: Vec<u8>,
    /// The number of its starts. It never is the same twice.
    pub boots: u32,
    /// Bytes that nobody else can guess, another one each time.
    pub seed: [u8; 32],
}

/// A device, whose agent is asked.
#[derive(Debug, Clone)]
pub struct DeviceSetup {
    /// Its name.
    pub name: String,
    /// By what its agent knows this program.
    pub credentials: Credentials,
    /// Time to answer in.
    pub timeout: Duration,
    /// How often a request is sent again.
    pub retries: u32,
}

/// A slice.
#[derive(Debug, Clone)]
pub struct SliceSetup {
    /// Its name.
    pub name: String,
    /// What it sees of devices.
    pub views: BTreeMap<usize, View>,
    /// Its managers.
    pub managers: Vec<ManagerSetup>,
}

/// A manager of a slice.
#[derive(Debug, Clone)]
pub struct ManagerSetup {
    /// By what it is known. No two managers have the same community or user.
    pub credentials: Credentials,
    /// Where it may ask from.
    pub from: Vec<IpNet>,
    /// Whether it may set what its slice may.
    pub write: bool,
    /// Requests a second.
    pub rate: u32,
    /// Where it takes notifications.
    pub notify: Option<SocketAddr>,
}

impl ManagerSetup {
    /// A manager that may only read.
    pub fn new(credentials: Credentials, from: Vec<IpNet>) -> Self {
        Self { credentials, from, write: false, rate: 100, notify: None }
    }
}

/// Limits of all managers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest answer in bytes.
    pub answer: usize,
    /// The most repetitions of a GetBulk.
    pub repetitions: u32,
}

impl Default for Limits {
    fn default() -> Self {
        // What fits into a frame of Ethernet without fragments.
        Self { answer: 1472, repetitions: 50 }
    }
}

/// What a slicer is made of. Devices and slices are meant by their places.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// The devices.
    pub devices: Vec<DeviceSetup>,
    /// The slices.
    pub slices: Vec<SliceSetup>,
    /// What slices share.
    pub shared: Vec<Shared>,
    /// Limits of all managers.
    pub limits: Limits,
}
