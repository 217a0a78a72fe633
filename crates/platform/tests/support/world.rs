//! A test network for kernel tests: a client and a server namespace joined by veth pairs, removed when the test ends.

use std::process::Command;
use std::sync::mpsc;

/// A thread in its own network namespace that runs the jobs it receives. The namespace ends with the thread.
pub struct TestNamespace {
    jobs: mpsc::Sender<Box<dyn FnOnce() + Send>>,
    /// Path of the namespace, as `ip link set ... netns` accepts it.
    pub path: String,
}

impl TestNamespace {
    /// Creates a network namespace with its loopback device up. Fails without root.
    pub fn new() -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (ready, started) = mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: plain system calls without pointers.
            let (result, thread) = unsafe { (libc::unshare(libc::CLONE_NEWNET), libc::gettid()) };
            let outcome = if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(thread) };
            let failed = outcome.is_err();
            let _ = ready.send(outcome);
            if failed {
                return;
            }
            ip("link set dev lo up");
            for job in inbox {
                job();
            }
        });
        let thread = started.recv().expect("the thread answers")?;
        Ok(Self { jobs, path: format!("/proc/{}/task/{thread}/ns/net", std::process::id()) })
    }

    /// Runs `job` in this namespace and returns its result. A panic in the job is propagated.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, result) = mpsc::channel();
        self.jobs
            .send(Box::new(move || {
                let _ = answer.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)));
            }))
            .expect("the thread is running");
        match result.recv().expect("the thread answers") {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Runs `ip` with these arguments in this namespace.
    pub fn ip(&self, words: &str) {
        let words = words.to_owned();
        self.run(move || ip(&words));
    }

    /// Waits until the kernel has asynchronously added the routes for the IPv6 addresses of the links.
    fn wait_for_addresses(&self, links: usize) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let there = move || {
            let output = Command::new("ip").args(["-6", "route", "show", "table", "local"]).output().expect("iproute2 is installed");
            let routes = String::from_utf8_lossy(&output.stdout).into_owned();
            (0..links)
                .all(|index| routes.lines().any(|line| line.starts_with("local fd77:") && line.contains(&format!("dev link{index} "))))
        };
        while !self.run(there) {
            assert!(std::time::Instant::now() < end, "the kernel has not added the routes of the addresses");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Waits until the device has a link-local address that is not tentative: the kernel accepts router advertisements only from and to such.
    #[allow(dead_code)]
    pub fn wait_for_link_local(&self, device: &'static str) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let words = ["-6", "addr", "show", "dev", device, "scope", "link", "-tentative"];
        while self.run(move || Command::new("ip").args(words).output().unwrap().stdout.is_empty()) {
            assert!(std::time::Instant::now() < end, "{device} has no link-local address");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Writes a sysctl of this namespace.
    pub fn sysctl(&self, name: &str, value: &str) {
        let (path, value) = (format!("/proc/sys/{}", name.replace('.', "/")), value.to_owned());
        self.run(move || std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}")));
    }
}

/// Runs `ip` with these arguments in this thread's namespace.
pub fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Sends a router advertisement with the router's lifetime in seconds and these DNS servers (lifetime in seconds, addresses) to all hosts on
/// `device`.
#[allow(dead_code)]
pub fn advertise(device: &str, lifetime: u16, servers: &[(u32, &[&str])]) {
    use socket2::{Domain, Protocol, SockAddr, Socket, Type};
    use std::net::{Ipv6Addr, SocketAddrV6};
    // Type, code, checksum (filled in by the kernel), hop limit, flags, router lifetime, reachable time, retransmission timer.
    let mut packet = vec![134, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    packet[6..8].copy_from_slice(&lifetime.to_be_bytes());
    for (lifetime, addresses) in servers {
        packet.extend([25, 1 + 2 * addresses.len() as u8, 0, 0]);
        packet.extend(lifetime.to_be_bytes());
        addresses.iter().for_each(|address| packet.extend(address.parse::<Ipv6Addr>().unwrap().octets()));
    }
    let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6)).unwrap();
    socket.bind_device(Some(device.as_bytes())).unwrap();
    socket.set_multicast_hops_v6(255).unwrap();
    let index = std::fs::read_to_string(format!("/proc/self/net/dev_snmp6/{device}")).unwrap_or_default();
    let index = index.lines().find_map(|line| line.strip_prefix("ifIndex")).map_or(0, |index| index.trim().parse().unwrap());
    let everyone = SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index);
    socket.send_to(&packet, &SockAddr::from(everyone)).unwrap();
}

/// Whether this test may create namespaces. In CI it must be able to; elsewhere the test prints that it is skipped.
pub fn may_make_namespaces(what: &str) -> bool {
    // SAFETY: a plain system call without arguments.
    if unsafe { libc::geteuid() } == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "{what}: this needs root, which CI must provide");
    eprintln!("skipped, because it needs root: {what}");
    false
}

/// A client with `links` links to one server: `link0` (10.77.0.2, fd77:0:0:0::2), `link1`, ..., each with its gateway `.1`. All reach 203.0.113.10
/// and 2001:db8:113::10.
pub struct World {
    pub client: TestNamespace,
    pub server: TestNamespace,
}

impl World {
    pub fn new(links: usize) -> std::io::Result<Self> {
        let world = Self { client: TestNamespace::new()?, server: TestNamespace::new()? };
        for last in 10..14 {
            world.server.ip(&format!("addr add 203.0.113.{last}/32 dev lo"));
        }
        world.server.ip("addr add 2001:db8:113::10/128 dev lo nodad");
        world.server.sysctl("net.ipv4.ip_forward", "1");
        for index in 0..links {
            world.client.ip(&format!("link add dev link{index} type veth peer name peer{index} netns {}", world.server.path));
            world.client.ip(&format!("addr add 10.77.{index}.2/24 dev link{index}"));
            world.client.ip(&format!("addr add fd77:0:0:{index}::2/64 dev link{index} nodad"));
            world.server.ip(&format!("addr add 10.77.{index}.1/24 dev peer{index}"));
            world.server.ip(&format!("addr add fd77:0:0:{index}::1/64 dev peer{index} nodad"));
            world.server.ip(&format!("link set dev peer{index} up"));
            world.client.ip(&format!("link set dev link{index} up"));
            world.client.ip(&format!("route add default via 10.77.{index}.1 dev link{index} metric {}", 100 + index));
            world.client.ip(&format!("-6 route add default via fd77:0:0:{index}::1 dev link{index} metric {}", 100 + index));
        }
        world.client.wait_for_addresses(links);
        Ok(world)
    }
}
