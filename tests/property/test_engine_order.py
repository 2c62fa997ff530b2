"""The order in which an engine takes requests that wait: `AdapterLeases` of every serving engine, at a real controller.

Resident adapters first, then those that load, by expected time, then those without a place; first come, first served
within each.
"""

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from client_connector.remote import RemoteServer
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.request_state import Phase
from client_connector.serving.settings import Settings
from lora_server.timings import Timings
from tests.support.controllers import PlacedServer
from tests.support.serving import HANG_SECONDS, until

PLACED, OTHERS = ("a", "b", "c", "d"), ("y", "z")  # adapters with a place, and those for which there is none
PROMPT = (1, 2)  # with the adapters' invocation
SECONDS = st.sampled_from([0, 1, 2, 3])
PATIENT = Timings(weights=10.0)  # no pass here is longer
CALM = Timings(first_in_queue=1e6)  # no adapter is drained for one that waits, however slow the machine


class Engine:
    """A queue that is walked as vLLM's scheduler walks its own: each pass takes the first request that is ready."""

    def __init__(self, server: PlacedServer, pass_seconds: float) -> None:
        self.server = server
        self.leases = AdapterLeases(Settings(server.address, timings=PATIENT), lambda text: ())
        self.leases.pace.passed(1, began=0.0, ended=pass_seconds)
        self.waiting: list[str] = []
        self.taken: list[str] = []
        self.names: dict[str, str] = {}

    def ask(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            request = f"{name}{number}"
            self.names[request] = name
            self.leases.hold(request, name, PROMPT)
            self.waiting.append(request)

        def answered() -> bool:
            return all(self.leases.state(one).phase is not Phase.ASKING for one in self.waiting)

        until(answered, "the server's first answer to each")

    def take(self, expected: Sequence[str]) -> None:
        """Wait until these are ready, then take all that are, one in a pass."""
        until(lambda: all(map(self.leases.is_ready, expected)), f"{expected} are ready")
        while ready := next(filter(self.leases.is_ready, self.waiting), None):
            self.waiting.remove(ready)
            self.taken.append(ready)

    def end(self, name: str) -> None:
        """End the requests of an adapter."""
        for request in [one for one in self.taken if self.names[one] == name]:
            self.leases.release(request)


@pytest.fixture(scope="module")
def server():
    with contextlib.ExitStack() as stack:
        yield PlacedServer(stack, (*PLACED, *OTHERS), places=len(PLACED), timings=CALM)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from((*PLACED, *OTHERS)), min_size=1, max_size=10),
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    st.sampled_from([0.0, 2.0]),
)
@example(["z", "c", "b", "a", "z", "c", "y", "b", "a"], (0, 1, 3, 0), 0.0)
@example(["d", "c", "b", "a"], (0, 1, 2, 3), 2.0)  # one that loads within half a pass is as good as resident
def test_an_engine_takes_resident_adapters_then_those_that_load_soonest_then_the_rest(server, names, loads, a_pass):
    left = dict(zip(PLACED, loads, strict=True))
    waits = {name: max(0.0, seconds - a_pass / 2) for name, seconds in left.items()}
    with contextlib.ExitStack() as stack:
        others = RemoteServer(server.address, links=False).join(HANG_SECONDS)
        stack.callback(others.leave)
        held = {one.name: one.handle for one in others.acquire(PLACED)}
        server.report(left)
        engine = Engine(server, a_pass)
        stack.callback(engine.leases.close)
        engine.ask(names)
        asked = list(engine.waiting)
        for now in sorted({0.0, *waits.values()}):
            server.report({name: max(0.0, seconds - now) for name, seconds in left.items()})
            engine.take([one for one in asked if waits.get(engine.names[one], 9.0) <= now])
        placed = [one for one in asked if engine.names[one] in PLACED]
        assert engine.taken == sorted(placed, key=lambda one: waits[engine.names[one]])
        server.report(dict.fromkeys(OTHERS, 0.0))
        rest = list(dict.fromkeys(engine.names[one] for one in engine.waiting))
        for name, leaves in zip(rest, PLACED, strict=False):
            others.release([held[leaves]])
            engine.end(leaves)
            engine.take([one for one in engine.waiting if engine.names[one] == name])
        others_of = [one for one in asked if one not in placed]
        assert engine.taken[len(placed) :] == sorted(others_of, key=lambda one: rest.index(engine.names[one]))
