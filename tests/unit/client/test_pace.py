"""How an engine's next pass is estimated from those before it, and what a request's waits add up to."""

import random

import pytest

from client_connector.serving.pace import MARGIN, PassPace
from client_connector.serving.request_state import Phase
from client_connector.serving.waits import RequestWaits
from lora_server.errors import ProtocolError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.waits import WaitHistograms


def paced(passes):
    """A pace that has seen passes of (tokens, seconds), one after the other."""
    pace, now = PassPace(), 100.0
    for tokens, seconds in passes:
        pace.passed(tokens, now, now + seconds)
        now += seconds
    return pace


def test_passes_of_many_sizes_are_fitted_by_a_line():
    dice = random.Random(5)
    sizes = [dice.randrange(1, 512) for _ in range(200)]
    pace = paced([(size, 0.01 + 1e-4 * size) for size in sizes])
    for size in (1, 64, 400):
        assert pace.of(size) == pytest.approx(MARGIN * (0.01 + 1e-4 * size), rel=0.01)
    assert pace.of(10**6) == pace.of(max(sizes)), "a pass is never larger than the largest that was seen"


def test_nothing_is_promised_before_a_pass_was_seen_and_empty_ones_count_for_nothing():
    assert PassPace().of(64) == 0.0
    assert paced([(0, 5.0)]).of(64) == 0.0
    assert paced([(8, 0.02)] * 50).of(4096) == pytest.approx(MARGIN * 0.02), "one size says nothing of others"


def test_a_pass_that_was_scheduled_early_counts_from_the_end_of_the_one_before():
    pace = PassPace()
    for number in range(20):
        pace.passed(8, 0.1 * max(0, number - 1), 0.1 * (number + 1))
    assert pace.of(8) == pytest.approx(MARGIN * 0.1)


def test_a_faster_engine_is_noticed():
    assert paced([(8, 1.0)] * 100 + [(8, 0.02)] * 400).of(8) < MARGIN * 0.03


def test_slow_first_passes_schedule_no_request_whose_weights_steps_would_wait_for_in_vain():
    assert paced([(64, 5.0), *[(2, 0.01)] * 100]).of(64) == Timings.weights


def test_the_waits_of_a_request_are_told_apart_and_add_up():
    clock = iter(range(0, 100, 1)).__next__
    waits = RequestWaits(lambda: float(clock()))
    for phase in (Phase.QUEUED, Phase.LOADING, Phase.AWAY, Phase.ASKING, Phase.LOADING, Phase.HELD):
        waits.enter(phase)
    waits.scheduled(), waits.scheduled()
    assert waits.seconds == {"name": 3.0, "place": 1.0, "weights": 2.0, "engine": 1.0}
    for phase in (Phase.PAUSED, Phase.ASKING, Phase.HELD, Phase.ENDED):
        waits.enter(phase)
    assert waits.seconds == {"name": 4.0, "place": 1.0, "weights": 2.0, "engine": 2.0}, "asked for again"


def test_waits_that_were_told_are_taken_away_and_later_ones_are_kept():
    told, heard = WaitHistograms(), WaitHistograms()
    assert told.messages() == []
    told.add({"name": 1.0, "place": 0.5})
    messages = told.messages()
    told.add({"name": 2.0})
    heard.merge(messages), told.merge(messages, -1)
    assert [(one.phase, sum(one.counts), one.sum_ns) for one in told.messages()] == [("name", 1, 2 * 10**9)]
    heard.merge(told.messages())
    name, place = heard.of["name"], heard.of["place"]
    assert (sum(name.counts), name.sum_ns, place.sum_ns) == (2, 3 * 10**9, 10**9 // 2)


def test_counts_of_other_bounds_are_refused():
    with pytest.raises(ProtocolError, match="got 2 counts, expected 13"):
        WaitHistograms().merge([pb.PhaseStats(phase="name", counts=[1, 2])])
