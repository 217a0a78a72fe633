//! A network's controller from outside: its socket and its page. Needs no privileges.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use braid_api::openapi::{Needs, OPERATIONS};
use serde_json::{Value, json};

/// Timeout of every expected event, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A controller without switches. Dropping it ends it.
struct Controller {
    folder: tempfile::TempDir,
    process: Child,
}

impl Controller {
    /// Starts it, and waits until it answers.
    fn start(words: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = command(folder.path(), words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let controller = Self { folder, process };
        let begin = Instant::now();
        while !controller.net(&["status"]).status.success() {
            assert!(begin.elapsed() < LIMIT, "the controller does not answer: {:?}", controller.net(&["status"]));
            std::thread::sleep(Duration::from_millis(20));
        }
        controller
    }

    fn token(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join("state/controller-ui").join(name)).unwrap().trim().to_owned()
    }

    /// Runs `braid net` with these arguments.
    fn net(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
        command.arg("net").args(words).arg("--socket").arg(self.folder.path().join("net.sock"));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command that starts a controller, with its files in `folder`.
fn command(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
    command.args(["net", "controller", "--listen", "127.0.0.1:0", "--state-dir"]).arg(folder.join("state"));
    command.arg("--socket").arg(folder.join("net.sock")).args(words).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Starts a controller that must end with an error, which it returns.
fn refused(folder: &Path, words: &[&str]) -> String {
    let Output { status, stderr, .. } = command(folder, words).output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert!(!status.success() && !folder.join("net.sock").exists(), "{text}");
    text
}

/// Sends a request: its method and path, further header lines, its body. Returns the status, the head and the body.
fn ask(address: &str, what: &str, headers: &[&str], body: &str) -> (u16, String, String) {
    ask_as(address, address, what, headers, body)
}

/// The same, to the machine by this name.
fn ask_as(host: &str, address: &str, what: &str, headers: &[&str], body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    write!(
        stream,
        "{what} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_owned(), body.to_owned())
}

#[test]
fn the_page_of_a_controller_needs_a_token() {
    let controller = Controller::start(&["--ui", "127.0.0.1:0"]);
    let printed = controller.net(&["ui", "--print"]);
    let url = String::from_utf8(printed.stdout).unwrap();
    let (address, ticket) =
        url.trim().strip_prefix("http://").and_then(|rest| rest.split_once("/#token=")).unwrap_or_else(|| panic!("{url}"));
    let (status, head, page) = ask(address, "GET /", &[], "");
    assert!(status == 200 && page.contains("/assets/network.js") && head.contains("default-src 'none'"), "{head}\n{page}");
    assert_eq!(ask(address, "GET /assets/network.js", &[], "").0, 200);
    let (status, _, refused) = ask(address, "GET /v1/network", &[], "");
    assert!(status == 401 && refused.contains("braid net ui"), "{refused}");
    assert_eq!(ask(address, "POST /v1/session", &[], &json!({"token": "guessed"}).to_string()).0, 401);

    let (status, head, _) = ask(address, "POST /v1/session", &[], &json!({"token": ticket}).to_string());
    assert_eq!(status, 200, "{head}");
    let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap().split(';').next().unwrap();
    assert!(cookie.starts_with("braid-net-session="), "{cookie}: the daemon's page on this machine has another one");
    let cookie = format!("cookie: {cookie}");
    let (status, _, network) = ask(address, "GET /v1/network", &[&cookie], "");
    let network: Value = serde_json::from_str(&network).unwrap();
    assert!(status == 200 && network["listens"][0].as_str().unwrap().starts_with("127.0.0.1:"), "{network}");
    let (status, _, refused) = ask(address, "GET /v1/status", &[&cookie], "");
    assert!(status == 409 && refused.contains("network controller"), "{refused}");

    let change = json!({"host": "02:00:00:00:00:01", "manager": "hoolock"}).to_string();
    assert_eq!(ask(address, "POST /v1/network", &[&cookie, "origin: http://evil.example"], &change).0, 403);
    assert_eq!(ask(address, "POST /v1/network", &[&cookie, "sec-fetch-site: cross-site"], &change).0, 403);
    let reader = format!("authorization: Bearer {}", controller.token("ui-token-read"));
    assert_eq!(ask(address, "GET /v1/network", &[&reader], "").0, 200);
    assert_eq!(ask(address, "POST /v1/network", &[&reader], &change).0, 403);
    let (status, _, accepted) = ask(address, "POST /v1/network", &[&cookie, &format!("origin: http://{address}")], &change);
    assert!(status == 200 && accepted.contains("hoolock"), "{accepted}");
}

#[test]
fn no_operation_of_a_controllers_page_needs_less_than_its_rights() {
    let controller = Controller::start(&["--ui", "127.0.0.1:0"]);
    let url = String::from_utf8(controller.net(&["ui", "--print"]).stdout).unwrap();
    let address = url.trim().strip_prefix("http://").unwrap().split('/').next().unwrap();
    let reader = format!("authorization: Bearer {}", controller.token("ui-token-read"));
    let of_daemon = format!("cookie: braid-session={}", controller.token("ui-token"));
    let guess = "authorization: Bearer guessed";
    for operation in OPERATIONS.iter().filter(|operation| operation.needs != Needs::Nothing) {
        let what = format!("{} {}", operation.method, operation.path);
        for headers in [&[][..], &[guess], &[&of_daemon]] {
            assert_eq!(ask(address, &what, headers, "{}").0, 401, "{what} {headers:?}");
        }
        if operation.needs == Needs::Changing {
            assert_eq!(ask(address, &what, &[&reader], "{}").0, 403, "{what}");
        }
    }
    for other in ["GET //v1/network", "GET /v1/network/", "GET /v1/./network", "GET /V1/network", "GET /v1/%6eetwork", "PUT /v1/network"] {
        let (status, _, body) = ask(address, other, &[], "");
        assert!(matches!(status, 401 | 404 | 405) && !body.contains("switches"), "{other}: {status} {body}");
    }
    // A site that gives its name this machine's address.
    let (status, _, body) = ask_as("net.example", address, "GET /v1/network", &[&reader], "");
    assert!(status == 421 && !body.contains("switches"), "{status}: {body}");
}

#[test]
fn a_page_for_other_machines_has_tls_and_private_files() {
    let controller = Controller::start(&["--ui", "0.0.0.0:0", "--ui-name", "net.lan"]);
    let url = String::from_utf8(controller.net(&["ui", "--print"]).stdout).unwrap();
    let port = url.strip_prefix("https://net.lan:").and_then(|rest| rest.split('/').next()).unwrap_or_else(|| panic!("{url}"));
    let mut plain = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    write!(plain, "GET / HTTP/1.1\r\nhost: net.lan\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let folder = controller.folder.path().join("state/controller-ui");
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    for name in ["ui-token", "ui-token-read", "ui-key.pem", "ui-cert.pem"] {
        assert_eq!(folder.join(name).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
}

#[test]
fn a_page_whose_port_is_in_use_or_whose_tokens_others_could_choose_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = refused(folder.path(), &["--ui", &address]);
    assert!(text.contains(&address) && text.contains("--ui ADDRESS:PORT"), "{text}");
    for exposed in ["state", "state/controller-ui"] {
        let path = folder.path().join(exposed);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        let text = refused(folder.path(), &["--ui", "127.0.0.1:0"]);
        assert!(text.contains(&format!("chmod go-w {}", path.display())), "{text}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
    }
    // A link to nowhere is not followed, so nothing is made elsewhere.
    let page = folder.path().join("state/controller-ui");
    std::fs::remove_dir_all(&page).unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &page).unwrap();
    refused(folder.path(), &["--ui", "127.0.0.1:0"]);
    assert!(!folder.path().join("elsewhere").exists());
}

#[test]
fn a_controller_without_ui_serves_only_its_socket() {
    let controller = Controller::start(&[]);
    let refused = controller.net(&["ui", "--print"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && text.contains("braid net controller --ui"), "{text}");
    assert!(!controller.folder.path().join("state").exists(), "there are no tokens");
}
