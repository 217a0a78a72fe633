//! Report of one experiment, and the Markdown page of all experiments.

use std::fmt::Write as _;

use serde::Serialize;

use super::results::{Results, Table};
use super::{About, Judgement, Paper, Sampling, Setting};

/// An experiment with its results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Description of the experiment.
    #[serde(flatten)]
    pub about: &'static About,
    /// Settings of the user.
    #[serde(flatten)]
    pub setting: Setting,
    /// Results of the experiment.
    #[serde(flatten)]
    pub results: Results,
}

impl Report {
    /// File name and SVG document of each chart.
    pub fn plots(&self) -> Vec<(String, String)> {
        self.results.charts.iter().map(|chart| (self.file(&chart.name), chart.svg())).collect()
    }

    fn file(&self, chart: &str) -> String {
        if chart.is_empty() { format!("{}.svg", self.about.name) } else { format!("{}-{chart}.svg", self.about.name) }
    }
}

/// The Markdown page of all experiments, with the list of what the papers claim (`coverage::list`) before them. It links to the plots in `folder`, a
/// path relative to the page.
pub fn markdown(reports: &[Report], folder: &str, list: &str) -> String {
    let repeated = reports.iter().find(|report| report.about.sampling == Sampling::Repeated);
    let sampling = repeated.map_or_else(String::new, |report| format!(" --runs {} --seed {}", report.setting.runs, report.setting.seed));
    let mut page = format!(
        "# The papers' results, reproduced\n\n\
         `braid sim report --out docs{sampling}` generates this page. It runs the experiments of the papers that Braid is based on in a simulator,\n\
         with the scheduling code of the daemon, and compares the claims of the papers with the results. *Met*: the result is as claimed. *Differs*:\n\
         the effect has the same direction but another size; no effect, or one in the opposite direction, never is. *Not met*: the result contradicts\n\
         the claim, or the runs do not show the effect. *Not tested*: the result follows from a number that was put in.\n",
    );
    if let Some(report) = repeated {
        let Setting { runs, seed } = report.setting;
        let _ = writeln!(page, "\nSeed {seed}, {runs} runs of each point; whiskers and ± are 95 % confidence intervals (Student's t).");
    }
    summary(&mut page, reports);
    page.push_str(list);
    let mut paper: Option<Paper> = None;
    for report in reports {
        if paper != Some(report.about.paper) {
            let _ = writeln!(page, "\n## {}", cell(report.about.paper.citation()));
            paper = Some(report.about.paper);
        }
        section(&mut page, report, folder);
    }
    page
}

/// Table of the experiments, with the judgements of their claims, and the sums.
fn summary(page: &mut String, reports: &[Report]) {
    let judgements = |report: &Report| report.results.comparisons.iter().map(|comparison| comparison.judgement).collect::<Vec<Judgement>>();
    let all: Vec<Judgement> = reports.iter().flat_map(judgements).collect();
    let _ = writeln!(page, "\n{} claims: {}.", all.len(), Judgement::counts(&all));
    page.push_str("\n| experiment | shows | claims |\n|---|---|---|\n");
    for report in reports {
        let _ = writeln!(
            page,
            "| [{0}](#{0}) | {1} | {2} |",
            report.about.name,
            cell(report.about.title),
            Judgement::counts(&judgements(report))
        );
    }
}

fn section(page: &mut String, report: &Report, folder: &str) {
    let (about, results) = (report.about, &report.results);
    let _ = writeln!(page, "\n### {}\n\n**{} ({}).** {}", about.name, about.title, about.figure, about.setting);
    for chart in &results.charts {
        let _ = writeln!(page, "\n![{}]({folder}/{})", cell(&chart.title), report.file(&chart.name));
    }
    for table in &results.tables {
        table_of(page, table);
    }
    if !results.comparisons.is_empty() {
        page.push_str("\n| the paper's claim | paper | here | |\n|---|---|---|---|\n");
        for comparison in &results.comparisons {
            let (claim, paper) = (cell(comparison.claim.text), cell(comparison.claim.paper));
            let _ = writeln!(page, "| {claim} | {paper} | {} | {} |", cell(&comparison.here), comparison.judgement);
        }
    }
    for comparison in results.comparisons.iter().filter(|comparison| !comparison.why.is_empty()) {
        let _ = writeln!(page, "\n*{}*: {}", cell(comparison.claim.text), comparison.why);
    }
    for note in &results.notes {
        let _ = writeln!(page, "\n{note}");
    }
    let _ = match (about.sampling, report.setting) {
        (Sampling::Timed, _) => {
            writeln!(page, "\n`braid sim run {}` (measured with a clock, so results depend on the machine)", about.name)
        }
        (Sampling::Once, _) => writeln!(page, "\n`braid sim run {}`", about.name),
        (_, Setting { runs, seed }) => writeln!(page, "\n`braid sim run {} --runs {runs} --seed {seed}`", about.name),
    };
}

fn table_of(page: &mut String, table: &Table) {
    let row = |cells: &[String]| format!("| {} |", cells.iter().map(|text| cell(text)).collect::<Vec<_>>().join(" | "));
    let _ = writeln!(page, "\n{}:\n\n{}\n|{}", table.title, row(&table.columns), "---|".repeat(table.columns.len()));
    for cells in &table.rows {
        let _ = writeln!(page, "{}", row(cells));
    }
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::super::*;

    static ABOUT: About = About {
        name: "thesis-0",
        paper: Paper::Thesis,
        figure: "fig. 0",
        title: "A line",
        setting: "Nothing.",
        sampling: Sampling::Repeated,
        claims: &[Claim { text: "It grows", paper: "a|b" }],
    };

    struct Line {
        comparisons: usize,
        asked: &'static str,
    }

    impl Experiment for Line {
        fn about(&self) -> &'static About {
            &ABOUT
        }
        fn points(&self) -> Vec<Point> {
            Point::grid(&["one"], &[1.0, 2.0])
        }
        fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
            Sample::default().value("y", point.x + f64::from(run.index))
        }
        fn assemble(&self, samples: &Samples) -> Results {
            let chart = Chart::lines("grown", "A line", Axis::new("x", ""), Axis::new("y", "m")).with(samples.series(self.asked));
            let table = Table::new("All", &["x", "y"]).row(["1", "2"]);
            let results = Results::default().chart(chart).table(table).note("A note.");
            (0..self.comparisons).fold(results, |results, _| results.comparison(ABOUT.claims[0].judge("so", Judgement::Met, "It must.")))
        }
    }

    fn report(line: &Line) -> Result<Report, ReportError> {
        let setting = Setting { runs: 2, seed: 7 };
        conclude(line, &setting, Samples::new(setting.jobs(line).into_iter().map(|job| job.measure(line)).collect()))
    }

    #[test]
    fn the_page_compares_claims_with_results() {
        let report = report(&Line { comparisons: 1, asked: "y" }).unwrap();
        assert_eq!(report.plots()[0].0, "thesis-0-grown.svg");
        let page = markdown(&[report], "plots", "\nThe list.\n");
        for wanted in [
            "`braid sim report --out docs --runs 2 --seed 7` generates this page",
            "Seed 7, 2 runs",
            "1 claims: met.",
            "| [thesis-0](#thesis-0) | A line | met |",
            "## Yap",
            "![A line](plots/thesis-0-grown.svg)",
            "| x | y |\n|---|---|\n| 1 | 2 |",
            "| It grows | a\\|b | so | met |",
            "*It grows*: It must.",
            "A note.",
            "\nThe list.\n",
            "`braid sim run thesis-0 --runs 2 --seed 7`",
        ] {
            assert!(page.contains(wanted), "{wanted} in {page}");
        }
    }

    #[test]
    fn a_missing_comparison_or_number_is_an_error() {
        assert_eq!(report(&Line { comparisons: 0, asked: "y" }), Err(ReportError::Comparisons { experiment: "thesis-0" }));
        let error = report(&Line { comparisons: 1, asked: "z" }).unwrap_err().to_string();
        assert!(error.contains("series \"one\""), "{error}");
    }

    #[test]
    fn each_run_has_its_own_seed_for_all_points() {
        let line = Line { comparisons: 1, asked: "y" };
        let jobs = Setting { runs: 2, seed: 7 }.jobs(&line);
        assert_eq!(jobs.iter().map(|job| (job.point.x, job.index)).collect::<Vec<_>>(), [(1.0, 0), (1.0, 1), (2.0, 0), (2.0, 1)]);
        assert_eq!((jobs[0].seed, jobs[1].seed), (jobs[2].seed, jobs[3].seed));
        assert_ne!(jobs[0].seed, jobs[1].seed);
        assert_ne!(jobs[0].seed, Setting { runs: 2, seed: 8 }.jobs(&line)[0].seed);
    }
}
