//! `GET /v1/events`: what happens, as it happens.
//!
//! Once a second the daemon gives an [`Update`], with nothing in it that nobody listens to. What changed among the flows is found, and all of
//! it written as text, once, on a thread of its own, and the same bytes go to every listener. A listener that is too slow is let go: it
//! comes again and is told everything anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use braid_api::openapi::Needs;
use braid_api::{App, AppsSample, List, Note, Peer, Sample, Status, Versioned};
use braid_peer::quota::Quota;
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::{broadcast, mpsc};

use super::FlowList;
use crate::access::{ApiPermit, Origin};

/// The most listeners of those who may change something.
const CHANGERS: usize = 32;
/// The most of those who may only read, and of one user or address of them.
const READERS: usize = 48;
const OF_ONE_READER: usize = 12;
/// Seconds that a listener may lag behind; what is kept for it meanwhile is a few megabytes at most.
const LAG: usize = 8;
/// Updates that the API's thread may lag behind.
const UPDATES: usize = 4;

/// What happened in a second; `None`: nothing new.
#[derive(Debug, Default)]
pub struct Update {
    /// The daemon at a glance.
    pub status: Option<Status>,
    /// Every flow: what has changed since the last update is told.
    pub flows: Option<Arc<FlowList>>,
    /// Nobody has been told of any flow yet.
    pub anew: bool,
    /// Applications.
    pub apps: Option<Vec<App>>,
    /// Peers.
    pub peers: Option<Vec<Peer>>,
    /// Notes.
    pub notes: Vec<Note>,
    /// What links did.
    pub sample: Option<Sample>,
    /// What applications moved.
    pub app_sample: Option<AppsSample>,
}

/// What a listener is told first.
#[derive(Debug)]
pub struct First {
    /// The daemon at a glance.
    pub status: Status,
    /// Every flow, as listeners were told last.
    pub flows: Arc<FlowList>,
    /// Every application.
    pub apps: Vec<App>,
    /// Every peer.
    pub peers: Vec<Peer>,
    /// The last notes.
    pub notes: Vec<Note>,
    /// The id of the last.
    pub last_note: u64,
    /// What links did last.
    pub sample: Option<Sample>,
    /// What applications moved last.
    pub app_sample: Option<AppsSample>,
}

/// The daemon's end.
#[derive(Debug)]
pub struct Feed {
    updates: mpsc::Sender<Update>,
    listeners: Arc<AtomicUsize>,
}

impl Feed {
    /// Whether anybody listens.
    pub fn heard(&self) -> bool {
        self.listeners.load(Ordering::Relaxed) > 0
    }

    /// Tells the listeners. False if it was lost, so that everything has to be told anew.
    pub fn tell(&self, update: Update) -> bool {
        self.updates.try_send(update).is_ok()
    }
}

/// Turns updates into bytes for as long as the [`Feed`] lives.
#[derive(Debug)]
pub struct Spreader {
    updates: mpsc::Receiver<Update>,
    frames: broadcast::Sender<Frame>,
}

impl Spreader {
    /// Does so. When it ends, so do the listeners' streams.
    pub async fn run(mut self) {
        let mut told: Option<Arc<FlowList>> = None;
        while let Some(update) = self.updates.recv().await {
            let before = told.take().filter(|_| !update.anew);
            told = update.flows.clone().or_else(|| before.clone());
            let written = tokio::task::spawn_blocking(move || frame(&update, before.as_deref())).await;
            // Where it fails nobody listens any more.
            written.ok().flatten().map(|frame| self.frames.send(frame));
        }
    }
}

/// What the server needs to let listeners in.
#[derive(Debug, Clone)]
pub(super) struct Live {
    frames: broadcast::WeakSender<Frame>,
    listeners: Arc<AtomicUsize>,
    changers: Quota<Origin>,
    readers: Quota<Origin>,
}

/// The three ends of a stream of events.
pub(super) fn live() -> (Live, Feed, Spreader) {
    let (frames, _) = broadcast::channel(LAG);
    let (send, updates) = mpsc::channel(UPDATES);
    let listeners = Arc::new(AtomicUsize::new(0));
    let (changers, readers) = (Quota::new(CHANGERS, CHANGERS), Quota::new(READERS, OF_ONE_READER));
    let live = Live { frames: frames.downgrade(), listeners: listeners.clone(), changers, readers };
    (live, Feed { updates: send, listeners }, Spreader { updates, frames })
}

/// A second's messages, ready to be sent.
#[derive(Debug, Clone)]
struct Frame {
    /// Notes by their ids: those that a listener was told first are not told again.
    notes: Arc<[(u64, Bytes)]>,
    rest: Bytes,
}

impl Frame {
    /// What is sent to one who knows the notes up to `last`.
    fn after(self, last: u64) -> Bytes {
        let mut notes = self.notes.iter().filter(|(id, _)| *id > last).peekable();
        if notes.peek().is_none() {
            return self.rest;
        }
        let all: Vec<&[u8]> = notes.map(|(_, text)| &**text).chain([&*self.rest]).collect();
        all.concat().into()
    }
}

/// One who listens; counted until dropped.
pub(super) struct Listener {
    frames: broadcast::Receiver<Frame>,
    listeners: Arc<AtomicUsize>,
    _permit: ApiPermit,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.listeners.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Live {
    /// Lets one more in that may do so much; `None` where there are too many of its kind, or the daemon is ending.
    pub(super) fn listen(&self, origin: Origin, may: Needs) -> Option<Listener> {
        let quota = if may == Needs::Changing { &self.changers } else { &self.readers };
        let permit = quota.try_take(origin)?;
        let frames = self.frames.upgrade()?.subscribe();
        self.listeners.fetch_add(1, Ordering::Relaxed);
        Some(Listener { frames, listeners: self.listeners.clone(), _permit: permit })
    }
}

impl Listener {
    /// The response: what is told first, and then what happens.
    pub(super) fn stream(self, Opening { text, last_note }: Opening) -> Response {
        let events = stream::unfold((self, Some(text)), move |(mut listener, opening)| async move {
            if let Some(opening) = opening {
                return Some((Ok::<_, std::convert::Infallible>(opening), (listener, None)));
            }
            loop {
                // One that lags, or a daemon that ends, ends the stream.
                let text = listener.frames.recv().await.ok()?.after(last_note);
                if !text.is_empty() {
                    return Some((Ok(text), (listener, None)));
                }
            }
        });
        let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
        (head, Body::from_stream(events)).into_response()
    }
}

/// The first messages of a stream.
pub(super) struct Opening {
    text: Bytes,
    last_note: u64,
}

impl First {
    /// As text. Takes its time where there are thousands of flows.
    pub(super) fn opening(&self) -> Opening {
        let mut text = Vec::new();
        message(&mut text, "status", None, &Versioned::of(&self.status));
        // Written as FlowChanges, without a copy of all flows.
        #[derive(Serialize)]
        struct Full<'a> {
            full: bool,
            put: &'a FlowList,
            gone: [u64; 0],
        }
        message(&mut text, "flows", None, &Full { full: true, put: &self.flows, gone: [] });
        message(&mut text, "apps", None, &Versioned::of(List::<App, _>::of(&self.apps)));
        message(&mut text, "peers", None, &Versioned::of(List::<Peer, _>::of(&self.peers)));
        self.notes.iter().for_each(|note| message(&mut text, "note", Some(note.id), note));
        if let Some(sample) = &self.sample {
            message(&mut text, "sample", None, sample);
        }
        if let Some(sample) = &self.app_sample {
            message(&mut text, "app_sample", None, sample);
        }
        Opening { text: text.into(), last_note: self.last_note }
    }
}

/// A second in words; `before` are the flows that listeners know.
fn frame(update: &Update, before: Option<&FlowList>) -> Option<Frame> {
    let mut text = Vec::new();
    if let Some(status) = &update.status {
        message(&mut text, "status", None, &Versioned::of(status));
    }
    let changes = update.flows.as_ref().map(|flows| flows.changes(before));
    if let Some(flows) = changes.filter(|flows| flows.full || !flows.put.is_empty() || !flows.gone.is_empty()) {
        message(&mut text, "flows", None, &flows);
    }
    if let Some(apps) = &update.apps {
        message(&mut text, "apps", None, &Versioned::of(List::<App, _>::of(apps)));
    }
    if let Some(peers) = &update.peers {
        message(&mut text, "peers", None, &Versioned::of(List::<Peer, _>::of(peers)));
    }
    if let Some(sample) = &update.sample {
        message(&mut text, "sample", None, sample);
    }
    if let Some(sample) = &update.app_sample {
        message(&mut text, "app_sample", None, sample);
    }
    let note = |note: &Note| {
        let mut text = Vec::new();
        message(&mut text, "note", Some(note.id), note);
        (note.id, text.into())
    };
    let notes: Arc<[(u64, Bytes)]> = update.notes.iter().map(note).collect();
    (!text.is_empty() || !notes.is_empty()).then(|| Frame { notes, rest: text.into() })
}

/// One message. JSON has no line breaks outside of texts, and none inside.
fn message(text: &mut Vec<u8>, event: &str, id: Option<u64>, data: &impl Serialize) {
    text.extend_from_slice(format!("event: {event}\n").as_bytes());
    if let Some(id) = id {
        text.extend_from_slice(format!("id: {id}\n").as_bytes());
    }
    text.extend_from_slice(b"data: ");
    // Numbers and texts can always be written, and memory takes them.
    let _ = serde_json::to_writer(&mut *text, data);
    text.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    fn first(last_note: u64) -> Opening {
        let status = serde_json::json!({"schema_version": 1, "version": "v", "scheduler": "only-one", "links": [], "flows": 0});
        let status = serde_json::from_value(status).unwrap();
        let (flows, notes) = (Arc::default(), vec![note(last_note)]);
        First { status, flows, apps: vec![], peers: vec![], notes, last_note, sample: None, app_sample: None }.opening()
    }

    fn note(id: u64) -> Note {
        Note { id, at_ms: id, kind: "link".into(), level: "info".into(), text: "a\nb\r\n<script>".into() }
    }

    fn listen(live: &Live) -> Option<Listener> {
        live.listen(Origin::User(0), Needs::Changing)
    }

    #[test]
    fn those_who_may_only_read_leave_streams_to_each_other_and_to_those_who_may_change() {
        let (live, _feed, _spreader) = live();
        let reads = |user: u32| live.listen(Origin::User(user), Needs::Reading);
        let first: Vec<_> = std::iter::from_fn(|| reads(1000)).collect();
        assert_eq!(first.len(), OF_ONE_READER);
        let others: Vec<_> = (1001..1100).filter_map(reads).collect();
        assert_eq!(others.len(), READERS - OF_ONE_READER);
        assert!(listen(&live).is_some());
        drop(first);
        assert!(reads(2000).is_some());
    }

    async fn next(body: &mut Body) -> Option<String> {
        let frame = body.frame().await?.unwrap().into_data().unwrap();
        Some(String::from_utf8(frame.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn all_listeners_are_told_the_same_and_no_note_twice() {
        let (live, feed, spreader) = live();
        assert!(!feed.heard());
        let spread = tokio::spawn(spreader.run());
        let (one, two) = (listen(&live).unwrap(), listen(&live).unwrap());
        assert!(feed.heard());
        let mut bodies = [one.stream(first(7)).into_body(), two.stream(first(8)).into_body()];
        for body in &mut bodies {
            let opening = next(body).await.unwrap();
            assert!(opening.starts_with("event: status\ndata: {") && opening.contains("event: flows\ndata: {\"full\":true,"), "{opening}");
            assert!(opening.contains("\nid: ") && opening.split("\n\n").count() == 6, "{opening}");
        }
        assert!(feed.tell(Update { notes: vec![note(7), note(8), note(9)], sample: Some(Sample::default()), ..Update::default() }));
        let mut told = [String::new(), String::new()];
        for (body, told) in bodies.iter_mut().zip(&mut told) {
            while !told.contains("event: sample") {
                told.push_str(&next(body).await.unwrap());
            }
        }
        let ids = |told: &str| told.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect::<Vec<u64>>();
        assert_eq!(told.map(|told| ids(&told)), [vec![8, 9], vec![9]]);
        // More notes at once than a listener may lag behind.
        assert!(feed.tell(Update { notes: (100..300).map(note).collect(), ..Update::default() }));
        for body in &mut bodies {
            assert_eq!(ids(&next(body).await.unwrap()).len(), 200);
        }
        drop(feed);
        spread.await.unwrap();
        for mut body in bodies {
            assert_eq!(next(&mut body).await, None, "the stream ends with the daemon");
        }
        assert!(listen(&live).is_none());
    }

    #[tokio::test]
    async fn listeners_are_bounded_and_slow_ones_let_go() {
        let (live, feed, spreader) = live();
        let spread = tokio::spawn(spreader.run());
        let mut slow = listen(&live).unwrap().stream(first(0)).into_body();
        let listeners: Vec<_> = (1..CHANGERS).map(|_| listen(&live).unwrap()).collect();
        assert!(listen(&live).is_none());
        drop(listeners);
        assert!(listen(&live).is_some());
        for n in 1..=(LAG as u64 + 2) {
            while !feed.tell(Update { notes: vec![note(n)], ..Update::default() }) {
                tokio::task::yield_now().await;
            }
        }
        drop(feed);
        spread.await.unwrap();
        next(&mut slow).await.unwrap();
        assert_eq!(next(&mut slow).await, None);
    }

    #[test]
    fn a_second_in_which_nothing_happened_is_nothing() {
        let nothing = Update { flows: Some(Arc::default()), ..Update::default() };
        assert!(frame(&nothing, Some(&FlowList::default())).is_none());
        assert!(frame(&nothing, None).is_some(), "those who know nothing yet are told that there is none");
    }
}
