//! The types of Braid's HTTP API, shared by the daemon, the command line and other clients.
//!
//! Every response is [`Versioned`]. A [`List`] is an object that holds the array under its own key. An unknown value is `null`, never 0.
//! Fields may be added at any time; no field is renamed or removed within one [`SCHEMA_VERSION`]. Names of quantities end in their unit:
//! `_bps` bits per second, `_bytes`, `_us`, `_ms`, `_s`, `_j` joules, `_w` watts.

#![forbid(unsafe_code)]

mod adhoc;
mod answer;
mod app;
mod client;
mod config;
mod context;
mod doctor;
mod explain;
mod flow;
mod live;
mod network;
pub mod openapi;
mod peer;
mod policy;
mod problem;
mod relocation;
mod rules;
mod slices;
mod state;
mod status;

pub use adhoc::{AdhocChange, AdhocCounts, AdhocNeighbour, AdhocRadio, AdhocRadioChange, AdhocStatus, AdhocUp};
pub use answer::{List, Listed, Versioned};
pub use app::App;
pub use client::ClientStatus;
pub use config::{ConfigChange, ConfigChanged, ConfigView, Edit, Session, SessionRequest, UiAddress, UiRequest};
pub use context::{Fact, FactChange};
pub use doctor::{Check, DoctorReport, Mode, Verdict};
pub use explain::{Candidate, ExplainRequest, Explanation, FlowShare, LinkWeight, Optimum, Outcome, Share, ShareDirection, SkippedRule};
pub use flow::{Flow, LinkBytes};
pub use live::{
    AppHistory, AppSample, AppsSample, Compared, FlowChanges, Gains, History, LinkGain, LinkSample, Note, Resolution, Sample, TradeoffPoint,
};
pub use network::{
    NetworkAccess, NetworkChange, NetworkHost, NetworkKept, NetworkLink, NetworkPlace, NetworkPort, NetworkReservation, NetworkStatus,
    NetworkSwitch,
};
pub use peer::{JoinRequest, LeaveRequest, MoveRequest, Path, Peer};
pub use policy::{AppEntry, DetectionView, ExcludeEntry, LinkEntry, MeasurementView, PolicyView, UtilityView, VirtualInterfaceView};
pub use problem::{Finding, Problem};
pub use relocation::{FlowEnds, MovedFlow, MovedProtocol, RewriteRequest, RewriteState, Rewritten, SequenceNumbers};
pub use rules::{ProgramRule, Reservation, Reserve, RuleChange};
pub use slices::{SliceChange, SliceDescription, SliceLink, SlicePart, SliceTrouble, SliceUser, SliceView, SlicedSwitch, SlicerStatus};
pub use state::{LinkState, PathState, PeerKind, PeerState};
pub use status::{Accepted, Battery, Counters, LateStatus, LinkMeasured, LinkProfile, LinkStatus, Status, VirtualInterfaceStatus};

/// Version of these types. A client rejects a response with a higher version.
pub const SCHEMA_VERSION: u32 = 1;
