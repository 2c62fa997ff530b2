"""Stage `put`: our put kernel in one process. How long until the host sees it, alone and beside a GEMM?

put           rows gathered by a kernel on a stream of its own, then a word in pinned memory that the host polls
serve         the host launches a LoRA step on what came, on another stream, and a put of its result
wait          the host polls the word of that
beside a GEMM, with the put's stream of the same priority, and of a higher one: does the put wait for the GEMM?
"""

from __future__ import annotations

import argparse
import statistics

import torch

from bench.gpu_run import put_timing, stage
from bench.gpu_run.record import Record
from bench.gpu_run.served import WARM_UP, note
from bench.kernels.models import MODELS

SIZES = (16 << 10, 256 << 10, 4 << 20)
ROW_BYTES = 8 << 10
GEMM_WIDTH, GEMMS, GEMM_ROUNDS = 8192, 4, 20
MODEL, TOKENS = "mixtral-8x7b", 64


def check(*_: object) -> None:
    """Check that the transport accepts the puts of this stage; raise ValueError if not."""
    rows = torch.zeros(4, 8, dtype=torch.bfloat16)
    order, word = torch.arange(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    put_timing.step(rows, order, torch.empty_like(rows), word, 1, order[:1]).arguments()
    assert MODEL in MODELS


def latencies(record: Record, device: torch.device) -> bool:
    """Time a put alone, by size. Returns whether every row arrived."""
    good = True
    for nbytes in SIZES:
        put = put_timing.TimedPut(device, torch.cuda.Stream(device), nbytes // ROW_BYTES, ROW_BYTES)
        note(record, "put", put.once_us, bytes=nbytes)
        arrived = torch.equal(put.target, put.rows[put.order])
        record.add("arrived", name=f"{nbytes} bytes", good=arrived)
        good = good and arrived
    return good


def round_trips(record: Record, device: torch.device) -> bool:
    """put / serve / wait as the host does it today, and without the host between; whether the result is right."""
    trip = put_timing.RoundTrip(device, MODELS[MODEL], TOKENS)
    nbytes = trip.request.target.nbytes
    note(record, f"put, serve, wait: {MODEL} gate_up, {TOKENS} tokens", trip.by_host_us, bytes=nbytes)
    note(record, "the same as three launches on one stream", trip.on_one_stream_us, bytes=nbytes)
    note(record, "the LoRA step alone", trip.step_us, bytes=nbytes)
    error = trip.error()
    good = error < put_timing.MOST_ERROR
    record.add("served", name="the result of put, serve, wait", error=error, good=good)
    return good


def overlaps(record: Record, device: torch.device) -> None:
    """A put in the middle of GEMMs that fill the GPU, by priority of its stream."""
    gemm = put_timing.Gemm(device, GEMM_WIDTH, GEMMS)
    alone = statistics.median([gemm.once_us() for _ in range(GEMM_ROUNDS)][2:])
    for name, priority in (("same", 0), ("higher", -1)):
        put = put_timing.TimedPut(
            device, torch.cuda.Stream(device, priority=priority), SIZES[-1] // ROW_BYTES, ROW_BYTES
        )
        idle = statistics.median([put.once_us() for _ in range(WARM_UP)])
        pairs = [gemm.beside_us(put) for _ in range(GEMM_ROUNDS)][2:]
        gemm_us, put_us = (statistics.median(times) for times in zip(*pairs, strict=True))
        facts = {"gemm_alone_us": alone, "gemm_us": gemm_us, "put_us": put_us, "put_alone_us": idle}
        record.add("overlap", priority=name, bytes=SIZES[-1], **{key: round(us, 1) for key, us in facts.items()})


def work(record: Record, _: argparse.Namespace) -> bool:
    """Whether rows and results arrived as they should; times are only written down."""
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0)
    good = latencies(record, device)
    overlaps(record, device)
    return round_trips(record, device) and good


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",), check=check)
