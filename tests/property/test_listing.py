"""The list of adapters, however long: in pages that gRPC sends."""

import msgspec
import pytest

from lora_server.control.adapters.records import Record, check_name
from lora_server.control.adapters.refusals import TOLD_BYTES, RefusedAdapter, RefusedAdapters
from lora_server.control.reports.listing import MAX_PAGE, page
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.errors import AdapterFormatError, ProtocolError
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.listing import LIST_BYTES, all_pages
from lora_server.wire.rpc import call, open_channel
from tests.support.controllers import kept, make_controller
from tests.support.serving import HANG_SECONDS

COUNT, REFUSED = 900, 700


def wordy(load, characters):
    record = Record.decode(load.record)
    load.record = msgspec.json.encode({**msgspec.to_builtins(record), "warnings": ["x" * characters]})
    return load


@pytest.fixture(scope="module")
def controller():
    """900 adapters with 5 MB of warnings, and 700 that were refused, some of which serve on."""
    controller = make_controller()
    loads = [wordy(kept(f"a{n:05}", n + 1), 5600) for n in range(COUNT)]
    controller.adapters.recovery.adopt(loads, [], COUNT)
    refused = [
        RefusedAdapter(f"a{n:05}{'' if n % 2 else '-bad'}", "/x", "adapter_format", "y" * 500) for n in range(REFUSED)
    ]
    controller.adapters.catalog.refusals.adopt(pb.Refusals(refusals=msgspec.json.encode(refused), serial=1))
    return controller


def test_every_page_fits_into_a_message(controller):
    control = ControlServer(controller, "127.0.0.1:0", Doorkeeper("x"))
    sizes = []
    try:
        with open_channel(f"127.0.0.1:{control.port}") as channel:

            def ask(request):
                method = rpc.AdaptersStub(channel).List
                reply = call(method, request, server="", seconds=HANG_SECONDS)
                sizes.append((len(reply.adapters) + len(reply.refused), reply.ByteSize()))
                return reply

            reply = all_pages(ask)
            status = call(rpc.ServerStub(channel).Status, pb.StatusRequest(), server="", seconds=HANG_SECONDS)
    finally:
        control.close(1.0)
    assert [one.name for one in reply.adapters] == [f"a{n:05}" for n in range(COUNT)]
    assert [one.name for one in reply.refused] == [f"a{n:05}-bad" for n in range(0, REFUSED, 2)]
    assert "y" * 500 in reply.adapters[1].warnings, "what serves on says why its newer content does not"
    assert len(sizes) > 5 and all(nbytes < LIST_BYTES + 10_000 for _, nbytes in sizes)
    assert all(count <= MAX_PAGE for count, _ in sizes) and not reply.next_page_token
    assert (status.warned, status.num_refused, len(status.refused)) == (COUNT, REFUSED, 100)
    assert status.ByteSize() < 1 << 20


def test_shards_are_sent_as_many_refusals_as_fit_into_a_message():
    """A registration that is too large would keep a shard out for ever."""
    refusals, kept_by_shard = RefusedAdapters(), RefusedAdapters()
    for number in range(8000):
        refusals.put(RefusedAdapter(f"a{number:05}", "/x", "adapter_format", "y" * 500))
    told = refusals.tell()
    assert TOLD_BYTES - 1000 < len(told.refusals) <= TOLD_BYTES + 2
    bounds.check(pb.Registration(refused=told))
    kept_by_shard.adopt(told)
    assert kept_by_shard.all() == refusals.all()[: len(kept_by_shard.all())]


def test_a_page_begins_where_the_last_one_ended(controller):
    """Also if that adapter was removed meanwhile."""
    first = page(controller.adapters.listings, "", 10)
    names = [one.name for one in first.adapters]
    assert len(names) + len(first.refused) == 10
    gone = make_controller()
    gone.adapters.recovery.adopt([kept(f"a{n:05}", n + 1) for n in range(5, 20)], [], 20)
    second = page(gone.adapters.listings, first.next_page_token)
    assert [one.name for one in second.adapters] == [f"a{n:05}" for n in range(7, 20)] and not second.next_page_token
    assert first.next_page_token == "7:a00006"
    for bad in ("x", "x:y", ":"):
        with pytest.raises(ProtocolError, match="page_token"):
            page(gone.adapters.listings, bad)


def test_names_of_adapters_are_paths_of_ascii_words():
    for name in ("law", "org/law-v2:main", "_x", "a.b@c+d", "0" * 200, "a/.b/..c", "a...b"):
        assert check_name(name) == name


BAD_WORDS = ["", " ", "0" * 201, "lаw", "ｌaw", "law\n", "a\nb", "a b", "a\0", "é", ".a", "-a"]
BAD_PATHS = ["a/../../b", "a/.", "a//b", "a/", "/a", ".."]


@pytest.mark.parametrize("name", BAD_WORDS + BAD_PATHS)
def test_a_bad_name_is_refused(name):
    """Also with a Cyrillic a or a full-width l."""
    with pytest.raises(AdapterFormatError, match="ASCII"):
        check_name(name)
