"""The network that programs can ask (SFNet): a client of networks with Braid's controller.

A program finds the controller, reads the state that it may see, and asks for services. What it asked for ends with it. While the controller is away, the client
connects again, and asks again for all that is wanted.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

__all__ = ["DISCOVERY", "Event", "Network", "NotFound", "discover", "receiver", "sender"]

#: Where programs ask for the controller.
DISCOVERY = ("224.0.0.3", 2209)
#: Longest line of the controller in bytes.
MAX_ANSWER = 1 << 20
#: Time in seconds before the next connection, at first and at most.
AGAIN = (0.2, 10.0)
_QUESTION = b'{"ask":"discover"}'


class NotFound(OSError):
    """No controller has answered."""


@dataclass
class Event:
    """Something that happened.

    ``kind`` is ``welcome``, ``started``, ``refused``, ``event``, ``ended``, ``state``, ``misunderstood`` or ``disconnected``. ``want`` is the number that
    :meth:`Network.start` or :meth:`Network.state` returned. ``value`` is the service's result, the event of the service, the state, or the welcome. ``reason`` says why.
    """

    kind: str
    want: Optional[int] = None
    value: Any = None
    reason: str = ""


def _question_sockets(device: Optional[str]) -> List[socket.socket]:
    """A socket for each device: a route to the address is not needed then."""
    sockets = []
    for _, name in [(0, device)] if device else socket.if_nameindex():
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            one.setblocking(False)
            one.bind(("", 0))
        except OSError:
            one.close()
            if device:
                raise
            continue
        sockets.append(one)
    return sockets


def _ask(sockets: List[socket.socket]) -> None:
    for one in sockets:
        try:
            one.sendto(_QUESTION, DISCOVERY)
        except OSError:
            pass  # A device may be down, or have no address.


def discover(device: Optional[str] = None, timeout: float = 2.0) -> Dict[str, Any]:
    """The controller's offer: ``address``, ``port`` (without TLS), ``tls_port``, ``key``. Raises :class:`NotFound`."""
    sockets = _question_sockets(device)
    end, asked = time.monotonic() + timeout, 0.0
    try:
        while time.monotonic() < end:
            if time.monotonic() >= asked + 0.5:
                asked = time.monotonic()
                _ask(sockets)
            left = max(0.0, min(end, asked + 0.5) - time.monotonic())
            for one in select.select(sockets, [], [], left)[0]:
                try:
                    offer = json.loads(one.recv(1500))
                except (OSError, ValueError):
                    continue
                if isinstance(offer, dict) and isinstance(offer.get("address"), str) and "sfnet" in offer:
                    return offer
    finally:
        for one in sockets:
            one.close()
    raise NotFound(
        "no controller answers at %s:%d: its configuration needs [sfnet] with the address that it has in this network; or name the controller" % DISCOVERY
    )


def receiver(group: str, port: int, own_address: str) -> socket.socket:
    """A socket that receives what is sent to a port of a group, by the device with this address."""
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((group, port))
    one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton(own_address))
    return one


def sender(own_address: str) -> socket.socket:
    """A socket that sends to groups by the device with this address."""
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((own_address, 0))
    one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_address))
    one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, struct.pack("b", 16))
    return one


@dataclass
class _Wanted:
    service: str
    what: Any
    keep: int
    lease: Optional[int] = None
    ends: bool = False


class Network:
    """A program's connection to the controller, which comes back when it breaks. Nothing happens but in :meth:`wait` and :meth:`events`."""

    def __init__(self, controller: Optional[Tuple[str, int]] = None, device: Optional[str] = None) -> None:
        self._controller = controller
        self._device = device
        self._socket: Optional[socket.socket] = None
        self._read = b""
        self._numbers = itertools.count(1)
        self._wants: Dict[int, _Wanted] = {}
        self._questions: Dict[int, Optional[str]] = {}
        self._leases: Dict[int, int] = {}
        self._welcome = False
        self._failures = 0
        self._again = 0.0
        self._bye: Optional[str] = None
        self._events: List[Event] = []
        self._lines: List[Dict[str, Any]] = []

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it what the program has asked for."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def own_address(self) -> Optional[str]:
        """The own address in the network, once connected."""
        return self._socket.getsockname()[0] if self._socket is not None else None

    def start(self, service: str, what: Any = None, keep: int = 0) -> int:
        """Wants a service from now on; ``keep`` are the seconds for which it stays when the connection ends. Returns the number of the want."""
        number = next(self._numbers)
        self._wants[number] = _Wanted(service, what, keep)
        self._ask_for(number)
        return number

    def end(self, want: int) -> None:
        """Wants a service no longer."""
        wanted = self._wants.get(want)
        if wanted is None:
            return
        if not self._welcome:
            del self._wants[want]
        elif not wanted.ends:
            wanted.ends = True
            if wanted.lease is not None:
                self._lines.append({"ask": "end", "id": want, "lease": wanted.lease})

    def state(self, to: Optional[str] = None) -> int:
        """Asks for the state, and for the path to a host if one is given. Returns the number of the question."""
        number = next(self._numbers)
        self._questions[number] = to
        self._ask_state(number)
        return number

    def events(self, timeout: Optional[float] = None) -> Iterator[Event]:
        """What happens, one after the other; ends when nothing has happened for ``timeout`` seconds."""
        while True:
            event = self.wait(3600.0 if timeout is None else timeout)
            if event is not None:
                yield event
            elif timeout is not None:
                return

    def wait(self, timeout: float) -> Optional[Event]:
        """What happens next; ``None`` if nothing does in this time. It takes some seconds more while the controller is looked for, or does not answer."""
        end = time.monotonic() + timeout
        while not self._events:
            left = end - time.monotonic()
            if left <= 0:
                return None
            try:
                self._step(left)
            except (OSError, ValueError) as error:
                self._disconnected(str(error))
        return self._events.pop(0)

    def _step(self, left: float) -> None:
        if self._socket is None:
            pause = self._again - time.monotonic()
            if pause > 0:
                time.sleep(min(pause, left))
                return
            self._socket = socket.create_connection(self._find(), timeout=5.0)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            return
        while self._lines:
            self._socket.settimeout(5.0)
            self._socket.sendall(json.dumps(self._lines.pop(0)).encode() + b"\n")
        if not select.select([self._socket], [], [], left)[0]:
            return
        piece = self._socket.recv(16384)
        if not piece:
            raise ConnectionError("the controller has closed the connection")
        *lines, self._read = (self._read + piece).split(b"\n")
        if len(self._read) > MAX_ANSWER:
            raise ValueError("the controller sent a line of more than %d bytes" % MAX_ANSWER)
        for line in lines:
            self._line(line)

    def _find(self) -> Tuple[str, int]:
        if self._controller is not None:
            # A controller that was started again learns the program's address by the question.
            sockets = _question_sockets(self._device)
            _ask(sockets)
            for one in sockets:
                one.close()
            return self._controller
        offer = discover(self._device)
        if not isinstance(offer.get("port"), int):
            raise NotFound("the controller at %s takes no programs without TLS" % offer["address"])
        return offer["address"], offer["port"]

    def _disconnected(self, reason: str) -> None:
        self.close()
        self._read, self._welcome, self._leases, self._lines = b"", False, {}, []
        self._wants = {number: wanted for number, wanted in self._wants.items() if not wanted.ends}
        for wanted in self._wants.values():
            wanted.lease = None
        self._again = time.monotonic() + min(AGAIN[0] * 2 ** min(self._failures, 10), AGAIN[1])
        self._failures += 1
        self._events.append(Event("disconnected", reason=self._bye or reason))
        self._bye = None

    def _ask_for(self, number: int) -> None:
        wanted = self._wants[number]
        if self._welcome:
            self._lines.append({"ask": "start", "id": number, "service": wanted.service, "with": wanted.what, "keep": wanted.keep})

    def _ask_state(self, number: int) -> None:
        if self._welcome:
            to = self._questions[number]
            self._lines.append({"ask": "state", "id": number, **({} if to is None else {"to": to})})

    def _line(self, line: bytes) -> None:
        """Handles what the controller says. What is not understood is ignored: it may be of a later version."""
        try:
            say = json.loads(line)
            kind = say["say"]
        except (ValueError, TypeError, KeyError):
            return
        number, lease, reason = say.get("id"), say.get("lease"), say.get("reason") or ""
        if kind == "welcome":
            self._welcome, self._failures = True, 0
            self._events.append(Event("welcome", value=say))
            for want in self._wants:
                self._ask_for(want)
            for question in self._questions:
                self._ask_state(question)
        elif kind == "state" and number in self._questions:
            del self._questions[number]
            self._events.append(Event("state", number, say.get("state")))
        elif kind == "started" and number in self._wants and isinstance(lease, int):
            self._wants[number].lease = lease
            self._leases[lease] = number
            if self._wants[number].ends:
                self._lines.append({"ask": "end", "id": number, "lease": lease})
            else:
                self._events.append(Event("started", number, say.get("result")))
        elif kind == "refused":
            known = self._wants.pop(number, None) is not None or self._questions.pop(number, self) is not self
            self._events.append(Event("refused" if known else "misunderstood", number if known else None, reason=reason))
        elif kind == "ended" and lease in self._leases:
            want = self._leases.pop(lease)
            self._wants.pop(want, None)
            self._events.append(Event("ended", want, reason=reason))
        elif kind == "event" and lease in self._leases:
            self._events.append(Event("event", self._leases[lease], say.get("event")))
        elif kind == "bye":
            self._bye = reason
