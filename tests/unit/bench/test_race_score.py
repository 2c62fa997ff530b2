"""Figures of bench/race from outcomes that are known."""

import pytest

from bench.race import load, score
from bench.race.load import Call, Job, Seen


def call(new_tokens=3):
    return Call(0.0, "a", [5], new_tokens)


def seen(number, due, *times):
    return Seen(number, due, due, list(times), list(range(len(times))))


def test_a_call_without_an_answer_counts_until_the_end_and_as_outside():
    job = Job([call(), call()], 0, 10.0)
    row = score.row(job, [seen(0, 1.0, 1.5, 1.6, 1.7)])
    assert (row["calls"], row["complete"], row["within"]) == (2, 1, 0.5)
    assert row["ttft_p50_s"] == pytest.approx((0.5 + 10.0) / 2)
    assert row["tpot_p50_s"] == pytest.approx(0.1)


@pytest.mark.parametrize("times", [(2.5, 2.6, 2.7), (0.1, 0.5, 0.9)])
def test_a_call_is_outside_where_either_time_is(times):
    assert score.row(Job([call()], 0, 10.0), [seen(0, 0.0, *times)])["within"] == 0.0


def test_a_late_generator_says_so():
    late = Seen(0, 0.0, 0.5, [1.0, 1.1, 1.2], [1, 2, 3])
    assert score.row(Job([call()], 0, 10.0), [late])["is_late"]


def test_a_closed_loop_counts_the_tokens_of_its_seconds():
    cut = seen(1, 1.5, 1.9)  # not complete at the end
    row = score.row(Job([call(), call()], 1, 2.0), [seen(0, 0.0, 0.5, 1.0, 1.5), cut, seen(0, 1.9, 2.1, 2.2, 2.3)])
    assert row["tokens_per_s"] == 2.0 and row["calls"] == 2


def test_answers_differ_where_a_token_does():
    mine = [Seen(0, 0, 0, tokens=[1, 2, 3]), Seen(1, 0, 0, tokens=[4])]
    theirs = [Seen(0, 0, 0, tokens=[1, 2]), Seen(1, 0, 0, tokens=[5]), Seen(2, 0, 0, tokens=[6])]
    assert score.compare(mine, theirs) == (1, 2)


def test_the_highest_rate_is_the_last_before_the_first_failure():
    rows = [{"rate": rate, "within": within} for rate, within in ((4, 0.95), (1, 1.0), (2, 0.9), (3, 0.5))]
    assert score.highest_rate(rows) == 2


def test_poisson_calls_are_in_order_and_follow_the_rate():
    calls = load.poisson(load.names("attention", 16), 4.0, 20.0, seed=0)
    times = [one.at for one in calls]
    assert len(calls) == 80 and times == sorted(times) and times[-1] <= 20
    asked = [one.adapter for one in calls]
    assert asked.count("attention-000") > asked.count("attention-015")


def test_a_trace_keeps_its_gaps_in_the_given_time(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("timestamp,input_tokens,output_tokens\n10,1600,320\n20,160,32000\n50,16,16\n60,16,16\n")
    calls = load.compressed(file, ["a"], 1.5, 2.0, seed=0)
    assert [one.at for one in calls] == pytest.approx([0.0, 0.5, 2.0])
    assert [(len(one.prompt), one.new_tokens) for one in calls] == [(100, 20), (10, 64), (4, 4)]
