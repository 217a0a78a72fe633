//! Settings, events and errors of a connection.

use std::time::Duration;

use braid_model::ByteCount;
use thiserror::Error;

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError};
use crate::frame::FrameError;
use crate::ids::Xid;
use crate::message::{Message, MessageKind};
use crate::reassembly::PartLimits;
use crate::switch::{ErrorMessage, Features};
use crate::version::Version;
use crate::wire::MAX_MESSAGE;

/// Which side of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The controller.
    Controller,
    /// The switch.
    Switch,
}

/// Settings of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The side.
    pub side: Side,
    /// Supported versions.
    pub versions: Vec<Version>,
    /// Time for hello and, at the controller, features.
    pub handshake_timeout: Duration,
    /// Silence of the peer after which an echo request is sent.
    pub echo_interval: Duration,
    /// Silence after this echo request that ends the connection.
    pub echo_timeout: Duration,
    /// Time for the reply to a request.
    pub request_timeout: Duration,
    /// Time for outstanding replies when the connection is shut down.
    pub shutdown_timeout: Duration,
    /// The most requests and commands that are not done.
    pub max_outstanding: usize,
    /// The most bytes that wait to be sent. Beyond them nothing is accepted; if the connection itself has to answer, it ends.
    pub max_queued: ByteCount,
    /// The largest message to receive, in bytes.
    pub max_message: usize,
    /// Limits of messages in several parts.
    pub parts: PartLimits,
}

impl Config {
    /// The usual settings of a side: both versions, 10 s for the handshake and replies, echoes after 10 s, which may take 5 s.
    pub fn new(side: Side) -> Self {
        Self {
            side,
            versions: Version::ALL.to_vec(),
            handshake_timeout: Duration::from_secs(10),
            echo_interval: Duration::from_secs(10),
            echo_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(10),
            shutdown_timeout: Duration::from_secs(5),
            max_outstanding: 4096,
            max_queued: ByteCount::new(4 << 20),
            max_message: MAX_MESSAGE,
            parts: PartLimits::default(),
        }
    }
}

/// What happened on a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Messages can be sent. A switch may have sent asynchronous messages before, which are events too.
    Ready {
        /// The version of this connection.
        version: Version,
        /// The switch's features; at the controller only.
        features: Option<Box<Features>>,
    },
    /// The peer sent a message that is no reply to a request of this side. If it is a request, [`super::Connection::respond`] or
    /// [`super::Connection::refuse`] answers it.
    Message {
        /// Number of its transaction.
        xid: Xid,
        /// The message. A request in several parts is complete.
        message: Box<Message>,
    },
    /// The reply to a request. Replies in several parts are complete.
    Reply {
        /// Number of the request.
        xid: Xid,
        /// The reply.
        message: Box<Message>,
    },
    /// A barrier's reply came, and no error of this command before it: the switch has done it.
    Done {
        /// Number of the command.
        xid: Xid,
    },
    /// A request or command failed.
    Failed {
        /// Its number.
        xid: Xid,
        /// The peer's error.
        error: ErrorMessage,
    },
    /// A request's reply did not come in time, or that of the barrier after a command.
    TimedOut {
        /// Its number.
        xid: Xid,
    },
    /// The connection did not accept a message of the peer. Messages that are no replies were answered with this error.
    Rejected {
        /// Number of its transaction. A request with this number is over.
        xid: Xid,
        /// The error.
        code: ErrorCode,
        /// What is wrong with the message, if it is malformed.
        malformed: Option<Box<DecodeError>>,
    },
    /// The connection is over. Bytes that wait are still to be sent. It is the last event.
    Closed {
        /// Why.
        reason: CloseReason,
        /// Requests and commands that were not done.
        abandoned: Vec<Xid>,
    },
}

/// Why a connection is over.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CloseReason {
    /// This side closed it.
    #[error("closed by this side")]
    Local,
    /// The peer closed it.
    #[error("closed by the peer")]
    Peer,
    /// Hello or features did not come in time.
    #[error("the handshake did not end in time")]
    HandshakeTimeout,
    /// The peer's first message was no hello.
    #[error("the first message was no hello")]
    NoHello,
    /// The sides have no common version.
    #[error("no common version: the peer's is {0:#04x}")]
    NoCommonVersion(u8),
    /// The peer refused the hello.
    #[error("the peer refused the hello: {}", .0.code)]
    Refused(ErrorMessage),
    /// The switch refused the request for its features.
    #[error("the switch refused the request for its features: {}", .0.code)]
    NoFeatures(ErrorMessage),
    /// A message of the handshake is malformed.
    #[error("malformed handshake: {0}")]
    Malformed(Box<DecodeError>),
    /// The peer's bytes cannot be split into messages.
    #[error("{0}")]
    Framing(FrameError),
    /// The peer is silent.
    #[error("the peer did not answer an echo request")]
    Silent,
    /// The peer does not read.
    #[error("too many bytes wait to be sent")]
    Overflow,
}

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SendError {
    /// The handshake is not done.
    #[error("cannot send {} before the handshake is done: wait for the event Ready", .0.name())]
    NotReady(MessageKind),
    /// The connection is over, or shut down.
    #[error("cannot send {}: the connection is closed", .0.name())]
    Closed(MessageKind),
    /// Too many requests and commands are not done.
    #[error("cannot send {}: {count} requests and commands are not done; commands need a barrier", kind.name())]
    Outstanding {
        /// The message.
        kind: MessageKind,
        /// How many are not done.
        count: usize,
    },
    /// Too many bytes wait to be sent.
    #[error("cannot send {}: {bytes} bytes wait to be sent", kind.name())]
    Queued {
        /// The message.
        kind: MessageKind,
        /// How many bytes wait.
        bytes: usize,
    },
    /// The version of the connection cannot express the message, or the message is too long.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}
