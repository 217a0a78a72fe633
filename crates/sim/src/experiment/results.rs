//! Results of an experiment, compared with the claims of the paper.

use std::fmt;

use serde::Serialize;

use braid_plot::Chart;

use super::stats::Summary;

/// All results of an experiment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Results {
    /// Figures.
    pub charts: Vec<Chart>,
    /// Tables.
    pub tables: Vec<Table>,
    /// One comparison for each claim of the paper.
    #[serde(rename = "verdicts")]
    pub comparisons: Vec<Comparison>,
    /// Further notes, one paragraph each.
    pub notes: Vec<String>,
}

impl Results {
    /// Adds a figure.
    pub fn chart(mut self, chart: Chart) -> Self {
        self.charts.push(chart);
        self
    }

    /// Adds a table.
    pub fn table(mut self, table: Table) -> Self {
        self.tables.push(table);
        self
    }

    /// Adds the comparison for the next claim.
    pub fn comparison(mut self, comparison: Comparison) -> Self {
        self.comparisons.push(comparison);
        self
    }

    /// Adds the comparisons for the next claims.
    pub fn comparisons(mut self, comparisons: impl IntoIterator<Item = Comparison>) -> Self {
        self.comparisons.extend(comparisons);
        self
    }

    /// Adds a note.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Describes the first place where a number is missing, if there is one.
    pub(super) fn gap(&self) -> Option<String> {
        let chart = self.charts.iter().find_map(|chart| {
            let series = chart.series.iter().find(|series| series.dots.is_empty() || series.dots.iter().any(|dot| !dot.is_finite()))?;
            Some(format!("chart {:?}, series {:?}", chart.title, series.name))
        });
        let row = || self.tables.iter().find(|table| table.rows.iter().any(|row| row.len() != table.columns.len()));
        let comparison = || self.comparisons.iter().find(|comparison| comparison.here.contains("NaN"));
        chart
            .or_else(|| Some(format!("table {:?}, a row whose length differs from the head", row()?.title)))
            .or_else(|| Some(format!("comparison {:?}", comparison()?.here)))
    }
}

/// A table of text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Table {
    /// Title above the table.
    pub title: String,
    /// Column heads.
    pub columns: Vec<String>,
    /// Rows, each as long as the head.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        Self { title: title.into(), columns: columns.iter().map(|&column| column.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(mut self, cells: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.rows.push(cells.into_iter().map(Into::into).collect());
        self
    }
}

/// A claim of a paper about its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// The claim in a sentence.
    pub text: &'static str,
    /// The numbers or words of the paper.
    pub paper: &'static str,
}

impl Claim {
    /// Compares the claim with the result of the simulation, and gives the reason.
    pub fn judge(self, here: impl Into<String>, judgement: Judgement, why: impl Into<String>) -> Comparison {
        Comparison { claim: self, here: here.into(), judgement, why: why.into() }
    }
}

/// A claim compared with the result of the simulation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The claim.
    #[serde(flatten)]
    pub claim: Claim,
    /// Result of the simulation.
    pub here: String,
    /// Judgement of the result.
    pub judgement: Judgement,
    /// Explanation of the difference, or of the result.
    pub why: String,
}

/// How a result compares with a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    /// The result is as claimed.
    Met,
    /// The effect has the same direction but another size.
    Differs,
    /// The result contradicts the claim: it has the opposite direction, shows no effect, or is outside the bound of the claim.
    NotMet,
    /// The result follows from a number that was put in, so the run does not test the claim.
    NotTested,
}

impl Judgement {
    /// All judgements, in the order of the page.
    pub const ALL: [Self; 4] = [Self::Met, Self::Differs, Self::NotMet, Self::NotTested];

    /// Judges a claim about an effect. `effect` is the measured effect with the sign that makes the claimed direction positive.
    ///
    /// [`NotMet`](Self::NotMet) if the confidence interval of the effect is not entirely above zero, whatever `met` is: an effect in the opposite
    /// direction, no effect, and no number are never [`Met`](Self::Met) or [`Differs`](Self::Differs). Otherwise [`Met`](Self::Met) if `met`, else
    /// [`Differs`](Self::Differs).
    pub fn met_or_differs(met: bool, effect: Summary) -> Self {
        match (effect.least() > 0.0, met) {
            (true, true) => Self::Met,
            (true, false) => Self::Differs,
            (false, _) => Self::NotMet,
        }
    }

    /// Judges a claim without a direction (a bound, an equality, an order): [`Met`](Self::Met) if `met`, else [`NotMet`](Self::NotMet).
    pub fn met_or_not(met: bool) -> Self {
        if met { Self::Met } else { Self::NotMet }
    }
}

impl Judgement {
    /// "2 met, 1 differs", for example; a single one without its number.
    pub fn counts(judgements: &[Self]) -> String {
        let count = |judgement: &Self| judgements.iter().filter(|one| *one == judgement).count();
        let some = Self::ALL.iter().map(|judgement| (judgement, count(judgement))).filter(|(_, count)| *count > 0);
        let texts =
            some.map(|(judgement, count)| if judgements.len() == 1 { judgement.to_string() } else { format!("{count} {judgement}") });
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Met => "met",
            Self::Differs => "differs",
            Self::NotMet => "not met",
            Self::NotTested => "not tested",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_an_effect_in_the_claimed_direction_differs(mean in -1e6..1e6_f64, half in 0.0..1e6_f64, met in any::<bool>()) {
            let effect = Summary { count: 15, mean, deviation: 0.0, half };
            let judged = Judgement::met_or_differs(met, effect);
            prop_assert_eq!(judged == Judgement::NotMet, mean - half <= 0.0);
            prop_assert_eq!(judged == Judgement::Met, met && mean - half > 0.0);
            // The opposite effect of the same size is never as claimed.
            if mean - half > 0.0 {
                prop_assert_eq!(Judgement::met_or_differs(met, effect.negated()), Judgement::NotMet);
            }
        }

        #[test]
        fn measured_runs_without_an_effect_never_differ(values in prop::collection::vec(0.1..10.0_f64, 1..20), met in any::<bool>()) {
            // Each run and its opposite: the mean is zero.
            let both: Vec<f64> = values.iter().flat_map(|value| [*value, -*value]).collect();
            prop_assert_eq!(Judgement::met_or_differs(met, Summary::of(&both)), Judgement::NotMet);
            let all_down: Vec<f64> = values.iter().map(|value| -value).collect();
            prop_assert_eq!(Judgement::met_or_differs(met, Summary::of(&all_down)), Judgement::NotMet);
        }
    }

    #[test]
    fn judgements_are_counted() {
        assert_eq!(Judgement::counts(&[Judgement::NotMet, Judgement::Met, Judgement::NotMet]), "1 met, 2 not met");
        assert_eq!(Judgement::counts(&[Judgement::Differs]), "differs");
    }

    #[test]
    fn no_number_is_no_effect() {
        assert_eq!(Judgement::met_or_differs(true, Summary::of(&[])), Judgement::NotMet);
        assert_eq!(Judgement::met_or_differs(true, Summary::exact(0.0)), Judgement::NotMet);
        assert_eq!(Judgement::met_or_differs(true, Summary::exact(0.1)), Judgement::Met);
    }
}
