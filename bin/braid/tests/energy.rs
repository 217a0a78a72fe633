//! `braid energy`: a service and its client, both the real binary.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

const MINE: &str =
    "[[profile]]\nmodel = \"Modem X\"\ntechnology = \"5g\"\nidle_mw = 1\nreceive_mw = 2\ntransmit_mw = 3\nsource = \"mine\"\n";

fn braid(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
    command.args(words).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Standard output of a command that must succeed.
fn succeed(words: &[&str]) -> String {
    let output = braid(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of a command that must fail.
fn fail(words: &[&str]) -> String {
    let output = braid(words).output().unwrap();
    assert!(!output.status.success(), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A service that runs until it is dropped.
struct Service {
    child: Child,
    url: String,
}

impl Service {
    fn start(folder: &Path) -> Self {
        let (db, import) = (folder.join("energy.sqlite"), folder.join("mine.toml"));
        std::fs::write(&import, MINE).unwrap();
        let words = ["energy", "serve", "--listen", "127.0.0.1:0", "--db", db.to_str().unwrap(), "--import", import.to_str().unwrap()];
        let mut child = braid(&words).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let at = line.find("http://").unwrap_or_else(|| panic!("{line}"));
        Self { child, url: line[at..].trim().trim_end_matches("/v1/profiles").to_owned() }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers one request with `answer`, whatever the request is; returns the server's address.
fn stranger(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]);
        // The client may close the connection early.
        let _ = stream.write_all(&answer);
    });
    url
}

#[test]
fn served_profiles_are_fetched_into_a_file_that_the_configuration_accepts() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(folder.path());
    assert!(succeed(&["energy", "fetch", &format!("{}/v1/profiles?technology=5g&model=modem%20x", service.url)]).contains("\"mine\""));
    let file = folder.path().join("energy.toml");
    let into = file.to_str().unwrap();
    for _ in 0..2 {
        assert!(succeed(&["energy", "fetch", &service.url, "--into", into]).contains(into));
    }
    let listed = succeed(&["energy", "list", "--file", into, "--json"]);
    let view: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(view["schema_version"] == 1 && view["profiles"].is_array(), "{listed}");
    assert_eq!(listed.matches("\"Modem X\"").count(), 1, "fetching twice adds it once");
    let config = folder.path().join("braid.toml");
    std::fs::write(&config, format!("energy_profiles = {into:?}\n[[link]]\nkind = \"cellular\"\nenergy = \"modem x\"\n")).unwrap();
    assert!(succeed(&["check", config.to_str().unwrap()]).contains(": valid"));
}

#[test]
fn a_service_whose_profiles_or_key_others_can_change_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let below = |words: &[&str]| words.iter().fold(folder.path().to_owned(), |path, word| path.join(word));
    let serve = |db: &Path, key: &Path| {
        fail(&["energy", "serve", "--listen", "127.0.0.1:0", "--db", db.to_str().unwrap(), "--key", key.to_str().unwrap()])
    };
    for directory in ["own", "open", "open/inner"] {
        std::fs::create_dir(below(&[directory])).unwrap();
    }
    mode(&below(&["open"]), 0o777);
    let (db, key) = (below(&["own", "db"]), below(&["own", "key"]));
    std::fs::write(&db, "").unwrap();
    std::fs::write(&key, "").unwrap();
    mode(&key, 0o600);
    for directory in [&["open"][..], &["open", "inner"]] {
        let within = below(directory).join("file");
        for error in [serve(&within, &key), serve(&db, &within)] {
            assert!(error.contains("other users"), "{error}");
        }
        assert!(!within.exists());
    }
    mode(&key, 0o644);
    let error = serve(&db, &key);
    assert!(error.contains("own/key") && error.contains("644"), "{error}");
    mode(&db, 0o666);
    let error = serve(&db, &key);
    assert!(error.contains("chmod go-w") && error.contains("own/db"), "{error}");
}

#[test]
fn profiles_are_listed() {
    let table = succeed(&["energy", "list"]);
    assert!(table.starts_with("TECHNOLOGY") && table.contains("Netgear MA701") && table.contains("SIGCOMM 2021"), "{table}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("again.toml");
    std::fs::write(&file, succeed(&["energy", "list", "--toml"])).unwrap();
    assert_eq!(succeed(&["energy", "list", "--file", file.to_str().unwrap()]), table);
}

#[test]
fn a_missing_or_malicious_service_does_not_change_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("energy.toml");
    std::fs::write(&file, MINE).unwrap();
    let into = file.to_str().unwrap();
    let json = |body: &str| format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes();
    let bad =
        r#"{"profiles": [{"model": "a\u001b[2Jb", "technology": "lte", "idle_mw": 1, "receive_mw": 2, "transmit_mw": 3, "source": "s"}]}"#;
    let endless = [b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n".to_vec(), vec![b'x'; 9 << 20]].concat();
    for (url, said) in [
        ("http://127.0.0.1:1".to_owned(), "braid energy serve"),
        ("https://localhost:1".to_owned(), "http://HOST:PORT"),
        (stranger(json(bad)), "profile 1: model"),
        (stranger(json("[]")), "holds no energy profiles"),
        (stranger(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n".to_vec()), "status 500"),
        (stranger(b"220 mail.example ESMTP\r\n".to_vec()), "no profile service"),
        (stranger(endless), "did not send a complete answer"),
    ] {
        let error = fail(&["energy", "fetch", &url, "--into", into]);
        assert!(error.contains(said) && !error.contains('\u{1b}'), "{url}: {error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), MINE);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}
