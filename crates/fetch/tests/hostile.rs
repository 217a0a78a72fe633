//! Misbehaving servers: never a wrong byte, never a hang, always a clear message.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use braid_fetch::{FetchError, Options};
use support::{Act, Asked, Came, Loopback, Server, answer, content, content_of, get, get_over, good, good_with, quick};

const SIZE: usize = 3_000_000;

fn one(server: &Server) -> (tempfile::TempDir, Came) {
    let folder = tempfile::tempdir().unwrap();
    let came = get(&[server.url("/file")], folder.path());
    (folder, came)
}

/// Downloads from a server with this behaviour; the file must be correct.
fn succeeds(handler: impl Fn(&Asked, &[u8]) -> Vec<Act> + Send + Sync + 'static) -> (Server, Came) {
    let bytes = content(SIZE);
    let served = bytes.clone();
    let server = Server::start(move |asked| handler(asked, &served));
    let (_folder, came) = one(&server);
    assert!(came.file("file") == bytes, "a wrong byte");
    assert_eq!(std::fs::read_dir(&came.folder).unwrap().count(), 1, "no other file remains");
    (server, came)
}

/// Downloads from a server with this behaviour; it must fail with an error that contains `wanted`, and leave no file.
fn fails(wanted: &str, handler: impl Fn(&Asked, &[u8]) -> Vec<Act> + Send + Sync + 'static) -> FetchError {
    let bytes = content(SIZE);
    let server = Server::start(move |asked| handler(asked, &bytes));
    let (_folder, came) = one(&server);
    let error = came.error().clone();
    assert!(error.to_string().contains(wanted), "{error}");
    assert!(!came.folder.join("file").exists());
    error
}

fn send(bytes: Vec<u8>) -> Vec<Act> {
    vec![Act::Send(bytes)]
}

#[test]
fn a_good_server_is_read_over_all_links() {
    let (server, _) = succeeds(|asked, bytes| {
        let pieces = good(asked, bytes).chunks(20_000).map(<[u8]>::to_vec).collect::<Vec<_>>();
        pieces.into_iter().flat_map(|piece| [Act::Send(piece), Act::Wait(2)]).collect()
    });
    let links: std::collections::BTreeSet<usize> = server.requests().iter().map(|asked| asked.link).collect();
    assert_eq!(links.len(), 3);
    assert!(server.requests().iter().skip(1).all(|asked| asked.headers.get("if-range").map(String::as_str) == Some("\"one\"")));
}

#[test]
fn ranges_ignored() {
    let (server, came) = succeeds(|_, bytes| send(answer("200 OK", "ETag: \"one\"\r\n", bytes)));
    assert!(came.notes()[0].contains("the whole file over one link"), "{:?}", came.notes());
    assert!(server.requests().len() <= 2, "{}", server.requests().len());
}

#[test]
fn ranges_ignored_in_chunks_of_unknown_size() {
    succeeds(|_, bytes| {
        let mut all = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for chunk in bytes.chunks(50_000) {
            all.extend(format!("{:x}\r\n", chunk.len()).bytes());
            all.extend_from_slice(chunk);
            all.extend_from_slice(b"\r\n");
        }
        all.extend_from_slice(b"0\r\nX-Trailer: 1\r\n\r\n");
        send(all)
    });
}

#[test]
fn ranges_ignored_until_the_connection_closes() {
    succeeds(|_, bytes| vec![Act::Send([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", bytes].concat()), Act::Close]);
}

#[test]
fn an_old_server_of_http_1_0() {
    succeeds(|_, bytes| vec![Act::Send([b"HTTP/1.0 200 OK\r\n\r\n", bytes].concat()), Act::Close]);
}

#[test]
fn no_validator() {
    let (server, _) = succeeds(|asked, bytes| send(good_with(asked, bytes, "")));
    assert!(server.requests().iter().any(|asked| asked.range.is_none()), "asked for whole");
}

#[test]
fn a_weak_validator() {
    let (server, _) = succeeds(|asked, bytes| send(good_with(asked, bytes, "ETag: W/\"one\"\r\n")));
    assert!(server.requests().iter().any(|asked| asked.range.is_none()), "asked for whole");
}

#[test]
fn a_date_too_recent_to_be_a_validator() {
    let headers = "Date: Sun, 06 Nov 1994 12:00:10 GMT\r\nLast-Modified: Sun, 06 Nov 1994 12:00:00 GMT\r\n";
    let (server, _) = succeeds(move |asked, bytes| send(good_with(asked, bytes, headers)));
    assert!(server.requests().iter().any(|asked| asked.range.is_none()), "asked for whole");
}

#[test]
fn a_date_old_enough_is_a_validator() {
    let headers = "Date: Sun, 06 Nov 1994 13:00:00 GMT\r\nLast-Modified: Sun, 06 Nov 1994 12:00:00 GMT\r\n";
    let (server, _) = succeeds(move |asked, bytes| send(good_with(asked, bytes, headers)));
    assert!(server.requests().iter().all(|asked| asked.range.is_some()));
}

#[test]
fn the_file_changes_during_the_download() {
    let (old, new) = (content_of(1, SIZE), content_of(2, SIZE));
    let wanted = new.clone();
    let server = Server::start(move |asked| {
        let (bytes, tag) = if asked.number < 4 { (&old, "\"old\"") } else { (&new, "\"new\"") };
        match asked.headers.get("if-range") {
            Some(condition) if condition != tag => send(answer("200 OK", &format!("ETag: {tag}\r\n"), bytes)),
            _ => send(good_with(asked, bytes, &format!("ETag: {tag}\r\n"))),
        }
    });
    let (_folder, came) = one(&server);
    assert!(came.file("file") == wanted, "the new one, and nothing of the old one");
    assert!(came.notes().iter().any(|note| note.contains("the file changed")), "{:?}", came.notes());
}

#[test]
fn the_file_changes_and_the_server_ignores_if_range() {
    let (old, new) = (content_of(1, SIZE), content_of(2, SIZE));
    let wanted = new.clone();
    let server = Server::start(move |asked| {
        let (bytes, tag) = if asked.number < 4 { (&old, "\"old\"") } else { (&new, "\"new\"") };
        send(good_with(asked, bytes, &format!("ETag: {tag}\r\n")))
    });
    let (_folder, came) = one(&server);
    assert!(came.file("file") == wanted, "the new one, and nothing of the old one");
}

#[test]
fn the_file_changes_with_every_request() {
    let error = fails("changed", |asked, bytes| send(good_with(asked, bytes, &format!("ETag: \"{}\"\r\n", asked.number))));
    assert_eq!(error.exit_code(), 33);
}

#[test]
fn ranges_shorter_than_requested() {
    succeeds(|asked, bytes| {
        let mut asked = asked.clone();
        asked.range = asked.range.map(|(start, end)| (start, end.min(start + 40_000)));
        send(good(&asked, bytes))
    });
}

#[test]
fn ranges_longer_than_requested() {
    succeeds(|asked, bytes| {
        let mut asked = asked.clone();
        asked.range = asked.range.map(|(start, end)| (start, end + 10_000));
        send(good(&asked, bytes))
    });
}

#[test]
fn another_range_than_requested() {
    succeeds(|asked, bytes| {
        let mut asked = asked.clone();
        asked.range = asked.range.map(|(start, end)| if start == 0 { (start, end) } else { (start - 1, end - 1) });
        send(good(&asked, bytes))
    });
}

#[test]
fn a_range_of_unknown_size() {
    succeeds(|asked, bytes| match asked.range {
        Some((start, end)) => {
            let end = end.min(bytes.len() as u64);
            let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/*\r\n", end - 1);
            send(answer("206 Partial Content", &headers, &bytes[start as usize..end as usize]))
        }
        None => send(good(asked, bytes)),
    });
}

#[test]
fn a_part_without_a_content_range() {
    succeeds(|asked, bytes| match asked.range {
        Some(_) => send(answer("206 Partial Content", "ETag: \"one\"\r\n", &bytes[..1000])),
        None => send(good(asked, bytes)),
    });
}

#[test]
fn several_ranges_at_once() {
    succeeds(|asked, bytes| match asked.range {
        Some(_) => {
            send(answer("206 Partial Content", "Content-Type: multipart/byteranges; boundary=x\r\nETag: \"one\"\r\n", b"--x\r\n\r\n--x--"))
        }
        None => send(good(asked, bytes)),
    });
}

#[test]
fn a_part_instead_of_the_whole_file() {
    fails("all of it", |_, bytes| send(answer("206 Partial Content", &format!("Content-Range: bytes 0-999/{SIZE}\r\n"), &bytes[..1000])));
}

#[test]
fn another_length_than_declared() {
    succeeds(|asked, bytes| match asked.range {
        Some((start, end)) => {
            let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/{SIZE}\r\n", end.min(SIZE as u64) - 1);
            send(answer("206 Partial Content", &headers, &bytes[..1000]))
        }
        None => send(good(asked, bytes)),
    });
}

#[test]
fn another_size_with_every_response() {
    let error = fails("", |asked, bytes| {
        let (start, end) = asked.range.unwrap_or((0, 1000));
        let headers = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/{}\r\n", end - 1, 9_000_000 + asked.number);
        let body = bytes.iter().cycle().take((end - start) as usize).copied().collect::<Vec<_>>();
        send(answer("206 Partial Content", &headers, &body))
    });
    assert!(error.exit_code() != 0);
}

#[test]
fn no_validator_after_the_first_response() {
    succeeds(|asked, bytes| send(good_with(asked, bytes, if asked.number == 0 { "ETag: \"one\"\r\n" } else { "" })));
}

#[test]
fn compressed_although_not_allowed() {
    let error =
        fails("compressed the file (gzip)", |asked, bytes| send(good_with(asked, bytes, "ETag: \"one\"\r\nContent-Encoding: gzip\r\n")));
    assert_eq!(error.exit_code(), 61);
}

#[test]
fn every_response_breaks_off() {
    succeeds(|asked, bytes| {
        let mut all = good(asked, bytes);
        all.truncate(60_000);
        vec![Act::Send(all), Act::Close]
    });
}

#[test]
fn no_response_has_a_byte() {
    let error = fails("", |asked, bytes| {
        let mut all = good(asked, bytes);
        all.truncate(all.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4);
        vec![Act::Send(all), Act::Close]
    });
    assert_eq!(error.exit_code(), 56, "{error}");
}

#[test]
fn connections_are_accepted_and_closed() {
    let error = fails("", |_, _| vec![Act::Close]);
    assert_eq!(error.exit_code(), 56, "{error}");
}

#[test]
fn a_truncated_whole_file() {
    fails("", |_, bytes| {
        let mut all = answer("200 OK", "", bytes);
        all.truncate(all.len() - 1000);
        vec![Act::Send(all), Act::Close]
    });
}

#[test]
fn few_connections() {
    let busy = Arc::new(AtomicUsize::new(0));
    succeeds(move |asked, bytes| {
        if busy.fetch_add(1, Ordering::SeqCst) >= 2 {
            busy.fetch_sub(1, Ordering::SeqCst);
            return send(answer("503 Service Unavailable", "", b"too many"));
        }
        // The server frees the connection shortly before the response, which a test of this size cannot detect.
        std::thread::sleep(Duration::from_millis(20));
        busy.fetch_sub(1, Ordering::SeqCst);
        send(good(asked, bytes))
    });
}

#[test]
fn retry_after_is_respected() {
    succeeds(|asked, bytes| match asked.number {
        0 => send(answer("429 Too Many Requests", "Retry-After: 1\r\n", b"")),
        _ => send(good(asked, bytes)),
    });
}

#[test]
fn occasional_errors() {
    succeeds(|asked, bytes| match asked.number % 3 {
        1 => send(answer("500 Internal Server Error", "", b"oops")),
        _ => send(good(asked, bytes)),
    });
}

#[test]
fn nothing_but_errors() {
    let error = fails("502 Bad Gateway", |_, _| send(answer("502 Bad Gateway", "", b"oops")));
    assert_eq!(error.exit_code(), 22);
}

#[test]
fn the_file_does_not_exist() {
    let error = fails("404 Not Found", |_, _| send(answer("404 Not Found", "", b"no")));
    assert_eq!(error.exit_code(), 22);
}

#[test]
fn redirects() {
    let (server, _) = succeeds(|asked, bytes| match asked.path.as_str() {
        "/file" => send(answer("302 Found", "Location: /deep/other?x=1\r\n", b"")),
        _ => send(good(asked, bytes)),
    });
    assert!(server.requests().iter().any(|asked| asked.path == "/deep/other?x=1"));
}

#[test]
fn endless_redirects() {
    let error = fails("more than 30 redirects", |asked, _| send(answer("302 Found", &format!("Location: /{}\r\n", asked.number), b"")));
    assert_eq!(error.exit_code(), 47);
}

#[test]
fn a_redirect_to_a_local_file() {
    fails("neither http nor https", |_, _| send(answer("302 Found", "Location: file:///etc/passwd\r\n", b"")));
}

#[test]
fn something_other_than_http() {
    let error = fails("", |_, _| vec![Act::Send(b"220 mail.example ESMTP\r\n".to_vec()), Act::Close]);
    assert_eq!(error.exit_code(), 56, "{error}");
}

#[test]
fn an_endless_head() {
    let error = fails("", |_, _| {
        let line = format!("X-More: {}\r\n", "x".repeat(1000));
        [Act::Send(b"HTTP/1.1 200 OK\r\n".to_vec())].into_iter().chain((0..10_000).map(|_| Act::Send(line.clone().into_bytes()))).collect()
    });
    assert_eq!(error.exit_code(), 56, "{error}");
}

#[test]
fn informational_responses() {
    succeeds(|asked, bytes| send([b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", good(asked, bytes).as_slice()].concat()));
}

#[test]
fn one_request_per_connection() {
    succeeds(|asked, bytes| vec![Act::Send(good_with(asked, bytes, "ETag: \"one\"\r\nConnection: close\r\n")), Act::Close]);
}

#[test]
fn one_link_hangs_in_the_middle_of_a_response() {
    succeeds(|asked, bytes| {
        let all = good(asked, bytes);
        match asked.link {
            1 => vec![Act::Send(all[..all.len() / 2].to_vec()), Act::Hang],
            _ => send(all),
        }
    });
}

#[test]
fn one_link_hangs_before_its_responses() {
    succeeds(|asked, bytes| if asked.link == 2 { vec![Act::Hang] } else { send(good(asked, bytes)) });
}

#[test]
fn one_link_is_very_slow() {
    // Over this link alone, a third of the file would take more than the minute that a download may take here.
    succeeds(|asked, bytes| match asked.link {
        0 => good(asked, bytes).chunks(500).flat_map(|piece| [Act::Send(piece.to_vec()), Act::Wait(50)]).collect(),
        _ => send(good(asked, bytes)),
    });
}

#[test]
fn everything_hangs() {
    let server = Server::start(|_| vec![Act::Hang]);
    let folder = tempfile::tempdir().unwrap();
    let options = Options { timeout: Duration::from_secs(2), ..quick() };
    let came = get_over(Loopback::new(3), &[server.url("/file")], folder.path(), options, |_| ());
    assert!([28, 56].contains(&came.error().exit_code()), "{}", came.error());
    assert!(!folder.path().join("file").exists());
}

#[test]
fn an_empty_file() {
    for whole in [true, false] {
        let server = Server::start(move |asked| match whole {
            true => send(answer("200 OK", "", b"")),
            false => send(good(asked, b"")),
        });
        let (_folder, came) = one(&server);
        assert_eq!(came.file("file"), b"");
    }
}

#[test]
fn a_file_of_one_byte() {
    let server = Server::start(|asked| send(good(asked, b"x")));
    let (_folder, came) = one(&server);
    assert_eq!(came.file("file"), b"x");
}

#[test]
fn a_body_where_none_is_allowed() {
    let server = Server::start(|_| send(b"HTTP/1.1 204 No Content\r\n\r\nsurprise".to_vec()));
    let (_folder, came) = one(&server);
    assert_eq!(came.file("file"), b"");
}
