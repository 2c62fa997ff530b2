"""The bytes that a token puts on the hosts' wires, beside those that `provision` counts for such a model."""

import time

import numpy as np
import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate
from lora_server.demo.launch import READY_SECONDS
from lora_server.placement import Layout
from provisioning.model.hardware import GPUS
from provisioning.model.hardware import Cluster as Machines
from provisioning.model.latency import StepModel
from provisioning.model.transports import TRANSPORTS
from tests.support.cluster import Cluster
from tests.support.hosts import switch
from tests.support.serving import HANG_SECONDS
from tests.support.workload import Workload

# wide enough that rows are nearly all of a message, as in a model that is served
SIZES = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1792, "head_dim": 128}
NAMES, PROMPT, NEW_TOKENS, LORA_RANK = ("a", "b", "c", "d"), 48, 17, 4
ROUNDS, IDLE_SECONDS = 5, 1.0  # of measuring
BAR = 0.05  # for the median of the rounds


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model in bfloat16, with adapters on all of its sites and two sequences of each."""
    root, model = tmp_path_factory.mktemp("wide"), tiny.make_model("mixtral", dtype=torch.bfloat16, **SIZES)
    tiny.save_model(model, root / "base")
    for seed, name in enumerate(NAMES):
        tiny.make_adapter(model, root / "adapters" / name, lora_rank=LORA_RANK, seed=seed, targets="all")
    ids = torch.randint(3, 250, (2 * len(NAMES), PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    batch = [Sequence(prompt, NAMES[index % len(NAMES)]) for index, prompt in enumerate(ids)]
    return Workload("mixtral", model, root / "base", root / "adapters", batch, [])


def planned(load):
    """Return the planner's bytes of a token in all layers, to the shards and back: decoded, and of a prompt."""
    step = StepModel(
        spec=load.spec, cluster=Machines(gpu=GPUS["h200"]), popularity=np.full(len(NAMES), 1 / len(NAMES)),
        lora_rank=LORA_RANK, instance_gpus=1, attention_share=1.0, transport=TRANSPORTS["tcp"], prompt_tokens=PROMPT,
    )  # fmt: skip
    ep, batch = Layout.parse("ep2-pp2").ep, len(load.batch)
    decoding, prompt = step.work.step(batch, ep), step.prompt(ep)
    return {
        "decoded": load.spec.layers * np.array([decoding.receive, decoding.send]) / batch,
        "prompt": load.spec.layers * np.array([prompt.receive_bytes, prompt.send_bytes]),
    }


def measured(load, hosts):
    """Return what crossed the hosts' wires for such a token, of each round, to shards and back; without what crosses
    them while none is computed."""

    def carried(act):
        before, began = np.array([host.carried() for host in hosts]), time.monotonic()
        act()
        seconds = time.monotonic() - began
        return (np.array([host.carried() for host in hosts]) - before).sum(0), seconds

    def measure_once():
        idle, window = carried(lambda: time.sleep(IDLE_SECONDS))  # to see heartbeats and reports

        def of_tokens(new_tokens):
            found, seconds = carried(lambda: generate(load.model, load.batch, new_tokens))
            return found - idle * seconds / window

        prompts, both = of_tokens(1), of_tokens(NEW_TOKENS)
        batch = len(load.batch)
        return (both - prompts) / (batch * (NEW_TOKENS - 1)), prompts / (batch * PROMPT)

    decoded, prompt = zip(*(measure_once() for _ in range(ROUNDS)), strict=True)
    return {"decoded": np.array(decoded), "prompt": np.array(prompt)}


def test_a_token_takes_the_bytes_that_the_planner_counts(wide, tmp_path):
    with switch() as wires, Cluster(tmp_path, wide, wires) as cluster:
        cluster.wait_ready(READY_SECONDS)
        with attach(wide.model, cluster.address, transport="tcp", timeout_seconds=HANG_SECONDS) as lora:
            with lora.adapters(wide.names):
                generate(wide.model, wide.batch, 2)  # from here on all weights are loaded
                found = measured(wide, cluster.at)
    for what, expected in planned(wide).items():
        rounds = found[what] / expected
        ratio = np.median(rounds, 0)
        print(f"{what} token: {ratio.round(4)} of the planner's bytes to shards and back; {rounds.round(4).tolist()}")
        assert (abs(ratio - 1) <= BAR).all(), (what, found[what], expected)
