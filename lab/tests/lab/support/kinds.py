"""Sockets of every kind; each must appear connected to the address that it asked for. Prints the client addresses that servers saw."""
import errno, select, signal, socket, struct, time

V4, V6, MAPPED = "203.0.113.11", "2001:db8:113::11", "::ffff:203.0.113.11"
IPV6_V6ONLY = 26


def shows(s, host, port):
    assert s.getpeername()[:2] == (host, port), s.getpeername()
    local = s.getsockname()
    assert "127." not in local[0] and local[0] not in ("::1", "0.0.0.0", "::") and local[1], local


def begin(family, host, port, only6=0):
    s = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, IPV6_V6ONLY, only6)
    s.setblocking(False)
    assert s.connect_ex((host, port)) == errno.EINPROGRESS
    return s


def ends(s):
    poll = select.poll()
    poll.register(s, select.POLLOUT)
    assert poll.poll(10_000)


def read(s):
    s.setblocking(True)
    print(s.makefile().read())


KINDS = [(socket.AF_INET, V4, 0), (socket.AF_INET6, MAPPED, 0), (socket.AF_INET6, V6, 0), (socket.AF_INET6, V6, 1)]
for family, host, only6 in KINDS:
    s = begin(family, host, 8080, only6)
    assert s.connect_ex((host, 8080)) == errno.EALREADY
    try:
        s.getpeername()
        raise AssertionError("it is not connected yet")
    except OSError as error:
        assert error.errno == errno.ENOTCONN
    ends(s)
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    shows(s, host, 8080)
    read(s)
    s = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, IPV6_V6ONLY, only6)
    s.connect((host, 8080))
    assert s.connect_ex((host, 8080)) == errno.EISCONN
    shows(s, host, 8080)
    read(s)
    s = begin(family, host, 81, only6)
    ends(s)
    codes = [s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for _ in range(2)]
    assert codes == [errno.ECONNREFUSED, 0], codes
    s = begin(family, host, 81, only6)
    ends(s)
    assert s.connect_ex((host, 81)) == errno.ECONNREFUSED
# With a bound port.
s = socket.socket()
s.bind(("0.0.0.0", 0))
port = s.getsockname()[1]
s.connect((V4, 8080))
assert s.getsockname()[1] == port
read(s)

QUERY, ANSWER = b"ab\0d", b"ab\x80d"
for family, host in [(socket.AF_INET, V4), (socket.AF_INET6, V6), (socket.AF_INET6, V6)]:
    u = socket.socket(family, socket.SOCK_DGRAM)
    u.connect((host, 4000))
    shows(u, host, 4000)
    u.send(QUERY)
    data, sender = u.recvfrom(100)
    assert (data, sender[:2]) == (ANSWER, (host, 4000)), (data, sender)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.connect((V4, 4001))
u.connect((V4, 4000))
shows(u, V4, 4000)
u.sendto(QUERY, (V4, 4000))
assert u.recvfrom(100) == (ANSWER, (V4, 4000))
u.sendmsg([QUERY[:2], QUERY[2:]], [], 0, (V4, 4000))
parts = [bytearray(3), bytearray(9)]
length, control, flags, sender = u.recvmsg_into(parts, 100)
assert (length, bytes(parts[0]), bytes(parts[1][:1]), sender) == (4, b"ab\x80", b"d", (V4, 4000))

# No data arrives: with a timeout, non-blocking, and with a signal.
u.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300_000))
start = time.monotonic()
try:
    u.recvfrom(100)
    raise AssertionError("something came")
except BlockingIOError:
    assert 0.25 < time.monotonic() - start < 5
try:
    u.recvfrom(100, socket.MSG_DONTWAIT)
    raise AssertionError("something came")
except BlockingIOError:
    pass
u.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


class Rung(Exception):
    pass


def ring(*_):
    raise Rung


signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    u.recvfrom(100)
    raise AssertionError("something came")
except Rung:
    pass

u.connect((V4, 4001))
u.send(QUERY)
assert u.recvfrom(100) == (ANSWER, (V4, 4001))
# To another address than the connected one, and then to the connected one again: both go direct.
u.connect((V4, 4000))
u.sendto(QUERY, (V4, 4001))
u.send(QUERY)
u.settimeout(5)
assert u.recvfrom(100) == (ANSWER, (V4, 4000))
assert u.getpeername() == (V4, 4000)
plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
plain.settimeout(5)
plain.sendto(QUERY, (V4, 4001))
assert plain.recvfrom(100) == (ANSWER, (V4, 4001))
plain.sendto(QUERY, (V4, 4000))
assert plain.recvfrom(100) == (ANSWER, (V4, 4000))
