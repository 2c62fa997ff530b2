"""The costs and savings of the 8-bit wire: `--wire e4m3` beside `exact`, on the demo's models.

    python -m bench.wire [--json] [--rounds N]

Greedy tokens of the exact wire are the reference. Run again with e4m3: how many tokens are the same when all tokens
before them are, and how far their log probabilities move, relative to how far the adapters move them. The error of
deltas is taken at the shards, for the same rows that the exact run sends: norm of the difference over norm of the
delta. Bytes are those of requests and responses with their tables, beside a 16-bit engine's exact wire.
Conversion: microseconds of one core, beside a copy of the rows.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from typing_extensions import override

from bench import harness
from client_connector.transformers import attach
from kernels_cuda import cpu
from kernels_cuda.ops import Step
from lora_server import logs, spec
from lora_server.daemon import backends
from lora_server.demo import tiny
from lora_server.demo.inproc import InprocServer
from lora_server.placement import Placement
from lora_server.shard.compute import HostCompute
from lora_server.shard.request import Request
from lora_server.transport import e4m3
from lora_server.transport.base import Connection

NUM_SEQUENCES, PROMPT, NEW_TOKENS = 32, 16, 32
ADAPTERS = ((8, "all"), (16, "all"), (32, "all"), (64, "all"))
WIDER = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 512}  # the demo's
CONVERTED = ((8, 4096), (128, 4096), (256, 14336))
AGREED = (
    "model {kind} | engine and wire {name} | tokens that agree {agree:.1%} | log p moved, mean {mean:.4f} | "
    "largest {largest:.3f} | bytes {bytes:,}"
)
CONVERSION = (
    "rows {rows:,} | width {width:,} | copy {copy_us:,.0f} | quantise {quantise_us:,.0f} | expand {expand_us:,.0f}"
)


class Compared(HostCompute):
    """An exact wire's compute that also takes each step as e4m3 would carry it."""

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by projection: error, delta
        super().__init__(self._both)
        self._projection = ""

    @override
    def parts(self, request: Request, segments: Any, connection: Connection) -> Iterator[None]:
        self._projection = request.site.projection
        return super().parts(request, segments, connection)

    def _both(self, step: Step, out_UO: torch.Tensor) -> Iterator[None]:
        yield from cpu.lora_parts(step, out_UO)
        fields = {name: getattr(step, name) for name in step.__dataclass_fields__}
        again_UO = torch.empty(out_UO.shape)
        cpu.lora_step(Step(**fields | {"rows_TK": travelled(step.rows_TK)}), again_UO)
        squares = self.squares[self._projection]
        squares[0] += float((travelled(again_UO) - out_UO).square().sum())
        squares[1] += float(out_UO.float().square().sum())

    def errors(self) -> dict[str, float]:
        return {name: (error / delta) ** 0.5 for name, (error, delta) in sorted(self.squares.items())}


def travelled(x_TK: torch.Tensor) -> torch.Tensor:
    codes_TK, scales_T = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_TK))
    e4m3.quantise(x_TK, codes_TK, scales_T)
    return e4m3.expand(codes_TK, scales_T)


class Case:
    def __init__(self, kind: str, work: Path) -> None:
        rows = {f"tenant-{i}": {"lora_rank": rank, "targets": targets} for i, (rank, targets) in enumerate(ADAPTERS)}
        self.model = harness.make(work, kind, rows, **(WIDER if kind == "mixtral" else {}))
        self.spec = spec.load(work / "base")
        self.paths = {name: work / "adapters" / name for name in rows}
        self.names = [list(self.paths)[i % len(ADAPTERS)] for i in range(NUM_SEQUENCES)]
        self.ids = torch.randint(3, 250, (NUM_SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(0))

    def run(self) -> dict[str, Any]:
        """Both wires over the same tokens."""
        compared = Compared()

        def backend(placement: Placement, index: int, dtype: torch.dtype) -> backends.Backend:
            return backends.host(placement, index, dtype)._replace(compute=compared)

        with self.attached("exact", backend):
            said = self.model.generate(  # type: ignore[operator]
                self.ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        exact, exact_bytes = self.logprobs("exact", said)
        eight, eight_bytes = self.logprobs("e4m3", said)
        sixteen, sixteen_bytes = self.logprobs("exact", said, torch.bfloat16)
        with torch.no_grad():
            base = _logprobs(self.model, said)
        return {
            "errors": compared.errors(),
            "bytes": {"e4m3": eight_bytes, "bfloat16": sixteen_bytes, "float32": exact_bytes},
            "e4m3": _apart(eight, exact, said),
            "bfloat16": _apart(sixteen, exact, said),
            "base": _apart(base, exact, said),
        }

    def attached(self, wire: Any, make_backend: Any = backends.host) -> Any:
        stack = ExitStack()
        self.server = InprocServer(self.spec, self.paths, wire=wire, make_backend=make_backend)
        stack.callback(self.server.close)
        lora = stack.enter_context(attach(self.model, self.server))
        stack.enter_context(lora.adapters(self.names))
        return stack

    def logprobs(self, wire: str, said: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, int]:
        """[B, S, V] of what comes after each token, and the bytes that travelled."""
        self.model.to(dtype)
        with self.attached(wire):
            found = _logprobs(self.model, said)
            nbytes = sum(one.counters.request_bytes + one.counters.response_bytes for one in self.server.shards)
        self.model.to(torch.float32)
        return found, nbytes


def _logprobs(model: Any, said: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(said[:, :-1]).logits[:, PROMPT - 1 :].float().log_softmax(-1))


def _apart(ours: torch.Tensor, exact: torch.Tensor, said: torch.Tensor) -> dict[str, float]:
    """Two answers over the same tokens."""
    tokens = said[:, PROMPT:, None]
    moved = (ours.gather(2, tokens) - exact.gather(2, tokens)).abs()
    agree = (ours.argmax(2) == exact.argmax(2)).float().mean()
    return {"agree": float(agree), "mean": float(moved.mean()), "largest": float(moved.max())}


def conversion(rounds: int) -> list[dict[str, float]]:
    """Least microseconds, of so many rounds."""
    found = []
    for rows, width in CONVERTED:
        x_TK = torch.randn(rows, width).bfloat16()
        codes_TK, scales_T = torch.empty(rows, width, dtype=torch.float8_e4m3fn), torch.empty(rows)
        found.append({
            "rows": rows,
            "width": width,
            "copy_us": 1e6 * harness.least_s(rounds, x_TK.clone),
            "quantise_us": 1e6 * harness.least_s(rounds, partial(e4m3.quantise, x_TK, codes_TK, scales_T)),
            "expand_us": 1e6 * harness.least_s(rounds, partial(e4m3.expand, codes_TK, scales_T)),
        })  # fmt: skip
    return found


def main() -> None:
    given = harness.flags(__doc__, rounds=30)
    warnings.simplefilter("ignore")
    logs.configure(logging.WARNING)
    harness.one_thread()
    cases = {}
    for kind in harness.progress(tiny.KINDS, "generating"):
        with harness.scratch() as work:
            cases[kind] = Case(kind, work).run()
    times = conversion(given.rounds)
    harness.show(given, {"cases": cases, "conversion": times}, *tables(cases, times))


def tables(cases: dict[str, Any], times: list[dict[str, float]]) -> list[Table]:
    said = {"e4m3": "float32, e4m3", "bfloat16": "bfloat16, exact", "base": "float32, no adapter"}
    agreed = [
        {"kind": kind, "name": name, **case[key], "bytes": case["bytes"].get(key, float("nan"))}
        for kind, case in cases.items()
        for key, name in said.items()
    ]
    errors = [{"kind": kind, **case["errors"]} for kind, case in cases.items()]
    columns = [f"{name} {{{name}:.2%}}" for name in sorted({one for case in cases.values() for one in case["errors"]})]
    title = f"{NUM_SEQUENCES} sequences of {NEW_TOKENS} tokens, {len(ADAPTERS)} adapters, beside exact float32"
    return [
        harness.table(title, agreed, AGREED),
        harness.table("Relative error of deltas", errors, " | ".join(["model {kind}", *columns])),
        harness.table("Conversion of bfloat16 rows, us, one core", times, CONVERSION),
    ]


if __name__ == "__main__":
    main()
