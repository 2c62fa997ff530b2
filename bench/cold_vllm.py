"""What an adapter that is not loaded costs the tokens of other requests in vLLM itself.

    .venv-vllm/bin/python -m bench.cold_vllm [--json] [--rounds N]

The server and the loads of bench/cold_neighbour.py: 16 layers, 40 ms a layer, a core for the engine and one for the
shard. vLLM decodes requests of two loaded adapters, one step after the other; each step gives each of them a token, so
a step's time is their gap between tokens. Then a request of an adapter on disk comes. Two ways take turns in an engine:

    admitted   it is scheduled once its adapter has a place, and steps wait for weights (before: all engines)
    loaded     it is scheduled once its adapter is loaded, or will be within the pass (now)

"gap": of the warm requests, from the cold request's arrival to its first token. Two references, each of as long a time:
"alone", in which nothing arrives, and "warm", in which the same request arrives once its adapter is loaded; "x warm" is
what only the load costs. "joined": the step in which the cold request's token is made, "again" that of the warm one.
"first": the cold request's time to its first token. "missed": steps without a token for a warm request.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from bench import harness
from bench.cold_neighbour import FIGURES, LOAD_SECONDS, PROMPT, ROOM, WARM, cold_adapters, figures, make
from bench.tick_engine import AnyPace

WAYS, WARM_REQUESTS, LONGEST, WARM_UP = ("admitted", "loaded"), 4, 1024, 20
SIZES = {"head_dim": 64, "max_position_embeddings": LONGEST}
ENVIRONMENT = {"ENABLE_V1_MULTIPROCESSING": "0", "CPU_KVCACHE_SPACE": "1", "LOGGING_LEVEL": "ERROR"}


def open_llm(base: Path, longest: int) -> Any:
    """Open vLLM in this process, with models of at most so many tokens."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(f"VLLM_{name}", value)
    from vllm import LLM

    return LLM(
        str(base),
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        max_model_len=longest,
        disable_log_stats=True,
    )


class Engine:
    """vLLM in this process. `tokens`: how many each request has so far."""

    def __init__(self, base: Path) -> None:
        self._engine: Any = open_llm(base, LONGEST).llm_engine
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

    def _beside(self, adapter: str) -> dict[str, Any]:
        """Add a request of one token, and step until it has that, and for LOAD_SECONDS at least."""
        request, gaps, missed, first, joined = f"cold-{next(self._numbers)}", list[float](), 0, 0.0, 0.0
        began = time.perf_counter()
        self._engine.add(request, adapter, 1)
        while not first or time.perf_counter() < began + LOAD_SECONDS:
            before = [self._engine.tokens[one] for one in self._warm]
            gaps.append(self._engine.step())
            missed += sum(self._engine.tokens[one] == had for one, had in zip(self._warm, before, strict=True))
            if not first and self._engine.tokens.get(request):
                first, joined = time.perf_counter() - began, gaps[-1]
        return {"seconds": gaps, "missed": missed, "first": first, "joined": joined}

    def run(self, way: str, adapter: str) -> dict[str, Any]:
        """Measure one round."""
        self._engine.use(way)
        self._renew()
        until, alone = time.perf_counter() + LOAD_SECONDS, list[float]()
        while time.perf_counter() < until:
            alone.append(self._engine.step())
        return self._beside(adapter) | {"alone": alone, "warm": self._beside(adapter)}


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of the table, by way."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with harness.scratch() as work:
        flags = harness.slow_link(make(work, **SIZES), LOAD_SECONDS, ROOM)
        with harness.serving(work, *flags, "--host-pool", "0") as server:
            harness.a_core_each(server.address)
            os.environ["LORA_SERVER_ADDRESS"] = server.address
            measured, turn = Rounds(Engine(work / "base")), cold_adapters()
            for _ in harness.progress(range(rounds), "rounds"):
                for way in WAYS:
                    found[way].append(measured.run(way, next(turn)))
    rows = []
    for way, each in found.items():
        missed, gaps = sum(one["missed"] for one in each), sum(len(one["seconds"]) for one in each)
        rows.append({"engine": way, "missed": missed, "gaps": gaps, **figures("gap", each)})
    return rows


COLUMNS = f"engine {{engine}} | {FIGURES.replace('pass', 'gap')} | missed {{missed:d}} | gaps {{gaps:d}}"


def main() -> None:
    given = harness.flags(__doc__, rounds=10)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    harness.one_thread()
    rows = measure(given.rounds)
    harness.show(given, rows, harness.table("A cold adapter beside warm requests in vLLM", rows, COLUMNS), width=200)


if __name__ == "__main__":
    main()
