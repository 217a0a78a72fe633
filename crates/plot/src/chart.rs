//! Charts as data.

use serde::Serialize;

/// A figure: series over one x axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Chart {
    /// Added to the experiment's name where it has several figures; a file name's part.
    pub name: String,
    /// What stands above it.
    pub title: String,
    /// The x axis.
    pub x: Axis,
    /// The y axis.
    pub y: Axis,
    /// How series are drawn.
    pub shape: Shape,
    /// What is drawn.
    pub series: Vec<Series>,
    /// What happened where on the x axis.
    pub marks: Vec<(f64, String)>,
}

/// How series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Lines between marked points, with whiskers for confidence intervals.
    Lines,
    /// Steps: a value holds until the next x, as a rate over time or a distribution does.
    Steps,
    /// Bars beside each other at each place of an axis with names.
    Bars,
}

impl Chart {
    /// Lines with whiskers.
    pub fn lines(name: &str, title: &str, x: Axis, y: Axis) -> Self {
        Self { name: name.to_owned(), title: title.to_owned(), x, y, shape: Shape::Lines, series: Vec::new(), marks: Vec::new() }
    }

    /// Steps.
    pub fn steps(name: &str, title: &str, x: Axis, y: Axis) -> Self {
        Self { shape: Shape::Steps, ..Self::lines(name, title, x, y) }
    }

    /// Bars at 0, 1, 2, ... on the x axis, which stand for `places`.
    pub fn bars(name: &str, title: &str, places: &[&str], y: Axis) -> Self {
        let x = Axis { names: places.iter().map(|&place| place.to_owned()).collect(), ..Axis::new("", "") };
        Self { shape: Shape::Bars, ..Self::lines(name, title, x, y) }
    }

    /// With these series too.
    pub fn with(mut self, series: Vec<Series>) -> Self {
        self.series.extend(series);
        self
    }

    /// With one more series of exact values.
    pub fn curve(mut self, name: impl Into<String>, curve: &[(f64, f64)]) -> Self {
        let dots = curve.iter().map(|&(x, y)| Dot { x, y, half: 0.0 }).collect();
        self.series.push(Series { name: name.into(), dots });
        self
    }

    /// With a mark at `x`.
    pub fn mark(mut self, x: f64, text: impl Into<String>) -> Self {
        self.marks.push((x, text.into()));
        self
    }
}

/// An axis. It starts at zero unless told otherwise, and ends at a round number.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Axis {
    /// What is laid off on it.
    pub label: String,
    /// In which unit; empty for none.
    pub unit: String,
    /// Where it begins; left out: at 0, or below what is least.
    pub from: Option<f64>,
    /// Where it ends; left out: above what is most.
    pub to: Option<f64>,
    /// What stands at 0, 1, 2, ... instead of numbers.
    pub names: Vec<String>,
}

impl Axis {
    /// An axis from zero.
    pub fn new(label: &str, unit: &str) -> Self {
        Self { label: label.to_owned(), unit: unit.to_owned(), from: None, to: None, names: Vec::new() }
    }

    /// From here to there.
    pub fn between(self, from: f64, to: f64) -> Self {
        Self { from: Some(from), to: Some(to), ..self }
    }

    /// The label with its unit.
    pub(crate) fn text(&self) -> String {
        if self.unit.is_empty() { self.label.clone() } else { format!("{} ({})", self.label, self.unit) }
    }
}

/// A line, or a colour of bars.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, by growing x.
    pub dots: Vec<Dot>,
}

/// A point, with half its confidence interval's height.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Dot {
    /// Place.
    pub x: f64,
    /// Value.
    pub y: f64,
    /// Half the height of the 95 % confidence interval; zero for none.
    pub half: f64,
}

impl Dot {
    /// Whether it can be drawn.
    pub fn is_finite(&self) -> bool {
        self.x.is_finite() && self.y.is_finite() && self.half.is_finite()
    }
}
