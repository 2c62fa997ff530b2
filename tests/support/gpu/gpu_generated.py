"""Sabotages of some classes, at every place in the kernels' sources where one can stand; see gpu_mutants."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.gpu.gpu_sabotages import Mutant
from tests.support.gpu.gpu_texts import INSTRUCTIONS, read

STEP, PUT, ROUTE = "lora_step.cu", "put.cu", "route.cu"
PLAYED = {  # what plays each source's kernels, the likeliest to catch something first
    "link.cu": ("mapped", "led", "nvshmem", "e4m3"),
    "answer.cuh": ("mapped", "nvshmem", "e4m3"),
    "serve.cu": ("mapped", "e4m3"),
    "poller.cuh": ("mapped", "led"),
    "mailbox.cuh": ("mapped", "led"),
    "leader.cuh": ("led",),
    "request.cuh": ("mapped",),
    "step.cuh": (STEP, "mapped"),
    "shares.cuh": (STEP,),
    "lora_step.cuh": (STEP,),
    "shrink.cuh": (STEP,),
    "expand.cuh": (STEP,),
    "combine.cuh": (STEP,),
    "e4m3.cuh": ("to_codes.cu", "e4m3"),
    "rows.cuh": (PUT, "e4m3"),
    "copy.cuh": (PUT, "mapped"),
    "lora_step.cu": (STEP,),
    "put.cu": (PUT,),
    "route.cu": (ROUTE,),
}


class Class(NamedTuple):
    name: str
    pattern: str
    instead: str
    kinds: tuple[str, ...] = ()  # none: those of PLAYED


CLASSES = (
    Class("blocks are counted as two", r"gridDim\.x", "2"),
    Class("each block but the second is the first", r"blockIdx\.x == 0", "blockIdx.x != 1"),
    Class("each block but the first is the last", r"blockIdx\.x == gridDim\.x - 1", "blockIdx.x != 0"),
    Class("a warp waits for itself alone", r"\bsync_block\(\);", "sync_warp();"),
    Class("a relaxed acquire", r"\bload_acquire\(", "load_l2("),
    Class("a relaxed acquire of the system", r"\bload_acquire_system\(", "load_system("),
    Class("a relaxed release", r"\bstore_release\(", "store<uint64>("),
    Class("a relaxed release to the system", r"\bstore_release_system\(", "store_system("),
    Class("a relaxed arrival", r"\badd_release\(", "add_directly("),
    Class("an arrival that does not acquire", r"\badd_acq_rel\(", "add_release("),
    Class("an arrival that does not release", r"\badd_acq_rel\(", "add_acquire("),
    Class("no fence", r"\bfence_system\(\);", ";"),
    Class("no proxy fence", r"\bcopy_acquire\(\);", ";"),
    Class("launch bounds one warp short", r"__launch_bounds__\([^,()]+", r"\g<0> - LANES", ("bounds",)),
)
IN_INSTRUCTIONS = (  # of ptx.cuh, system.cuh and the half of e4m3.cuh that has instructions
    Class("a relaxed acquire", r"\.acquire\b", ".relaxed"),
    Class("a relaxed release", r"\.release\b", ".relaxed"),
    Class("no release", r"\.acq_rel\b", ".acquire"),
    Class("no acquire", r"\.acq_rel\b", ".release"),
    Class("one GPU for the system", r"\.sys\b", ".gpu"),
    Class("one block for a GPU", r"\.gpu\b", ".cta"),
    Class("no instruction", r"\basm(?: volatile)?\([^;]*?(?:;[^;]*?)*?\);", ";"),
    Class("swapped halves", r'"f"\(high\), "f"\(low\)', '"f"(low), "f"(high)'),
    Class("swapped halves", r"\{l, h\}", "{h, l}"),
    Class("low and high swapped", r"(v << 16)(.*\n.*)(v & 0xffff0000u)", r"\3\2\1"),
    Class("memory is not clobbered", r' : "memory"\);', ");"),
)
HEADER = "one warp loads, fills and stores the header"
ENDED = "what comes before it in its queue has ended, which makes all of it visible"
EQUIVALENT = {  # and why nothing can catch it
    "link.cu: put: a warp waits for itself alone, 1": HEADER,
    "link.cu: put: a warp waits for itself alone, 2": HEADER,
    "link.cu: link_send: a warp waits for itself alone, 1": ENDED,
    "link.cu: link_send: no fence, 1": ENDED,
    "put.cu: signal_when_all_are_done: a relaxed release to the system, 1": "with the fence before it, it releases",
    "route.cu: sum_before: a warp waits for itself alone, 2": "a barrier comes before each next use of the sums",
    "serve.cu: work: a warp waits for itself alone, 2": "one warp loads the order, and one of its lanes reads it",
    "serve.cu: wait_for_turn: a relaxed acquire, 4": "the acquire of `left` before it has brought the turn",
}


FUNCTION = re.compile(r"(?:^|[> ])(?:DEVICE|#define|__launch_bounds__\(\w+\)) [^;=\n]*?(\w+)(?:<\w+>)?\(", re.MULTILINE)


def generated() -> list[Mutant]:
    """Make all sabotages but EQUIVALENT, which change nothing. Raises ValueError for a name there that is gone."""
    wanted = [(file, its, its.kinds or kinds) for file, kinds in PLAYED.items() for its in CLASSES]
    wanted += [(file, its, ("table",)) for file in INSTRUCTIONS for its in IN_INSTRUCTIONS]
    found = [one for what in wanted for one in at_every_place(*what)]
    if gone := EQUIVALENT.keys() - {one.name for one in found}:
        raise ValueError(f"no such sabotages: {', '.join(sorted(gone))}")
    return [one for one in found if one.name not in EQUIVALENT]


def at_every_place(file: str, one: Class, kinds: tuple[str, ...]) -> Iterator[Mutant]:
    text, seen = read(file), Counter[str]()
    for found in re.finditer(one.pattern, text):
        if "//" in text[text.rfind("\n", 0, found.start()) : found.start()]:
            continue
        line_end = text.index("\n", found.start())
        name = f"{file}: {FUNCTION.findall(text, 0, line_end)[-1]}: {one.name}"
        seen[name] += 1
        yield Mutant(file, f"{name}, {seen[name]}", found[0], found.expand(one.instead), False, kinds, found.start())
