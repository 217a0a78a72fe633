//! A client with three links to one server, in network namespaces that end with the test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

/// The server's IPv4 address, reached by default routes.
pub(crate) const SERVER: &str = "198.51.100.1";
/// A second IPv4 address of the server.
pub(crate) const OTHER: &str = "198.51.100.2";
/// The server's IPv6 address.
pub(crate) const SERVER6: &str = "2001:db8::1";
/// The server's IPv4 address as an IPv4-mapped IPv6 address.
pub(crate) const SERVER_MAPPED: &str = "::ffff:198.51.100.1";
/// Number of links: `link0`, `link1`, ...
pub(crate) const LINKS: usize = 3;

/// The client and the server. Dropping this ends their processes and thereby their namespaces.
pub(crate) struct World {
    client: Child,
    server: Child,
    /// Working directory, accessible to every user.
    pub(crate) directory: TempDir,
}

/// Whether this test may create namespaces. In CI it must; elsewhere it prints what it skips.
pub(crate) fn may_make_namespaces(what: &str) -> bool {
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    assert!(root || std::env::var_os("CI").is_none(), "{what}: this needs root, and CI must have it");
    if !root {
        eprintln!("skipped, since it needs root: {what}");
    }
    root
}

/// The client's IPv4 address on a link, as the server sees it.
pub(crate) fn address(link: usize) -> String {
    format!("10.88.{link}.2")
}

/// The client's IPv6 address on a link, as the server sees it.
pub(crate) fn address6(link: usize) -> String {
    format!("fd88:{link}::2").parse::<std::net::Ipv6Addr>().unwrap().to_string()
}

impl World {
    /// Creates the namespaces and links; needs root.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        for name in ["run", "peer"] {
            let built = example(name);
            let here = directory.path().join(name);
            // While a copy is open for writing, a process that another test starts may inherit the descriptor, and the copy could not be executed.
            let linked = std::fs::hard_link(&built, &here).or_else(|_| std::fs::copy(&built, &here).map(drop));
            linked.unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        }
        let fresh = |program: &Path, words: &[&str]| {
            let mut command = Command::new("unshare");
            command.arg("--net").arg(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().expect("util-linux is installed")
        };
        // Both end when their standard input does, at the latest when this process ends.
        let client = fresh(Path::new("cat"), &[]);
        let server = fresh(&directory.path().join("peer"), &["serve"]);
        let mut world = Self { client, server, directory };
        world.wait_for_namespaces();
        world.lay_links();
        let gateways: Vec<String> = (0..LINKS).flat_map(|link| [format!("10.88.{link}.1"), format!("fd88:{link}::1")]).collect();
        writeln!(world.server.stdin.as_mut().unwrap(), "{SERVER} {OTHER} {SERVER6} {}", gateways.join(" ")).unwrap();
        let mut line = String::new();
        BufReader::new(world.server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        // Wait until every link carries packets before a test counts any.
        for gateway in gateways {
            check(world.as_nobody("./peer").args(["tcp", &gateway, "1"]));
        }
        world
    }

    fn wait_for_namespaces(&self) {
        let namespace = |process: u32| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
        let ours = namespace(std::process::id());
        while [&self.client, &self.server].iter().any(|child| namespace(child.id()) == ours) {
            std::thread::yield_now();
        }
    }

    fn lay_links(&self) {
        let far = self.server.id();
        self.ip("link set lo up");
        self.far_ip("link set lo up");
        for server in [SERVER, OTHER] {
            self.far_ip(&format!("addr add {server}/32 dev lo"));
        }
        self.far_ip(&format!("addr add {SERVER6}/128 dev lo nodad"));
        // Other machines may have set the namespace defaults to the strict filter.
        for name in ["all", "default"] {
            self.sysctl(&format!("net.ipv4.conf.{name}.rp_filter"), "2");
        }
        for link in 0..LINKS {
            self.ip(&format!("link add link{link} type veth peer name far{link} netns {far}"));
            for (ip, name, end) in [(Self::ip as fn(&Self, &str), "link", 2), (Self::far_ip, "far", 1)] {
                ip(self, &format!("addr add 10.88.{link}.{end}/24 dev {name}{link}"));
                ip(self, &format!("addr add fd88:{link}::{end}/64 dev {name}{link} nodad"));
                ip(self, &format!("link set {name}{link} up"));
            }
        }
        for link in 0..LINKS {
            self.add_default_routes(link);
        }
    }

    /// Adds a link's default routes; a lower link number gets a better metric.
    pub(crate) fn add_default_routes(&self, link: usize) {
        self.ip(&format!("route add default via 10.88.{link}.1 dev link{link} metric {}", 100 + link));
        self.ip(&format!("-6 route add default via fd88:{link}::1 dev link{link} metric {}", 100 + link));
    }

    /// Runs `ip` on the client.
    pub(crate) fn ip(&self, words: &str) {
        check(self.on_client("ip").args(words.split_whitespace()));
    }

    /// Runs `ip` on the server.
    pub(crate) fn far_ip(&self, words: &str) {
        check(within(&self.server, "ip").args(words.split_whitespace()));
    }

    /// Sets a sysctl of the client.
    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        check(self.on_client("sysctl").args(["-q", "-w", &format!("{name}={value}")]));
    }

    /// Creates the FIFO `gate`, on which a command waits with `read go < gate` until [`open_gate`](Self::open_gate).
    pub(crate) fn make_gate(&self) {
        check(Command::new("mkfifo").args(["--mode", "666"]).arg(self.directory.path().join("gate")));
    }

    /// Releases one command that waits on `gate`.
    pub(crate) fn open_gate(&self) {
        std::fs::write(self.directory.path().join("gate"), "go\n").unwrap();
    }

    /// A command on the client, as root.
    pub(crate) fn on_client(&self, program: &str) -> Command {
        within(&self.client, program)
    }

    /// A command on the client, as a user without privilege.
    pub(crate) fn as_nobody(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.on_client("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(program).current_dir(&self.directory);
        // Root's own directories would cause "permission denied" where the tests expect "not found".
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command
    }

    /// `braid run` with these arguments, as a user without privilege.
    pub(crate) fn run(&self, words: &[&str]) -> Command {
        let mut command = self.as_nobody(self.directory.path().join("run"));
        command.args(words);
        command
    }

    /// `braid run` with these arguments, as root.
    pub(crate) fn run_as_root(&self, words: &[&str]) -> Command {
        let mut command = within(&self.client, self.directory.path().join("run").to_str().unwrap());
        command.args(words);
        command
    }

    /// The option with which `nsenter` enters the server's namespace.
    pub(crate) fn far_namespace(&self) -> String {
        namespace_option(&self.server)
    }

    /// Runs the client program `peer` under `braid run` with `options`, and counts each distinct answer.
    pub(crate) fn ask(&self, options: &[&str], peer: &[&str]) -> BTreeMap<String, u64> {
        let output = self.run(&[options, &["--", "./peer"], peer].concat()).output().unwrap();
        assert!(output.status.success(), "{options:?} {peer:?}: {output:?}");
        assert_eq!(text(&output.stderr), "", "{options:?} {peer:?}");
        counts(&output)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in [&mut self.client, &mut self.server] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The answers that a client program printed, with their counts.
pub(crate) fn counts(output: &Output) -> BTreeMap<String, u64> {
    let text = text(&output.stdout);
    text.lines().filter_map(|line| line.rsplit_once(' ')).map(|(answer, count)| (answer.to_owned(), count.parse().unwrap())).collect()
}

/// Converts output to text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Maps each of these answers to the same count.
pub(crate) fn each(count: u64, answers: impl IntoIterator<Item = String>) -> BTreeMap<String, u64> {
    answers.into_iter().map(|answer| (answer, count)).collect()
}

fn within(child: &Child, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args([&namespace_option(child), "--", program]);
    command
}

fn namespace_option(child: &Child) -> String {
    format!("--net=/proc/{}/ns/net", child.id())
}

fn check(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
}

/// Path of a program of `examples/`. Cargo builds examples only with a full test run, so this function builds them. It selects the packages
/// that `make test` builds together, because Cargo rebuilds all dependencies for a selection with other features.
fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let directory = BUILT.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let profile = own.parent().and_then(Path::parent).expect("tests are in target/PROFILE/deps");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--offline", "--workspace", "--example", "run", "--example", "peer"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        // Variables that `cargo test` sets for this package would make other build scripts, and everything that depends on them, run again.
        let told = |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.starts_with(start));
        for (name, _) in std::env::vars_os().filter(|(name, _)| told(&name.to_string_lossy())) {
            build.env_remove(name);
        }
        check(build.current_dir(env!("CARGO_MANIFEST_DIR")));
        profile.join("examples")
    });
    directory.join(name)
}
