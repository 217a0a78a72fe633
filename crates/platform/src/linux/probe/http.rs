//! Requests a page with a known answer over HTTP/1.1 (RFC 9112). A minimal client: it compares a few bytes, follows no redirect and runs nothing.

use std::io;
use std::time::Instant;

use braid_decide::policy::HttpTarget;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{ConnectError, ProbeError, ProbeOutcome, canonical, connect};

/// Maximum number of bytes of an answer that are read.
const MAX_ANSWER: usize = 16 * 1024;

/// Maximum number of characters of a foreign text that are shown.
const MAX_SHOWN: usize = 120;

/// Requests the page and compares the answer.
pub(super) async fn ask(device: &str, page: &HttpTarget) -> Result<ProbeOutcome, ProbeError> {
    let start = Instant::now();
    let mut stream = match connect(device, canonical(page.address)).await {
        Ok(stream) => stream,
        Err(ConnectError::Refused) => return Err(ProbeError::Unanswered),
        Err(ConnectError::Probe(error)) => return Err(error),
    };
    let rtt = start.elapsed();
    let request = request(page)?;
    stream.write_all(request.as_bytes()).await.map_err(|error| ProbeError::from_socket("send the request", error))?;
    match read(&mut stream, page).await.map_err(|error| ProbeError::from_socket("read the answer", error))? {
        ProbeResponse::Expected => Ok(ProbeOutcome::Alive { rtt }),
        ProbeResponse::Other(what) => {
            let detail = format!("http://{}{} at {} answered {what}", page.host, page.path, page.address);
            Ok(ProbeOutcome::Portal { detail })
        }
        ProbeResponse::Nothing => Err(ProbeError::Unanswered),
    }
}

pub(crate) fn request(page: &HttpTarget) -> Result<String, ProbeError> {
    if page.host.chars().chain(page.path.chars()).any(|one| one.is_control() || one == ' ') {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "a space or control character in it");
        return Err(ProbeError::Impossible { tried: "write host and path into a request", source });
    }
    let HttpTarget { host, path, .. } = page;
    let agent = concat!("braid/", env!("CARGO_PKG_VERSION"));
    Ok(format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\nAccept: */*\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n"
    ))
}

#[derive(Debug, PartialEq, Eq)]
enum ProbeResponse {
    /// The status and the start of the body are as expected.
    Expected,
    /// Description of an unexpected answer, for the user.
    Other(String),
    /// The connection closed before the answer could be classified.
    Nothing,
}

async fn read(stream: &mut TcpStream, page: &HttpTarget) -> io::Result<ProbeResponse> {
    let mut answer = Vec::with_capacity(1024);
    loop {
        let ended = match stream.read_buf(&mut answer).await {
            Ok(count) => count == 0,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => true,
            Err(error) => return Err(error),
        };
        if let Some(response) = classify(&answer, ended || answer.len() >= MAX_ANSWER, page) {
            return Ok(response);
        }
    }
}

/// Classifies the answer as soon as possible; always returns a result if the answer has `ended`.
fn classify(answer: &[u8], ended: bool, page: &HttpTarget) -> Option<ProbeResponse> {
    let start = b"HTTP/1.";
    if !answer.starts_with(&start[..start.len().min(answer.len())]) {
        return Some(ProbeResponse::Other(format!("with no HTTP: {}", printable(answer))));
    }
    let Some(head_length) = answer.windows(4).position(|four| four == b"\r\n\r\n") else {
        return ended.then_some(ProbeResponse::Nothing);
    };
    let head = String::from_utf8_lossy(&answer[..head_length]);
    let (status_line, _) = head.split_once("\r\n").unwrap_or((&head, ""));
    let status = status_line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
    if status != Some(page.status) {
        let location = field(&head, "location").map(|to| format!(" to {}", printable(to.as_bytes()))).unwrap_or_default();
        return Some(ProbeResponse::Other(format!("{:?}{location} in place of status {}", printable(status_line.as_bytes()), page.status)));
    }
    let (body, complete) = body(&head, &answer[head_length + 4..]);
    let expected = page.body.as_bytes();
    if body.starts_with(expected) {
        return Some(ProbeResponse::Expected);
    }
    if !expected.starts_with(&body) || complete {
        return Some(ProbeResponse::Other(format!("with {:?} in place of {:?}", printable(&body), printable(expected))));
    }
    ended.then_some(ProbeResponse::Nothing)
}

/// Value of a header; `name` must be lower case.
fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .skip(1)
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
}

/// The part of the body received so far, and whether it is complete.
fn body(head: &str, rest: &[u8]) -> (Vec<u8>, bool) {
    if field(head, "transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        return unchunk(rest);
    }
    match field(head, "content-length").and_then(|length| length.parse::<usize>().ok()) {
        Some(length) => (rest[..length.min(rest.len())].to_vec(), rest.len() >= length),
        None => (rest.to_vec(), false),
    }
}

/// Decodes the chunks received so far (RFC 9112, section 7.1). An invalid size ends the body.
fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = std::str::from_utf8(&rest[..line]).ok().and_then(|line| line.split(';').next());
        let size = size.and_then(|size| usize::from_str_radix(size.trim(), 16).ok()).unwrap_or(0);
        if size == 0 {
            return (body, true);
        }
        let chunk = &rest[line + 2..];
        body.extend_from_slice(&chunk[..size.min(chunk.len())]);
        rest = size.checked_add(2).and_then(|next| chunk.get(next..)).unwrap_or_default();
    }
    (body, false)
}

/// Shortens a foreign text and replaces its control characters.
fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().take(MAX_SHOWN).map(|one| if one.is_control() { ' ' } else { one }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(status: u16, body: &str) -> HttpTarget {
        let address = "203.0.113.10:80".parse().unwrap();
        HttpTarget { address, host: "probe.example".into(), path: "/check".into(), status, body: body.into() }
    }

    /// Classification of an answer that arrives byte by byte and then ends.
    fn response(answer: &str, page: &HttpTarget) -> ProbeResponse {
        let early = (0..=answer.len()).find_map(|length| classify(&answer.as_bytes()[..length], false, page));
        early.or_else(|| classify(answer.as_bytes(), true, page)).expect("an answer that has ended is classified")
    }

    fn is_other(response: ProbeResponse, part: &str) -> bool {
        matches!(response, ProbeResponse::Other(what) if what.contains(part))
    }

    #[test]
    fn the_expected_answer_is_recognized_before_the_connection_ends() {
        assert_eq!(classify(b"HTTP/1.1 204 No Content\r\n\r\n", false, &page(204, "")), Some(ProbeResponse::Expected));
        assert_eq!(
            classify(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nsuccess and", false, &page(200, "success")),
            Some(ProbeResponse::Expected)
        );
        assert_eq!(classify(b"HTTP/1.1 200 OK\r\n\r\nsucc", false, &page(200, "success")), None);
    }

    #[test]
    fn chunks_are_joined() {
        let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=y\r\nsuc\r\n4\r\ncess\r\n0\r\n\r\n";
        assert_eq!(response(answer, &page(200, "success")), ProbeResponse::Expected);
        assert!(is_other(response(answer, &page(200, "successful")), "success"));
        let huge = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc";
        assert!(is_other(response(huge, &page(200, "success")), "\"a\" in place"));
    }

    #[test]
    fn a_redirect_or_a_wrong_status_or_body_is_a_portal() {
        let login = "HTTP/1.1 302 Found\r\nlocation: http://login.example/\x1b[31m\r\n\r\n";
        assert!(is_other(response(login, &page(204, "")), "to http://login.example/ [31m in place of status 204"));
        assert!(is_other(response("HTTP/1.0 200 OK\r\n\r\n<html>", &page(204, "")), "200 OK"));
        assert!(is_other(response("HTTP/1.1 200 OK\r\n\r\n<html>", &page(200, "success")), "\"<\" in place"));
        assert!(is_other(response("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsucc", &page(200, "success")), "succ"));
        assert!(is_other(response("220 mail.example", &page(204, "")), "no HTTP"));
    }

    #[test]
    fn a_truncated_answer_is_no_answer() {
        for answer in ["", "HTT", "HTTP/1.1 204 No Content\r\n", "HTTP/1.1 200 OK\r\n\r\nsucc"] {
            assert_eq!(response(answer, &page(200, "success")), ProbeResponse::Nothing, "{answer:?}");
        }
    }

    #[test]
    fn control_characters_are_rejected_in_a_request() {
        assert!(request(&page(204, "")).unwrap().starts_with("GET /check HTTP/1.1\r\nHost: probe.example\r\n"));
        let smuggled = HttpTarget { path: "/\r\nX: y".into(), ..page(204, "") };
        assert!(request(&smuggled).is_err());
    }
}
