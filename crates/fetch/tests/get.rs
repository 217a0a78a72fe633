//! Downloads as a user sees them: mirrors, many files, resuming, secrets, proxies, limits.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use braid_fetch::{Cookies, Netrc, Options, Proxy};
use braid_model::{ByteCount, Rate};
use support::{Act, Loopback, Server, answer, content, get, get_over, good, good_with, quick};

fn send(bytes: Vec<u8>) -> Vec<Act> {
    vec![Act::Send(bytes)]
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    format!("sha256:{}", data_encoding::HEXLOWER.encode(digest.as_ref()))
}

#[test]
fn mirrors_share_the_work() {
    let bytes = content(4_000_000);
    let slowly = |all: Vec<u8>| all.chunks(20_000).flat_map(|piece| [Act::Send(piece.to_vec()), Act::Wait(2)]).collect::<Vec<_>>();
    let servers = [1, 2].map(|which| {
        let bytes = bytes.clone();
        Server::start(move |asked| slowly(good_with(asked, &bytes, &format!("ETag: \"{which}\"\r\n"))))
    });
    let folder = tempfile::tempdir().unwrap();
    let came = get(&[servers[0].url("/a/file"), servers[1].url("/b/file")], folder.path());
    assert!(came.file("file") == bytes);
    assert!(servers.iter().all(|server| server.requests().len() > 1), "both get requests");
}

#[test]
fn a_mirror_of_another_file_is_dropped() {
    let bytes = content(2_000_000);
    let (served, other) = (bytes.clone(), content(1_500_000));
    // The first response determines the file: the other mirror waits for the next request, or for the end.
    let asked_of_good = Arc::new(AtomicUsize::new(0));
    let seen = asked_of_good.clone();
    let slow = Server::start(move |asked| {
        let begin = Instant::now();
        while seen.load(Ordering::Relaxed) < 2 && begin.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        send(good(asked, &other))
    });
    let good = Server::start(move |asked| {
        asked_of_good.fetch_add(1, Ordering::Relaxed);
        send(good(asked, &served))
    });
    let folder = tempfile::tempdir().unwrap();
    let came = get(&[good.url("/file"), slow.url("/file")], folder.path());
    assert!(came.file("file") == bytes);
}

#[test]
fn a_missing_mirror_is_dropped() {
    let bytes = content(2_000_000);
    let served = bytes.clone();
    let there = Server::start(move |asked| send(good(asked, &served)));
    let gone = Server::start(|_| send(answer("404 Not Found", "", b"")));
    let folder = tempfile::tempdir().unwrap();
    let closed = "http://127.0.0.1:9/file".to_owned();
    let came = get(&[closed, gone.url("/file"), there.url("/file")], folder.path());
    assert!(came.file("file") == bytes);
}

#[test]
fn a_thousand_small_files() {
    let server = Server::start(|asked| send(good(asked, asked.path.as_bytes())));
    let folder = tempfile::tempdir().unwrap();
    let urls: Vec<String> = (0..1000).map(|number| server.url(&format!("/f{number}"))).collect();
    let came = get(&urls, folder.path());
    for number in 0..1000 {
        assert_eq!(came.file(&format!("f{number}")), format!("/f{number}").as_bytes());
    }
    // One request for each file, but on a busy machine some are requested twice.
    assert!(server.requests().len() < 1500, "{}", server.requests().len());
}

#[test]
fn a_dead_link_costs_little() {
    let bytes = content(2_000_000);
    let served = bytes.clone();
    let server = Server::start(move |asked| send(good(asked, &served)));
    let folder = tempfile::tempdir().unwrap();
    let mut network = Loopback::new(3);
    network.dead = vec![0, 2];
    // Waiting for connections over the dead links would take longer than a download may take here.
    let options = Options { connect_timeout: Duration::from_secs(3600), ..quick() };
    let came = get_over(network, &[server.url("/file")], folder.path(), options, |_| ());
    assert!(came.file("file") == bytes);
}

#[test]
fn a_download_resumes_where_it_stopped() {
    let bytes = content(3_000_000);
    let served = bytes.clone();
    // After 1.5 MB the server refuses requests.
    let server = Server::start(move |asked| match asked.range {
        Some((start, _)) if start >= 1_500_000 => send(answer("404 Not Found", "", b"")),
        _ => send(good(asked, &served)),
    });
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file");
    let came = get(std::slice::from_ref(&url), folder.path());
    assert_eq!(came.error().exit_code(), 22);
    let port = server.address;
    drop(server);
    assert!(folder.path().join("file.braid-part").exists());
    // The repaired server at another port: another URL proves nothing, so the download restarts.
    let served = bytes.clone();
    let mended = Server::start(move |asked| send(good(asked, &served)));
    assert_ne!(mended.address, port);
    let options = Options { resume: true, ..quick() };
    let came = get_over(Loopback::new(2), &[mended.url("/file")], folder.path(), options, |_| ());
    assert!(came.file("file") == bytes);
}

#[test]
fn resuming_downloads_only_missing_data() {
    let bytes = content(3_000_000);
    let served = bytes.clone();
    let broken = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let now = broken.clone();
    let server = Server::start(move |asked| match asked.range {
        Some((start, _)) if start >= 1_500_000 && now.load(std::sync::atomic::Ordering::SeqCst) => send(answer("404 Not Found", "", b"")),
        _ => send(good(asked, &served)),
    });
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file");
    assert_eq!(get(std::slice::from_ref(&url), folder.path()).error().exit_code(), 22);
    broken.store(false, std::sync::atomic::Ordering::SeqCst);
    let before = server.requests().len();
    let options = Options { resume: true, ..quick() };
    let came = get_over(Loopback::new(2), &[url], folder.path(), options, |_| ());
    assert!(came.file("file") == bytes);
    let first = server.requests().iter().skip(before).filter_map(|asked| asked.range).map(|range| range.0).min().unwrap();
    assert!(first > 0, "present data is not downloaded again");
    assert!(server.requests()[before].headers.contains_key("if-range"));
}

#[test]
fn a_changed_file_is_downloaded_again() {
    let (old, new) = (content(3_000_000), support::content_of(2, 3_000_000));
    let served = new.clone();
    let turn = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let now = turn.clone();
    let server = Server::start(move |asked| {
        let has_changed = now.load(std::sync::atomic::Ordering::SeqCst);
        match asked.range {
            Some((start, _)) if start >= 1_500_000 && !has_changed => send(answer("404 Not Found", "", b"")),
            _ if has_changed => send(good_with(asked, &served, "ETag: \"new\"\r\n")),
            _ => send(good(asked, &old)),
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file");
    assert_eq!(get(std::slice::from_ref(&url), folder.path()).error().exit_code(), 22);
    turn.store(true, std::sync::atomic::Ordering::SeqCst);
    let came = get_over(Loopback::new(2), &[url], folder.path(), Options { resume: true, ..quick() }, |_| ());
    assert!(came.file("file") == new);
    assert!(came.notes().iter().any(|note| note.contains("the file changed")), "{:?}", came.notes());
}

#[test]
fn ten_gigabytes_with_a_small_missing_part() {
    const SIZE: u64 = 10_000_000_000;
    // Zeros, except for the offset every 4096 bytes.
    let at = |place: u64| if place.is_multiple_of(4096) { (place / 4096 % 251) as u8 } else { 0 };
    let server = Server::start(move |asked| {
        let (start, end) = asked.range.unwrap_or((0, 1));
        let end = end.min(SIZE);
        let body: Vec<u8> = (start..end).map(at).collect();
        send(answer("206 Partial Content", &format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/{SIZE}\r\n", end - 1), &body))
    });
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let source = data_encoding::HEXLOWER.encode(ring::digest::digest(&ring::digest::SHA256, url.as_bytes()).as_ref());
    let journal = format!(
        "{{\"boot\":\"{}\",\"size\":{SIZE},\"validators\":{{\"{source}\":{{\"Tag\":\"\\\"one\\\"\"}}}}}}\n0 5000000000\n5001000000 9999000000\n",
        boot.trim()
    );
    std::fs::write(folder.path().join("file.braid-journal"), journal).unwrap();
    std::fs::File::create(folder.path().join("file.braid-part")).unwrap().set_len(SIZE).unwrap();
    let came = get_over(Loopback::new(3), &[url], folder.path(), Options { resume: true, ..quick() }, |_| ());
    assert!(came.results[0].is_ok(), "{:?}", came.results);
    let file = std::fs::File::open(folder.path().join("file")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    for (from, to) in [(5_000_000_000u64, 5_001_000_000u64), (9_999_000_000, SIZE)] {
        let mut bytes = vec![0; (to - from) as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, from).unwrap();
        assert!(bytes.iter().zip(from..).all(|(byte, place)| *byte == at(place)));
    }
}

#[test]
fn a_checksum_is_verified() {
    let bytes = content(300_000);
    let served = bytes.clone();
    let server = Server::start(move |asked| send(good(asked, &served)));
    for (sum, good) in [(sha256(&bytes), true), (sha256(b"other"), false)] {
        let folder = tempfile::tempdir().unwrap();
        let came = get_over(Loopback::new(2), &[server.url("/file")], folder.path(), quick(), |downloads| {
            downloads[0].checksum = Some(sum.parse().unwrap());
        });
        assert_eq!(came.results[0].is_ok(), good);
        assert_eq!(folder.path().join("file").exists(), good);
        if !good {
            assert!(came.error().to_string().contains("SHA-256") && came.error().exit_code() == 90);
        }
    }
}

#[test]
fn secrets_are_sent_only_to_the_named_host() {
    let other = Server::start(|asked| send(good(asked, b"there")));
    let to = other.url("/file");
    let first = Server::start(move |_| send(answer("302 Found", &format!("Location: {to}\r\n"), b"")));
    let folder = tempfile::tempdir().unwrap();
    let secret = |name: &str, value: &str| (name.parse().unwrap(), value.parse().unwrap());
    let cookies = "127.0.0.1\tFALSE\t/none\tFALSE\t0\tc\t1\n";
    let options = Options {
        headers: vec![secret("cookie", "k=v"), secret("accept-language", "en")],
        credentials: Some("alice:secret".parse().unwrap()),
        cookies: Cookies::parse(cookies, 0).unwrap(),
        ..quick()
    };
    let came = get_over(Loopback::new(1), &[first.url("/file")], folder.path(), options, |_| ());
    assert_eq!(came.file("file"), b"there");
    let (here, there) = (&first.requests()[0].headers, &other.requests()[0].headers);
    assert_eq!((here["authorization"].as_str(), here["cookie"].as_str()), ("Basic YWxpY2U6c2VjcmV0", "k=v"));
    assert!(!there.contains_key("authorization") && !there.contains_key("cookie"), "{there:?}");
    assert_eq!((there["accept-language"].as_str(), there["accept-encoding"].as_str()), ("en", "identity"));
}

#[test]
fn netrc_and_cookies_are_sent() {
    let server = Server::start(|asked| send(good(asked, b"x")));
    let folder = tempfile::tempdir().unwrap();
    let cookies = Cookies::parse("127.0.0.1\tFALSE\t/\tFALSE\t0\tname\tvalue\n", 0).unwrap();
    let options = Options { netrc: Netrc::parse("machine 127.0.0.1 login bob password pw"), cookies, ..quick() };
    get_over(Loopback::new(1), &[server.url("/file")], folder.path(), options, |_| ()).file("file");
    let headers = &server.requests()[0].headers;
    assert_eq!((headers["authorization"].as_str(), headers["cookie"].as_str()), ("Basic Ym9iOnB3", "name=value"));
}

#[test]
fn a_cookie_set_by_a_redirect_is_sent_back() {
    let other = Server::start_at([127, 0, 0, 50].into(), |asked| send(good(asked, b"other")));
    let far = other.url("/far");
    let door = Server::start(move |asked| match (asked.path.as_str(), asked.headers.get("cookie").map(String::as_str)) {
        ("/login", _) => {
            send(answer("302 Found", "Set-Cookie: session=9; Path=/\r\nSet-Cookie: x=1; Domain=evil.example\r\nLocation: /file\r\n", b""))
        }
        ("/file", Some("session=9")) => send(good(asked, b"inside")),
        ("/away", _) => send(answer("302 Found", &format!("Location: {far}\r\n"), b"")),
        _ => send(answer("403 Forbidden", "", b"")),
    });
    let folder = tempfile::tempdir().unwrap();
    let came = get_over(Loopback::new(2), &[door.url("/login"), door.url("/away")], folder.path(), quick(), |_| ());
    assert_eq!((came.file("login"), came.file("away")), (b"inside".to_vec(), b"other".to_vec()));
    assert!(other.requests().iter().all(|asked| !asked.headers.contains_key("cookie")), "cookies of another host");
}

#[test]
fn a_proxy_gets_the_absolute_url() {
    let proxy = Server::start(|asked| send(good(asked, asked.path.as_bytes())));
    let folder = tempfile::tempdir().unwrap();
    let named = format!("http://who:pw@{}", proxy.address);
    let options = Options { proxy: Proxy::new(Some(&named), |_| None).unwrap(), ..quick() };
    let came = get_over(Loopback::new(1), &["http://far.example/dir/file?q".to_owned()], folder.path(), options, |_| ());
    assert_eq!(came.file("file"), b"http://far.example/dir/file?q");
    assert_eq!(proxy.requests()[0].headers["proxy-authorization"], "Basic d2hvOnB3");
}

#[test]
fn the_rate_limit_is_kept() {
    let bytes = content(1_000_000);
    let served = bytes.clone();
    let server = Server::start(move |asked| send(good(asked, &served)));
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let options = Options { limit_rate: Some(Rate::from_mbps(4)), ..quick() };
    let came = get_over(Loopback::new(2), &[server.url("/file")], folder.path(), options, |_| ());
    assert!(came.file("file") == bytes);
    assert!(begin.elapsed() > Duration::from_millis(1500), "{:?}", begin.elapsed());
}

#[test]
fn limits_of_amount_and_cost_are_kept() {
    let bytes = content(3_000_000);
    let served = bytes.clone();
    let server = Server::start(move |asked| {
        let pieces = good(asked, &served).chunks(20_000).map(<[u8]>::to_vec).collect::<Vec<_>>();
        pieces.into_iter().flat_map(|piece| [Act::Send(piece), Act::Wait(1)]).collect()
    });
    let folder = tempfile::tempdir().unwrap();
    let mut network = Loopback::new(3);
    network.links[0].allowance = Some(ByteCount::new(300_000));
    network.links[1].price_per_gb = 1000.0;
    let options = Options { max_cost: Some(0.5), ..quick() };
    let came = get_over(network, &[server.url("/file")], folder.path(), options, |_| ());
    assert!(came.file("file") == bytes);
    let brought = &came.results[0].as_ref().unwrap().links;
    let of = |name: &str| brought[name].get();
    assert!(of("link0") <= 300_000 && of("link1") <= 500_000 && of("link2") >= 2_200_000, "{brought:?}");
}

#[test]
fn a_limited_download_resumes_in_the_next_run() {
    let bytes = content(1_000_000);
    let served = bytes.clone();
    let server = Server::start(move |asked| send(good(asked, &served)));
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file");
    let mut network = Loopback::new(2);
    network.links.iter_mut().for_each(|link| link.allowance = Some(ByteCount::new(300_000)));
    let came = get_over(network, std::slice::from_ref(&url), folder.path(), quick(), |_| ());
    assert_eq!(came.error().exit_code(), 63, "{}", came.error());
    assert!(!folder.path().join("file").exists() && folder.path().join("file.braid-part").exists());
    let came = get_over(Loopback::new(2), &[url], folder.path(), Options { resume: true, ..quick() }, |_| ());
    assert!(came.file("file") == bytes);
    let again: u64 = came.results[0].as_ref().unwrap().links.values().map(|bytes| bytes.get()).sum();
    assert!(again < 1_000_000, "{again} bytes were missing");
}

#[test]
fn a_too_large_file_is_refused_at_once() {
    let server = Server::start(|asked| send(good(asked, &content(500_000))));
    let folder = tempfile::tempdir().unwrap();
    let options = Options { max_size: Some(ByteCount::new(400_000)), ..quick() };
    let came = get_over(Loopback::new(1), &[server.url("/file")], folder.path(), options, |_| ());
    assert_eq!(came.error().exit_code(), 63);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file remains");
}

#[test]
fn regression_a_file_of_unknown_size_that_grows_too_large_is_refused() {
    let server = Server::start(|_| send([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".as_slice(), &content(2_000_000)].concat()));
    let folder = tempfile::tempdir().unwrap();
    let options = Options { max_size: Some(ByteCount::new(400_000)), ..quick() };
    let came = get_over(Loopback::new(1), &[server.url("/file")], folder.path(), options, |_| ());
    assert_eq!(came.error().exit_code(), 63, "{}", came.error());
}

#[test]
fn regression_data_of_a_failed_file_is_not_read_while_others_continue() {
    let server = Server::start(|asked| match asked.path.as_str() {
        "/small" => vec![Act::Wait(1500), Act::Send(good(asked, &content(1000)))],
        _ => {
            let head = Act::Send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_vec());
            let body = (0..60).flat_map(|_| [Act::Send(vec![0; 1 << 20]), Act::Wait(10)]);
            std::iter::once(head).chain(body).collect()
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let options = Options { max_size: Some(ByteCount::new(400_000)), ..quick() };
    let came = get_over(Loopback::new(1), &[server.url("/large"), server.url("/small")], folder.path(), options, |_| ());
    assert!(came.results.iter().any(Result::is_ok) && came.results.iter().any(Result::is_err), "{:?}", came.results);
    let sent = server.sent.load(std::sync::atomic::Ordering::SeqCst);
    assert!(sent < 40 << 20, "{sent} bytes were sent");
}

#[test]
fn regression_journals_and_messages_contain_no_password() {
    use std::os::unix::fs::PermissionsExt;
    let bytes = content(600_000);
    let half = bytes.clone();
    let server = Server::start(move |asked| {
        let (start, end) = asked.range.unwrap_or((0, 600_000));
        let end = end.min(300_000);
        if start >= 300_000 {
            return send(answer("404 Not Found", "", b""));
        }
        let head = format!("ETag: \"one\"\r\nContent-Range: bytes {start}-{}/600000\r\n", end - 1);
        send(answer("206 Partial Content", &head, &half[start as usize..end as usize]))
    });
    let folder = tempfile::tempdir().unwrap();
    let url = server.url("/file").replace("http://", "http://ann:hunter2@");
    let came = get_over(Loopback::new(1), &[url], folder.path(), Options { resume: true, tries: 1, ..quick() }, |_| ());
    assert!(!came.error().to_string().contains("hunter2"), "{}", came.error());
    let journal = folder.path().join("file.braid-journal");
    assert!(!std::fs::read_to_string(&journal).unwrap().contains("hunter2"));
    assert_eq!(std::fs::metadata(&journal).unwrap().permissions().mode() & 0o077, 0);
}

#[test]
fn an_unknown_name_and_a_closed_port_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    for (url, code, word) in [("http://nowhere.invalid/f", 6, "nowhere.invalid"), ("http://127.0.0.1:9/f", 7, "127.0.0.1:9")] {
        let came = get(&[url.to_owned()], folder.path());
        assert_eq!(came.error().exit_code(), code);
        assert!(came.error().to_string().contains(word), "{}", came.error());
    }
}

#[test]
fn regression_an_unknown_name_is_not_resolved_repeatedly() {
    let folder = tempfile::tempdir().unwrap();
    let patient = Options { tries: u32::MAX, timeout: Duration::from_secs(3600), ..quick() };
    let came = get_over(Loopback::new(3), &["http://nowhere.invalid/f".to_owned()], folder.path(), patient, |_| ());
    assert_eq!(came.error().exit_code(), 6);
}

#[test]
fn an_unwritable_folder_is_reported_before_the_download() {
    let server = Server::start(|asked| send(good(asked, b"x")));
    let came = get(&[server.url("/file")], std::path::Path::new("/proc/no such folder"));
    assert_eq!(came.error().exit_code(), 23);
    assert!(server.requests().is_empty());
}
