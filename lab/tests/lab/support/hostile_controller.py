"""A remote controller that does harm: hostile_controller.py MODE DEVICE ADDRESS [PORT]. It says on standard output what has happened."""

import itertools
import os
import socket
import struct
import sys
import threading
import time

mode, device, address = sys.argv[1:4]
at = int(sys.argv[4]) if len(sys.argv) > 4 else 6653
link = socket.if_nametoindex(device)
HELLO, ERROR, PACKET_IN, FLOW_MOD, MULTIPART, BARRIER, BARRIER_REPLY = 0, 1, 10, 14, 18, 20, 21


def message(kind, body=b"", xid=7):
    return struct.pack("!BBHI", 4, kind, 8 + len(body), xid) + body


def flow(port, priority=9, command=0, host=None):
    """A flow-mod that leads TCP connections to this host, or to this port, over the link."""
    fields = bytes.fromhex("80000a02080080001401" "06")
    if host:
        fields += bytes.fromhex("80001804") + socket.inet_aton(host)
    if port:
        fields += struct.pack("!HBBH", 0x8000, 0x1C, 2, port)
    match = struct.pack("!HH", 1, 4 + len(fields)) + fields
    match += bytes(-len(match) % 8)
    head = struct.pack("!QQBBHHHIIIHH", 0, 0, 0, command, 0, 0, priority, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0, 0)
    actions = b"" if command == 3 else struct.pack("!HHIHHIHHI", 4, 24, 0, 0, 16, link, 0xFFFF, 0, 0)
    return message(FLOW_MOD, head + match + actions)


def accept(listener):
    connection, _ = listener.accept()
    connection.sendall(message(HELLO))
    return connection


def answer(connection, counts):
    """Reads all, and answers echo requests."""
    waiting = b""
    try:
        while piece := connection.recv(1 << 16):
            waiting += piece
            while len(waiting) >= 8 and len(waiting) >= (length := struct.unpack("!H", waiting[2:4])[0]):
                kind, body = waiting[1], waiting[:length]
                counts[kind] = counts.get(kind, 0) + 1
                if kind == 2:
                    connection.sendall(bytes([4, 3]) + body[2:])
                waiting = waiting[length:]
    except OSError:
        pass


listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", at))
listener.listen()
print("listens", flush=True)
while True:
    connection, counts = accept(listener), {}
    if mode == "deaf":
        # Asks without end, and reads nothing.
        ask = message(MULTIPART, struct.pack("!HHI", 13, 0, 0))
        try:
            connection.sendall(flow(0, host=address))
            while True:
                connection.sendall(ask * 100)
        except OSError:
            print("closed", flush=True)
        continue
    reader = threading.Thread(target=answer, args=(connection, counts), daemon=True)
    reader.start()
    try:
        if mode == "flood":
            connection.sendall(flow(0, host=address) + message(BARRIER))
            print("leads", flush=True)
            # The table is full at once; then come changes, and refusals.
            changes = (flow(2000 + number % 40, command=3 if number % 3 == 2 else 0) for number in itertools.count())
            for number in itertools.count(1):
                connection.sendall(b"".join(itertools.islice(changes, 100)) + message(BARRIER) * 20)
                if number == 1000:
                    print("flooded", flush=True)
        if mode == "bulk":
            connection.sendall(flow(0, host=address) + message(BARRIER))
            begin = time.monotonic()
            connection.sendall(b"".join(flow(2000 + number % 20) + message(BARRIER) for number in range(100_000)))
            while (answered := counts.get(BARRIER_REPLY, 0)) < 100_001 and reader.is_alive():
                time.sleep(0.01)
            print(f"answered {answered} in {time.monotonic() - begin:.2f} s, {counts.get(ERROR, 0)} errors", flush=True)
        if mode == "garbage":
            connection.sendall(flow(0, host=address) + message(BARRIER))
            for kind in range(256):
                for length in (0, 1, 8, 40, 300):
                    connection.sendall(message(kind, os.urandom(length)))
            connection.sendall(message(FLOW_MOD, bytes(60_000)))
            # Shorter than its own header: the stream has no meaning any more.
            connection.sendall(bytes([4, 14, 0, 3, 0, 0, 0, 1]))
        if mode == "flap":
            connection.sendall(flow(0, host=address) + message(BARRIER))
            time.sleep(1)
            print("flaps", flush=True)
            connection.close()
        if mode == "lead":
            connection.sendall(flow(0, host=address) + message(BARRIER))
            time.sleep(0.3)
            print("leads" if counts.get(BARRIER_REPLY) else "refused", flush=True)
    except OSError:
        print("closed", flush=True)
