"""The client against a controller that follows a script."""

import json
import pathlib
import socket
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import braid_sfnet  # noqa: E402
from braid_sfnet import Network  # noqa: E402


class Controller:
    """Takes one connection after the other; each answers lines as its function says."""

    def __init__(self, *connections):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.asked = []
        self.thread = threading.Thread(target=self.serve, args=(connections,), daemon=True)
        self.thread.start()

    def serve(self, connections):
        try:
            self.serve_all(connections)
        except OSError:
            pass  # The test has ended, or the client has left.

    def serve_all(self, connections):
        for answer in connections:
            stream, _ = self.listener.accept()
            with stream, stream.makefile("rb") as lines:
                stream.sendall(b'{"say":"welcome","version":1,"host":"02:00:00:00:00:01","services":["multicast"]}\n')
                for line in lines:
                    ask = json.loads(line)
                    self.asked.append(ask)
                    said = answer(ask)
                    if said is None:
                        break
                    stream.sendall(said)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)


def line(**say):
    return json.dumps(say).encode() + b"\n"


def started(lease):
    return lambda ask: line(say="started", id=ask["id"], lease=lease, result={"ok": True}) if ask["ask"] == "start" else None


def until(network, kind):
    for event in network.events(10):
        if event.kind == kind:
            return event
    raise AssertionError("no event " + kind)


class Tests(unittest.TestCase):
    def network(self, *connections):
        controller = Controller(*connections)
        self.addCleanup(controller.close)
        network = Network(controller.address)
        self.addCleanup(network.close)
        return controller, network

    def test_what_is_wanted_is_asked_for_on_every_connection(self):
        controller, network = self.network(started(7), started(8))
        want = network.start("multicast", {"group": "239.192.1.2"}, keep=5)
        self.assertEqual(until(network, "started").value, {"ok": True})
        network.end(0)  # of nobody
        network.state()  # the script ends the connection here
        self.assertEqual(until(network, "disconnected").reason, "the controller has closed the connection")
        self.assertEqual(until(network, "started").want, want)
        starts = [ask for ask in controller.asked if ask["ask"] == "start"]
        self.assertEqual(starts, [{"ask": "start", "id": want, "service": "multicast", "with": {"group": "239.192.1.2"}, "keep": 5}] * 2)

    def test_events_belong_to_their_wants_and_noise_is_ignored(self):
        def answer(ask):
            noise = b'x\n[]\n{"say":"sing"}\n{"say":"event","lease":99,"event":1}\n'
            return noise + started(3)(ask) + line(say="event", lease=3, event={"about": "load"}) + line(say="ended", lease=3, reason="over")

        _, network = self.network(answer, started(4))
        want = network.start("notices")
        event = until(network, "event")
        self.assertEqual((event.want, event.value), (want, {"about": "load"}))
        self.assertEqual(until(network, "ended").reason, "over")
        self.assertEqual(network._wants, {})

    def test_a_refusal_is_final_and_names_its_reason(self):
        _, network = self.network(lambda ask: line(say="refused", id=ask["id"], reason="no such service"))
        network.start("storage")
        self.assertEqual(until(network, "refused").reason, "no such service")
        self.assertEqual(network._wants, {})

    def test_a_service_that_ends_before_it_has_begun_is_ended_then(self):
        ends = threading.Event()

        def answer(ask):
            if ask["ask"] == "end":
                ends.set()
                return None
            return started(5)(ask)

        _, network = self.network(answer)
        until_welcome = until(network, "welcome")
        self.assertEqual(until_welcome.value["services"], ["multicast"])
        network.end(network.start("multicast"))
        until(network, "disconnected")
        self.assertTrue(ends.is_set())

    def test_a_line_without_an_end_is_refused(self):
        _, network = self.network(lambda ask: b"x" * (braid_sfnet.MAX_ANSWER + 20_000))
        network.start("multicast")
        self.assertIn("more than", until(network, "disconnected").reason)

    def test_a_controller_that_is_not_there_is_tried_again_with_pauses(self):
        spare = socket.create_server(("127.0.0.1", 0))
        address = spare.getsockname()
        spare.close()
        network = Network(address)
        network.start("multicast")
        pauses = []
        for _ in range(2):
            event = network.wait(10)
            self.assertEqual(event.kind, "disconnected")
            pauses.append(network._again)
        self.assertGreater(pauses[1], pauses[0])


if __name__ == "__main__":
    unittest.main()
