"""When a shard expects an adapter to be loaded, and what it reports of loads that fail."""

import shutil
from pathlib import Path

import pytest

from lora_server.memory.entry import NEVER, AdapterEntry, Reason, Source, Want
from lora_server.memory.load_queue import LoadQueue
from lora_server.memory.planner import LoadForecast
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, bytes_of, load, source_of

FAR = Source(Path(), "v1", "", "s3://far")


def entry(handle, nbytes, ready=0, layers=4, source=FAR):
    one = AdapterEntry(handle, source, tuple(range(layers)), handle)
    one.footprint.nbytes = one.footprint.size = nbytes
    one.copies.ready = set(range(ready))
    return one


def test_what_is_queued_before_counts_and_what_is_unknown_delays_nothing():
    forecast, absent = LoadForecast(lambda one: one.handle == 2), entry(2, 1000)
    first, last, unmeasured = entry(1, 1000, ready=1), entry(4, 500), entry(3, 0)
    unmeasured.footprint.size = None
    assert set(forecast.expect([first, last]).values()) == {NEVER}, "nothing was loaded yet"
    forecast.note("disk", 0, 0.0)
    assert set(forecast.expect([first, last]).values()) == {NEVER}, "a layer without weights says nothing"
    forecast.note("disk", 100, 0.1)
    expected = forecast.expect([first, absent, unmeasured, last])
    assert [expected[one] for one in (first, absent, unmeasured, last)] == pytest.approx([0.75, NEVER, NEVER, 1.25])


def test_what_requests_ask_for_is_measured_in_their_order_and_before_the_rest():
    queue = LoadQueue(lambda one: None)
    for number, reason in enumerate([Reason.MEASURE, Reason.ASKED, Reason.MEASURE, Reason.ASKED]):
        unmeasured = entry(number, 0)
        unmeasured.footprint.size = None
        queue.add(unmeasured, Want(reason, number))
    order = []
    while ordered := queue.in_order():
        order.append(ordered[0].handle)
        ordered[0].footprint.size = 0
        assert queue.expire(0.0) == ordered[:1]
    assert order == [1, 3, 0, 2]


def test_the_newest_layers_count_most():
    forecast = LoadForecast(lambda one: False)
    for rate in (1000, *[100] * 20):
        forecast.note("disk", rate, 1.0)
    assert forecast.expect([one := entry(1, 100)])[one] == pytest.approx(1.0, rel=0.05)


def test_a_report_says_how_long_the_rest_of_an_adapter_takes(gate, make_store, tiny_adapters):
    layer_seconds = 0.05
    store = make_store(on_layer=gate, link_gbps=bytes_of(tiny_adapters["all"]) / 4 * 8e-9 / layer_seconds)
    assert load(store, 1, tiny_adapters["all"]).result() is None
    gate.shut(), gate.arrived.clear()
    reported = {one.handle: one.seconds for one in store.report.take_changes()}
    assert reported == {1: 0.0}
    load(store, 2, tiny_adapters["all"])
    assert gate.arrived.wait(SECONDS)
    (said,) = [one for one in store.report.take_changes() if one.handle == 2]
    assert said.ready == 1 and 2 * layer_seconds < said.seconds < 60 * layer_seconds
    gate.open()
    until(lambda: store.report.layers_ready(2) == 4, "it is loaded")
    assert [one.seconds for one in store.report.take_changes() if one.handle == 2] == [0.0]


def test_a_failed_load_is_reported_to_each_client_that_asks_and_tried_again(make_store, tiny_adapters, tmp_path):
    store, path = make_store(), tmp_path / "moved"
    shutil.copytree(tiny_adapters["all"], path)
    source, size = source_of(path), bytes_of(tiny_adapters["all"])
    path.rename(tmp_path / "away")
    store.adapters.load(1, source, Done(store), eager=False, size=size)

    def outcome():
        """What a client hears that begins to hold it."""
        store.adapters.set_active([1], [])
        said, changes = [], store.report.take_changes
        until(
            lambda: said.extend(one for one in changes() if one.error or one.ready == 4) or said, "it failed, or came"
        )
        store.adapters.set_active([], [1])
        return said[0]

    failed = [outcome(), outcome()]
    assert all(str(path) in str(one.error) and not one.ready for one in failed), "at once, too, while it is fresh"
    (tmp_path / "away").rename(path)
    until(lambda: outcome().error is None, "it is tried again once `load_retry` has passed")
    assert store.report.layers_ready(1) == 4
