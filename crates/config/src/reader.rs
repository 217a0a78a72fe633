//! Reads a TOML document key by key with positions, so that every error is found and shown at its place.

use std::cell::RefCell;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use braid_control::config::{Finding, Severity};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::findings::nearest;

/// Maximum length of a text that a remedy repeats.
const MAX_QUOTED: usize = 60;

/// The text and its findings so far.
pub(super) struct Reader<'a> {
    file: &'a str,
    text: &'a str,
    findings: RefCell<Vec<Finding>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Self {
        Self { file, text, findings: RefCell::default() }
    }

    /// Adds an error; the last argument is the remedy.
    pub(super) fn refuse(&self, span: &Range<usize>, reason: impl Into<String>, remedy: impl Into<String>) {
        self.note(Severity::Error, span, reason.into(), None, Some(remedy.into()));
    }

    /// Adds a warning; the last argument is the remedy.
    pub(super) fn warn(&self, span: &Range<usize>, reason: impl Into<String>, remedy: impl Into<String>) {
        self.note(Severity::Warning, span, reason.into(), None, Some(remedy.into()));
    }

    /// Adds a finding.
    pub(super) fn note(&self, severity: Severity, span: &Range<usize>, reason: String, nearest: Option<String>, remedy: Option<String>) {
        let finding = Finding { nearest, remedy, ..Finding::at(severity, self.file, self.text, span.clone(), reason) };
        let mut findings = self.findings.borrow_mut();
        if !findings.contains(&finding) {
            findings.push(finding);
        }
    }

    /// The findings in the order of the file.
    pub(super) fn into_findings(self) -> Vec<Finding> {
        let mut findings = self.findings.into_inner();
        findings.sort_by_key(|finding| (finding.line, finding.column, finding.severity));
        findings
    }

    /// Line number of a span, for messages such as "the entry in line 3".
    pub(super) fn line(&self, span: &Range<usize>) -> usize {
        Finding::at(Severity::Error, self.file, self.text, span.clone(), String::new()).line
    }
}

/// A table, whose keys are taken one by one.
pub(super) struct Section<'a> {
    pub(super) reader: &'a Reader<'a>,
    pub(super) span: Range<usize>,
    what: &'static str,
    table: &'a DeTable<'a>,
    known: Vec<&'static str>,
    /// Keys of the previous release.
    old: Vec<&'static str>,
}

impl<'a> Section<'a> {
    pub(super) fn new(reader: &'a Reader<'a>, what: &'static str, span: Range<usize>, table: &'a DeTable<'a>) -> Self {
        Self { reader, span, what, table, known: Vec::new(), old: Vec::new() }
    }

    /// The value of `key`, which becomes a known key.
    pub(super) fn take(&mut self, key: &'static str) -> Option<Value<'a>> {
        self.known.push(key);
        self.get(key)
    }

    /// The value of `key`, which must be there.
    pub(super) fn need(&mut self, key: &'static str, remedy: &str) -> Option<Value<'a>> {
        let value = self.take(key);
        if value.is_none() {
            self.reader.refuse(&self.span, format!("{} has no {key}", self.what), remedy);
        }
        value
    }

    /// The value of `key` as `read` reads it. Sets `refused` if the key is there and its value is not usable: an entry must not apply to more than
    /// its other conditions say.
    pub(super) fn condition<T>(&mut self, key: &'static str, refused: &mut bool, read: impl FnOnce(&Value<'a>) -> Option<T>) -> Option<T> {
        let read = read(&self.take(key)?);
        *refused |= read.is_none();
        read
    }

    fn get(&self, key: &'static str) -> Option<Value<'a>> {
        let (_, value) = self.table.iter().find(|(name, _)| name.get_ref() == key)?;
        Some(Value { reader: self.reader, key, span: value.span(), value: value.get_ref() })
    }

    /// The value of `key`, or of its name `before` in the previous release, with a warning. Both together are an error.
    pub(super) fn take_renamed(&mut self, key: &'static str, before: &'static str) -> Option<Value<'a>> {
        self.old.push(before);
        let (new, old) = (self.take(key), self.get(before));
        match (&new, &old) {
            (Some(_), Some(old)) => {
                self.reader.refuse(&old.span, format!("{before} is the old name of {key}"), "remove it, since both are given")
            }
            (None, Some(old)) => old.warn_renamed(before, key),
            _ => {}
        }
        new.or(old)
    }

    /// Number of keys.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The keys that were not taken, with their values, for tables whose keys the user chooses.
    pub(super) fn rest(self) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        let (reader, known) = (self.reader, self.known);
        let rest = self.table.iter().filter(move |(key, _)| !known.contains(&key.get_ref().as_ref()));
        rest.map(move |(key, value)| {
            // Findings about a key of the user's show the value; its name is in their text.
            (key.get_ref().as_ref(), Value { reader, key: "the value", span: value.span(), value: value.get_ref() })
        })
    }

    /// Whether the table is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Reports every key that was not taken.
    pub(super) fn finish(self) {
        for key in self.table.keys().filter(|key| ![&self.known, &self.old].iter().any(|keys| keys.contains(&key.get_ref().as_ref()))) {
            let reason = format!("there is no key \"{}\" in {}", key.get_ref(), self.what);
            let near = nearest(key.get_ref(), self.known.iter().copied());
            let remedy = format!("the keys are: {}", self.known.join(", "));
            self.reader.note(Severity::Error, &key.span(), reason, near, Some(remedy));
        }
    }
}

/// A value with its position. The readers below return `None` after reporting an error.
#[derive(Clone)]
pub(super) struct Value<'a> {
    pub(super) reader: &'a Reader<'a>,
    pub(super) key: &'static str,
    pub(super) span: Range<usize>,
    value: &'a DeValue<'a>,
}

impl<'a> Value<'a> {
    /// A string.
    pub(super) fn text(&self) -> Option<&'a str> {
        match self.value {
            DeValue::String(text) => Some(text),
            _ => self.wrong("a text in quotes"),
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self) -> Option<bool> {
        self.value.as_bool().or_else(|| self.wrong("true or false"))
    }

    /// `true` or `false`, without a finding if it is something else.
    pub(super) fn flag_if(&self) -> Option<bool> {
        self.value.as_bool()
    }

    /// `true` or `false`, where a list is allowed too.
    pub(super) fn flag_or_list(&self) -> Option<bool> {
        self.value.as_bool().or_else(|| self.wrong("true, false or a list of texts"))
    }

    /// An integer within `range`.
    pub(super) fn whole(&self, range: std::ops::RangeInclusive<u64>) -> Option<u64> {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        match self.value {
            DeValue::Integer(number) => {
                let digits = number.as_str().replace('_', "");
                match u64::from_str_radix(&digits, number.radix()).ok().filter(|number| range.contains(number)) {
                    Some(number) => Some(number),
                    None => self.refuse(format!("{} = {number} is not {wanted}", self.key), format!("write {wanted}")),
                }
            }
            _ => self.wrong(&wanted),
        }
    }

    /// A number from `least` to `most`.
    pub(super) fn number(&self, least: f64, most: f64) -> Option<f64> {
        let wanted = if most == f64::MAX { format!("a number of at least {least}") } else { format!("a number from {least} to {most}") };
        let text = match self.value {
            DeValue::Float(number) => number.as_str(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
            _ => return self.wrong(&wanted),
        };
        match text.replace('_', "").parse::<f64>().ok().filter(|number| (least..=most).contains(number)) {
            Some(number) => Some(number),
            None => self.refuse(format!("{} = {text} is not {wanted}", self.key), format!("write {wanted}")),
        }
    }

    /// A number above 0.
    pub(super) fn positive(&self) -> Option<f64> {
        let number = match self.value {
            DeValue::Float(number) => number.as_str().replace('_', "").parse::<f64>().ok(),
            DeValue::Integer(number) => number.as_str().replace('_', "").parse::<f64>().ok(),
            _ => return self.wrong("a number above 0"),
        };
        match number.filter(|number| number.is_finite() && *number > 0.0) {
            Some(number) => Some(number),
            None => self.refuse(format!("{} must be above 0", self.key), "write a number above 0; 1.0 is usual".into()),
        }
    }

    /// An amount or a rate: an integer in the base unit, or a text with a unit.
    pub(super) fn quantity<T: FromStr>(&self, wanted: &str) -> Option<T>
    where
        T::Err: std::fmt::Display,
    {
        let text = match self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            _ => return self.wrong(wanted),
        };
        match text.parse() {
            Ok(quantity) => Some(quantity),
            Err(error) => self.refuse(error.to_string(), format!("write {wanted}")),
        }
    }

    /// A duration: whole seconds, or a text such as `"500 ms"`.
    pub(super) fn duration(&self) -> Option<Duration> {
        const WANTED: &str = "a length of time such as \"500 ms\", \"5 s\", \"2 min\" or \"1 h\"";
        let text = match self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => format!("{} s", number.as_str()),
            _ => return self.wrong(WANTED),
        };
        parse_duration(&text).or_else(|| self.refuse(format!("{text:?} is not a length of time"), format!("write {WANTED}")))
    }

    /// A value with a text form; its parser's error is the reason.
    pub(super) fn parsed<T: FromStr>(&self, wanted: &str) -> Option<T> {
        let text = self.text()?;
        text.parse().ok().or_else(|| self.refuse(format!("{text:?} is not {wanted}"), format!("write {wanted}")))
    }

    /// A path that begins at the root: the daemon's working directory is not the user's.
    pub(super) fn whole_path(&self, example: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.text()?);
        if path.is_absolute() {
            return Some(path);
        }
        self.refuse(format!("{} does not begin with \"/\"", path.display()), format!("write a whole path such as {example}"))
    }

    fn warn_renamed(&self, before: &str, now: &str) {
        self.reader.warn(
            &self.span,
            format!("\"{before}\" is now called \"{now}\""),
            format!("write \"{now}\": the next release does not accept the old name"),
        );
    }

    /// One of some names, or one of the old names in `before`, each with its new name. An old name causes a warning.
    pub(super) fn one_of_renamed<T: Copy>(&self, choices: &[(&'static str, T)], before: &[(&str, &str)]) -> Option<T> {
        if let Some((old, new)) = self.is_text().then(|| self.text()).flatten().and_then(|text| before.iter().find(|(old, _)| *old == text))
        {
            self.warn_renamed(old, new);
            return choices.iter().find(|(name, _)| name == new).map(|(_, value)| *value);
        }
        self.one_of(choices)
    }

    /// One of some names.
    pub(super) fn one_of<T: Copy>(&self, choices: &[(&'static str, T)]) -> Option<T> {
        let text = self.text()?;
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
            return Some(*value);
        }
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        let reason = format!("there is no {} {text:?}", self.key);
        let remedy = Some(format!("write one of: {}", names.join(", ")));
        self.reader.note(Severity::Error, &self.span, reason, nearest(text, names), remedy);
        None
    }

    /// The elements of an array.
    pub(super) fn list(&self) -> Option<Vec<Value<'a>>> {
        match self.value {
            DeValue::Array(array) => Some(array.iter().map(|element| self.element(element)).collect()),
            value => self.no_list(value),
        }
    }

    /// Refuses a value that is not a list. Usually one element was meant, so the remedy shows how to write it.
    fn no_list<T>(&self, value: &DeValue<'_>) -> Option<T> {
        let key = self.key;
        let (reason, remedy) = match value {
            // The key may have square brackets, but only one pair.
            DeValue::Table(_) if matches!(key, "link" | "app" | "access" | "slice" | "host" | "group" | "flow" | "space") => (
                format!("{key} is a single table, but each {key} needs its own entry"),
                format!("write [[{key}]], with two pairs of square brackets, above each entry"),
            ),
            DeValue::String(text) if text.len() <= MAX_QUOTED => {
                (format!("{key} is a single text, but must be a list"), format!("write {key} = [{text:?}]"))
            }
            DeValue::Table(_) => (format!("{key} is a single table, but must be a list"), format!("write {key} = [{{ ... }}]")),
            _ => return self.wrong("a list in square brackets"),
        };
        self.refuse(reason, remedy)
    }

    fn element(&self, element: &'a Spanned<DeValue<'a>>) -> Value<'a> {
        Value { reader: self.reader, key: self.key, span: element.span(), value: element.get_ref() }
    }

    /// A table.
    pub(super) fn section(&self, what: &'static str) -> Option<Section<'a>> {
        match self.value {
            DeValue::Table(table) => Some(Section::new(self.reader, what, self.span.clone(), table)),
            DeValue::Array(_) if what.starts_with('[') => {
                let remedy = format!("write {what} once, with one pair of square brackets");
                self.refuse(format!("{} is a list, but there can be only one {what}", self.key), remedy)
            }
            _ => self.wrong("a table"),
        }
    }

    /// Whether it is a table.
    pub(super) fn is_table(&self) -> bool {
        self.value.is_table()
    }

    /// Whether it is a list.
    pub(super) fn is_list(&self) -> bool {
        self.value.is_array()
    }

    pub(super) fn is_text(&self) -> bool {
        self.value.is_str()
    }

    /// Refuses the value.
    pub(super) fn refuse<T>(&self, reason: String, remedy: String) -> Option<T> {
        self.reader.refuse(&self.span, reason, remedy);
        None
    }

    /// Refuses the user's key of this value.
    pub(super) fn refuse_key<T>(&self, reason: String, near: Option<String>, remedy: String) -> Option<T> {
        self.reader.note(Severity::Error, &self.span, reason, near, Some(remedy));
        None
    }

    /// Refuses a name that is not in `names`, and suggests the nearest.
    pub(super) fn refuse_name<'b, T>(&self, what: &str, text: &str, names: impl IntoIterator<Item = &'b str>, remedy: String) -> Option<T> {
        let reason = format!("there is no {what} {text:?}");
        self.reader.note(Severity::Error, &self.span, reason, nearest(text, names), Some(remedy));
        None
    }

    fn wrong<T>(&self, wanted: &str) -> Option<T> {
        self.refuse(format!("{} is {}, but must be {wanted}", self.key, article(self.value.type_str())), format!("write {wanted}"))
    }
}

fn article(kind: &str) -> String {
    let article = if kind.starts_with(['a', 'i', 'o']) { "an" } else { "a" };
    format!("{article} {kind}")
}

fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))?;
    let number: f64 = text[..end].replace('_', "").parse().ok()?;
    let unit = match text[end..].trim() {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number * unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_are_read() {
        for (text, millis) in [("500 ms", 500), ("5s", 5_000), ("1.5 min", 90_000), ("2h", 7_200_000), ("1 d", 86_400_000)] {
            assert_eq!(parse_duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "5", "s", "-1 s", "5 fortnights", "1e400 s"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    /// Reads `key = TEXT` with `read`. Returns the result and the reasons of the findings.
    fn value<T>(text: &str, read: impl Fn(&Value<'_>) -> Option<T>) -> (Option<T>, Vec<String>) {
        let text = format!("key = {text}");
        let document = DeTable::parse(&text).unwrap();
        let reader = Reader::new("f", &text);
        let got = read(&Section::new(&reader, "the file", document.span(), document.get_ref()).take("key").unwrap());
        (got, reader.into_findings().into_iter().map(|finding| finding.reason).collect())
    }

    #[test]
    fn wrong_types_are_refused_with_the_expected_type() {
        assert_eq!(value("3", |value| value.text().map(str::to_owned)).1, ["key is an integer, but must be a text in quotes"]);
        assert_eq!(value("\"yes\"", |value| value.flag()).1, ["key is a string, but must be true or false"]);
        assert_eq!(value("true", |value| value.list().map(|_| ())).1.len(), 1);
        assert_eq!(value("[]", |value| value.section("x").map(|_| ())).1.len(), 1);
        assert_eq!(value("1979-05-27", |value| value.duration()).1.len(), 1);
    }

    #[test]
    fn regression_one_pair_of_brackets_is_distinguished_from_two() {
        let refused = |text: &str| {
            let document = DeTable::parse(text).unwrap();
            let reader = Reader::new("f", text);
            let mut section = Section::new(&reader, "the file", document.span(), document.get_ref());
            for key in ["link", "links", "probe_targets"] {
                section.take(key).map(|value| value.list().map(|_| ()));
            }
            section.take("exclude").map(|value| value.section("[exclude]").map(|_| ()));
            let finding = reader.into_findings().remove(0);
            (finding.reason, finding.remedy.unwrap())
        };
        let (reason, remedy) = refused("[link]\nname = \"eth0\"\n");
        assert!(reason.starts_with("link is a single table") && remedy.starts_with("write [[link]], with two pairs"), "{reason}: {remedy}");
        assert_eq!(refused("links = \"uplink1\"").1, "write links = [\"uplink1\"]");
        assert_eq!(refused("probe_targets = { url = \"x\" }").1, "write probe_targets = [{ ... }]");
        assert_eq!(refused("links = 3").0, "links is an integer, but must be a list in square brackets");
        assert!(refused("[[exclude]]\nusers = []\n").1.starts_with("write [exclude] once, with one pair"));
    }

    #[test]
    fn numbers_keep_within_their_range() {
        let share = |text| value(text, |value| value.number(0.0, 1.0));
        assert_eq!([share("0").0, share("0.25").0, share("1").0], [Some(0.0), Some(0.25), Some(1.0)]);
        assert_eq!(share("1.5"), (None, vec!["key = 1.5 is not a number from 0 to 1".to_owned()]));
        for text in ["nan", "-0.1", "\"0.5\"", "true"] {
            assert_eq!(share(text).0, None, "{text}");
        }
        let day = |text| value(text, |value| value.whole(1..=31));
        assert_eq!(day("0x1f").0, Some(31));
        assert_eq!(day("32"), (None, vec!["key = 32 is not a whole number from 1 to 31".to_owned()]));
        assert_eq!(day("-1").0, None);
        assert_eq!(value("0.5", |value| value.positive()).0, Some(0.5));
        for text in ["0", "-2", "nan", "inf"] {
            assert_eq!(value(text, |value| value.positive()).0, None, "{text}");
        }
    }
}
