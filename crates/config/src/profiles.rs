//! Loads energy profile files.

use std::path::Path;

use braid_control::profiles::{Content, ProfileError, SIZE_LIMIT, from_toml};
use braid_decide::energy::Profile;

use crate::named_file;

/// Loads a file.
pub fn load(path: &Path) -> Result<Vec<Profile>, ProfileError> {
    let place = path.display().to_string();
    let text = named_file::read(path, SIZE_LIMIT as u64).map_err(|error| ProfileError::Unreadable { path: place.clone(), error })?;
    // The reader of the error may not be allowed to read the file.
    from_toml(&place, &text, Content::Hidden)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_no_message_quotes_a_file_that_the_configuration_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shadow");
        let secret = "hunter2";
        let row = "model = \"m\"\ntechnology = \"lte\"\nreceive_mw = 1\ntransmit_mw = 1\nsource = \"s\"\n";
        for text in [
            format!("root:{secret}:19000:0:99999:7:::\n"),
            format!("{secret} = 1\n"),
            format!("profile = \"{secret}\"\n"),
            format!("[[profile]]\n{row}{secret} = 1\n"),
            format!("[[profile]]\nmodel = \"m\"\ntechnology = \"{secret}\"\n"),
            format!("a = 1\0{secret}"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = load(&path).unwrap_err().to_string();
            assert!(!error.contains(secret), "{error}");
        }
        std::fs::write(&path, "\n\nbroken\n").unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("line 3"));
    }

    #[test]
    fn a_missing_file_is_named() {
        assert!(load(Path::new("/nonexistent/e.toml")).unwrap_err().to_string().contains("/nonexistent/e.toml"));
    }
}
