//! Failed starts print the reason and leave nothing behind; starts in limited environments succeed; failures of the watchdog.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::Lab;
use serde_json::Value;

const ROUND_ROBIN: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";

/// Runs `braid up --foreground` through `wrapper` to its end. It must fail, and leave routing unchanged.
#[track_caller]
fn refused(lab: &Lab, wrapper: &[&str], more: &[&str]) -> String {
    let before = routing(lab);
    let home = lab.directory();
    let arguments = ["up".to_owned(), "--foreground".to_owned(), "--state-dir".to_owned(), home.join("state").display().to_string()];
    let braid = braid().display().to_string();
    let words: Vec<&str> =
        wrapper.iter().copied().chain([&*braid]).chain(arguments.iter().map(String::as_str)).chain(more.iter().copied()).collect();
    let mut command = lab.client().command(words[0]).unwrap();
    let said = home.join("refused.log");
    let log = File::create(&said).unwrap();
    let mut child = command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > LIMIT {
            // It shows as an end by a signal.
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    };
    let message = fs::read_to_string(&said).unwrap();
    assert!(!status.success() && status.code().is_some(), "{status}: {message}");
    assert_eq!(routing(lab), before, "{message}");
    println!("{}", message.lines().last().unwrap_or_default());
    message
}

fn socket(lab: &Lab) -> PathBuf {
    lab.directory().join("refused.sock")
}

#[test]
fn without_privilege_the_message_names_the_missing_rights_and_alternatives() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let path = socket(&lab).display().to_string();
    let drop_all = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for wrapper in [&drop_all[..], &["setpriv", "--bounding-set=-all"], &["setpriv", "--bounding-set=-bpf,-sys_admin,-perfmon"]] {
        let message = refused(&lab, wrapper, &["--socket", &path]);
        assert!(message.contains("braid run"), "{wrapper:?}: {message}");
        assert!(!Path::new(&path).exists(), "{wrapper:?}");
    }
}

#[test]
fn an_occupied_socket_stops_the_start_before_any_change() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let path = socket(&lab).display().to_string();
    fs::write(&path, "precious").unwrap();
    assert!(refused(&lab, &[], &["--socket", &path]).contains("not a socket"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    assert!(refused(&lab, &[], &["--socket", &path]).contains("--socket"));
    assert!(refused(&lab, &[], &["--socket", "/proc/braid.sock"]).contains("/proc/braid.sock"));
}

#[test]
fn an_unusable_state_directory_is_reported_and_the_daemon_runs() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let state = lab.directory().join("state");
    fs::write(&state, "a file").unwrap();
    let up = Up::start_with(&lab, ROUND_ROBIN, &state);
    eventually("flows are steered", || chosen_many(&lab, remote(10, 9), 4).contains(&1));
    assert!(up.status().unwrap()["warnings"].to_string().contains("state"));
}

#[test]
fn the_daemon_runs_without_links_and_loopback() {
    if !able() {
        return;
    }
    let lab = lab(2);
    client(&lab, "ip link set lo down");
    client(&lab, "ip link set wlan0 down");
    client(&lab, "ip link set lte0 down");
    let up = Up::start_with(&lab, ROUND_ROBIN, &lab.directory().join("state"));
    assert_eq!(up.status().unwrap()["flows"], 0);
    assert_eq!(up.state("wlan0"), "down");
}

#[test]
fn a_host_with_ipv6_only_is_steered() {
    if !able() {
        return;
    }
    let lab = lab(2);
    for name in &NAMES[..2] {
        client(&lab, &format!("ip -4 address flush dev {name}"));
    }
    let up = Up::start_with(&lab, ROUND_ROBIN, &lab.directory().join("state"));
    eventually("both links are used", || {
        let links = chosen_many(&lab, remote6(10, 9), 6);
        links.contains(&0) && links.contains(&1)
    });
    assert_eq!(up.link("wlan0")["state_v4"], "down");
}

#[test]
fn a_running_daemon_holds_only_the_capabilities_it_uses() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, ROUND_ROBIN);
    let [watchdog] = children(up.pid())[..] else { panic!("one watchdog") };
    eventually("the watchdog has begun", || capabilities(watchdog, "CapPrm:") == [12]);
    // CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_BPF.
    hold_only(up.pid(), &[2, 12, 13, 19, 39]);
    hold_only(watchdog, &[12]);
    kill("-KILL", watchdog);
    eventually("there is another watchdog", || children(up.pid()).iter().any(|other| *other != watchdog));
    let next = *children(up.pid()).iter().find(|other| **other != watchdog).unwrap();
    // Its bound is the daemon's: to lower that takes a capability that the daemon has given up.
    eventually("the next one has given up privileges too", || capabilities(next, "CapPrm:") == [12]);
    assert_eq!((capabilities(next, "CapEff:"), field(next, "NoNewPrivs:").as_str()), (vec![12], "1"));
}

/// `braid up` and `braid down` in a client with a private `/run/braid`.
struct Switch<'a> {
    lab: &'a Lab,
    home: PathBuf,
}

impl<'a> Switch<'a> {
    fn new(lab: &'a Lab) -> Self {
        fs::create_dir_all("/run/braid").unwrap();
        client(lab, "mount -t tmpfs -o mode=755 tmpfs /run/braid");
        let home = lab.directory().to_owned();
        let links: String = NAMES[..2].iter().map(|name| format!("[[link]]\nname = \"{name}\"\n")).collect();
        fs::write(home.join("braid.toml"), format!("{ROUND_ROBIN}{links}")).unwrap();
        Self { lab, home }
    }

    /// A command; `@` is replaced by the directory of its configuration.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.client().command(braid()).unwrap();
        let home = format!("{}/", self.home.display());
        command.args(words.iter().map(|word| word.replace('@', &home))).env("BRAID_SOCKET", self.home.join("sock")).stdin(Stdio::null());
        command
    }

    /// Its status, standard output and standard error.
    fn run(&self, words: &[&str]) -> (Option<i32>, String, String) {
        let output = self.command(words).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }

    fn up(&self, more: &[&str]) -> (Option<i32>, String, String) {
        self.run(&[&["up", "--config", "@braid.toml", "--state-dir", "@state"], more].concat())
    }

    /// The daemons of this lab.
    fn daemons(&self) -> Vec<u32> {
        let home = self.home.display().to_string();
        let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        let ours = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|words| words.starts_with("braid\0daemon\0") && words.contains(&home))
        };
        numbers.filter(ours).collect()
    }

    fn run_directory(&self) -> Vec<String> {
        let names = |path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        self.lab.client().run(|| names("/run/braid")).unwrap()
    }
}

#[test]
fn up_returns_when_the_daemon_steers_and_down_ends_it() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let (before, switch) = (routing(&lab), Switch::new(&lab));
    let (code, said, errors) = switch.up(&[]);
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(chosen_many(&lab, remote(10, 9), 4).contains(&1), "flows are steered at once");

    let [daemon] = switch.daemons()[..] else { panic!("one daemon: {:?}", switch.daemons()) };
    assert!(said.starts_with(&format!("Braid is up (process {daemon}); its log: /run/braid/network-")), "{said}");
    let log = PathBuf::from(said.trim().rsplit(' ').next().unwrap());
    let (mode, logged) =
        lab.client().run(|| (fs::metadata(&log).unwrap().permissions().mode(), fs::read_to_string(&log).unwrap())).unwrap();
    assert_eq!(mode & 0o777, 0o600);
    assert!(logged.contains("Braid is running"), "{logged}");
    assert_eq!(fs::read_link(format!("/proc/{daemon}/cwd")).unwrap(), Path::new("/"));
    let stat = fs::read_to_string(format!("/proc/{daemon}/stat")).unwrap();
    // Behind the name: state, parent, group, session, terminal.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let own = daemon.to_string();
    assert_eq!(fields[2..5], [own.as_str(), own.as_str(), "0"], "{stat}");

    assert_eq!(switch.run(&["up", "--config", "@braid.toml"]), (Some(0), "Braid is already up\n".into(), String::new()));
    let (code, said, errors) = switch.up(&["--ui"]);
    assert_eq!((code, said.as_str()), (Some(0), "Braid is already up\n"));
    assert!(errors.contains("the running daemon keeps its options: --state-dir, --ui had no effect"), "{errors}");
    let (code, _, errors) = switch.run(&["up", "--socket", "@other"]);
    assert!(code == Some(1) && errors.contains(&format!("process {daemon}")) && errors.contains("/other"), "{errors}");
    assert_eq!(switch.daemons(), [daemon]);

    // The next one waits until this one has ended.
    assert_eq!(switch.run(&["down"]).0, Some(0));
    assert_eq!(switch.up(&[]).0, Some(0));
    assert!(!switch.daemons().contains(&daemon));
    assert_eq!(switch.run(&["down"]).0, Some(0));
    eventually("no daemon is left", || switch.daemons().is_empty());
    assert_eq!(routing(&lab), before);
}

#[test]
fn two_concurrent_ups_start_one_daemon_and_both_succeed() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let switch = Switch::new(&lab);
    let ups = thread::scope(|scope| [0; 2].map(|_| scope.spawn(|| switch.up(&[]))).map(|up| up.join().unwrap()));
    let told = ups.each_ref().map(|(code, said, errors)| {
        assert_eq!(*code, Some(0), "{said}{errors}");
        said.starts_with("Braid is up (process ")
    });
    assert!(told[0] != told[1] && switch.daemons().len() == 1, "{ups:?}");
    assert_eq!(switch.run_directory().len(), 2, "a lock and a log: {:?}", switch.run_directory());
    assert_eq!(switch.run(&["down"]).0, Some(0));
    eventually("no daemon is left", || switch.daemons().is_empty());
}

#[test]
fn up_accepts_answers_only_from_the_daemon() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let switch = Switch::new(&lab);
    let listener = UnixListener::bind(switch.home.join("pretender")).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
        }
    });
    let pretended = || switch.run(&["up", "--state-dir", "@state", "--socket", "@pretender"]);
    let (code, said, errors) = pretended();
    assert!(code == Some(1) && said.is_empty() && errors.contains("another Braid daemon is running on"), "{said}{errors}");
    assert_eq!(switch.up(&[]).0, Some(0));
    let (code, said, errors) = pretended();
    assert!(code == Some(1) && said.is_empty() && errors.contains("It does not answer on"), "{said}{errors}");
    assert_eq!(switch.run(&["down"]).0, Some(0));
    eventually("no daemon is left", || switch.daemons().is_empty());
}

#[test]
fn a_failed_up_prints_the_reason_and_leaves_nothing_running() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let (before, switch) = (routing(&lab), Switch::new(&lab));
    fs::write(switch.home.join("bad.toml"), "rol = 3\n").unwrap();
    let (code, said, errors) = switch.run(&["up", "--config", "@bad.toml", "--state-dir", "@state"]);
    assert_eq!((code, said.as_str()), (Some(1), ""));
    assert!(errors.starts_with("braid: the daemon did not start") && errors.contains("there is no key \"rol\""), "{errors}");
    fs::write(switch.home.join("sock"), "precious").unwrap();
    let (code, _, errors) = switch.up(&[]);
    assert!(code == Some(1) && errors.contains("not a socket"), "{errors}");
    assert_eq!((switch.daemons(), switch.run_directory(), routing(&lab)), (vec![], vec![], before));
}

#[test]
fn interrupting_up_ends_the_starting_daemon() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let (before, switch) = (routing(&lab), Switch::new(&lab));
    // Its daemon blocks until something writes the certificate.
    client(&lab, &format!("mkfifo {}", switch.home.join("fifo").display()));
    let mut command = switch.command(&["up", "--state-dir", "@state", "--ui", "--ui-cert", "@fifo", "--ui-key", "@fifo"]);
    let up = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the daemon listens", || switch.home.join("sock").exists());
    kill("-INT", up.id());
    let output = up.wait_with_output().unwrap();
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("interrupted"), "{output:?}");
    eventually("no daemon is left", || switch.daemons().is_empty());
    eventually("the watchdog has swept", || switch.run_directory().is_empty() && routing(&lab) == before);
}

#[test]
fn up_stays_in_the_foreground_on_request_or_under_a_service_manager() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let switch = Switch::new(&lab);
    let manager = UnixDatagram::bind(switch.home.join("notify")).unwrap();
    manager.set_read_timeout(Some(LIMIT)).unwrap();
    let mut by_notify = switch.command(&["up", "--state-dir", "@state"]);
    by_notify.env("NOTIFY_SOCKET", switch.home.join("notify"));
    let mut by_number = lab.client().command("sh").unwrap();
    by_number
        .args(["-c", "SYSTEMD_EXEC_PID=$$ exec \"$0\" up --state-dir \"$1\"/state --socket \"$1\"/sock"])
        .arg(braid())
        .arg(&switch.home);
    let told = ["up --foreground", "daemon"].map(|words| {
        let words: Vec<&str> = words.split(' ').chain(["--state-dir", "@state"]).collect();
        switch.command(&words)
    });
    for mut command in [by_notify, by_number].into_iter().chain(told) {
        let mut child = Ended(command.stderr(Stdio::null()).spawn().unwrap());
        let status = || serde_json::from_str::<Value>(&switch.run(&["status", "--json"]).1).ok();
        eventually("the daemon answers", || {
            assert_eq!(child.0.try_wait().unwrap(), None, "{command:?}");
            status().is_some()
        });
        assert_eq!((status().unwrap()["interception"].as_str(), switch.daemons()), (Some("ebpf"), vec![]), "{command:?}");
        kill("-TERM", child.0.id());
        assert!(child.0.wait().unwrap().success(), "{command:?}");
    }
    let mut buffer = [0; 256];
    let mut notified = || manager.recv(&mut buffer).map(|length| text(&buffer[..length])).unwrap();
    assert_eq!(notified(), "READY=1");
    while notified() != "STOPPING=1" {}
}

/// A child that is not left running.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// All threads of `pid` have these capabilities, and cannot have others.
#[track_caller]
fn hold_only(pid: u32, expected: &[u32]) {
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // A thread may end while it is looked at.
        let Ok(status) = fs::read_to_string(thread.unwrap().path().join("status")) else { continue };
        for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(bits(&line(&status, set)), expected, "{set} of a thread of {pid}: {status}");
        }
        assert_eq!(line(&status, "NoNewPrivs:"), "1");
    }
}

fn capabilities(pid: u32, set: &str) -> Vec<u32> {
    bits(&field(pid, set))
}

fn bits(text: &str) -> Vec<u32> {
    let bits = u64::from_str_radix(text, 16).unwrap();
    (0..64).filter(|bit| bits >> bit & 1 == 1).collect()
}

fn field(pid: u32, name: &str) -> String {
    line(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap(), name)
}

fn line(status: &str, name: &str) -> String {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
}

#[test]
fn regression_a_killed_watchdog_is_replaced_by_a_working_one() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let before = routing(&lab);
    let mut up = Up::start(&lab, ROUND_ROBIN);
    let [first] = children(up.pid())[..] else { panic!("one watchdog") };
    eventually("the watchdog has begun", || capabilities(first, "CapPrm:") == [12]);
    kill("-TERM", first);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(children(up.pid()), [first], "what is meant for the daemon does not end the watchdog");
    kill("-KILL", first);
    eventually("there is another watchdog", || children(up.pid()).iter().any(|watchdog| *watchdog != first));
    eventually("the log tells", || up.log().contains("watchdog was killed"));
    up.signal("KILL");
    up.wait_end();
    let took = eventually("rules and routes are gone", || routing(&lab) == before);
    println!("all gone after {took:?}");
}

#[test]
fn regression_the_old_watchdog_does_not_sweep_the_next_daemons_rules() {
    if !able() {
        return;
    }
    let lab = lab(2);
    set_child_subreaper();
    let mut up = Up::start(&lab, ROUND_ROBIN);
    let there = routing(&lab);
    for _ in 0..5 {
        let watchdog = children(up.pid())[0];
        let state = || field(watchdog, "State:");
        kill("-STOP", watchdog);
        eventually("the watchdog stands still", || state().starts_with('T'));
        up.signal("KILL");
        up.wait_end();
        drop(up);
        up = Up::start(&lab, ROUND_ROBIN);
        assert!(state().starts_with('T'), "{}", state());
        kill("-CONT", watchdog);
        eventually("the old watchdog ends", || state().starts_with('Z'));
        assert_eq!(routing(&lab), there);
    }
}

/// Makes this process the parent of a dead daemon's children, which are in its session. Otherwise the watchdog might be in an orphaned process
/// group, in which the kernel resumes stopped processes.
fn set_child_subreaper() {
    // SAFETY: a plain system call without pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }, 0);
}

/// Processes this one started.
fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn kill(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}
