//! The list of all figures, tables, theorems and claims, held against the papers' numbering, the page, the benchmarks and the lab.

use std::collections::BTreeSet;
use std::path::Path;

use braid_sim::coverage::{BENCHMARKS, COPIES, ENTRIES, Owner, section};
use braid_sim::experiment::Paper;
use braid_sim::experiments;

#[expect(clippy::disallowed_methods, reason = "the crate reads no files, but this test compares it with files")]
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn items(paper: Paper) -> BTreeSet<&'static str> {
    ENTRIES.iter().filter(|entry| entry.paper == paper).map(|entry| entry.item).collect()
}

/// What each paper has, counted in the papers: prefix, first and last number.
const NUMBERED: [(Paper, &str, u32, u32); 24] = [
    (Paper::Dnis, "fig. ", 1, 2),
    (Paper::Dbas, "fig. ", 1, 6),
    (Paper::Operetta, "fig. ", 1, 9),
    (Paper::Operetta, "Algorithm ", 1, 1),
    (Paper::VirtualInterface, "fig. ", 1, 3),
    (Paper::VirtualInterface, "table ", 1, 7),
    (Paper::VirtualInterface, "graph ", 1, 1),
    (Paper::Thesis, "fig. 1.", 1, 1),
    (Paper::Thesis, "fig. 2.", 1, 19),
    (Paper::Thesis, "fig. 3.", 1, 3),
    (Paper::Thesis, "fig. 4.", 1, 9),
    (Paper::Thesis, "fig. 5.", 1, 9),
    (Paper::Thesis, "Table 4.", 1, 1),
    (Paper::Thesis, "Table 5.", 1, 2),
    (Paper::Thesis, "Theorem ", 1, 10),
    (Paper::Thesis, "Lemma ", 1, 10),
    (Paper::Thesis, "Definition ", 1, 3),
    (Paper::Dbas, "Table I", 0, 0),
    (Paper::Operetta, "Table I", 0, 0),
    (Paper::Operetta, "Table II", 0, 0),
    (Paper::Operetta, "Table III", 0, 0),
    (Paper::Dbas, "fig. 3b", 0, 0),
    (Paper::Dbas, "fig. 4b", 0, 0),
    (Paper::Dbas, "section IV.C, clients", 0, 0),
];

#[test]
fn every_number_of_the_papers_has_one_entry() {
    for (paper, prefix, first, last) in NUMBERED {
        for number in first..=last {
            let wanted = if last == 0 { prefix.to_owned() } else { format!("{prefix}{number}") };
            assert!(items(paper).contains(wanted.as_str()), "{paper:?} has no entry {wanted:?}");
        }
    }
    let all: BTreeSet<_> = ENTRIES.iter().map(|entry| (entry.paper, entry.item)).collect();
    assert_eq!(all.len(), ENTRIES.len(), "an item has two entries");
}

#[test]
fn every_owner_exists() {
    let all = experiments::all();
    let (benchmarks, bench) = (read("docs/benchmarks.md"), read("lab/src/bench.rs"));
    for entry in ENTRIES {
        if let Some((name, claims)) = entry.owner.experiment() {
            let experiment = all.iter().find(|experiment| experiment.about().name == name);
            let experiment = experiment.unwrap_or_else(|| panic!("{}: there is no experiment {name:?}", entry.item));
            assert_eq!(experiment.about().paper, entry.paper, "{}", entry.item);
            assert!(claims.iter().all(|claim| *claim < experiment.about().claims.len()), "{}: {claims:?}", entry.item);
        }
        if let Some(name) = entry.owner.benchmark() {
            assert!(section(name).is_some(), "{}: give the section of {name:?}", entry.item);
        }
        if let Owner::Test(file, test) = entry.owner {
            assert!(read(&format!("lab/tests/lab/{file}")).contains(&format!("fn {test}()")), "{}: {test}", entry.item);
        }
        if let Owner::Unit(file, test) = entry.owner {
            assert!(read(file).contains(&format!("fn {test}()")), "{}: {test}", entry.item);
        }
        if let Owner::NotTried(why) | Owner::Nothing(why) = entry.owner {
            assert!(!why.is_empty(), "{}", entry.item);
        }
    }
    for (name, heading) in BENCHMARKS.iter().chain([&COPIES]) {
        assert!(bench.contains(&format!("(\"{name}\", ")), "`braid-lab bench {name}` is no command");
        let (_, text) =
            benchmarks.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("benchmarks.md has no section {heading:?}"));
        let text = text.split("\n## ").next().unwrap_or(text);
        let command = text.lines().find(|line| line.trim_start().starts_with("braid-lab bench"));
        assert!(
            command.is_some_and(|line| line.split_whitespace().any(|word| word == *name)),
            "{heading:?} has another command: {command:?}"
        );
    }
    let owned: BTreeSet<_> = ENTRIES.iter().filter_map(|entry| entry.owner.experiment()).map(|(name, _)| name).collect();
    for experiment in &all {
        assert!(owned.contains(experiment.about().name), "no entry names the experiment {:?}", experiment.about().name);
    }
}

#[test]
fn every_claim_of_an_experiment_belongs_to_an_entry() {
    for experiment in experiments::all() {
        let about = experiment.about();
        let claims =
            |name| ENTRIES.iter().filter_map(|entry| entry.owner.experiment()).filter(move |(of, _)| *of == name).map(|(_, claims)| claims);
        for claim in 0..about.claims.len() {
            assert!(
                claims(about.name).any(|claims| claims.is_empty() || claims.contains(&claim)),
                "{}: {}",
                about.name,
                about.claims[claim].text
            );
        }
    }
}

/// The page is generated, so what this finds is a page of another version.
#[test]
fn the_page_has_every_entry_and_every_claim() {
    let page = read("docs/reproduction.md");
    let why = "make the page anew: `braid sim report --out docs`";
    for entry in ENTRIES {
        // The last column has results.
        let row = entry.row(&[]);
        let row = row.trim_end_matches(" |");
        assert!(page.lines().any(|line| line.starts_with(row)), "{row:?} is not in the page; {why}");
    }
    for experiment in experiments::all() {
        let about = experiment.about();
        assert!(page.contains(&format!("\n### {}\n", about.name)), "{} is not in the page; {why}", about.name);
        for claim in about.claims {
            let row = format!("| {} | {} |", claim.text.replace('|', "\\|"), claim.paper.replace('|', "\\|"));
            assert!(page.contains(&row), "{row:?} is not in the page; {why}");
        }
    }
}
