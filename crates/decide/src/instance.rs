//! Parsing and errors shared by the problem instances that users write as JSON files.

use serde::de::DeserializeOwned;

/// The error for an instance that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot use the instance: {field}: {reason}")]
pub struct InstanceError {
    /// Location of the error: a path such as `links[0].rate_bps`, or `instance` for the whole file.
    pub field: String,
    /// What is wrong, and what a valid value is.
    pub reason: String,
}

impl InstanceError {
    /// Creates an error for `field` with `reason`.
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

/// Parses exactly one JSON value into the file's type. Trailing text is an error.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, InstanceError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let file = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        // `serde_path_to_error` reports `.` for the root and `?` for an unknown path.
        let field = if [".", "?"].contains(&path.as_str()) { "instance" } else { &path };
        InstanceError::new(field, error.inner().to_string())
    })?;
    json.end().map_err(|error| InstanceError::new("instance", error.to_string()))?;
    Ok(file)
}
