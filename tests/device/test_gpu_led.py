"""Leader mode where kernels serve by themselves, on the emulator, against its rule."""

from __future__ import annotations

import os

import pytest

from tests.support.gpu import emulated, gpu_led, gpu_world

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
SCHEDULES = int(os.environ.get("LORA_SERVER_SCHEDULES", "160")) // 4


@pytest.fixture(scope="module")
def library():
    return gpu_world.load()


@pytest.mark.parametrize("case", gpu_led.CASES, ids=lambda case: case.__name__)
def test_case(case, library):
    case(library)


def test_seeded_schedules(library):
    ordered = 0
    for seed in range(SCHEDULES):
        try:
            ordered += gpu_led.play(seed, library)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert ordered > 10 * SCHEDULES
