//! The configuration as API clients use it: read, preview, apply, undo.
//!
//! A change contains the revision of the text it was made for. It is refused if the file has changed meanwhile. It is checked, applied, and
//! written atomically. A text that cannot be written is not applied.

mod edit;
mod file;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use braid_api::{ConfigChange, ConfigChanged, ConfigView, Edit, Finding as FindingView};
use braid_control::RequestError;
use braid_control::config::{Config, Finding, Severity};
use braid_decide::policy::AppRule;
use ring::digest::{SHA256, digest};

use crate::{ConfigErrors, World};
use edit::EditError;
use file::Staged;

/// Maximum number of changes that can be undone.
const MAX_UNDO: usize = 20;
/// Maximum length of a program's rule, in bytes of TOML.
const MAX_RULE: usize = 16 << 10;

/// The configuration file and its history of changes.
#[derive(Debug)]
pub struct Settings {
    /// The file in force; `None`: there is none, and the first change creates `fallback`.
    path: Option<PathBuf>,
    fallback: PathBuf,
    /// Text before each change, and the revision after it.
    undo: Vec<(String, String)>,
}

/// Inputs of `GET /v1/config`, to be read off the event loop.
#[derive(Debug, Clone)]
pub struct Look {
    path: Option<PathBuf>,
    fallback: PathBuf,
    /// Revision after the last change that can be undone.
    changed: Option<String>,
}

impl Look {
    /// `GET /v1/config`.
    ///
    /// # Errors
    /// A conflict if the file cannot be read.
    pub fn view(&self) -> Result<ConfigView, RequestError> {
        let file = self.path.as_deref().unwrap_or(&self.fallback);
        let text = read(file)?;
        let revision = revision(&text);
        let can_undo = self.changed.as_ref().is_some_and(|after| *after == revision);
        let path = self.path.as_ref().map(|path| path.display().to_string());
        Ok(ConfigView { path, text, revision, writable: file::writable(file), can_undo })
    }
}

/// A change that was checked but not applied.
struct Checked {
    text: String,
    changes: Vec<String>,
    config: Config,
}

impl Settings {
    /// For the file in force, or for `fallback` if there is none.
    pub fn new(path: Option<PathBuf>, fallback: PathBuf) -> Self {
        Self { path, fallback, undo: Vec::new() }
    }

    /// The file in force.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn file(&self) -> &Path {
        self.path.as_deref().unwrap_or(&self.fallback)
    }

    /// Inputs of `GET /v1/config`.
    pub fn look(&self) -> Look {
        let changed = self.undo.last().map(|(_, after)| after.clone());
        Look { path: self.path.clone(), fallback: self.fallback.clone(), changed }
    }

    /// `POST /v1/config/preview`.
    ///
    /// # Errors
    /// A conflict if the revision is outdated; invalid if the edits or the resulting text are not valid.
    pub fn preview(&self, change: &ConfigChange, world: &World) -> Result<ConfigChanged, RequestError> {
        self.check(&self.read()?, change, world).map(Checked::answer)
    }

    /// `POST /v1/config`. `enforce` applies the new configuration.
    ///
    /// # Errors
    /// Those of [`preview`](Self::preview); a conflict if the file cannot be written; the error of `enforce`.
    pub fn apply(
        &mut self,
        change: &ConfigChange,
        world: &World,
        enforce: impl FnMut(Config) -> Result<(), RequestError>,
    ) -> Result<ConfigChanged, RequestError> {
        let before = self.read()?;
        let checked = self.check(&before, change, world)?;
        self.replace(&before, &checked.text, checked.config.clone(), world, enforce)?;
        if self.undo.len() == MAX_UNDO {
            self.undo.remove(0);
        }
        self.undo.push((before, revision(&checked.text)));
        Ok(checked.answer())
    }

    /// `POST /v1/config/undo`.
    ///
    /// # Errors
    /// A conflict if there is nothing to undo or the file has changed otherwise since; else as [`apply`](Self::apply).
    pub fn undo(&mut self, world: &World, enforce: impl FnMut(Config) -> Result<(), RequestError>) -> Result<ConfigView, RequestError> {
        let now = self.read()?;
        let Some((before, _)) = self.undo.last().filter(|(_, after)| *after == revision(&now)).cloned() else {
            let detail = "there is no change to undo, or the file was changed otherwise since: edit it by hand";
            return Err(RequestError::conflict("Nothing to undo", detail));
        };
        // The old text is checked as leniently as at a start: a program that it names may have been removed since.
        let config = self.parse(&before, &World { strict: false, ..world.clone() }).map_err(|errors| refused(&errors))?;
        self.replace(&now, &before, config, world, enforce)?;
        self.undo.pop();
        self.look().view()
    }

    fn read(&self) -> Result<String, RequestError> {
        read(self.file())
    }

    fn parse(&self, text: &str, world: &World) -> Result<Config, ConfigErrors> {
        crate::parse(&self.file().display().to_string(), text, world)
    }

    fn check(&self, before: &str, change: &ConfigChange, world: &World) -> Result<Checked, RequestError> {
        if change.revision != revision(before) {
            let detail = format!("{} has changed since it was read: read it again with GET /v1/config", self.file().display());
            return Err(RequestError::conflict("Configuration changed meanwhile", detail));
        }
        let (text, changes) = edit::apply(before, &change.edits).map_err(|error| {
            let remedy = if matches!(error, EditError::Broken(_)) { "; repair it by hand" } else { "" };
            RequestError::invalid("Edits refused", format!("{error}{remedy}"))
        })?;
        let config = match self.parse(&text, world) {
            Ok(config) => config,
            // Errors that the file had before, such as a missing device, must not block a change elsewhere.
            Err(errors) if self.had_errors(before, &errors, world) => {
                self.parse(&text, &World { strict: false, ..world.clone() }).map_err(|errors| refused(&errors))?
            }
            Err(errors) => return Err(refused(&errors)),
        };
        Ok(Checked { text, changes, config })
    }

    /// Whether the old text had every one of these errors.
    fn had_errors(&self, before: &str, errors: &ConfigErrors, world: &World) -> bool {
        let Err(old) = self.parse(before, world) else { return false };
        let error = |finding: &&Finding| finding.severity == Severity::Error;
        errors.findings().iter().filter(error).all(|finding| old.findings().iter().any(|old| old.reason == finding.reason))
    }

    /// Applies `text` and writes it to the file, or does neither.
    fn replace(
        &mut self,
        before: &str,
        text: &str,
        config: Config,
        world: &World,
        mut enforce: impl FnMut(Config) -> Result<(), RequestError>,
    ) -> Result<(), RequestError> {
        let unwritable = |error: std::io::Error| {
            let detail = format!(
                "{} cannot be written: {error}; nothing was changed: make the daemon's user the owner of the file and its directory, or edit the file by hand",
                self.file().display()
            );
            RequestError::conflict("Configuration not writable", detail)
        };
        let staged = Staged::new(self.file(), text).map_err(unwritable)?;
        enforce(config)?;
        if let Err(error) = staged.commit() {
            let problem = unwritable(error);
            if let Ok(old) = self.parse(before, &World { strict: false, ..world.clone() }) {
                enforce(old)?;
            }
            return Err(problem);
        }
        self.path.get_or_insert_with(|| self.fallback.clone());
        Ok(())
    }
}

/// The keys and values of a rule that a user writes on one line, `match = { name = "rsync" }, links = ["wlan0"]`.
///
/// # Errors
/// It is not of that form.
pub fn rule_of(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    let wanted = "write keys of an [[app]] entry, as in 'match = { name = \"rsync\" }, links = [\"wlan0\"]'";
    let document = format!("rule = {{ {} }}", text.trim());
    let mut tables: BTreeMap<String, _> =
        toml::from_str(&document).map_err(|error| format!("{:?}: {}; {wanted}", text, error.message()))?;
    tables.remove("rule").filter(|_| tables.is_empty()).ok_or_else(|| format!("{text:?} is not a rule; {wanted}"))
}

/// Reads a program's rule: keys and values of an `[[app]]` entry. Returns it with the warnings of the configuration checker.
///
/// # Errors
/// Invalid, with the findings, as for an entry of the configuration; unclear if it is too long.
pub fn program_rule(rule: &serde_json::Map<String, serde_json::Value>, world: &World) -> Result<(AppRule, Vec<String>), RequestError> {
    const TITLE: &str = "Rule refused";
    let add = Edit::AppAdd { at: None, value: rule.clone() };
    let (text, _) = edit::apply("", &[add]).map_err(|error| match error {
        EditError::Broken(reason) | EditError::Refused { reason, .. } => RequestError::invalid(TITLE, reason),
    })?;
    if text.len() > MAX_RULE {
        return Err(RequestError::unclear(format!("the rule is longer than {MAX_RULE} bytes: shorten it")));
    }
    let mut config = crate::parse("rule", &text, world).map_err(|errors| RequestError { title: TITLE, ..refused(&errors) })?;
    let warnings = config.warnings.iter().map(ToString::to_string).collect();
    let rule = config.policy.apps.pop().ok_or_else(|| RequestError::invalid(TITLE, "the rule is empty: write match and what applies"))?;
    Ok((rule, warnings))
}

/// The text of a configuration file; empty if there is none.
///
/// # Errors
/// Those of reading; the message names the file.
pub fn read_file(path: &Path) -> std::io::Result<String> {
    file::read(path).map_err(|error| std::io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display())))
}

/// Replaces a text file as a whole, or creates it with its directory. It keeps its owner and mode.
///
/// # Errors
/// Those of writing; the file is unchanged then.
pub fn replace_file(path: &Path, text: &str) -> std::io::Result<()> {
    Staged::new(path, text)?.commit()
}

fn read(file: &Path) -> Result<String, RequestError> {
    file::read(file).map_err(|error| {
        let detail = format!("{} cannot be read: {error}; make it a text file that root may read", file.display());
        RequestError::conflict("Configuration unreadable", detail)
    })
}

impl Checked {
    fn answer(self) -> ConfigChanged {
        let warnings = self.config.warnings.iter().map(ToString::to_string).collect();
        ConfigChanged { revision: revision(&self.text), text: self.text, changes: self.changes, warnings }
    }
}

/// The error for a refused configuration, with all findings.
pub fn refused(errors: &ConfigErrors) -> RequestError {
    let view = |finding: &Finding| FindingView {
        severity: if finding.severity == Severity::Error { "error" } else { "warning" }.to_owned(),
        file: finding.file.clone(),
        line: finding.line as u64,
        column: finding.column as u64,
        excerpt: finding.excerpt.clone(),
        reason: finding.reason.clone(),
        nearest: finding.nearest.clone(),
        remedy: finding.remedy.clone(),
    };
    let findings = errors.findings().iter().map(view).collect();
    RequestError { findings, ..RequestError::invalid("Configuration refused", errors.to_string()) }
}

/// Identifies a text by its hash.
fn revision(text: &str) -> String {
    digest(&SHA256, text.as_bytes()).as_ref()[..12].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Files;
    use braid_control::Cause;
    use serde_json::json;

    fn change(settings: &Settings, edits: serde_json::Value) -> ConfigChange {
        let revision = settings.look().view().unwrap().revision;
        serde_json::from_value(json!({"revision": revision, "edits": edits})).unwrap()
    }

    #[test]
    fn a_rule_on_one_line_is_read_like_an_entry() {
        let world = World { strict: true, devices: vec!["wlan0".to_owned()], ..World::default() };
        let rule = rule_of("match = { name = \"rsync\", port = 22 }, links = [\"wlan0\"], weight = 0.5").unwrap();
        let (rule, warnings) = program_rule(&rule, &world).unwrap();
        assert_eq!((rule.matcher.name.as_deref(), rule.matcher.port, rule.weight, warnings.len()), (Some("rsync"), Some(22), 0.5, 0));
        for text in ["", "}\nx = {", "rsync", "match = {", "match = { port = 22 }\n}\n[other"] {
            assert!(rule_of(text).is_err() || program_rule(&rule_of(text).unwrap(), &world).is_err(), "{text}");
        }
        let unknown = program_rule(&rule_of("match = { name = \"rsync\" }, links = [\"eth7\"]").unwrap(), &world).unwrap_err();
        assert!(unknown.cause == Cause::Invalid && unknown.title == "Rule refused" && unknown.detail.contains("eth7"), "{unknown}");
    }

    fn scheduler(name: &str) -> serde_json::Value {
        json!([{"op": "set", "path": ["scheduler"], "value": name}])
    }

    #[test]
    fn regression_a_clients_text_makes_the_daemon_open_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, secret, known) = (folder.path().join("braid.toml"), folder.path().join("secret"), folder.path().join("energy.toml"));
        std::fs::write(&path, "scheduler = \"round-robin\"\n").unwrap();
        std::fs::write(&secret, "root:hunter2:19000\n").unwrap();
        std::fs::write(folder.path().join("only-roots-to-list"), "").unwrap();
        let mut settings = Settings::new(Some(path.clone()), "/nonexistent".into());
        let in_force = Config { energy_profiles: Some(known.clone()), ..Config::default() };
        let world = World { relays: Some(Vec::new()), ..World::for_client(&in_force) };
        // A FIFO or an endless device would block the daemon, if it opened them.
        for file in [secret.to_str().unwrap(), "/dev/zero", "/proc/1/environ"] {
            let edit = change(&settings, json!([{"op": "set", "path": ["energy_profiles"], "value": file}]));
            for error in [settings.preview(&edit, &world).unwrap_err(), settings.apply(&edit, &world, |_| Ok(())).unwrap_err()] {
                let text = format!("{error:?}");
                assert!(error.cause == Cause::Invalid && text.contains("is not the current file of energy profiles"), "{text}");
                assert!(!text.contains("hunter2"), "{text}");
            }
        }
        let mut files = json!({"controller": "ssl:192.0.2.1:6653", "certificate": "/c.pem", "key": secret, "ca": "/ca.pem"});
        for path in [secret.to_str().unwrap(), "/dev/zero"] {
            files["key"] = json!(path);
            let edit = change(&settings, json!([{"op": "set", "path": ["datapath"], "value": files}]));
            let error = settings.preview(&edit, &world).unwrap_err();
            assert!(
                error.cause == Cause::Invalid && format!("{error:?}").contains("are not the files of [datapath] in force"),
                "{error:?}"
            );
        }
        // The file in force is not read again: it does not even exist.
        let edit = change(&settings, json!([{"op": "set", "path": ["energy_profiles"], "value": known}]));
        assert!(settings.preview(&edit, &world).is_ok());
        let near = folder.path().join("only-roots-to-lisp");
        let edit = change(&settings, json!([{"op": "set", "path": ["exclude", "applications"], "value": [near]}]));
        let seen = serde_json::to_string(&settings.preview(&edit, &world).unwrap()).unwrap();
        assert!(!seen.contains("only-roots-to-list"), "{seen}");
    }

    #[test]
    fn a_change_is_previewed_applied_and_undone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("braid.toml");
        std::fs::write(&path, "# mine\nscheduler = \"round-robin\" # steady\n").unwrap();
        let mut settings = Settings::new(Some(path.clone()), "/nowhere".into());
        let world = World::default();
        let mut enforced = Vec::new();
        let mut enforce = |config: Config| {
            enforced.push(config.policy.scheduler.name());
            Ok(())
        };
        let wanted = change(&settings, scheduler("operetta"));
        let seen = settings.preview(&wanted, &world).unwrap();
        assert_eq!((seen.text.as_str(), settings.look().view().unwrap().can_undo), ("# mine\nscheduler = \"operetta\" # steady\n", false));
        assert_eq!(settings.apply(&wanted, &world, &mut enforce).unwrap(), seen);
        let view = settings.look().view().unwrap();
        assert_eq!((&view.text, &view.revision, view.can_undo, view.writable), (&seen.text, &seen.revision, true, true));
        let stale = settings.apply(&wanted, &world, &mut enforce).unwrap_err();
        assert_eq!(stale.cause, Cause::Conflict);
        let undone = settings.undo(&world, &mut enforce).unwrap();
        assert_eq!((undone.text.as_str(), undone.can_undo), ("# mine\nscheduler = \"round-robin\" # steady\n", false));
        assert_eq!(settings.undo(&world, &mut enforce).unwrap_err().cause, Cause::Conflict);
        assert_eq!(enforced, ["operetta", "round-robin"]);
    }

    #[test]
    fn an_error_is_reported_with_its_position_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("braid.toml");
        std::fs::write(&path, "scheduler = \"round-robin\"\n").unwrap();
        let mut settings = Settings::new(Some(path.clone()), "/nowhere".into());
        let wrong = change(&settings, scheduler("opereta"));
        let error = settings.apply(&wrong, &World::default(), |_| panic!("must not be applied")).unwrap_err();
        assert_eq!((error.cause, error.findings.len()), (Cause::Invalid, 1));
        assert_eq!((error.findings[0].line, error.findings[0].nearest.as_deref()), (1, Some("operetta")));
        let right = change(&settings, scheduler("operetta"));
        let refused = settings.apply(&right, &World::default(), |_| Err(RequestError::failed("Not applied", "the kernel says no")));
        assert_eq!(refused.unwrap_err().cause, Cause::Failed);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "scheduler = \"round-robin\"\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_existing_error_does_not_block_other_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("braid.toml");
        std::fs::write(&path, "[[app]]\nmatch = { exe = \"/usr/bin/gone\" }\nlinks = [\"eth7\"]\n").unwrap();
        let mut settings = Settings::new(Some(path), "/nowhere".into());
        let world = World { strict: true, files: Files::These { programs: Vec::new(), profiles: Vec::new() }, ..World::default() };
        let fine = change(&settings, scheduler("operetta"));
        assert!(!settings.apply(&fine, &world, |_| Ok(())).unwrap().warnings.is_empty());
        let another = change(&settings, json!([{"op": "app-add", "value": {"match": {"name": "x"}, "links": ["eth8"]}}]));
        let error = settings.apply(&another, &world, |_| Ok(())).unwrap_err();
        assert!(error.cause == Cause::Invalid && error.detail.contains("eth8"));
    }

    #[test]
    fn without_a_file_the_first_change_creates_one_and_undo_empties_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("etc/braid.toml");
        let mut settings = Settings::new(None, path.clone());
        assert_eq!(settings.look().view().unwrap(), ConfigView { revision: revision(""), writable: true, ..ConfigView::default() });
        let first = change(&settings, scheduler("operetta"));
        settings.apply(&first, &World::default(), |_| Ok(())).unwrap();
        assert_eq!((settings.path(), std::fs::read_to_string(&path).unwrap().as_str()), (Some(&*path), "scheduler = \"operetta\"\n"));
        assert_eq!(settings.undo(&World::default(), |_| Ok(())).unwrap().text, "");
    }
}
