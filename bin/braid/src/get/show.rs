//! Output of `braid get`: progress bars on a terminal, lines elsewhere, or JSON.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use braid_fetch::{DownloadLink, Event, FetchError, Outcome, Progress};
use braid_model::{ByteCount, Rate, printable};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Interval of progress lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Output of a run.
pub(super) struct Show {
    quiet: bool,
    json: bool,
    /// The file itself is written to standard output.
    occupied: bool,
    bars: Option<Bars>,
    last_line: Instant,
    /// Host from which the first answer is pending; `None` once an answer arrived.
    awaited: Option<String>,
}

struct Bars {
    all: MultiProgress,
    links: Vec<ProgressBar>,
    total: ProgressBar,
}

impl Show {
    pub(super) fn new(quiet: bool, json: bool, occupied: bool) -> Self {
        Self { quiet, json, occupied, bars: None, last_line: Instant::now(), awaited: None }
    }

    /// Sets the links, and the hosts that are asked first.
    pub(super) fn begin(&mut self, links: &[DownloadLink], hosts: &[String]) {
        self.awaited = hosts.first().map(|host| match hosts.len() {
            1 => printable(host),
            more => format!("{} and {} more", printable(host), more - 1),
        });
        if self.quiet || self.json || !io::stderr().is_terminal() {
            return;
        }
        let all = MultiProgress::new();
        let style =
            |template: &str| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ");
        let bar = |name: String| all.add(ProgressBar::new(0).with_style(style("{prefix:12} [{wide_bar}] {msg}")).with_prefix(name));
        let links = links.iter().map(|link| bar(printable(&link.name))).collect();
        let total = bar("all".to_owned());
        self.bars = Some(Bars { all, links, total });
    }

    pub(super) fn event(&mut self, event: Event) {
        if self.json {
            // The event contains text from servers: escape control characters.
            if let Ok(json) = serde_json::to_string(&event) {
                let _ = writeln!(io::stdout(), "{}", crate::escaped(&json));
            }
            return;
        }
        match event {
            Event::Started { file, size, there, ranged } => {
                self.awaited = None;
                let size = size.map_or("of unknown size".to_owned(), |size| size.to_string());
                let there = if there == ByteCount::ZERO { String::new() } else { format!(", {there} already present") };
                let way = if ranged { "" } else { ", over one link" };
                self.line(&format!("{file}: {size}{there}{way}"));
            }
            Event::Note { text } => self.note(&text),
            Event::Progress(progress) => self.progress(&progress),
            Event::Finished(outcome) => self.line(&finished(&outcome)),
            Event::Failed { file, error, .. } => self.error(&format!("{file}: {error}")),
        }
    }

    /// Shows a note to the user.
    pub(super) fn note(&self, text: &str) {
        if self.json {
            let note = serde_json::json!({ "event": "note", "text": text });
            let _ = writeln!(io::stdout(), "{}", crate::escaped(&note.to_string()));
        } else {
            self.line(text);
        }
    }

    /// Reports an error that ended the run before any download.
    pub(super) fn trouble(&self, error: &FetchError) {
        if self.json && !self.occupied {
            let event = serde_json::json!({ "event": "failed", "file": null, "error": error.to_string(), "code": error.exit_code() });
            let _ = writeln!(io::stdout(), "{}", crate::escaped(&event.to_string()));
        }
        self.error(&error.to_string());
    }

    fn progress(&mut self, progress: &Progress) {
        let Some(bars) = &self.bars else {
            if !self.quiet && self.last_line.elapsed() >= LINE_INTERVAL {
                self.last_line = Instant::now();
                self.line(&line(progress, self.awaited.as_deref()));
            }
            return;
        };
        let size = progress.size.map_or(0, ByteCount::get);
        for (bar, link) in bars.links.iter().zip(&progress.links) {
            bar.set_length(size.max(1));
            bar.set_position(link.moved.get().min(size));
            bar.set_message(format!("{:>9} {:>11}", link.moved.to_string(), link.rate_bps.to_string()));
        }
        bars.total.set_length(size.max(1));
        bars.total.set_position(progress.got.get());
        bars.total.set_message(match &self.awaited {
            Some(host) => format!("connecting to {host}"),
            None => format!("{:>9} {:>11} {}", progress.got.to_string(), progress.rate_bps.to_string(), left(progress)),
        });
        if progress.files.0 == progress.files.1 {
            bars.links.iter().chain([&bars.total]).for_each(ProgressBar::finish_and_clear);
        }
    }

    fn line(&self, text: &str) {
        if !self.quiet {
            self.error(text);
        }
    }

    fn error(&self, text: &str) {
        let text = format!("braid: {}", crate::printable_lines(text));
        match &self.bars {
            Some(bars) => bars.all.suspend(|| eprintln!("{text}")),
            // Standard error may be closed; the error is then lost.
            None => drop(writeln!(io::stderr(), "{text}")),
        }
    }
}

/// Progress as one line; `awaited` is the host whose first answer is pending.
fn line(progress: &Progress, awaited: Option<&str>) -> String {
    if let Some(host) = awaited {
        let links = progress.links.iter().map(|link| link.name.as_str()).collect::<Vec<_>>().join(", ");
        return format!("connecting to {host} over {links} for {:.0} s", progress.seconds);
    }
    let of = progress.size.map_or(String::new(), |size| format!(" of {size}"));
    let links = progress.links.iter().map(|link| format!("{} {}", link.name, link.rate_bps)).collect::<Vec<_>>().join(", ");
    let files = if progress.files.1 > 1 { format!(", {} of {} files", progress.files.0, progress.files.1) } else { String::new() };
    format!("{}{of}{files}, {} ({links}){}", progress.got, progress.rate_bps, left(progress))
}

/// Estimate of the remaining time.
fn left(progress: &Progress) -> String {
    let Some(size) = progress.size.filter(|_| progress.rate_bps > Rate::ZERO) else { return String::new() };
    let seconds = progress.rate_bps.time_for(size.saturating_sub(progress.got)).as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!(" {seconds} s left"),
        (0, minutes, seconds) => format!(" {minutes}:{seconds:02} left"),
        (hours, minutes, seconds) => format!(" {hours}:{minutes:02}:{seconds:02} left"),
    }
}

fn finished(outcome: &Outcome) -> String {
    let rate = outcome.size.per(Duration::from_secs_f64(outcome.seconds.max(0.001)));
    let links: Vec<String> =
        outcome.links.iter().filter(|(_, bytes)| **bytes > ByteCount::ZERO).map(|(name, bytes)| format!("{name} {bytes}")).collect();
    let links = if links.is_empty() { String::new() } else { format!(" ({})", links.join(", ")) };
    format!("{}: {} in {:.1} s, {rate}{links}", outcome.file, outcome.size, outcome.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_is_shown() {
        let progress = |got: u64, size: Option<u64>| Progress {
            seconds: 1.0,
            got: ByteCount::new(got),
            size: size.map(ByteCount::new),
            rate_bps: Rate::from_mbps(8),
            files: (0, 1),
            links: Vec::new(),
        };
        assert_eq!(left(&progress(0, Some(10_000_000))), " 10 s left");
        assert_eq!(left(&progress(0, Some(3_700_000_000))), " 1:01:40 left");
        assert_eq!(left(&progress(5, None)), "");
        assert!(line(&progress(1_000_000, Some(2_000_000)), None).starts_with("1.0 MB of 2.0 MB, 8.0 Mbit/s"));
        assert!(line(&progress(0, None), Some("example.org")).starts_with("connecting to example.org over "));
    }
}
