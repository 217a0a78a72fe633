//! SNMP without I/O, and a slicer of it: many managers configure one network, and each sees and sets its own part only.
//!
//! Source: Yap, *Using All Networks Around Us*, chapter 5 (SNMPVisor).
//!
//! # Data flow
//!
//! ```text
//! datagram of a manager -> Message -> community or user (engine) -> view -> reading: rounds of requests to the agent -> answer
//!                                                                    |
//!                                                                    +----> setting: policy -> store -> the agent -> answer
//! datagram of an agent  -> Message -> agent: request, clock, engine -> the job that waits
//! ```
//!
//! A [`Slicer`] joins all. It gets datagrams and the time, and gives datagrams, texts to store, and events. It has no clock, socket or randomness.
//!
//! ```
//! use braid_model::Time;
//! use braid_snmp::{Credentials, DeviceSetup, Identity, ManagerSetup, Message, Output, Part, Pdu, PduKind, Setup, Slicer, SliceSetup, View};
//! use std::{collections::BTreeMap, time::Duration};
//!
//! let device = DeviceSetup {
//!     name: "ap1".into(),
//!     credentials: Credentials::Community(b"agent".to_vec()),
//!     timeout: Duration::from_secs(1),
//!     retries: 1,
//! };
//! let view = View::new(vec![Part::Subtree { root: "1.3.6.1.2.1.1".parse().unwrap(), except: vec![], write: false }]);
//! let manager = ManagerSetup::new(Credentials::Community(b"blue".to_vec()), vec!["127.0.0.0/8".parse().unwrap()]);
//! let slice = SliceSetup { name: "blue".into(), views: BTreeMap::from([(0, view)]), managers: vec![manager] };
//! let setup = Setup { devices: vec![device], slices: vec![slice], ..Setup::default() };
//! let mut slicer = Slicer::new(Time::ZERO, &Identity { engine: b"12345".to_vec(), boots: 1, seed: [7; 32] }, setup);
//!
//! let name = "1.3.6.1.2.1.1.5.0".parse().unwrap();
//! let asked = Message::encode_community(b"blue", &Pdu::asking(PduKind::Get, [name]));
//! slicer.receive_request(Time::ZERO, 0, "127.0.0.1:40000".parse().unwrap(), &asked);
//! assert!(matches!(slicer.poll_output(), Some(Output::ToAgent { device: 0, .. })));
//! assert_eq!(slicer.poll_timeout(), Some(Time::from_millis(1000)));
//! ```

#![forbid(unsafe_code)]

mod agent;
mod ber;
mod credentials;
mod engine;
mod message;
mod oid;
mod pdu;
mod policy;
mod random;
mod slicer;
mod usm;
mod view;

pub use ber::Malformed;
pub use credentials::Credentials;
pub use engine::Complaint;
pub use message::{Level, MAX_MESSAGE, Message, ScopedData, ScopedPdu, Secured, SecurityParameters};
pub use oid::{MAX_PARTS, Oid, OidError, parts};
pub use pdu::{ErrorStatus, Pdu, PduKind, Value, VarBind};
pub use policy::{Bounds, Policy, Shared};
pub use slicer::{DeviceSetup, Event, Identity, Limits, ManagerSetup, Output, Setup, SliceSetup, Slicer};
pub use usm::{AuthProtocol, LEAST_PASSWORD, ShortPassword, UserKeys};
pub use view::{Access, Part, View};
