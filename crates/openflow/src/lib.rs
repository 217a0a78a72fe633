//! OpenFlow 1.0 and 1.3 without I/O: messages, framing, and both sides of a connection.

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
