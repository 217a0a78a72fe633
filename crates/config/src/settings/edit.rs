//! Edits of a configuration's text. Everything else stays as it is, including comments.

use braid_api::Edit;
use serde_json::{Map, Value as Json};
use toml_edit::{ArrayOfTables, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::words;

/// Maximum number of entries of a list in the file, so that a client cannot exhaust the memory.
const MAX_ENTRIES: usize = 1000;
/// Maximum depth of a key.
const MAX_DEPTH: usize = 4;

/// Why an edit is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EditError {
    /// The text is not valid TOML, so it cannot be edited.
    #[error("the file is not valid TOML: {0}")]
    Broken(String),
    /// The edit is not valid.
    #[error("edit {number}: {reason}")]
    Refused {
        /// Number of the edit, from 1.
        number: usize,
        /// The object, the reason and the remedy.
        reason: String,
    },
}

/// Applies the edits in order. Returns the new text and a description of each change.
pub(super) fn apply(text: &str, edits: &[Edit]) -> Result<(String, Vec<String>), EditError> {
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| EditError::Broken(error.to_string()))?;
    let mut changes = Vec::new();
    for (index, edit) in edits.iter().enumerate() {
        let refused = |reason| EditError::Refused { number: index + 1, reason };
        changes.extend(apply_one(&mut document, edit).map_err(refused)?);
    }
    Ok((document.to_string(), changes))
}

type Changes = Result<Vec<String>, String>;

fn apply_one(document: &mut DocumentMut, edit: &Edit) -> Changes {
    match edit {
        Edit::Set { path, value } => {
            let (table, key) = reach(document, path, true)?.ok_or("no such table")?;
            let was = put(table, key, value)?;
            Ok(words::set(&path.join("."), was.as_deref(), &shown(value)).into_iter().collect())
        }
        Edit::Unset { path } => {
            let Some((table, key)) = reach(document, path, false)? else { return Ok(Vec::new()) };
            let Some((was, comment)) = take(table, key) else { return Ok(Vec::new()) };
            if !comment.is_empty() {
                let trailing = document.trailing().as_str().unwrap_or_default().to_owned();
                document.set_trailing(format!("{comment}{trailing}"));
            }
            Ok(vec![words::unset(&path.join("."), &was)])
        }
        Edit::Link { name, set, unset } => link(document, name, set, unset),
        Edit::App { index, set, unset } => {
            let table = entry(document, *index)?;
            let subject = words::rule(*index, table);
            change(table, &subject, set, unset)
        }
        Edit::AppAdd { at, value } => {
            let mut table = Table::new();
            change(&mut table, "", value, &[])?;
            let entries = entries(document, "app", true)?.ok_or("there are no rules")?;
            let place = at.unwrap_or(entries.len());
            within(place, entries.len() + 1)?;
            let words = words::added(place, &table);
            rearrange(entries, |tables| tables.insert(place, table));
            Ok(vec![words])
        }
        Edit::AppRemove { index } => {
            let words = words::removed(*index, entry(document, *index)?);
            let head = detach_head(entry(document, *index)?);
            let entries = entries(document, "app", true)?.ok_or("there are no rules")?;
            rearrange(entries, |tables| drop(tables.remove(*index)));
            let empty = entries.is_empty();
            attach_head(document, *index, &head);
            if empty {
                document.remove("app");
            }
            Ok(vec![words])
        }
        Edit::AppMove { index, to } => {
            let words = words::moved(*index, *to, entry(document, *index)?);
            let entries = entries(document, "app", true)?.ok_or("there are no rules")?;
            within(*to, entries.len())?;
            rearrange(entries, |tables| {
                let table = tables.remove(*index);
                tables.insert(*to, table);
            });
            Ok(if index == to { Vec::new() } else { vec![words] })
        }
    }
}

/// The table that holds the last part of `path`, and that part. Missing tables are created if `make`.
fn reach<'a, 'p>(
    document: &'a mut DocumentMut,
    path: &'p [String],
    make: bool,
) -> Result<Option<(&'a mut dyn TableLike, &'p str)>, String> {
    let Some((key, way)) = path.split_last().filter(|_| path.len() <= MAX_DEPTH) else {
        return Err(format!("path must have 1 to {MAX_DEPTH} parts"));
    };
    if path[0] == "link" || path[0] == "app" {
        return Err(format!("[[{0}]] entries are changed by the operations \"link\" and \"app\", not by a path", path[0]));
    }
    let mut table: &mut dyn TableLike = document.as_table_mut();
    for part in way {
        if !table.contains_key(part) {
            if !make {
                return Ok(None);
            }
            table.insert(part, Item::Table(Table::new()));
        }
        table = table.get_mut(part).and_then(Item::as_table_like_mut).ok_or_else(|| format!("{part} is not a table"))?;
    }
    Ok(Some((table, key)))
}

/// The entries of `[[name]]`.
fn entries<'a>(document: &'a mut DocumentMut, name: &str, make: bool) -> Result<Option<&'a mut ArrayOfTables>, String> {
    if !document.contains_key(name) {
        if !make {
            return Ok(None);
        }
        document.insert(name, Item::ArrayOfTables(ArrayOfTables::new()));
    }
    let written = document.get_mut(name).and_then(Item::as_array_of_tables_mut);
    let entries =
        written.ok_or_else(|| format!("{name} is written as a value: write [[{name}]] entries in the file to change them here"))?;
    if entries.len() >= MAX_ENTRIES {
        return Err(format!("there are {MAX_ENTRIES} [[{name}]] entries: remove some"));
    }
    Ok(Some(entries))
}

fn entry(document: &mut DocumentMut, index: usize) -> Result<&mut Table, String> {
    let Some(entries) = entries(document, "app", false)? else { return Err("there are no rules".to_owned()) };
    let length = entries.len();
    within(index, length)?;
    entries.get_mut(index).ok_or_else(|| "there are no rules".to_owned())
}

fn within(place: usize, length: usize) -> Result<(), String> {
    if place < length { Ok(()) } else { Err(format!("index {place} is out of range: there are {length} (counted from 0)")) }
}

fn link(document: &mut DocumentMut, name: &str, set: &Map<String, Json>, unset: &[String]) -> Changes {
    if name.is_empty() || name.contains('*') {
        return Err(format!("{name:?} is not the name of a single link"));
    }
    let entries = entries(document, "link", true)?.ok_or("there are no links")?;
    let is_it = |table: &Table| table.get("name").and_then(Item::as_str) == Some(name);
    let found = entries.iter().position(is_it);
    // The first matching entry applies, and an entry without a name may match this link by its kind: insert before it.
    let at = found.or_else(|| entries.iter().position(|table| !table.contains_key("name"))).unwrap_or(entries.len());
    if found.is_none() {
        let mut table = Table::new();
        table.insert("name", toml_edit::value(name));
        rearrange(entries, |tables| tables.insert(at, table));
    }
    let table = entries.get_mut(at).ok_or("there are no links")?;
    change(table, name, set, unset)
}

fn change(table: &mut Table, subject: &str, set: &Map<String, Json>, unset: &[String]) -> Changes {
    let mut changes = Vec::new();
    for (key, value) in set {
        let was = put(table, key, value)?;
        changes.extend(words::set(&format!("{subject}: {key}"), was.as_deref(), &shown(value)));
    }
    for key in unset {
        let Some((was, comment)) = take(table, key) else { continue };
        if !comment.is_empty() {
            let above = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or("\n").to_owned();
            table.decor_mut().set_prefix(format!("{above}{comment}"));
        }
        changes.push(words::unset(&format!("{subject}: {key}"), &was));
    }
    Ok(changes)
}

/// Sets a key and keeps the comments around it. Returns the old value.
fn put(table: &mut dyn TableLike, key: &str, value: &Json) -> Result<Option<String>, String> {
    let mut value = toml(value).map_err(|reason| format!("{key}: {reason}"))?;
    let was = table.get(key).map(written);
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        None => drop(table.insert(key, Item::Value(value))),
    }
    Ok(was)
}

/// Removes a key. Its comments move to the next key of the table; if there is none, they are returned.
fn take(table: &mut dyn TableLike, key: &str) -> Option<(String, String)> {
    let place = table.iter().position(|(name, _)| name == key)?;
    let prefix = table.key(key).and_then(|key| key.leaf_decor().prefix()).and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned();
    let item = table.remove(key)?;
    let suffix = item.as_value().and_then(|value| value.decor().suffix()).and_then(|suffix| suffix.as_str()).unwrap_or_default();
    let mut comment = if prefix.contains('#') { prefix } else { String::new() };
    if suffix.contains('#') {
        comment.push_str(&format!("{}\n", suffix.trim()));
    }
    let next = table.iter().nth(place).map(|(name, _)| name.to_owned());
    if let Some(next) = next.filter(|_| !comment.is_empty()) {
        attach_comment(table, &next, &mut comment);
    }
    Some((written(&item), comment))
}

/// Puts a comment above a key or table and clears it; leaves it if that place cannot hold a comment.
fn attach_comment(table: &mut dyn TableLike, key: &str, comment: &mut String) {
    let with =
        |old: Option<&toml_edit::RawString>, comment: &str| format!("{comment}{}", old.and_then(|old| old.as_str()).unwrap_or_default());
    let first = match table.get_mut(key) {
        Some(Item::Table(table)) if !table.is_dotted() && !table.is_implicit() => Some(table),
        Some(Item::ArrayOfTables(tables)) => tables.get_mut(0),
        Some(Item::Value(_)) => {
            if let Some(mut key) = table.key_mut(key) {
                let prefix = with(key.leaf_decor().prefix(), &std::mem::take(comment));
                key.leaf_decor_mut().set_prefix(prefix);
            }
            return;
        }
        _ => None,
    };
    if let Some(table) = first {
        let prefix = with(table.decor().prefix(), &std::mem::take(comment));
        table.decor_mut().set_prefix(prefix);
    }
}

fn written(item: &Item) -> String {
    match item {
        Item::Value(value) => value.clone().decorated("", "").to_string(),
        Item::Table(table) => table.clone().into_inline_table().to_string(),
        other => other.to_string(),
    }
}

fn shown(value: &Json) -> String {
    toml(value).map(|value| value.to_string()).unwrap_or_default()
}

/// Converts a JSON value to TOML.
fn toml(value: &Json) -> Result<Value, String> {
    Ok(match value {
        Json::Null => return Err("TOML has no null: use unset".to_owned()),
        Json::Bool(flag) => (*flag).into(),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => whole.into(),
            (None, Some(real)) if number.is_f64() && real.is_finite() => real.into(),
            _ => return Err(format!("TOML cannot represent the number {number}")),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(values) => Value::Array(values.iter().map(toml).collect::<Result<_, _>>()?),
        Json::Object(map) => {
            let mut table = InlineTable::new();
            for (key, value) in map {
                table.insert(key, toml(value)?);
            }
            Value::InlineTable(table)
        }
    })
}

/// Reorders entries. Each table, and each table within it, stores its position in the text as a number. These numbers are reassigned in the
/// order of the text.
fn rearrange(entries: &mut ArrayOfTables, how: impl FnOnce(&mut Vec<Table>)) {
    let mut places: Vec<isize> = entries.iter().filter_map(Table::position).collect();
    places.sort_unstable();
    let mut tables: Vec<Table> = entries.iter().cloned().collect();
    how(&mut tables);
    entries.clear();
    for (index, mut table) in tables.into_iter().enumerate() {
        place(&mut table, places.get(index).or(places.last()).copied());
        entries.push(table);
    }
}

fn place(table: &mut Table, position: Option<isize>) {
    table.set_position(position);
    for (_, item) in table.iter_mut() {
        match item {
            Item::Table(table) => place(table, position),
            Item::ArrayOfTables(tables) => tables.iter_mut().for_each(|table| place(table, position)),
            _ => {}
        }
    }
}

/// Removes the part above an entry that a blank line separates from it: a comment that concerns more than this entry.
fn detach_head(table: &mut Table) -> String {
    let above = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned();
    above.rfind("\n\n").map_or(String::new(), |end| above[..=end].to_owned())
}

/// Puts that part above the entry that took the place.
fn attach_head(document: &mut DocumentMut, index: usize, head: &str) {
    if !head.contains('#') {
        return;
    }
    let next = document.get_mut("app").and_then(Item::as_array_of_tables_mut).and_then(|entries| entries.get_mut(index));
    match next {
        Some(table) => {
            let above = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or("\n").to_owned();
            table.decor_mut().set_prefix(format!("{head}{above}"));
        }
        None => {
            let trailing = document.trailing().as_str().unwrap_or_default().to_owned();
            document.set_trailing(format!("{head}{trailing}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::policy::BondScheduler;
    use braid_decide::tradeoff::UtilityFunction;
    use serde_json::json;

    const FILE: &str = r#"# Ada's laptop.
version = 1
scheduler = "round-robin"  # steady

# At home.
[[link]]
name = "wlan0" # the good one
# It costs nothing.
metered = false

[[link]]
kind = "cellular"
role = "backup"

# Rules. The first counts.

# Browsers.
[[app]]
match = { name = "firefox" }
links = ["wlan0"]

# Backups.
[[app]]
links = ["wlan0"]
[app.match]
name = "restic"

[exclude]
users = [0]
# The end.
"#;

    fn edits(value: serde_json::Value) -> Vec<Edit> {
        serde_json::from_value(value).unwrap()
    }

    fn edited(value: serde_json::Value) -> (String, Vec<String>) {
        let (text, changes) = apply(FILE, &edits(value)).unwrap();
        assert!(text.parse::<DocumentMut>().is_ok(), "{text}");
        (text, changes)
    }

    /// The comments of a text in order.
    fn comments(text: &str) -> Vec<String> {
        let comment = |line: &str| line.split_once('#').map(|(_, comment)| comment.trim().to_owned());
        text.lines().filter_map(comment).collect()
    }

    #[test]
    fn only_the_named_keys_change() {
        assert_eq!(edited(json!([])), (FILE.to_owned(), vec![]));
        let (text, changes) = edited(json!([{"op": "set", "path": ["scheduler"], "value": "operetta"}]));
        assert_eq!(text, FILE.replace("\"round-robin\"  # steady", "\"operetta\"  # steady"));
        assert_eq!(changes, ["scheduler changes to \"operetta\" (was \"round-robin\")"]);
        let (text, changes) = edited(json!([{"op": "link", "name": "wlan0", "set": {"metered": true, "cap": "10 GB"}}]));
        assert_eq!(text, FILE.replace("metered = false\n", "metered = true\ncap = \"10 GB\"\n"));
        assert_eq!(changes, ["wlan0: cap is set to \"10 GB\"", "wlan0: metered changes to true (was false)"]);
        let (text, changes) = edited(json!([{"op": "unset", "path": ["exclude", "users"]}, {"op": "unset", "path": ["measure", "every"]}]));
        assert!(!text.contains("users") && text.contains("# The end."), "{text}");
        assert_eq!(changes, ["exclude.users returns to its default (was [0])"]);
        let (text, _) = edited(json!([{"op": "set", "path": ["measure", "every"], "value": "2 h"}]));
        assert_eq!(comments(&text), comments(FILE));
        assert!(text.contains("[measure]\nevery = \"2 h\"\n"), "{text}");
    }

    #[test]
    fn a_link_without_an_entry_gets_one_before_those_that_might_match_it() {
        let (text, changes) = edited(json!([{"op": "link", "name": "lte0", "set": {"role": "backup"}}]));
        let (new, kind) = (text.find("name = \"lte0\"").unwrap(), text.find("kind = \"cellular\"").unwrap());
        assert!(text.find("wlan0").unwrap() < new && new < kind, "{text}");
        assert_eq!((comments(&text), changes), (comments(FILE), vec!["lte0: role is set to \"backup\"".to_owned()]));
    }

    #[test]
    fn rules_are_added_moved_and_removed_with_their_own_comments() {
        let names = |text: &str| -> Vec<String> {
            let document: DocumentMut = text.parse().unwrap();
            let name = |table: &Table| table["match"]["name"].as_str().unwrap().to_owned();
            document.get("app").and_then(Item::as_array_of_tables).map(|rules| rules.iter().map(name).collect()).unwrap_or_default()
        };
        let rule = json!({"match": {"name": "curl"}, "links": ["lte0"]});
        for (at, order) in [
            (json!(0), ["curl", "firefox", "restic"]),
            (json!(1), ["firefox", "curl", "restic"]),
            (json!(null), ["firefox", "restic", "curl"]),
        ] {
            let (text, changes) = edited(json!([{"op": "app-add", "at": at, "value": rule}]));
            assert_eq!((names(&text), comments(&text)), (order.map(str::to_owned).to_vec(), comments(FILE)), "{text}");
            assert!(changes[0].contains("curl"), "{changes:?}");
        }
        let (text, changes) = edited(json!([{"op": "app-move", "index": 1, "to": 0}]));
        assert_eq!(names(&text), ["restic", "firefox"]);
        assert!(text.find("# Backups.").unwrap() < text.find("restic").unwrap(), "{text}");
        assert!(text.find("restic").unwrap() < text.find("# Browsers.").unwrap(), "{text}");
        assert_eq!(changes, ["rule 2 (name = \"restic\") becomes rule 1"]);
        let (text, changes) = edited(json!([{"op": "app-remove", "index": 0}]));
        assert_eq!(names(&text), ["restic"]);
        assert!(text.contains("# Rules. The first counts.") && !text.contains("# Browsers."), "{text}");
        assert_eq!(changes, ["rule 1 (name = \"firefox\") is removed"]);
        let (text, _) = edited(json!([{"op": "app-remove", "index": 1}, {"op": "app-remove", "index": 0}]));
        assert!(!text.contains("[[app]]") && !text.contains("app.match") && text.contains("# Rules. The first counts."), "{text}");
        let (text, changes) = edited(json!([{"op": "app", "index": 1, "set": {"class": "bulk"}, "unset": ["links", "prefer"]}]));
        assert_eq!((names(&text), changes.len()), (vec!["firefox".to_owned(), "restic".to_owned()], 2));
    }

    #[test]
    fn invalid_edits_are_refused_with_their_number() {
        for (edit, reason) in [
            (json!({"op": "set", "path": [], "value": 1}), "1 to 4 parts"),
            (json!({"op": "set", "path": ["a", "b", "c", "d", "e"], "value": 1}), "1 to 4 parts"),
            (json!({"op": "set", "path": ["scheduler", "x"], "value": 1}), "scheduler is not a table"),
            (json!({"op": "set", "path": ["link"], "value": []}), "by the operations"),
            (json!({"op": "set", "path": ["detect"], "value": null}), "no null"),
            (json!({"op": "set", "path": ["detect"], "value": u64::MAX}), "TOML cannot represent"),
            (json!({"op": "link", "name": "wlan*", "set": {}}), "not the name of a single link"),
            (json!({"op": "app", "index": 2, "set": {}}), "out of range: there are 2"),
            (json!({"op": "app-move", "index": 0, "to": 2}), "out of range"),
            (json!({"op": "app-add", "at": 3, "value": {}}), "out of range"),
        ] {
            let ok = json!({"op": "set", "path": ["detect"], "value": false});
            let error = apply(FILE, &edits(json!([ok, edit]))).unwrap_err().to_string();
            assert!(error.starts_with("edit 2: ") && error.contains(reason), "{edit}: {error}");
        }
        assert!(matches!(apply("a = ", &[]), Err(EditError::Broken(_))));
        let value = "app = [{ match = { name = \"x\" } }]\n";
        let error = apply(value, &edits(json!([{"op": "app-remove", "index": 0}]))).unwrap_err().to_string();
        assert!(error.contains("write [[app]] entries"), "{error}");
    }

    #[test]
    fn comments_are_kept_when_their_key_is_removed() {
        for edit in [
            json!({"op": "unset", "path": ["version"]}),
            json!({"op": "unset", "path": ["scheduler"]}),
            json!({"op": "unset", "path": ["exclude", "users"]}),
            json!({"op": "link", "name": "wlan0", "unset": ["metered"]}),
            json!({"op": "link", "name": "wlan0", "unset": ["name"]}),
        ] {
            let (text, changes) = edited(json!([edit]));
            let (mut had, mut has) = (comments(FILE), comments(&text));
            had.sort();
            has.sort();
            assert_eq!((has, changes.len()), (had, 1), "{edit}: {text}");
        }
        let (text, _) = edited(json!([{"op": "unset", "path": ["version"]}, {"op": "unset", "path": ["scheduler"]}]));
        assert!(text.starts_with("# Ada's laptop.\n# steady\n"), "{text}");
    }

    #[test]
    fn the_scheduler_of_bonds_and_a_step_of_utility_can_be_set_and_reset() {
        let change = |text: &str, all: Json| apply(text, &edits(all)).unwrap().0;
        let policy =
            |text: &str| crate::parse("f", text, &crate::World::default()).unwrap_or_else(|error| panic!("{error}: {text}")).policy;
        let copies = json!([
            {"op": "set", "path": ["bond", "scheduler"], "value": "redundant"},
            {"op": "set", "path": ["bond", "copies"], "value": 3},
            {"op": "set", "path": ["utility"], "value": {"threshold": 0.3, "above": 1.0, "below": 0.2}},
        ]);
        let text = change("", copies);
        assert_eq!(policy(&text).bond_scheduler, Some(BondScheduler::Redundant(3)));
        assert_eq!(policy(&text).utility.utility, UtilityFunction::Step { threshold: 0.3, above: 1.0, below: 0.2 });
        let drop_copies = json!({"op": "unset", "path": ["bond", "copies"]});
        let text = change(&text, json!([{"op": "set", "path": ["bond", "scheduler"], "value": "rtt-share"}, drop_copies]));
        assert_eq!(policy(&text).bond_scheduler, Some(BondScheduler::RttShare));
        let text = change(&text, json!([{"op": "unset", "path": ["bond", "scheduler"]}, drop_copies]));
        assert_eq!(policy(&text).bond_scheduler, None);
        assert_eq!(apply("", &edits(json!([drop_copies]))).unwrap().1, [""; 0], "nothing to take out is no change");
    }

    #[test]
    fn an_empty_file_can_be_filled() {
        let all = edits(json!([
            {"op": "set", "path": ["scheduler"], "value": "operetta"},
            {"op": "set", "path": ["utility"], "value": {"on_battery": 0.5, "plugged_in": 1.0}},
            {"op": "link", "name": "wlan0", "set": {"role": "backup"}},
            {"op": "app-add", "value": {"match": {"exe": "/usr/bin/curl \"x\""}, "carry": "direct"}},
        ]));
        let (text, changes) = apply("", &all).unwrap();
        assert!(crate::parse("f", &text, &crate::World::default()).is_ok(), "{text}");
        assert_eq!(changes.len(), 4);
    }
}
