//! `braid get` over the lab's links from nginx: over all links at once, after a kill, and in little memory.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use braid_netem::Random;

/// Random bytes up to the size from which the lab's files are zeros.
const SIZE: ByteCount = ByteCount::new(4_000_000);

fn rated(rates: [u64; 3]) -> Lab {
    let links = NAMES.iter().zip(rates).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(5)));
    links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start().unwrap()
}

fn get(lab: &Lab, web: &Web, folder: &Path) -> Command {
    let mut command = lab.client().command_as(None, braid()).unwrap();
    command.env("XDG_STATE_HOME", folder.join("state")).arg("get").arg("--cacert").arg(web.certificate()).arg("--json");
    command.arg("--output-dir").arg(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    output
}

/// The last event of `kind`.
fn event(output: &Output, kind: &str) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    events.rfind(|event| event["event"] == kind).unwrap_or_else(|| panic!("no {kind} in {text}"))
}

#[test]
fn every_link_carries_a_share() {
    if !able() {
        return;
    }
    let (lab, folder) = (rated([20, 10, 5]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    for url in [web.url(SIZE).unwrap(), web.secure_url(SIZE).unwrap()] {
        let mut command = get(&lab, &web, folder.path());
        command.arg(url);
        let finished = event(&run(command), "finished");
        for name in NAMES {
            assert!(finished["links"][name].as_u64().unwrap() > SIZE.get() / 20, "{finished}");
        }
        assert!(fs::read(folder.path().join("4000000.bin")).unwrap() == fs::read(web.file(SIZE).unwrap()).unwrap());
    }
}

#[test]
fn a_killed_download_resumes_with_little_loss() {
    if !able() {
        return;
    }
    let (lab, folder) = (rated([20, 10, 10]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let (url, wanted) = (web.secure_url(SIZE).unwrap(), fs::read(web.file(SIZE).unwrap()).unwrap());
    let (mut random, mut kills, mut twice) = (Random::new(7), 0, 0u64);
    let target = folder.path().join("4000000.bin");
    let mut least = 0u64;
    while kills < 20 {
        let mut command = get(&lab, &web, folder.path());
        command.arg("-C").arg(&url);
        let mut child = command.spawn().unwrap();
        thread::sleep(Duration::from_millis(250 + random.next() % 700));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        kills += 1;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // What the run found there is never less than what an earlier one was seen to have.
        if let Some(line) = text.lines().find(|line| line.contains("\"started\"")) {
            let there = serde_json::from_str::<serde_json::Value>(line).unwrap()["there"].as_u64().unwrap();
            twice += least.saturating_sub(there);
        }
        let progress = text.lines().rfind(|line| line.contains("\"progress\"") && line.ends_with('}'));
        let got = progress.and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok()?["got"].as_u64()).unwrap_or(0);
        least = if target.exists() { 0 } else { least.max(got) };
        if target.exists() {
            assert!(fs::read(&target).unwrap() == wanted);
            fs::remove_file(&target).unwrap();
        }
    }
    let mut command = get(&lab, &web, folder.path());
    command.arg("-C").arg(&url);
    run(command);
    assert!(fs::read(&target).unwrap() == wanted);
    assert!(twice <= SIZE.get() / 50, "{twice} bytes were there and fetched again");
}

#[test]
fn memory_stays_small() {
    if !able() {
        return;
    }
    let (lab, folder) = (rated([200, 100, 100]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let mut command = get(&lab, &web, folder.path());
    command.arg(web.secure_url(ByteCount::new(60_000_000)).unwrap()).stdout(Stdio::null()).stderr(Stdio::null());
    takes_little_memory(command);
}

#[test]
fn a_thousand_small_files_take_little_memory() {
    if !able() {
        return;
    }
    let (lab, folder) = (rated([20, 10, 5]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let secure = |name: String| web.publish(&name, name.as_bytes()).unwrap().0.replace("http:", "https:");
    let mut command = get(&lab, &web, folder.path());
    command.args((0..1000).map(|number| secure(format!("{number}.small")))).stdout(Stdio::null()).stderr(Stdio::null());
    takes_little_memory(command);
    for number in 0..1000 {
        let name = format!("{number}.small");
        assert_eq!(fs::read(folder.path().join(&name)).unwrap(), name.as_bytes());
    }
}

#[test]
fn resuming_a_ten_gigabyte_file_takes_little_memory() {
    if !able() {
        return;
    }
    const LARGE: ByteCount = ByteCount::new(10_000_000_000);
    let (lab, folder) = (rated([20, 10, 5]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let url = web.secure_url(LARGE).unwrap();
    let mut curl = lab.client().command("curl").unwrap();
    let head = curl.args(["-sS", "--head", "--cacert"]).arg(web.certificate()).arg(&url).output().unwrap();
    let head = String::from_utf8(head.stdout).unwrap().to_ascii_lowercase();
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap_or_else(|| panic!("{head}")).trim();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    // The journal names an address by its SHA-256.
    let mut hash = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    hash.stdin.take().unwrap().write_all(url.as_bytes()).unwrap();
    let hash = String::from_utf8(hash.wait_with_output().unwrap().stdout).unwrap();
    let source = hash.split_whitespace().next().unwrap();
    let knowledge = serde_json::json!({ "boot": boot.trim(), "size": LARGE.get(), "validators": { source: { "Tag": tag } } });
    let file = |suffix: &str| folder.path().join(format!("10000000000.bin{suffix}"));
    fs::write(file(".braid-journal"), format!("{knowledge}\n0 5000000000\n5001000000 9999000000\n")).unwrap();
    fs::File::create(file(".braid-part")).unwrap().set_len(LARGE.get()).unwrap();
    let (mut command, before) = (get(&lab, &web, folder.path()), received(&lab));
    command.arg("-C").arg(&url).stdout(Stdio::null()).stderr(Stdio::null());
    takes_little_memory(command);
    let came = received(&lab) - before;
    assert!(fs::metadata(file("")).unwrap().len() == LARGE.get() && came > 2_000_000 && came < 5_000_000, "{came} bytes came");
}

/// Bytes that came to the client over all links.
fn received(lab: &Lab) -> u64 {
    (0..NAMES.len()).map(|link| lab.counters(link).unwrap().down.delivered_bytes.get()).sum()
}

/// Runs a program to its end.
#[track_caller]
fn takes_little_memory(mut command: Command) {
    let most = most_memory(&mut command.spawn().unwrap());
    println!("{most} kB at most");
    assert!(most > 1000 && most < 64_000, "{most} kB");
}

/// Maximum memory of a program until its end, in kB.
fn most_memory(child: &mut Child) -> u64 {
    let (mut most, begin) = (0, Instant::now());
    loop {
        let text = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        most = most.max(line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return most;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not end");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn errors_have_the_exit_statuses_of_curl() {
    if !able() {
        return;
    }
    let (lab, folder) = (rated([20, 10, 5]), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let there = web.secure_url(SIZE).unwrap();
    let status = |arguments: &[&str]| get(&lab, &web, folder.path()).args(arguments).output().unwrap().status.code().unwrap();
    assert_eq!(status(&["https://203.0.113.10/none"]), 22);
    assert_eq!(status(&["ftp://203.0.113.10/x"]), 3);
    assert_eq!(status(&["--tries", "2", "http://203.0.113.10:9/x"]), 7);
    assert_eq!(status(&["--checksum", &format!("sha256:{}", "0".repeat(64)), &there]), 90);
    // A certificate without a trusted issuer.
    let mut plain = lab.client().command(braid()).unwrap();
    let output =
        plain.env("XDG_STATE_HOME", folder.path()).arg("get").arg("--output-dir").arg(folder.path()).arg("--tries").arg("2").arg(&there);
    let output = output.output().unwrap();
    assert_eq!(output.status.code(), Some(60), "{}", String::from_utf8_lossy(&output.stderr));
}
