"""Checks Braid's ad-hoc device: adhoc.py [list] adhoc | macsec.

`adhoc` compares it with Linux bonding, team, batman-adv and babeld, and checks its handovers; `macsec` checks groups with a key.

Runs as root in a machine that has nothing else to do. Two hosts, `a` and `b`, have two radios each, `r0` and `r1`. Each is the end of a veth pair. The
other ends are ports of bridges in the namespace `air`: one bridge for each pair of radios.
"""

import contextlib
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import lab
from lab import LIMIT, Background, call, check, eventually, require, run_checks

HOSTS = ("a", "b")
RADIOS = ("r0", "r1")
# The hosts' addresses, whatever carries them.
OWN = ("10.60.0.1", "10.60.0.2")
# Addresses of a third link, which nothing disturbs: a gap there is the machine's.
STEADY = ("10.61.0.1", "10.61.0.2")
ECHO, BABEL = 7, 33123
PERIOD = 0.01
# How long a radio stays broken. A longer gap counts as endless.
BROKEN = 5.0
# An emulated processor does not carry the full rate.
RATE = "5mbit" if "TCG" in pathlib.Path("/proc/cpuinfo").read_text() else "50mbit"
SECONDS = 8
STALL = 0.05
# What breaks a radio, and how long vi0's pings may stay without an answer.
LONGEST = {"carrier lost": 0.1, "black hole": 0.5}
BREAKS = tuple(LONGEST)
BONDING = "arp_interval 50 arp_ip_target {peer} arp_missed_max 2"

RESULTS = {}
WAYS = {}


class Way:
    """One way to join the radios: `make` is a context that joins them at both hosts, and gives a function that says whether both radios are in use."""

    def __init__(self, name, make, shared, broken, rounds, is_asserted):
        self.name, self.make, self.shared, self.broken, self.rounds, self.is_asserted = name, make, shared, broken, rounds, is_asserted


def way(name, shared=False, broken=True, rounds=1, is_asserted=False):
    """Registers a way.

    `shared`: the radios of both pairs are in one segment. `broken`: its radios are broken; else only its rate is measured. `is_asserted`: its gaps must be
    short.
    """

    def register(function):
        made = WAYS[name] = Way(name, contextlib.contextmanager(function), shared, broken, rounds, is_asserted)
        check("measured-" + name.replace(" ", "-").replace(",", ""))(lambda: measure(made))
        return function

    return register


def main():
    is_macsec = "macsec" in sys.argv[1:]
    lab.CHECKS[:] = [(name, check) for name, check in lab.CHECKS if name.startswith("macsec-") == is_macsec]
    if "list" in sys.argv[1:]:
        print(*(name for name, _ in lab.CHECKS), sep="\n")
        return
    run_checks()
    if not is_macsec:
        print_tables()


# The hosts.


def on(name):
    return ["nsenter", f"--net=/run/netns/{name}"]


def ip(name, line):
    return call("ip", "-n", name, *line.split())


def inside(name, work):
    """What `work` returns or raises, run in a thread in this namespace."""
    outcome = []

    def run():
        try:
            lab.enter(name)
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error:
        raise error
    return value


@contextlib.contextmanager
def hosts(shared=False, names=HOSTS):
    """Hosts whose radios are up and have no addresses."""
    try:
        ip_netns("add", "air")
        for number, _ in enumerate(RADIOS):
            ip("air", f"link add s{number} mtu 1600 type bridge forward_delay 0 mcast_snooping 0")
            ip("air", f"link set s{number} up")
        for name in names:
            ip_netns("add", name)
            ip(name, "link set lo up")
            call(*on(name), "sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
            for number, radio in enumerate(RADIOS):
                ip("air", f"link add {name}{number} mtu 1600 type veth peer name {radio} netns {name}")
                ip("air", f"link set {name}{number} master s{0 if shared else number} up")
                ip(name, f"link set {radio} up")
        ip("a", "link add steady type veth peer name steady netns b")
        for name, address in zip(HOSTS, STEADY):
            ip(name, f"address add {address}/24 dev steady")
            ip(name, "link set steady up")
        yield
    finally:
        for name in ("air", *names):
            with contextlib.suppress(lab.Failed):
                ip_netns("del", name)


def ip_netns(what, name):
    call("ip", "netns", what, name)


def break_radio(number, how):
    """Both ends lose their carrier, or each drops what the other sends. One process does both ends at once: an emulated processor takes long to start one."""
    change_ports(number, ("ip", "link set {} down") if how == "carrier lost" else ("tc", "qdisc replace dev {} root netem loss 100%"))


def repair_radio(number, how):
    change_ports(number, ("ip", "link set {} up") if how == "carrier lost" else ("tc", "qdisc del dev {} root"))


def change_ports(number, change):
    program, line = change
    batch = pathlib.Path("/tmp/batch")
    batch.write_text("".join(line.format(f"{name}{number}") + "\n" for name in HOSTS))
    call(program, "-n", "air", "-batch", str(batch))


def have_carriers():
    """Whether all radios of both hosts have one."""
    links = [link for name in HOSTS for link in json.loads(ip(name, "-j link")) if link["ifname"] in RADIOS]
    return sum("LOWER_UP" in link["flags"] for link in links) == 4


# Ways.


@way("one bare radio")
def bare():
    for name, address in zip(HOSTS, OWN):
        ip(name, f"address add {address}/24 dev r0")
    yield have_carriers


@contextlib.contextmanager
def devices(more=(), names=HOSTS):
    """`braid adhoc up` at each of these hosts, with both radios."""
    with contextlib.ExitStack() as stack:
        for name in names:
            words = [word for radio in RADIOS for word in ("--radio", radio)] + [*more, "--socket", f"/tmp/adhoc-{name}.socket"]
            running = Background([*on(name), "braid", "adhoc", "up", *words], pathlib.Path(f"/tmp/adhoc-{name}.log"))
            stack.callback(running.close)
            eventually(lambda: adhoc(name, "--json") or running.process.poll() is not None, lambda: f"no device: {running.log.read_text()}")
            require(running.process.poll() is None, f"braid adhoc up ended: {running.log.read_text()}")
            ip(name, f"address add 10.60.0.{'abc'.index(name) + 1}/24 dev vi0")
        yield


def adhoc(name, *words):
    """What `braid adhoc` prints, or nothing if it fails."""
    words = [*on(name), "env", f"BRAID_SOCKET=/tmp/adhoc-{name}.socket", "braid", "adhoc", *words]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * LIMIT)
    return done.stdout if done.returncode == 0 else ""


def neighbours(name):
    return json.loads(adhoc(name, "neighbours", "--json") or '{"neighbours": []}')["neighbours"]


def pairs_are_up(names=HOSTS):
    """Whether each host reaches one neighbour over both radios."""
    up = lambda row: row["state"] == "up" and row["rtt_us"] is not None
    return all(sum(map(up, neighbours(name))) == len(RADIOS) for name in names)


@way("vi0", rounds=3, is_asserted=True)
def vi0():
    with devices():
        yield pairs_are_up


@way("vi0, spread frame", broken=False)
def vi0_by_frame():
    with devices(["--spread", "frame"]):
        yield pairs_are_up


def bond(mode, options, primary=""):
    """A bond of both radios at each host."""
    for name, address, peer in zip(HOSTS, OWN, reversed(OWN)):
        ip(name, f"link add bond0 type bond mode {mode} {options.format(peer=peer)}")
        for radio in RADIOS:
            ip(name, f"link set {radio} down")
            ip(name, f"link set {radio} master bond0")
        if primary:
            ip(name, f"link set bond0 type bond primary {primary}")
        ip(name, f"address add {address}/24 dev bond0")
        ip(name, "link set bond0 up")

    def are_up():
        said = [call(*on(name), "cat", "/proc/net/bonding/bond0") for name in HOSTS]
        return all(text.count("MII Status: up") == 3 for text in said) and (not primary or all(f"Active Slave: {primary}" in text for text in said))

    return are_up


# With this monitor, the backup counts as up while it receives what the active radio sends: on one segment only.
@way("bonding active-backup", shared=True)
def active_backup():
    yield bond("active-backup", BONDING, "r0")


@way("bonding balance-rr")
def balance_rr():
    yield bond("balance-rr", BONDING)


@way("bonding balance-xor")
def balance_xor():
    yield bond("balance-xor", BONDING + " xmit_hash_policy layer3+4")


# Supports no ARP monitor, and expects one segment.
@way("bonding balance-alb", shared=True)
def balance_alb():
    yield bond("balance-alb", "miimon 10")


def team(runner, watch):
    """A team of both radios at each host, with a teamd each."""
    with contextlib.ExitStack() as stack:
        for name, address, peer in zip(HOSTS, OWN, reversed(OWN)):
            for radio in RADIOS:
                ip(name, f"link set {radio} down")
            ports = {"r0": {"prio": 10}, "r1": {"prio": 1}}
            watching = {**watch, "source_host": address, "target_host": peer} if watch["name"] == "arp_ping" else watch
            config = {"device": f"team{name}", "runner": runner, "link_watch": watching, "ports": ports}
            words = ["teamd", "-p", f"/run/teamd-{name}.pid", "-c", json.dumps(config)]
            running = Background([*on(name), *words], pathlib.Path(f"/tmp/teamd-{name}.log"))
            stack.callback(running.close)
            exists = lambda: f"team{name}" in ip(name, "-o link") or running.process.poll() is not None
            eventually(exists, lambda: running.log.read_text())
            require(running.process.poll() is None, f"teamd ended: {running.log.read_text()}")
            ip(name, f"address add {address}/24 dev team{name}")
            ip(name, f"link set team{name} up")
        yield have_carriers


@way("team activebackup")
def team_activebackup():
    yield from team({"name": "activebackup"}, {"name": "arp_ping", "interval": 50, "missed_max": 2})


@way("team roundrobin")
def team_roundrobin():
    yield from team({"name": "roundrobin"}, {"name": "ethtool"})


def batman(interval):
    """batman-adv in bonding mode, so that neighbours' frames take turns over both radios."""
    for name, address in zip(HOSTS, OWN):
        # Its headers must not make it fragment frames.
        for radio in RADIOS:
            ip(name, f"link set {radio} mtu 1560")
        ip(name, "link add bat0 type batadv")
        for radio in RADIOS:
            ip(name, f"link set {radio} master bat0")
        for words in (["bonding", "1"], ["orig_interval", str(interval)]):
            call(*on(name), "batctl", "meshif", "bat0", *words)
        ip(name, f"address add {address}/24 dev bat0")
        ip(name, "link set bat0 up")

    def are_up():
        said = [call(*on(name), "batctl", "meshif", "bat0", "originators", "-H") for name in HOSTS]
        good = lambda text, radio: any(int(quality) > 200 for quality in re.findall(rf"\( *(\d+)\).*\[ *{radio}\]", text))
        return all(good(text, radio) for text in said for radio in RADIOS)

    return are_up


@way("batman-adv")
def batman_slow():
    yield batman(1000)


@way("batman-adv, interval 100 ms")
def batman_fast():
    yield batman(100)


@way("babeld")
def babeld():
    with contextlib.ExitStack() as stack:
        for number, (name, address) in enumerate(zip(HOSTS, OWN)):
            ip(name, f"address add {address}/32 dev lo")
            for radio in RADIOS:
                ip(name, f"address add 10.77.{radio[1]}.{number + 1}/24 dev {radio}")
            words = ["-C", "redistribute local ip 10.60.0.0/24 allow", "-C", "redistribute local deny"]
            words += ["-g", str(BABEL), "-I", f"/run/babeld-{name}.pid", "-S", f"/tmp/babeld-{name}.state", *RADIOS]
            running = Background([*on(name), "babeld", *words], pathlib.Path(f"/tmp/babeld-{name}.log"))
            stack.callback(running.close)
        yield lambda: all(inside(name, babel_routes) == len(RADIOS) for name in HOSTS)


def babel_routes():
    """How many ways babeld has to the other host."""
    with contextlib.suppress(ConnectionError), socket.create_connection(("::1", BABEL), timeout=LIMIT) as it:
        it.sendall(b"dump\nquit\n")
        said = b"".join(iter(lambda: it.recv(65536), b"")).decode()
        return len(re.findall(r"^add route \S+ prefix 10\.60\.\S+ .* metric (?!65535)\d+ refmetric 0 ", said, re.MULTILINE))
    return 0


# Traffic.


class Pings:
    """Pings from `a` to `b`, each 10 ms, and the times of their answers."""

    def __init__(self, source, to):
        self.seen, self.rest = [], ""
        # A file, so that this process does not wake up for each answer: an emulated processor is slow.
        self.path = pathlib.Path(f"/tmp/pings-{to}.log")
        words = [*on("a"), "ping", "-n", "-D", "-i", str(PERIOD), "-W", "1", "-I", source, to]
        with open(self.path, "w") as output:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.file = open(self.path)

    @property
    def answers(self):
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        self.seen += [float(line[1 : line.index("]")]) for line in lines if " bytes from " in line]
        return self.seen

    def close(self):
        self.process.terminate()
        self.process.wait(LIMIT)
        self.file.close()


class Flow:
    """A TCP connection from `a` to an echo at `b`: a request each 10 ms, and the times of the answers."""

    def __init__(self, source, to):
        self.answers, self.ended, self.is_closing = [], None, False
        self.listener = inside("b", lambda: socket.create_server(("", ECHO)))
        threading.Thread(target=self.serve, daemon=True).start()
        self.it = inside("a", lambda: socket.create_connection((to, ECHO), timeout=LIMIT, source_address=(source, 0)))
        self.it.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self.ask, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            it, _ = self.listener.accept()
            with it:
                it.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while part := it.recv(100):
                    it.sendall(part)

    def ask(self):
        try:
            while not self.is_closing:
                self.it.sendall(b"x" * 100)
                left = 100
                while left:
                    part = self.it.recv(left)
                    if not part:
                        raise ConnectionError("the other end closed it")
                    left -= len(part)
                self.answers.append(time.time())
                time.sleep(PERIOD)
        except OSError as error:
            self.ended = None if self.is_closing else error

    def close(self):
        self.is_closing = True
        self.it.close()
        self.listener.close()


def answers_within(traffic, begin, end):
    return [at for at in list(traffic.answers) if begin <= at <= end]


def is_answered(traffic):
    """Whether the last half of a second had no gap to speak of."""
    now = time.time()
    return traffic.answers and longest_gap(traffic, now - 0.5, now) < 0.2


def longest_gap(traffic, begin, end):
    """The longest time in seconds without an answer, also up to the end. That which begins before `begin` counts with its whole length."""
    all_of = list(traffic.answers)
    last = max((at for at in all_of if at < begin), default=begin)
    times = [last, *(at for at in all_of if begin <= at <= end), end]
    return max(later - earlier for earlier, later in zip(times, times[1:]))


# Measurements.


def measure(made):
    """Breaks radios under traffic, and measures rates, for one way."""
    result = RESULTS[made.name] = {"breaks": {how: [] for how in BREAKS}, "ended": None}
    if made.broken:
        with hosts(made.shared), made.make() as is_whole, contextlib.ExitStack() as stack:
            wait_whole(is_whole)
            traffic = {"ping": Pings(*OWN), "tcp": Flow(*OWN), "steady": Pings(*STEADY)}
            for it in traffic.values():
                stack.callback(it.close)
            for _ in range(made.rounds):
                for how in BREAKS:
                    result["breaks"][how].append(break_each(how, traffic, is_whole, made.is_asserted))
            require(not traffic["tcp"].ended, f"the flow ended: {traffic['tcp'].ended}")
            result["ended"] = False
    with hosts(made.shared), made.make() as is_whole:
        wait_whole(is_whole)
        for name in HOSTS:
            for radio in RADIOS:
                call(*on(name), "tc", "qdisc", "replace", "dev", radio, "root", "netem", "rate", RATE, "limit", "100")
        with contextlib.closing(Background([*on("b"), "iperf3", "-s", "--forceflush"], pathlib.Path("/tmp/iperf3.log"))) as server:
            server.wait_for("listening")
            result["transfers"] = {flows: transfer(flows) for flows in (1, 8)}


def wait_whole(is_whole):
    answers = lambda: subprocess.run([*on("a"), "ping", "-c", "1", "-W", "1", "-I", *OWN], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    eventually(lambda: answers() and is_whole(), lambda: "both radios are not in use")


def break_each(how, traffic, is_whole, is_asserted):
    """Breaks one radio after the other, since a flow may use either. The longest gaps, in seconds, and the lost part of the pings at the worse radio.

    `is_asserted`: the gap must be short. A longer one counts only if the machine itself did not stand still meanwhile.
    """
    seen = []
    for number, _ in enumerate(RADIOS):
        for _ in range(10 if is_asserted else 1):
            one = break_one(number, how, traffic, is_whole)
            if one["ping"] < LONGEST[how] or one["steady"] < STALL:
                break
            print(f"repeated: {how} at {RADIOS[number]}: {one}", flush=True)
        else:
            require(not is_asserted, f"the machine itself stands still each time: {one}")
        seen.append(one)
    return {key: max(one[key] for one in seen) for key in seen[0]}


def break_one(number, how, traffic, is_whole):
    whole = lambda: is_whole() and all(map(is_answered, traffic.values()))
    eventually(lambda: whole() or traffic["tcp"].ended, lambda: "traffic does not flow over both radios before a radio is broken")
    require(not traffic["tcp"].ended, f"the flow ended: {traffic['tcp'].ended}")
    begin = time.time()
    break_radio(number, how)
    time.sleep(BROKEN)
    end = time.time()
    gaps = {name: longest_gap(it, begin, end) for name, it in traffic.items()}
    # The undisturbed pings say how many were sent.
    sent = max(len(answers_within(traffic["steady"], begin, end)), 1)
    lost = 1 - len(answers_within(traffic["ping"], begin, end)) / sent
    repair_radio(number, how)
    return {**gaps, "lost": max(lost, 0)}


def transfer(flows):
    """Mbit/s that iperf3 carries from `a` to `b`, and the processors' seconds for a gigabyte."""
    before = busy()
    words = [*on("a"), "iperf3", "-J", "-c", OWN[1], "-B", OWN[0], "-t", str(SECONDS), "-P", str(flows)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    spent = busy() - before
    end = json.loads(done.stdout).get("end", {})
    require(done.returncode == 0 and end, f"iperf3: {done.stdout[-300:]} {done.stderr}")
    gigabytes = end["sum_received"]["bytes"] / 1e9
    return {"mbps": end["sum_received"]["bits_per_second"] / 1e6, "retransmits": end["sum_sent"]["retransmits"], "cpu_s_per_gb": spent / gigabytes}


def busy():
    """Seconds that all processors worked since the start."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / 100


# What must hold for vi0.


def worst(name, how, what):
    rounds = RESULTS.get(name, {}).get("breaks", {}).get(how, [])
    require(rounds, f"{name} was not measured")
    return max(one[what] for one in rounds)


@check("adhoc-carrier")
def carrier():
    require_short("carrier lost")


@check("adhoc-black-hole")
def black_hole():
    require_short("black hole")


def require_short(how):
    gap = worst("vi0", how, "ping")
    require(gap < LONGEST[how], f"{gap * 1000:.0f} ms without an answer")


@check("adhoc-no-flow-ended")
def no_flow_ended():
    require(RESULTS.get("vi0", {}).get("ended") is False, "the flow over vi0 ended, or was not measured")
    gap = max(worst("vi0", how, "tcp") for how in BREAKS)
    require(gap < BROKEN, "the flow stood still while a radio was broken")


def new_key(name):
    path = f"/tmp/{name}.key"
    call("braid", "adhoc", "key", path)
    return path


@check("macsec-encrypts")
def macsec():
    """Devices with one key reach each other by frames that are encrypted; one with another key is no neighbour."""
    own, other = new_key("own"), new_key("other")
    marker = b"a payload that nobody else may read"
    with hosts(names=(*HOSTS, "c")), devices(["--key-file", own]):
        with devices(["--key-file", other], names=("c",)):
            eventually(pairs_are_up, lambda: f"the hosts with one key do not find each other: {[neighbours(name) for name in HOSTS]}")
            with contextlib.closing(Capture(["b0", "b1"])) as capture:
                call(*on("a"), "ping", "-c", "5", "-i", "0.1", "-W", "2", "-p", marker[:16].hex(), OWN[1])
                inside("a", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(marker, (OWN[1], 9)))
                # The frames of a further ping come after those of the datagram.
                call(*on("a"), "ping", "-c", "2", "-W", "2", OWN[1])
                frames = capture.end()
            types = {int.from_bytes(frame[12:14], "big") for frame in frames}
            require(0x88E5 in types, f"no MACsec frames, but types {sorted(map(hex, types))}")
            # The radios themselves have IPv6 addresses, and no IPv4 address.
            require(not types & {0x0800, 0x0806}, f"plain frames on the radio: {sorted(map(hex, types))}")
            require(not any(part in frame for frame in frames for part in (marker, marker[:16])), "the payload can be read on the radio")
            done = subprocess.run([*on("c"), "ping", "-c", "3", "-i", "0.2", "-W", "1", OWN[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            require(done.returncode != 0, "the host with another key gets answers")
            own_mac = json.loads(ip("c", "-j link show vi0"))[0]["address"]
            require(not neighbours("c") and own_mac not in {row["mac"] for name in HOSTS for row in neighbours(name)}, "the host with another key is a neighbour")
        # The same host is a neighbour with the key of the others.
        with devices(["--key-file", own], names=("c",)):
            up = lambda: {row["mac"] for row in neighbours("c") if row["state"] == "up"}
            eventually(lambda: len(up()) == 2, lambda: f"the host with the key does not find the others: {neighbours('c')}")


@check("macsec-removed")
def macsec_removed():
    """A radio whose MACsec device somebody removes is not used, and used again later."""
    key = new_key("removed")
    with hosts(), devices(["--key-file", key]):
        eventually(pairs_are_up, lambda: f"the hosts do not find each other: {[neighbours(name) for name in HOSTS]}")
        ip("a", "link del vi0-m0")
        is_off = lambda: [radio["up"] for radio in json.loads(adhoc("a", "--json"))["radios"]] == [False, True]
        eventually(is_off, lambda: f"the radio is still used: {adhoc('a', '--json')}")
        call(*on("a"), "ping", "-c", "3", "-i", "0.2", "-W", "5", OWN[1])
        eventually(pairs_are_up, lambda: f"the radio is not used again: {[neighbours(name) for name in HOSTS]}")


def counted(value, name):
    """The sum of all counters of a name, wherever this version of ip has them."""
    if isinstance(value, list):
        return sum(counted(one, name) for one in value)
    if not isinstance(value, dict):
        return 0
    # Those of a channel and of its associations are the same packets.
    own = [int(number) for key, number in value.items() if key == name]
    return own[0] if own else max((counted(one, name) for one in value.values()), default=0)


@check("macsec-busy")
def macsec_busy():
    """A queue that sorts packets by flow makes none of them too late for the receiver's window."""
    key = new_key("busy")
    with hosts(), devices(["--key-file", key]):
        eventually(pairs_are_up, lambda: f"the hosts do not find each other: {[neighbours(name) for name in HOSTS]}")
        for radio in RADIOS:
            call(*on("a"), "tc", "qdisc", "replace", "dev", radio, "root", "handle", "1:", "htb", "default", "1")
            call(*on("a"), "tc", "class", "add", "dev", radio, "parent", "1:", "classid", "1:1", "htb", "rate", RATE)
            call(*on("a"), "tc", "qdisc", "add", "dev", radio, "parent", "1:1", "fq_codel")
        server = Background([*on("b"), "iperf3", "-s", "--forceflush"], pathlib.Path("/tmp/iperf3.log"))
        with contextlib.closing(server):
            server.wait_for("listening")
            pings = Background([*on("a"), "ping", "-i", "0.05", OWN[1]], pathlib.Path("/tmp/pings.log"))
            with contextlib.closing(pings):
                found = transfer(2)
        states = [json.loads(ip("b", f"-s -j macsec show vi0-m{number}"))[0] for number, _ in enumerate(RADIOS)]
        channels = [channel for state in states for channel in state["rx_sc"]]
        late, good = counted(channels, "InPktsLate"), counted(channels, "InPktsOK")
        print(f"RESULT macsec: {found['mbps']:.1f} Mbit/s, {good} packets, {late} late", flush=True)
        require(good > 500 and late * 100 < good, f"{late} of {good} packets were too late: {states}")


class Capture:
    """What passes these ports of the bridges, in both directions."""

    def __init__(self, ports):
        self.frames, self.sockets = [], []
        for port in ports:
            it = inside("air", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
            it.bind((port, 3))
            self.sockets.append(it)

    def end(self):
        """All frames up to now."""
        for it in self.sockets:
            it.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.frames.append(it.recv(65536))
        return self.frames

    def close(self):
        for it in self.sockets:
            it.close()


# Tables.


def print_tables():
    print(f"RESULT {json.dumps(RESULTS)}")
    rows = [["way", *(f"{how}: {what}" for how in BREAKS for what in ("ping ms", "to vi0", "pings lost", "TCP ms", "to vi0"))]]
    for name, made in WAYS.items():
        breaks = RESULTS.get(name, {}).get("breaks", {})
        if made.broken and all(breaks.get(how) for how in BREAKS):
            rows.append([name, *(cell for how in BREAKS for cell in gap_cells(name, how))])
    print(f"Longest time without an answer, of {PERIOD * 1000:.0f} ms requests; a radio is broken for {BROKEN:.0f} s:")
    print_rows(rows)
    rows = [["way", *(f"{flows} flow{'s' * (flows > 1)}: {what}" for flows in (1, 8) for what in ("Mbit/s", "sent again", "CPU s/GB"))]]
    for name in WAYS:
        transfers = RESULTS.get(name, {}).get("transfers")
        if transfers:
            cells = lambda one: (f"{one['mbps']:.1f}", str(one["retransmits"]), f"{one['cpu_s_per_gb']:.1f}")
            rows.append([name, *(cell for flows in (1, 8) for cell in cells(transfers[flows]))])
    print(f"TCP over two radios of {RATE} each, {SECONDS} s:")
    print_rows(rows)


def gap_cells(name, how):
    ping, tcp = (worst(name, how, what) for what in ("ping", "tcp"))
    cell = lambda gap: f"{gap * 1000:.0f}" if gap < BROKEN else f">{BROKEN * 1000:.0f}"
    to_own = lambda gap, what: f"{gap / worst('vi0', how, what):.1f}" if RESULTS.get("vi0", {}).get("breaks", {}).get(how) else ""
    return [cell(ping), to_own(ping, "ping"), f"{worst(name, how, 'lost') * 100:.0f} %", cell(tcp), to_own(tcp, "tcp")]


def print_rows(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)


if __name__ == "__main__":
    main()
