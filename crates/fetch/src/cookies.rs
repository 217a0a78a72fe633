//! Cookies: from a file in Netscape format, as curl and browser extensions write it, and those that servers set during a run.

use std::net::IpAddr;

use url::Url;

/// Limits for cookies from servers: their number, and the length of each name and value (RFC 6265 section 6.1).
const MAX_COOKIES: usize = 300;
const MAX_LENGTH: usize = 4096;

/// Cookies that can be sent.
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
    /// Parses the lines of a file: host, whether subdomains match, path, whether TLS is required, expiry, name, value, separated by tabs. `unix` is
    /// the current time in seconds of Unix time; expired cookies are omitted.
    ///
    /// # Errors
    /// The first invalid line, by number.
    pub fn parse(text: &str, unix: u64) -> Result<Self, String> {
        let mut all = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.strip_prefix("#HttpOnly_").unwrap_or(line);
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = || format!("line {} is not a cookie: write 7 fields separated by tabs, as curl -c does", number + 1);
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

    /// Stores one `Set-Cookie` of a response from `url` (RFC 6265 sections 5.2 and 5.3), unless the host may not set it. `unix` is the current time
    /// in seconds of Unix time. A domain must contain a dot; there is no public suffix list.
    pub(crate) fn store(&mut self, url: &Url, line: &str, unix: u64) {
        let Some((cookie, expired)) = Cookie::set(url, line, unix) else { return };
        self.all.retain(|old| (&old.host, &old.path, &old.name) != (&cookie.host, &cookie.path, &cookie.name));
        if !expired && self.all.len() < MAX_COOKIES {
            self.all.push(cookie);
        }
    }

    /// Value of `Cookie` for a request (RFC 6265 section 5.4), longest paths first.
    pub fn of(&self, url: &Url) -> Option<String> {
        let (host, path) = (url.host_str()?.to_ascii_lowercase(), url.path());
        let mut fit: Vec<&Cookie> = self.all.iter().filter(|cookie| cookie.fits(&host, path, url.scheme() == "https")).collect();
        fit.sort_by_key(|cookie| std::cmp::Reverse(cookie.path.len()));
        let pairs: Vec<String> = fit.iter().map(|cookie| format!("{}={}", cookie.name, cookie.value)).collect();
        (!pairs.is_empty()).then(|| pairs.join("; "))
    }
}

impl Cookie {
    /// Parses a `Set-Cookie` from `url`. Also returns whether the cookie is expired, and thus deletes an older one.
    fn set(url: &Url, line: &str, unix: u64) -> Option<(Self, bool)> {
        let host = url.host_str()?.to_ascii_lowercase();
        let mut parts = line.split(';').map(str::trim);
        let (name, value) = parts.next()?.split_once('=')?;
        let (name, value) = (name.trim(), value.trim());
        let plain = |byte: u8| (b' '..0x7f).contains(&byte);
        if name.is_empty() || name.len() + value.len() > MAX_LENGTH || !line.bytes().all(plain) {
            return None;
        }
        // Directory of the requested path.
        let directory = url.path().rsplit_once('/').map_or("/", |(front, _)| if front.is_empty() { "/" } else { front });
        let mut cookie =
            Self { below: false, path: directory.to_owned(), secure: false, name: name.to_owned(), value: value.to_owned(), host };
        let (mut expires, mut age) = (None, None);
        for (what, value) in parts.map(|part| part.split_once('=').unwrap_or((part, ""))) {
            match (what.trim().to_ascii_lowercase().as_str(), value.trim()) {
                ("domain", domain) if !domain.is_empty() => {
                    let domain = domain.trim_start_matches('.').to_ascii_lowercase();
                    let above = || domain.contains('.') && cookie.host.strip_suffix(&domain).is_some_and(|front| front.ends_with('.'));
                    let named = cookie.host.parse::<IpAddr>().is_err();
                    if cookie.host != domain && !(named && above()) {
                        return None;
                    }
                    (cookie.below, cookie.host) = (named, domain);
                }
                ("path", path) if path.starts_with('/') => cookie.path = path.to_owned(),
                ("secure", _) => cookie.secure = true,
                ("expires", date) => expires = httpdate::parse_http_date(date).ok(),
                ("max-age", seconds) => age = seconds.parse::<i64>().ok(),
                _ => {}
            }
        }
        if cookie.secure && url.scheme() != "https" {
            return None;
        }
        let now = std::time::UNIX_EPOCH + std::time::Duration::from_secs(unix);
        let expired = age.map_or(expires.is_some_and(|expires| expires <= now), |age| age <= 0);
        Some((cookie, expired))
    }

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
    fn cookies_are_sent_to_matching_hosts_and_paths() {
        let cookies = Cookies::parse(FILE, 1000).unwrap();
        let of = |url: &str| cookies.of(&url.parse().unwrap());
        assert_eq!(of("http://example.org/deep/x").as_deref(), Some("deep=2; all=1"));
        assert_eq!(of("http://example.org/deeper").as_deref(), Some("all=1"));
        assert_eq!(of("https://example.org/").as_deref(), Some("all=1; tls=3"));
        assert_eq!(of("http://www.example.org/deep").as_deref(), Some("all=1"));
        assert_eq!((of("http://badexample.org/"), of("http://org/")), (None, None));
    }

    #[test]
    fn servers_set_cookies_for_their_own_hosts() {
        let mut cookies = Cookies::default();
        let mut set = |url: &str, line: &str| cookies.store(&url.parse().unwrap(), line, 1000);
        set("http://www.example.org/a/b", "here=1");
        set("http://www.example.org/", "all=2; Domain=.example.org; Path=/; HttpOnly");
        set("https://www.example.org/", "tls=3; secure; Max-Age=60");
        for refused in ["other=1; Domain=example.net", "top=1; Domain=org", "s=1; Secure", "=1", "none", "c=a\u{7f}"] {
            set("http://www.example.org/", refused);
        }
        set("http://192.0.2.1/", "ip=1; Domain=2.1");
        let of = |url: &str| cookies.of(&url.parse().unwrap());
        assert_eq!(of("http://www.example.org/a/c").as_deref(), Some("here=1; all=2"));
        assert_eq!(of("http://deep.example.org/").as_deref(), Some("all=2"));
        assert_eq!(of("https://www.example.org/").as_deref(), Some("all=2; tls=3"));
        assert_eq!((of("http://example.net/"), of("http://192.0.2.1/")), (None, None));
    }

    #[test]
    fn servers_replace_and_delete_cookies_and_cannot_fill_memory() {
        let url: Url = "http://h.example/".parse().unwrap();
        let mut cookies = Cookies::default();
        cookies.store(&url, "a=1", 1000);
        cookies.store(&url, "a=2; Expires=Thu, 01 Jan 1970 01:00:00 GMT", 1000);
        assert_eq!(cookies.of(&url).as_deref(), Some("a=2"));
        cookies.store(&url, "a=; Expires=Thu, 01 Jan 1970 00:00:01 GMT", 1000);
        assert_eq!(cookies.of(&url), None);
        (0..10_000).for_each(|number| cookies.store(&url, &format!("c{number}=x"), 1000));
        cookies.store(&url, &format!("long={}", "x".repeat(5000)), 1000);
        assert_eq!(cookies.all.len(), MAX_COOKIES);
    }

    #[test]
    fn an_invalid_line_is_reported_by_number() {
        assert!(Cookies::parse("a\tb\n", 0).unwrap_err().contains("line 1"));
    }
}
