"""A placement has a generation: what the controller tells of it, and what it accepts."""

import dataclasses

import pytest

from lora_server.control.controller import Controller
from lora_server.control.reports.status import status
from lora_server.daemon.kept import Kept
from lora_server.errors import LeaseError
from tests.support.controllers import ToldShard, make_controller


def of_generation(generation):
    controller = Controller(dataclasses.replace(make_controller().agreement, generation=generation))
    assert controller.agreement.placement.generation == generation
    return controller


def test_shards_clients_and_operators_are_told_the_generation():
    controller, memory = of_generation(2), Kept()
    shard = ToldShard(controller, memory)
    lease, _ = controller.clients.join("engine")
    assert memory.claim.generation == 2 and memory.grants[lease.client].generation == 2
    assert status(controller).generation == 2
    shard.close()


def test_a_claim_of_another_generation_is_refused():
    memory = Kept()
    ToldShard(of_generation(2), memory).close()
    with pytest.raises(LeaseError, match="got a claim of placement generation 2, expected 1"):
        ToldShard(of_generation(1), memory)
    ToldShard(of_generation(2), memory).close()
    ToldShard(of_generation(1), Kept()).close()
