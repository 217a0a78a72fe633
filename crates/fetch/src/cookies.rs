//! Cookies of a file in Netscape's form, as curl and browsers' add-ons write it.

use std::net::IpAddr;

use url::Url;

/// Cookies that may be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cookies {
    all: Vec<Cookie>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Cookie {
    host: String,
    below: bool,
    path: String,
    secure: bool,
    name: String,
    value: String,
}

impl Cookies {
    /// Reads the lines of a file: host, whether names below it count, path, whether over TLS only, expiry, name, value, with tabs between.
    /// `unix`: seconds of Unix time now; what has expired is left out.
    ///
    /// # Errors
    /// The first line that is none, by its number.
    pub fn parse(text: &str, unix: u64) -> Result<Self, String> {
        let mut all = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.strip_prefix("#HttpOnly_").unwrap_or(line);
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = || format!("line {} is no cookie: it needs 7 fields with tabs between, as curl -c writes them", number + 1);
            let fields: Vec<&str> = line.split('\t').collect();
            let [host, below, path, secure, expiry, name, value] = fields[..] else { return Err(bad()) };
            let expiry: u64 = expiry.trim().parse().map_err(|_| bad())?;
            if (expiry != 0 && expiry <= unix) || value.bytes().chain(name.bytes()).any(|byte| byte < b' ' || byte == b';') {
                continue;
            }
            all.push(Cookie {
                below: below.eq_ignore_ascii_case("true"),
                host: host.trim_start_matches('.').to_ascii_lowercase(),
                path: path.to_owned(),
                secure: secure.eq_ignore_ascii_case("true"),
                name: name.to_owned(),
                value: value.to_owned(),
            });
        }
        Ok(Self { all })
    }

    /// What is to be sent with a request, as the value of `Cookie` (RFC 6265 section 5.4); longest paths first.
    pub fn of(&self, url: &Url) -> Option<String> {
        let (host, path) = (url.host_str()?.to_ascii_lowercase(), url.path());
        let mut fit: Vec<&Cookie> = self.all.iter().filter(|cookie| cookie.fits(&host, path, url.scheme() == "https")).collect();
        fit.sort_by_key(|cookie| std::cmp::Reverse(cookie.path.len()));
        let pairs: Vec<String> = fit.iter().map(|cookie| format!("{}={}", cookie.name, cookie.value)).collect();
        (!pairs.is_empty()).then(|| pairs.join("; "))
    }
}

impl Cookie {
    fn fits(&self, host: &str, path: &str, tls: bool) -> bool {
        let below =
            || self.below && host.parse::<IpAddr>().is_err() && host.strip_suffix(&self.host).is_some_and(|front| front.ends_with('.'));
        let inside = path.strip_prefix(&self.path).is_some_and(|rest| rest.is_empty() || self.path.ends_with('/') || rest.starts_with('/'));
        (host == self.host || below()) && inside && (tls || !self.secure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# Netscape HTTP Cookie File\n\n.example.org\tTRUE\t/\tFALSE\t0\tall\t1\nexample.org\tFALSE\t/deep\tFALSE\t0\tdeep\t2\n\
        #HttpOnly_example.org\tFALSE\t/\tTRUE\t0\ttls\t3\nexample.org\tFALSE\t/\tFALSE\t100\told\t4\n";

    #[test]
    fn cookies_go_where_they_belong() {
        let cookies = Cookies::parse(FILE, 1000).unwrap();
        let of = |url: &str| cookies.of(&url.parse().unwrap());
        assert_eq!(of("http://example.org/deep/x").as_deref(), Some("deep=2; all=1"));
        assert_eq!(of("http://example.org/deeper").as_deref(), Some("all=1"));
        assert_eq!(of("https://example.org/").as_deref(), Some("all=1; tls=3"));
        assert_eq!(of("http://www.example.org/deep").as_deref(), Some("all=1"));
        assert_eq!((of("http://badexample.org/"), of("http://org/")), (None, None));
    }

    #[test]
    fn a_line_that_is_no_cookie_is_named() {
        assert!(Cookies::parse("a\tb\n", 0).unwrap_err().contains("line 1"));
    }
}
