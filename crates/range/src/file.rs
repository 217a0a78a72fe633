//! State of a file: present, requested and free bytes.

use braid_decide::midrr::FlowKey;
use braid_model::Time;

use crate::spans::{Span, Spans};
use crate::types::{Cause, FileSetup, RequestId, ServerId, SourceId};

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) setup: FileSetup,
    pub(crate) flow: FlowKey,
    pub(crate) size: Option<u64>,
    pub(crate) got: Spans,
    /// Bytes that are neither present nor covered by an active request.
    pub(crate) free: Spans,
    /// Whether the file is fetched in ranges, once known.
    pub(crate) ranged: Option<bool>,
    /// Whether ranges can be joined, by validators.
    pub(crate) joinable: bool,
    /// Position up to which the reader has taken the file.
    pub(crate) taken: u64,
    pub(crate) good: Vec<bool>,
    /// By source: consecutive connections that failed.
    pub(crate) faults: Vec<u32>,
    pub(crate) active: bool,
    /// When the last byte arrived, or when the transfer started.
    pub(crate) progress: Time,
    pub(crate) failures: u32,
    /// Number of restarts of a file that comes in one piece.
    pub(crate) restarts: u32,
    pub(crate) ended: Option<Result<(), Cause>>,
    /// State of the answer with which the file was adopted ([`crate::Engine::adopt`]).
    pub(crate) adopted: Option<Adopted>,
}

/// State of an adopted file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopted {
    /// No other answer has shown yet that matching ranges are available. The first answer continues alone.
    Unproven(RequestId),
    /// The first answer delivers everything: no ranges are available or, if `may_retry`, the server accepts no further request now.
    Whole { first: RequestId, may_retry: bool },
    /// Ranges are available; the file is handled like any other.
    Proven,
}

impl File {
    pub(crate) fn new(now: Time, setup: FileSetup, flow: FlowKey) -> Self {
        let size = setup.size.map(|size| size.get());
        let mut file = Self {
            flow,
            size,
            got: Spans::default(),
            free: Spans::default(),
            ranged: size.map(|_| true),
            joinable: size.is_some(),
            taken: 0,
            good: vec![true; setup.sources.len()],
            faults: vec![0; setup.sources.len()],
            active: false,
            progress: now,
            failures: 0,
            restarts: 0,
            ended: None,
            adopted: None,
            setup,
        };
        if let Some(size) = size {
            file.got = file.setup.got.within(Span::raw(0, size)).into_iter().collect();
            file.free = file.got.without(Span::raw(0, size)).into_iter().collect();
        }
        file
    }

    pub(crate) fn done(&self) -> bool {
        self.size.is_some_and(|size| self.got.count().get() >= size)
    }

    /// Whether the file was adopted and no other answer has shown yet that ranges are available.
    pub(crate) fn unproven(&self) -> bool {
        matches!(self.adopted, Some(Adopted::Unproven(_)))
    }

    /// Whether the first answer of an adopted file delivers everything.
    pub(crate) fn kept_whole(&self) -> bool {
        matches!(self.adopted, Some(Adopted::Whole { .. }))
    }

    /// Position before which bytes may be requested now.
    pub(crate) fn limit(&self) -> u64 {
        let size = self.size.unwrap_or(u64::MAX);
        self.setup.window.map_or(size, |window| size.min(self.taken.saturating_add(window.get())))
    }

    /// Number of bytes that may be requested now.
    pub(crate) fn open(&self) -> u64 {
        self.free.below(self.limit())
    }

    pub(crate) fn sources(&self) -> impl Iterator<Item = (SourceId, ServerId)> + '_ {
        self.setup.sources.iter().enumerate().filter(|(at, _)| self.good[*at]).map(|(at, server)| (SourceId(at), *server))
    }

    pub(crate) fn source_at(&self, server: ServerId) -> Option<SourceId> {
        self.sources().find(|(_, at)| *at == server).map(|(source, _)| source)
    }

    /// Sets the size, if unknown so far.
    pub(crate) fn learn_size(&mut self, size: u64) {
        if self.size.is_none() {
            self.size = Some(size);
            self.free = self.got.without(Span::raw(0, size)).into_iter().collect();
        }
    }
}
