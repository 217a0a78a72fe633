//! Results of a benchmark, as Markdown and as JSON.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Results of one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the benchmark on the command line.
    pub name: String,
    /// Heading of the section.
    pub title: String,
    /// Description of the method.
    pub method: String,
    /// Command that repeats the benchmark.
    pub command: String,
    /// The figures.
    pub tables: Vec<Table>,
    /// The aims, and whether they are met.
    pub aims: Vec<Aim>,
    /// Remarks below the tables.
    pub notes: Vec<String>,
    /// Plots, each in a separate file beside the document.
    #[serde(default)]
    pub figures: Vec<Figure>,
    /// All individual measurements.
    pub raw: Value,
}

/// A table of results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Text above the table.
    pub caption: String,
    /// Names of the columns.
    pub head: Vec<String>,
    /// Cells; each row has one per column.
    pub rows: Vec<Vec<String>>,
}

/// A plot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// File name without the extension.
    pub name: String,
    /// Text of the image.
    pub title: String,
    /// The plot as SVG.
    pub svg: String,
}

/// An aim and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Aim {
    /// For example "goodput at least 0.98".
    pub aim: String,
    /// For example "0.997 ± 0.004".
    pub measured: String,
    /// Whether the aim is met.
    pub met: bool,
}

impl Report {
    /// An empty report.
    pub fn new(name: &str, title: &str, method: &str) -> Self {
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            method: method.to_owned(),
            command: String::new(),
            tables: Vec::new(),
            aims: Vec::new(),
            notes: Vec::new(),
            figures: Vec::new(),
            raw: Value::Null,
        }
    }

    /// Adds an aim.
    pub fn aim(&mut self, aim: impl Into<String>, measured: impl Into<String>, met: bool) {
        self.aims.push(Aim { aim: aim.into(), measured: measured.into(), met });
    }

    /// Adds a row to the table with this caption. Creates the table with this head if it does not exist.
    pub fn row(&mut self, caption: &str, head: &str, row: Vec<String>) {
        match self.tables.iter_mut().find(|table| table.caption == caption) {
            Some(table) => table.rows.push(row),
            None => self.table(caption, head, vec![row]),
        }
    }

    /// Adds one individual measurement.
    pub fn measured(&mut self, raw: Value) {
        match &mut self.raw {
            Value::Array(all) => all.push(raw),
            other => *other = Value::Array(vec![raw]),
        }
    }

    /// Adds a table; `head` is the columns' names with `|` between them.
    pub fn table(&mut self, caption: impl Into<String>, head: &str, rows: Vec<Vec<String>>) {
        let head = head.split('|').map(|name| name.trim().to_owned()).collect();
        self.tables.push(Table { caption: caption.into(), head, rows });
    }

    /// As a section of a Markdown document.
    pub fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n{}\n\n    {}\n", self.title, self.method, self.command);
        for Table { caption, head, rows } in &self.tables {
            let _ = write!(text, "\n{caption}\n\n| {} |\n|{}\n", head.join(" | "), " --- |".repeat(head.len()));
            for row in rows {
                let _ = writeln!(text, "| {} |", row.join(" | "));
            }
        }
        for Figure { name, title, .. } in &self.figures {
            let _ = write!(text, "\n![{title}]({name}.svg)\n");
        }
        if !self.aims.is_empty() {
            text += "\n| aim | measured | |\n| --- | --- | --- |\n";
            for Aim { aim, measured, met } in &self.aims {
                let _ = writeln!(text, "| {aim} | {measured} | {} |", if *met { "met" } else { "**not met**" });
            }
        }
        if !self.notes.is_empty() {
            text.push('\n');
            for note in &self.notes {
                let _ = writeln!(text, "- {note}");
            }
        }
        text
    }

    /// Saves the report and its plots in `directory`, replacing an earlier report of the same name.
    pub fn save(&self, directory: &Path) -> Result<()> {
        for Figure { name, svg, .. } in &self.figures {
            let path = directory.join(format!("{name}.svg"));
            fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let path = directory.join(format!("{}.json", self.name));
        fs::write(&path, serde_json::to_string_pretty(self)?).with_context(|| format!("cannot write {}", path.display()))?;
        // A complete report replaces the part files.
        for part in self.parts(directory) {
            let _ = fs::remove_file(part);
        }
        Ok(())
    }

    /// Saves the finished part of a run by `command` in `directory`, until the complete report is saved.
    pub fn save_part(&self, directory: &Path, command: &str) -> Result<()> {
        let mut part = Self { command: command.to_owned(), ..self.clone() };
        part.notes.push("The run had not ended when this was written.".to_owned());
        let contents = [part.markdown(), serde_json::to_string_pretty(&part)?];
        for (path, content) in self.parts(directory).into_iter().zip(contents) {
            fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn parts(&self, directory: &Path) -> [PathBuf; 2] {
        ["md", "json"].map(|kind| directory.join(format!("{}.part.{kind}", self.name)))
    }

    /// Loads the saved report of this name, if there is one.
    pub fn load(directory: &Path, name: &str) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(directory.join(format!("{name}.json"))).ok()?).ok()
    }
}

/// Writes `bench.md` and `bench.json` from the reports of `names` that are saved in `directory`.
pub(super) fn assemble(directory: &Path, names: &[&str], machine: &str) -> Result<()> {
    let reports: Vec<_> = names.iter().filter_map(|name| Report::load(directory, name)).collect();
    let mut text = format!("# Benchmarks\n\n`make bench` repeats them all. {machine}\n");
    for report in &reports {
        text.push('\n');
        text += &report.markdown();
    }
    for (name, content) in [("bench.md", text), ("bench.json", serde_json::to_string_pretty(&reports)?)] {
        let path = directory.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str) -> Report {
        let mut report = Report::new(name, "How fast?", "By a watch.");
        report.command = format!("braid-lab bench {name}");
        report.table("Seconds:", "who | took", vec![vec!["hare".to_owned(), "9".to_owned()]]);
        report.aim("under 5", "9", false);
        report.notes.push("The hare slept.".to_owned());
        report.figures.push(Figure { name: format!("{name}-course"), title: "The course".to_owned(), svg: "<svg/>".to_owned() });
        report
    }

    #[test]
    fn a_section_shows_command_figures_and_unmet_aims() {
        let text = report("race").markdown();
        assert!(text.starts_with("## How fast?\n\nBy a watch.\n\n    braid-lab bench race\n"), "{text}");
        assert!(text.contains("| who | took |\n| --- | --- |\n| hare | 9 |\n"), "{text}");
        assert!(text.contains("\n![The course](race-course.svg)\n"), "{text}");
        assert!(text.contains("| under 5 | 9 | **not met** |\n\n- The hare slept.\n"), "{text}");
    }

    #[test]
    fn an_aborted_run_leaves_a_part_file_and_a_complete_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let mut report = report("race");
        report.row("Seconds:", "who | took", vec!["tortoise".to_owned(), "99".to_owned()]);
        report.measured(serde_json::json!(9));
        report.measured(serde_json::json!(99));
        report.save_part(directory.path(), "braid-lab bench race").unwrap();
        let text = fs::read_to_string(directory.path().join("race.part.md")).unwrap();
        assert!(text.contains("| hare | 9 |\n| tortoise | 99 |\n") && text.contains("had not ended"), "{text}");
        assert!(Report::load(directory.path(), "race").is_none());
        report.save(directory.path()).unwrap();
        assert_eq!(Report::load(directory.path(), "race"), Some(report.clone()));
        assert_eq!(report.raw, serde_json::json!([9, 99]));
        assert!(!directory.path().join("race.part.md").exists() && !directory.path().join("race.part.json").exists());
    }

    #[test]
    fn earlier_sections_stay_and_follow_the_order_of_names() {
        let directory = tempfile::tempdir().unwrap();
        report("second").save(directory.path()).unwrap();
        report("first").save(directory.path()).unwrap();
        fs::write(directory.path().join("broken.json"), "{").unwrap();
        assemble(directory.path(), &["first", "broken", "missing", "second"], "A slow one.").unwrap();
        let text = fs::read_to_string(directory.path().join("bench.md")).unwrap();
        assert!(text.contains("A slow one.") && text.find("bench first").unwrap() < text.find("bench second").unwrap(), "{text}");
        assert_eq!(fs::read_to_string(directory.path().join("first-course.svg")).unwrap(), "<svg/>");
        let all: Vec<Report> = serde_json::from_str(&fs::read_to_string(directory.path().join("bench.json")).unwrap()).unwrap();
        assert_eq!(all, [report("first"), report("second")]);
    }
}
