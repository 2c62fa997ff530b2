"""Adapters that come, change and go, while the controller is killed at random moments and engines go on."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from client_connector.client import Client
from client_connector.remote import RemoteServer
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import LoraServerError, ServerUnavailableError
from tests.chaos.caller import SMALL, Caller
from tests.chaos.floods import START_SECONDS, Behaved, held
from tests.chaos.report import Held, Line
from tests.support.serving import ask, kill_controller, listed, until
from tests.support.workload import Workload

KINDS = ("fused", "experts", "gate-up")  # what lies at the site where engines compute
CHANGERS, PROBES, MOST_PINNED = 4, 3, 8
COMPLETE_SECONDS, SECONDS = 5.0, 60.0
State = tuple[str, bool] | None  # which kind a name means, and whether it is pinned


class Changer:
    """Changes names that are its own, and knows what they mean; of a change without an answer it knows what either."""

    def __init__(self, address: str, paths: dict[str, Path], names: list[str], seed: str) -> None:
        self.address, self.paths, self.dice = address, paths, random.Random(seed)
        self.known: dict[str, State] = dict.fromkeys(names)
        self.either: dict[str, State] = {}
        self.before: dict[str, list[str]] = {}
        self.changes: Counter[str] = Counter()

    def fill(self) -> None:
        for name in self.known:
            self._put("Add", name, self.dice.choice(KINDS))

    def change_until(self, stop: threading.Event) -> None:
        while not stop.is_set() and self.change():
            pass

    def change(self) -> bool:
        """One of them; False where the server did not answer."""
        name = self.dice.choice([one for one in self.known if one not in self.either])
        meant, pinned = self.known[name], [one for one, state in self.known.items() if state and state[1]]
        if meant is None:
            return self._put("Add", name, self.dice.choice(KINDS))
        what = self.dice.choice(["Update", "Update", "Remove", "Pin", "Unpin", "Rollback"])
        if what == "Update":
            return self._put(what, name, self.dice.choice([kind for kind in KINDS if kind != meant[0]]))
        if what == "Rollback" and self.before.get(name):
            return self._do(what, name, (self.before[name][-1], meant[1]), wait_seconds=SECONDS)
        if what == "Remove":
            return self._do(what, name, None)
        if what == "Pin" and len(pinned) < MOST_PINNED // CHANGERS:
            return self._do(what, name, (meant[0], True), wait_seconds=SECONDS)
        return self._do("Unpin", name, (meant[0], False))

    def _put(self, method: str, name: str, kind: str) -> bool:
        meant = self.known[name]
        then = kind, bool(meant and meant[1])
        return self._do(method, name, then, uri=str(self.paths[kind]), wait_seconds=SECONDS)

    def _do(self, method: str, name: str, then: State, **fields: object) -> bool:
        self.either[name] = then
        try:
            ask(self.address, method, name=name, **fields)
        except ServerUnavailableError:
            return False
        self._is_now(name, then)
        self.changes[method] += 1
        return True

    def _is_now(self, name: str, then: State) -> None:
        was, self.known[name] = self.known[name], then
        self.either.pop(name, None)
        if then is None:
            self.before.pop(name, None)
        elif was and was[0] != then[0]:
            self.before[name] = [*(one for one in self.before.get(name, ()) if one != then[0]), was[0]]

    def compare(self, found: dict[str, State]) -> int:
        """Count the names that mean a wrong version; settle the outcome of each change that got no answer."""
        wrong = 0
        for name, meant in list(self.known.items()):
            now = found.get(name)
            if now == self.either.get(name, meant) and name in self.either:
                self._is_now(name, now)
            wrong += now != self.known[name]
            self.either.pop(name, None)
        return wrong


class Campaign:
    """One server, engines that behave, changers; `kill` as often as wanted."""

    def __init__(self, server: RunningServer, load: Workload, names: int, dice: random.Random) -> None:
        self.server, self.dice, self.paths = server, dice, load.paths
        own = [[f"acme/{number}" for number in range(first, names, CHANGERS)] for first in range(CHANGERS)]
        self.changers = [Changer(server.address, load.paths, some, f"{dice.random()}") for some in own]
        self.engines = [Behaved(server.address, transport) for transport in ("shm", "tcp") * 2]
        self.client = Client(RemoteServer(server.address, "auto"), timeout_seconds=SECONDS)
        self.right = {kind: self._deltas(kind) for kind in KINDS}
        self.versions = {self._listed()[kind][0]: kind for kind in KINDS}
        self.took: list[float] = []

    def _deltas(self, name: str) -> list[torch.Tensor]:
        caller = Caller(self.client, SMALL, name)
        caller.step()
        self.client.release(caller.held)
        return caller.first

    def _listed(self) -> dict[str, tuple[str, bool]]:
        return {name: (one.version, one.pinned) for name, one in listed(self.server.address).items()}

    def play(self, kills: int, bar: float) -> Line:
        """Kill the controller `kills` times; count the outcomes. `bar`: seconds until the server must be complete."""
        line = Line("", kills)
        with ThreadPoolExecutor(CHANGERS) as threads:
            for _ in range(kills):
                stop = threading.Event()
                running = [threads.submit(one.change_until, stop) for one in self.changers]
                threading.Event().wait(self.dice.uniform(0.1, 2.0))
                line.lost += self._kill()
                line.late += self.took[-1] > bar
                stop.set()
                for one in running:
                    one.result()
                found = {name: (self.versions[version], pinned) for name, (version, pinned) in self._listed().items()}
                line.lost += sum(one.compare(found) for one in self.changers)
                line.answers += self._probe(found)
        line.answers += Counter(str(one["outcome"]) for engine in self.engines for one in list(engine.rounds))
        changes = sum((one.changes for one in self.changers), Counter[str]())
        done = ", ".join(f"{count:,} {what}" for what, count in sorted(changes.items()))
        median, worst = statistics.median(self.took), max(self.took)
        line.kind = f"controller killed, complete after {median:.1f} s, at worst {worst:.1f}; {done}"
        return line

    def _kill(self) -> int:
        """Kill the controller; count the engines that made no step while it was down."""
        steps, began = [len(one.rounds) for one in self.engines], time.monotonic()
        kill_controller(self.server)
        self.took.append(time.monotonic() - began)
        return sum(len(one.rounds) == before for one, before in zip(self.engines, steps, strict=True))

    def _probe(self, found: dict[str, State]) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        names = sorted(name for name in found if name.startswith("acme/"))
        for name in self.dice.sample(names, min(PROBES, len(names))):
            state = found[name]
            assert state is not None
            try:
                pairs = zip(self._deltas(name), self.right[state[0]], strict=True)
                outcomes["right" if all(torch.allclose(a, b, atol=1e-4) for a, b in pairs) else "wrong"] += 1
            except LoraServerError as error:
                outcomes[error.code] += 1
                self.client.recover()
        return outcomes

    def close(self) -> None:
        self.client.close()
        for engine in self.engines:
            engine.stop()


def play(scratch: Path, load: Workload, short: bool, dice: random.Random) -> tuple[list[Line], Held]:
    """Play the campaign on a server with --data-dir, which keeps a copy of every adapter."""
    adapters = scratch / "adapters"
    adapters.mkdir()
    for name in (*KINDS, "tenant"):
        (adapters / name).symlink_to(load.paths["fused" if name == "tenant" else name])
    flags = ["--base-model", str(load.base), "--adapters", str(adapters), "--adapter-root", "/", "--layout", "ep2-pp1"]
    with running_server(scratch / "log", [*flags, "--data-dir", str(scratch / "data")]) as server:
        campaign = Campaign(server, load, 40 if short else 2000, dice)
        try:
            until(lambda: all(len(one.rounds) > 20 for one in campaign.engines), "the first steps", START_SECONDS)
            with ThreadPoolExecutor(CHANGERS) as threads:
                list(threads.map(Changer.fill, campaign.changers))
            before = held(server)
            line = campaign.play(2 if short else 20, float("inf") if short else COMPLETE_SECONDS)
            return [line], Held("changes", before, held(server))
        finally:
            campaign.close()
