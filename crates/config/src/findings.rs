//! Why a configuration file is refused, and the names that may have been meant.

use braid_control::config::{Finding, Severity};

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigErrors {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {error}; name a text file that this user may read")]
    Unreadable {
        /// The file.
        path: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The file says what cannot be.
    #[error("{}", all(.0))]
    Refused(Vec<Finding>),
}

impl ConfigErrors {
    /// Everything found, errors and warnings in the order of the file; empty when the file could not be read.
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

/// The name among `valid` nearest to `text`, if one is near.
pub(super) fn nearest<'a>(text: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<String> {
    valid
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&text.to_lowercase(), &name.to_lowercase()), name))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// The path among `valid` whose last part may be a slip of the pen of `text`'s. A directory may hold thousands of programs, one of which
/// resembles anything, so only a letter in three may differ.
pub(super) fn nearest_path<'a>(text: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let last = |path: &str| path.rsplit('/').next().unwrap_or_default().to_lowercase();
    let wanted = last(text);
    let most = (wanted.chars().count() / 3).min(2);
    valid
        .into_iter()
        .map(|path| (strsim::osa_distance(&wanted, &last(path)), path))
        .filter(|(slips, _)| *slips <= most)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, path)| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_names_are_not_offered() {
        assert_eq!(nearest("shceduler", ["version", "scheduler"]).as_deref(), Some("scheduler"));
        assert_eq!(nearest("zzz", ["version", "scheduler"]), None);
    }

    #[test]
    fn regression_a_full_directory_holds_no_likeness_of_everything() {
        let programs = ["/usr/bin/choom", "/usr/bin/touch", "/usr/bin/curl", "/usr/bin/firefox-esr"];
        assert_eq!(nearest_path("/usr/bin/zoom", programs), None);
        assert_eq!(nearest_path("/usr/bin/nonesuch", programs), None);
        assert_eq!(nearest_path("/usr/bin/crul", programs).as_deref(), Some("/usr/bin/curl"));
        assert_eq!(nearest_path("/usr/bin/friefox-esr", programs).as_deref(), Some("/usr/bin/firefox-esr"));
        assert_eq!(nearest_path("", programs), None);
    }
}
