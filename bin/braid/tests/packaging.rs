//! The package's scripts, run as root in a mount namespace that discards their changes; and the licence policy for dependencies.

use std::process::Command;

/// Runs `script` in a mount namespace that discards what it writes to /etc, /usr, /var and /run. `$1` is the package's directory.
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
fn regression_installation_creates_nothing_through_a_dangling_link() {
    if !is_root() {
        return; // it needs a mount namespace
    }
    let shown = in_a_namespace(&format!(
        "{INSTALLED} rm -f /etc/braid/braid.toml; ln -s /etc/made-elsewhere /etc/braid/braid.toml
        $1/deb/postinst configure '' >&2
        stat -c %F /etc/braid/braid.toml; stat -c %U /etc/braid; [ -e /etc/made-elsewhere ] || echo nothing"
    ));
    assert_eq!(shown.lines().collect::<Vec<_>>(), ["symbolic link", "braid", "nothing"]);
}

#[test]
fn installation_creates_the_configuration_only_once() {
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

/// As on a system that systemd has booted, with a `systemctl` that writes down what it is asked.
/// Process 1 is of the same namespaces, so that the service would be too.
fn with_systemd(script: &str) -> Vec<String> {
    let fakes = "mkdir -p /run/systemd/system /run/asked; ip link set lo up; cp $1/braid.service /etc/systemd/system/braid.service
        cat >/usr/bin/systemctl <<'END'
#!/bin/sh
echo \"systemctl $*\" >>/run/asked/log
case \"$*\" in
*start*) cat /run/asked/fails 2>/dev/null && exit 1 ;;
show*) cat /run/asked/state ;;
esac
exit 0
END
        cat >/usr/bin/journalctl <<'END'
#!/bin/sh
case \"$*\" in *--since=@*) echo old; echo 'braid: line 3 is wrong' ;; esac
END
        chmod 755 /usr/bin/systemctl /usr/bin/journalctl; ";
    let inner = format!("{fakes} set +e; braid={}; {script}; cat /run/asked/log", env!("CARGO_BIN_EXE_braid"));
    let shown = in_a_namespace(&format!("unshare --net --pid --fork --mount-proc sh -c \"$(cat <<'OUTER'\n{inner}\nOUTER\n)\" sh $1"));
    shown.lines().map(str::to_owned).collect()
}

#[test]
fn up_and_down_use_systemd_if_the_service_is_installed() {
    if !is_root() {
        return;
    }
    let shown = with_systemd("$braid up; echo $?; printf 'ActiveState=activating\nMainPID=0\n' >/run/asked/state; $braid down; echo $?");
    let show = "systemctl show braid.service --property=ActiveState --property=MainPID";
    assert_eq!(
        shown,
        [
            "Braid is up; systemd runs it (braid.service)",
            "0",
            "Braid is down; systemd stopped it (braid.service)",
            "0",
            "systemctl --no-ask-password reset-failed braid.service",
            "systemctl --no-ask-password start braid.service",
            show,
            "systemctl --no-ask-password stop braid.service",
        ]
    );
    // The unit's own `braid down`, and one for another daemon.
    let state = "printf 'ActiveState=deactivating\nMainPID=0\n' >/run/asked/state; $braid down --quiet; echo $?
        printf 'ActiveState=active\nMainPID=1\n' >/run/asked/state; $braid down --quiet --socket /run/other; echo $?";
    assert_eq!(with_systemd(state), ["0", "0", show, show]);
}

#[test]
fn a_service_that_does_not_start_is_stopped_with_the_reason() {
    if !is_root() {
        return;
    }
    let shown = with_systemd("echo no >/run/asked/fails; $braid up 2>&1; echo $?; $braid up --ui -v 2>&1; echo $?");
    assert_eq!(
        shown,
        [
            "braid: the daemon did not start: line 3 is wrong",
            "`systemctl status braid` and `journalctl -u braid` show more",
            "1",
            "braid: systemd starts Braid here, with BRAID_OPTIONS of /etc/default/braid: write --ui, --verbose there, or use `braid up --foreground`",
            "1",
            "systemctl --no-ask-password reset-failed braid.service",
            "systemctl --no-ask-password start braid.service",
            "systemctl --no-ask-password stop braid.service",
        ]
    );
}

#[test]
fn regression_licences_and_sources_must_be_on_the_list() {
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
