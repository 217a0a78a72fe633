//! A file: what is there, what is asked for, what is left.

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
    /// Neither there nor asked for by a request that is at work.
    pub(crate) free: Spans,
    /// It comes in ranges.
    pub(crate) ranged: Option<bool>,
    /// Validators hold.
    pub(crate) joinable: bool,
    /// What the reader took, from the start.
    pub(crate) taken: u64,
    pub(crate) good: Vec<bool>,
    /// By source: connections in a row that could not be had.
    pub(crate) faults: Vec<u32>,
    pub(crate) active: bool,
    /// When a byte came last, or it was begun.
    pub(crate) progress: Time,
    pub(crate) failures: u32,
    /// How often it was begun anew, since it comes in one piece.
    pub(crate) restarts: u32,
    pub(crate) ended: Option<Result<(), Cause>>,
    /// The answer that it came with ([`crate::Engine::adopt`]).
    pub(crate) adopted: Option<Adopted>,
}

/// A file that came with an answer of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopted {
    /// No other answer has shown yet that there are ranges that fit; this one goes on alone.
    Doubt(RequestId),
    /// All comes by this one: there are none, or, where `hope`, the server accepts no further request now.
    Whole { first: RequestId, hope: bool },
    /// There are; it is a file like any other.
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

    /// Whether it came with an answer, and no other has shown yet that there are ranges.
    pub(crate) fn doubt(&self) -> bool {
        matches!(self.adopted, Some(Adopted::Doubt(_)))
    }

    /// Whether all of it comes by the answer it came with.
    pub(crate) fn kept_whole(&self) -> bool {
        matches!(self.adopted, Some(Adopted::Whole { .. }))
    }

    /// The place before which may be asked now.
    pub(crate) fn limit(&self) -> u64 {
        let size = self.size.unwrap_or(u64::MAX);
        self.setup.window.map_or(size, |window| size.min(self.taken.saturating_add(window.get())))
    }

    /// Bytes that may be asked for now.
    pub(crate) fn open(&self) -> u64 {
        self.free.below(self.limit())
    }

    pub(crate) fn sources(&self) -> impl Iterator<Item = (SourceId, ServerId)> + '_ {
        self.setup.sources.iter().enumerate().filter(|(at, _)| self.good[*at]).map(|(at, server)| (SourceId(at), *server))
    }

    pub(crate) fn source_at(&self, server: ServerId) -> Option<SourceId> {
        self.sources().find(|(_, at)| *at == server).map(|(source, _)| source)
    }

    /// The size is known now.
    pub(crate) fn learn_size(&mut self, size: u64) {
        if self.size.is_none() {
            self.size = Some(size);
            self.free = self.got.without(Span::raw(0, size)).into_iter().collect();
        }
    }
}
