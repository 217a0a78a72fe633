//! Users and passwords by host, from a netrc file.

use crate::credentials::Credentials;

/// A netrc file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Netrc {
    /// By host; `None` is the default entry.
    entries: Vec<(Option<String>, Credentials)>,
}

impl Netrc {
    /// Parses a file. Unknown text is ignored, as in other programs.
    pub fn parse(text: &str) -> Self {
        let mut entries: Vec<(Option<String>, Credentials)> = Vec::new();
        let empty = || Credentials { user: String::new(), password: String::new() };
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let mut words = line.split('#').next().unwrap_or("").split_whitespace();
            while let Some(word) = words.next() {
                match word {
                    "machine" => entries.push((words.next().map(str::to_ascii_lowercase), empty())),
                    "default" => entries.push((None, empty())),
                    "login" | "password" | "account" => {
                        let value = words.next().unwrap_or("").to_owned();
                        match (entries.last_mut(), word) {
                            (Some((_, who)), "login") => who.user = value,
                            (Some((_, who)), "password") => who.password = value,
                            _ => {}
                        }
                    }
                    // A macro ends at the next empty line.
                    "macdef" => {
                        let _ = lines.by_ref().take_while(|line| !line.trim().is_empty()).count();
                    }
                    _ => {}
                }
            }
        }
        Self { entries }
    }

    /// Credentials for `host`.
    pub fn of(&self, host: &str) -> Option<&Credentials> {
        let host = host.to_ascii_lowercase();
        let found = self.entries.iter().find(|(name, _)| name.as_ref().is_none_or(|name| *name == host));
        found.map(|(_, who)| who).filter(|who| !who.user.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_their_own_users_and_others_the_default() {
        let file = "machine a.example login alice password one\nmacdef init\ncd /x login mallory\n\nmachine b.example\n  login bob\n  password two # no\ndefault login guest password g";
        let netrc = Netrc::parse(file);
        let of = |host: &str| netrc.of(host).map(|who| (who.user.as_str(), who.password.as_str()));
        assert_eq!(
            (of("A.example"), of("b.example"), of("c.example")),
            (Some(("alice", "one")), Some(("bob", "two")), Some(("guest", "g")))
        );
        assert_eq!(Netrc::parse("").of("x"), None);
    }
}
