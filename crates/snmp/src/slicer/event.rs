//! What a slicer reports to its operator.

use std::fmt;
use std::net::SocketAddr;

use crate::ber::Malformed;
use crate::engine::Complaint;
use crate::oid::Oid;
use crate::pdu::ErrorStatus;

/// What a slicer reports to its operator. Each names what it concerns, the reason and a remedy. None has a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A datagram is no message.
    Malformed {
        /// The device for which it came.
        device: String,
        /// Its sender.
        from: SocketAddr,
        /// What is wrong.
        error: Malformed,
    },
    /// A community that no manager has, or an address from which its manager may not ask.
    Stranger {
        /// The device that was meant.
        device: String,
        /// The sender.
        from: SocketAddr,
    },
    /// A message of SNMPv3 was refused with a report.
    Reported {
        /// The device that was meant.
        device: String,
        /// The sender.
        from: SocketAddr,
        /// The reason.
        complaint: Complaint,
    },
    /// A message was dropped.
    Dropped {
        /// The device that was meant.
        device: String,
        /// The sender.
        from: SocketAddr,
        /// The reason.
        why: &'static str,
    },
    /// A manager sends more than it may.
    Flood {
        /// Its slice.
        slice: String,
        /// Its address.
        from: SocketAddr,
        /// The reason.
        why: &'static str,
    },
    /// An agent does not answer.
    Silent {
        /// The device.
        device: String,
        /// The slice that asked.
        slice: String,
        /// What it asked for first.
        name: Oid,
    },
    /// An agent's answer is wrong.
    Faulty {
        /// The device.
        device: String,
        /// The slice that asked.
        slice: String,
        /// What was asked.
        name: Oid,
        /// What is wrong, and what to do.
        what: &'static str,
    },
    /// An agent does not take this program's requests, or sends what cannot be used.
    Agent {
        /// The device.
        device: String,
        /// The reason.
        why: &'static str,
    },
    /// A slice set variables.
    Set {
        /// The device.
        device: String,
        /// The slice.
        slice: String,
        /// The variables.
        names: Vec<Oid>,
    },
    /// A slice was not allowed to set a variable.
    NotSet {
        /// The device.
        device: String,
        /// The slice.
        slice: String,
        /// The variable.
        name: Oid,
        /// The answer.
        status: ErrorStatus,
        /// The reason, and what to do.
        why: &'static str,
    },
    /// What slices had asked for cannot be stored or read.
    State(&'static str),
}

impl Event {
    /// Whether the operator should look at it.
    pub fn is_trouble(&self) -> bool {
        !matches!(
            self,
            Self::Set { .. } | Self::NotSet { .. } | Self::Reported { complaint: Complaint::EngineId | Complaint::TimeWindow, .. }
        )
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { device, from, error } => {
                write!(f, "{from} sent for {device} what is no SNMPv2c or SNMPv3: {error}; look at what runs there")
            }
            Self::Stranger { device, from } => write!(
                f,
                "{from} asked for {device} with a community that no manager may use from there, and got no answer: compare its community with the file of \
                 the manager, and its address with `from`"
            ),
            Self::Reported { device, from, complaint } => {
                let why = match complaint {
                    Complaint::SecurityLevel => {
                        "its level is not the user's: let it use authentication and encryption as the [[slice.manager]] entry says"
                    }
                    Complaint::TimeWindow => {
                        "its clock is not this engine's, or it is a copy of an old message; honest managers try again by themselves"
                    }
                    Complaint::UserName => "no manager has this user: add it to a [[slice.manager]] entry",
                    Complaint::EngineId => "it looks for this engine's id",
                    Complaint::Digest => "its digest is wrong: compare the authentication password and `auth`",
                    Complaint::Decryption => "it cannot be decrypted: compare the privacy password",
                    Complaint::Context => "it names a context: leave it out, since each device has an address of its own",
                    Complaint::Handler => "it means another engine: leave out the context's engine id",
                };
                write!(f, "{from} asked for {device} by SNMPv3 and got a report: {why}")
            }
            Self::Dropped { device, from, why } => write!(f, "a message of {from} for {device} was dropped: {why}"),
            Self::Flood { slice, from, why } => write!(f, "a request of {from} for slice {slice} was dropped: {why}"),
            Self::Silent { device, slice, name } => write!(
                f,
                "the agent of {device} did not answer a request of slice {slice} for {name}, which got genErr: check that it runs, and its address, \
                 community or user in [[device]]"
            ),
            Self::Faulty { device, slice, name, what } => {
                write!(f, "the agent of {device} answered a request of slice {slice} for {name} wrongly, and the slice got genErr: {what}")
            }
            Self::Agent { device, why } => {
                write!(f, "a message of the agent of {device} was not used: {why}; compare [[device]] with the agent's configuration")
            }
            Self::Set { device, slice, names } => {
                write!(f, "slice {slice} set at {device}:")?;
                names.iter().try_for_each(|name| write!(f, " {name}"))
            }
            Self::NotSet { device, slice, name, status, why } => {
                write!(f, "slice {slice} got {status} when it set {name} at {device}: {why}")
            }
            Self::State(what) => f.write_str(what),
        }
    }
}
