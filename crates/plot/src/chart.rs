//! Data model of charts.

use serde::Serialize;

/// A figure: series over a common x axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Chart {
    /// Suffix of the experiment's name in file names; empty if it has a single figure.
    pub name: String,
    /// Title above the figure.
    pub title: String,
    /// The x axis.
    pub x: Axis,
    /// The y axis.
    pub y: Axis,
    /// How series are drawn.
    pub shape: Shape,
    /// The series.
    pub series: Vec<Series>,
    /// Marked events: position on the x axis, and text.
    pub marks: Vec<(f64, String)>,
}

/// How series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Lines between points with markers, and whiskers for confidence intervals.
    Lines,
    /// Steps: a value holds until the next x, for rates over time and distributions.
    Steps,
    /// Grouped bars at each named position of the x axis.
    Bars,
}

impl Chart {
    /// Creates a chart of lines with whiskers.
    pub fn lines(name: &str, title: &str, x: Axis, y: Axis) -> Self {
        Self { name: name.to_owned(), title: title.to_owned(), x, y, shape: Shape::Lines, series: Vec::new(), marks: Vec::new() }
    }

    /// Creates a chart of steps.
    pub fn steps(name: &str, title: &str, x: Axis, y: Axis) -> Self {
        Self { shape: Shape::Steps, ..Self::lines(name, title, x, y) }
    }

    /// Creates a bar chart. The x values 0, 1, 2, ... stand for `places`.
    pub fn bars(name: &str, title: &str, places: &[&str], y: Axis) -> Self {
        let x = Axis { names: places.iter().map(|&place| place.to_owned()).collect(), ..Axis::new("", "") };
        Self { shape: Shape::Bars, ..Self::lines(name, title, x, y) }
    }

    /// Adds these series.
    pub fn with(mut self, series: Vec<Series>) -> Self {
        self.series.extend(series);
        self
    }

    /// Adds a series of exact values.
    pub fn curve(mut self, name: impl Into<String>, curve: &[(f64, f64)]) -> Self {
        let dots = curve.iter().map(|&(x, y)| Dot { x, y, half: 0.0 }).collect();
        self.series.push(Series { name: name.into(), dots });
        self
    }

    /// Adds a mark at `x`.
    pub fn mark(mut self, x: f64, text: impl Into<String>) -> Self {
        self.marks.push((x, text.into()));
        self
    }
}

/// An axis. By default it starts at zero and ends at a round number.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Axis {
    /// Label: the quantity.
    pub label: String,
    /// Unit; empty for none.
    pub unit: String,
    /// Start. Default: 0, or a round number below the smallest value.
    pub from: Option<f64>,
    /// End. Default: above the largest value.
    pub to: Option<f64>,
    /// Names of the positions 0, 1, 2, ..., shown instead of numbers.
    pub names: Vec<String>,
}

impl Axis {
    /// Creates an axis from zero.
    pub fn new(label: &str, unit: &str) -> Self {
        Self { label: label.to_owned(), unit: unit.to_owned(), from: None, to: None, names: Vec::new() }
    }

    /// Sets start and end.
    pub fn between(self, from: f64, to: f64) -> Self {
        Self { from: Some(from), to: Some(to), ..self }
    }

    /// The label with its unit.
    pub(crate) fn text(&self) -> String {
        if self.unit.is_empty() { self.label.clone() } else { format!("{} ({})", self.label, self.unit) }
    }
}

/// One line, or the bars of one colour.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points, in ascending order of x.
    pub dots: Vec<Dot>,
}

/// A point, with half the height of its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Dot {
    /// Position on the x axis.
    pub x: f64,
    /// Value on the y axis.
    pub y: f64,
    /// Half the height of the 95 % confidence interval; zero for none.
    pub half: f64,
}

impl Dot {
    /// Whether all numbers are finite, so that the point can be drawn.
    pub fn is_finite(&self) -> bool {
        self.x.is_finite() && self.y.is_finite() && self.half.is_finite()
    }
}
