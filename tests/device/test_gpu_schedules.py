"""The device protocol of links between GPUs, played on this CPU, against the Python loop's rule, checks and compute."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from lora_server.device.protocol import layout
from tests.support.gpu import gpu_mutants, gpu_world
from tests.support.gpu.gpu_cases import KINDS

pytestmark = [pytest.mark.emulator, pytest.mark.timeout(1200)]  # a build
SCHEDULES = int(os.environ.get("LORA_SERVER_SCHEDULES", "96"))  # make mutants plays 1000
FEW = 12
# schedules of each kind, in so many parts
PLAYED = {"mapped": (SCHEDULES // 2, 4), "nvshmem": (SCHEDULES // 2, 4)}
PLAYED |= dict.fromkeys(("e4m3", "led"), (SCHEDULES // 4, 1))


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(name, case, id=f"{name}-{case.__name__}") for name, kind in KINDS.items() for case in kind.cases],
)
def test_case(kind, case):
    case(KINDS[kind].load())


def play(kind: str, seeds: range) -> None:
    library, total = KINDS[kind].load(), Counter[str]()
    for seed in seeds:
        try:
            total.update(KINDS[kind].play(seed, library))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert total["steps"] > 5 * len(seeds) and total["launches"] > len(seeds), total


@pytest.mark.parametrize("kind", PLAYED)
def test_seeded_schedules(kind):
    """With memory that is mapped, with NVSHMEM's PEs, mapped or beyond a network, in 8 bits, and in leader mode."""
    play(kind, range(FEW))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "part"), [(kind, i) for kind, (_, parts) in PLAYED.items() for i in range(parts)])
def test_more_seeded_schedules(kind, part):
    played, parts = PLAYED[kind]
    play(kind, range(FEW + part, max(played, 2 * FEW), parts))


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
        elif name != "shared":
            dtype = getattr(layout, struct.upper())
            assert value == (dtype.fields[field][1] if field else dtype.itemsize), name


def test_handles():
    assert layout.handle_of(3, 7) == 3 | 7 << 16
    assert np.int32(layout.handle_of(65535, layout.MAX_GENERATION)) > 0
    for index, generation in ((1 << 16, 1), (0, 0), (0, 1 << 15)):
        with pytest.raises(ValueError, match=r"expected 16 and 15 bits"):
            layout.handle_of(index, generation)
