"""Counts the datagrams to a group on devices, by text and direction: `count_group.py GROUP DEVICE...`. Prints the counts as JSON when its input ends."""

import json
import select
import socket
import struct
import sys

OUTGOING = 4

group = socket.inet_aton(sys.argv[1])
sockets = {}
for device in sys.argv[2:]:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    one.bind((device, 0))
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sockets[one] = device
counts = {device: {"in": {}, "out": {}} for device in sockets.values()}


def drain(one):
    while True:
        try:
            frame, address = one.recvfrom(2048)
        except BlockingIOError:
            return
        if frame[12:14] != b"\x08\x00" or frame[23] != 17 or frame[30:34] != group:
            continue
        length = struct.unpack("!H", frame[38:40])[0]
        text = frame[42 : 34 + length].decode(errors="replace")
        way = counts[sockets[one]]["out" if address[2] == OUTGOING else "in"]
        way[text] = way.get(text, 0) + 1


print("ready", flush=True)
while True:
    ready = select.select([*sockets, sys.stdin], [], [])[0]
    for one in ready:
        if one is not sys.stdin:
            drain(one)
    if sys.stdin in ready and not sys.stdin.buffer.read1(1024):
        break
for one in sockets:
    drain(one)
print(json.dumps(counts))
