"""Checks Braid's behaviour on a kernel from outside, with real sockets: checks.py checks | doctor KERNEL RUN | list.

Runs as root in a machine that has nothing else to do. Two namespaces, joined by two links with limited rates: this process is in the client's, web
server, echo and relay are in the server's. Each check prints "PASS name" or "FAIL name: why"; `list` prints the names.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
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
LINK_ENTRIES = "".join(f'[[link]]\nname = "{name}"\n' for name in LINKS)
RULES = """
[[app]]
match = { name = "curl" }
links = ["lte0"]
[[app]]
match = { exe = "/usr/local/bin/fetch" }
links = ["wlan0"]
[[app]]
match = { cgroup = "/special" }
links = ["lte0"]
[[app]]
match = { port = 8081 }
links = ["wlan0"]
"""
BOND = '[[app]]\nmatch = { name = "curl" }\ncarry = "bond"\n'


def main():
    if sys.argv[1:] == ["list"]:
        print(*(name for name, _ in CHECKS), sep="\n")
        return
    make_lab()
    if sys.argv[1:2] == ["doctor"]:
        doctor_agrees_with_up(*sys.argv[2:])
        return
    for name, check in CHECKS:
        begin = time.monotonic()
        try:
            check()
            print(f"PASS {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception as error:
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
            print(*daemon.end_of_log(), sep="\n    ", flush=True)


CHECKS = []


def check(name):
    def register(function):
        CHECKS.append((name, function))
        return function

    return register


@check("doctor")
def doctor():
    for mode in ("up", "run"):
        braid("doctor", "--for", mode)


@check("up")
def up():
    daemon.start(f'scheduler = "max-throughput"\n{LINK_ENTRIES}')
    require(daemon.status()["interception"] == "ebpf", daemon.status())


@check("downloads-at-once")
def downloads_at_once():
    running = [curl_start(f"http://{WEB}/1000000.bin") for _ in range(8)]
    require({curl_end(child) for child in running} == {"10.77.0.2", "10.77.1.2"}, "one link carried all of 8 downloads")


@check("reload")
def reload():
    daemon.configure(f'scheduler = "round-robin"\n{LINK_ENTRIES}{RULES}')
    braid("reload")
    require(daemon.status()["scheduler"] == "round-robin", daemon.status())


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


for family, to in (("4", WEB), ("6", WEB6)):

    @check(f"tcp{family}")
    def steer_tcp(to=to):
        seen = addresses_of(8, lambda: tcp(to))
        require(both(seen), seen)

    @check(f"udp{family}-connected")
    def steer_connected(to=to):
        seen = addresses_of(8, lambda: udp(to, True))
        require(both(seen), seen)

    @check(f"udp{family}-unconnected")
    def steer_unconnected(to=to):
        seen = addresses_of(8, lambda: udp(to, False))
        require(both(seen), seen)

    for connected in (True, False):

        @check(f"udp{family}-bytes-{'connected' if connected else 'unconnected'}")
        def count_bytes(to=to, connected=connected):
            earlier = {flow["id"] for flow in udp_flows()}
            with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM) as it:
                it.settimeout(LIMIT)
                if connected:
                    it.connect((to, 7))
                for _ in range(20):
                    it.send(b"x" * 100) if connected else it.sendto(b"x" * 100, (to, 7))
                    it.recv(200)
                counted = lambda: [(flow["tx_bytes"], flow["rx_bytes"]) for flow in udp_flows() if flow["id"] not in earlier]
                eventually(lambda: counted() == [(2000, 2000)], lambda: f"2000 bytes went each way; flows: {udp_flows()}")


def udp_flows():
    flows = json.loads(braid("flows", "--json"))["flows"]
    return [flow for flow in flows if flow["protocol"] == "udp" and flow["pid"] == os.getpid() and flow["remote"].endswith(":7")]


@check("rule-by-name")
def rule_by_name():
    seen = addresses_of(4, lambda: curl(f"http://{WEB}/1000.bin"))
    require(seen == {"10.77.1.2"}, seen)


@check("rule-by-executable")
def rule_by_executable():
    shutil.copy("/usr/bin/curl", "/usr/local/bin/fetch")
    seen = addresses_of(4, lambda: curl(f"http://{WEB}/1000.bin", program=["/usr/local/bin/fetch"]))
    require(seen == {"10.77.0.2"}, seen)


@check("rule-by-cgroup")
def rule_by_cgroup():
    group = pathlib.Path("/sys/fs/cgroup/special")
    group.mkdir(exist_ok=True)
    # A program that no other rule names.
    shutil.copy("/usr/bin/curl", "/usr/local/bin/other")
    enter = ["sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$@"', "sh", "/usr/local/bin/other"]
    seen = addresses_of(4, lambda: curl(f"http://{WEB}/1000.bin", program=enter))
    require(seen == {"10.77.1.2"}, seen)
    free = addresses_of(4, lambda: curl(f"http://{WEB}/1000.bin", program=["/usr/local/bin/other"]))
    require(both(free), f"outside of the group: {free}")


@check("rule-by-port")
def rule_by_port():
    seen = addresses_of(4, lambda: curl(f"http://{WEB}:8081/1000.bin", program=["/usr/local/bin/other"]))
    require(seen == {"10.77.0.2"}, seen)


@check("relay-and-join")
def relay_and_join():
    start_relay()
    daemon.configure(f'scheduler = "round-robin"\n{LINK_ENTRIES}{BOND}')
    braid("reload")
    braid("join", invite(), "--name", "home")
    good = lambda: [path["state"] for peer in daemon.status()["peers"] for path in peer["paths"]]
    eventually(lambda: good() == ["good", "good"], lambda: f"paths: {daemon.status()['peers']}")


@check("bond")
def bond():
    # The first seconds of a bond may go over one link.
    eventually(lambda: shared(lambda: curl(f"http://{WEB}/{SIZE}.bin")), lambda: f"bytes by link: {received}", pause=0)


@check("kill")
def kill():
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    curl(f"http://{WEB}/1000.bin")
    eventually(lambda: routing() == routing_before, lambda: f"left behind: {routing() - routing_before}")
    require(tcp(WEB) == "10.77.0.2", "the system's own choice is the first link")


@check("start-after-kill")
def start_after_kill():
    daemon.start(f'scheduler = "round-robin"\n{LINK_ENTRIES}')
    seen = addresses_of(8, lambda: tcp(WEB))
    require(both(seen), seen)


@check("down")
def down():
    braid("down")
    daemon.process.wait(LIMIT)
    require(routing() == routing_before, f"left behind: {routing() - routing_before}")
    seen = addresses_of(4, lambda: tcp(WEB))
    require(seen == {"10.77.0.2"}, seen)


# The setup of strongSwan for a tunnel with all IPv4 traffic: an address, a route that selects it, and policies; here with fixed keys at both ends.
TUNNEL = ("10.77.0.2", IPSEC)
INNER = "10.200.0.2"


@check("ipsec")
def ipsec():
    own, far = ["ip", "-n", "client"], ["ip", "-n", "server"]
    call(*own, "address", "add", f"{INNER}/32", "dev", "wlan0")
    call(*own, "route", "add", "default", "via", "10.77.0.1", "dev", "wlan0", "src", INNER, "table", "220")
    call(*own, "rule", "add", "priority", "220", "table", "220")
    call(*far, "route", "add", INNER, "via", "10.77.0.2")
    for spi, (src, dst) in ((0x101, TUNNEL), (0x102, TUNNEL[::-1])):
        ends = ["src", src, "dst", dst, "proto", "esp"]
        for side in (own, far):
            call(*side, "xfrm", "state", "add", *ends, "spi", hex(spi), "reqid", "1", "mode", "tunnel", "aead", "rfc4106(gcm(aes))", f"0x{spi:040x}", "128")
        template = ["tmpl", *ends, "reqid", "1", "mode", "tunnel"]
        inner = ["src", f"{INNER}/32", "dst", "0.0.0.0/0"] if src == TUNNEL[0] else ["src", "0.0.0.0/0", "dst", f"{INNER}/32"]
        out, into = (own, far) if src == TUNNEL[0] else (far, own)
        call(*out, "xfrm", "policy", "add", *inner, "dir", "out", *template)
        call(*into, "xfrm", "policy", "add", *inner, "dir", "in", *template)
    require(tcp(WEB) == INNER, "the tunnel does not work without Braid")
    daemon.start(f'scheduler = "round-robin"\n{LINK_ENTRIES}')
    before = encrypted()
    # A packet with a link's address would match no policy, and the server would see that address.
    seen = {address for _ in range(4) for address in (tcp(WEB), udp(WEB, True), udp(WEB, False), curl(f"http://{WEB}/1000.bin"))}
    require(seen == {INNER}, f"what the policy covers leaves with {seen}")
    require(encrypted() - before >= 4 * 4, f"only {encrypted() - before} packets were encrypted")
    require(both(addresses_of(4, lambda: tcp(WEB6))), "what the policy does not cover is left alone too")
    for side in (own, far):
        call(*side, "xfrm", "policy", "flush")
        call(*side, "xfrm", "state", "flush")
    call(*own, "rule", "del", "priority", "220")
    call(*own, "route", "flush", "table", "220")
    call(*own, "address", "del", f"{INNER}/32", "dev", "wlan0")
    eventually(lambda: both(addresses_of(4, lambda: tcp(WEB))), lambda: "flows do not use both links again")
    braid("down")
    daemon.process.wait(LIMIT)


def encrypted():
    """Packets that this end has sent through the tunnel."""
    said = call("ip", "-s", "xfrm", "state", "get", "src", TUNNEL[0], "dst", TUNNEL[1], "proto", "esp", "spi", "0x101")
    return int(said.split("lifetime current:")[1].split("(bytes),")[1].split("(packets)")[0])


@check("run")
def run():
    loop = f'for i in 1 2 3 4; do curl -s --max-time {LIMIT} -o /dev/null -w "%{{local_ip}} " http://{WEB}/1000.bin; done'
    said = as_nobody("run", "--scheduler", "round-robin", "--", "sh", "-c", loop)
    require(both(set(said.split())), said)


@check("run-udp")
def run_udp():
    ask = (
        "import socket\nfor i in range(4):\n s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f" s.settimeout({LIMIT}); s.connect(('{WEB}', 9)); s.send(b'who'); print(s.recv(100).decode())"
    )
    said = as_nobody("run", "--scheduler", "round-robin", "--", "python3", "-c", ask)
    require(both(set(said.split())), said)


@check("run-relay")
def run_relay():
    as_nobody("join", "--user", invite(), "--name", "home")
    fetch = ["run", "--relay", "home", "--", "curl", "-sS", "--fail", "--max-time", str(LIMIT), "-o", "/dev/null", f"http://{WEB}/{SIZE}.bin"]
    eventually(lambda: shared(lambda: as_nobody(*fetch)), lambda: f"bytes by link: {received}", pause=0)


@check("get")
def get():
    folder = HOME / "got"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    require(shared(lambda: as_nobody("get", "--output-dir", str(folder), f"http://{WEB}/{SIZE}.bin")), f"bytes by link: {received}")
    require((folder / f"{SIZE}.bin").read_bytes() == pathlib.Path(f"/tmp/www/{SIZE}.bin").read_bytes(), "the file differs")


@check("proxy")
def proxy():
    words = ["proxy", "--scheduler", "round-robin"]
    with contextlib.closing(Background([*NOBODY, "env", f"HOME={HOME}", "braid", *words], HOME / "proxy.log")) as running:
        running.wait_for("HTTP and SOCKS5 on")
        for way in ("http", "socks5h"):
            fetch = lambda: [curl(f"http://{WEB}/1000000.bin", "--proxy", f"{way}://127.0.0.1:5758") for _ in range(4)]
            require(shared(fetch), f"bytes by link by {way}: {received}")


def doctor_agrees_with_up(kernel, oddity):
    """Prints what doctor says, which must be what is known of the kernel; a daemon must then start, or not, and run work, or not, as it said.

    Prints the words of a daemon that does not start.
    """
    require_oddity(oddity)
    print(braid("doctor", fails_too=True))
    up_works, run_works = EXPECTED.get(oddity) or EXPECTED[kernel]
    promised = doctor_promises("up")
    try:
        daemon.start(f'scheduler = "round-robin"\n{LINK_ENTRIES}')
        started = both(addresses_of(8, lambda: tcp(WEB)))
        braid("down")
    except Exception:
        started = False
        print("braid daemon says:", *daemon.end_of_log(), sep="\n    ")
    print(f"{'PASS' if promised == started == up_works else 'FAIL'} doctor-agrees-with-up: doctor says {promised}, up starts: {started}, expected: {up_works}")
    promised = doctor_promises("run", *NOBODY)
    try:
        run()
        works = True
    except Exception as error:
        works = False
        print(f"braid run: {error}")
    print(f"{'PASS' if promised == works == run_works else 'FAIL'} doctor-agrees-with-run: doctor says {promised}, run works: {works}, expected: {run_works}", flush=True)


# Whether `up` and `run` work on each kernel, and where one thing is missing.
EXPECTED = {
    "5.10": (False, True),
    "6.1": (True, True),
    "6.12": (True, True),
    "newest": (True, True),
    "doctor-no-btf": (False, True),
    "doctor-lockdown": (False, True),
    # `up` mounts one for itself.
    "doctor-no-cgroup2": (True, True),
}


def require_oddity(oddity):
    """The kernel must really lack the feature that names the run."""
    read = lambda path: pathlib.Path(path).read_text()
    if oddity == "doctor-no-btf":
        require(not pathlib.Path("/sys/kernel/btf/vmlinux").exists(), "the kernel still shows its types")
    elif oddity == "doctor-lockdown":
        require("[confidentiality]" in read("/sys/kernel/security/lockdown"), "the kernel is not locked down")
    elif oddity == "doctor-no-cgroup2":
        require(" cgroup2 " not in read("/proc/self/mountinfo"), "a cgroup v2 is mounted")


def doctor_promises(mode, *user):
    """Doctor's exit status, which is its interface for scripts."""
    return subprocess.run([*user, "braid", "doctor", "--for", mode], stdout=subprocess.DEVNULL, timeout=2 * LIMIT).returncode == 0


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
    words = ["relay", "--listen", "[::]:5757", "--allow", "203.0.113.0/24", "--state-dir", "/tmp/relay"]
    relay = Background(["nsenter", "--net=/run/netns/server", "braid", *words], pathlib.Path("/tmp/relay.log"))
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
    os.setns(os.open("/run/netns/client", os.O_RDONLY), os.CLONE_NEWNET)
    eventually(lambda: tcp(WEB) and tcp(WEB6), lambda: "the server does not answer")
    routing_before.update(routing())


def serve():
    """A web server, an echo on port 7, and on port 9 a service that returns the sender's address."""
    www = pathlib.Path("/tmp/www")
    www.mkdir()
    for size in (1000, 1_000_000, SIZE):
        (www / f"{size}.bin").write_bytes(os.urandom(size))
    pathlib.Path("/tmp/nginx.conf").write_text(
        "user root; worker_processes 1; pid /tmp/nginx.pid; error_log /tmp/nginx.log; events {} http { access_log off; server {"
        f"listen {WEB}:80; listen {WEB}:8081; listen [{WEB6}]:80; root /tmp/www; }} }}"
    )
    call("nsenter", "--net=/run/netns/server", "nginx", "-c", "/tmp/nginx.conf")
    threading.Thread(target=serve_echoes, daemon=True).start()


def serve_echoes():
    os.setns(os.open("/run/netns/server", os.O_RDONLY), os.CLONE_NEWNET)
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


if __name__ == "__main__":
    main()
