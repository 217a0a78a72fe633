//! The package's scripts, as root in a mount namespace whose files are of no consequence; and what dependencies may be.

use std::process::Command;

/// Runs `script` in a namespace where what it writes to /etc, /usr, /var and /run is gone with it. `$1` is the package's directory.
fn in_a_namespace(script: &str) -> String {
    let prepare = "set -eu; mount -t tmpfs tmpfs /mnt
        for dir in etc usr var; do
            mkdir -p /mnt/$dir/upper /mnt/$dir/work
            mount -t overlay overlay -o lowerdir=/$dir,upperdir=/mnt/$dir/upper,workdir=/mnt/$dir/work /$dir
        done
        mount -t tmpfs tmpfs /run; ";
    let packaging = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");
    let words = ["--mount", "--propagation", "private", "sh", "-c", &format!("{prepare}{script}"), "sh", packaging];
    let ran = Command::new("unshare").args(words).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

const INSTALLED: &str = "mkdir -p /usr/share/braid /usr/lib/sysusers.d /etc/braid
    cp $1/braid.toml /usr/share/braid/braid.toml; cp $1/sysusers.conf /usr/lib/sysusers.d/braid.conf; ";

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0
}

#[test]
fn regression_installation_makes_nothing_through_a_link_that_leads_nowhere() {
    if !is_root() {
        return; // it makes a mount namespace
    }
    let shown = in_a_namespace(&format!(
        "{INSTALLED} rm -f /etc/braid/braid.toml; ln -s /etc/made-elsewhere /etc/braid/braid.toml
        $1/deb/postinst configure '' >&2
        stat -c %F /etc/braid/braid.toml; stat -c %U /etc/braid; [ -e /etc/made-elsewhere ] || echo nothing"
    ));
    assert_eq!(shown.lines().collect::<Vec<_>>(), ["symbolic link", "braid", "nothing"]);
}

#[test]
fn installation_makes_a_configuration_once() {
    if !is_root() {
        return;
    }
    let shown = in_a_namespace(&format!(
        "{INSTALLED} rm -f /etc/braid/braid.toml
        $1/deb/postinst configure '' >&2; stat -c %U:%G:%a /etc/braid/braid.toml; cmp /etc/braid/braid.toml $1/braid.toml
        echo mine >/etc/braid/braid.toml; $1/deb/postinst configure '' >&2; cat /etc/braid/braid.toml"
    ));
    assert_eq!(shown.lines().collect::<Vec<_>>(), ["braid:braid:644", "mine"]);
}

#[test]
fn regression_licences_and_sources_are_held_to_the_list() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let rules = std::fs::read_to_string(format!("{root}/deny.toml")).unwrap();
    let judged = |without: &str| {
        assert!(rules.contains(without));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules.replace(without, "")).unwrap();
        let ran = Command::new(format!("{root}/.ci/licences")).arg(file.path()).env("CARGO", env!("CARGO")).output().unwrap();
        (ran.status.success(), String::from_utf8(ran.stderr).unwrap())
    };
    assert_eq!(judged("# One a line"), (true, String::new()));
    let (good, said) = judged("    \"ISC\",\n");
    assert!(!good && said.contains("untrusted") && said.contains("\"ISC\""), "{said}");
    let (good, said) = judged("    \"https://github.com/rust-lang/crates.io-index\",\n");
    assert!(!good && said.contains("Cargo.lock takes a package from registry+https"), "{said}");
}
