//! Which byte range of which file is asked for next, over which connection of which link: HTTP ranges over all links at once.
//!
//! Source: Yap, *Using all networks around us* (2013), sections 4.4.2 and 4.4.3: a transfer is divided into range requests, the link of
//! each request is chosen, requests are kept ahead so that every link always has one, and miDRR regulates several transfers.
//!
//! The [`Engine`] does no I/O and reads no clock: it is told what happened and when, and asked what to do.
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
//! After every event [`Engine::poll`] is to be called until it has nothing more: what it says may concern what comes next.
//!
//! # Words
//!
//! A *connection* goes over one link to one server; it has one request at a time, or two where the protocol lets requests overlap. A
//! *source* is one of a file's servers (mirrors). A byte is *fresh* once: whoever brings it first.
//!
//! # How ranges are chosen
//!
//! - **Size**: what a connection brings in a third of the time that the file still takes over all links together, between 0.3 and 4 seconds: large
//!   while much is left, so that requests cost little, and ever smaller towards the end, so that all links finish together. Where several
//!   files have bytes to ask for, always the least: what is asked for already cannot be shared out anew when links change. Short, too, where a
//!   reader wants a file in order, and then so that a link's requests end in turns.
//! - **File**: miDRR with the files' weights and links (Π), for every further request that a link may have.
//! - **How many at once**: three requests a link at first, and one more for each 40 ms of its round trip, up to three; more for as long as that
//!   brings more, as on links with loss.
//! - **Slower links**: a request that would go on long after all else is there is cut to what it brings until then; the rest is free.
//! - **End game**: a connection with nothing left to ask for takes over the rear part of the range that would end last, so that both end at
//!   the same time; where that part is too small to be worth it, all that is left of the range is asked for a second time.
//! - **Stalls**: a request that brings nothing for a while gives its range back; a link all of whose requests stall gets nothing new until it
//!   brings something again.

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
