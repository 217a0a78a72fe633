//! Real clients through `braid proxy`: curl, git and apt. They neither read nor change the machine's configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::support::proxied::{PROXY, Proxied};
use crate::support::user::sha256;
use crate::support::*;
use braid_lab::Web;
use braid_model::ByteCount;

/// Runs a program to its end; it must succeed.
#[track_caller]
fn well(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", user::said(&output));
    output
}

/// The directory whose files the web server shows.
fn shown(web: &Web) -> PathBuf {
    web.file(ByteCount::new(1)).unwrap().parent().unwrap().to_owned()
}

#[test]
fn curl_works_with_every_proxy_protocol() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    let size = ByteCount::new(1_500_000);
    let file = proxied.web.file(size).unwrap();
    let to = proxied.home.join("got");
    for proxy in [format!("http://{PROXY}"), format!("socks5://{PROXY}"), format!("socks5h://{PROXY}")] {
        for url in [proxied.web.url(size).unwrap(), proxied.web.secure_url(size).unwrap()] {
            let mut command = proxied.lab.client().command("curl").unwrap();
            command.args(["-sS", "--fail", "--max-time", "120", "--proxy", &proxy, "--cacert"]).arg(proxied.web.certificate());
            well(command.arg("-o").arg(&to).arg(&url));
            assert_eq!(sha256(&to), sha256(&file), "{url} by {proxy}");
        }
    }
}

/// `git` without system or user settings.
fn git(mut command: Command, home: &Path) -> Command {
    command.env("HOME", home).env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_TERMINAL_PROMPT", "0");
    for who in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{who}_NAME"), "lab").env(format!("GIT_{who}_EMAIL"), "lab@example.org");
    }
    command
}

#[test]
fn git_clones_over_https_and_http() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    let (home, work) = (proxied.home.clone(), proxied.home.join("work"));
    let here = |words: &[&str]| drop(well(git(Command::new("git"), &home).args(words)));
    let work_text = work.to_string_lossy().into_owned();
    here(&["init", "-q", "-b", "main", &work_text]);
    for (name, size) in [("large", 1_500_000), ("small", 1000)] {
        fs::copy(proxied.web.file(ByteCount::new(size)).unwrap(), work.join(name)).unwrap();
        here(&["-C", &work_text, "add", "."]);
        here(&["-C", &work_text, "commit", "-q", "-m", name]);
    }
    let bare = shown(&proxied.web).join("repository.git").to_string_lossy().into_owned();
    here(&["clone", "-q", "--bare", &work_text, &bare]);
    here(&["-C", &bare, "repack", "-adq"]);
    here(&["-C", &bare, "update-server-info"]);
    for scheme in ["https", "http"] {
        let to = home.join(scheme);
        let mut command = git(proxied.lab.client().command("git").unwrap(), &home);
        // The environment takes precedence over settings.
        command.env("GIT_SSL_CAINFO", proxied.web.certificate());
        command.args(["-c", &format!("http.proxy=http://{PROXY}"), "clone", "-q"]);
        well(command.arg(format!("{scheme}://{}/repository.git", braid_lab::Lab::internet(10))).arg(&to));
        for name in ["large", "small"] {
            assert_eq!(sha256(&to.join(name)), sha256(&work.join(name)), "{name} by {scheme}");
        }
    }
}

#[test]
fn apt_fetches_a_package() {
    if !able() {
        return;
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        println!("skipped: this system has no apt");
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    // A package with content, and the index that lists it.
    let tree = proxied.home.join("tree");
    fs::create_dir_all(tree.join("DEBIAN")).unwrap();
    fs::create_dir_all(tree.join("usr/share/lab")).unwrap();
    let about = "Package: lab\nVersion: 1\nArchitecture: all\nMaintainer: lab <lab@example.org>\nDescription: something to fetch\n";
    fs::write(tree.join("DEBIAN/control"), about).unwrap();
    fs::copy(proxied.web.file(ByteCount::new(1_500_000)).unwrap(), tree.join("usr/share/lab/data")).unwrap();
    let package = shown(&proxied.web).join("lab_1_all.deb");
    well(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&tree).arg(&package));
    let size = fs::metadata(&package).unwrap().len();
    let index = format!("{about}Filename: lab_1_all.deb\nSize: {size}\nSHA256: {}\n", sha256(&package));
    proxied.web.publish("Packages", index.as_bytes()).unwrap();
    // An isolated apt: it reads this file first, and then nothing of the system's configuration.
    let apt = proxied.home.join("apt");
    for place in ["etc/apt/apt.conf.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg"] {
        fs::create_dir_all(apt.join(place)).unwrap();
    }
    fs::write(apt.join("var/lib/dpkg/status"), "").unwrap();
    let source = format!("deb [trusted=yes] http://{}/ ./\n", braid_lab::Lab::internet(10));
    fs::write(apt.join("etc/apt/sources.list"), source).unwrap();
    let root = apt.display();
    let settings = format!(
        "Dir \"{root}\";\nDir::State::status \"{root}/var/lib/dpkg/status\";\nAPT::Sandbox::User \"root\";\nAcquire::http::Proxy \
         \"http://{PROXY}\";\nAcquire::Languages \"none\";\nAcquire::Retries \"0\";\n"
    );
    let config = apt.join("config");
    fs::write(&config, settings).unwrap();
    for words in [&["update", "-q"][..], &["install", "-q", "-y", "--download-only", "lab"]] {
        let mut command = proxied.lab.client().command("apt-get").unwrap();
        well(command.args(words).env("APT_CONFIG", &config).env_remove("http_proxy"));
    }
    assert_eq!(sha256(&apt.join("var/cache/apt/archives/lab_1_all.deb")), sha256(&package));
}
