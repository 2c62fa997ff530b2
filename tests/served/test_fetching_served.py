"""A server of remote adapters, in real processes: requests are answered right, or refused with the reason."""

import pytest

from client_connector.transformers import attach
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError
from tests.support.far import SECONDS, far_server, left, size_of
from tests.support.serving import HANG_SECONDS, answers, ask, cli, shard_processes, status, until
from tests.support.workload import workload

NAMES = ("fused", "experts", "qv")
POOL = 490_000  # bytes; "fused" takes all but 7 kB


def test_a_server_of_remote_adapters(tmp_path):
    """Its disk cache holds one adapter or two, its pool one."""
    work, cache = workload("mixtral"), tmp_path / "cache"
    cap = max(size_of(work.paths[name]) for name in NAMES) + 1000
    flags = ["--base-model", str(work.base), "--disk-cache", str(cache), "--disk-cache-size", str(cap)]
    flags += ["--max-active-adapters", "1", "--device-pool", str(POOL)]
    with far_server(tmp_path / "far") as far, running_server(tmp_path / "log", flags) as server:
        with attach(work.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:

            def push_out(name):
                """Use the others until this adapter is in no memory and not in the cache."""
                for other in (one for one in NAMES if one != name):
                    assert answers(lora, work, other)
                until(lambda: ask(server.address, "Get", name=name).state == "remote", f"{name} is away")

            def right_now():
                """Whether it answers right; a failure is remembered for a second."""
                try:
                    return answers(lora, work, "qv")
                except LoraServerError:
                    return False

            for name in NAMES:
                ask(server.address, "Add", name=name, uri=far.put(name, work.paths[name]))
            for name in (*NAMES, *NAMES):
                assert answers(lora, work, name)
                assert sum(int(one.split(".")[1]) for one in left(cache)) <= cap
            push_out("qv")
            shown = cli("adapters", "show", "qv", "--server", server.address).stdout
            assert f"{far.url}/qv" in shown and "remote 4/4" in shown, shown

            far.stalled.clear()
            far.open.clear()
            (shard,) = shard_processes(server.address)
            with lora.adapters(["qv"]):  # it begins to come
                assert far.stalled.wait(SECONDS)
                shard.kill()
                far.open.set()
            until(lambda: status(server.address).shards[0].restarts == 1, "another shard")
            server.wait_ready()
            until(right_now, "right again")

            push_out("qv")
            far.put("qv", work.paths["attention"])
            with pytest.raises(LoraServerError, match="content changed since it was registered"):
                answers(lora, work, "qv")
            far.put("qv", work.paths["qv"])
            until(right_now, "it is what was registered again")
        metrics = server.get("/metrics")[1]
    assert f'lora_server_disk_cache_capacity_bytes{{node="0"}} {float(cap)}' in metrics
    assert 'lora_server_fetches_total{process="controller"} 3.0' in metrics
    assert 'lora_server_fetch_failures_total{process="shard 0"} 0.0' not in metrics
