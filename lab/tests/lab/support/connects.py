"""connects.py KIND HOST PORT COUNT: checks what a program sees of its connects.

Makes four connects, prints "both links A B" (connects by link), and waits until no link has shown a sign of life for some seconds and a line comes on
standard input. Then makes COUNT connects at once, one in each thread, and prints for each: local address or error, seconds, "ok" or what was wrong.

KIND: blocking; poll, epoll: non-blocking, the descriptor is polled after connect; registered: it is in an epoll instance before connect;
duplicated: like poll, but it has a second descriptor; configured: blocking, with socket options set before.
"""

import collections
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import threading
import time

KIND, HOST, PORT, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
FAMILY = socket.AF_INET6 if ":" in HOST else socket.AF_INET
LIMIT = 3 if KIND in ("registered", "duplicated") else 20
SO_COOKIE = 57


def cookie(s):
    return struct.unpack("Q", s.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0]


OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000),
    (socket.SOL_SOCKET, socket.SO_RCVBUF, 50000),
]


def complaint(s, before):
    """What is wrong with a connected socket, or None."""
    if KIND == "configured":
        for level, name, value in OPTIONS:
            expected = value * 2 if name == socket.SO_RCVBUF and level == socket.SOL_SOCKET else value
            found = s.getsockopt(level, name)
            if found != expected and bool(found) != expected:
                return f"option {level},{name} is {found}"
    if fcntl.fcntl(s.fileno(), fcntl.F_GETFD) != before["descriptor"] or fcntl.fcntl(s.fileno(), fcntl.F_GETFL) != before["file"]:
        return "the descriptor's flags changed"
    if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return "an error is pending"
    s.setblocking(True)
    s.settimeout(LIMIT)
    s.sendall(b"GET /1000.bin HTTP/1.0\r\n\r\n")
    size = 0
    while True:
        data = s.recv(65536)
        if not data:
            break
        size += len(data)
    if size < 1000:
        return f"only {size} bytes came"
    return None


def connect(kind):
    s = socket.socket(FAMILY, socket.SOCK_STREAM)
    begin = time.monotonic()
    poller = extra = None
    try:
        s.setblocking(kind in ("blocking", "configured"))
        if kind == "configured":
            for option in OPTIONS:
                s.setsockopt(*option)
            s.set_inheritable(True)
        if kind == "duplicated":
            extra = os.dup(s.fileno())
        if kind in ("epoll", "registered"):
            poller = select.epoll()
        if kind == "registered":
            poller.register(s.fileno(), select.EPOLLOUT)
            poller.poll(0)
        number = cookie(s)
        before = {"descriptor": fcntl.fcntl(s.fileno(), fcntl.F_GETFD), "file": fcntl.fcntl(s.fileno(), fcntl.F_GETFL)}
        if kind in ("blocking", "configured"):
            s.connect((HOST, PORT))
        else:
            result = s.connect_ex((HOST, PORT))
            if result not in (0, errno.EINPROGRESS):
                return errno.errorcode[result], time.monotonic() - begin, "connect"
            if kind in ("poll", "duplicated"):
                poller = select.poll()
            if kind != "registered":
                poller.register(s.fileno(), select.POLLOUT)
            events = poller.poll(LIMIT * (1 if kind in ("epoll", "registered") else 1000))
            if not events:
                return "timeout", time.monotonic() - begin, "ok"
            if len(events) > 1 or events[0] != (s.fileno(), select.POLLOUT):
                return str(events), time.monotonic() - begin, "events"
            result = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if result:
                return errno.errorcode[result], time.monotonic() - begin, "SO_ERROR"
        seconds = time.monotonic() - begin
        local = s.getsockname()[0]
        if kind in ("registered", "duplicated") and cookie(s) != number:
            return local, seconds, "another socket took its place"
        return local, seconds, complaint(s, before) or "ok"
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__), time.monotonic() - begin, "ok"
    finally:
        s.close()
        if poller is not None and hasattr(poller, "close"):
            poller.close()
        if extra is not None:
            os.close(extra)


def main():
    first = collections.Counter(connect("blocking")[0] for _ in range(4))
    print("both links", *sorted(first.values()), flush=True)
    sys.stdin.readline()
    # So long that the links' last signs of life are old.
    time.sleep(2.5)
    outcomes = [None] * COUNT

    def work(index):
        outcomes[index] = connect(KIND)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for address, seconds, wrong in outcomes:
        print(address, f"{seconds:.4f}", wrong)


main()
