"""StepTables against what they mean: each row's adapter, by name, at every site, pass after pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_connector.routing import Batch
from client_connector.serving.tables import NOBODY, StepTables
from lora_server.errors import ConfigError
from lora_server.spec import Site
from lora_server.transport.session import Held

ROWS, MOST = 12, 3
SITES = [Site(layer, projection) for layer in range(2) for projection in ("qkv", "gate_up")]
HELD = [Held(f"a{i}", 65537 + 7 * i, frozenset(SITES[i % 3 :: 2]), "v", None) for i in range(6)]


def tables() -> StepTables:
    return StepTables(SITES, ROWS, MOST, torch.device("cpu"))


def meant(step: StepTables, site: Site) -> list[int | None]:
    """The handle of each row with a delta there."""
    found = []
    for place in step.adapters_T.tolist():
        handle, first, here = (0, 0, 0) if place == NOBODY else step.directory(site)[place].tolist()
        assert first == 0 and here in (0, 1)
        found.append(handle if here else None)
    return found


def addresses(step: StepTables) -> list[int]:
    return [step.adapters_T.data_ptr(), *(step.directory(site).data_ptr() for site in SITES)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=3), max_size=8))
def test_every_pass_is_what_its_batch_says_at_the_same_addresses(passes):
    step = tables()
    before = addresses(step)
    for requests in passes:
        runs, first = [], 0
        for index, count in requests:
            runs.append((HELD[index], first, min(count, ROWS - first)))
            first = min(ROWS, first + count + 1)  # rows of the base model between them
        step.write(Batch.of_runs(runs, decode=False))
        for site in SITES:
            wanted: list[int | None] = [None] * ROWS
            for held, begin, count in runs:
                wanted[begin : begin + count] = [held.handle if site in held.sites else None] * count
            assert meant(step, site) == wanted
    assert addresses(step) == before


def test_a_handle_of_another_run_may_have_other_sites():
    step, other = tables(), Held("b", HELD[0].handle, frozenset(SITES[1:]), "v", None)
    step.write(Batch.of_runs([(HELD[0], 0, 1)], decode=True))
    step.forget()
    step.write(Batch.of_runs([(other, 0, 1)], decode=True))
    assert [meant(step, site)[0] for site in SITES] == [None, *[other.handle] * 3]


@pytest.mark.parametrize("runs", [[(held, i, 1) for i, held in enumerate(HELD[: MOST + 1])], [(HELD[0], ROWS, 1)]])
def test_what_does_not_fit_is_an_error(runs):
    step = tables()
    with pytest.raises(ConfigError, match="expected at most"):
        step.write(Batch.of_runs(runs, decode=False))
    step.write(None)
    assert meant(step, SITES[0]) == [None] * ROWS
    step.write(Batch.of_runs([(HELD[0], 0, ROWS)], decode=False))
    assert meant(step, SITES[0]) == [HELD[0].handle] * ROWS
