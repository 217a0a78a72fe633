//! Text tables: aligned, with colours on a terminal only.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use braid_model::{ByteCount, Rate, printable};
use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Placeholder for an unknown value.
pub(crate) const UNKNOWN: &str = "-";

/// Output for text, with or without colours.
pub(crate) struct Page<'a> {
    out: &'a mut dyn Write,
    colour: bool,
}

/// Meaning of a colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Bad,
    Doubtful,
    Faint,
    Strong,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "32",
            Self::Bad => "31",
            Self::Doubtful => "33",
            Self::Faint => "2",
            Self::Strong => "1",
        }
    }
}

/// Whether standard output takes colours: it is a terminal that supports them, and NO_COLOR is not set.
pub(crate) fn colour_wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

impl<'a> Page<'a> {
    pub(crate) fn new(out: &'a mut dyn Write, colour: bool) -> Self {
        Self { out, colour }
    }

    /// Writes one line of text.
    pub(crate) fn line(&mut self, text: impl Display) -> io::Result<()> {
        writeln!(self.out, "{}", printable(&text.to_string()))
    }

    /// Writes one line in a tone.
    pub(crate) fn toned(&mut self, tone: Tone, text: &str) -> io::Result<()> {
        let text = self.paint(tone, &printable(text));
        writeln!(self.out, "{text}")
    }

    /// Writes a table with its head, or only `empty` if there are no rows.
    pub(crate) fn table(&mut self, columns: &[Column<'_>], rows: &[Vec<Cell>], empty: &str) -> io::Result<()> {
        if rows.is_empty() {
            return self.line(empty);
        }
        let width = |index: usize, column: &Column<'_>| {
            let cells = rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.text.chars().count());
            cells.max().unwrap_or(0).max(column.title.chars().count())
        };
        let widths: Vec<usize> = columns.iter().enumerate().map(|(index, column)| width(index, column)).collect();
        let head: Vec<Cell> = columns.iter().map(|column| Cell { text: column.title.to_owned(), tone: Tone::Strong }).collect();
        for row in std::iter::once(&head).chain(rows) {
            let mut line = String::new();
            for (index, (cell, column)) in row.iter().zip(columns).enumerate() {
                let gap = " ".repeat(widths[index] - cell.text.chars().count());
                let text = self.paint(cell.tone, &cell.text);
                let between = if index == 0 { "" } else { "  " };
                let (left, right) = if column.right { (gap.as_str(), "") } else { ("", gap.as_str()) };
                line.push_str(&format!("{between}{left}{text}{right}"));
            }
            writeln!(self.out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    fn paint(&self, tone: Tone, text: &str) -> String {
        match tone.code() {
            code if self.colour && !code.is_empty() && !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

/// A column: its title, and whether its cells are right-aligned, as for numbers.
pub(crate) struct Column<'a> {
    title: &'a str,
    right: bool,
}

/// A left-aligned column.
pub(crate) const fn words(title: &str) -> Column<'_> {
    Column { title, right: false }
}

/// A right-aligned column.
pub(crate) const fn numbers(title: &str) -> Column<'_> {
    Column { title, right: true }
}

/// A table cell.
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

/// A cell with a value, or the placeholder for an unknown one.
pub(crate) fn cell(text: Option<impl Display>) -> Cell {
    toned(text, Tone::Plain)
}

/// A cell in a tone.
pub(crate) fn toned(text: Option<impl Display>, tone: Tone) -> Cell {
    let text = text.map(|text| printable(&text.to_string())).filter(|text| !text.is_empty());
    Cell { tone: if text.is_some() { tone } else { Tone::Faint }, text: text.unwrap_or_else(|| UNKNOWN.to_owned()) }
}

pub(crate) fn rate(bps: Option<u64>) -> Option<Rate> {
    bps.map(Rate::from_bps)
}

pub(crate) fn bytes(count: Option<u64>) -> Option<ByteCount> {
    count.map(ByteCount::new)
}

pub(crate) fn percent(share: Option<f64>) -> Option<String> {
    share.map(|share| format!("{:.1} %", share * 100.0))
}

/// An amount of energy with a suitable unit.
pub(crate) fn joules(joules: Option<f64>) -> Option<String> {
    joules.map(|joules| match joules {
        ..0.9995 => format!("{:.0} mJ", joules * 1e3),
        ..999.5 => format!("{joules:.1} J"),
        _ => format!("{:.1} kJ", joules / 1e3),
    })
}

/// Microseconds as milliseconds or seconds.
pub(crate) fn micros(us: Option<u64>) -> Option<String> {
    us.map(|us| match us {
        0..10_000 => format!("{:.1} ms", us as f64 / 1e3),
        10_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    })
}

/// Time zone in which times are shown.
#[derive(Debug, Clone)]
pub(crate) struct Zone(TimeZone);

impl Zone {
    /// UTC, or the user's zone: `TZ`, else the system's, else UTC.
    pub(crate) fn of(utc: bool) -> Self {
        Self(if utc { TimeZone::UTC } else { TimeZone::system() })
    }

    /// A time (milliseconds of Unix time) as `2026-11-22 00:50:07`; `None` after the year 9999.
    pub(crate) fn moment(&self, at_ms: u64) -> Option<String> {
        let at = Timestamp::from_millisecond(i64::try_from(at_ms).ok()?).ok()?;
        Some(at.to_zoned(self.0.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string())
    }
}

/// An age in its two largest units.
pub(crate) fn age(ms: Option<u64>) -> Option<String> {
    let seconds = Duration::from_millis(ms?).as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    Some(match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min {} s", seconds % 60),
        3600..86_400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(colour: bool, rows: &[Vec<Cell>]) -> String {
        let mut out = Vec::new();
        Page::new(&mut out, colour).table(&[words("LINK"), numbers("RATE")], rows, "none").unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_are_aligned_and_unknown_values_are_a_dash() {
        let rows = [vec![cell(Some("wlan0")), cell(rate(Some(20_000_000)))], vec![cell(Some("ü")), cell(rate(None))]];
        assert_eq!(shown(false, &rows), "LINK          RATE\nwlan0  20.0 Mbit/s\nü                -\n");
        assert_eq!(shown(false, &[]), "none\n");
    }

    #[test]
    fn colours_do_not_disturb_the_alignment() {
        let rows = [vec![toned(Some("up"), Tone::Good), cell(Some(1))]];
        assert_eq!(shown(true, &rows), "\x1b[1mLINK\x1b[0m  \x1b[1mRATE\x1b[0m\n\x1b[32mup\x1b[0m       1\n");
    }

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        assert_eq!(cell(Some("a\x1b[2Jb\n")).text, "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(cell(Some("a\u{202e}b")).text, "a\u{fffd}b", "a direction override cannot reverse the text beside it");
    }

    #[test]
    fn times_follow_the_zone_and_its_summer_time() {
        let berlin = Zone(TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap());
        let [winter, summer] = [1_795_308_607_999, 1_784_894_400_000];
        assert_eq!(Zone::of(true).moment(winter).unwrap(), "2026-11-22 00:50:07");
        assert_eq!(berlin.moment(winter).unwrap(), "2026-11-22 01:50:07");
        assert_eq!(Zone::of(true).moment(summer).unwrap(), "2026-07-24 12:00:00");
        assert_eq!(berlin.moment(summer).unwrap(), "2026-07-24 14:00:00");
        assert_eq!([u64::MAX, 1 << 60].map(|at_ms| berlin.moment(at_ms)), [None, None]);
    }

    #[test]
    fn quantities_are_formatted_with_units() {
        assert_eq!(micros(Some(1_540)).as_deref(), Some("1.5 ms"));
        assert_eq!(micros(Some(80_400)).as_deref(), Some("80 ms"));
        assert_eq!(micros(Some(2_500_000)).as_deref(), Some("2.5 s"));
        assert_eq!(age(Some(59_999)).as_deref(), Some("59 s"));
        assert_eq!(age(Some(3_700_000)).as_deref(), Some("1 h 1 min"));
        assert_eq!(age(Some(90_000_000)).as_deref(), Some("1 d 1 h"));
        assert_eq!(percent(Some(0.0123)).as_deref(), Some("1.2 %"));
        assert_eq!(age(None), None);
        assert_eq!([0.0123, 4.56, 7890.0].map(|j| joules(Some(j)).unwrap()), ["12 mJ", "4.6 J", "7.9 kJ"]);
    }
}
