//! Users and passwords, and URLs that contain them.

use std::str::FromStr;

use hyper::header::HeaderValue;
use url::Url;

/// The URL without user and password, safe to show.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    // Setting the user fails only for URLs that cannot contain one.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    url.into()
}

/// User and password for basic authentication (RFC 7617).
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Password.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Value of `Authorization`.
    pub(crate) fn basic(&self) -> Option<HeaderValue> {
        let word = data_encoding::BASE64.encode(format!("{}:{}", self.user, self.password).as_bytes());
        let mut value = HeaderValue::from_str(&format!("Basic {word}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl FromStr for Credentials {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (user, password) = text.split_once(':').ok_or("write USER:PASSWORD")?;
        Ok(Self { user: user.to_owned(), password: password.to_owned() })
    }
}

/// Decodes percent-encoding (RFC 3986, section 2.1).
pub(crate) fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()).filter(|digits| !digits.starts_with('+'));
        match digits.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
