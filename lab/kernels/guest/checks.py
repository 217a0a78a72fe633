"""Checks Braid's behaviour on a kernel from outside, with real sockets: checks.py checks | doctor KERNEL RUN | list.

Runs as root in a machine that has nothing else to do, in the lab of lab.py. Each check prints "PASS name" or "FAIL name: why"; `list` prints the names.
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

from lab import (
    Background,
    CHECKS,
    HOME,
    IPSEC,
    LIMIT,
    LINK_ENTRIES,
    NOBODY,
    SIZE,
    WEB,
    WEB6,
    addresses_of,
    as_nobody,
    both,
    braid,
    call,
    check,
    curl,
    curl_end,
    curl_start,
    daemon,
    eventually,
    invite,
    make_lab,
    received,
    require,
    routing,
    routing_before,
    run_checks,
    shared,
    start_relay,
    tcp,
    udp,
)

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
    run_checks()


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


if __name__ == "__main__":
    main()
