//! OpenFlow 1.0 and 1.3 without I/O: messages, framing, and both sides of a connection.
//!
//! Sources: *OpenFlow Switch Specification* 1.3.5 (wire version 0x04) and 1.0.1 (wire version 0x01).
//!
//! # Messages
//!
//! A [`Message`] is of no version. [`Message::encode`] refuses what the version cannot express, and names the field. [`Message::decode`] takes one
//! message; a [`Splitter`] finds the messages of a stream. What experimenters define stays bytes.
//!
//! ```
//! use braid_openflow::action::{Action, Instruction};
//! use braid_openflow::flow::FlowMod;
//! use braid_openflow::ids::{PortNo, TableId, Xid};
//! use braid_openflow::matching::Match;
//! use braid_openflow::oxm::{Field, Oxm};
//! use braid_openflow::{Message, Version};
//!
//! let http = [Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 6u8), Oxm::exact(Field::TcpDst, 80u16)];
//! let to_port_2 = vec![Instruction::ApplyActions(vec![Action::output(PortNo(2))])];
//! let flow = FlowMod { matching: Match::new(http), instructions: to_port_2, ..FlowMod::default() };
//!
//! for version in Version::ALL {
//!     let mut bytes = Vec::new();
//!     Message::FlowMod(flow.clone()).encode(version, Xid(1), &mut bytes).unwrap();
//!     let (header, message) = Message::decode(&bytes.into()).unwrap();
//!     assert_eq!((header.xid, message), (Xid(1), Message::FlowMod(flow.clone())));
//! }
//! let second_table = Message::FlowMod(FlowMod { table: TableId(1), ..flow });
//! let error = second_table.encode(Version::V1_0, Xid(2), &mut Vec::new()).unwrap_err();
//! assert_eq!((error.field, error.version), ("table_id", Version::V1_0));
//! ```
//!
//! # Connections
//!
//! A [`Connection`] is one side of a connection: it gets received bytes and the time, and gives bytes to send and events.
//!
//! ```
//! use braid_model::Time;
//! use braid_openflow::{Config, Connection, Event, Message, Side, Version};
//!
//! let now = Time::ZERO;
//! let mut controller = Connection::new(Config::new(Side::Controller), now);
//! let mut switch = Connection::new(Config::new(Side::Switch), now);
//! let mut bytes = Vec::new();
//! controller.poll_output(&mut bytes); // its hello
//! switch.receive(now, &bytes);
//! assert_eq!(switch.poll_event(), Some(Event::Ready { version: Version::V1_3, features: None }));
//! bytes.clear();
//! switch.poll_output(&mut bytes);
//! controller.receive(now, &bytes);
//! assert_eq!(controller.version(), Some(Version::V1_3)); // and now it asks for the switch's features
//! ```
//!
//! After every input the caller takes the output and the events. [`Connection::poll_timeout`] covers all that is due without input.

#![forbid(unsafe_code)]

pub mod action;
mod codes;
mod connection;
mod error;
pub mod flags;
pub mod flow;
mod frame;
pub mod group;
pub mod ids;
pub mod matching;
mod message;
pub mod multipart;
pub mod oxm;
pub mod port;
mod reassembly;
mod roles;
pub mod switch;
mod text;
mod version;
mod wire;

pub use codes::ErrorCode;
pub use connection::{CloseReason, Config, Connection, Event, SendError, Side};
pub use error::{DecodeError, EncodeError, Reason, Unfit};
pub use frame::{FrameError, Splitter};
pub use message::{HEADER, Header, Message, MessageKind, Sender};
pub use reassembly::PartLimits;
pub use roles::{RoleChange, Roles};
pub use text::Text;
pub use version::Version;
pub use wire::MAX_MESSAGE;
