//! The programs that serve this API: the daemon and a network's controller. Each has its own page, and its own words for what users can do.

/// A program that serves the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Site {
    /// The daemon.
    Daemon,
    /// A network's controller.
    Controller,
    /// A network's slicer, which has no page.
    Slicer,
}

impl Site {
    /// File of the page at `/`.
    pub(super) fn page(self) -> &'static str {
        match self {
            Self::Daemon => "index.html",
            Self::Controller | Self::Slicer => "network.html",
        }
    }

    /// Name of the cookie of sessions. A browser sends a machine's cookies to every port, so the pages of one machine need cookies of their own.
    pub(super) fn cookie(self) -> &'static str {
        match self {
            Self::Daemon => "braid-session",
            Self::Controller | Self::Slicer => "braid-net-session",
        }
    }

    /// Command that opens the page.
    pub(super) fn command(self) -> &'static str {
        match self {
            Self::Daemon => "braid ui",
            Self::Controller => "braid net ui",
            Self::Slicer => "braid net slice list",
        }
    }

    /// Error: there is no page.
    pub(super) fn no_page(self) -> &'static str {
        match self {
            Self::Daemon => {
                "the daemon serves no page: start it with `braid up --ui` (as a service: BRAID_OPTIONS=\"--ui\" in /etc/default/braid)"
            }
            Self::Controller => {
                "the controller serves no page: start it with `braid net controller --ui` (as a service: BRAID_NET_OPTIONS=\"--ui\" in \
                 /etc/default/braid-net-controller)"
            }
            Self::Slicer => "the slicer serves no page: `braid net slice list` shows the slices",
        }
    }

    /// Error: the program ends.
    pub(super) fn ending(self) -> &'static str {
        match self {
            Self::Daemon => "the daemon is ending: start it again with `braid up`",
            Self::Controller => "the controller is ending: start it again with `braid net controller`",
            Self::Slicer => "the slicer is ending: start it again with `braid net slicer`",
        }
    }

    /// Error: the program does not answer in time.
    pub(super) fn silent(self) -> &'static str {
        match self {
            Self::Daemon => "the daemon does not answer: see its log, and restart it if this persists (traffic continues without it)",
            Self::Controller => "the controller does not answer: see its log, and restart it if this persists (flows continue without it)",
            Self::Slicer => "the slicer does not answer: see its log, and restart it if this persists (flows continue without it)",
        }
    }
}
