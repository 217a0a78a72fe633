//! What the instances that users write have in common: how they are read, and how bad ones are refused.

use serde::de::DeserializeOwned;

/// Why an instance is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot use the instance: {field}: {reason}")]
pub struct InstanceError {
    /// Where: a path such as `links[0].rate_bps`, or `instance` for the whole.
    pub field: String,
    /// What is wrong with it, and what would be right.
    pub reason: String,
}

impl InstanceError {
    /// Of a field, for a reason.
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

/// One JSON value and nothing after it, as the file's own shape.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, InstanceError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let file = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        // What the whole is called, and what is not known.
        let field = if [".", "?"].contains(&path.as_str()) { "instance" } else { &path };
        InstanceError::new(field, error.inner().to_string())
    })?;
    json.end().map_err(|error| InstanceError::new("instance", error.to_string()))?;
    Ok(file)
}
