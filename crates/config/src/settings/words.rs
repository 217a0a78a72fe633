//! Descriptions of edits.

use toml_edit::{Item, Table};

/// Describes that a key is set; `None` if its value stays the same.
pub(super) fn set(subject: &str, was: Option<&str>, is: &str) -> Option<String> {
    let subject = subject.trim_start_matches(": ");
    match was {
        Some(was) if was == is => None,
        Some(was) => Some(format!("{subject} changes to {is} (was {was})")),
        None => Some(format!("{subject} is set to {is}")),
    }
}

/// Describes that a key is removed.
pub(super) fn unset(subject: &str, was: &str) -> String {
    format!("{subject} returns to its default (was {was})")
}

/// Names a rule by its number and conditions.
pub(super) fn rule(index: usize, table: &Table) -> String {
    format!("rule {} ({})", index + 1, matches(table))
}

/// Describes that a rule is added.
pub(super) fn added(index: usize, table: &Table) -> String {
    let rest: Vec<String> = table.iter().filter(|(key, _)| *key != "match").map(|(key, item)| format!("{key} = {}", plain(item))).collect();
    let rest = if rest.is_empty() { String::new() } else { format!(": {}", rest.join(", ")) };
    format!("rule {} is added for {}{rest}", index + 1, matches(table))
}

/// Describes that a rule is removed.
pub(super) fn removed(index: usize, table: &Table) -> String {
    format!("{} is removed", rule(index, table))
}

/// Describes that a rule is moved.
pub(super) fn moved(index: usize, to: usize, table: &Table) -> String {
    format!("{} becomes rule {}", rule(index, table), to + 1)
}

fn matches(table: &Table) -> String {
    let Some(matcher) = table.get("match").and_then(Item::as_table_like) else { return "all flows".to_owned() };
    let parts: Vec<String> = matcher.iter().map(|(key, item)| format!("{key} = {}", plain(item))).collect();
    parts.join(", ")
}

fn plain(item: &Item) -> String {
    item.as_value().map(|value| value.clone().decorated("", "").to_string()).unwrap_or_else(|| item.to_string().trim().to_owned())
}
