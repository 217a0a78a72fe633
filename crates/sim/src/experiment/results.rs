//! What came out of an experiment, and what the paper says about it.

use std::fmt;

use serde::Serialize;

use braid_plot::Chart;

/// All that is shown of an experiment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Results {
    /// Figures.
    pub charts: Vec<Chart>,
    /// Tables.
    pub tables: Vec<Table>,
    /// One for each of the paper's claims.
    #[serde(rename = "verdicts")]
    pub comparisons: Vec<Comparison>,
    /// What else is to be said, a paragraph each.
    pub notes: Vec<String>,
}

impl Results {
    /// With a figure.
    pub fn chart(mut self, chart: Chart) -> Self {
        self.charts.push(chart);
        self
    }

    /// With a table.
    pub fn table(mut self, table: Table) -> Self {
        self.tables.push(table);
        self
    }

    /// With a comparison on the next claim.
    pub fn comparison(mut self, comparison: Comparison) -> Self {
        self.comparisons.push(comparison);
        self
    }

    /// With comparisons on the next claims.
    pub fn comparisons(mut self, comparisons: impl IntoIterator<Item = Comparison>) -> Self {
        self.comparisons.extend(comparisons);
        self
    }

    /// With a paragraph.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Where a number is missing, if one is.
    pub(super) fn gap(&self) -> Option<String> {
        let chart = self.charts.iter().find_map(|chart| {
            let series = chart.series.iter().find(|series| series.dots.is_empty() || series.dots.iter().any(|dot| !dot.is_finite()))?;
            Some(format!("chart {:?}, series {:?}", chart.title, series.name))
        });
        let row = || self.tables.iter().find(|table| table.rows.iter().any(|row| row.len() != table.columns.len()));
        let comparison = || self.comparisons.iter().find(|comparison| comparison.here.contains("NaN"));
        chart
            .or_else(|| Some(format!("table {:?}, a row of another length than its head", row()?.title)))
            .or_else(|| Some(format!("comparison {:?}", comparison()?.here)))
    }
}

/// A table of text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Table {
    /// What stands above it.
    pub title: String,
    /// Its head.
    pub columns: Vec<String>,
    /// Its rows, each as long as the head.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows yet.
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        Self { title: title.into(), columns: columns.iter().map(|&column| column.to_owned()).collect(), rows: Vec::new() }
    }

    /// With one more row.
    pub fn row(mut self, cells: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.rows.push(cells.into_iter().map(Into::into).collect());
        self
    }
}

/// What a paper says came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// The claim in a sentence.
    pub text: &'static str,
    /// The paper's numbers or words.
    pub paper: &'static str,
}

impl Claim {
    /// What came out here, how it compares, and why.
    pub fn judge(self, here: impl Into<String>, judgement: Judgement, why: impl Into<String>) -> Comparison {
        Comparison { claim: self, here: here.into(), judgement, why: why.into() }
    }
}

/// A claim set beside what came out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The claim.
    #[serde(flatten)]
    pub claim: Claim,
    /// What came out here.
    pub here: String,
    /// How it compares.
    pub judgement: Judgement,
    /// Where it differs and why, or why it had to be so.
    pub why: String,
}

/// How what came out compares with a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    /// It is as claimed.
    Met,
    /// It points the same way, in another size.
    Differs,
    /// It is not so.
    NotMet,
}

impl Judgement {
    /// `met` if so, else `differs`.
    pub fn met_or_differs(met: bool) -> Self {
        if met { Self::Met } else { Self::Differs }
    }

    /// `met` if so, else `not met`.
    pub fn met_or_not(met: bool) -> Self {
        if met { Self::Met } else { Self::NotMet }
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Met => "met",
            Self::Differs => "differs",
            Self::NotMet => "not met",
        })
    }
}
