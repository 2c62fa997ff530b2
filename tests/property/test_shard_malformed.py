"""Malformed requests: a typed error to their client, and nothing to anybody else."""

import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lora_server.errors import ProtocolError, UnknownAdapterError
from lora_server.wire import slot
from tests.support.rig import MAX_ROWS, Client, healthy, loaded_rig

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def loaded(tiny_adapters):
    with loaded_rig(tiny_adapters["all"], foreign_seconds=0.01) as rig:  # a handle that is damaged is not on its way
        yield rig


HUGE = (2**31, 2**32 - 1)
BAD_FIELDS = [
    *({"step_class": value} for value in (2, 255)),
    *({"client": value} for value in (0, 2**32 - 1)),
    *({"epoch": value} for value in (0, 2)),
    *({"seq": value} for value in (0, 2, 2**64 - 1)),
    *({"layer": value} for value in (4, *HUGE)),
    *({"projection": value} for value in (4, *HUGE)),
    *({"dtype": value} for value in (1, 3, *HUGE)),
    *({"flags": value} for value in (0, 1, 2)),
    *({"num_rows": value} for value in (0, 1, 3, MAX_ROWS + 1, *HUGE)),
    *({"num_entries": value} for value in (0, 1, 5, MAX_ROWS + 1, *HUGE)),
    *({"num_segments": value} for value in (0, 1, 3, 1000, *HUGE)),
    *({"num_out_rows": value} for value in (0, 1, MAX_ROWS + 1, *HUGE)),
    *({"in_begin": value} for value in (1, 64, *HUGE)),
    *({"in_end": value} for value in (0, 63, 65, *HUGE)),
    *({"windows": value} for value in (((0, 193),), ((5, 5),), ((5, 4),), ((0, 192), (0, 192)), ((9, 12), (0, 3)))),
    *({"windows": ((0, 192),) * 3, "num_out_rows": MAX_ROWS} for _ in range(1)),
    *({"payload_bytes": value} for value in (0, 1, 2**64 - 1)),
]


TABLES = {  # (part, index of a word, value)
    "unsorted segments": ("segments", 2, 1),
    "a gap": ("segments", 6, 3),
    "an empty segment": ("segments", 3, 0),
    "too many entries": ("segments", 7, 2**31),
    "an expert too many": ("segments", 1, 8),
    "a huge expert": ("segments", 1, 2**32 - 1),
    "a huge handle": ("segments", 0, 2**32 - 1),
    "in_map": ("in_map", 3, 2),
    "negative in_map": ("in_map", 0, 2**32 - 1),
    "out_map": ("out_map", 3, 2),
    "negative out_map": ("out_map", 0, 2**31),
}


def damaged(memory, part, index, value):
    """The same request with another word in one of its tables."""
    offset = getattr(slot.request_offsets(2, 4, 3, 0), part)
    struct.pack_into("<I", memory, offset + 4 * index, value)
    return memory


@pytest.mark.parametrize(
    ("fields", "word"), [*((fields, None) for fields in BAD_FIELDS), *(({}, word) for word in TABLES.values())], ids=str
)
def test_a_malformed_header_or_table_is_answered_with_a_typed_error(fields, word, loaded):
    bad, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    memory = damaged(bad.request(), *word) if word else bad.request(**fields)
    with pytest.raises(ProtocolError, match="client 1 slot 1 seq 1" if word else "client|window"):
        bad.send(memory, seconds=2.0)
    healthy(good), healthy(bad)


BITS = st.lists(st.integers(0, (slot.request_offsets(2, 4, 3, 0).rows + 8) * 8 - 1), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=BITS, word=st.one_of(st.none(), st.tuples(st.integers(0, 60), st.integers(0, 2**32 - 1))))
def test_flipped_bits_never_kill_the_loop_or_touch_another_client(loaded, bits, word):
    fuzzer, other = Client(loaded.shard, 1), Client(loaded.shard, 2)
    expected = healthy(other)
    memory = fuzzer.request()
    for bit in bits:
        memory[bit // 8] ^= 1 << bit % 8
    if word is not None:
        struct.pack_into("<I", memory, 4 * word[0], word[1])
    # a flipped budget or seq is no wait: LOADED is READY and every other handle unknown
    with contextlib.suppress(ProtocolError, UnknownAdapterError):
        fuzzer.send(memory, seconds=2.0)
    assert healthy(other) == expected
    assert healthy(fuzzer) == expected
    fuzzer.link.close(), other.link.close()


def test_refusals_wait_for_their_turn(loaded):
    """They cost their client what a step does: they went before everybody's steps, without number."""
    bad, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    for _ in range(3):
        with pytest.raises(ProtocolError):
            bad.send(bad.request(step_class=255))
    refused, served = bad.push(bad.request(step_class=255)), good.push(good.request())
    while good.link.responded() < served:
        assert loaded.shard.serve_once() and bad.link.responded() < refused
    with pytest.raises(ProtocolError):
        bad.answer(refused)


def test_a_flood_of_bad_steps_fills_no_log(loaded):
    """What one client can cause at will is counted: a few lines, however many steps are refused."""
    client = Client(loaded.shard, 77)  # nobody complained of it so far
    failed = loaded.shard.counters.failed
    with capture_logs() as lines:
        for _ in range(500):
            with pytest.raises(ProtocolError):
                client.send(client.request(layer=99))
    assert loaded.shard.counters.failed == failed + 500
    assert 1 <= len([line for line in lines if line["event"].startswith("step failed")]) < 10
    healthy(client)
