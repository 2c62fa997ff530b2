"""Durations of steps, counted."""

from hypothesis import given
from hypothesis import strategies as st

from lora_server.histogram import BOUNDS_NS
from lora_server.shard.phases import PHASES, Phases

EDGES = st.sampled_from([0, *(bound + change for bound in BOUNDS_NS for change in (-1, 0, 1))])
STEP = st.tuples(*[EDGES | st.integers(0, 1 << 45)] * len(PHASES))


@given(st.lists(STEP, max_size=50))
def test_every_duration_is_counted_once_where_it_belongs(steps):
    phases = Phases()
    for step in steps:
        phases.add(*step)
    for (name, histogram), durations in zip(phases, list(zip(*steps, strict=True)) or [()] * len(PHASES), strict=True):
        bounds = zip([-1, *BOUNDS_NS], [*BOUNDS_NS, 1 << 62], strict=True)
        expected = [sum(max(low, 0) <= one < high for one in durations) for low, high in bounds]
        assert (name in PHASES, histogram.counts, histogram.sum_ns) == (True, expected, sum(durations))
