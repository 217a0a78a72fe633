//! Rendering of charts as SVG: 640 by 400, readable without colour.

use std::fmt::Write as _;

use super::chart::{Axis, Chart, Dot, Series, Shape};
use super::svg::{self, colour, escape, nice, number};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 18.0;
const BOTTOM: f64 = 46.0;
/// Mean width of a character at font size 12.
const CHARACTER: f64 = 7.0;
/// Maximum characters per line of a title.
const TITLE: usize = 62;
/// Dash patterns, so that lines are distinguishable without colour.
const DASHES: [&str; 4] = ["", "7 3", "2 3", "9 3 2 3"];
/// Maximum number of bars with value labels; more have no room.
const LABELLED_BARS: usize = 18;

impl Chart {
    /// The figure as an SVG document.
    pub fn svg(&self) -> String {
        draw(self)
    }
}

fn draw(chart: &Chart) -> String {
    let (title, legend) = (wrap(&chart.title, TITLE), layout(&chart.series));
    let rows = legend.last().map_or(0.0, |(_, row)| row + 1.0);
    let legend_top = 16.0 + 18.0 * title.len() as f64;
    let area = Area::new(chart, legend_top + 18.0 * rows + 8.0);

    let mut svg = svg::begin(&chart.title, WIDTH, HEIGHT);
    for (line, text) in title.iter().enumerate() {
        let y = 22.0 + 18.0 * line as f64;
        let _ = writeln!(svg, "<text x=\"14\" y=\"{y}\" font-size=\"14\" font-weight=\"bold\">{}</text>", escape(text));
    }
    for (index, (series, (x, row))) in chart.series.iter().zip(&legend).enumerate() {
        let y = legend_top + 10.0 + 18.0 * row;
        sample(&mut svg, chart.shape, index, *x, y);
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 30.0, y + 4.0, escape(&series.name));
    }
    area.axes(&mut svg, chart);
    let _ = writeln!(
        svg,
        "<clipPath id=\"area\"><rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"/></clipPath>",
        area.top - 5.0,
        WIDTH - LEFT - RIGHT + 5.0,
        area.bottom - area.top + 5.0
    );
    for (number, (x, text)) in chart.marks.iter().enumerate() {
        area.mark(&mut svg, *x, text, number);
    }
    let _ = writeln!(svg, "<g clip-path=\"url(#area)\">");
    for (index, series) in chart.series.iter().enumerate() {
        match chart.shape {
            Shape::Lines => area.line(&mut svg, index, series),
            Shape::Steps => area.steps(&mut svg, index, series),
            Shape::Bars => area.bars(&mut svg, index, series, chart),
        }
    }
    svg + "</g>\n</svg>\n"
}

/// Position of each series in the legend: x and row.
fn layout(series: &[Series]) -> Vec<(f64, f64)> {
    let (mut x, mut row) = (14.0, 0.0);
    let mut places = Vec::new();
    for series in series {
        let width = 48.0 + CHARACTER * series.name.chars().count() as f64;
        if x > 14.0 && x + width > WIDTH {
            (x, row) = (14.0, row + 1.0);
        }
        places.push((x, row));
        x += width;
    }
    places
}

fn dash(index: usize) -> String {
    match DASHES[index % DASHES.len()] {
        "" => String::new(),
        dash => format!(" stroke-dasharray=\"{dash}\""),
    }
}

/// Draws the legend sample of a series.
fn sample(svg: &mut String, shape: Shape, index: usize, x: f64, y: f64) {
    let colour = colour(index);
    if shape == Shape::Bars {
        let _ = writeln!(svg, "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>", x + 12.0, y - 6.0);
        return;
    }
    let _ = writeln!(
        svg,
        "<line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" stroke-width=\"2\"{}/>",
        x + 24.0,
        dash(index)
    );
    if shape == Shape::Lines {
        marker(svg, index, x + 12.0, y);
    }
}

/// Draws the marker of a point. Each series has its own shape.
fn marker(svg: &mut String, index: usize, x: f64, y: f64) {
    let path = match index % 5 {
        0 => format!("M{:.1} {y:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", x - 4.0),
        1 => format!("M{:.1} {:.1}h7v7h-7Z", x - 3.5, y - 3.5),
        2 => format!("M{x:.1} {:.1}l4.5 8h-9Z", y - 5.0),
        3 => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5Z", y - 5.0),
        _ => format!("M{x:.1} {:.1}l4.5 -8h-9Z", y + 5.0),
    };
    let _ = writeln!(svg, "<path d=\"{path}\" fill=\"{}\"/>", colour(index));
}

/// The plot area within the axes.
struct Area {
    top: f64,
    bottom: f64,
    x: Scale,
    y: Scale,
}

/// Range of an axis, and the distance of its ticks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Scale {
    from: f64,
    to: f64,
    step: f64,
}

impl Scale {
    /// With `tight` the axis ends at the largest value.
    fn new(axis: &Axis, values: impl Iterator<Item = f64> + Clone, ticks: f64, tight: bool) -> Self {
        if !axis.names.is_empty() {
            return Self { from: -0.5, to: axis.names.len() as f64 - 0.5, step: 1.0 };
        }
        let least = axis.from.unwrap_or_else(|| values.clone().fold(0.0, f64::min));
        let most = axis.to.unwrap_or_else(|| values.fold(f64::MIN, f64::max));
        let most = if most > least { most } else { least + 1.0 };
        let step = nice((most - least) / ticks);
        let from = if axis.from.is_some() { least } else { (least / step + 1e-9).floor() * step };
        let to = if tight || axis.to.is_some() { most } else { (most / step - 1e-9).ceil() * step };
        Self { from, to, step }
    }

    fn share(self, value: f64) -> f64 {
        (value - self.from) / (self.to - self.from)
    }

    fn ticks(self) -> impl Iterator<Item = f64> {
        let first = (self.from / self.step - 1e-9).ceil();
        let count = ((self.to / self.step + 1e-9).floor() - first).clamp(0.0, 100.0) as u32;
        (0..=count).map(move |tick| (first + f64::from(tick)) * self.step)
    }
}

impl Area {
    fn new(chart: &Chart, top: f64) -> Self {
        let dots = || chart.series.iter().flat_map(|series| &series.dots).filter(|dot| dot.is_finite());
        let x = Scale::new(&chart.x, dots().map(|dot| dot.x), 8.0, true);
        // Leave room for the values above the bars.
        let room = if chart.shape == Shape::Bars { 1.06 } else { 1.0 };
        let y = Scale::new(&chart.y, dots().flat_map(|dot| [dot.y - dot.half.min(dot.y.max(0.0)), (dot.y + dot.half) * room]), 5.0, false);
        let names = if chart.x.names.is_empty() { 0 } else { chart.x.names.iter().map(|name| name.lines().count()).max().unwrap_or(1) - 1 };
        Self { top, bottom: HEIGHT - BOTTOM - 14.0 * names as f64 + if chart.x.text().is_empty() { 16.0 } else { 0.0 }, x, y }
    }

    fn x(&self, value: f64) -> f64 {
        // Clamp values far outside, since renderers have limited coordinates.
        (LEFT + self.x.share(value) * (WIDTH - LEFT - RIGHT)).clamp(-WIDTH, 2.0 * WIDTH)
    }

    fn y(&self, value: f64) -> f64 {
        (self.bottom - self.y.share(value) * (self.bottom - self.top)).clamp(-HEIGHT, 2.0 * HEIGHT)
    }

    fn axes(&self, svg: &mut String, chart: &Chart) {
        let (top, bottom, right) = (self.top, self.bottom, WIDTH - RIGHT);
        for value in self.y.ticks() {
            let y = self.y(value);
            let _ = writeln!(svg, "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>");
            let text = number(value, self.y.step);
            let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>", LEFT - 6.0, y + 4.0);
        }
        for (index, value) in self.x.ticks().enumerate() {
            let x = self.x(value);
            let text = match chart.x.names.as_slice() {
                [] => number(value, self.x.step),
                names => names.get(index).cloned().unwrap_or_default(),
            };
            let _ = writeln!(svg, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom:.1}\" y2=\"{:.1}\" stroke=\"#222222\"/>", bottom + 4.0);
            for (line, text) in text.lines().enumerate() {
                let y = bottom + 17.0 + 14.0 * line as f64;
                let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>", escape(text));
            }
        }
        let _ = writeln!(svg, "<path d=\"M{LEFT} {top:.1}V{bottom:.1}H{right}\" fill=\"none\" stroke=\"#222222\"/>");
        let (across, middle) = ((LEFT + right) / 2.0, (top + bottom) / 2.0);
        let (x, y) = (escape(&chart.x.text()), escape(&chart.y.text()));
        let _ = writeln!(svg, "<text x=\"{across:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x}</text>", HEIGHT - 8.0);
        let _ = writeln!(svg, "<text transform=\"translate(17 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{y}</text>");
    }

    /// Draws a dashed line, with its text on the side that has room. Each further mark is lower, so that texts do not overlap.
    fn mark(&self, svg: &mut String, x: f64, text: &str, number: usize) {
        let x = self.x(x);
        let (anchor, at) = if x + CHARACTER * text.chars().count() as f64 > WIDTH - RIGHT { ("end", x - 4.0) } else { ("start", x + 4.0) };
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#b00020\" stroke-dasharray=\"4 3\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"#b00020\">{}</text>",
            self.top,
            self.bottom,
            self.top + 11.0 + 14.0 * (number % 4) as f64,
            escape(text)
        );
    }

    fn line(&self, svg: &mut String, index: usize, series: &Series) {
        let dots = || series.dots.iter().filter(|dot| dot.is_finite());
        let points: Vec<String> = dots().map(|dot| format!("{:.1} {:.1}", self.x(dot.x), self.y(dot.y))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>",
            points.join(" "),
            colour(index),
            dash(index)
        );
        for dot in dots() {
            let x = self.x(dot.x);
            self.whisker(svg, x, dot, colour(index));
            marker(svg, index, x, self.y(dot.y));
        }
    }

    fn steps(&self, svg: &mut String, index: usize, series: &Series) {
        let mut path = String::new();
        for dot in series.dots.iter().filter(|dot| dot.is_finite()) {
            let (x, y) = (self.x(dot.x), self.y(dot.y));
            let _ = if path.is_empty() { write!(path, "M{x:.1} {y:.1}") } else { write!(path, "H{x:.1}V{y:.1}") };
        }
        let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>", colour(index), dash(index));
    }

    fn bars(&self, svg: &mut String, index: usize, series: &Series, chart: &Chart) {
        let place = self.x(1.0) - self.x(0.0);
        let width = place * 0.76 / chart.series.len() as f64;
        let labelled = chart.series.len() * chart.x.names.len() <= LABELLED_BARS;
        for dot in series.dots.iter().filter(|dot| dot.is_finite()) {
            let left = self.x(dot.x) - place * 0.38 + width * index as f64;
            let (low, high) = (self.y(dot.y.min(0.0)), self.y(dot.y.max(0.0)));
            let _ = writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{high:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
                width - 2.0,
                low - high,
                colour(index)
            );
            let middle = left + width / 2.0 - 1.0;
            self.whisker(svg, middle, dot, "#222222");
            if labelled {
                let (y, text) = (self.y(dot.y + dot.half) - 4.0, number(dot.y, self.y.step / 10.0));
                let _ = writeln!(svg, "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" font-size=\"11\">{text}</text>");
            }
        }
    }

    fn whisker(&self, svg: &mut String, x: f64, dot: &Dot, colour: &str) {
        let (low, high) = (self.y(dot.y - dot.half), self.y(dot.y + dot.half));
        // A whisker smaller than the marker would be invisible.
        if low - high > 1.0 {
            let (left, right) = (x - 4.0, x + 4.0);
            let path = format!("M{left:.1} {high:.1}H{right:.1}M{x:.1} {high:.1}V{low:.1}M{left:.1} {low:.1}H{right:.1}");
            let _ = writeln!(svg, "<path d=\"{path}\" stroke=\"{colour}\" fill=\"none\"/>");
        }
    }
}

/// Breaks a text between words into lines of at most `most` characters, unless a single word is longer.
fn wrap(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        Chart::lines("", "Rate & load", Axis::new("load", "flows/s"), Axis::new("goodput", "Mbit/s")).with(vec![Series {
            name: "a < b".to_owned(),
            dots: vec![Dot { x: 1.0, y: 2.0, half: 0.5 }, Dot { x: 3.0, y: 4.0, half: 0.0 }],
        }])
    }

    #[test]
    fn a_drawing_contains_all_texts_escaped() {
        let svg = chart().mark(2.0, "cut").svg();
        for wanted in ["Rate &amp; load", "a &lt; b", "load (flows/s)", "goodput (Mbit/s)", ">cut<", "</svg>"] {
            assert!(svg.contains(wanted), "{wanted}");
        }
        assert_eq!(svg.matches("stroke=\"#0072b2\" fill=\"none\"").count(), 1, "one of the points has a whisker");
    }

    #[test]
    fn non_finite_values_are_omitted() {
        let mut chart = chart();
        chart.series[0].dots[1].y = f64::NAN;
        for shape in [Shape::Lines, Shape::Steps, Shape::Bars] {
            let svg = Chart { shape, ..chart.clone() }.svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        let empty = Chart { series: vec![], ..chart };
        assert!(!empty.svg().contains("NaN"));
    }

    #[test]
    fn legends_and_titles_are_broken_into_lines() {
        let series = |name: &str| Series { name: name.to_owned(), dots: vec![] };
        let places = layout(&[series(&"x".repeat(60)), series("y"), series(&"z".repeat(60))]);
        assert_eq!(places.iter().map(|(_, row)| *row).collect::<Vec<_>>(), [0.0, 0.0, 1.0]);
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
    }

    #[test]
    fn axes_end_at_round_numbers_by_default() {
        let axis = Axis::new("", "");
        assert_eq!(Scale::new(&axis, [1.0, 9.3].into_iter(), 5.0, false), Scale { from: 0.0, to: 10.0, step: 2.0 });
        assert_eq!(Scale::new(&axis, [-3.0, 9.3].into_iter(), 5.0, true), Scale { from: -5.0, to: 9.3, step: 5.0 });
        assert_eq!(Scale::new(&axis.between(1.0, 2.0), [].into_iter(), 5.0, false).ticks().count(), 6);
    }
}
