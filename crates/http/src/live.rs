//! `GET /v1/events`: events as they happen.
//!
//! Once a second the daemon sends an [`Update`]; it sends none without listeners. A blocking thread computes the flow changes and serializes
//! the update once, and every listener gets the same bytes. A listener that is too slow is disconnected; it reconnects and receives the
//! full state again.

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

/// Maximum number of listeners with full access.
const MAX_FULL_ACCESS: usize = 32;
/// Maximum number of read-only listeners, and of one user or address among them.
const MAX_READERS: usize = 48;
const MAX_PER_READER: usize = 12;
/// Seconds that a listener may lag behind; the buffered frames take a few megabytes at most.
const MAX_LAG: usize = 8;
/// Number of updates that the API's thread may lag behind.
const UPDATE_QUEUE: usize = 4;

/// Events of one second; `None`: nothing new.
#[derive(Debug, Default)]
pub struct Update {
    /// Status of the daemon.
    pub status: Option<Status>,
    /// Every flow; listeners receive the changes since the last update.
    pub flows: Option<Arc<FlowList>>,
    /// No flows were sent before, so all of them are new.
    pub anew: bool,
    /// Every application.
    pub apps: Option<Vec<App>>,
    /// Every peer.
    pub peers: Option<Vec<Peer>>,
    /// New notes.
    pub notes: Vec<Note>,
    /// Activity of links.
    pub sample: Option<Sample>,
    /// Bytes that applications moved.
    pub app_sample: Option<AppsSample>,
}

/// Initial state for a new listener.
#[derive(Debug)]
pub struct InitialState {
    /// Status of the daemon.
    pub status: Status,
    /// Every flow, as last sent to listeners.
    pub flows: Arc<FlowList>,
    /// Every application.
    pub apps: Vec<App>,
    /// Every peer.
    pub peers: Vec<Peer>,
    /// The last notes.
    pub notes: Vec<Note>,
    /// Id of the last note.
    pub last_note: u64,
    /// Last activity of links.
    pub sample: Option<Sample>,
    /// Last bytes that applications moved.
    pub app_sample: Option<AppsSample>,
}

/// The daemon's end of the event stream.
#[derive(Debug)]
pub struct Feed {
    updates: mpsc::Sender<Update>,
    listeners: Arc<AtomicUsize>,
}

impl Feed {
    /// Whether there is any listener.
    pub fn has_listeners(&self) -> bool {
        self.listeners.load(Ordering::Relaxed) > 0
    }

    /// Sends an update to the listeners. `false` if it was lost, so that everything must be sent again.
    pub fn send(&self, update: Update) -> bool {
        self.updates.try_send(update).is_ok()
    }
}

/// Serializes updates as long as the [`Feed`] lives.
#[derive(Debug)]
pub struct EventBroadcaster {
    updates: mpsc::Receiver<Update>,
    frames: broadcast::Sender<Frame>,
}

impl EventBroadcaster {
    /// Runs until the [`Feed`] is dropped, which also ends the listeners' streams.
    pub async fn run(mut self) {
        let mut last_flows: Option<Arc<FlowList>> = None;
        while let Some(update) = self.updates.recv().await {
            let before = last_flows.take().filter(|_| !update.anew);
            last_flows = update.flows.clone().or_else(|| before.clone());
            let written = tokio::task::spawn_blocking(move || frame(&update, before.as_deref())).await;
            // An error here means that there are no listeners any more.
            written.ok().flatten().map(|frame| self.frames.send(frame));
        }
    }
}

/// State that the server needs to accept listeners.
#[derive(Debug, Clone)]
pub(super) struct Live {
    frames: broadcast::WeakSender<Frame>,
    listeners: Arc<AtomicUsize>,
    full_access: Quota<Origin>,
    readers: Quota<Origin>,
}

/// Creates the three ends of an event stream.
pub(super) fn live() -> (Live, Feed, EventBroadcaster) {
    let (frames, _) = broadcast::channel(MAX_LAG);
    let (send, updates) = mpsc::channel(UPDATE_QUEUE);
    let listeners = Arc::new(AtomicUsize::new(0));
    let (full_access, readers) = (Quota::new(MAX_FULL_ACCESS, MAX_FULL_ACCESS), Quota::new(MAX_READERS, MAX_PER_READER));
    let live = Live { frames: frames.downgrade(), listeners: listeners.clone(), full_access, readers };
    (live, Feed { updates: send, listeners }, EventBroadcaster { updates, frames })
}

/// The serialized messages of one second.
#[derive(Debug, Clone)]
struct Frame {
    /// Notes by id; a listener skips those that it received at the start.
    notes: Arc<[(u64, Bytes)]>,
    rest: Bytes,
}

impl Frame {
    /// The bytes for a listener that has the notes up to `last`.
    fn after(self, last: u64) -> Bytes {
        let mut notes = self.notes.iter().filter(|(id, _)| *id > last).peekable();
        if notes.peek().is_none() {
            return self.rest;
        }
        let all: Vec<&[u8]> = notes.map(|(_, text)| &**text).chain([&*self.rest]).collect();
        all.concat().into()
    }
}

/// A listener; counted until it is dropped.
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
    /// Accepts a listener with this access right; `None` if the limit is reached or the daemon is ending.
    pub(super) fn listen(&self, origin: Origin, may: Needs) -> Option<Listener> {
        let quota = if may == Needs::Changing { &self.full_access } else { &self.readers };
        let permit = quota.try_take(origin)?;
        let frames = self.frames.upgrade()?.subscribe();
        self.listeners.fetch_add(1, Ordering::Relaxed);
        Some(Listener { frames, listeners: self.listeners.clone(), _permit: permit })
    }
}

impl Listener {
    /// The response: the initial state, followed by events.
    pub(super) fn stream(self, Opening { text, last_note }: Opening) -> Response {
        let events = stream::unfold((self, Some(text)), move |(mut listener, opening)| async move {
            if let Some(opening) = opening {
                return Some((Ok::<_, std::convert::Infallible>(opening), (listener, None)));
            }
            loop {
                // The stream ends if the listener lags too far behind or the daemon ends.
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

impl InitialState {
    /// Serializes the initial state. Slow with thousands of flows.
    pub(super) fn opening(&self) -> Opening {
        let mut text = Vec::new();
        message(&mut text, "status", None, &Versioned::of(&self.status));
        // Serialized like FlowChanges, without a copy of all flows.
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

/// Serializes the events of one second; `before` are the flows that listeners have.
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

/// Appends one message. JSON has no line breaks outside of strings, and escapes them inside.
fn message(text: &mut Vec<u8>, event: &str, id: Option<u64>, data: &impl Serialize) {
    text.extend_from_slice(format!("event: {event}\n").as_bytes());
    if let Some(id) = id {
        text.extend_from_slice(format!("id: {id}\n").as_bytes());
    }
    text.extend_from_slice(b"data: ");
    // Serialization of these types cannot fail.
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
        InitialState { status, flows, apps: vec![], peers: vec![], notes, last_note, sample: None, app_sample: None }.opening()
    }

    fn note(id: u64) -> Note {
        Note { id, at_ms: id, kind: "link".into(), level: "info".into(), text: "a\nb\r\n<script>".into() }
    }

    fn listen(live: &Live) -> Option<Listener> {
        live.listen(Origin::User(0), Needs::Changing)
    }

    #[test]
    fn read_only_listeners_are_limited_per_user_and_in_total_and_do_not_exclude_others() {
        let (live, _feed, _spreader) = live();
        let reads = |user: u32| live.listen(Origin::User(user), Needs::Reading);
        let first: Vec<_> = std::iter::from_fn(|| reads(1000)).collect();
        assert_eq!(first.len(), MAX_PER_READER);
        let others: Vec<_> = (1001..1100).filter_map(reads).collect();
        assert_eq!(others.len(), MAX_READERS - MAX_PER_READER);
        assert!(listen(&live).is_some());
        drop(first);
        assert!(reads(2000).is_some());
    }

    async fn next(body: &mut Body) -> Option<String> {
        let frame = body.frame().await?.unwrap().into_data().unwrap();
        Some(String::from_utf8(frame.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn all_listeners_receive_the_same_events_and_no_note_twice() {
        let (live, feed, spreader) = live();
        assert!(!feed.has_listeners());
        let spread = tokio::spawn(spreader.run());
        let (one, two) = (listen(&live).unwrap(), listen(&live).unwrap());
        assert!(feed.has_listeners());
        let mut bodies = [one.stream(first(7)).into_body(), two.stream(first(8)).into_body()];
        for body in &mut bodies {
            let opening = next(body).await.unwrap();
            assert!(opening.starts_with("event: status\ndata: {") && opening.contains("event: flows\ndata: {\"full\":true,"), "{opening}");
            assert!(opening.contains("\nid: ") && opening.split("\n\n").count() == 6, "{opening}");
        }
        assert!(feed.send(Update { notes: vec![note(7), note(8), note(9)], sample: Some(Sample::default()), ..Update::default() }));
        let mut told = [String::new(), String::new()];
        for (body, told) in bodies.iter_mut().zip(&mut told) {
            while !told.contains("event: sample") {
                told.push_str(&next(body).await.unwrap());
            }
        }
        let ids = |told: &str| told.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect::<Vec<u64>>();
        assert_eq!(told.map(|told| ids(&told)), [vec![8, 9], vec![9]]);
        // More notes at once than the number of frames that a listener may lag behind.
        assert!(feed.send(Update { notes: (100..300).map(note).collect(), ..Update::default() }));
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
    async fn listeners_are_limited_and_slow_ones_are_disconnected() {
        let (live, feed, spreader) = live();
        let spread = tokio::spawn(spreader.run());
        let mut slow = listen(&live).unwrap().stream(first(0)).into_body();
        let listeners: Vec<_> = (1..MAX_FULL_ACCESS).map(|_| listen(&live).unwrap()).collect();
        assert!(listen(&live).is_none());
        drop(listeners);
        assert!(listen(&live).is_some());
        for n in 1..=(MAX_LAG as u64 + 2) {
            while !feed.send(Update { notes: vec![note(n)], ..Update::default() }) {
                tokio::task::yield_now().await;
            }
        }
        drop(feed);
        spread.await.unwrap();
        next(&mut slow).await.unwrap();
        assert_eq!(next(&mut slow).await, None);
    }

    #[test]
    fn a_second_without_events_yields_no_frame() {
        let nothing = Update { flows: Some(Arc::default()), ..Update::default() };
        assert!(frame(&nothing, Some(&FlowList::default())).is_none());
        assert!(frame(&nothing, None).is_some(), "new listeners learn that there are no flows");
    }
}
