//! Errors of the configuration file, and suggestions of similar names.

use braid_control::config::{Finding, Severity};

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigErrors {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {error}; give the path of a text file that this user may read")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The file has errors.
    #[error("{}", all(.0))]
    Refused(Vec<Finding>),
}

impl ConfigErrors {
    /// All findings in the order of the file; empty if the file could not be read.
    pub fn findings(&self) -> &[Finding] {
        match self {
            Self::Unreadable { .. } => &[],
            Self::Refused(findings) => findings,
        }
    }
}

fn all(findings: &[Finding]) -> String {
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    let mut text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    let plural = if errors == 1 { "" } else { "s" };
    text.push_str(&format!("{errors} error{plural}: the configuration is refused"));
    text
}

/// The name in `valid` that is most similar to `text`, if one is similar enough.
pub(super) fn nearest<'a>(text: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<String> {
    valid
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&text.to_lowercase(), &name.to_lowercase()), name))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// The name in `valid` of which `text` is probably a misspelling, if other names are valid too: at most one letter in three may differ, and
/// at most two.
pub(super) fn nearest_name<'a>(text: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let max = (text.chars().count() / 3).min(2);
    let slips = valid.into_iter().map(|name| (strsim::osa_distance(&text.to_lowercase(), name), name));
    slips.filter(|(slips, _)| *slips <= max).min_by_key(|(slips, _)| *slips).map(|(_, name)| name.to_owned())
}

/// The path in `valid` whose last component may be a misspelling of that of `text`. A directory may hold thousands of programs, some of
/// which resemble anything, so at most one letter in three may differ.
pub(super) fn nearest_path<'a>(text: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let last = |path: &str| path.rsplit('/').next().unwrap_or_default().to_lowercase();
    let wanted = last(text);
    let max = (wanted.chars().count() / 3).min(2);
    valid
        .into_iter()
        .map(|path| (strsim::osa_distance(&wanted, &last(path)), path))
        .filter(|(slips, _)| *slips <= max)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, path)| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dissimilar_names_are_not_suggested() {
        assert_eq!(nearest("shceduler", ["version", "scheduler"]).as_deref(), Some("scheduler"));
        assert_eq!(nearest("zzz", ["version", "scheduler"]), None);
    }

    #[test]
    fn regression_a_full_directory_does_not_suggest_unrelated_names() {
        let programs = ["/usr/bin/choom", "/usr/bin/touch", "/usr/bin/curl", "/usr/bin/firefox-esr"];
        assert_eq!(nearest_path("/usr/bin/zoom", programs), None);
        assert_eq!(nearest_path("/usr/bin/nonesuch", programs), None);
        assert_eq!(nearest_path("/usr/bin/crul", programs).as_deref(), Some("/usr/bin/curl"));
        assert_eq!(nearest_path("/usr/bin/friefox-esr", programs).as_deref(), Some("/usr/bin/firefox-esr"));
        assert_eq!(nearest_path("", programs), None);
    }
}
