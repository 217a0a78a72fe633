"""Checks Braid beside the programs that also set firewall rules: containers.py podman | docker | ufw | firewalld, or `list` and one of them.

Runs as root in a machine with Debian 12 that has nothing else to do, in the lab of lab.py. A third namespace is a device behind this machine, at a bridge
with two ports. Each run has one of these programs, and the commands that docs/book/src/gateway.md gives for it.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import lab
from lab import (
    LIMIT,
    LINK_ENTRIES,
    SIZE,
    WEB,
    WEB6,
    Background,
    both,
    braid,
    call,
    check,
    daemon,
    eventually,
    invite,
    make_lab,
    received,
    require,
    routing,
    run_checks,
    shared,
    start_relay,
)

WLAN, LTE = "10.77.0.2", "10.77.1.2"
LAN = "br-lan"
PHONE = "192.168.7.20"
GATEWAY = "192.168.7.1"
IMAGE = "debian-small"
SLICE = "video.slice"
ON_PHONE = ["nsenter", "--net=/run/netns/phone"]
ON_NEIGHBOUR = ["nsenter", "--net=/run/netns/neighbour"]
ON_SERVER = ["nsenter", "--net=/run/netns/server"]
# Asks who asks: one address a line, as the server sees it.
ASK_TCP = f"for i in 1 2 3 4 5 6; do curl -gsS --fail --max-time {LIMIT} http://{WEB}/who || exit; done"
ASK_TCP6 = ASK_TCP.replace(WEB, f"[{WEB6}]")
ASK_UDP = (
    "import socket\nfor i in range(6):\n s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    f" s.settimeout({LIMIT}); s.sendto(b'who', ('{WEB}', 9)); print(s.recv(100).decode())"
)
ASK_GATEWAY = ASK_UDP.replace(f"'{WEB}', 9", f"'{GATEWAY}', 53")


def main():
    of = sys.argv[-1]
    RUNS[of]()
    if sys.argv[1] == "list":
        print(*(name for name, _ in lab.CHECKS), sep="\n")
        return
    make_lab()
    make_lan()
    print(*versions(of), sep="\n", flush=True)
    run_checks()


def versions(of):
    packages = {"podman": ["podman", "crun", "netavark"], "docker": ["docker.io", "containerd", "runc"]}.get(of, [of])
    return call("dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages, "nftables", "iptables").splitlines()


def make_lan():
    """A phone and its neighbour at two ports of a bridge."""
    own = ["ip", "-n", "client"]
    call(*own, "link", "add", LAN, "type", "bridge")
    for number, name in ((20, "phone"), (21, "neighbour")):
        call("ip", "netns", "add", name)
        call(*own, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        call(*own, "link", "set", f"to-{name}", "master", LAN, "up")
        call("ip", "-n", name, "link", "set", "lo", "up")
        call("ip", "-n", name, "address", "add", f"192.168.7.{number}/24", "dev", "eth0")
        call("ip", "-n", name, "address", "add", f"fd07::{number}/64", "dev", "eth0", "nodad")
        call("ip", "-n", name, "link", "set", "eth0", "up")
    call(*own, "address", "add", f"{GATEWAY}/24", "dev", LAN)
    call(*own, "address", "add", "fd07::1/64", "dev", LAN, "nodad")
    call(*own, "link", "set", LAN, "up")
    for name in ("phone", "neighbour"):
        call("ip", "-n", name, "route", "add", "default", "via", GATEWAY)
        call("ip", "-n", name, "-6", "route", "add", "default", "via", "fd07::1")
    # Nothing is forwarded before Braid, so Braid also keeps new connections from outside away.
    call("sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0")
    # As dnsmasq: this machine answers what clients ask it.
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind((GATEWAY, 53))
    threading.Thread(target=lab.echo, args=(resolver, 53), daemon=True).start()
    # `braid doctor` reads the configuration of the next start.
    daemon.home.mkdir(exist_ok=True)
    pathlib.Path("/etc/braid").symlink_to(daemon.home)


def gateway(*lan, rules="", top=""):
    names = ", ".join(f'"{name}"' for name in lan)
    return f'scheduler = "round-robin"\n{top}{LINK_ENTRIES}[gateway]\nlan = [{names}]\n{rules}'


def asked(program, script, shell=("sh", "-c")):
    """The addresses that the server sees when the program's prefix runs the script."""
    return set(call(*program, *shell, script).split())


def asked_udp(program):
    return asked(program, ASK_UDP, ("python3", "-c"))


def use_both(flows, ask):
    """Waits until the flows that `ask` makes use both links. The first ones may use one: a round counts the expected sizes of earlier flows, too."""
    seen = set()
    eventually(lambda: seen.update(ask()) or both(seen), lambda: f"{flows} leave with {seen}; links: {daemon.status()['links']}", pause=0)


def phone_works():
    for ask in (lambda: asked(ON_PHONE, ASK_TCP), lambda: asked_udp(ON_PHONE), lambda: asked(ON_PHONE, ASK_TCP6)):
        use_both("the phone's flows", ask)
    seen = asked(ON_PHONE, ASK_GATEWAY, ("python3", "-c"))
    require(seen == {PHONE}, f"this machine sees {seen} when the phone asks it")


def phone_is_cut_off(script=ASK_TCP):
    """Nothing that the phone sends comes back; a short limit, so that the check does not take minutes."""
    script = script.replace(f"--max-time {LIMIT}", "--max-time 5")
    done = subprocess.run([*ON_PHONE, "sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    require(done.returncode != 0 and not done.stdout, f"the phone gets through: {done.stdout}")


def neighbours_talk():
    """Frames that the bridge forwards, which the firewall sees if br_netfilter is loaded."""
    for address in ("192.168.7.21", "fd07::21"):
        call(*ON_PHONE, "ping", "-c", "1", "-W", "20", address)


def doctor():
    """Doctor's check of other firewalls: its standing, what was found, and the remedy."""
    report = json.loads(braid("doctor", "--for", "gateway", "--json", fails_too=True))
    return next(check for check in report["checks"] if check["name"] == "other firewalls")


def firewall():
    """All rules, without counters."""
    rules = {f"nft: {line.strip()}" for line in call("nft", "-s", "list", "ruleset").splitlines()}
    for program in ("iptables", "ip6tables"):
        saved = re.sub(r"\[\d+:\d+\]", "", call(f"{program}-save"))
        rules |= {f"{program}: {line.strip()}" for line in saved.splitlines() if not line.startswith("#")}
    return rules


def settings():
    """Kernel settings that Braid or the other programs change."""
    names = ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv4.conf.all.rp_filter", "net.ipv4.conf.all.src_valid_mark"]
    return set(call("sysctl", *names).splitlines())


def system():
    return firewall() | settings() | routing()


def require_as_before(before):
    """Waits until everything is as before, but for what differs from one container to the next."""
    plain = lambda lines: {re.sub(r"veth\w+|\b[0-9a-f]{12,}\b|fe80::\S+|10\.88\.0\.\d+", "X", line) for line in lines}
    now = lambda: plain(system())
    before = plain(before)
    eventually(lambda: now() == before, lambda: f"added: {sorted(now() - before)}; gone: {sorted(before - now())}", pause=1)


def stop_braid():
    braid("down")
    daemon.process.wait(LIMIT)


def apply(config):
    daemon.configure(config)
    braid("reload")


def commands(heading):
    """The commands that the documentation gives under this heading of its section on firewalls."""
    section = pathlib.Path("/gateway.md").read_text().split(f"\n### {heading}\n")[1].split("\n#")[0]
    found = [line.strip().replace("sudo ", "") for line in section.splitlines() if line.startswith("    ")]
    require(found and all(found), f"no commands under {heading}")
    return found


def join_relay(*lan):
    """All flows are to go through a relay in the server's namespace."""
    apply(gateway(*lan, top='carry = "bond"\n'))
    if not lab.RELAY_LOG.exists():
        start_relay()
        braid("join", invite(), "--name", "home")
    good = lambda: [path["state"] for peer in daemon.status()["peers"] for path in peer["paths"]]
    eventually(lambda: good() == ["good", "good"], lambda: f"paths: {daemon.status()['peers']}")


def is_relay(addresses):
    """Whether these addresses, which the server saw, are of the host of the relay."""
    return bool(addresses) and all(address.startswith("203.0.113.") for address in addresses)


# Containers


def make_image():
    """A root with a shell, curl and Python from this machine's packages."""
    if (image := pathlib.Path("/tmp/image.tar")).exists():
        return str(image)
    programs = ["/usr/bin/dash", "/usr/bin/curl", "/usr/bin/python3.11", "/usr/bin/sleep"]
    files = {path for program in programs for path in re.findall(r"(?:=> |^\s+)(/\S+)", call("ldd", program), re.MULTILINE)}
    # The names by which they are found, below directories that are no links, and the files that those links lead to.
    files = {f"{os.path.realpath(os.path.dirname(path))}/{os.path.basename(path)}" for path in files}
    files |= {os.path.realpath(path) for path in files}
    links = ["/bin", "/lib", "/lib64", "/usr/bin/sh", "/usr/bin/python3"]
    library = ["/usr/lib/python3.11", "/etc/passwd", "/etc/group", "/etc/ssl/openssl.cnf", "/tmp"]
    os.makedirs("/tmp/empty/tmp", exist_ok=True)
    words = ["--exclude=/usr/lib/python3.11/test", "--exclude=/usr/lib/python3.11/idlelib", "--exclude=/tmp/*"]
    call("tar", "-cPf", str(image), *words, *links, *programs, *sorted(files), *library)
    return str(image)


class Engine:
    """Podman or Docker: the same commands."""

    def __init__(self, name, bridge, *fixed):
        self.name, self.bridge, self.fixed = name, bridge, fixed

    def __call__(self, *words, fails_too=False):
        return call(self.name, *words, fails_too=fails_too)

    def start(self, name, *words):
        """A container that waits for commands; returns the prefix that runs one in it."""
        self("run", "--detach", "--name", name, *words, IMAGE, "sleep", "1000000")
        return [self.name, "exec", name]

    def remove(self, name):
        self("kill", name)
        self("rm", "--force", name)

    def address(self, name):
        return self("inspect", "--format", "{{.NetworkSettings.IPAddress}}", name).strip()


def container_checks(engine, start_engine=lambda: None):
    of = engine.name
    before = set()
    inside = {}

    @check(f"{of}-alone")
    def alone():
        start_engine()
        engine("import", make_image(), IMAGE)
        inside["free"] = engine.start("free", "--publish", "8080:80")
        seen = asked(inside["free"], ASK_TCP)
        require(seen == {WLAN}, f"without Braid a container's flows leave with {seen}")
        before.update(system())

    rules = lambda: (
        f'[[app]]\nmatch = {{ cgroup = "/{SLICE}" }}\nlinks = ["lte0"]\n[[app]]\nmatch = {{ client = "{engine.address("named")}" }}\nlinks = ["wlan0"]\n'
    )

    @check(f"{of}-both-links")
    def both_links():
        daemon.start(gateway(engine.bridge, LAN))
        for ask in (lambda: asked(inside["free"], ASK_TCP), lambda: asked_udp(inside["free"])):
            use_both("flows of a container", ask)
        flows = json.loads(braid("switch", "flows", "--json"))["flows"]
        require(any(flow["client"].startswith(engine.address("free")) for flow in flows), f"not listed: {flows}")

    @check(f"{of}-rule-by-address")
    def rule_by_address():
        inside["named"] = engine.start("named", *engine.fixed)
        apply(gateway(engine.bridge, LAN, rules=rules()))
        for seen in (asked(inside["named"], ASK_TCP), asked_udp(inside["named"])):
            require(seen == {WLAN}, f"the rule names wlan0; flows leave with {seen}")
        use_both("flows of a container that no rule names", lambda: asked(inside["free"], ASK_TCP))

    @check(f"{of}-rule-by-cgroup")
    def rule_by_cgroup():
        inside["video"] = engine.start("video", "--cgroup-parent", SLICE)
        group = engine("exec", "video", "python3", "-c", "print(open('/proc/1/cgroup').read())")
        require(pathlib.Path(f"/sys/fs/cgroup/{SLICE}").is_dir(), f"there is no such control group; the container says {group}")
        for seen in (asked(inside["video"], ASK_TCP), asked_udp(inside["video"])):
            require(seen == {LTE}, f"the rule names lte0; flows leave with {seen}")
        use_both("flows of a container that no rule names", lambda: asked(inside["free"], ASK_TCP))

    @check(f"{of}-rule-by-cgroup-host-network")
    def host_network():
        inside["host"] = engine.start("host", "--network", "host", "--cgroup-parent", SLICE)
        for seen in (asked(inside["host"], ASK_TCP), asked_udp(inside["host"])):
            require(seen == {LTE}, f"the rule names lte0; flows leave with {seen}")

    @check(f"{of}-published-port")
    def published_port():
        serve = "import http.server as h; h.ThreadingHTTPServer(('', 80), h.SimpleHTTPRequestHandler).serve_forever()"
        engine("exec", "--detach", "free", "python3", "-c", serve)
        fetch = ["curl", "-sS", "--fail", "--max-time", "10", "-o", "/dev/null"]
        works = lambda prefix, host: subprocess.run([*prefix, *fetch, f"http://{host}:8080/etc/group"], timeout=LIMIT, capture_output=True).returncode == 0
        # From outside over the link that has the default route, from this machine, and from a device on the LAN.
        for prefix, host in ((ON_SERVER, WLAN), ([], WLAN), (ON_PHONE, GATEWAY)):
            eventually(lambda: works(prefix, host), lambda: f"{prefix} cannot fetch from {host}", pause=1)

    @check(f"{of}-bonded")
    def bonded():
        join_relay(engine.bridge, LAN)
        fetch = f"curl -sS --fail --max-time {LIMIT} -o /dev/null http://{WEB}/{SIZE}.bin"
        eventually(lambda: shared(lambda: asked(inside["free"], fetch)), lambda: f"bytes by link: {received}", pause=0)
        seen = asked(inside["free"], ASK_TCP) | asked_udp(inside["free"])
        require(is_relay(seen), f"flows leave with {seen}, not by the relay")
        apply(gateway(engine.bridge, LAN))

    @check(f"{of}-bridge-comes-again")
    def bridge_again():
        """The last container's end may remove the bridge."""
        for name in inside:
            engine.remove(name)
        inside.clear()
        inside["second"] = engine.start("second")
        use_both("flows of a container on the new bridge", lambda: asked(inside["second"], ASK_TCP))

    return inside, before


def first_container_again(engine, inside):
    """Braid is gone: a container's flows take the default route. Then only the container runs that ran before Braid."""
    seen = asked(inside["second"], ASK_TCP)
    require(seen == {WLAN}, f"after `braid down` flows leave with {seen}")
    engine.remove("second")
    engine.start("free", "--publish", "8080:80")


def podman():
    engine = Engine("podman", "podman0", "--ip", "10.88.0.50")

    inside, before = container_checks(engine)

    @check("podman-down")
    def down():
        stop_braid()
        first_container_again(engine, inside)
        require_as_before(before)


def docker():
    engine = Engine("docker", "docker0")

    def start_engine():
        running["dockerd"] = Background(["dockerd"], pathlib.Path("/tmp/dockerd.log"))
        running["dockerd"].wait_for("API listen on")

    running = {}
    inside, before = container_checks(engine, start_engine)

    @check("docker-stops-the-lan")
    def stops_the_lan():
        require(pathlib.Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text() == "1\n", "Docker does not use br_netfilter")
        found = doctor()
        require(found["verdict"] == "warning" and "DOCKER-USER" in found["remedy"] and LAN in found["remedy"], found)
        phone_is_cut_off()

    closed_firewall_checks("docker", "Docker", before, beside_docker, lambda: first_container_again(engine, inside))


def beside_docker():
    """Rules that come later hold for running flows, too. Frames from one port of a bridge to another pass the firewall (br_netfilter), and must not be
    taken for routed packets."""

    @check("docker-frames-of-the-lan")
    def frames_of_the_lan():
        neighbours_talk()
        # As a client that asks for its first address.
        ask = "import socket as s\nit = s.socket(s.AF_INET, s.SOCK_DGRAM)\nit.setsockopt(s.SOL_SOCKET, s.SO_BROADCAST, 1)\nit.bind(('0.0.0.0', 6868))\n"
        ask += "it.setsockopt(s.SOL_SOCKET, s.SO_BINDTODEVICE, b'eth0')\n[it.sendto(b'who', ('255.255.255.255', 6767)) for _ in range(3)]"
        hear = "import socket as s\nit = s.socket(s.AF_INET, s.SOCK_DGRAM)\nit.settimeout(20)\nit.bind(('', 6767))\nprint('hears', flush=True)\n"
        hear += "print(it.recvfrom(9)[1][0])"
        # The neighbour only has the address as long as it does not ask.
        call("ip", "-n", "phone", "address", "del", f"{PHONE}/24", "dev", "eth0")
        try:
            listener = Background([*ON_NEIGHBOUR, "python3", "-c", hear], pathlib.Path("/tmp/hear.log"))
            listener.wait_for("hears")
            call(*ON_PHONE, "python3", "-c", ask)
            heard = lambda: listener.log.read_text().split()
            eventually(lambda: listener.process.poll() is not None, lambda: "the neighbour waits", pause=1)
            require(heard()[-1] == "0.0.0.0", f"a frame from 0.0.0.0 does not pass the bridge: {heard()[-3:]}")
        finally:
            call("ip", "-n", "phone", "address", "add", f"{PHONE}/24", "dev", "eth0")
            call("ip", "-n", "phone", "route", "replace", "default", "via", GATEWAY)

    @check("docker-later-rule-ends-a-fast-flow")
    def later_rule():
        """The fast path goes round the firewall's chains, but not round a rule of somebody else that comes later."""
        with open("/tmp/www/large.bin", "wb") as file:
            file.truncate(200_000_000)
        download = subprocess.Popen([*ON_PHONE, "curl", "-sS", "-o", "/dev/null", f"http://{WEB}/large.bin"], stdin=subprocess.DEVNULL)
        try:
            flows = lambda: json.loads(braid("switch", "flows", "--json"))["flows"]
            eventually(lambda: any(flow["fast_path"] for flow in flows()), lambda: f"no flow takes the fast path: {flows()}")
            call("iptables", "-I", "DOCKER-USER", "-i", LAN, "-j", "DROP")
            sent = lambda: json.loads(call("ip", "-j", "-s", "link", "show", "dev", "to-phone"))[0]["stats64"]["tx"]["bytes"]

            def stands():
                before = sent()
                time.sleep(3)
                return sent() - before < 100_000

            eventually(stands, lambda: "the download goes on", pause=0)
            call("iptables", "-D", "DOCKER-USER", "-i", LAN, "-j", "DROP")
            eventually(lambda: not stands(), lambda: "the download does not go on without the rule", pause=0)
        finally:
            download.kill()
            download.wait()

    @check("docker-frames-of-another-bridge")
    def frames_of_another_bridge():
        own = ["ip", "-n", "client"]
        call(*own, "link", "add", "br-other", "type", "bridge")
        for number in (1, 2):
            name = f"other{number}"
            call("ip", "netns", "add", name)
            call(*own, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            call(*own, "link", "set", f"to-{name}", "master", "br-other", "up")
            call("ip", "-n", name, "address", "add", f"fd09::{number}/64", "dev", "eth0", "nodad")
            call("ip", "-n", name, "link", "set", "eth0", "up")
        call(*own, "link", "set", "br-other", "up")
        try:
            # Braid learns of the bridge when it has ports.
            ping = ["nsenter", "--net=/run/netns/other1", "ping", "-c", "1", "-W", "1", "fd09::2"]
            answered = lambda: subprocess.run(ping, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT).returncode == 0
            eventually(answered, lambda: f"no answer; {[line for line in firewall() if 'br-other' in line]}")
        finally:
            for words in (["link", "del", "to-other1"], ["link", "del", "to-other2"], ["link", "del", "br-other"]):
                call(*own, *words)


def ufw():
    before = set()

    def allow_and_delete(between=lambda: None):
        words = commands("ufw")[0].split()[2:]
        call("ufw", "route", *words)
        between()
        call("ufw", "route", "delete", *words)

    @check("ufw-stops-the-lan")
    def stops_the_lan():
        call("ufw", "--force", "enable")
        # Its first change of a rule also loads rules for IPv6 that stay.
        allow_and_delete()
        before.update(system())
        daemon.start(gateway(LAN))
        found = doctor()
        require(found["verdict"] == "warning" and f"ufw route allow in on {LAN}" in found["remedy"], found)
        phone_is_cut_off()

    @check("ufw-drops-bonded-flows")
    def drops_bonded_flows():
        """What the forward chain lets pass is not all: bonded flows come in."""
        allow_and_delete(only_bonded_flows_are_dropped)

    def only_bonded_flows_are_dropped():
        require((found := doctor())["verdict"] == "ok", found)
        join_relay(LAN)
        found = doctor()
        require(found["verdict"] == "warning" and "0xb1d000fe" in found["remedy"] and "before.rules" in found["remedy"], found)
        phone_is_cut_off()
        apply(gateway(LAN))

    closed_firewall_checks("ufw", "ufw", before)


def firewalld():
    before = set()
    running = {}

    @check("firewalld-stops-the-lan")
    def stops_the_lan():
        running["firewalld"] = Background(["firewalld", "--nofork", "--nopid"], pathlib.Path("/tmp/firewalld.log"))
        eventually(lambda: "running" in call("firewall-cmd", "--state", fails_too=True), lambda: "firewalld does not start", pause=1)
        before.update(system())
        daemon.start(gateway(LAN))
        found = doctor()
        require(found["verdict"] == "warning" and f"--zone=trusted --change-interface={LAN}" in found["remedy"], found)
        phone_is_cut_off()

    closed_firewall_checks("firewalld", "firewalld", before)


def closed_firewall_checks(of, heading, before, more=lambda: None, restore=lambda: None):
    """What follows once the firewall of this section in the documentation stops a LAN. `restore` reverts what `more` and others changed besides Braid."""

    opened = set()

    @check(f"{of}-documented-commands")
    def documented():
        earlier = firewall()
        for line in commands(heading):
            call("sh", "-c", line)
        opened.update(firewall() - earlier)
        require(opened, "the commands add no rule")
        require((found := doctor())["verdict"] == "ok", found)
        phone_works()

    more()

    @check(f"{of}-own-flows")
    def own_flows():
        for to in (WEB, WEB6):
            for kind, connect in (("TCP", lambda: lab.tcp(to)), ("UDP", lambda: lab.udp(to, True)), ("unconnected UDP", lambda: lab.udp(to, False))):
                use_both(f"this machine's own {kind} flows to {to}", lambda: lab.addresses_of(8, connect))

    @check(f"{of}-lan-bonded")
    def lan_bonded():
        join_relay(LAN)
        fetch = f"curl -gsS --fail --max-time {LIMIT} -o /dev/null http://HOST/{SIZE}.bin"
        for host in (WEB, f"[{WEB6}]"):
            eventually(lambda: shared(lambda: asked(ON_PHONE, fetch.replace("HOST", host))), lambda: f"{host}: bytes by link: {received}", pause=0)
        seen = asked(ON_PHONE, ASK_TCP) | asked_udp(ON_PHONE)
        require(is_relay(seen), f"flows leave with {seen}, not by the relay")

    @check(f"{of}-down")
    def down():
        stop_braid()
        restore()
        # The documented commands are the user's, and stay.
        require_as_before(before | opened)


RUNS = {"podman": podman, "docker": docker, "ufw": ufw, "firewalld": firewalld}

if __name__ == "__main__":
    main()
