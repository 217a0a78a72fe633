//! Goodput of links over time in several runs: one row per run, with the links stacked.

use std::fmt::Write as _;

use braid_model::Rate;

use super::svg::{self, colour, escape, nice, number};

const WIDTH: f64 = 900.0;
const ROW: f64 = 190.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 66.0;
const BOTTOM: f64 = 46.0;
/// Space between rows, for the title of a row.
const GAP: f64 = 46.0;

/// One run: goodput of every link over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Title above the row.
    pub title: String,
    /// Per link: (time in seconds, rate) at the end of each interval.
    pub links: Vec<Vec<(f64, Rate)>>,
    /// Events: time in seconds, and text.
    pub events: Vec<(f64, String)>,
}

/// Draws the runs below each other on the same scale, with the links stacked.
pub fn stacked(title: &str, names: &[String], runs: &[Run]) -> String {
    let span = runs.iter().flat_map(|run| &run.links).flatten().map(|(at, _)| *at).fold(1.0, f64::max);
    let most = runs.iter().map(peak).fold(1.0, f64::max);
    let (x_step, y_step) = (nice(span / 10.0), nice(most / 4.0));
    let most = (most / y_step).ceil() * y_step;
    let height = TOP + runs.len() as f64 * (ROW + GAP) + BOTTOM - GAP + 12.0;
    let x = |seconds: f64| LEFT + seconds / span * (WIDTH - LEFT - RIGHT);

    let mut svg = svg::begin(title, WIDTH, height);
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"22\" font-size=\"16\" font-weight=\"bold\">{}</text>", escape(title));
    legend(&mut svg, names);
    for (number, run) in runs.iter().enumerate() {
        let top = TOP + 12.0 + number as f64 * (ROW + GAP);
        let y = |mbps: f64| top + ROW - mbps / most * ROW;
        grid(&mut svg, (span, x_step), (most, y_step), top, &x, &y);
        areas(&mut svg, run, &x, &y);
        let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{}</text>", top - 7.0, escape(&run.title));
        for (at, what) in &run.events {
            let at = x(*at);
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top:.1}\" y2=\"{:.1}\" stroke=\"#b00020\" stroke-dasharray=\"4 3\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#b00020\">{}</text>",
                top + ROW,
                at + 4.0,
                top + 13.0,
                escape(what)
            );
        }
    }
    let _ =
        writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">time (s)</text>", (LEFT + WIDTH - RIGHT) / 2.0, height - 8.0);
    let middle = TOP + (height - TOP - BOTTOM) / 2.0;
    let _ = writeln!(svg, "<text transform=\"translate(18 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">received (Mbit/s)</text>");
    svg + "</svg>\n"
}

/// The highest sum over all links at one time, in Mbit/s.
fn peak(run: &Run) -> f64 {
    let length = run.links.iter().map(Vec::len).max().unwrap_or(0);
    (0..length).map(|i| run.links.iter().filter_map(|link| link.get(i)).map(|(_, rate)| mbps(*rate)).sum()).fold(0.0, f64::max)
}

fn mbps(rate: Rate) -> f64 {
    rate.bps() as f64 / 1e6
}

fn legend(svg: &mut String, names: &[String]) {
    let mut at = LEFT;
    for (index, name) in names.iter().enumerate() {
        let colour = colour(index);
        let _ = writeln!(svg, "<rect x=\"{at:.1}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"44\">{}</text>", at + 17.0, escape(name));
        at += 42.0 + 7.0 * name.chars().count() as f64;
    }
}

fn grid(
    svg: &mut String,
    (span, x_step): (f64, f64),
    (most, y_step): (f64, f64),
    top: f64,
    x: &impl Fn(f64) -> f64,
    y: &impl Fn(f64) -> f64,
) {
    let (right, bottom) = (WIDTH - RIGHT, top + ROW);
    for step in 0..=(most / y_step).round() as u32 {
        let (value, at) = (f64::from(step) * y_step, y(f64::from(step) * y_step));
        let _ = writeln!(svg, "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>");
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", LEFT - 6.0, at + 4.0, number(value, y_step));
    }
    for step in 0..=(span / x_step + 1e-9).floor() as u32 {
        let (value, at) = (f64::from(step) * x_step, x(f64::from(step) * x_step));
        let _ = writeln!(svg, "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom:.1}\" y2=\"{:.1}\" stroke=\"#222222\"/>", bottom + 4.0);
        let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>", bottom + 17.0, number(value, x_step));
    }
    let _ = writeln!(svg, "<path d=\"M{LEFT} {top:.1}V{bottom:.1}H{right}\" fill=\"none\" stroke=\"#222222\"/>");
}

/// Draws each link's area on top of the previous ones, in steps: a rate holds for its measurement interval.
fn areas(svg: &mut String, run: &Run, x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) {
    let length = run.links.iter().map(Vec::len).min().unwrap_or(0);
    let mut floor = vec![0.0; length];
    for (index, link) in run.links.iter().enumerate() {
        let colour = colour(index);
        let ceiling: Vec<f64> = floor.iter().zip(link).map(|(below, (_, rate))| below + mbps(*rate)).collect();
        let begin = |i: usize| if i == 0 { 0.0 } else { link[i - 1].0 };
        let mut path = String::from("M");
        for (i, top) in ceiling.iter().enumerate() {
            let _ = write!(path, "{:.1} {:.1} {:.1} {:.1} ", x(begin(i)), y(*top), x(link[i].0), y(*top));
        }
        for (i, below) in floor.iter().enumerate().rev() {
            let _ = write!(path, "{:.1} {:.1} {:.1} {:.1} ", x(link[i].0), y(*below), x(begin(i)), y(*below));
        }
        if length > 0 {
            let _ = writeln!(svg, "<path d=\"{}Z\" fill=\"{colour}\" fill-opacity=\"0.85\"/>", path);
        }
        floor = ceiling;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_names_its_links_runs_events_and_units() {
        let run = Run {
            title: "a < b".to_owned(),
            links: vec![vec![(0.1, Rate::from_mbps(3)), (0.2, Rate::from_mbps(4))], vec![(0.1, Rate::ZERO), (0.2, Rate::from_mbps(1))]],
            events: vec![(0.15, "lte0 cut".to_owned())],
        };
        assert_eq!(peak(&run), 5.0);
        let svg =
            stacked("Title", &["wlan0".to_owned(), "lte0".to_owned()], &[run, Run { title: String::new(), links: vec![], events: vec![] }]);
        for wanted in ["Title", "a &lt; b", "wlan0", "lte0 cut", "time (s)", "Mbit/s", "</svg>"] {
            assert!(svg.contains(wanted), "{wanted}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
