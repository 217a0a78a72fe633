//! Energy profile files: TOML with one `[[profile]]` per row (see `data/energy.toml`), and the same as JSON.

use std::fmt::Write;
use std::sync::LazyLock;

use braid_decide::energy::{Profile, Profiles, Row};
use serde::Deserialize;

/// The profiles Braid ships with.
const SHIPPED: &str = include_str!("../data/energy.toml");

/// Maximum number of profiles in a file or response.
pub const PROFILE_LIMIT: usize = 10_000;
/// Maximum size of a file or response in bytes.
pub const SIZE_LIMIT: usize = 8 << 20;

/// Why profiles are refused.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the energy profiles {path}: {error}; name a readable file")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The format is wrong, or the file is too large.
    #[error("{place} holds no energy profiles: {reason}; write one [[profile]] for each, as `braid energy list --toml` does")]
    Malformed {
        /// The file or address.
        place: String,
        /// The problem.
        reason: String,
    },
    /// Some rows are wrong; none is accepted.
    #[error("{place}: {}", .rows.join("\n"))]
    BadRows {
        /// The file or address.
        place: String,
        /// Number of each wrong row, from 1, and its problem.
        rows: Vec<String>,
    },
}

/// The shipped profiles, parsed once.
static PARSED: LazyLock<Profiles> = LazyLock::new(|| {
    let mut profiles = Profiles::default();
    // Parsing cannot fail: the file is compiled in, and a test parses it.
    profiles.extend(from_toml("the shipped profiles", SHIPPED, Content::Shown).unwrap_or_default());
    profiles
});

/// The profiles shipped with Braid.
pub fn shipped() -> Profiles {
    PARSED.clone()
}

/// Whether a profile is shipped with Braid, with the same figures.
pub fn is_shipped(profile: &Profile) -> bool {
    PARSED.iter().any(|shipped| shipped == profile)
}

/// Whether errors may quote the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Errors may quote it.
    Shown,
    /// Errors must not quote it: their reader may not be allowed to read the document.
    Hidden,
}

/// Reads a TOML document; `place` names it in errors.
pub fn from_toml(place: &str, text: &str, content: Content) -> Result<Vec<Profile>, ProfileError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Document {
        #[serde(default)]
        profile: Vec<toml::Value>,
    }
    let malformed = |error: toml::de::Error| {
        let line = error.span().map_or(1, |span| 1 + text.get(..span.start).unwrap_or_default().matches('\n').count());
        let reason = match content {
            Content::Shown => one_line(&error.to_string()),
            Content::Hidden => format!("line {line} is malformed"),
        };
        ProfileError::Malformed { place: place.to_owned(), reason }
    };
    let document: Document = toml::from_str(text).map_err(malformed)?;
    judge(place, document.profile, |row| {
        row.try_into::<Row>().map_err(|error| match content {
            Content::Shown => error.to_string(),
            Content::Hidden => "its fields are not those of a profile".to_owned(),
        })
    })
}

/// Reads the profile service's JSON: `{"profiles": [...]}`, each with the fields of a row.
pub fn from_json(place: &str, text: &[u8]) -> Result<Vec<Profile>, ProfileError> {
    #[derive(Deserialize)]
    struct Document {
        profiles: Vec<serde_json::Value>,
    }
    let malformed = |error: serde_json::Error| ProfileError::Malformed { place: place.to_owned(), reason: error.to_string() };
    let document: Document = serde_json::from_slice(text).map_err(malformed)?;
    judge(place, document.profiles, |row| serde_json::from_value::<Row>(row).map_err(|error| error.to_string()))
}

fn judge<T>(place: &str, rows: Vec<T>, read: impl Fn(T) -> Result<Row, String>) -> Result<Vec<Profile>, ProfileError> {
    if rows.len() > PROFILE_LIMIT {
        let reason = format!("{} profiles exceed the limit of {PROFILE_LIMIT}", rows.len());
        return Err(ProfileError::Malformed { place: place.to_owned(), reason });
    }
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for (index, row) in rows.into_iter().enumerate() {
        match read(row).and_then(|row| Profile::try_from(row).map_err(|error| error.to_string())) {
            Ok(profile) => good.push(profile),
            Err(reason) => bad.push(format!("profile {}: {}", index + 1, one_line(&reason))),
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(ProfileError::BadRows { place: place.to_owned(), rows: bad }) }
}

/// Writes profiles as a file that [`from_toml`] reads.
pub fn to_toml<'a>(profiles: impl IntoIterator<Item = &'a Profile>) -> String {
    let mut text = String::new();
    for profile in profiles {
        // A row is a flat table, so serialising it cannot fail.
        let row = toml::to_string(profile.row()).unwrap_or_default();
        let _ = writeln!(text, "[[profile]]\n{row}");
    }
    text
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::energy::Technology;
    use braid_model::Rate;

    #[test]
    fn every_technology_has_a_shipped_profile_and_every_row_its_source() {
        let read = from_toml("shipped", SHIPPED, Content::Shown).unwrap();
        assert!(read.len() >= 15 && read.iter().all(|profile| profile.row().source.contains(['(', ','])));
        for (_, technology) in Technology::ALL {
            assert!(shipped().find(None, technology).is_some(), "{technology}");
        }
    }

    #[test]
    fn the_shipped_file_has_the_papers_figures() {
        let profiles = shipped();
        let operetta = profiles.find(Some("Netgear MA701"), Technology::Wifi).unwrap();
        assert_eq!((operetta.row().idle_mw, operetta.row().transmit_mw), (264.0, 990.0));
        let active = |name: &str| profiles.named(name).unwrap().row().transmit_mw;
        assert_eq!(["OPERETTA IF1", "OPERETTA IF2", "OPERETTA IF3"].map(active), [634.0, 95.0, 900.0]);
        // Huang et al.'s LTE at 10 Mbit/s down.
        let lte = profiles.find(Some("smartphone 2012"), Technology::Lte).unwrap();
        assert!((lte.power_at(Rate::from_mbps(10), Rate::ZERO).watts() - 1.80774).abs() < 1e-9);
    }

    #[test]
    fn written_profiles_are_read_back() {
        let all = shipped();
        assert_eq!(from_toml("again", &to_toml(all.iter()), Content::Shown).unwrap(), all.iter().cloned().collect::<Vec<_>>());
        let json = serde_json::json!({ "profiles": all.iter().map(Profile::row).collect::<Vec<_>>() });
        assert_eq!(from_json("again", json.to_string().as_bytes()).unwrap().len(), all.iter().count());
    }

    #[test]
    fn bad_rows_are_refused_with_their_number_and_reason() {
        let good = "[[profile]]\nmodel = \"x\"\ntechnology = \"wifi\"\nidle_mw = 1\nreceive_mw = 2\ntransmit_mw = 3\nsource = \"me\"\n";
        let bad =
            [good.to_owned(), good.replace("idle_mw = 1", "idle_mw = 9"), good.replace("wifi", "smoke"), good.replace("idle", "idel")];
        let said = from_toml("f.toml", &bad.concat(), Content::Shown).unwrap_err().to_string();
        assert_eq!(said.lines().count(), 3, "{said}");
        for part in ["f.toml: profile 2: receive_mw", "profile 3: ", "smoke", "profile 4: ", "idel_mw"] {
            assert!(said.contains(part), "{part} in {said}");
        }
        assert!(from_toml("f.toml", "profile = 3", Content::Shown).unwrap_err().to_string().contains("[[profile]]"));
        assert!(from_json("url", b"[1, 2]").is_err() && from_json("url", b"\xff").is_err());
        let many = serde_json::json!({ "profiles": vec![0; PROFILE_LIMIT + 1] }).to_string();
        assert!(from_json("url", many.as_bytes()).unwrap_err().to_string().contains("10001"));
    }
}
