"""Stage `codes`: rows in 8 bits (--wire e4m3), through a server with a kernel that serves, beside exact rows.

codes       the put kernel makes the host rule's codes and scales of an engine's rows, bit for bit
answers     lie within the error of the format of float64; the same by Link, in a CUDA graph and over shared memory
no number   a row with a value that is no number comes back as NaN, its neighbours as usual
times       of a step by Link and in a graph, on either wire, one server after the other

A rehearsal runs on this CPU, with the emulator's kernels.
"""

from __future__ import annotations

import argparse
import importlib
import math
import tempfile
import time
from pathlib import Path
from typing import cast, get_args

import torch

from bench.gpu_run import stage
from bench.gpu_run.lab import NAMES, Lab, open_lab
from bench.gpu_run.record import Checks, Record
from bench.gpu_run.served import SITE, Steps, by_link_us, joined, passed, timed_us
from bench.gpu_run.world_timing import WARM_UP, median
from lora_server.adapters import open_adapter
from lora_server.device.client.link import KernelLink
from lora_server.spec import ModelSpec
from lora_server.transport import e4m3
from lora_server.wire import slot

ROUNDING = 2.0**-7  # of results of 16 bits, and of float32 sums, relative to what is added up
MOST_LOST = 0.06  # of a step's deltas, by their norm: of the demo's models it is 3.3 to 3.7 %
Bits = tuple[torch.Tensor, torch.Tensor]  # codes as uint8, and scales


def by_the_host(x_TK: torch.Tensor) -> Bits:
    """Quantise rows by the host's rule."""
    codes_TK, scales_T = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_TK))
    e4m3.quantise(x_TK, codes_TK, scales_T)
    return codes_TK.view(torch.uint8), scales_T


def as_sent(steps: Steps) -> Bits:
    """Read what the put kernel left in the slot of the newest step."""
    link = cast(KernelLink, steps.link)
    header = link.sent(steps.seq)
    at = slot.request_offsets(header.num_segments, header.num_entries, header.flags, 0, header.num_rows).scales
    begin = link.memory.request_at(steps.seq) + at
    scales_T = torch.frombuffer(bytearray(link.gpu.read(begin, 4 * header.num_rows)), dtype=torch.float32)
    return link.rows.request(header).cpu().view(torch.uint8), scales_T


def error_of_format(x_TK: torch.Tensor) -> torch.Tensor:
    """Return the error that each element may have: half a unit of 3 bits of mantissa, or of the least exponent."""
    return (2.0**-4 + 1e-6) * x_TK.abs() + 2.0**-10 * x_TK.abs().amax(1, keepdim=True) / e4m3.LARGEST


def exact(adapter: Path, spec: ModelSpec, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(deltas, how far from them answers of this wire may be) of rows, in float64."""
    x_TK = x_TK.double()
    out_TO, sums_TO, lost_TO = (torch.zeros(len(x_TK), spec.out_width(SITE), dtype=torch.float64) for _ in range(3))
    with open_adapter(adapter, spec) as opened:
        for pair, a_RK, b_OR in opened.read(SITE, 0):
            a_RK, b_OR, columns = a_RK.double(), pair.scale * b_OR.double(), slice(pair.out_begin, pair.out_end)
            out_TO[:, columns] += x_TK @ a_RK.T @ b_OR.T
            sums_TO[:, columns] += x_TK.abs() @ a_RK.abs().T @ b_OR.abs().T
            lost_TO[:, columns] += error_of_format(x_TK) @ a_RK.abs().T @ b_OR.abs().T
    lost_TO += ROUNDING * sums_TO
    return out_TO, lost_TO + error_of_format(out_TO.abs() + lost_TO)


def check(checks: Checks, lab: Lab, given: argparse.Namespace) -> None:
    """Codes, answers, and rows that are no numbers."""
    with joined(lab, "shm", "cpu") as session:
        expected = Steps(session, torch.device("cpu")).once()
    device = torch.device(given.device)
    with joined(lab, "gpu", given.device) as session:
        steps, spec = Steps(session, device), session.terms.spec
        ours = steps.once()
        checks.judge("by Link", torch.equal(ours, expected))
        checks.judge("codes are the host's", equal(as_sent(steps), by_the_host(steps.x.cpu())))
        values, bound = exact(lab.model.parent / "adapters" / NAMES[0], spec, steps.x.cpu())
        errors = (ours.double() - values).abs()
        checks.judge("within the error of the format of float64", bool((errors <= bound).all()))
        checks.judge("most are nearer", bool(errors.norm() < MOST_LOST * values.norm()))
        checks.judge("8 bits were not exact", bool(errors.max() > 1e-3 * values.abs().max()))
        steps.x[1], steps.x[2, 5], steps.x[3, -1] = 0, math.inf, -math.nan
        odd = steps.once()
        checks.judge("odd rows' codes are the host's", equal(as_sent(steps), by_the_host(steps.x.cpu())))
        kept = [row for row in range(steps.rows) if row not in (1, 2, 3)]
        same = torch.equal(odd[kept], ours[kept]) and not odd[1].any() and bool(odd[2:4].isnan().all())
        checks.judge("what is no number is one row's", same)
    with joined(lab, "gpu", given.device) as session:
        passes = passed(Steps(session, device))
        checks.judge("in a graph", torch.equal(passes.run(), expected))


def equal(ours: Bits, theirs: Bits) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def times(record: Record, lab: Lab, wire: str, rows: int, given: argparse.Namespace) -> None:
    """Time a step of `rows` rows. Joins twice: a link's steps are counted either by the host or by kernels."""
    device, rounds = torch.device(given.device), range(WARM_UP + given.rounds)
    with joined(lab, "gpu", given.device) as session:
        steps = Steps(session, device, rows)
        by_link = [by_link_us(steps) for _ in rounds]
    with joined(lab, "gpu", given.device) as session:
        passes = passed(Steps(session, device, rows))
        launched = [timed_us(device, passes.once) for _ in rounds]
    for what, found in (("push and wait by Link", by_link), ("put, wait, add", launched)):
        record.add("latency", what=f"{what}, {rows} rows, {wire}", median_us=median(found))


def served(record: Record, checks: Checks, scratch: Path, wire: str, given: argparse.Namespace) -> None:
    """One server, of one wire."""
    with open_lab(record, scratch, "cuda", "gpu", wire, given.serve, given.width) as lab:
        if wire == "e4m3":
            check(checks, lab, given)
        for rows in given.rows.split(","):
            times(record, lab, wire, int(rows), given)
        print(lab.server.tail())


def work(record: Record, given: argparse.Namespace) -> bool:
    """Whether answers are right; times are only written down."""
    if given.gpu:
        importlib.import_module(given.gpu).use()
    checks = Checks(record)
    for wire in given.wires.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lora-codes-") as scratch:
            served(record, checks, Path(scratch), wire, given)
        record.add("took", what=wire, seconds=round(time.monotonic() - began, 1))
    return checks.good


# where the GPU is a CPU: the tests' own server, and their GPU for this process
EMULATED = {
    "device": "cpu", "serve": "tests.support.gpu.gpu_serve", "gpu": "tests.support.gpu.emulated_gpu",
    "wires": "e4m3", "width": 64, "rows": "16", "rounds": 2,
}  # fmt: skip


def rehearse(record: Record, given: argparse.Namespace) -> None:
    """Plays on this CPU."""
    if given.rehearse:
        stage.play_emulated(work, record, given, **EMULATED)


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    own.add_argument("--serve", default="lora_server", help="the server's module")
    own.add_argument("--gpu", default="", help="a module that makes this process's CPU a GPU")
    own.add_argument("--wires", default=",".join(get_args(slot.Wire)), help="one server after the other")
    own.add_argument("--width", type=int, default=256, help="of the model")
    own.add_argument("--rows", default="16,256", help="of the steps that are timed")
    own.add_argument("--rounds", type=int, default=100, help="of each")
    stage.main(work, own.parse_args(), modules=("cupy",), check=rehearse)
