//! A lab leaves nothing behind, however it ends.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use braid_lab::effective_user;

/// Whether labs can be created. In CI it is an error if they cannot.
fn able() -> bool {
    if effective_user() == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "the lab's tests need root");
    println!("skipped: needs root");
    false
}

/// A lab in a separate process: the process, its input (which keeps it running), its output, and the lab's directory.
fn hold(more: &[&str]) -> (Child, ChildStdin, BufReader<ChildStdout>, String) {
    let mut child =
        Command::new(env!("CARGO_BIN_EXE_braid-lab")).arg("hold").args(more).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    output.read_line(&mut first).unwrap();
    (child, input, output, first.trim_end().strip_prefix("ready ").unwrap().to_owned())
}

/// Processes that carry the lab's mark.
fn marked(directory: &str) -> usize {
    let mark = format!("BRAID_LAB={directory}");
    let carries = |environment: Vec<u8>| environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|process| fs::read(process.path().join("environ")).is_ok_and(carries)).count()
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn killing_a_lab_removes_its_programs_and_files() {
    if !able() {
        return;
    }
    let (mut lab, _input, _output, directory) = hold(&[]);
    assert!(marked(&directory) >= 1, "nginx runs");
    assert!(Path::new(&directory).exists());
    lab.kill().unwrap();
    lab.wait().unwrap();
    eventually("its programs end", || marked(&directory) == 0);
    eventually("its directory goes", || !Path::new(&directory).exists());
}

#[test]
fn killing_a_lab_ends_the_programs_on_devices_of_its_lan() {
    if !able() {
        return;
    }
    let (mut lab, _input, mut output, directory) = hold(&["--lan", "2"]);
    let entry = output.by_ref().lines().map(Result::unwrap).find(|line| line.starts_with("192.168.7.21: ")).unwrap();
    let mut words = entry.split_whitespace().skip(1);
    let mut program = Command::new(words.next().unwrap()).args(words).args(["sleep", "1000"]).spawn().unwrap();
    let entered = || fs::read_to_string(format!("/proc/{}/comm", program.id())).is_ok_and(|name| name.trim() == "sleep");
    eventually("it has entered", entered);
    lab.kill().unwrap();
    lab.wait().unwrap();
    eventually("it ends", || program.try_wait().unwrap().is_some());
    eventually("the directory goes", || !Path::new(&directory).exists());
}

#[test]
fn ending_a_lab_removes_everything() {
    if !able() {
        return;
    }
    let (mut lab, input, _output, directory) = hold(&[]);
    drop(input);
    assert!(lab.wait().unwrap().success());
    assert_eq!(marked(&directory), 0);
    assert!(!Path::new(&directory).exists());
}
