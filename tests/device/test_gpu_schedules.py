"""The device protocol of links between GPUs, played on this CPU, against the Python loop's rule, checks and compute."""

from __future__ import annotations

import os

import pytest

from tests.support.gpu import emulated, gpu_cases, gpu_codes, gpu_mutants, gpu_schedules, gpu_world

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
SCHEDULES = int(os.environ.get("LORA_SERVER_SCHEDULES", "160"))  # make mutants plays 1000
PARTS = 4


@pytest.fixture(scope="module")
def library():
    return gpu_world.load()


@pytest.fixture(scope="module")
def nvshmem():
    return gpu_world.load(nvshmem=True)


@pytest.fixture(scope="module")
def in_codes():
    return gpu_world.load(in_codes=True)


@pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda case: case.__name__)
def test_case(case, library):
    case(library)


@pytest.mark.parametrize("case", gpu_cases.NETWORK_CASES, ids=lambda case: case.__name__)
def test_case_beyond_a_network(case, nvshmem):
    case(nvshmem)


@pytest.mark.parametrize("case", gpu_codes.CASES, ids=lambda case: case.__name__)
def test_case_of_rows_in_8_bits(case, in_codes):
    case(in_codes)


def test_rows_of_8_bits_are_refused_where_they_travel_as_they_are(library):
    gpu_codes.rows_of_the_other_wire_are_refused(library)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["library", "nvshmem", "in_codes"])
def test_seeded_schedules(kind, part, request):
    """Half of them with memory that is mapped, half with NVSHMEM's PEs, mapped or beyond a network; some in 8 bits."""
    library, plays = request.getfixturevalue(kind), SCHEDULES // (8 if kind == "in_codes" else 2)
    total = {"steps": 0, "answers": 0, "launches": 0}
    for seed in range(part, plays, PARTS):
        try:
            found = gpu_schedules.play(seed, library)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total = {name: count + found[name] for name, count in total.items()}
    schedules = len(range(part, plays, PARTS))
    assert total["steps"] > 5 * schedules and total["launches"] > schedules, total


def test_every_sabotage_has_its_place():
    assert len({mutant.name for mutant in gpu_mutants.MUTANTS}) == len(gpu_mutants.MUTANTS) >= 15
    for mutant in gpu_mutants.MUTANTS:
        gpu_mutants.mutated(mutant)
    short = set(gpu_mutants.SHORT)
    assert short <= {mutant.name for mutant in gpu_mutants.MUTANTS} and len(short) >= 15, "what CI runs"
