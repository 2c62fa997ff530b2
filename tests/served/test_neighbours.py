"""Other processes write to an adapter's files, and to the disk cache, while a server loads from them.

A small pool makes each request load again. An answer is that of a version that was whole once, or a typed error.
"""

import contextlib
import random
import shutil
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError
from tests.support.serving import HANG_SECONDS, ask, cli, flags, listed, until
from tests.support.workload import NEW_TOKENS

PROMPT = [5, 17, 42, 99, 7]
ROUNDS = 24
POOL = ("--layout", "ep2-pp1", "--device-pool", "320KiB", "--host-pool", "0")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def answered(lora, load, name):
    with lora.adapters([name]):
        return generate(load.model, [Sequence(PROMPT, name)], NEW_TOKENS)[0].tokens


def campaign(lora, load, names, right, disturb, rng):
    """Ask for each in turn, while `disturb()` is called again and again on another thread."""
    over, outcomes, calls = threading.Event(), Counter(), Counter()

    def disturbed():
        while not over.is_set():
            disturb()
            calls["made"] += 1
            over.wait(rng.choice((0.01, 0.4)))  # some loads meet a file at rest

    other = threading.Thread(target=disturbed)
    other.start()
    try:
        for _ in range(ROUNDS):
            for name in names:
                try:
                    outcomes["right" if answered(lora, load, name) in right[name] else f"wrong {name}"] += 1
                except LoraServerError as error:
                    outcomes[error.code] += 1
    finally:
        over.set()
        other.join(HANG_SECONDS)
    assert not other.is_alive() and calls["made"] > 5
    print(dict(outcomes), f"{calls['made']} disturbances")
    assert not [one for one in outcomes if one.startswith("wrong")], outcomes
    assert outcomes["right"] > ROUNDS, outcomes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_files_that_are_rewritten_while_shards_load_them(load, tmp_path):
    """With --watch: `shaky` is written over in place, by one version or the other, or half of one."""
    rng, adapters, versions = random.Random(20261124), tmp_path / "adapters", [tmp_path / "a", tmp_path / "b"]
    for seed, version in enumerate(versions):
        tiny.make_adapter(load.model, version, seed=70 + seed, lora_rank=6, targets="all")
    for name in ("fused", "experts", "gate-up"):
        shutil.copytree(load.paths[name], adapters / name)
    shutil.copytree(versions[0], adapters / "shaky")
    right = {name: [load.answer(load.paths[name], PROMPT).tokens] for name in ("fused", "experts", "gate-up")}
    right["shaky"] = [load.answer(version, PROMPT).tokens for version in versions]
    assert right["shaky"][0] != right["shaky"][1]

    def rewrite():
        whole = (rng.choice(versions) / "adapter_model.safetensors").read_bytes()
        most = rng.choice((len(whole), len(whole) // 2))
        (adapters / "shaky" / "adapter_model.safetensors").write_bytes(whole[:most])

    watched = ("--adapters", str(adapters), "--watch")
    with running_server(tmp_path / "log", [*flags(load, *POOL), *watched]) as server:
        until(lambda: len(listed(server.address)) == 4, "all are listed")
        with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
            campaign(lora, load, list(right), right, rewrite, rng)
            (adapters / "shaky" / "adapter_model.safetensors").write_bytes(
                (versions[1] / "adapter_model.safetensors").read_bytes()
            )

            def settled():
                with contextlib.suppress(LoraServerError):
                    return answered(lora, load, "shaky") == right["shaky"][1]
                return False

            until(settled, "what lies there in the end is served")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_disk_cache_that_another_process_damages(load, tmp_path):
    """Bytes are flipped, files cut, directories removed and swapped; they are fetched again, from the source."""
    rng, cache, names = random.Random(20261124), tmp_path / "cache", ("fused", "experts", "gate-up")
    right = {f"far-{name}": [load.answer(load.paths[name], PROMPT).tokens] for name in names}
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=load.adapters))
    threading.Thread(target=web.serve_forever, daemon=True).start()

    def damage():
        with contextlib.suppress(OSError, IndexError):
            file = rng.choice(list(cache.rglob("adapter_model.safetensors")))
            how = rng.randrange(4)
            if how == 0:
                with file.open("r+b") as opened:
                    opened.seek(-1 - rng.randrange(1000), 2)
                    opened.write(b"\x55")
            elif how == 1:
                with file.open("r+b") as opened:
                    opened.truncate(rng.randrange(20_000))
            elif how == 2:
                shutil.rmtree(file.parent)
            else:
                other = rng.choice(list(cache.rglob("adapter_model.safetensors")))
                file.write_bytes(other.read_bytes())

    try:
        with running_server(tmp_path / "log", flags(load, *POOL, "--disk-cache", str(cache))) as server:
            for name in names:
                url = f"http://127.0.0.1:{web.server_address[1]}/{name}"
                added = cli("adapters", "add", f"far-{name}", url, "--server", server.address)
                assert added.returncode == 0, added.stderr
            with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
                campaign(lora, load, list(right), right, damage, rng)
                assert all(answered(lora, load, name) in right[name] for name in right), "at rest all are served"
            assert {one.name for one in ask(server.address, "List").adapters} >= set(right)
    finally:
        web.shutdown()
        web.server_close()
