"""Stage `headline`: gate_up and down of one layer of Mixtral-8x7B on one shard of four (2 of 8 experts), in one graph.

512 adapters of rank 64, batches of 128 and 256 tokens. InfiniLoRA (table 4, EP4-PP2, LoRA without receive and send)
takes 142 and 204 us for the step, in a server that runs; here it is the kernels alone, routed before, with a cold L2.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch

from bench.gpu_run import one_cell, stage
from bench.gpu_run.record import Record
from bench.kernels import measure, ours
from bench.kernels.__main__ import hardware
from bench.kernels.draws import NUM_DRAWS, Draw, draws
from bench.kernels.models import MODELS
from bench.kernels.roofline import distinct_bytes
from bench.kernels.timing import capture, replay_us

MODEL, EXPERTS = MODELS["mixtral-8x7b"], range(2)
PAPER_US = {128: 142.0, 256: 204.0}  # EP4-PP2
TARGET_US = {128: 85.0, 256: 165.0}


def pairs_and_entries(drawn: Draw) -> tuple[int, int]:
    """Count a draw's distinct (adapter, expert) pairs on the shard, and its entries there."""
    here = drawn.experts_Tk < EXPERTS.stop
    pairs = drawn.adapters_T[:, None].astype("int64") * MODEL.num_experts + drawn.experts_Tk
    return len(set(pairs[here].tolist())), int(here.sum())


def floor_bytes(drawn: Draw) -> float:
    """Bytes that both sites must move; a token counts twice in the rare case that both its experts are here."""
    pairs, entries = pairs_and_entries(drawn)
    return sum(distinct_bytes(replace(MODEL, top_k=1), site, entries, pairs).total for site in MODEL.sites)


def adapters_on(gpu: measure.Gpu) -> list[ours.Adapters]:
    """Make all 512 adapters, for both sites."""
    generator = torch.Generator(gpu.device).manual_seed(measure.SEED)
    return [ours.Adapters(MODEL, site, generator) for site in MODEL.sites]


def cell(
    record: Record, gpu: measure.Gpu, adapters: list[ours.Adapters], tokens: int, num_draws: int = NUM_DRAWS
) -> bool:
    """Time one batch size; return whether sampled rows are right."""
    generator = torch.Generator(gpu.device).manual_seed(measure.SEED)
    spaces = [ours.workspace_for(MODEL, site, tokens, gpu.device) for site in MODEL.sites]
    graphs, errors, kept = [], [], []  # kept: graphs replay over these
    drawn_all = draws(MODEL, tokens, num_draws)
    for seed, drawn in enumerate(drawn_all):
        both = [
            ours.device_draw(MODEL, its, drawn, measure.rows_of(MODEL, its.site, tokens, generator), EXPERTS)
            for its in adapters
        ]
        kept.append(both)
        for draw, space, its in zip(both, spaces, adapters, strict=True):
            draw.out.fill_(float("nan"))
            ours.route(draw, gpu.router)
            ours.launch(draw, gpu.kernels, space)
            errors.append(ours.sampled_error(draw, its, measure.SAMPLES, seed))

        def layer(both: list[ours.DeviceDraw] = both) -> None:
            for draw, space in zip(both, spaces, strict=True):
                ours.launch(draw, gpu.kernels, space)

        graphs.append(capture(layer, gpu.device))
    us = statistics.mean(replay_us(graphs, gpu.flush, gpu.device))
    floor_us = statistics.mean(map(floor_bytes, drawn_all)) / gpu.read_gbps / 1e3
    record.add(
        "headline", tokens=tokens, us=round(us, 1), paper_us=PAPER_US[tokens], target_us=TARGET_US[tokens],
        floor_us=round(floor_us, 1), floor_ratio=round(floor_us / us, 3), max_rel_err=max(errors),
    )  # fmt: skip
    good = max(errors) < one_cell.MOST_ERROR
    record.add("check", name=f"rows of {tokens} tokens", good=good)
    return good


def check(*_: object) -> None:
    """Check that the draws use this shard's experts. Raises ValueError."""
    for tokens in PAPER_US:
        pairs, entries = pairs_and_entries(draws(MODEL, tokens, 1)[0])
        if not 0 < pairs <= entries < tokens:
            raise ValueError(f"got {pairs} pairs and {entries} entries of {tokens} tokens")


def work(record: Record, _: argparse.Namespace) -> bool:
    """Both batches; whether all is right."""
    gpu = measure.Gpu(torch.device("cuda", 0))
    overhead = measure.overhead_us(gpu)
    record.add("hardware", **hardware(), read_gbps=round(gpu.read_gbps, 1), empty_us=round(overhead["empty_us"], 2))
    adapters = adapters_on(gpu)
    good = [cell(record, gpu, adapters, tokens) for tokens in PAPER_US]
    return all(good)


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",), check=check)
