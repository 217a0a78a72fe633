"""What the checks in a machine of test-kernels share: the registry of checks, the lab, Braid's daemon in it, and requests to its servers.

Two namespaces, joined by two links with limited rates: this process is in the client's, web server, echo and relay are in the server's.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import socket
import subprocess
import threading
import time

LIMIT = 120
LINKS = ("wlan0", "lte0")
RATES = ("20mbit", "10mbit")
WEB = "203.0.113.10"
WEB6 = "2001:db8:113::10"
RELAY = "203.0.113.20"
IPSEC = "203.0.113.30"
SIZE = 4_000_000
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
HOME = pathlib.Path("/tmp/home")
RELAY_LOG = pathlib.Path("/tmp/relay.log")
LINK_ENTRIES = "".join(f'[[link]]\nname = "{name}"\n' for name in LINKS)

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
CHECKS = []


def check(name):
    def register(function):
        CHECKS.append((name, function))
        return function

    return register


def run_checks():
    """Runs all registered checks in their order."""
    for name, check in CHECKS:
        begin = time.monotonic()
        try:
            check()
            print(f"PASS {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Skipped as why:
            print(f"SKIP {name}: {why}", flush=True)
        except Exception as error:
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
            print(*daemon.end_of_log(), sep="\n    ", flush=True)


def addresses_of(count, connect):
    return {connect() for _ in range(count)}


def both(addresses):
    """Whether these are the addresses of both links, in one family."""
    return addresses in ({"10.77.0.2", "10.77.1.2"}, {"fd77:0:0:0::2", "fd77:0:0:1::2"}, {"fd77::2", "fd77:0:0:1::2"})


def tcp(to):
    with socket.create_connection((to, 7), timeout=LIMIT) as connection:
        return connection.getsockname()[0]


def udp(to, connected):
    """The address that the server sees."""
    with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM) as it:
        it.settimeout(LIMIT)
        if connected:
            it.connect((to, 9))
            it.send(b"who")
        else:
            it.sendto(b"who", (to, 9))
        return it.recv(100).decode()


class Background:
    """A program that runs beside the checks."""

    def __init__(self, words, log):
        self.log = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_for(self, words):
        said = lambda: self.log.read_text(errors="replace")
        eventually(lambda: words in said() or self.process.poll() is not None, lambda: f"not said: {words}: {said()}")
        require(self.process.poll() is None, f"ended: {said()}")

    def close(self):
        self.process.terminate()
        self.process.wait(LIMIT)


class Daemon:
    """`braid daemon` in the client's namespace."""

    home = pathlib.Path("/tmp/daemon")
    process = None

    def configure(self, text):
        self.home.mkdir(exist_ok=True)
        (self.home / "braid.toml").write_text(text)

    def start(self, config):
        self.configure(config)
        words = ["braid", "daemon", "--config", f"{self.home}/braid.toml", "--state-dir", f"{self.home}/state", "--socket", os.environ["BRAID_SOCKET"]]
        self.process = Background(words, self.home / "log").process
        up = lambda: [link["state"] for link in self.status()["links"]] == ["up", "up"]
        eventually(lambda: self.process.poll() is not None or up(), lambda: f"links: {self.status()}")
        require(self.process.poll() is None, f"braid daemon ended with status {self.process.poll()}")

    def status(self):
        try:
            return json.loads(braid("status", "--json"))
        except Failed as error:
            return {"links": [], "error": str(error)}

    def end_of_log(self):
        with contextlib.suppress(FileNotFoundError):
            return (self.home / "log").read_text(errors="replace").splitlines()[-15:]
        return []


daemon = Daemon()
received = []
routing_before = set()


class Failed(Exception):
    """A failed condition or program."""


class Skipped(Exception):
    """A check of something that the program does not have."""


def require(condition, why):
    if not condition:
        raise Failed(why)


def eventually(condition, why, pause=0.1):
    end = time.monotonic() + LIMIT
    while not condition():
        require(time.monotonic() < end, f"not within {LIMIT} s: {why()}")
        time.sleep(pause)


def call(*words, fails_too=False):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * LIMIT)
    require(fails_too or done.returncode == 0, f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()} {done.stdout.strip()}")
    return done.stdout


def braid(*words, fails_too=False):
    return call("braid", *words, fails_too=fails_too)


def as_nobody(*words):
    return call(*NOBODY, "env", "-C", str(HOME), "-u", "BRAID_SOCKET", f"HOME={HOME}", "braid", *words)


def curl_start(url, *words, program=("curl",)):
    words = [*program, "-gsS", "--fail", "--max-time", str(LIMIT), "-o", "/dev/null", "-w", "%{local_ip}", *words, url]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def curl_end(child):
    output, said = child.communicate(timeout=2 * LIMIT)
    require(child.returncode == 0, f"curl: status {child.returncode}: {said.strip()}")
    return output


def curl(url, *words, program=("curl",)):
    """The local address of the connection."""
    return curl_end(curl_start(url, *words, program=program))


def shared(work):
    """Whether each link carried at least a tenth of the bytes received during the work."""
    before = counters()
    work()
    received[:] = [after - before for before, after in zip(before, counters())]
    return min(received) * 10 > sum(received)


def counters():
    links = {link["ifname"]: link for link in json.loads(call("ip", "-j", "-s", "link"))}
    return [links[name]["stats64"]["rx"]["bytes"] for name in LINKS]


def routing():
    """All rules and all routes of all tables, without the routers' lifetimes."""
    asked = (["rule"], ["-6", "rule"], ["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"])
    return {line.strip() for words in asked for line in call("ip", *words).splitlines()}


def start_relay():
    words = ["relay", "--listen", "[::]:5757", "--allow", "203.0.113.0/24", "--allow", "2001:db8:113::/64", "--state-dir", "/tmp/relay"]
    relay = Background(["nsenter", "--net=/run/netns/server", "braid", *words], RELAY_LOG)
    relay.wait_for("the relay is up")


def invite():
    words = ["relay", "invite", "--address", f"{RELAY}:5757", "--state-dir", "/tmp/relay"]
    return call("nsenter", "--net=/run/netns/server", "braid", *words).strip()


def make_lab():
    os.environ["BRAID_SOCKET"] = "/tmp/daemon.socket"
    HOME.mkdir()
    os.chown(HOME, 65534, 65534)
    for name in ("client", "server"):
        call("ip", "netns", "add", name)
        call("ip", "-n", name, "link", "set", "lo", "up")
    client, server = ["ip", "-n", "client"], ["ip", "-n", "server"]
    # Use own addresses at once, without duplicate address detection.
    for name in ("client", "server"):
        call("nsenter", f"--net=/run/netns/{name}", "sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
             "net.ipv4.conf.all.rp_filter=2", "net.ipv6.conf.all.forwarding=1")  # fmt: skip
    for number, (name, rate) in enumerate(zip(LINKS, RATES)):
        call(*client, "link", "add", name, "type", "veth", "peer", "name", f"to-{name}", "netns", "server")
        for side, device, last in ((client, name, 2), (server, f"to-{name}", 1)):
            call(*side, "address", "add", f"10.77.{number}.{last}/24", "dev", device)
            call(*side, "address", "add", f"fd77:0:0:{number}::{last}/64", "dev", device, "nodad")
            call(*side, "link", "set", device, "up")
        metric = ["metric", str(100 + number)]
        call(*client, "route", "add", "default", "via", f"10.77.{number}.1", "dev", name, *metric)
        call(*client, "-6", "route", "add", "default", "via", f"fd77:0:0:{number}::1", "dev", name, *metric)
        call("nsenter", "--net=/run/netns/server", "tc", "qdisc", "add", "dev", f"to-{name}", "root", "netem", "rate", rate, "delay", "5ms")
    for number in range(10, 31):
        call(*server, "address", "add", f"203.0.113.{number}/32", "dev", "lo")
        call(*server, "address", "add", f"2001:db8:113::{number}/128", "dev", "lo", "nodad")
    serve()
    enter("client")
    eventually(lambda: tcp(WEB) and tcp(WEB6), lambda: "the server does not answer")
    routing_before.update(routing())


def enter(name):
    """Moves this thread into a network namespace. Debian 12's Python has no os.setns."""
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    require(libc.setns(namespace, CLONE_NEWNET) == 0, f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)


def serve():
    """A web server, an echo on port 7, and on port 9 a service that returns the sender's address."""
    www = pathlib.Path("/tmp/www")
    www.mkdir()
    for size in (1000, 1_000_000, SIZE):
        (www / f"{size}.bin").write_bytes(os.urandom(size))
    pathlib.Path("/tmp/nginx.conf").write_text(
        "user root; worker_processes 1; pid /tmp/nginx.pid; error_log /tmp/nginx.log; events {} http { access_log off; server {"
        f"listen {WEB}:80; listen {WEB}:8081; listen [{WEB6}]:80; root /tmp/www; "
        'location = /who { default_type text/plain; return 200 "$remote_addr\\n"; } } }'
    )
    call("nsenter", "--net=/run/netns/server", "nginx", "-c", "/tmp/nginx.conf")
    threading.Thread(target=serve_echoes, daemon=True).start()


def serve_echoes():
    enter("server")
    for address, family in ((WEB, socket.AF_INET), (WEB6, socket.AF_INET6)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 7))
        listener.listen(100)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        for port in (7, 9):
            it = socket.socket(family, socket.SOCK_DGRAM)
            it.bind((address, port))
            threading.Thread(target=echo, args=(it, port), daemon=True).start()


def accept(listener):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=hold, args=(connection,), daemon=True).start()


def hold(connection):
    """Holds the connection until the client closes or resets it."""
    with connection, contextlib.suppress(ConnectionError):
        connection.recv(1)


def echo(it, port):
    while True:
        payload, sender = it.recvfrom(2000)
        it.sendto(payload if port == 7 else sender[0].encode(), sender)


