"""Asks the network from a shell: ``python3 -m braid_sfnet``."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
from typing import Any, List, Optional, Tuple

from . import Network, NotFound, discover, receiver, sender


def _controller(text: str) -> Tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit():
        raise argparse.ArgumentTypeError("write ADDRESS:PORT")
    return address.strip("[]"), int(port)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def _started(network: Network, want: int) -> Any:
    """Waits until a service has begun."""
    for event in network.events():
        if event.kind == "started" and event.want == want:
            return event.value
        if event.kind == "refused":
            raise SystemExit(event.reason)
        if event.kind == "disconnected":
            print("braid-sfnet: %s; trying again" % event.reason, file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="braid-sfnet", description="Asks a network with Braid's controller.")
    parser.add_argument("--controller", type=_controller, metavar="ADDRESS:PORT", help="the controller; by default it is looked for")
    parser.add_argument("--device", help="the network device by which the controller is looked for")
    parser.add_argument("--keep", type=int, default=0, metavar="SECONDS", help="how long services stay after the connection")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("discover", help="find the controller")
    actions.add_parser("state", help="show what this host may see").add_argument("--to", metavar="HOST", help="also the path to this host")
    for name, text in (("receive", "print what is sent to a group"), ("send", "send lines of the standard input to a group")):
        one = actions.add_parser(name, help=text)
        one.add_argument("group")
        one.add_argument("--port", type=int, default=5000)
        if name == "receive":
            one.add_argument("--count", type=int, help="end after so many datagrams")
    start = actions.add_parser("start", help="ask for a service and print its events until this program ends")
    start.add_argument("service")
    start.add_argument("what", nargs="?", default="null", help="what it needs, as JSON")
    given = parser.parse_args(arguments)
    try:
        _run(given)
    except NotFound as error:
        raise SystemExit(str(error))
    except KeyboardInterrupt:
        pass


def _datagrams(source: socket.socket, count: Optional[int]) -> None:
    while count is None or count > 0:
        datagram, (host, _) = source.recvfrom(65535)
        _say({"from": host, "text": datagram.decode(errors="replace")})
        count = None if count is None else count - 1


def _run(given: argparse.Namespace) -> None:
    if given.action == "discover":
        return _say(discover(given.device))
    with Network(given.controller, given.device) as network:
        if given.action == "state":
            question = network.state(given.to)
            for event in network.events():
                if event.want == question:
                    if event.kind == "refused":
                        raise SystemExit(event.reason)
                    return _say(event.value)
                if event.kind == "disconnected":
                    raise SystemExit(event.reason)
        elif given.action == "start":
            network.start(given.service, json.loads(given.what), given.keep)
            for event in network.events():
                _say({key: value for key, value in vars(event).items() if value not in (None, "")})
                if event.kind == "refused":
                    raise SystemExit(event.reason)
        else:
            _started(network, network.start("multicast", {"group": given.group}, given.keep))
            address = network.own_address
            assert address is not None
            if given.action == "send":
                out = sender(address)
                for line in sys.stdin:
                    out.sendto(line.rstrip("\n").encode(), (given.group, given.port))
                return None
            source = receiver(given.group, given.port, address)
            _say({"receiving": given.group, "port": given.port})
            # Datagrams are printed whatever the controller does.
            printing = threading.Thread(target=_datagrams, args=(source, given.count), daemon=True)
            printing.start()
            while printing.is_alive():
                event = network.wait(0.1)
                if event is not None and event.kind in ("refused", "ended"):
                    raise SystemExit(event.reason)
    return None


if __name__ == "__main__":
    main()
