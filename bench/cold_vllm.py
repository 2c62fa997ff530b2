"""What an adapter that is not loaded costs the tokens of other requests in vLLM itself.

    .venv-vllm/bin/python -m bench.cold_vllm [--json] [--rounds N]

The server and the loads of bench/cold_neighbour.py: 16 layers, 40 ms a layer. vLLM decodes requests of two loaded
adapters, one step after the other; each step gives each of them a token, so a step's time is their gap between tokens.
Then a request of an adapter on disk comes. The ways take turns in one engine:

    admitted   it is scheduled once its adapter has a place, and steps wait for weights (before: all engines)
    loaded     it is scheduled once its adapter is loaded, or will be within the pass (now)

"alone": gaps without a cold request. "gap": from its arrival to its first token. "joined": the step in which that
token is made, "again" the same of the same request once its adapter is loaded; "x joined": the gaps' p99 over that of
"alone" and "again" together. "first": the cold request's time to its first token. "missed": steps without a token for
a warm request.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import harness
from bench.cold_neighbour import ADAPTERS, LAYER_SECONDS, LAYERS, PROMPT, ROOM, WARM, make, p99
from bench.tick_engine import AnyPace

WAYS, WARM_REQUESTS, LONGEST, WARM_UP = ("admitted", "loaded"), 4, 1024, 20
SIZES = {"head_dim": 64, "max_position_embeddings": LONGEST}
ENVIRONMENT = {
    "ENABLE_V1_MULTIPROCESSING": "0",
    "CPU_KVCACHE_SPACE": "1",
    "LOGGING_LEVEL": "ERROR",
    "CPU_OMP_THREADS_BIND": "nobind",
}


class Engine:
    """vLLM in this process. `tokens`: how many each request has so far."""

    def __init__(self, base: Path) -> None:
        from vllm import LLM

        llm = LLM(
            str(base),
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            disable_log_stats=True,
        )
        self._engine: Any = llm.llm_engine
        self._leases = self._engine.engine_core.engine_core.scheduler.lora_server_leases
        self._paces = {"admitted": AnyPace(), "loaded": self._leases.pace}
        self._adapters: dict[str, int] = {}
        self.tokens: dict[str, int] = {}

    def use(self, way: str) -> None:
        """Schedule new requests in this way."""
        from client_connector.serving.sites import HostSites

        self._leases.pace = self._paces[way]
        HostSites.waits_for_weights = way == "admitted"

    def add(self, request: str, adapter: str, tokens: int) -> None:
        """Take a request in."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, detokenize=False)
        prompt = {"prompt_token_ids": [30 + place for place in range(PROMPT)]}
        self._engine.add_request(request, prompt, params, lora_request=LoRARequest(adapter, number, "by-name"))

    def step(self) -> float:
        """Make a step; return its seconds."""
        began = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - began
        for output in outputs:
            self.tokens[output.request_id] = len(output.outputs[0].token_ids)
        return seconds

    def abort(self, request: str) -> None:
        """End a request."""
        self._engine.abort_request([request])


class Rounds:
    """The rounds of a measurement. Warm requests are replaced before they reach the longest text."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._warm, self._numbers = engine, list[str](), itertools.count()

    def _renew(self) -> None:
        for request in self._warm:
            self._engine.abort(request)
        self._warm = [f"warm-{next(self._numbers)}" for _ in range(WARM_REQUESTS)]
        for number, request in enumerate(self._warm):
            self._engine.add(request, f"a{number % WARM}", LONGEST - PROMPT)
        while not all(self._engine.tokens.get(request, 0) >= WARM_UP for request in self._warm):
            self._engine.step()

    def _until_first(self, adapter: str) -> tuple[list[float], int]:
        """Add a request of an adapter, and step until it has a token; the gaps, and how often one had no token."""
        cold, gaps, missed = f"cold-{next(self._numbers)}", list[float](), 0
        self._engine.add(cold, adapter, 2)
        while not self._engine.tokens.get(cold):
            before = [self._engine.tokens[request] for request in self._warm]
            gaps.append(self._engine.step())
            missed += sum(self._engine.tokens[one] == had for one, had in zip(self._warm, before, strict=True))
        self._engine.step()  # its last one
        return gaps, missed

    def run(self, way: str, adapter: str) -> dict[str, Any]:
        """Measure one round."""
        self._engine.use(way)
        self._renew()
        until, alone = time.perf_counter() + LAYERS * LAYER_SECONDS, list[float]()
        while time.perf_counter() < until:
            alone.append(self._engine.step())
        gaps, missed = self._until_first(adapter)
        return {"alone": alone, "gaps": gaps, "missed": missed, "again": self._until_first(adapter)[0][-1:]}


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of the table, by way."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        size = make(work, **SIZES)
        flags = ["--device-pool", str(round(size * (ROOM + 0.5))), "--host-pool", "0"]
        flags += ["--host-link-gbps", f"{size * 8e-9 / (LAYER_SECONDS * LAYERS):.6f}"]
        with harness.serving(work, *flags) as server:
            os.environ["LORA_SERVER_ADDRESS"] = server.address
            measured, turn = Rounds(Engine(work / "base")), _turn()
            for _ in harness.progress(range(rounds), "rounds"):
                for way in WAYS:
                    found[way].append(measured.run(way, next(turn)))
    return [_row(way, each) for way, each in found.items()]


def _turn() -> Iterator[str]:
    return itertools.cycle(f"a{index}" for index in range(WARM, ADAPTERS))


def _row(way: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    alone, gaps, again = ([one for each in found for one in each[key]] for key in ("alone", "gaps", "again"))
    first = statistics.median(sum(each["gaps"]) for each in found)
    row = {"engine": way, "first_ms": first * 1e3, "missed": sum(each["missed"] for each in found), "gaps": len(gaps)}
    for name, seen in (("alone", alone), ("gap", gaps)):
        row |= {f"{name}_p50_ms": statistics.median(seen) * 1e3, f"{name}_p99_ms": p99(seen) * 1e3}
    row |= {"p50_ratio": row["gap_p50_ms"] / row["alone_p50_ms"], "p99_ratio": row["gap_p99_ms"] / row["alone_p99_ms"]}
    row |= {"joined_ms": statistics.median(each["gaps"][-1] for each in found) * 1e3}
    return row | {"again_ms": statistics.median(again) * 1e3, "joined_ratio": p99(gaps) / p99(alone + again)}


COLUMNS = (
    "engine {engine} | alone p50, ms {alone_p50_ms:.1f} | p99 {alone_p99_ms:.1f} | gap p50 {gap_p50_ms:.1f} | "
    "p99 {gap_p99_ms:.1f} | x p50 {p50_ratio:.2f} | x p99 {p99_ratio:.2f} | joined ms {joined_ms:.1f} | "
    "again {again_ms:.1f} | x joined {joined_ratio:.2f} | first ms {first_ms:.0f} | missed {missed:d} | gaps {gaps:d}"
)


def main() -> None:
    given = harness.flags(__doc__, rounds=10)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(f"VLLM_{name}", value)
    harness.one_thread()
    rows = measure(given.rounds)
    harness.show(given, rows, harness.table("A cold adapter beside warm requests in vLLM", rows, COLUMNS))


if __name__ == "__main__":
    main()
