"""Hundreds of adapters on hosts that fail, under four engines that check every answer, while adapters come and go."""

import os
import random
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from client_connector.transformers import attach
from lora_server.demo.launch import READY_SECONDS
from lora_server.errors import LeaseError, ServerUnavailableError, ShardUnavailableError
from tests.support.cluster import SILENCE_SECONDS, Cluster, any_fault
from tests.support.hosts import switch
from tests.support.serving import HANG_SECONDS, answers, ask, listed, until

FAULTS = int(os.environ.get("LORA_FAULTS", "2"))  # `make test-cluster` sets more
ADAPTERS = 500 if "LORA_FAULTS" in os.environ else 200
POOL = "128MiB"  # far too little for all of them
GUEST = "attention"
LATE_SECONDS = 20 * SILENCE_SECONDS  # after a fault is over: no effect of it comes later


def write_variant(path, of, exponent):
    """Write an adapter with other weights and, bit by bit, the same delta: A times a power of two, B divided by it."""
    shutil.copytree(of, path)
    tensors = load_file(of / "adapter_model.safetensors")
    factors = {key: 2.0 ** (exponent if ".lora_A" in key else -exponent) for key in tensors}
    save_file({key: tensor * factors[key] for key, tensor in tensors.items()}, path / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def running(load, tmp_path_factory):
    root, variants = tmp_path_factory.mktemp("many"), defaultdict(list)
    kinds = list(load.paths)
    for number in range(ADAPTERS):
        kind, turn = kinds[number % len(kinds)], number // len(kinds)
        variants[kind].append(f"{kind}-{turn}")
        write_variant(root / "adapters" / variants[kind][-1], load.paths[kind], turn - ADAPTERS // len(kinds) // 2)
    many = replace(load, adapters=root / "adapters")
    with switch() as wires, Cluster(root, many, wires, "--device-pool", POOL) as cluster:
        cluster.wait_ready(READY_SECONDS)
        with cluster.fleet(root, each=2, variants=variants):
            cluster.heals()
            yield cluster


def newcomer_is_right(running, load, guest):
    """Whether an engine that joins now gets the guest's tokens. It may get a typed error instead: a controller that
    stood still may end leases, or miss shards, after the other engines are right again."""
    try:
        with attach(load.model, running.address, transport="tcp", timeout_seconds=HANG_SECONDS) as lora:
            assert answers(lora, load, guest, GUEST)
    except (ServerUnavailableError, ShardUnavailableError, LeaseError) as error:
        print(f"an engine that joined got {error.code}: {error}")
        return False
    return True


@pytest.mark.parametrize("seed", range(FAULTS))
def test_engines_are_right_again_after_each_fault(running, load, seed):
    before, chance = running.engines.check(), random.Random(seed)
    guest = f"guest-{seed}"
    ask(running.address, "Add", name=guest, uri=str(running.load.adapters / f"{GUEST}-0"))
    try:
        fault = any_fault(running, chance)
        took = running.heals()
        until(lambda: newcomer_is_right(running, load, guest), "an engine joins and is right", LATE_SECONDS)
    finally:
        ask(running.address, "Remove", name=guest)
    outcomes = running.engines.check() - before
    print(f"{fault}: all right again after {took:.1f} s; rounds by outcome: {dict(outcomes)}")
    assert outcomes["right"] and "unknown_adapter" not in outcomes
    assert len(listed(running.address)) == ADAPTERS
