//! Chooses the next byte range to request, of which file, over which connection of which link: HTTP ranges over all links at once.
//!
//! Source: Yap, *Using all networks around us* (2013), sections 4.4.2 and 4.4.3: a transfer is divided into range requests, each request is assigned
//! a link, requests are issued ahead so that every link always has one, and miDRR schedules several transfers.
//!
//! The [`Engine`] does no I/O and reads no clock. The caller reports events with their times and polls for actions.
//!
//! ```
//! use braid_model::{ByteCount, Rate, Time};
//! use braid_range::{Action, Config, Engine, FileSetup, Head, LinkSetup, Span};
//!
//! let mut engine = Engine::new(Config { connections_first: 1, ..Config::default() });
//! let link = engine.add_link(LinkSetup::default()).unwrap();
//! let server = engine.add_server();
//! let file = engine.add_file(Time::ZERO, FileSetup::new(vec![server])).unwrap();
//! let Some(Action::Connect { connection, .. }) = engine.poll(Time::ZERO) else { panic!() };
//! engine.on_connected(Time::from_millis(20), connection, 1);
//! let Some(Action::Ask { request, span: Some(span), .. }) = engine.poll(Time::from_millis(20)) else { panic!() };
//! let head = Head { size: Some(ByteCount::new(1000)), span: Some(Span::new(ByteCount::ZERO, ByteCount::new(1000))), joinable: true };
//! engine.on_head(Time::from_millis(40), request, head);
//! let fresh = engine.on_data(Time::from_millis(41), request, ByteCount::new(1000));
//! assert_eq!(fresh, [Span::new(ByteCount::ZERO, ByteCount::new(1000))]);
//! assert_eq!(engine.poll(Time::from_millis(41)), Some(Action::Done { file, size: ByteCount::new(1000) }));
//! ```
//!
//! After every event the caller must call [`Engine::poll`] until it returns `None`, because an action may concern the caller's next event.
//!
//! # Terms
//!
//! A *connection* goes over one link to one server. It carries one request at a time, or two if the protocol lets requests overlap. A *source* is one
//! of a file's servers (mirrors). A byte is *fresh* when it arrives for the first time, over any link.
//!
//! # How ranges are chosen
//!
//! - **Size**: the bytes that a connection delivers in a third of the time that the file still needs over all links together, between 0.3 and 4
//!   seconds. Ranges are large while much is left, so that requests cost little, and small towards the end, so that all links finish together. If
//!   several files have bytes to request, ranges have the minimum size, because requested bytes cannot be redistributed when links change. If a
//!   reader needs a file in order, ranges are short too, and the requests of a link are staggered.
//! - **File**: miDRR with the files' weights and links (Π) chooses the file of each request.
//! - **Concurrency**: initially three requests per link, plus one for each 40 ms of its round trip, up to three more. The number rises further while
//!   that increases the throughput, as on links with loss.
//! - **Slow links**: a request that would last long after everything else has arrived is cut to what it can deliver until then; the rest becomes
//!   free.
//! - **End game**: a connection with nothing left to request takes over the rear part of the range that would end last, so that both end at the same
//!   time. If that part is too small, it requests all that is left of the range a second time.
//! - **Stalls**: a request that delivers nothing for a while releases its range. A link whose requests all stall gets no new ones until it delivers
//!   again.

#![forbid(unsafe_code)]

mod adopt;
mod answers;
mod engine;
mod file;
mod link;
mod meter;
mod plan;
mod spans;
mod types;

pub use engine::Engine;
pub use spans::{Span, Spans};
pub use types::{
    Action, Cause, Config, ConnectionId, Failure, FileId, FileSetup, FileView, Head, LinkId, LinkSetup, LinkView, RangeError, RequestId,
    ServerId, SourceId,
};
