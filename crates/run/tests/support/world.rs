//! A client with three links to one server, in network namespaces that end with the test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

/// The server's addresses, reached by default routes.
pub(crate) const SERVER: &str = "198.51.100.1";
/// A second one.
pub(crate) const OTHER: &str = "198.51.100.2";
/// Its IPv6 address.
pub(crate) const SERVER6: &str = "2001:db8::1";
/// Its IPv4 address as IPv6 sockets write it.
pub(crate) const SERVER_MAPPED: &str = "::ffff:198.51.100.1";
/// How many links there are: `link0`, `link1`, ...
pub(crate) const LINKS: usize = 3;

/// The world. Dropping it ends its processes, and with them its namespaces.
pub(crate) struct World {
    client: Child,
    server: Child,
    /// Readable by everybody.
    pub(crate) directory: TempDir,
}

/// Whether this test may make namespaces. In CI it must; elsewhere it says what it skips.
pub(crate) fn may_make_namespaces(what: &str) -> bool {
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    assert!(root || std::env::var_os("CI").is_none(), "{what}: this needs root, and CI must have it");
    if !root {
        eprintln!("skipped, since it needs root: {what}");
    }
    root
}

/// What a client's address on link `link` looks like to the server.
pub(crate) fn address(link: usize) -> String {
    format!("10.88.{link}.2")
}

/// The same for IPv6.
pub(crate) fn address6(link: usize) -> String {
    format!("fd88:{link}::2").parse::<std::net::Ipv6Addr>().unwrap().to_string()
}

impl World {
    /// Makes it; needs root.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        for name in ["run", "peer"] {
            let built = example(name);
            let here = directory.path().join(name);
            // A copy is open for writing for a moment, in which a process that another test begins may inherit that: it could not be run then.
            let linked = std::fs::hard_link(&built, &here).or_else(|_| std::fs::copy(&built, &here).map(drop));
            linked.unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        }
        let fresh = |program: &Path, words: &[&str]| {
            let mut command = Command::new("unshare");
            command.arg("--net").arg(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().expect("util-linux is installed")
        };
        // Both end when their standard input does, which is at the latest when this process ends.
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
        // Every link carries packets before a test counts any.
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
        // Other machines may have set their namespaces' defaults to the strict filter.
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

    /// Gives a link its default routes; the lower its number, the more the system likes it.
    pub(crate) fn add_default_routes(&self, link: usize) {
        self.ip(&format!("route add default via 10.88.{link}.1 dev link{link} metric {}", 100 + link));
        self.ip(&format!("-6 route add default via fd88:{link}::1 dev link{link} metric {}", 100 + link));
    }

    /// `ip` on the client.
    pub(crate) fn ip(&self, words: &str) {
        check(self.on_client("ip").args(words.split_whitespace()));
    }

    /// `ip` on the server.
    pub(crate) fn far_ip(&self, words: &str) {
        check(within(&self.server, "ip").args(words.split_whitespace()));
    }

    /// Sets a kernel variable of the client.
    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        check(self.on_client("sysctl").args(["-q", "-w", &format!("{name}={value}")]));
    }

    /// Makes `gate`, on which a command waits by `read go < gate` until [`open_gate`](Self::open_gate).
    pub(crate) fn make_gate(&self) {
        check(Command::new("mkfifo").args(["--mode", "666"]).arg(self.directory.path().join("gate")));
    }

    /// Lets one command through.
    pub(crate) fn open_gate(&self) {
        std::fs::write(self.directory.path().join("gate"), "go\n").unwrap();
    }

    /// A command on the client, as root.
    pub(crate) fn on_client(&self, program: &str) -> Command {
        within(&self.client, program)
    }

    /// A command on the client, as a user without any privilege.
    pub(crate) fn as_nobody(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.on_client("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(program).current_dir(&self.directory);
        // Root's own directories would answer "permission denied" where "not found" is meant.
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command
    }

    /// `braid run` with these words, as a user without any privilege.
    pub(crate) fn run(&self, words: &[&str]) -> Command {
        let mut command = self.as_nobody(self.directory.path().join("run"));
        command.args(words);
        command
    }

    /// The same as root.
    pub(crate) fn run_as_root(&self, words: &[&str]) -> Command {
        let mut command = within(&self.client, self.directory.path().join("run").to_str().unwrap());
        command.args(words);
        command
    }

    /// The option by which `nsenter` enters the server's namespace.
    pub(crate) fn far_namespace(&self) -> String {
        namespace_option(&self.server)
    }

    /// How often each answer came to the client program `peer` under `braid run` with `options`.
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

/// The answers a client program printed, with their counts.
pub(crate) fn counts(output: &Output) -> BTreeMap<String, u64> {
    let text = text(&output.stdout);
    text.lines().filter_map(|line| line.rsplit_once(' ')).map(|(answer, count)| (answer.to_owned(), count.parse().unwrap())).collect()
}

/// Output as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The same count for each of these answers.
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

/// A program of `examples/`. Cargo builds them only with a full test run, so this asks for them: of the packages that `make test` builds
/// together, since Cargo would build all dependencies anew for a selection that wants other features of them.
fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let directory = BUILT.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let profile = own.parent().and_then(Path::parent).expect("tests stand in target/PROFILE/deps");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--offline", "--workspace", "--exclude", "braid-lab", "--example", "run", "--example", "peer"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        // What `cargo test` tells of this package would have the build scripts of others run again, and all that depends on them be built.
        let told = |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.starts_with(start));
        for (name, _) in std::env::vars_os().filter(|(name, _)| told(&name.to_string_lossy())) {
            build.env_remove(name);
        }
        check(build.current_dir(env!("CARGO_MANIFEST_DIR")));
        profile.join("examples")
    });
    directory.join(name)
}
