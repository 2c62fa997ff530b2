"""Remote adapters, out of real servers: in a disk cache that other processes use as well, and in a shard's store."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_server.adapters import WEIGHTS, open_adapter
from lora_server.errors import AdapterFormatError, AdapterLoadError, AdapterSourceError, ConfigError
from lora_server.memory.entry import Source
from lora_server.memory.loader import RETRY_SECONDS
from lora_server.sources.cache import DiskCache
from lora_server.sources.remote import may_pass
from lora_server.sources.urls import canonical, is_remote
from lora_server.units import Size
from tests.support.certificates import Authority
from tests.support.clocks import FAST
from tests.support.far import far_server, fetcher_of, left, size_of
from tests.support.serving import until
from tests.support.sources import ROOT
from tests.support.stores import SECONDS, Done, bytes_of, flip_last, is_complete, load, reads
from tests.support.workload import spec_of


@pytest.fixture
def far(tmp_path):
    with far_server(tmp_path / "far") as server:
        yield server


def version_of(path):
    with open_adapter(path, spec_of("mixtral")) as adapter:
        return adapter.version()


def test_what_was_registered_is_fetched_once_and_nothing_else_is_served(far, tiny_adapters, tmp_path):
    """It is fetched again where cached files were overwritten, and refused where other content lies there now."""
    url, cache = far.put("law", tiny_adapters["all"]), tmp_path / "cache"
    fetcher, version = fetcher_of(cache), version_of(tiny_adapters["all"])
    with fetcher.fetch(url) as lease:
        assert lease.version == version == version_of(lease.path)
    use, nbytes = fetcher.use(), size_of(tiny_adapters["all"])
    assert (use.bytes, use.fetches, use.fetched_bytes, use.fetch_failures) == (nbytes, 1, nbytes, 0)
    file = lease.path / WEIGHTS
    os.utime(file)  # touched, and not changed
    far.put("law", tiny_adapters["down"])
    with fetcher_of(cache).fetch(url, version) as again:
        assert again.path == lease.path
    assert far.got == {"/law/adapter_model.safetensors": 1}
    far.put("law", tiny_adapters["all"])
    flip_last(file)
    with fetcher_of(cache).fetch(url, version) as mended:
        assert version_of(mended.path) == version and far.got.total() == 2
    shutil.rmtree(cache)
    far.put("law", tiny_adapters["down"])
    with pytest.raises(AdapterSourceError, match=r"changed since it was registered: got version .* add it again"):
        fetcher_of(cache).fetch(url, version)
    assert left(cache) == []


COMING = "fetching-a.5.b"
DAMAGES = {
    "flipped": lambda law, code: flip_last(law / WEIGHTS, keeps_time=True),
    "truncated": lambda law, code: os.truncate(law / WEIGHTS, 20_000),
    "no config": lambda law, code: (law / "adapter_config.json").unlink(),
    "a note of no text": lambda law, code: (law / ".held").write_bytes(b"\xff"),
    "no note": lambda law, code: (law / ".held").unlink(),
    "another version's directory": lambda law, code: (shutil.rmtree(law), shutil.copytree(code, law)),
    "the same, moved": lambda law, code: (shutil.rmtree(law), code.rename(law)),
    "a link to another version's": lambda law, code: (shutil.rmtree(law), law.symlink_to(code)),
    "a link to nowhere": lambda law, code: (shutil.rmtree(law), law.symlink_to(law.parent / "nowhere")),
    "a file": lambda law, code: (shutil.rmtree(law), law.write_text("")),
    "a file for one that comes": lambda law, code: (shutil.rmtree(law), (law.parent / COMING).write_text("")),
    "a link for one that comes": lambda law, code: (shutil.rmtree(law), (law.parent / COMING).symlink_to(code)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_others_do_to_the_disk_cache_brings_no_other_weights(far, tiny_adapters, tmp_path, damage):
    cache, kinds = tmp_path / "cache", {"law": "all", "code": "down"}
    urls = {name: far.put(name, tiny_adapters[kind]) for name, kind in kinds.items()}
    versions = {name: version_of(tiny_adapters[kind]) for name, kind in kinds.items()}
    places = {}
    for name, url in urls.items():
        with fetcher_of(cache).fetch(url) as lease:
            places[name] = lease.path
    DAMAGES[damage](places["law"], places["code"])
    with fetcher_of(cache).fetch(far.put("new", tiny_adapters["bf16"])) as lease:
        assert version_of(lease.path) == version_of(tiny_adapters["bf16"])
        places["new"] = lease.path
    for name in (*urls, *urls):
        with fetcher_of(cache).fetch(urls[name], versions[name]) as lease:
            assert version_of(lease.path) == lease.version == versions[name]
    assert left(cache) == sorted(place.name for place in places.values()) and not list(cache.glob("fetching-*"))


def test_what_is_no_adapter_is_refused(far, tiny_adapters, tmp_path):
    url, fetcher, there = far.put("law", tiny_adapters["all"]), fetcher_of(tmp_path / "cache"), far.directory / "law"
    (there / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match=rf"{url}: .*no such file"):
        fetcher.fetch(url)
    (there / "adapter_model.bin").touch()
    with pytest.raises(AdapterFormatError, match=rf"{url}: .*a pickle file, which can run code"):
        fetcher.fetch(url)
    (there / "adapter_config.json").unlink()
    with pytest.raises(AdapterSourceError, match=rf"{url}: .*got no adapter_config\.json there"):
        fetcher.fetch(url)


def test_what_may_pass_is_tried_again_and_nothing_else(far, tiny_adapters, tmp_path):
    url, fetcher = far.put("law", tiny_adapters["down"]), fetcher_of(tmp_path / "cache")
    far.statuses = [503, 503, 429, 429]  # to HEAD, then to GET
    fetcher.fetch(url).close()
    far.statuses = [403] * 9
    with pytest.raises(AdapterSourceError, match="403"):
        fetcher.fetch(url)
    assert len(far.statuses) == 7
    far.statuses, far.cut = [], True
    with pytest.raises(AdapterSourceError, match="cannot be fetched: ClientPayloadError"):
        fetcher.fetch(url)
    assert far.got.total() == 1 + 5 and fetcher.use().fetch_failures == 2
    assert not may_pass(FileNotFoundError()) and not may_pass(PermissionError()) and may_pass(TimeoutError())


def test_processes_and_threads_of_a_host_fetch_once(far, tiny_adapters, tmp_path):
    url, version, cache = far.put("law", tiny_adapters["all"]), version_of(tiny_adapters["all"]), tmp_path / "cache"
    far.open.clear()
    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(fetcher_of(cache).fetch, url, version) for _ in range(4)]
        assert far.stalled.wait(SECONDS)
        far.open.set()
        leases = [one.result(SECONDS) for one in coming]
    assert len({lease.path for lease in leases}) == 1 and far.got.total() == 1
    for lease in leases:
        lease.close()


FETCH = """
import sys
from pathlib import Path
from lora_server.sources.cache import DiskCache
from lora_server.sources.fetch import Fetcher
from lora_server.spec import ModelSpec
from lora_server.units import Size
cache, url, spec = sys.argv[1:]
Fetcher(DiskCache(Path(cache), Size(nbytes=1 << 30)), ModelSpec.from_json(spec)).fetch(url)
"""


def test_a_fetch_that_is_killed_leaves_nothing_that_is_used(far, tiny_adapters, tmp_path):
    url, version, cache = far.put("law", tiny_adapters["all"]), version_of(tiny_adapters["all"]), tmp_path / "cache"
    far.open.clear()
    command = [sys.executable, "-c", FETCH, str(cache), url, spec_of("mixtral").to_json()]
    with subprocess.Popen(command, cwd=ROOT) as process:
        assert far.stalled.wait(SECONDS)
        (partial,) = left(cache)
        os.kill(process.pid, signal.SIGKILL)
    far.open.set()
    assert partial.startswith("fetching-") and fetcher_of(cache).cache.versions() == frozenset()
    assert fetcher_of(cache).cache.take(version) is None
    with fetcher_of(cache).fetch(url, version) as lease:
        assert version_of(lease.path) == version and left(cache) == [lease.path.name]


def test_a_fetch_ends_when_it_does_not_fit_at_its_deadline_and_when_it_is_cancelled(far, tiny_adapters, tmp_path):
    url, fetcher = far.put("law", tiny_adapters["all"]), fetcher_of(tmp_path / "cache")
    with pytest.raises(AdapterSourceError, match="not fetched in time"):
        fetcher.fetch(url, seconds=0)
    with pytest.raises(AdapterSourceError, match="the request was cancelled"):
        fetcher.fetch(url, cancelled=lambda: True)
    with pytest.raises(AdapterSourceError, match=r"--disk-cache-size is 10 B: give the disk cache more"):
        fetcher_of(tmp_path / "cache", 10).fetch(url)
    assert left(tmp_path / "cache") == []


def test_the_same_content_of_two_urls_is_cached_once(far, tiny_adapters, tmp_path):
    fetcher = fetcher_of(tmp_path / "cache")
    for name in ("law", "code"):
        with fetcher.fetch(far.put(name, tiny_adapters["all"])) as lease:
            assert lease.version == version_of(tiny_adapters["all"])
    assert len(left(tmp_path / "cache")) == 1


SCHEMES = "local", "LOCAL", "dir", "zip", "tar", "reference", "ftp", "s3a", "gcs"
NOT_URLS = "memory://org/law", "zip://law::file:///a.zip", "simplecache::s3://a/law", "http::file:///a", "://a", "s3://"


@pytest.mark.parametrize("url", [*(f"{scheme}:///etc" for scheme in SCHEMES), *NOT_URLS])
def test_a_scheme_that_is_not_accepted_is_refused_with_those_that_are(tmp_path, url):
    assert is_remote(url), "it is judged as a URL"
    for refuse in (canonical, fetcher_of(tmp_path / "cache").fetch):
        with pytest.raises(AdapterSourceError, match=r"expected a plain path, file:///PATH, http://, .* or hf://"):
            refuse(url)


@pytest.mark.parametrize("end", ["deadline", "caller"])
def test_a_fetch_from_a_silent_server_ends_with_its_deadline_and_its_caller(far, tiny_adapters, tmp_path, end):
    """Long before the server is given up for its silence."""
    url, fetcher, left_alone = far.put("law", tiny_adapters["all"]), fetcher_of(tmp_path / "cache"), threading.Event()
    far.open.clear()
    with ThreadPoolExecutor(1) as pool:
        seconds = 1.0 if end == "deadline" else 600.0
        fetching = pool.submit(fetcher.fetch, url, seconds=seconds, cancelled=left_alone.is_set)
        assert end == "deadline" or far.stalled.wait(SECONDS)
        if end == "caller":
            left_alone.set()
        error = fetching.exception(SECONDS)
    assert isinstance(error, AdapterSourceError)
    assert ("the request was cancelled" if end == "caller" else "not fetched in time") in str(error)
    assert left(tmp_path / "cache") == [] and far.got.total() == 1, "it was not asked again after its silence"


# -- redirects


@pytest.fixture
def other(tmp_path):
    with far_server(tmp_path / "other") as server:
        yield server


def port_of(server):
    return server.url.rpartition(":")[2]


OF_THIS_HOST = "127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"
METADATA = "169.254.169.254", "[fe80::1]", "[fd00:ec2::254]"


@pytest.mark.parametrize("target", [*OF_THIS_HOST, "0.0.0.0", "10.0.0.1", "192.168.1.1", "100.100.100.200", *METADATA])
def test_a_redirect_to_an_address_that_is_not_public_is_refused(far, other, tiny_adapters, tmp_path, target):
    url = far.put("law", tiny_adapters["all"])
    other.put("law", tiny_adapters["all"])
    far.moved["law"] = f"http://{target}:{port_of(other)}/law"
    with pytest.raises(AdapterSourceError, match=rf"{url}: it redirects to .*; name the address that it leads to"):
        fetcher_of(tmp_path / "cache").fetch(url)
    assert far.asked == 2 and not other.asked, "by HEAD, by GET, and not again"


@pytest.mark.parametrize("target", [*METADATA, "[::ffff:a9fe:a9fe]"])
def test_a_redirect_to_a_metadata_service_is_refused_also_where_it_is_listed(far, tiny_adapters, tmp_path, target):
    url = far.put("law", tiny_adapters["all"])
    far.moved["law"] = f"http://{target}/law"
    fetcher = fetcher_of(tmp_path / "cache", listed=(far.url, f"http://{target}"))
    with pytest.raises(AdapterSourceError, match="metadata services are never followed"):
        fetcher.fetch(url)


def test_every_hop_has_to_be_listed_where_there_is_a_list(far, other, tiny_adapters, tmp_path):
    version, law = version_of(tiny_adapters["all"]), far.put("law", tiny_adapters["all"])
    other.put("law", tiny_adapters["all"])
    far.moved |= {"moved": f"{other.url}/law", "twice": f"{far.url}/moved", "up": f"{other.url}/in/..%252f../law"}
    listed = far.url, f"{other.url}/law"
    for name in ("moved", "twice"):
        with fetcher_of(tmp_path / name, listed=listed).fetch(f"{far.url}/{name}") as lease:
            assert lease.version == version
    refused = {"moved": (law, f"{other.url}/code"), "twice": (f"{far.url}/twice", f"{other.url}/law")}
    refused["up"] = far.url, f"{other.url}/in"
    for name, narrower in refused.items():
        with pytest.raises(AdapterSourceError, match=r"it redirects to .*: expected a URL below "):
            fetcher_of(tmp_path / f"no {name}", listed=listed).fetch(f"{far.url}/{name}", listed=narrower)


def test_nothing_of_what_a_redirect_leads_to_stands_in_an_error(far, other, tiny_adapters, tmp_path):
    url, there = far.put("law", tiny_adapters["all"]), other.put("law", tiny_adapters["all"])
    far.moved["law"] = there
    fetcher = fetcher_of(tmp_path / "cache", listed=(far.url, other.url))
    file = other.directory / "law" / "adapter_config.json"
    for content in (json.dumps({"peft_type": "LORA", "r": "s3cret", "s3cret": 1}), "s3cret: {", '{"s3cret": 1}'):
        file.write_text(content)
        with pytest.raises(AdapterSourceError, match=rf"{url}: it redirects to what is no adapter") as refused:
            fetcher.fetch(url)
        assert "s3cret" not in str(refused.value)
        with pytest.raises(AdapterFormatError, match=there):
            fetcher.fetch(there)


def test_a_connection_to_a_checked_address_still_verifies_the_name(far, tiny_adapters, tmp_path):
    authority = Authority(tmp_path)
    aiohttp.connector._SSL_CONTEXT_VERIFIED.load_verify_locations(authority.ca)
    with far_server(tmp_path / "secure", authority.issue("server")) as secure:
        secure.put("law", tiny_adapters["all"])
        named = f"https://localhost:{port_of(secure)}"  # its certificate is for 127.0.0.1
        far.moved |= {"good": f"{secure.url}/law", "bad": f"{named}/law"}
        fetcher = fetcher_of(tmp_path / "cache", listed=(far.url, secure.url, named))
        fetcher.fetch(f"{far.url}/good").close()
        with pytest.raises(AdapterSourceError, match="ClientConnectorCertificateError"):
            fetcher.fetch(f"{far.url}/bad")


def test_an_adapter_comes_out_of_a_bucket(tiny_adapters, tmp_path, monkeypatch, stack):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    stack.callback(server.stop)
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    bucket = fsspec.filesystem("s3", skip_instance_cache=True)
    bucket.mkdir("adapters")
    bucket.put(f"{tiny_adapters['down']}/", "adapters/law/", recursive=True)
    fetcher = fetcher_of(tmp_path / "cache")
    with fetcher.fetch("s3://adapters/law") as lease:
        assert lease.version == version_of(tiny_adapters["down"])
    with pytest.raises(AdapterSourceError, match="got no adapter_config"):
        fetcher.fetch("s3://adapters/code")


def test_sources_that_cannot_be_say_why(tmp_path, monkeypatch):
    fetcher = fetcher_of(tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    cure = r"gs://a/law: .*pip install '\.\[gs\]' in a checkout of lora-server on every node"
    with pytest.raises(AdapterSourceError, match=cure):
        fetcher.fetch("gs://a/law")
    for url in ("https://me:secret@host/law", "https://host/law?token=secret", "https://x::s3://a/law"):
        with pytest.raises(AdapterSourceError, match="expected that of a directory") as caught:
            canonical(url)
        assert "secret" not in str(caught.value)
    assert canonical("HF://org/law@main/") == "hf://org/law@main"
    assert [is_remote(one) for one in ("s3://a/b", "/a/b", "a:b", "file:///a", "FILE:///a")] == [True, *[False] * 4]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--disk-cache .*: cannot be made or written to"):
        DiskCache(tmp_path / "file", Size())


OPERATIONS = st.lists(st.tuples(st.sampled_from(["fetch", "take", "close", "die"]), st.integers(0, 9)), max_size=40)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_the_cap_holds_and_what_is_in_use_stays(tmp_path_factory, operations):
    """Against the obvious model: least recently used first, never what is in use, never more than the cap."""
    directory, capacity = tmp_path_factory.mktemp("cache"), 100
    cache, held, claims, model = DiskCache(directory, Size(nbytes=capacity)), [], [], {}

    def used():
        return sum(10 * (one % 5 + 1) for one in model) + sum(claim.nbytes for claim in claims)

    for operation, number in operations:
        version, nbytes = f"{number:x}" * 8, 10 * (number % 5 + 1)
        if operation == "take":
            lease = cache.take(version)
            assert (lease is not None) == (number in model)
            if lease is not None:
                model[number] = model.pop(number)
                held.append((number, lease))
        elif operation == "close" and held:
            held.pop(number % len(held))[1].close()
        elif operation == "die" and len(claims) < 2:
            claim = cache.claim(f"d{len(claims)}", 10) if used() + 10 <= capacity else None
            claims += [claim] if claim is not None else []
        elif operation == "fetch" and number not in model:
            busy = {one for one, _ in held}
            going, missing = [], used() + nbytes - capacity
            for one in [one for one in model if one not in busy]:
                if missing > 0:
                    going.append(one)
                    missing -= 10 * (one % 5 + 1)
            claim = cache.claim(version, nbytes)
            assert (claim is not None) == (missing <= 0)
            if claim is not None:
                cache.keep(claim, version, "stamp").close()
                model = {one: None for one in model if one not in going} | {number: None}
        assert cache.nbytes() == used() <= capacity
        assert cache.versions() == {f"{one:x}" * 8 for one in model}
        assert all(lease.path.exists() for _, lease in held)
    for claim in claims:
        os.close(claim.descriptor)  # as a process that was killed
    for _, lease in held:
        lease.close()
    assert cache.claim("", capacity) is not None and len(left(directory)) == 1


# -- in a shard's store: REMOTE, DISK, READY; what waits for a fetch, and what does not


@pytest.fixture
def make(make_store, tmp_path):
    """Make a store whose disk cache has a capacity."""
    return lambda capacity=1 << 30, **options: make_store(fetcher=fetcher_of(tmp_path / "cache", capacity), **options)


def know(store, handle, url, path, eager=False, asked=False):
    """As the controller tells it."""
    done = Done(store)
    with open_adapter(path, spec_of("mixtral")) as adapter:
        store.adapters.load(handle, Source(Path(), adapter.version(), "", url), done, eager, asked=asked)
    return done


def state(store, handle):
    return store.report.state(handle, 0).value


def test_a_remote_adapter_is_fetched_on_demand_and_delays_no_other(make, far, tiny_adapters):
    store, far_away = make(), "at its source alone"
    done = know(store, 1, far.put("law", tiny_adapters["all"]), tiny_adapters["all"])
    assert done.result() is None and state(store, 1) == far_away and not far.got, "no step asked"
    far.open.clear()
    assert not reads(store, 1) and far.stalled.wait(SECONDS)
    assert load(store, 2, tiny_adapters["down"]).result() is None, "others load meanwhile"
    assert state(store, 1) == far_away
    assert {one.handle: one.remote for one in store.report.take_changes()} == {1: True, 2: False}
    far.open.set()
    until(lambda: reads(store, 1), "it is there")
    assert {one.handle: one.remote for one in store.report.take_changes()}[1] is False
    until(lambda: is_complete(store, 1), "all of it is")
    store.report.check_integrity()


def test_steps_that_end_while_an_adapter_is_fetched_do_not_wake_the_loader(make, far, tiny_adapters):
    """It has nothing to load until the files are here, and would take the shard's core from the steps."""
    store, looks = make(), []
    assert load(store, 2, tiny_adapters["down"]).result() is None
    assert know(store, 1, far.put("law", tiny_adapters["all"]), tiny_adapters["all"]).result() is None
    planner, look = store._loader._planner, store._loader._planner.next
    planner.next = lambda now: (looks.append(now), look(now))[1]
    far.open.clear()
    assert not reads(store, 1) and far.stalled.wait(SECONDS)
    looks.clear()
    began, slept = time.monotonic(), threading.Event()
    for _ in range(50):
        assert reads(store, 2)
        slept.wait(1e-3)  # the loader would have its turn here
    assert len(looks) <= (time.monotonic() - began) / RETRY_SECONDS + 2
    far.open.set()
    until(lambda: reads(store, 1), "it is there")


def test_files_of_the_disk_cache_that_change_after_their_check_are_not_loaded(make, far, tiny_adapters):
    store, url = make(timings=FAST), far.put("law", tiny_adapters["all"])
    hold = store._loader._layers.hold

    def hold_and_flip(entry, lease):
        store._loader._layers.hold = hold
        flip_last(lease.path / WEIGHTS, keeps_time=True)
        hold(entry, lease)

    store._loader._layers.hold = hold_and_flip
    error = know(store, 1, url, tiny_adapters["all"], eager=True).result()
    assert isinstance(error, AdapterLoadError) and "content changed" in str(error)
    until(lambda: reads(store, 1) and state(store, 1) == "ready", "fetched again")
    assert far.got.total() == 2


def test_a_remote_adapter_is_measured_when_a_request_asks_and_not_when_it_is_told_again(make, far, tiny_adapters):
    """A controller tells a shard of all adapters again after each outage: it fetches none of them for that."""
    store, url = make(), far.put("law", tiny_adapters["all"])
    for _ in range(2):
        assert know(store, 1, url, tiny_adapters["all"]).result() is None
        assert not store.report.take_changes()[0].measured and not far.got
    assert know(store, 1, url, tiny_adapters["all"], asked=True).result() is None
    assert store.report.take_changes()[0].measured
    known = far.got.total()
    assert know(store, 2, f"{far.url}/nowhere", tiny_adapters["all"]).result() is None
    assert load(store, 2, tiny_adapters["all"]).result() is None
    assert state(store, 2) == "ready" and far.got.total() == known, "where it was said to be last counts"


def test_files_are_fetched_in_the_order_in_which_requests_ask(make, far, tiny_adapters):
    """Whatever the order in which the shard learned of the adapters."""
    store, urls = make(), [far.put(name, tiny_adapters["all"]) for name in "abc"]
    for handle, url in enumerate(urls):
        know(store, handle, url, tiny_adapters["all"]).result()
    far.open.clear()
    waiting = [know(store, handle, urls[handle], tiny_adapters["all"], asked=True) for handle in (2, 0, 1)]
    with store._lock:
        assert [entry.handle for entry in store._queue.in_order()] == [2, 0, 1]
    store.adapters.set_active([1], [])
    with store._lock:
        assert [entry.handle for entry in store._queue.in_order()] == [1, 2, 0], "a client holds it"
    far.open.set()
    assert [one.result() for one in waiting] == [None] * 3


def test_a_fetch_that_fails_while_its_adapter_loads_from_other_files_frees_nothing(make, tiny_adapters):
    store, started, go_on = make(), threading.Event(), threading.Event()
    load_layer = store._loader._layers.load

    def gated(entry, layer):
        started.set()
        assert go_on.wait(SECONDS)
        return load_layer(entry, layer)

    store._loader._layers.load = gated
    done = load(store, 1, tiny_adapters["all"])
    assert started.wait(SECONDS)
    store._loader.fetched(store._table.entries[1], None, AdapterSourceError("its source is gone"))
    go_on.set()
    assert done.result() is None and state(store, 1) == "ready"
    store.report.check_integrity()


def test_a_fetch_that_fails_is_tried_again(make, far, tiny_adapters):
    store, url = make(timings=FAST), far.put("law", tiny_adapters["all"])
    far.statuses = [403] * 2
    error = know(store, 1, url, tiny_adapters["all"], eager=True).result()
    assert isinstance(error, AdapterSourceError) and "403" in str(error)
    assert state(store, 1) == "failed"
    until(lambda: reads(store, 1) and state(store, 1) == "ready", "tried again")


def test_a_store_follows_what_other_processes_do_to_the_disk_cache(make, far, tiny_adapters, tmp_path):
    store, url = make(), far.put("law", tiny_adapters["all"])
    know(store, 1, url, tiny_adapters["all"]).result()
    other = fetcher_of(tmp_path / "cache")
    other.fetch(url).close()
    for said, far_away in (("on disk", False), ("at its source alone", True)):
        store.adapters.note_disk(other.cache.versions())
        assert (state(store, 1), store.report.take_changes()[0].remote) == (said, far_away)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_a_cache_for_one_serves_many(make, far, tiny_adapters, tmp_path):
    """The pool has room for one, and so has the disk: all are served, and the cap holds."""
    kinds = ["all", "down", "bf16"]
    cap = max(size_of(tiny_adapters[kind]) for kind in kinds)
    store = make(cap)
    store.tier.pool.capacity = max(bytes_of(tiny_adapters[kind]) for kind in kinds)
    for handle, kind in enumerate(kinds, start=1):
        know(store, handle, far.put(kind, tiny_adapters[kind]), tiny_adapters[kind]).result()
    for handle in (1, 2, 3, 1, 3, 2):
        until(lambda handle=handle: reads(store, handle), f"{handle} is there")
        assert sum(int(name.split(".")[1]) for name in left(tmp_path / "cache")) <= cap
    assert far.got.total() > 3
    until(lambda: is_complete(store, 2), "all of it is")
    store.report.check_integrity()
