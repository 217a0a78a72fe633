//! The network that programs can ask (SFNet, thesis section 5.3.3 and 5.4): they find the controller, read the state that they may see, and ask for services.
//!
//! [`Sfnet`] is the controller's side without I/O, beside a [`Controller`](crate::Controller): lines of connections go in, lines come out. What a program asked for is a
//! *lease*: it ends with the program's connection, or a time after it that the program chose. [`Client`] is the program's side, without I/O, too: it asks again for all that
//! it has asked for when the controller comes back.
//!
//! A request counts for the host whose address the connection has, or whose key it has proven. An address proves that the network delivers packets for it to the program's
//! host, and no more: see [`Proof`].

mod broker;
mod client;
mod service;
mod services;
mod settings;
mod state;
mod wire;

pub use crate::discovery::{DISCOVERY, Discovery, Offer, VERSION, discover, is_discover};
pub use broker::{Out, Proof, SessionId, Sfnet};
pub use client::{Client, ClientEvent, Want};
pub use service::{Action, Context, Happening, Lease, LeaseId, Service};
pub use services::{Access, Multicast, Multipath, NAMES, Notices, Reserve, all};
pub use settings::{HostRights, Quotas, Sees, Settings};
pub use wire::{ALPN, Ask, MAX_ANSWER, MAX_LINE, Say};
