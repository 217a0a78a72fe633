//! Evaluates the head of a response for a download: RFC 9110 sections 8.8, 13.1.5, 14 and 15.

use std::time::Duration;

use braid_model::ByteCount;
use braid_range::{Failure, Head, Span};
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::credentials::shown;
use crate::error::FetchError;

/// `Last-Modified` is a strong validator only if it lies this far before `Date`: the file could change twice within a second.
const MIN_MODIFIED_AGE: Duration = Duration::from_secs(60);

/// Validator that identifies one version of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Validator {
    /// A strong entity tag, with its quotes.
    Tag(String),
    /// `Last-Modified`, verbatim.
    Modified(String),
}

impl Validator {
    /// Value of `If-Range`.
    pub(crate) fn value(&self) -> &str {
        match self {
            Self::Tag(value) | Self::Modified(value) => value,
        }
    }

    /// The strong validator of a response, if it has one.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let tag = text(headers, header::ETAG).filter(|tag| tag.len() >= 2 && tag.starts_with('"') && tag.ends_with('"'));
        if let Some(tag) = tag {
            return Some(Self::Tag(tag.to_owned()));
        }
        let modified = text(headers, header::LAST_MODIFIED)?;
        let date = httpdate::parse_http_date(text(headers, header::DATE)?).ok()?;
        let settled = date.duration_since(httpdate::parse_http_date(modified).ok()?).is_ok_and(|age| age >= MIN_MODIFIED_AGE);
        settled.then(|| Self::Modified(modified.to_owned()))
    }

    /// Whether a response belongs to the version that this validator identifies.
    fn matches(&self, headers: &HeaderMap) -> bool {
        match self {
            Self::Tag(tag) => text(headers, header::ETAG) == Some(tag),
            Self::Modified(modified) => text(headers, header::LAST_MODIFIED) == Some(modified),
        }
    }
}

/// A request for a file or a part of it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) url: Url,
    /// Target of the request, verbatim, if it differs from the URL.
    pub(crate) target: Option<Uri>,
    /// `None` requests the whole file.
    pub(crate) span: Option<Span>,
    /// Validator of the version that the data so far belongs to.
    pub(crate) expected: Option<Validator>,
    /// The user asked for content encodings, so any is accepted.
    pub(crate) encoded: bool,
}

/// What to do with a response.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ResponseAction {
    /// The body belongs to the file.
    Body { head: Head, validator: Option<Validator> },
    /// The file is empty, whatever the body contains.
    Empty,
    /// The response redirects to this URL.
    Redirect(Url),
    /// The response is useless.
    Refused(Failure, FetchError),
}

/// Evaluates a response by its head.
pub(crate) fn evaluate(asked: &Asked, status: StatusCode, headers: &HeaderMap) -> ResponseAction {
    match status.as_u16() {
        200 | 203 => whole(asked, headers),
        204 if asked.expected.is_none() => ResponseAction::Empty,
        206 => part(asked, headers),
        301 | 302 | 303 | 307 | 308 => redirect(asked, status, headers),
        416 => unsatisfied(asked, headers),
        429 | 503 => ResponseAction::Refused(Failure::Refused { wait: wait(headers) }, refused(asked, status)),
        408 | 425 | 500 | 502 | 504 => ResponseAction::Refused(Failure::Refused { wait: None }, refused(asked, status)),
        _ => ResponseAction::Refused(Failure::Source, refused(asked, status)),
    }
}

fn refused(asked: &Asked, status: StatusCode) -> FetchError {
    FetchError::Status { url: shown(&asked.url), status: status.to_string() }
}

fn protocol(asked: &Asked, reason: impl Into<String>) -> FetchError {
    FetchError::Protocol { url: shown(&asked.url), reason: reason.into() }
}

fn changed(asked: &Asked, reason: impl Into<String>) -> ResponseAction {
    ResponseAction::Refused(Failure::Changed, FetchError::Changed { url: shown(&asked.url), reason: reason.into() })
}

/// The whole file follows: it was requested, or the server does not support ranges, or `If-Range` found another version.
fn whole(asked: &Asked, headers: &HeaderMap) -> ResponseAction {
    if let Some(action) = compressed(asked, headers) {
        return action;
    }
    if let Some(expected) = &asked.expected
        && !expected.matches(headers)
    {
        return changed(asked, format!("the validator was {} before", expected.value()));
    }
    let validator = Validator::of(headers);
    let head = Head { size: content_length(headers).map(ByteCount::new), span: None, joinable: validator.is_some() };
    ResponseAction::Body { head, validator }
}

/// A range follows.
fn part(asked: &Asked, headers: &HeaderMap) -> ResponseAction {
    let wrong = |reason: String| ResponseAction::Refused(Failure::NoRanges, protocol(asked, reason));
    let Some(wanted) = asked.span else {
        return wrong("the server sent a part of the file, but Braid requested all of it".to_owned());
    };
    if text(headers, header::CONTENT_TYPE).is_some_and(|kind| kind.to_ascii_lowercase().starts_with("multipart/byteranges")) {
        return wrong("the server sent several ranges, but Braid requested one".to_owned());
    }
    let said = text(headers, header::CONTENT_RANGE).unwrap_or("none");
    let Some((span, Some(size))) = content_range(said) else {
        return wrong(format!("the server sent a range with an invalid position or size (Content-Range: {said})"));
    };
    if span.start() != wanted.start() || span.end() > ByteCount::new(size) || span.is_empty() {
        return wrong(format!("the server sent the range {said}, but Braid requested {}-", wanted.start().get()));
    }
    if content_length(headers).is_some_and(|length| length != span.len().get()) {
        return wrong(format!("the server's range ({said}) does not match its length ({})", content_length(headers).unwrap_or(0)));
    }
    if let Some(action) = compressed(asked, headers) {
        return action;
    }
    let validator = Validator::of(headers);
    if let Some(expected) = &asked.expected
        && !expected.matches(headers)
    {
        // A server that sent a validator before and sends none now proves nothing.
        return match headers.contains_key(header::ETAG) || headers.contains_key(header::LAST_MODIFIED) {
            true => changed(asked, format!("the validator was {} before", expected.value())),
            false => wrong("the server sent a range without a validator, so it may belong to another version of the file".to_owned()),
        };
    }
    let joinable = validator.is_some() || asked.expected.is_some();
    ResponseAction::Body {
        head: Head { size: Some(ByteCount::new(size)), span: Some(span), joinable },
        validator: validator.or_else(|| asked.expected.clone()),
    }
}

/// The server has no such range.
fn unsatisfied(asked: &Asked, headers: &HeaderMap) -> ResponseAction {
    let size =
        text(headers, header::CONTENT_RANGE).and_then(|said| said.strip_prefix("bytes */")).and_then(|size| size.trim().parse().ok());
    match (size, &asked.expected, asked.span) {
        (Some(0u64), None, Some(_)) => ResponseAction::Empty,
        (Some(size), Some(_), Some(span)) if size < span.end().get() => changed(asked, format!("its size is now {size} bytes")),
        _ => ResponseAction::Refused(Failure::NoRanges, protocol(asked, "the server refused a valid range (416)")),
    }
}

fn redirect(asked: &Asked, status: StatusCode, headers: &HeaderMap) -> ResponseAction {
    let refuse = |reason: String| ResponseAction::Refused(Failure::Source, protocol(asked, reason));
    let Some(location) = text(headers, header::LOCATION) else {
        return refuse(format!("the server redirected ({status}) without a destination"));
    };
    match asked.url.join(location) {
        Ok(mut url) if matches!(url.scheme(), "http" | "https") && url.host_str().is_some_and(|host| !host.is_empty()) => {
            if url.fragment().is_none() {
                url.set_fragment(asked.url.fragment());
            }
            // Reject URLs here that cannot be requested later.
            match url.as_str().parse::<Uri>() {
                Ok(_) => ResponseAction::Redirect(url),
                Err(error) => refuse(format!("the server redirected to an invalid URL ({location:?}: {error})")),
            }
        }
        Ok(url) => refuse(format!("the server redirected to {}, which is neither http nor https", shown(&url))),
        Err(error) => refuse(format!("the server redirected to an invalid URL ({location:?}: {error})")),
    }
}

/// A body that is encoded although the request did not allow it.
fn compressed(asked: &Asked, headers: &HeaderMap) -> Option<ResponseAction> {
    let encoding = text(headers, header::CONTENT_ENCODING).map(str::trim).filter(|encoding| !encoding.is_empty())?;
    if asked.encoded || encoding.eq_ignore_ascii_case("identity") {
        return None;
    }
    let error = FetchError::Encoded { url: shown(&asked.url), encoding: encoding.to_owned() };
    Some(ResponseAction::Refused(Failure::Source, error))
}

/// Wait that the server requests. A date counts as unknown.
fn wait(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = text(headers, header::RETRY_AFTER)?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.min(24 * 3600)))
}

/// Parses `bytes FIRST-LAST/SIZE`; the size is `None` for `*`.
fn content_range(said: &str) -> Option<(Span, Option<u64>)> {
    let said = said.trim();
    let rest = said.get(..6).filter(|unit| unit.eq_ignore_ascii_case("bytes ")).and(said.get(6..))?;
    let (range, size) = rest.split_once('/')?;
    let (first, last) = range.trim().split_once('-')?;
    let (first, last): (u64, u64) = (number(first)?, number(last)?);
    let end = last.checked_add(1).filter(|_| first <= last)?;
    let size = if size.trim() == "*" { None } else { Some(number(size)?) };
    Some((Span::new(ByteCount::new(first), ByteCount::new(end)), size))
}

/// Value of `Content-Length`.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    number(text(headers, header::CONTENT_LENGTH)?)
}

/// Accepts digits only: `parse` also accepts a sign.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// First value of a header field, if it is text.
pub(crate) fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    fn asked(from: u64, to: u64) -> Asked {
        let span = Some(Span::new(ByteCount::new(from), ByteCount::new(to)));
        Asked { url: "http://host/a/file?q#f".parse().unwrap(), target: None, span, expected: None, encoded: false }
    }

    const FULL: [(&str, &str); 3] = [("content-range", "bytes 0-9/100"), ("content-length", "10"), ("etag", "\"a\"")];

    #[test]
    fn only_the_requested_range_is_accepted() {
        let good = evaluate(&asked(0, 10), StatusCode::PARTIAL_CONTENT, &headers(&FULL));
        let ResponseAction::Body { head, validator } = good else { panic!("{good:?}") };
        assert_eq!((head.size, head.joinable, validator), (Some(ByteCount::new(100)), true, Some(Validator::Tag("\"a\"".into()))));
        for (range, length) in [
            ("bytes 1-10/100", "10"),
            ("bytes 0-9/*", "10"),
            ("bytes 0-9", "10"),
            ("bytes 9-0/100", "10"),
            ("bytes 0-9/100", "11"),
            ("bytes 0-99/10", "100"),
            ("bytes +0-9/100", "10"),
            ("bytes 0-18446744073709551615/100", "10"),
            ("lines 0-9/100", "10"),
            ("bytés", "10"),
        ] {
            let bad =
                evaluate(&asked(0, 10), StatusCode::PARTIAL_CONTENT, &headers(&[("content-range", range), ("content-length", length)]));
            assert!(matches!(bad, ResponseAction::Refused(Failure::NoRanges, _)), "{range} {length}: {bad:?}");
        }
    }

    #[test]
    fn only_strong_validators_count() {
        let of = |lines: &[(&str, &str)]| Validator::of(&headers(lines));
        assert_eq!(of(&[("etag", "\"x\"")]), Some(Validator::Tag("\"x\"".into())));
        for weak in ["W/\"x\"", "x", "\"", ""] {
            assert_eq!(of(&[("etag", weak)]), None, "{weak}");
        }
        let date = |at: &str, modified: &str| of(&[("date", at), ("last-modified", modified)]);
        let (noon, before, now) = ("Sun, 06 Nov 1994 12:00:00 GMT", "Sun, 06 Nov 1994 11:00:00 GMT", "Sun, 06 Nov 1994 12:00:10 GMT");
        assert_eq!(date(noon, before), Some(Validator::Modified(before.into())));
        assert_eq!((date(now, noon), date(before, noon), date("x", noon)), (None, None, None));
    }

    #[test]
    fn another_version_of_the_file_is_detected() {
        let asked = Asked { expected: Some(Validator::Tag("\"old\"".into())), ..asked(0, 10) };
        for status in [StatusCode::OK, StatusCode::PARTIAL_CONTENT] {
            let action = evaluate(&asked, status, &headers(&FULL));
            assert!(matches!(action, ResponseAction::Refused(Failure::Changed, _)), "{action:?}");
        }
        let silent = evaluate(&asked, StatusCode::PARTIAL_CONTENT, &headers(&FULL[..2]));
        assert!(matches!(silent, ResponseAction::Refused(Failure::NoRanges, _)), "a missing validator is no proof: {silent:?}");
        let shrunk = evaluate(&asked, StatusCode::RANGE_NOT_SATISFIABLE, &headers(&[("content-range", "bytes */5")]));
        assert!(matches!(shrunk, ResponseAction::Refused(Failure::Changed, _)), "{shrunk:?}");
    }

    #[test]
    fn an_empty_file_has_no_range() {
        let action = evaluate(&asked(0, 10), StatusCode::RANGE_NOT_SATISFIABLE, &headers(&[("content-range", "bytes */0")]));
        assert_eq!(action, ResponseAction::Empty);
    }

    #[test]
    fn redirects_lead_to_http_only() {
        let to = |location: &str| evaluate(&asked(0, 10), StatusCode::FOUND, &headers(&[("location", location)]));
        assert_eq!(to("../b"), ResponseAction::Redirect("http://host/b#f".parse().unwrap()));
        assert_eq!(to("//other/c"), ResponseAction::Redirect("http://other/c#f".parse().unwrap()));
        for bad in ["file:///etc/passwd", "ftp://host/", "http://", "http://[::1"] {
            assert!(matches!(to(bad), ResponseAction::Refused(Failure::Source, _)), "{bad}");
        }
    }

    #[test]
    fn compressed_bodies_are_refused_unless_wanted() {
        let lines = [FULL.as_slice(), &[("content-encoding", "gzip")]].concat();
        let refused = evaluate(&asked(0, 10), StatusCode::PARTIAL_CONTENT, &headers(&lines));
        assert!(matches!(refused, ResponseAction::Refused(Failure::Source, FetchError::Encoded { .. })), "{refused:?}");
        let wanted = evaluate(&Asked { encoded: true, ..asked(0, 10) }, StatusCode::PARTIAL_CONTENT, &headers(&lines));
        assert!(matches!(wanted, ResponseAction::Body { .. }));
    }

    #[test]
    fn retry_after_is_in_seconds_and_bounded() {
        let after = |value: &str| wait(&headers(&[("retry-after", value)]));
        assert_eq!(after("3"), Some(Duration::from_secs(3)));
        assert_eq!(after("99999999999"), Some(Duration::from_secs(24 * 3600)));
        assert_eq!((after("soon"), after("-1")), (None, None));
    }
}
