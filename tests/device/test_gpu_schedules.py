"""The device protocol of links between GPUs, played on this CPU, against the Python loop's rule, checks and compute."""

from __future__ import annotations

import functools
import os
from collections import Counter

import numpy as np
import pytest

from lora_server.transport.gpu import layout
from tests.support.gpu import emulated, gpu_cases, gpu_codes, gpu_led, gpu_mutants, gpu_schedules, gpu_world

pytestmark = [pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING), pytest.mark.timeout(1200)]  # a build
SCHEDULES = int(os.environ.get("LORA_SERVER_SCHEDULES", "96"))  # make mutants plays 1000
FEW = 12
LIBRARIES = {  # of kernels; a stage in leader mode has those of mapped memory
    "mapped": gpu_world.load,
    "nvshmem": functools.partial(gpu_world.load, nvshmem=True),
    "e4m3": functools.partial(gpu_world.load, in_codes=True),
    "led": gpu_world.load,
}
CASES = {
    "mapped": (*gpu_cases.CASES, gpu_codes.rows_of_the_other_wire_are_refused),
    "nvshmem": gpu_cases.NETWORK_CASES,
    "e4m3": gpu_codes.CASES,
    "led": gpu_led.CASES,
}
PLAYED = {"mapped": SCHEDULES // 2, "nvshmem": SCHEDULES // 2, "e4m3": SCHEDULES // 4, "led": SCHEDULES // 4}
PARTS = {"mapped": 4, "nvshmem": 4, "e4m3": 1, "led": 1}
STRUCTS = {
    "Client": layout.CLIENT,
    "Link": layout.LINK,
    "Entry": layout.ENTRY,
    "Site": layout.SITE,
    "Command": layout.COMMAND,
    "Note": layout.NOTE,
    "Mailbox": layout.MAILBOX,
    "Serve": layout.SERVE,
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=f"{kind}-{case.__name__}") for kind, cases in CASES.items() for case in cases],
)
def test_case(kind, case):
    case(LIBRARIES[kind]())


def play(kind: str, seeds: range) -> None:
    library, total = LIBRARIES[kind](), Counter[str]()
    one = gpu_led.play if kind == "led" else gpu_schedules.play
    for seed in seeds:
        try:
            total.update(one(seed, library))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert total["steps"] > 5 * len(seeds) and total["launches"] > len(seeds), total


@pytest.mark.parametrize("kind", LIBRARIES)
def test_seeded_schedules(kind):
    """With memory that is mapped, with NVSHMEM's PEs, mapped or beyond a network, in 8 bits, and in leader mode."""
    play(kind, range(FEW))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in PARTS.items() for part in range(parts)])
def test_more_seeded_schedules(kind, part):
    play(kind, range(FEW + part, max(PLAYED[kind], 2 * FEW), PARTS[kind]))


def test_every_sabotage_has_its_place():
    assert len({mutant.name for mutant in gpu_mutants.MUTANTS}) == len(gpu_mutants.MUTANTS) >= 15
    for mutant in gpu_mutants.MUTANTS:
        gpu_mutants.mutated(mutant)
    assert sum(mutant.short for mutant in gpu_mutants.MUTANTS) >= 15, "what CI runs"


def test_structs_that_hosts_and_kernels_share_are_alike():
    library = gpu_world.load()
    names, i = [], 0
    while name := library.layout_name(i):
        names.append(name.decode())
        i += 1
    assert len(names) > 30
    for name in names:
        value = library.layout_of(name.encode())
        struct, _, field = name.partition(".")
        if name == "Order":
            assert value == layout.ORDER_BYTES
        elif name == "MAX_LINKS":
            assert value == layout.MAX_LINKS
        elif not field and name != "shared":
            assert value == STRUCTS[struct].itemsize, name
        elif field:
            assert value == STRUCTS[struct].fields[field][1], name


def test_handles():
    assert layout.handle_of(3, 7) == 3 | 7 << 16
    assert np.int32(layout.handle_of(65535, layout.MAX_GENERATION)) > 0
    for index, generation in ((1 << 16, 1), (0, 0), (0, 1 << 15)):
        with pytest.raises(ValueError, match=r"expected 16 and 15 bits"):
            layout.handle_of(index, generation)
