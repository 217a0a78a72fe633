//! The experiments of the papers.

mod dbas;
mod dnis;
mod operetta;
mod thesis;
mod virtual_interface;

use crate::experiment::Experiment;

/// All experiments, grouped by paper, in the order of the figures.
pub fn all() -> Vec<&'static dyn Experiment> {
    [&dnis::all()[..], &dbas::all(), &operetta::all(), &virtual_interface::all(), &thesis::all()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_valid_file_names() {
        let all = all();
        let names: BTreeSet<&str> = all.iter().map(|experiment| experiment.about().name).collect();
        assert_eq!(names.len(), all.len());
        for name in names {
            assert!(name != "all" && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'), "{name}");
        }
    }

    #[test]
    fn experiments_are_grouped_by_paper() {
        let mut papers: Vec<_> = all().iter().map(|experiment| experiment.about().paper).collect();
        papers.dedup();
        assert_eq!(papers.len(), papers.iter().collect::<BTreeSet<_>>().len(), "{papers:?}");
    }
}
